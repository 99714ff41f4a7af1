"""The contract of a Buffer, in scenarios that run on all ranks of a group.

They check that payloads are bit-equal, that slots have the promised order, that undefined memory is
not read, that sums agree with float64, that operations are independent, and that faults raise on
every rank and leave the group usable.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from types import MappingProxyType

import torch
from torch import Tensor

from epcomm.buffers.base import Buffer, Dispatched
from epcomm.buffers.call_shape import call_shape
from epcomm.buffers.sizes import max_slots_of
from epcomm.calls.call import DispatchCall
from epcomm.config import Mode
from epcomm.errors import CapacityError, EPError, HandleError, ShapeError
from epcomm.group import EPGroup
from epcomm.ops.masked_entries import fill_masked_entries
from epcomm.protocol import BatchFlags
from epcomm.quantization import arrange_scales, dequantize, quantize
from epcomm.registry import buffer_class
from epcomm.spec import BufferCaps, BufferSpec, HostLayout
from epcomm.testing.data import (
    BatchSpec,
    RankBatch,
    crowded_ids,
    holed_ids,
    last_expert_ids,
    make_batch,
    no_ids,
    random_ids,
    repeated_ids,
)
from epcomm.testing.oracle import relative_error
from epcomm.testing.poison import poison_rows, poisoned_memory
from epcomm.testing.slot_oracle import (
    ExpectedSlot,
    as_received,
    expected_slots,
    flat_rows,
    row_bits,
    rows_of_slots,
    slot_positions,
)
from epcomm.types import (
    Layout,
    RowsPer,
    ScaleLayout,
    WireFormat,
    WireTensor,
    align_up,
    sum_dtype,
)

# The row scalar for experts of other ranks, which is added to that of the expert's own rank.
_OTHER_SCALAR = 0.5

# A float32 sum of at most K * W terms of order one has an error of a few 2**-23 for each term.
SUM_TOLERANCE = 1e-5


@dataclass(frozen=True, kw_only=True)
class BufferEnv:
    """The environment of a scenario.

    group: the ranks.   backend: registry name.   mode: the mode that the buffer serves.
    wire: wire format of dispatch; None: the dtype of the batch.
    hidden_size, dtype: those of all batches, for a backend that supports only some.
    token_multiple: max_tokens_per_rank is a multiple of it; None: set only for static sizes.
    poisons: fill uninitialised memory with NaN; False if a package does not permit it.
    fills_batches: the backend sends entries of -1 to an expert that the row does not use, with
        weight 0, and one token of weight 0 from a rank without tokens.
    hosts: the hosts of the ranks, if there are several; otherwise None.
    """

    group: EPGroup
    backend: str
    mode: Mode
    wire: WireFormat | None = None
    hidden_size: int | None = None
    dtype: torch.dtype | None = None
    token_multiple: int | None = None
    poisons: bool = True
    fills_batches: bool = False
    hosts: HostLayout | None = None

    @property
    def caps(self) -> BufferCaps:
        """The capabilities of the backend."""
        return buffer_class(self.backend).caps(self.mode)

    def adapted(self, spec: BatchSpec) -> BatchSpec:
        """Return `spec` with a hidden size and dtype that the backend supports."""
        return replace(
            spec,
            hidden_size=self.hidden_size or spec.hidden_size,
            dtype=self.dtype or spec.dtype,
        )

    @property
    def is_static(self) -> bool:
        """Whether sizes are fixed and check() raises the faults."""
        return self.caps.is_static

    def open_comparing(self, spec: BatchSpec, **changes: int) -> Buffer:
        """Open the buffer for batches of `spec` such that a bad call raises on all ranks."""
        return self.open(spec, compares_calls=not self.caps.reports_faults, **changes)

    def open(self, spec: BatchSpec, **changes: int) -> Buffer:
        """Open the buffer for batches of `spec`."""
        return self.group.open_buffer(self.backend, replace(self.buffer_spec(spec), **changes))

    def dispatch_format(self, spec: BatchSpec) -> WireFormat:
        """Return the wire format of batches of `spec` in dispatch."""
        return self.wire or WireFormat.of(spec.dtype)

    def sent(self, batch: RankBatch, spec: BatchSpec) -> WireTensor:
        """Return the tokens of a batch in the wire format of dispatch."""
        return quantize(batch.x, self.dispatch_format(spec))

    def arriving(self, batch: RankBatch, spec: BatchSpec) -> Tensor:
        """Return the tokens as experts receive them, [T, H], float64."""
        return dequantize(self.sent(batch, spec), sum_dtype(spec.dtype)).double()

    def buffer_spec(self, spec: BatchSpec) -> BufferSpec:
        """Return the BufferSpec of a buffer for batches of `spec`."""
        wire, world_size = WireFormat.of(spec.dtype), self.group.world_size
        most_tokens = max(spec.tokens_of_rank(rank, world_size) for rank in range(world_size))
        return BufferSpec(
            hidden_size=spec.hidden_size,
            top_k=spec.num_topk(self.group.world_size),
            num_local_experts=spec.num_local_experts,
            dispatch_format=self.dispatch_format(spec),
            hidden_format=wire,
            # One more than the batches have, so that padding rows could be mistaken for tokens.
            max_tokens_per_rank=align_up(most_tokens + 1, self.token_multiple or 1)
            if self.is_static or self.token_multiple
            else None,
            hosts=self.hosts,
        )

    def batches(self, spec: BatchSpec, number: int = 0) -> list[RankBatch]:
        """Make batch `number` of all ranks."""
        world_size = self.group.world_size
        batches = [
            make_batch(spec, rank, world_size, number=number).to(self.group.device)
            for rank in range(world_size)
        ]
        if not self.fills_batches:
            return batches
        # The expected batches have the same substitutes for masked entries as the backend.
        return [_filled(batch, spec.num_experts(world_size)) for batch in batches]


def _filled(batch: RankBatch, num_experts: int) -> RankBatch:
    ids, weights = fill_masked_entries(batch.topk_ids, batch.topk_weights, num_experts)
    return replace(batch, topk_ids=ids, topk_weights=weights)


def _never_empty(batch: RankBatch, rank: int, env: BufferEnv, spec: BatchSpec) -> RankBatch:
    """Return the batch of a rank, or for an empty one the token of BufferEnv.fills_batches."""
    if len(batch.x):
        return batch
    top_k = batch.topk_ids.shape[1]
    num_experts = spec.num_experts(env.group.world_size)
    experts = [(rank * spec.num_local_experts + k) % num_experts for k in range(top_k)]
    return RankBatch(
        x=batch.x.new_ones(1, spec.hidden_size),
        topk_ids=batch.topk_ids.new_tensor([experts]),
        topk_weights=batch.topk_weights.new_zeros(1, top_k),
        dy=batch.dy.new_zeros(1, spec.hidden_size),
    )


def uneven(rank: int, world_size: int) -> int:
    """Return 3, 4, 5, ... tokens for ranks 0, 1, 2, ..."""
    return 3 + rank


def none_on_rank_1(rank: int, world_size: int) -> int:
    """Return no token for rank 1, or a single rank, and 4 for other ranks."""
    return 0 if rank == min(1, world_size - 1) else 4


def none_on_rank_0(rank: int, world_size: int) -> int:
    """Return no token for rank 0 of several, and 6 for other ranks."""
    return 0 if rank == 0 and world_size > 1 else 6


def none(rank: int, world_size: int) -> int:
    """Return no token for any rank."""
    return 0


def one_in_total(rank: int, world_size: int) -> int:
    """Return one token for the last rank, and none for others."""
    return int(rank == world_size - 1)


BATCH_SPECS: Mapping[str, BatchSpec] = MappingProxyType(
    {
        "uneven": BatchSpec(tokens_of_rank=uneven, choose_ids=random_ids, top_k=3),
        "empty_rank": BatchSpec(tokens_of_rank=none_on_rank_1, choose_ids=random_ids),
        "all_empty": BatchSpec(tokens_of_rank=none, choose_ids=random_ids),
        # On 2 ranks, both receive it.
        "one_token": BatchSpec(tokens_of_rank=one_in_total, choose_ids=random_ids, seed=3),
        "one_expert": BatchSpec(tokens_of_rank=uneven, choose_ids=last_expert_ids),
        "holes": BatchSpec(tokens_of_rank=uneven, choose_ids=holed_ids, top_k=4),
        "nowhere": BatchSpec(tokens_of_rank=uneven, choose_ids=no_ids),
        "top_1": BatchSpec(tokens_of_rank=uneven, choose_ids=random_ids, top_k=1),
        "bf16": BatchSpec(tokens_of_rank=uneven, choose_ids=random_ids, dtype=torch.bfloat16),
        "fp16": BatchSpec(tokens_of_rank=uneven, choose_ids=random_ids, dtype=torch.float16),
        "odd_hidden": BatchSpec(tokens_of_rank=uneven, choose_ids=random_ids, hidden_size=37),
        "many_experts": BatchSpec(
            tokens_of_rank=uneven, choose_ids=random_ids, num_local_experts=7, top_k=6
        ),
    }
)


# The batches of scenarios that do not depend on them.
PLAIN = BatchSpec(tokens_of_rank=uneven, choose_ids=random_ids)


def check_batch(env: BufferEnv, spec: BatchSpec, expert_alignment: int = 1) -> None:
    """Check all rows and slots of a dispatch, every way to combine, and a cached dispatch."""
    spec = env.adapted(spec)
    buffer = env.open(spec, expert_alignment=expert_alignment)
    batches = env.batches(spec)
    with poisoned_memory() if env.poisons else nullcontext():
        out = dispatch(env, buffer, batches[env.group.rank], spec)
        slots = check_slots(env, out, batches, spec, expert_alignment)
        check_combine(env, buffer, out, batches, spec)
        if env.caps.trainable:
            check_cached_dispatch(env, buffer, out, batches, slots)


def check_wire_tensors(env: BufferEnv, spec: BatchSpec) -> None:
    """Check rows, scales and sums of a dispatch of rows that are already quantised.

    Ranks use different layouts of memory: wider rows, or scales by column, packed if possible. The
    last rank passes rows that the buffer quantises.
    """
    spec, rank = env.adapted(spec), env.group.rank
    buffer, batches = env.open(spec), env.batches(spec)
    for turn in range(2):
        call = make_call(env, batches[rank], spec)
        if rank + turn < env.group.world_size:
            sent = env.sent(batches[rank], spec)
            call = replace(call, hidden_states=_with_gaps(sent, by_column=(rank + turn) % 2 == 0))
        with poisoned_memory() if env.poisons else nullcontext():
            out = buffer.dispatch(call)
            check_slots(env, out, batches, spec, 1)
            check_combine(env, buffer, out, batches, spec, once=True)


def _with_gaps(wire: WireTensor, *, by_column: bool) -> WireTensor:
    """Return a copy with gaps between rows; scales by column, or with gaps too."""
    scales, layout = wire.scales, None
    if scales is not None:
        is_byte = scales.itemsize == 1
        layout = ScaleLayout(column_major=True, alignment=4, packed=is_byte) if by_column else None
        scales = arrange_scales(scales, layout) if layout else _in_wider_rows(scales)
    return replace(wire, data=_in_wider_rows(wire.data), scales=scales, scale_layout=layout)


def _in_wider_rows(rows: Tensor) -> Tensor:
    """Return a copy of rows [N, n] in the first n of n + 3 columns; the others are NaN."""
    num_rows, width = rows.shape
    memory = torch.full(
        (num_rows, (width + 3) * rows.itemsize), 0xFF, dtype=torch.uint8, device=rows.device
    )
    wider = memory.view(rows.dtype)[:, :width]
    wider.copy_(rows)
    return wider


def make_call(
    env: BufferEnv,
    batch: RankBatch,
    spec: BatchSpec,
    error: EPError | None = None,
    *,
    flags: BatchFlags = BatchFlags.NONE,
) -> DispatchCall:
    """Return the call of one rank, by default without gradients; with an error, without tokens."""
    num_tokens = batch.x.shape[0] if error is None else 0
    return DispatchCall(
        hidden_states=batch.x[:num_tokens],
        topk_ids=batch.topk_ids[:num_tokens],
        topk_weights=batch.topk_weights[:num_tokens],
        flags=flags,
        error=error,
    )


def dispatch(env: BufferEnv, buffer: Buffer, batch: RankBatch, spec: BatchSpec) -> Dispatched:
    """Dispatch the batch of one rank without gradients."""
    return buffer.dispatch(make_call(env, batch, spec))


@dataclass(frozen=True, kw_only=True)
class PlacedSlot:
    """A slot and its position."""

    slot: ExpectedSlot
    position: int


def check_slots(
    env: BufferEnv,
    out: Dispatched,
    batches: list[RankBatch],
    spec: BatchSpec,
    expert_alignment: int,
) -> list[PlacedSlot]:
    """Check order, counts, payload and weights of the received slots; return them."""
    num_local, index = spec.num_local_experts, out.index
    if env.fills_batches:
        batches = [_never_empty(batch, rank, env, spec) for rank, batch in enumerate(batches)]
    order = buffer_class(env.backend).source_order(env.buffer_spec(spec), len(batches))
    slots = expected_slots(batches, env.group.rank, num_local, order)
    is_masked = env.caps.layout is Layout.MASKED
    capacity = out.rows.data.shape[1] if is_masked else None
    positions = slot_positions(slots, num_local, expert_alignment, capacity)
    rows = flat_rows(out, env.caps.layout)
    sent = [env.sent(batch, spec) for batch in batches]
    counts = [sum(s.expert == e for s in slots) for e in range(num_local)]
    _expect_equal(env, "num_tokens_per_expert", index.num_tokens_per_expert.tolist(), counts)
    rests = [start % expert_alignment for start in index.first_slot.tolist()]
    _expect_equal(env, "first_slot modulo expert_alignment", rests, [0] * (num_local + 1))
    if index.host_num_tokens_per_expert is not None:
        host_counts = list(index.host_num_tokens_per_expert)
        _expect_equal(env, "host_num_tokens_per_expert", host_counts, counts)
    # Packed scales have the same bytes, so their dtype and width are compared too.
    _expect_equal(env, "dtype and width of scales", _scale_kind(rows), _scale_kind(sent[0]))
    row_of_slot = rows_of_slots(out, rows)
    received = [row_bits(rows, int(row_of_slot[position])) for position in positions]
    if not env.caps.ordered:
        slots = as_received(slots, received, sent)
    for slot, position, bits in zip(slots, positions, received, strict=True):
        where = f"slot {position} ({slot})"
        _expect_equal(env, where, bits, row_bits(sent[slot.source], slot.token))
        if out.slot_weights is not None:
            weight = batches[slot.source].topk_weights[slot.token, slot.k].item()
            _expect_equal(env, f"weight of {where}", out.slot_weights[position].item(), weight)
    if index.row_of_slot is not None:
        padding = sorted(set(range(len(row_of_slot))) - set(positions))
        of_padding = [int(row_of_slot[s]) for s in padding]
        _expect_equal(env, "padding", of_padding, [-1] * len(padding))
    return [PlacedSlot(slot=s, position=p) for s, p in zip(slots, positions, strict=True)]


def check_combine(
    env: BufferEnv,
    buffer: Buffer,
    out: Dispatched,
    batches: list[RankBatch],
    spec: BatchSpec,
    *,
    once: bool = False,
) -> None:
    """Check the sums of every way to combine, with experts that multiply by their number + 1.

    once: only combine in the first way.
    """
    caps = env.caps
    ways: list[Callable[[_Computed], None]] = [_combine_with_weights]
    if caps.trainable:
        ways.append(_combine_weighted_slots)
    if caps.trainable or out.index.slots_of_row is not None:
        ways.append(_combine_rows)
    for number, way in enumerate(ways):
        if number and once:
            return
        way(_compute(env, buffer, out, batches, spec))


@dataclass(frozen=True, kw_only=True, eq=False)
class _Computed:
    """A batch that the experts have computed.

    results: [C, H], NaN for padding.   scale: [C], the factor of the expert of each slot.
    arriving: [T, H], float64, this rank's tokens as experts receive them.
    factor: [T, K], float64, the factors of the experts of each token.
    """

    env: BufferEnv
    buffer: Buffer
    out: Dispatched
    batch: RankBatch
    spec: BatchSpec
    results: Tensor
    scale: Tensor
    arriving: Tensor
    factor: Tensor

    @property
    def weighted_sums(self) -> Tensor:
        """The expected y, [T, H], float64."""
        return self.arriving * (self.factor * self.batch.topk_weights.double()).sum(1, keepdim=True)

    def expect(self, what: str, actual: Tensor, expected: Tensor) -> None:
        """Fail unless the sums agree within the tolerance of the roundings."""
        _expect_close(self.env, what, actual, expected, _sum_tolerance(self.env, self.spec))


def _compute(
    env: BufferEnv, buffer: Buffer, out: Dispatched, batches: list[RankBatch], spec: BatchSpec
) -> _Computed:
    batch = batches[env.group.rank]
    received = flat_rows(out, env.caps.layout)
    row_of_slot = rows_of_slots(out, received)
    scale = _slot_scales(env, out, spec, len(row_of_slot))
    used = scale > 0
    values = dequantize(received, sum_dtype(spec.dtype))
    rows = values[row_of_slot.clamp(min=0).long()] if used.numel() else values[:0]
    return _Computed(
        env=env,
        buffer=buffer,
        out=out,
        batch=batch,
        spec=spec,
        results=poison_rows((rows * scale.unsqueeze(1)).to(spec.dtype), used),
        scale=scale,
        arriving=env.arriving(batch, spec),
        factor=(batch.topk_ids + 1).clamp(min=0).double(),
    )


def _combine_with_weights(done: _Computed) -> None:
    y = done.buffer.combine(
        done.results,
        done.out.exchange_plan,
        rows_per=RowsPer.SLOT,
        slot_weights=done.out.slot_weights,
    )[0]
    done.expect("combine with weights", y, done.weighted_sums)


def _combine_weighted_slots(done: _Computed) -> None:
    assert done.out.slot_weights is not None, "weights travel with the rows"
    weighted = (done.results * done.out.slot_weights.unsqueeze(1)).to(done.spec.dtype)
    weighted = poison_rows(weighted, done.scale > 0)
    y = done.buffer.combine(weighted, done.out.exchange_plan, rows_per=RowsPer.SLOT)[0]
    done.expect("combine of weighted slots", y, done.weighted_sums)
    if y.dtype != done.spec.dtype:
        _fail(done.env, f"combine returned {y.dtype}, expected {done.spec.dtype}")


def _combine_rows(done: _Computed) -> None:
    per_row, scalars = _reduce_to_rows(done.out, done.results, done.scale)
    plain = done.arriving * done.factor.sum(1, keepdim=True)
    y, returned_scalars = done.buffer.combine(
        per_row,
        done.out.exchange_plan,
        rows_per=RowsPer.ROW,
        row_scalars=scalars if done.env.caps.trainable else None,
    )
    done.expect("combine of rows", y, plain)
    if done.env.caps.trainable:
        assert returned_scalars is not None, "row scalars come back"
        ids = done.batch.topk_ids
        owners = torch.where(ids < 0, -1, ids // done.spec.num_local_experts)
        ranks = range(done.env.group.world_size)
        num_ranks = torch.stack([(owners == rank).any(1) for rank in ranks]).sum(0)
        num_others = num_ranks.unsqueeze(1) - (ids >= 0).int()
        expected = done.factor.float()
        if done.buffer.sums_row_scalars:
            expected = expected + _OTHER_SCALAR * num_others
        _expect_equal(done.env, "scalars", returned_scalars.tolist(), expected.tolist())


def check_cached_dispatch(
    env: BufferEnv,
    buffer: Buffer,
    out: Dispatched,
    batches: list[RankBatch],
    slots: list[PlacedSlot],
) -> None:
    """Check each slot of two cached dispatches along the exchange plan."""
    row_of_slot = rows_of_slots(out, out.rows)
    for factor in (2, -3):
        rows = buffer.cached_dispatch(batches[env.group.rank].x * factor, out.exchange_plan)
        for placed in slots:
            slot = placed.slot
            expected = (batches[slot.source].x[slot.token] * factor).tolist()
            row = rows[int(row_of_slot[placed.position])].tolist()
            _expect_equal(env, f"slot of a cached dispatch {placed.position}", row, expected)


def check_operations_stand_alone(env: BufferEnv) -> None:
    """Check batches that are not combined, combined in any order, and combined repeatedly."""
    # With masked entries, because on two ranks three of four experts would send each token to both.
    spec, most = env.adapted(BATCH_SPECS["holes"]), env.caps.batches_in_flight
    if most is not None:
        _check_batches_in_flight(env, env.open(spec), spec, most)
    if most is not None and not env.caps.trainable:
        return
    buffer = env.open(spec)
    # Without gradients rows may be views that a later dispatch overwrites.
    flags = BatchFlags.GRAD_ENABLED if env.caps.trainable else BatchFlags.NONE
    outs, all_batches = [], []
    for number in range(4):
        all_batches.append(env.batches(spec, number))
        mine = all_batches[-1][env.group.rank]
        outs.append(buffer.dispatch(make_call(env, mine, spec, flags=flags)))
    for number in (2, 0, 0, 3):
        check_slots(env, outs[number], all_batches[number], spec, 1)
        check_combine(env, buffer, outs[number], all_batches[number], spec)
    if env.caps.ordered:
        _check_sums_repeat(_compute(env, buffer, outs[1], all_batches[1], spec))


def _check_sums_repeat(done: _Computed) -> None:
    """Check that sums of the same rows are bit-equal; from three ranks on, their order matters."""
    sums = [
        done.buffer.combine(done.results, done.out.exchange_plan, rows_per=RowsPer.SLOT)[0].clone()
        for _ in range(2)
    ]
    if not torch.equal(*(y.view(torch.uint8) for y in sums)):
        _fail(done.env, "a second combine of the same rows returned other sums")


def check_more_in_flight(env: BufferEnv) -> None:
    """Check one more batch in flight than by default, and only one, if callers may choose."""
    spec, most = env.adapted(BATCH_SPECS["holes"]), env.caps.batches_in_flight
    if most is None or not tests_anything("more_in_flight", env.caps):
        return
    for number in (most + 1, 1):
        buffer = env.open(spec, batches_in_flight=number)
        _check_batches_in_flight(env, buffer, spec, number)


def _check_batches_in_flight(env: BufferEnv, buffer: Buffer, spec: BatchSpec, most: int) -> None:
    """Check that one batch more than `most` ends the first batch, and no other."""
    outs, all_batches = [], []
    for number in range(most + 1):
        all_batches.append(env.batches(spec, number))
        outs.append(dispatch(env, buffer, all_batches[-1][env.group.rank], spec))
        if number == most - 1:
            for out, batches in zip(outs, all_batches, strict=True):
                check_slots(env, out, batches, spec, 1)
    error = _raised(lambda: _finish(env, buffer, outs[0], spec))
    if not isinstance(error, HandleError) or f"{most} may be in flight" not in str(error):
        _fail(env, f"combine of an ended batch raised {error!r}, expected HandleError with {most}")
    if env.is_static:
        # check() also raises the refusal of this rank.
        _raised(buffer.check)
    for out, batches in zip(outs[1:], all_batches[1:], strict=True):
        check_slots(env, out, batches, spec, 1)
        check_combine(env, buffer, out, batches, spec)


def check_faults(env: BufferEnv) -> None:
    """Check that all ranks name the rank of a bad call, and that the next call works."""
    spec, faulty = env.adapted(PLAIN), env.group.world_size - 1
    is_faulty = env.group.rank == faulty
    buffer = env.open_comparing(spec)
    for own_error in (CapacityError("too many tokens here"), ShapeError("a bad tensor here")):
        mine = env.batches(spec)[env.group.rank]
        call = make_call(env, mine, spec, error=own_error if is_faulty else None)
        wanted = str(own_error) if is_faulty else f"rank {faulty}"
        _expect_fault(env, buffer, call, type(own_error), wanted, spec)
        check_batch(env, spec)


def check_ids_out_of_range(env: BufferEnv) -> None:
    """Check that an id of P or -2 on one rank raises ShapeError on every rank."""
    spec = env.adapted(PLAIN)
    buffer = env.open_comparing(spec)
    for bad_id in (spec.num_experts(env.group.world_size), -2):
        mine = env.batches(spec)[env.group.rank]
        if env.group.rank == 0:
            mine.topk_ids[-1, -1] = bad_id
        has_value = env.group.rank == 0 and not env.is_static
        wanted = str(bad_id) if has_value else "rank 0"
        _expect_fault(env, buffer, make_call(env, mine, spec), ShapeError, wanted, spec)
        check_batch(env, spec)


def check_repeated_ids(env: BufferEnv) -> None:
    """Check that each entry of a repeated expert is a slot, or that every rank raises.

    Static sizes that suffice for distinct ids overflow if all entries name one expert and there are
    fewer local experts than entries. Then every rank must raise, and nothing may be written beyond
    the index.
    """
    spec = env.adapted(BatchSpec(tokens_of_rank=uneven, choose_ids=repeated_ids, top_k=4))
    if buffer_class(env.backend).needs_distinct_ids:
        call = make_call(env, env.batches(spec)[env.group.rank], spec)
        _expect_fault(env, env.open_comparing(spec), call, ShapeError, "twice", spec)
        check_batch(env, env.adapted(PLAIN))
        return
    check_batch(env, spec)
    crowded = replace(spec, choose_ids=crowded_ids)
    batches, made = env.batches(crowded), env.buffer_spec(crowded)
    required = _slots_needed(batches, 0, crowded.num_local_experts, 1)
    num_rows = (made.max_tokens_per_rank or 0) * env.group.world_size
    if not env.is_static or required <= max_slots_of(made, num_rows):
        check_batch(env, crowded)
        return
    call = make_call(env, batches[env.group.rank], crowded)
    buffer = env.open_comparing(crowded)
    for _ in range(2):
        _expect_fault(env, buffer, call, CapacityError, f"up to {required} slots", crowded)
    check_batch(env, spec)


def check_combine_faults(env: BufferEnv) -> None:
    """Check that all ranks name the rank of a refused combine, and that the next call works."""
    spec, faulty = env.adapted(PLAIN), env.group.world_size - 1
    is_faulty = env.group.rank == faulty
    buffer, mine = env.open(spec, compares_calls=True), env.batches(spec)[env.group.rank]
    # Ranks that compare their calls raise a refusal immediately.
    waits_for_check = env.is_static and env.caps.reports_faults
    for own_error in (HandleError("a spent handle here"), ShapeError("bad rows here")):
        out = dispatch(env, buffer, mine, spec)

        def run(out: Dispatched = out, own_error: EPError = own_error) -> None:
            if is_faulty:
                no_rows = torch.empty(
                    0, spec.hidden_size, dtype=spec.dtype, device=env.group.device
                )
                buffer.combine(no_rows, None, rows_per=RowsPer.ROW, error=own_error)
                return
            y = _finish(env, buffer, out, spec)
            if waits_for_check and not y.isnan().all():
                _fail(env, "y of a refused combine is not NaN everywhere")

        error = _raised(run)
        if waits_for_check:
            error = _raised(buffer.check)
        wanted = str(own_error) if is_faulty else f"rank {faulty}"
        if type(error) is not type(own_error) or wanted not in str(error):
            _fail(env, f"expected {type(own_error).__name__} with {wanted!r}, got {error!r}")
        check_batch(env, spec)


def check_budget(env: BufferEnv) -> None:
    """Check that C slots suffice, and that with C - 1 every rank raises the required size."""
    if not tests_anything("budget", env.caps):
        return
    for name, alignment in (("uneven", 1), ("one_expert", 1), ("holes", 4)):
        spec = env.adapted(BATCH_SPECS[name])
        batches, world_size = env.batches(spec), env.group.world_size
        required = max(
            _slots_needed(batches, rank, spec.num_local_experts, alignment)
            for rank in range(world_size)
        )
        exact = env.open(spec, expert_alignment=alignment, max_recv_slots=required)
        out = dispatch(env, exact, batches[env.group.rank], spec)
        check_slots(env, out, batches, spec, alignment)
        check_combine(env, exact, out, batches, spec)
        exact.check()
        if required > 1:
            small = env.open_comparing(
                spec, expert_alignment=alignment, max_recv_slots=required - 1
            )
            call = make_call(env, batches[env.group.rank], spec)
            wanted = f"raise max_recv_slots to {required}"
            _expect_fault(env, small, call, CapacityError, wanted, spec)


def _slots_needed(batches: list[RankBatch], rank: int, num_local: int, alignment: int) -> int:
    """Return the slots of one rank, with each expert rounded up to the alignment."""
    total = 0
    for expert in range(rank * num_local, (rank + 1) * num_local):
        count = sum(int((batch.topk_ids == expert).sum()) for batch in batches)
        total += -(-count // alignment) * alignment
    return total


def _finish(env: BufferEnv, buffer: Buffer, out: Dispatched, spec: BatchSpec) -> Tensor:
    """Combine zeros for each received row or slot; return y."""
    has_rows = out.index.slots_of_row is not None
    num_rows = flat_rows(out, env.caps.layout).data.shape[0]
    zeros = torch.zeros(num_rows, spec.hidden_size, dtype=spec.dtype, device=env.group.device)
    rows_per = RowsPer.ROW if has_rows else RowsPer.SLOT
    return buffer.combine(zeros, out.exchange_plan, rows_per=rows_per)[0]


def _expect_fault(
    env: BufferEnv,
    buffer: Buffer,
    call: DispatchCall,
    kind: type[EPError],
    wanted: str,
    spec: BatchSpec,
) -> None:
    """Check that the call, or with static sizes check(), raises `kind` with `wanted` once."""
    if env.is_static:
        y = _finish(env, buffer, buffer.dispatch(call), spec)
        if not y.isnan().all():
            _fail(env, "y of a refused call is not NaN everywhere")
        error = _raised(buffer.check)
        again = _raised(buffer.check)
        if again is not None:
            _fail(env, f"check() raised a fault twice: {again!r}")
    else:
        error = _raised(lambda: buffer.dispatch(call))
    if type(error) is not kind or wanted not in str(error):
        _fail(env, f"expected {kind.__name__} with {wanted!r}, got {error!r}")


def check_traffic(env: BufferEnv) -> None:
    """Check that traffic() equals the prediction of wire_bytes()."""
    rank, spec = env.group.rank, env.adapted(BATCH_SPECS["holes"])
    buffer, batches = env.open(spec), env.batches(spec)
    before = buffer.traffic()
    out = dispatch(env, buffer, batches[rank], spec)
    _finish(env, buffer, out, spec)
    shape = call_shape(
        [batch.topk_ids for batch in batches],
        rank,
        num_local_experts=spec.num_local_experts,
        hosts=env.hosts,
    )
    promised = before + type(buffer).wire_bytes(env.buffer_spec(spec), shape)
    _expect_equal(env, "traffic", buffer.traffic(), promised)


SCENARIOS: Mapping[str, Callable[[BufferEnv], None]] = MappingProxyType(
    {
        **{
            name: (lambda env, spec=spec: check_batch(env, spec))
            for name, spec in BATCH_SPECS.items()
        },
        # On up to 4 ranks, some expert has more slots than the alignment and every one has some; in
        # the second scenario some expert has none.
        "aligned": lambda env: check_batch(env, replace(PLAIN, seed=1), expert_alignment=4),
        "aligned_holes": lambda env: check_batch(
            env, replace(PLAIN, choose_ids=holed_ids, seed=29), expert_alignment=8
        ),
        "stand_alone": check_operations_stand_alone,
        "more_in_flight": check_more_in_flight,
        "faults": check_faults,
        "combine_faults": check_combine_faults,
        "ids_out_of_range": check_ids_out_of_range,
        "repeated_ids": check_repeated_ids,
        "budget": check_budget,
        "traffic": check_traffic,
    }
)


def tests_anything(name: str, caps: BufferCaps) -> bool:
    """Return whether a scenario tests anything of a backend with `caps`."""
    if name == "more_in_flight":
        return caps.batches_in_flight is not None and caps.batches_on_request
    if name == "budget":
        return caps.is_static and caps.has_slot_budget
    return True


def run_scenario(name: str, env: BufferEnv) -> None:
    """Run one scenario on this rank; all ranks of the group run it.

    Raises:
        AssertionError: the buffer violates its contract; the message has rank and value.
    """
    # Checkpointing combines the rows of one dispatch with the gradients of another.
    assert env.caps.ordered or not env.caps.trainable, "a trainable buffer has ordered rows"
    SCENARIOS[name](env)


def _scale_kind(rows: WireTensor) -> tuple[torch.dtype, int] | None:
    return None if rows.scales is None else (rows.scales.dtype, rows.scales.shape[-1])


def _slot_scales(env: BufferEnv, out: Dispatched, spec: BatchSpec, num_slots: int) -> Tensor:
    """Return physical expert + 1 of each slot, [C], 0 for padding."""
    scales = torch.zeros(num_slots, dtype=torch.float32, device=env.group.device)
    starts, counts = out.index.first_slot.tolist(), out.index.num_tokens_per_expert.tolist()
    for expert, count in enumerate(counts):
        number = env.group.rank * spec.num_local_experts + expert + 1
        scales[starts[expert] : starts[expert] + count] = number
    return scales


def _reduce_to_rows(out: Dispatched, results: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sum of the slots of each row, NaN for a row without slots, and row scalars.

    A scalar is the scale of its slot, or _OTHER_SCALAR for an expert of another rank.
    """
    table = out.index.slots_of_row
    assert table is not None, "this suite reads rows through the index"
    num_rows, hidden_size = out.rows.data.shape
    rows = results.new_full((num_rows, hidden_size), float("nan"))
    made = sum_dtype(results.dtype)
    scalars = scale.new_zeros(table.shape, dtype=made)
    for row, slots in enumerate(table.tolist()):
        mine = [slot for slot in slots if slot >= 0]
        if mine:
            rows[row] = results[mine].to(made).sum(0)
            scalars[row] = _OTHER_SCALAR
        for k, slot in enumerate(slots):
            if slot >= 0:
                scalars[row, k] = scale[slot]
    return rows, scalars


def _sum_tolerance(env: BufferEnv, spec: BatchSpec) -> float:
    """Return the tolerance of four roundings: result, weighted result, row and y.

    With several hosts, the sum of a host is rounded too.
    """
    finer = torch.finfo(sum_dtype(spec.dtype)).eps / torch.finfo(torch.float32).eps
    roundings = 4 if env.hosts is None else 5
    return SUM_TOLERANCE * finer + roundings * torch.finfo(spec.dtype).eps


def _raised(function: Callable[[], object]) -> EPError | None:
    try:
        function()
    except EPError as error:
        return error
    return None


def _expect_equal(env: BufferEnv, what: str, actual: object, expected: object) -> None:
    if actual != expected:
        _fail(env, f"{what} is {actual}, expected {expected}")


def _expect_close(
    env: BufferEnv, what: str, actual: Tensor, expected: Tensor, tolerance: float
) -> None:
    # The shapes are compared first, because one row would broadcast.
    _expect_equal(env, f"shape of {what}", list(actual.shape), list(expected.shape))
    error = relative_error(actual, expected)
    if not error <= tolerance:
        _fail(env, f"{what} has an error of {error:.3g}, allowed {tolerance:.3g}")


def _fail(env: BufferEnv, message: str) -> None:
    raise AssertionError(f"{env.backend}, {env.group.where}: {message}")
