"""Low latency of V1: a slab of rows for each expert, and a row returned for each (token, expert).

Buffers over NVLink return slots themselves. Slabs, scales, counts and sources are memory of two
receive buffers in turn there, as in V1: their addresses stay, and a third batch overwrites the
first. Scales that are powers of two are sent as bytes, and are converted if float32 is requested.

On CPU ranks each (token, expert) pair is a row of an all-to-all, which is returned by a second one.
So its row returns alone, and the source multiplies by the weights and sums.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial, reduce
from typing import Self

import torch
from torch import Tensor

from epcomm.buffers.base import ReturnsSlots
from epcomm.buffers.nvlink.low_latency_state import NVLinkLowLatencyExchangePlan
from epcomm.calls.call import DispatchCall
from epcomm.errors import CapacityError, HandleError
from epcomm.integrations.deep_ep import normal
from epcomm.integrations.deep_ep.checks import Check
from epcomm.integrations.deep_ep.ranks import Ranks, Service
from epcomm.protocol import BatchFlags
from epcomm.quantization import FP8_FLOAT32_SCALES, FP8_POWER_OF_TWO_SCALES, quantize
from epcomm.quantization.scale_layout import pack_scales
from epcomm.spec import BufferSpec
from epcomm.types import ROW_MAJOR, ScaleLayout, WireFormat

_BF16 = WireFormat.of(torch.bfloat16)
# Rows of a column of scales: 16 bytes, at whose multiples the tensor memory access unit reads.
_ALIGNMENT = 4
# Bits of a layout range below its beginning.
_COUNT_BITS = 32

# The hook receives the rows; it may be called once.
Receive = Callable[[], object]


@lru_cache(maxsize=64)
def slots_spec(
    hidden_size: int,
    top_k: int,
    num_local_experts: int,
    max_tokens: int,
    *,
    use_fp8: bool,
    round_scale: bool,
    use_ue8m0: bool,
) -> BufferSpec:
    """Return the specification of a buffer that returns slots; one object for one shape."""
    wire, layout = _BF16, ROW_MAJOR
    if use_fp8:
        wire = FP8_POWER_OF_TWO_SCALES if round_scale else FP8_FLOAT32_SCALES
        if use_ue8m0 or not round_scale:
            layout = ScaleLayout(column_major=True, alignment=_ALIGNMENT, packed=use_ue8m0)
    return BufferSpec(
        hidden_size=hidden_size,
        top_k=top_k,
        num_local_experts=num_local_experts,
        dispatch_format=wire,
        hidden_format=_BF16,
        max_tokens_per_rank=max_tokens,
        returns_slots=True,
        scale_layout=layout,
    )


@dataclass(kw_only=True, eq=False)
class SentPairs:
    """The (token, expert) pairs of a batch, sent by (expert, token, k).

    entries: [S], the entry of each pair in the flattened ids [T * K].
    num_sent, num_received: the pairs to and from each rank.
    slots: [R] each, the expert and the position in its slab of each received pair; None before.
    """

    entries: Tensor
    num_sent: Sequence[int]
    num_received: Sequence[int] = ()
    slots: tuple[Tensor, Tensor] | None = None


class LowLatencyHandle(normal.Uncopied, tuple[Tensor, Tensor, int, int, int]):
    """The tuple that V1 returns: src_info, layout_range, M, H, E.

    src_info [L, W * M], int32: the number of each row's token on its source rank.
    layout_range [L, W], int64: the first row of each source and, in the low half, their number.

    ranks: of the Buffer.   num_tokens: T.   spec: of the call.   slab_shape: L, W * M, H.
    exchange: where a buffer returns slots.   pairs: on CPU ranks.
    """

    ranks: Ranks
    num_tokens: int
    spec: BufferSpec
    slab_shape: tuple[int, int, int]
    exchange: normal.RowExchange | None = None
    pairs: SentPairs | None = None

    @classmethod
    def of(
        cls, ranks: Ranks, num_tokens: int, spec: BufferSpec, sources: tuple[Tensor, Tensor]
    ) -> Self:
        """Make the handle of a batch; sources: src_info and layout_range."""
        num_local, hidden_size = spec.num_local_experts, spec.hidden_size
        assert spec.max_tokens_per_rank is not None, "low latency has a limit"
        handle = cls((*sources, spec.max_tokens_per_rank, hidden_size, num_local * ranks.size))
        handle.ranks, handle.num_tokens, handle.spec = ranks, num_tokens, spec
        handle.slab_shape = (num_local, ranks.size * spec.max_tokens_per_rank, hidden_size)
        return handle


@dataclass(frozen=True, kw_only=True, eq=False)
class ReceivedSlabs:
    """The tensors that a dispatch returns; receive() writes them.

    rows: [L, W * M, H], with column-major scales [L, W * M, S].   counts: [L], int32.
    """

    rows: normal.Rows
    counts: Tensor
    handle: LowLatencyHandle
    receive: Receive


class LowLatency:
    """Dispatch and combine of low latency of one Buffer, whose arguments were checked.

    Both are collective. Their results are written when rows are received.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        # Scales as float32 by the address of their rows.
        self._columns: dict[int, Tensor] = {}

    def dispatch(
        self, check: Check, x: Tensor, topk_ids: Tensor, spec: BufferSpec, *, has_hook: bool
    ) -> ReceivedSlabs:
        """Begin a dispatch of x [T, H]; spec: see slots_spec().

        has_hook: other work may be launched before the slabs are received; else the receiving
            kernel of a GPU is launched here, and overlaps with the sending one.
        """
        if not self._ranks.reads_faults:
            return self._dispatch_slots(x, topk_ids, spec, has_hook=has_hook)
        return _dispatch_pairs(check, x, topk_ids.long(), spec)

    def combine(
        self, handle: LowLatencyHandle, x: Tensor, topk_weights: Tensor, out: Tensor | None
    ) -> tuple[Tensor, Receive]:
        """Begin to return the rows of x [L, W * M, H], by the routing of the dispatch.

        The second result writes y, and reads topk_weights, as in V1.
        """
        if handle.pairs is not None:
            return _combine_pairs(handle, handle.pairs, x, topk_weights, out)
        assert handle.exchange is not None, "slots are sent with the dispatch"
        buffer, plan = handle.exchange.buffer, handle.exchange.exchange_plan
        assert isinstance(buffer, ReturnsSlots), "the class was chosen for it"
        pending = buffer.combine_slots_async(x.flatten(0, 1), plan, topk_weights, out=out)
        assert pending.record is not None, "y exists before it is received"
        return pending.record, pending.wait

    def _dispatch_slots(
        self, x: Tensor, topk_ids: Tensor, spec: BufferSpec, *, has_hook: bool
    ) -> ReceivedSlabs:
        ranks = self._ranks
        buffer = ranks.open(Service.LOW_LATENCY, spec)
        call = DispatchCall(
            hidden_states=x,
            topk_ids=topk_ids.long(),
            # This argument is not read, because combine takes the weights.
            topk_weights=topk_ids,
            flags=BatchFlags.NONE,
        )
        pending = buffer.dispatch_async(call) if has_hook else None
        out = buffer.dispatch(call) if pending is None else pending.record
        assert out is not None, "rows exist before they are received"
        travelled = columns = out.rows.scales
        if travelled is not None and travelled.dtype == torch.float8_e8m0fnu:
            # The same rows must have scales in the same memory, because a captured graph keeps the
            # addresses.
            address = out.rows.data.data_ptr()
            if address not in self._columns:
                self._columns[address] = _column_major(travelled.shape, travelled.device)
            columns = self._columns[address]

        def receive() -> None:
            if pending is not None:
                pending.wait()
            if columns is not None and travelled is not None and columns is not travelled:
                columns.copy_(travelled)

        plan = out.exchange_plan
        assert isinstance(plan, NVLinkLowLatencyExchangePlan), "the buffer returns slots"
        sources = (plan.slabs.token_of_slot, plan.slabs.source_ranges)
        num_slots = len(out.rows.data.flatten(0, 1))
        handle = LowLatencyHandle.of(ranks, x.shape[0], spec, sources)
        handle.exchange = normal.RowExchange(
            ranks=ranks,
            buffer=buffer,
            spec=spec,
            exchange_plan=plan,
            num_tokens=x.shape[0],
            num_rows=num_slots,
            max_rows=num_slots,
        )
        return ReceivedSlabs(
            rows=normal.Rows(x=out.rows.data, scales=columns),
            counts=out.index.num_tokens_per_expert,
            handle=handle,
            receive=receive,
        )


def _column_major(
    shape: torch.Size | tuple[int, ...], device: torch.device, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Return memory for scales [L, W * M, S]: a GEMM reads those of neighbouring rows together."""
    num_local, capacity, num_scales = shape
    return torch.empty(num_local, num_scales, capacity, dtype=dtype, device=device).transpose(1, 2)


def _dispatch_pairs(check: Check, x: Tensor, topk_ids: Tensor, spec: BufferSpec) -> ReceivedSlabs:
    """Begin a dispatch of pairs.

    x and topk_ids are read here, the exchange is in the second half: a send waits for no rank.
    """
    ranks, num_local, max_tokens = check.ranks, spec.num_local_experts, spec.max_tokens_per_rank
    assert max_tokens is not None, "low latency has a limit"
    entries = (topk_ids.flatten() != -1).nonzero()[:, 0]
    experts = topk_ids.flatten()[entries]
    counts = torch.bincount(experts, minlength=ranks.size * num_local)
    if counts.max() > max_tokens:
        # The slab of an expert may be too small for so many rows.
        fault = f"topk_idx names an expert {int(counts.max())} times, expected at most"
        fault = f"{fault} num_max_dispatch_tokens_per_rank = {max_tokens}"
        error = check.error(CapacityError, fault, "name each expert once in a row")
        normal.refuse_dispatch(ranks, Service.LOW_LATENCY, error)
    entries = entries[experts.argsort(stable=True)]
    tokens, counts = entries // spec.top_k, counts.view(ranks.size, num_local)
    pairs = SentPairs(entries=entries, num_sent=counts.sum(1).tolist())
    layout = (
        topk_ids.new_empty(num_local, ranks.size * max_tokens, dtype=torch.int32),
        topk_ids.new_empty(num_local, ranks.size),
    )
    handle = LowLatencyHandle.of(ranks, x.shape[0], spec, layout)
    handle.pairs = pairs
    wire, scales = quantize(x, spec.dispatch_format), None
    # torch cannot index 8-bit floats.
    sent = [tokens.to(torch.int32), wire.data.contiguous().view(torch.uint8)[tokens]]
    if wire.scales is not None:
        given = pack_scales(wire.scales) if spec.scale_layout.packed else wire.scales.float()
        sent.append(given[tokens])
        scales = _column_major((*layout[0].shape, given.shape[1]), x.device, given.dtype)

    def receive() -> None:
        if pairs.slots is not None:
            raise HandleError(f"low_latency_dispatch: the hook was called twice ({ranks.where})")
        phase = "low_latency_dispatch"
        ranks.announce(phase, spec.as_record(), over_nvlink=False)
        exchange = partial(ranks.collectives.all_to_all, phase=phase)
        counts_of_sources = exchange(counts)
        pairs.num_received = counts_of_sources.sum(1).tolist()
        exchange = partial(exchange, send_splits=pairs.num_sent, recv_splits=pairs.num_received)
        pairs.slots = _write(slabs, [exchange(each) for each in sent], counts_of_sources)

    counts_of_slabs = topk_ids.new_empty(num_local, dtype=torch.int32)
    rows = normal.Rows(x=wire.data.new_empty(handle.slab_shape), scales=scales)
    slabs = ReceivedSlabs(rows=rows, counts=counts_of_slabs, handle=handle, receive=receive)
    return slabs


def _write(
    slabs: ReceivedSlabs, received: Sequence[Tensor], counts: Tensor
) -> tuple[Tensor, Tensor]:
    """Write the slabs; return the expert and the position in its slab of each received pair.

    received: token, bytes and perhaps scales of each pair, by (source, expert).
    counts: pairs of each source and expert, [W, L].
    """
    (num_ranks, num_local), capacity = counts.shape, slabs.rows.x.shape[1]
    experts = torch.arange(num_local, device=counts.device).repeat(num_ranks)
    experts = experts.repeat_interleave(counts.flatten())
    slabs.counts.copy_(counts.sum(0))
    # By (expert, source), pairs fill the slabs from the first position on.
    is_filled = torch.arange(capacity, device=counts.device) < slabs.counts.unsqueeze(1)
    positions = torch.empty_like(experts)
    positions[experts.argsort(stable=True)] = is_filled.nonzero()[:, 1]
    src_info, layout_range = slabs.handle[:2]
    targets = [src_info, slabs.rows.x.view(torch.uint8), slabs.rows.scales]
    for target, rows in zip(targets, received, strict=False):
        assert target is not None, "scales are received where there are some"
        target[experts, positions] = rows
    from_source = counts.T
    first = from_source.cumsum(1) - from_source
    layout_range.copy_(first << _COUNT_BITS | from_source)
    return experts, positions


def _combine_pairs(
    handle: LowLatencyHandle, pairs: SentPairs, x: Tensor, topk_weights: Tensor, out: Tensor | None
) -> tuple[Tensor, Receive]:
    """Read the rows here, and the weights in the second half, as in V1."""
    ranks, hidden_size = handle.ranks, handle.spec.hidden_size
    if pairs.slots is None:
        fault = f"low_latency_combine: handle is of a batch that is not received ({ranks.where})"
        error = f"{fault}, expected one whose hook was called; call the hook of its dispatch first"
        normal.refuse_along(ranks, Service.LOW_LATENCY, HandleError(error))
    pending = [x[pairs.slots]]
    y = x.new_empty(handle.num_tokens, hidden_size) if out is None else out

    def receive() -> None:
        phase = "low_latency_combine"
        if not pending:
            raise HandleError(f"{phase}: the hook was called twice ({ranks.where})")
        ranks.announce(phase, {}, over_nvlink=False)
        returned = ranks.collectives.all_to_all(
            pending.pop(), send_splits=pairs.num_received, recv_splits=pairs.num_sent, phase=phase
        )
        weights = normal.detached(topk_weights).flatten()[pairs.entries]
        terms = weights.new_zeros(*topk_weights.shape, hidden_size)
        terms.flatten(0, 1)[pairs.entries] = returned.float() * weights.unsqueeze(1)
        # Sum in float32 and in the order of k.
        normal.detached(y).copy_(reduce(torch.add, terms.unbind(1)))

    return y, receive
