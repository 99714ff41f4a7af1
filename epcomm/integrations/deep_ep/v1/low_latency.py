"""Low latency of V1: a slab of rows for each expert, and a row returned for each (token, expert).

Buffers over NVLink return slots themselves. Slabs, scales, counts and sources are memory of two
receive buffers in turn there, as in V1: their addresses stay, and a third batch overwrites the
first. Scales that are powers of two are sent as bytes, and are converted if float32 is requested.

On other buffers each (token, expert) pair is a token that goes to one expert. So its row returns
alone, and the source multiplies by the weights and sums. The router weight of a pair, which V1
passes only to combine, carries the source of the pair.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple, NoReturn, Self

import torch
from torch import Tensor

from epcomm.buffers.base import ReturnsSlots
from epcomm.buffers.nvlink.low_latency_state import NVLinkLowLatencyExchangePlan
from epcomm.calls.call import DispatchCall
from epcomm.errors import CapacityError, HandleError
from epcomm.integrations.deep_ep.checks import Check
from epcomm.integrations.deep_ep.normal import (
    ReceivedRows,
    RowExchange,
    Rows,
    detached,
    dispatch_rows,
    refuse_along,
    refuse_copy,
    refuse_dispatch,
    return_rows,
    spec_of,
)
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
Receive = Callable[[], None]


class LowLatencyShape(NamedTuple):
    """H, K, M, E and W of a call, and the form of received rows, by the names of V1."""

    hidden_size: int
    top_k: int
    max_tokens: int
    num_experts: int
    num_ranks: int
    use_fp8: bool
    round_scale: bool = False
    use_ue8m0: bool = False

    @property
    def num_local(self) -> int:
        """The number of experts of a rank, L."""
        return self.num_experts // self.num_ranks

    @property
    def slab_shape(self) -> tuple[int, int, int]:
        """L, W * M, H."""
        return self.num_local, self.num_ranks * self.max_tokens, self.hidden_size

    @property
    def wire_format(self) -> WireFormat:
        """The format in which rows are sent."""
        if not self.use_fp8:
            return _BF16
        return FP8_POWER_OF_TWO_SCALES if self.round_scale else FP8_FLOAT32_SCALES


@lru_cache(maxsize=64)
def slots_spec(shape: LowLatencyShape) -> BufferSpec:
    """Return the specification of a buffer that returns slots; one object for one shape."""
    layout = ScaleLayout(column_major=True, alignment=_ALIGNMENT, packed=shape.use_ue8m0)
    if not shape.use_fp8 or (shape.round_scale and not shape.use_ue8m0):
        layout = ROW_MAJOR
    return BufferSpec(
        hidden_size=shape.hidden_size,
        top_k=shape.top_k,
        num_local_experts=shape.num_local,
        dispatch_format=shape.wire_format,
        hidden_format=_BF16,
        max_tokens_per_rank=shape.max_tokens,
        returns_slots=True,
        scale_layout=layout,
    )


class LowLatencyHandle(tuple[Tensor, Tensor, int, int, int]):
    """The tuple that V1 returns: src_info, layout_range, M, H, E.

    src_info [L, W * M], int32: the number of each row's token on its source rank.
    layout_range [L, W], int64: the first row of each source and, in the low half, their number.

    ranks: of the Buffer.   num_tokens: T.
    pairs: None where a buffer returns slots.   exchange: None for pairs that are not received.
    """

    ranks: Ranks
    num_tokens: int
    shape: LowLatencyShape
    pairs: SentPairs | None
    exchange: RowExchange | None

    def __reduce__(self) -> NoReturn:
        refuse_copy(self)

    @classmethod
    def of(
        cls,
        ranks: Ranks,
        num_tokens: int,
        shape: LowLatencyShape,
        sources: tuple[Tensor, Tensor],
        sent: RowExchange | SentPairs,
    ) -> Self:
        """Make the handle of a batch; sources: src_info and layout_range."""
        handle = cls((*sources, shape.max_tokens, shape.hidden_size, shape.num_experts))
        handle.ranks, handle.num_tokens, handle.shape = ranks, num_tokens, shape
        is_received = isinstance(sent, RowExchange)
        handle.pairs, handle.exchange = (None, sent) if is_received else (sent, None)
        return handle


@dataclass(frozen=True, kw_only=True, eq=False)
class ReceivedSlabs:
    """The tensors that a dispatch returns; receive() writes them.

    rows: [L, W * M, H], with column-major scales [L, W * M, S].   counts: [L], int32.
    """

    rows: Rows
    counts: Tensor
    handle: LowLatencyHandle
    receive: Receive


@dataclass(kw_only=True, eq=False)
class SentPairs:
    """The (token, expert) pairs of a batch by token, then k: [S] each. Masked entries are none.

    is_chosen: [T, K], bool, which entries are pairs.
    row_of_pair: [R], the row of the flattened slabs with each received pair; None before receipt.
    """

    is_chosen: Tensor
    tokens: Tensor
    experts: Tensor
    row_of_pair: Tensor | None = None

    @classmethod
    def of(cls, topk_ids: Tensor) -> Self:
        """Read topk_ids [T, K], int64."""
        is_chosen = topk_ids != -1
        tokens = is_chosen.nonzero()[:, 0]
        return cls(is_chosen=is_chosen, tokens=tokens, experts=topk_ids[is_chosen])


class LowLatency:
    """Dispatch and combine of low latency of one Buffer, whose arguments were checked.

    Both are collective. Their results are written when rows are received.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        # Scales as float32 by the address of their rows.
        self._columns: dict[int, Tensor] = {}

    def dispatch(
        self, check: Check, x: Tensor, topk_ids: Tensor, shape: LowLatencyShape, *, has_hook: bool
    ) -> ReceivedSlabs:
        """Begin a dispatch of x [T, H].

        has_hook: other work may be launched before the slabs are received; else the receiving
            kernel of a GPU is launched here, and overlaps with the sending one.
        """
        if self._ranks.returns_slots():
            return self._dispatch_slots(x, topk_ids, shape, has_hook=has_hook)
        return _dispatch_pairs(check, x, topk_ids.long(), shape)

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

        def receive() -> None:
            pending.wait()

        return pending.record, receive

    def _dispatch_slots(
        self, x: Tensor, topk_ids: Tensor, shape: LowLatencyShape, *, has_hook: bool
    ) -> ReceivedSlabs:
        ranks, spec, num_tokens = self._ranks, slots_spec(shape), x.shape[0]
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
        exchange = RowExchange(
            ranks=ranks,
            buffer=buffer,
            spec=spec,
            exchange_plan=plan,
            num_tokens=num_tokens,
            num_rows=num_slots,
            max_rows=num_slots,
        )
        return ReceivedSlabs(
            rows=Rows(x=out.rows.data, scales=columns),
            counts=out.index.num_tokens_per_expert,
            handle=LowLatencyHandle.of(ranks, num_tokens, shape, sources, exchange),
            receive=receive,
        )


def _column_major(
    shape: torch.Size | tuple[int, ...], device: torch.device, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Return memory for scales [L, W * M, S]: a GEMM reads those of neighbouring rows together."""
    num_local, capacity, num_scales = shape
    memory = torch.empty(num_local, num_scales, capacity, dtype=dtype, device=device)
    return memory.transpose(1, 2)


def _dispatch_pairs(
    check: Check, x: Tensor, topk_ids: Tensor, shape: LowLatencyShape
) -> ReceivedSlabs:
    """Begin a dispatch of pairs.

    x and topk_ids are read here, the exchange is in the second half: a send waits for no rank.
    """
    ranks, pairs, rows = check.ranks, SentPairs.of(topk_ids), Rows(x=x)
    most = int(torch.bincount(pairs.experts, minlength=1).max())
    if most > shape.max_tokens:
        # The slab of an expert may be too small for so many rows.
        fault = f"topk_idx names an expert {most} times, expected at most"
        fault = f"{fault} num_max_dispatch_tokens_per_rank = {shape.max_tokens}"
        error = check.error(CapacityError, fault, "name each expert once in a row")
        refuse_dispatch(ranks, Service.LOW_LATENCY, error)
    if shape.use_fp8:
        quantized = quantize(x, shape.wire_format)
        assert quantized.scales is not None, "FP8 has scales"
        packed = pack_scales(quantized.scales) if shape.use_ue8m0 else quantized.scales.float()
        rows = Rows(x=quantized.data, scales=packed)
    sources = (pairs.tokens + ranks.rank * shape.max_tokens).float()
    scales = None if rows.scales is None else rows.scales[pairs.tokens]
    # torch cannot index 8-bit floats.
    codes = rows.x.contiguous().view(torch.uint8)[pairs.tokens].view(rows.x.dtype)
    sent = Rows(x=codes, scales=scales)
    num_local, capacity, _ = shape.slab_shape
    if scales is not None:
        scales_shape = (num_local, capacity, scales.shape[1])
        scales = _column_major(scales_shape, scales.device, scales.dtype)
    layout = (
        topk_ids.new_empty(num_local, capacity, dtype=torch.int32),
        topk_ids.new_empty(num_local, shape.num_ranks),
    )

    def receive() -> None:
        if handle.exchange is not None:
            raise HandleError(f"low_latency_dispatch: the hook was called twice ({ranks.where})")
        received = dispatch_rows(
            ranks,
            Service.LOW_LATENCY,
            sent,
            (pairs.experts[:, None], sources[:, None]),
            spec_of(sent.form, 1, num_local),
            options={"num_max_tokens_per_rank": shape.max_tokens},
        )
        handle.exchange, pairs.row_of_pair = received.exchange, _write(slabs, received, shape)

    handle = LowLatencyHandle.of(ranks, x.shape[0], shape, layout, pairs)
    slabs = ReceivedSlabs(
        rows=Rows(x=codes.new_empty(shape.slab_shape), scales=scales),
        counts=topk_ids.new_empty(num_local, dtype=torch.int32),
        handle=handle,
        receive=receive,
    )
    return slabs


def _write(slabs: ReceivedSlabs, received: ReceivedRows, shape: LowLatencyShape) -> Tensor:
    """Write the slabs; return the row of each received pair in them."""
    index, num_ranks = received.dispatched.index, shape.num_ranks
    assert index.slots_of_row is not None, "an index over rows has its inverse"
    experts = received.topk_ids[:, 0]
    position = (index.slots_of_row[:, 0] - index.first_slot[experts]).long()
    row_of_pair = experts * shape.slab_shape[1] + position
    source = received.topk_weights[:, 0].long()
    data = slabs.rows.x.view(torch.uint8).flatten(0, 1)
    data[row_of_pair] = received.rows.x.view(torch.uint8)
    if slabs.rows.scales is not None and received.rows.scales is not None:
        slabs.rows.scales[experts, position] = received.rows.scales
    slabs.counts.copy_(index.num_tokens_per_expert)
    src_info, layout_range = slabs.handle[:2]
    src_info.flatten()[row_of_pair] = (source % shape.max_tokens).to(torch.int32)
    from_source = torch.bincount(
        experts * num_ranks + source // shape.max_tokens, minlength=shape.num_local * num_ranks
    ).view(-1, num_ranks)
    first = from_source.cumsum(1) - from_source
    layout_range.copy_(first << _COUNT_BITS | from_source)
    return row_of_pair


def _combine_pairs(
    handle: LowLatencyHandle,
    pairs: SentPairs,
    x: Tensor,
    topk_weights: Tensor,
    out: Tensor | None,
) -> tuple[Tensor, Receive]:
    """Read the rows here, and the weights in the second half, as in V1."""
    exchange, where = handle.exchange, handle.ranks.where
    if exchange is None:
        fault = f"low_latency_combine: handle is of a batch that is not received ({where})"
        error = f"{fault}, expected one whose hook was called; call the hook of its dispatch first"
        refuse_along(handle.ranks, Service.LOW_LATENCY, HandleError(error))
    rows = x.flatten(0, 1)[pairs.row_of_pair]
    y = x.new_empty(handle.num_tokens, x.shape[2]) if out is None else out
    pending = [exchange]

    def receive() -> None:
        if not pending:
            raise HandleError(f"low_latency_combine: the hook was called twice ({where})")
        handle.ranks.announce("low_latency_combine", {}, over_nvlink=False)
        returned, _ = return_rows(pending.pop(), rows)
        weights, is_chosen = detached(topk_weights), pairs.is_chosen
        pair_of_entry = is_chosen.flatten().cumsum(0).view(is_chosen.shape) - 1
        # Sum in float32 and in the order of k.
        total = returned.new_zeros(y.shape, dtype=torch.float32)
        for k in range(is_chosen.shape[1]):
            of_k = is_chosen[:, k]
            rows_of_k = returned[pair_of_entry[of_k, k]].float()
            total[of_k] += rows_of_k * weights[of_k, k].unsqueeze(1)
        detached(y).copy_(total)

    return y, receive
