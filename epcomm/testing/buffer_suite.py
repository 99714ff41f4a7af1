"""The contract of a Buffer, in scenarios that run on all ranks of a group.

They check that payloads are bit-equal, that slots have the promised order, that undefined memory is
not read, that sums agree with float64, that operations are independent, and that faults raise on
every rank and leave the group usable.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import NoReturn, Self

import torch
from torch import Tensor

from epcomm.buffers.base import Buffer, Dispatched
from epcomm.buffers.sizes import CallShape, max_slots_of
from epcomm.calls.call import DispatchCall
from epcomm.config import Mode
from epcomm.errors import CapacityError, EPError, HandleError, ShapeError
from epcomm.group import EPGroup
from epcomm.ops.masked_entries import fill_masked_entries
from epcomm.protocol import BatchFlags
from epcomm.quantization import ROW_ERRORS, arrange_scales, dequantize, quantize
from epcomm.registry import buffer_class
from epcomm.spec import BufferCaps, BufferSpec, HostLayout
from epcomm.testing import slot_oracle
from epcomm.testing.data import (
    BatchSpec,
    RankBatch,
    holed_ids,
    last_expert_ids,
    make_batch,
    only_id,
    random_ids,
    repeated_ids,
)
from epcomm.testing.oracle import relative_error
from epcomm.testing.poison import poison_rows, poisoned_memory
from epcomm.types import Layout, RowsPer, ScaleLayout, WireFormat, WireTensor, align_up, sum_dtype

# The row scalar for experts of other ranks, which is added to that of the expert's own rank.
_OTHER_SCALAR = 0.5

# A float32 sum of at most K * W terms of order one has an error of a few 2**-23 for each term.
SUM_TOLERANCE = 1e-5


@dataclass(frozen=True, kw_only=True)
class SuiteEnv:
    """The environment of a scenario, for a backend that supports only some batches.

    group: the ranks.   wire: wire format of dispatch; None: the dtype of the batch.
    hidden_size, dtype: those of all batches; None: those of each batch.
    poisons: fill uninitialised memory with NaN; False if a package does not permit it.
    """

    group: EPGroup
    wire: WireFormat | None = None
    hidden_size: int | None = None
    dtype: torch.dtype | None = None
    poisons: bool = True

    def adapted(self, spec: BatchSpec) -> BatchSpec:
        """Return `spec` with a hidden size and dtype that the backend supports."""
        return replace(
            spec, hidden_size=self.hidden_size or spec.hidden_size, dtype=self.dtype or spec.dtype
        )

    def made_batches(self, spec: BatchSpec, number: int, num_sources: int) -> list[RankBatch]:
        """Make batch `number` of the first num_sources ranks."""
        world_size, device = self.group.world_size, self.group.device
        ranks = range(num_sources)
        return [make_batch(spec, r, world_size, number=number).to(device) for r in ranks]

    def memory(self) -> AbstractContextManager[None]:
        """Poison memory within the context, if the environment permits it."""
        return poisoned_memory() if self.poisons else nullcontext()


@dataclass(frozen=True, kw_only=True)
class BufferEnv(SuiteEnv):
    """The environment of a scenario of buffers.

    backend: registry name.   mode: the mode that the buffer serves.
    combine, backward: BufferSpec.combine_format and backward_format.
    token_multiple: max_tokens_per_rank is a multiple of it; None: set only for static sizes.
    fills_batches: the backend sends entries of -1 to an expert that the row does not use, with
        weight 0, and one token of weight 0 from a rank without tokens.
    hosts: the hosts of the ranks, if there are several; otherwise None.
    """

    backend: str
    mode: Mode
    combine: WireFormat | None = None
    backward: WireFormat | None = None
    token_multiple: int | None = None
    fills_batches: bool = False
    hosts: HostLayout | None = None

    @property
    def caps(self) -> BufferCaps:
        """The capabilities of the backend."""
        return buffer_class(self.backend).caps(self.mode)

    @property
    def is_static(self) -> bool:
        """Whether sizes are fixed and check() raises the faults."""
        return self.caps.is_static

    def open(self, spec: BatchSpec, **changes: int) -> Buffer:
        """Open the buffer for batches of `spec`."""
        return self.group.open_buffer(self.backend, replace(self.buffer_spec(spec), **changes))

    def sent(self, batch: RankBatch) -> WireTensor:
        """Return the tokens of a batch in the wire format of dispatch."""
        return quantize(batch.x, self.wire or WireFormat.of(batch.x.dtype))

    def buffer_spec(self, spec: BatchSpec) -> BufferSpec:
        """Return the BufferSpec of a buffer for batches of `spec`."""
        wire, world_size = WireFormat.of(spec.dtype), self.group.world_size
        most_tokens = max(spec.tokens_of_rank(rank, world_size) for rank in range(world_size))
        # One more than the batches have, so that padding rows could be mistaken for tokens.
        max_tokens = align_up(most_tokens + 1, self.token_multiple or 1)
        return BufferSpec(
            hidden_size=spec.hidden_size,
            top_k=spec.num_topk(world_size),
            num_local_experts=spec.num_local_experts,
            dispatch_format=self.wire or wire,
            hidden_format=wire,
            combine_format=self.combine,
            backward_format=self.backward,
            max_tokens_per_rank=max_tokens if self.is_static or self.token_multiple else None,
            hosts=self.hosts,
        )

    def batches(self, spec: BatchSpec, number: int = 0) -> list[RankBatch]:
        world_size = self.group.world_size
        batches = self.made_batches(spec, number, world_size)
        if not self.fills_batches:
            return batches
        # The expected batches have the same substitutes for masked entries as the backend.
        for number, batch in enumerate(batches):
            ids, weights = fill_masked_entries(
                batch.topk_ids, batch.topk_weights, spec.num_experts(world_size)
            )
            batches[number] = replace(batch, topk_ids=ids, topk_weights=weights)
        return batches

    def fail(self, message: str) -> NoReturn:
        raise AssertionError(f"{self.backend}, {self.group.where}: {message}")

    def expect_equal(self, what: str, actual: object, expected: object) -> None:
        """Fail if the values differ."""
        if actual != expected:
            self.fail(f"{what} is {actual}, expected {expected}")

    def expect_error(self, error: EPError | None, kind: type[EPError], wanted: str) -> None:
        """Fail unless `error` is of `kind` and its message has the text `wanted`."""
        if type(error) is not kind or wanted not in str(error):
            self.fail(f"expected {kind.__name__} with {wanted!r}, got {error!r}")


def _never_empty(batch: RankBatch, rank: int, num_local: int, num_experts: int) -> RankBatch:
    """Return the batch of a rank, or for an empty one the token of BufferEnv.fills_batches."""
    if len(batch.x):
        return batch
    top_k, hidden_size = batch.topk_ids.shape[1], batch.x.shape[1]
    experts = [(rank * num_local + k) % num_experts for k in range(top_k)]
    return RankBatch(
        x=batch.x.new_ones(1, hidden_size),
        topk_ids=batch.topk_ids.new_tensor([experts]),
        topk_weights=batch.topk_weights.new_zeros(1, top_k),
        dy=batch.dy.new_zeros(1, hidden_size),
    )


def uneven(rank: int, world_size: int) -> int:
    """Return 3, 4, 5, ... tokens for ranks 0, 1, 2, ..."""
    return 3 + rank


BATCH_SPECS: Mapping[str, BatchSpec] = {
    "uneven": BatchSpec(tokens_of_rank=uneven, choose_ids=random_ids, top_k=3),
    # Rank 1, or a single rank, has no token.
    "empty_rank": BatchSpec(
        tokens_of_rank=lambda rank, size: 0 if rank == min(1, size - 1) else 4,
        choose_ids=random_ids,
    ),
    "all_empty": BatchSpec(tokens_of_rank=lambda *_: 0, choose_ids=random_ids),
    # Only the last rank has a token; with 2 ranks, both receive it.
    "one_token": BatchSpec(
        tokens_of_rank=lambda rank, size: int(rank == size - 1), choose_ids=random_ids, seed=3
    ),
    "one_expert": BatchSpec(tokens_of_rank=uneven, choose_ids=last_expert_ids),
    "holes": BatchSpec(tokens_of_rank=uneven, choose_ids=holed_ids, top_k=4),
    "nowhere": BatchSpec(tokens_of_rank=uneven, choose_ids=only_id(-1)),
    "top_1": BatchSpec(tokens_of_rank=uneven, choose_ids=random_ids, top_k=1),
    "bf16": BatchSpec(tokens_of_rank=uneven, choose_ids=random_ids, dtype=torch.bfloat16),
    "fp16": BatchSpec(tokens_of_rank=uneven, choose_ids=random_ids, dtype=torch.float16),
    "odd_hidden": BatchSpec(tokens_of_rank=uneven, choose_ids=random_ids, hidden_size=37),
    "many_experts": BatchSpec(
        tokens_of_rank=uneven, choose_ids=random_ids, num_local_experts=7, top_k=6
    ),
}


# The batches of scenarios that do not depend on them.
PLAIN = BatchSpec(tokens_of_rank=uneven, choose_ids=random_ids)


def make_call(
    batch: RankBatch, error: EPError | None = None, *, flags: BatchFlags = BatchFlags.NONE
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


@dataclass(frozen=True, kw_only=True, eq=False)
class _Trial:
    """An open buffer, and the recipe of the batches that it carries."""

    env: BufferEnv
    spec: BatchSpec
    buffer: Buffer
    alignment: int = 1

    @classmethod
    def open(
        cls,
        env: BufferEnv,
        spec: BatchSpec = PLAIN,
        *,
        alignment: int = 1,
        raises: bool = False,
        **changes: int,
    ) -> Self:
        """Open a buffer whose experts have aligned slots; raises: bad calls raise on all ranks."""
        spec = env.adapted(spec)
        changes = {"expert_alignment": alignment, **changes}
        if raises and not env.caps.reports_faults:
            changes["compares_calls"] = True
        return cls(env=env, spec=spec, buffer=env.open(spec, **changes), alignment=alignment)

    def own_batch(self, number: int = 0) -> RankBatch:
        return self.env.batches(self.spec, number)[self.env.group.rank]

    def dispatch(self, number: int = 0, *, flags: BatchFlags = BatchFlags.NONE) -> "_Round":
        return self.send(make_call(self.own_batch(number), flags=flags), number)

    def send(self, call: DispatchCall, number: int = 0) -> "_Round":
        """Make a call that carries batch `number`."""
        batches = self.env.batches(self.spec, number)
        return _Round(trial=self, batches=batches, out=self.buffer.dispatch(call))

    def expect_fault(self, call: DispatchCall, kind: type[EPError], wanted: str) -> None:
        """Check that the call, or with static sizes check(), raises `kind` with `wanted` once."""
        if self.env.is_static:
            if not self.send(call).finish().isnan().all():
                self.env.fail("y of a refused call is not NaN everywhere")
            error, again = _raised(self.buffer.check), _raised(self.buffer.check)
            if again is not None:
                self.env.fail(f"check() raised a fault twice: {again!r}")
        else:
            error = _raised(lambda: self.buffer.dispatch(call))
        self.env.expect_error(error, kind, wanted)


@dataclass(frozen=True, kw_only=True, eq=False)
class _Round:
    """A dispatch: the batches of all ranks, and what this rank received."""

    trial: _Trial
    batches: list[RankBatch]
    out: Dispatched

    @property
    def rows(self) -> WireTensor:
        """The received rows as [R, H], with row-major scales."""
        return slot_oracle.flat_rows(self.out, self.trial.env.caps.layout)

    def check(self) -> None:
        self.check_slots()
        self.check_combine()

    def check_slots(self) -> dict[int, slot_oracle.ExpectedSlot]:
        """Check order, counts, payload and weights of the slots; return them by position."""
        env, spec, out, index = self.trial.env, self.trial.spec, self.out, self.out.index
        batches, num_local, alignment = self.batches, spec.num_local_experts, self.trial.alignment
        if env.fills_batches:
            num_experts = spec.num_experts(len(batches))
            batches = [_never_empty(b, r, num_local, num_experts) for r, b in enumerate(batches)]
        order = buffer_class(env.backend).source_order(env.buffer_spec(spec), len(batches))
        slots = slot_oracle.expected_slots(batches, env.group.rank, num_local, order)
        capacity = out.rows.data.shape[1] if env.caps.layout is Layout.MASKED else None
        positions = slot_oracle.slot_positions(slots, num_local, alignment, capacity)
        rows, sent = self.rows, [env.sent(batch) for batch in batches]
        counts = [sum(s.expert == e for s in slots) for e in range(num_local)]
        env.expect_equal("num_tokens_per_expert", index.num_tokens_per_expert.tolist(), counts)
        rests = [start % alignment for start in index.first_slot.tolist()]
        env.expect_equal("first_slot modulo expert_alignment", rests, [0] * (num_local + 1))
        if index.host_num_tokens_per_expert is not None:
            host_counts = list(index.host_num_tokens_per_expert)
            env.expect_equal("host_num_tokens_per_expert", host_counts, counts)
        # Packed scales have the same bytes, so their dtype and width are compared too.
        env.expect_equal("dtype and width of scales", _scale_kind(rows), _scale_kind(sent[0]))
        row_of_slot = slot_oracle.rows_of_slots(out, rows)
        received = [slot_oracle.row_bits(rows, int(row_of_slot[at])) for at in positions]
        if not env.caps.ordered:
            slots = slot_oracle.as_received(slots, received, sent)
        for slot, position, bits in zip(slots, positions, received, strict=True):
            where = f"slot {position} ({slot})"
            env.expect_equal(where, bits, slot_oracle.row_bits(sent[slot.source], slot.token))
            if out.slot_weights is not None:
                weight = batches[slot.source].topk_weights[slot.token, slot.k].item()
                env.expect_equal(f"weight of {where}", out.slot_weights[position].item(), weight)
        if index.row_of_slot is not None:
            padding = sorted(set(range(len(row_of_slot))) - set(positions))
            env.expect_equal("padding", row_of_slot[padding].tolist(), [-1] * len(padding))
        return dict(zip(positions, slots, strict=True))

    def check_combine(self) -> None:
        trains = self.trial.env.caps.trainable
        _Computed.of(self).combine_with_weights()
        if trains:
            _Computed.of(self).combine_weighted_slots()
        if trains or self.out.index.slots_of_row is not None:
            _Computed.of(self).combine_rows()

    def check_cached_dispatch(self, slots: Mapping[int, slot_oracle.ExpectedSlot]) -> None:
        """Check each slot of two cached dispatches along the exchange plan."""
        env, row_of_slot = self.trial.env, slot_oracle.rows_of_slots(self.out, self.out.rows)
        for factor in (2, -3):
            x = self.batches[env.group.rank].x * factor
            rows = self.trial.buffer.cached_dispatch(x, self.out.exchange_plan)
            sent = [batch.x * factor for batch in self.batches]
            if env.backward is not None:
                sent = [dequantize(quantize(each, env.backward), each.dtype) for each in sent]
            for position, slot in slots.items():
                expected = sent[slot.source][slot.token].tolist()
                row = rows[int(row_of_slot[position])].tolist()
                env.expect_equal(f"slot of a cached dispatch {position}", row, expected)

    def finish(self) -> Tensor:
        """Combine zeros for each received row or slot; return y."""
        has_rows, rows = self.out.index.slots_of_row is not None, self.rows
        shape, device = (len(rows.data), rows.hidden_size), rows.data.device
        zeros = torch.zeros(shape, dtype=self.trial.spec.dtype, device=device)
        rows_per = RowsPer.ROW if has_rows else RowsPer.SLOT
        return self.trial.buffer.combine(zeros, self.out.exchange_plan, rows_per=rows_per)[0]


@dataclass(frozen=True, kw_only=True, eq=False)
class _Computed:
    """A batch that the experts have computed, each of which multiplies by its number + 1.

    results: [C, H], NaN for padding.   scale: [C], the factor of the expert of each slot.
    arriving: [T, H], float64, this rank's tokens as experts receive them.
    factor: [T, K], float64, the factors of the experts of each token.
    """

    trial: _Trial
    out: Dispatched
    batch: RankBatch
    results: Tensor
    scale: Tensor
    arriving: Tensor
    factor: Tensor

    @classmethod
    def of(cls, dispatched: _Round) -> Self:
        env, dtype = dispatched.trial.env, dispatched.trial.spec.dtype
        batch, received = dispatched.batches[env.group.rank], dispatched.rows
        row_of_slot = slot_oracle.rows_of_slots(dispatched.out, received)
        scale = _slot_scales(dispatched, len(row_of_slot))
        values = dequantize(received, sum_dtype(dtype))
        rows = values[row_of_slot.clamp(min=0).long()] if scale.numel() else values[:0]
        return cls(
            trial=dispatched.trial,
            out=dispatched.out,
            batch=batch,
            results=poison_rows((rows * scale.unsqueeze(1)).to(dtype), scale > 0),
            scale=scale,
            arriving=dequantize(env.sent(batch), sum_dtype(dtype)).double(),
            factor=(batch.topk_ids + 1).clamp(min=0).double(),
        )

    @property
    def weighted_sums(self) -> Tensor:
        """The expected y, [T, H], float64."""
        return self.arriving * (self.factor * self.batch.topk_weights.double()).sum(1, keepdim=True)

    def combine_with_weights(self) -> None:
        """Check sums to which combine applies the weights."""
        y = self._combine(self.results, slot_weights=self.out.slot_weights)
        self._expect_close("combine with weights", y, self.weighted_sums)

    def combine_weighted_slots(self) -> None:
        """Check sums of results that have their weights."""
        assert self.out.slot_weights is not None, "weights travel with the rows"
        weighted = (self.results * self.out.slot_weights.unsqueeze(1)).to(self.trial.spec.dtype)
        y = self._combine(poison_rows(weighted, self.scale > 0))
        self._expect_close("combine of weighted slots", y, self.weighted_sums)
        if y.dtype != self.trial.spec.dtype:
            self.trial.env.fail(f"combine returned {y.dtype}, expected {self.trial.spec.dtype}")

    def combine_rows(self) -> None:
        """Check sums of rows, and the scalars that return with them."""
        env = self.trial.env
        per_row, scalars = _reduce_to_rows(self.out, self.results, self.scale)
        plain = self.arriving * self.factor.sum(1, keepdim=True)
        y, returned_scalars = self.trial.buffer.combine(
            per_row,
            self.out.exchange_plan,
            rows_per=RowsPer.ROW,
            row_scalars=scalars if env.caps.trainable else None,
        )
        self._expect_close("combine of rows", y, plain, backward=env.caps.trainable)
        if env.caps.trainable:
            assert returned_scalars is not None, "row scalars are returned"
            ids = self.batch.topk_ids
            owners = torch.where(ids < 0, -1, ids // self.trial.spec.num_local_experts)
            ranks = range(env.group.world_size)
            num_ranks = torch.stack([(owners == rank).any(1) for rank in ranks]).sum(0)
            num_others = num_ranks.unsqueeze(1) - (ids >= 0).int()
            expected = self.factor.float()
            if self.trial.buffer.sums_row_scalars:
                expected = expected + _OTHER_SCALAR * num_others
            env.expect_equal("scalars", returned_scalars.tolist(), expected.tolist())

    def check_sums_repeat(self) -> None:
        """Check that sums of the same rows are bit-equal; from 3 ranks on, their order matters."""
        sums = [self._combine(self.results).clone() for _ in range(2)]
        if not torch.equal(*(y.view(torch.uint8) for y in sums)):
            self.trial.env.fail("a second combine of the same rows returned other sums")

    def _combine(self, rows: Tensor, slot_weights: Tensor | None = None) -> Tensor:
        return self.trial.buffer.combine(
            rows, self.out.exchange_plan, rows_per=RowsPer.SLOT, slot_weights=slot_weights
        )[0]

    def _expect_close(
        self, what: str, actual: Tensor, expected: Tensor, *, backward: bool = False
    ) -> None:
        """Fail unless the sums agree within the tolerance of the roundings."""
        tolerance = _sum_tolerance(self.trial, backward=backward)
        error = relative_error(actual, expected)
        if not error <= tolerance:
            self.trial.env.fail(f"{what} has an error of {error:.3g}, allowed {tolerance:.3g}")


def _slot_scales(dispatched: _Round, num_slots: int) -> Tensor:
    """Return physical expert + 1 of each slot, [C], 0 for padding."""
    group, index = dispatched.trial.env.group, dispatched.out.index
    first_expert = group.rank * dispatched.trial.spec.num_local_experts
    scales = torch.zeros(num_slots, dtype=torch.float32, device=group.device)
    starts = index.first_slot.tolist()
    for expert, count in enumerate(index.num_tokens_per_expert.tolist()):
        scales[starts[expert] : starts[expert] + count] = first_expert + expert + 1
    return scales


def _reduce_to_rows(out: Dispatched, results: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Return the sum of the slots of each row, NaN for a row without slots, and row scalars.

    A scalar is the scale of its slot, or _OTHER_SCALAR for an expert of another rank.
    """
    table = out.index.slots_of_row
    assert table is not None, "this suite reads rows through the index"
    rows = results.new_full((len(table), out.rows.hidden_size), float("nan"))
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


def _sum_tolerance(trial: _Trial, *, backward: bool) -> float:
    """Return the tolerance of four roundings: result, weighted result, row and y.

    With several hosts, the sum of a host is rounded too. Quantised sums of ranks are multiples of
    one token by positive factors, so that their errors are shares of the largest of y.
    """
    dtype = trial.spec.dtype
    finer = torch.finfo(sum_dtype(dtype)).eps / torch.finfo(torch.float32).eps
    roundings = 4 if trial.env.hosts is None else 5
    wire = trial.env.backward if backward else trial.env.combine
    share = 0.0 if wire is None else ROW_ERRORS[wire.dtype]
    return share + SUM_TOLERANCE * finer + roundings * torch.finfo(dtype).eps


def check_batch(env: BufferEnv, spec: BatchSpec, expert_alignment: int = 1) -> None:
    """Check all rows and slots of a dispatch, every way to combine, and a cached dispatch."""
    trial = _Trial.open(env, spec, alignment=expert_alignment)
    with env.memory():
        dispatched = trial.dispatch()
        slots = dispatched.check_slots()
        dispatched.check_combine()
        if env.caps.trainable:
            dispatched.check_cached_dispatch(slots)


def check_wire_tensors(env: BufferEnv, spec: BatchSpec) -> None:
    """Check rows, scales and sums of a dispatch of rows that are already quantised.

    Ranks use different layouts of memory: wider rows, or scales by column, packed if possible. The
    last rank passes rows that the buffer quantises.
    """
    trial, rank = _Trial.open(env, spec), env.group.rank
    batch = trial.own_batch()
    for turn in range(2):
        call = make_call(batch)
        if rank + turn < env.group.world_size:
            rows = _with_gaps(env.sent(batch), by_column=(rank + turn) % 2 == 0)
            call = replace(call, hidden_states=rows)
        with env.memory():
            dispatched = trial.send(call)
            dispatched.check_slots()
            _Computed.of(dispatched).combine_with_weights()


def _with_gaps(wire: WireTensor, *, by_column: bool) -> WireTensor:
    """Return a copy with gaps between rows; scales by column, or with gaps too."""
    scales, layout = wire.scales, None
    if scales is not None:
        packed = wire.format.has_exponents
        layout = ScaleLayout(column_major=True, alignment=4, packed=packed) if by_column else None
        scales = arrange_scales(scales, layout) if layout else _in_wider_rows(scales)
    return replace(wire, data=_in_wider_rows(wire.data), scales=scales, scale_layout=layout)


def _in_wider_rows(rows: Tensor) -> Tensor:
    """Return a copy of rows [N, n] in the first n of n + 3 columns; the others are NaN."""
    num_rows, width = rows.shape
    shape = (num_rows, (width + 3) * rows.itemsize)
    memory = torch.full(shape, 0xFF, dtype=torch.uint8, device=rows.device)
    wider = memory.view(rows.dtype)[:, :width]
    wider.copy_(rows)
    return wider


def check_operations_stand_alone(env: BufferEnv) -> None:
    """Check batches that are not combined, combined in any order, and combined repeatedly."""
    # Use masked entries, because with two ranks three of four experts would send each token to
    # both.
    spec, most = BATCH_SPECS["holes"], env.caps.batches_in_flight
    if most is not None:
        _check_batches_in_flight(_Trial.open(env, spec), most)
        if not env.caps.trainable:
            return
    trial = _Trial.open(env, spec)
    # Without gradients rows may be views that a later dispatch overwrites.
    flags = BatchFlags.GRAD_ENABLED if env.caps.trainable else BatchFlags.NONE
    dispatched = [trial.dispatch(number, flags=flags) for number in range(4)]
    for number in (2, 0, 0, 3):
        dispatched[number].check()
    if env.caps.ordered:
        _Computed.of(dispatched[1]).check_sums_repeat()


def check_more_in_flight(env: BufferEnv) -> None:
    """Check one more batch in flight than by default, and only one, if callers may choose."""
    most = env.caps.batches_in_flight
    assert most is not None, "see tests_anything()"
    for number in (most + 1, 1):
        trial = _Trial.open(env, BATCH_SPECS["holes"], batches_in_flight=number)
        _check_batches_in_flight(trial, number)


def _check_batches_in_flight(trial: _Trial, most: int) -> None:
    """Check that one batch more than `most` ends the first batch, and no other."""
    dispatched = [trial.dispatch(number) for number in range(most)]
    for each in dispatched:
        each.check_slots()
    dispatched.append(trial.dispatch(most))
    trial.env.expect_error(_raised(dispatched[0].finish), HandleError, f"{most} may be in flight")
    if trial.env.is_static:
        # check() also raises the refusal of this rank.
        _raised(trial.buffer.check)
    for each in dispatched[1:]:
        each.check()


def check_faults(env: BufferEnv) -> None:
    """Check that all ranks name the rank of a bad call, and that the next call works."""
    trial, faulty = _Trial.open(env, raises=True), env.group.world_size - 1
    is_faulty = env.group.rank == faulty
    for own_error in (CapacityError("too many tokens here"), ShapeError("a bad tensor here")):
        call = make_call(trial.own_batch(), own_error if is_faulty else None)
        trial.expect_fault(call, type(own_error), str(own_error) if is_faulty else f"rank {faulty}")
        check_batch(env, PLAIN)


def check_ids_out_of_range(env: BufferEnv) -> None:
    """Check that an id of P or -2 on one rank raises ShapeError on every rank."""
    trial = _Trial.open(env, raises=True)
    for bad_id in (PLAIN.num_experts(env.group.world_size), -2):
        mine = trial.own_batch()
        if env.group.rank == 0:
            mine.topk_ids[-1, -1] = bad_id
        has_value = env.group.rank == 0 and not env.is_static
        trial.expect_fault(make_call(mine), ShapeError, str(bad_id) if has_value else "rank 0")
        check_batch(env, PLAIN)


def check_repeated_ids(env: BufferEnv) -> None:
    """Check that each entry of a repeated expert is a slot, or that every rank raises.

    Static sizes that suffice for distinct ids overflow if all entries name one expert and there are
    fewer local experts than entries. Then every rank must raise, and nothing may be written beyond
    the index.
    """
    spec = BatchSpec(tokens_of_rank=uneven, choose_ids=repeated_ids, top_k=4)
    if buffer_class(env.backend).needs_distinct_ids:
        trial = _Trial.open(env, spec, raises=True)
        trial.expect_fault(make_call(trial.own_batch()), ShapeError, "twice")
        check_batch(env, PLAIN)
        return
    check_batch(env, spec)
    crowded = env.adapted(replace(spec, choose_ids=only_id(0)))
    made = env.buffer_spec(crowded)
    required = _slots_needed(env.batches(crowded), 0, crowded.num_local_experts, 1)
    num_rows = (made.max_tokens_per_rank or 0) * env.group.world_size
    if not env.is_static or required <= max_slots_of(made, num_rows):
        check_batch(env, crowded)
        return
    trial = _Trial.open(env, crowded, raises=True)
    for _ in range(2):
        trial.expect_fault(make_call(trial.own_batch()), CapacityError, f"up to {required} slots")
    check_batch(env, spec)


def check_combine_faults(env: BufferEnv) -> None:
    """Check that all ranks name the rank of a refused combine, and that the next call works."""
    trial, faulty = _Trial.open(env, compares_calls=True), env.group.world_size - 1
    # Ranks that compare their calls raise a refusal immediately.
    waits_for_check = env.is_static and env.caps.reports_faults
    for own_error in (HandleError("a spent handle here"), ShapeError("bad rows here")):
        dispatched = trial.dispatch()

        def run(dispatched: _Round = dispatched, own_error: EPError = own_error) -> None:
            if env.group.rank == faulty:
                no_rows = dispatched.batches[faulty].x[:0]
                trial.buffer.combine(no_rows, None, rows_per=RowsPer.ROW, error=own_error)
            elif not dispatched.finish().isnan().all() and waits_for_check:
                env.fail("y of a refused combine is not NaN everywhere")

        error = _raised(run)
        if waits_for_check:
            error = _raised(trial.buffer.check)
        wanted = str(own_error) if env.group.rank == faulty else f"rank {faulty}"
        env.expect_error(error, type(own_error), wanted)
        check_batch(env, PLAIN)


def check_budget(env: BufferEnv) -> None:
    """Check that C slots suffice, and that with C - 1 every rank raises the required size."""
    for name, alignment in (("uneven", 1), ("one_expert", 1), ("holes", 4)):
        spec = env.adapted(BATCH_SPECS[name])
        batches, num_local = env.batches(spec), spec.num_local_experts
        ranks = range(len(batches))
        required = max(_slots_needed(batches, rank, num_local, alignment) for rank in ranks)
        exact = _Trial.open(env, spec, alignment=alignment, max_recv_slots=required)
        exact.dispatch().check()
        exact.buffer.check()
        if required > 1:
            most = required - 1
            small = _Trial.open(env, spec, alignment=alignment, raises=True, max_recv_slots=most)
            wanted = f"raise max_recv_slots to {required}"
            small.expect_fault(make_call(small.own_batch()), CapacityError, wanted)


def _slots_needed(batches: list[RankBatch], rank: int, num_local: int, alignment: int) -> int:
    """Return the slots of one rank, with each expert rounded up to the alignment."""
    experts = range(rank * num_local, (rank + 1) * num_local)
    counts = [sum(int((batch.topk_ids == e).sum()) for batch in batches) for e in experts]
    return sum(align_up(count, alignment) for count in counts)


def check_traffic(env: BufferEnv) -> None:
    """Check that traffic() equals the prediction of wire_bytes()."""
    trial = _Trial.open(env, BATCH_SPECS["holes"])
    before = trial.buffer.traffic()
    dispatched = trial.dispatch()
    dispatched.finish()
    shape = CallShape.of(
        [batch.topk_ids for batch in dispatched.batches],
        env.group.rank,
        num_local_experts=trial.spec.num_local_experts,
        hosts=env.hosts,
    )
    promised = before + type(trial.buffer).wire_bytes(env.buffer_spec(trial.spec), shape)
    env.expect_equal("traffic", trial.buffer.traffic(), promised)


SCENARIOS: Mapping[str, Callable[[BufferEnv], None]] = {
    **{name: (lambda env, spec=spec: check_batch(env, spec)) for name, spec in BATCH_SPECS.items()},
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
    if tests_anything(name, env.caps):
        SCENARIOS[name](env)


def _scale_kind(rows: WireTensor) -> tuple[torch.dtype, int] | None:
    return None if rows.scales is None else (rows.scales.dtype, rows.scales.shape[-1])


def _raised(function: Callable[[], object]) -> EPError | None:
    try:
        function()
    except EPError as error:
        return error
    return None
