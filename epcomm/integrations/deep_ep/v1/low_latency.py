"""Low latency of V1: a slab of rows for each expert, and a row returned for each (token, expert).

Buffers that return slots, those over NVLink, do it themselves. Slabs, scales, counts and sources
are memory of a receive buffer there, used in turn: their addresses stay, also in a captured graph,
and a third batch overwrites the first, as in V1. Powers of two that are wanted as float32 are
copied once, because they travel as bytes.

On other buffers each (token, expert) pair is a token that goes to one expert. So its row returns
alone, and the source weighs and sums, as V1 does. The router weight of a pair, which V1 has in
combine alone, carries the source of the pair.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, NoReturn, Self

import torch
from torch import Tensor

from epcomm.buffers.base import Buffer, ReturnsSlots
from epcomm.buffers.nvlink.low_latency_state import NVLinkLowLatencyExchangePlan
from epcomm.calls.call import DispatchCall
from epcomm.config import Mode
from epcomm.errors import CapacityError, EPError, HandleError
from epcomm.integrations.deep_ep.normal import (
    ReceivedRows,
    RowExchange,
    Rows,
    detached,
    dispatch_rows,
    return_rows,
    spec_of,
)
from epcomm.integrations.deep_ep.ranks import OpenBuffer, Options, Ranks, combine_error
from epcomm.protocol import BatchFlags
from epcomm.quantization import FP8_FLOAT32_SCALES, FP8_POWER_OF_TWO_SCALES, quantize
from epcomm.quantization.scale_layout import pack_scales
from epcomm.records import ExchangePlan
from epcomm.spec import BufferSpec
from epcomm.types import ROW_MAJOR, ScaleLayout, WireFormat

_BF16 = WireFormat.of(torch.bfloat16)
# Rows of a column of scales: 16 bytes, at whose multiples the tensor memory access unit reads.
_ALIGNMENT = 4
# Bits of a layout range below its beginning.
_COUNT_BITS = 32

# Receives what was sent, once.
Receive = Callable[[], None]


class LowLatencyShape(NamedTuple):
    """H, K, M, E and W of a call, and the form of received rows, by the names of V1.

    A key of buffers: it takes less time than a BufferSpec.
    """

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
    def capacity(self) -> int:
        """The number of rows of a slab."""
        return self.num_ranks * self.max_tokens

    @property
    def wire_format(self) -> WireFormat:
        """The format in which rows travel."""
        if not self.use_fp8:
            return _BF16
        return FP8_POWER_OF_TWO_SCALES if self.round_scale else FP8_FLOAT32_SCALES

    def spec(self) -> BufferSpec:
        """Return the specification of a buffer that returns slots."""
        layout = ScaleLayout(column_major=True, alignment=_ALIGNMENT, packed=self.use_ue8m0)
        if not self.use_fp8 or (self.round_scale and not self.use_ue8m0):
            layout = ROW_MAJOR
        return BufferSpec(
            hidden_size=self.hidden_size,
            top_k=self.top_k,
            num_local_experts=self.num_local,
            dispatch_format=self.wire_format,
            hidden_format=_BF16,
            max_tokens_per_rank=self.max_tokens,
            returns_slots=True,
            scale_layout=layout,
        )


class LowLatencyHandle(tuple[Tensor, Tensor, int, int, int]):
    """The tuple that V1 returns: src_info, layout_range, M, H, E.

    src_info [L, W * M], int32: the token at its source that each row is.
    layout_range [L, W], int64: first row of each source and, in the low half, how many.

    ranks: of the Buffer.   num_tokens: T.   slab_shape: L, W * M, H.
    sent: a buffer that returns slots and its exchange plan, or the pairs of the dispatch.
    """

    ranks: Ranks
    num_tokens: int
    slab_shape: tuple[int, int, int]
    sent: tuple[Buffer, ExchangePlan] | SentPairs

    @classmethod
    def of(
        cls,
        ranks: Ranks,
        num_tokens: int,
        shape: LowLatencyShape,
        sources: tuple[Tensor, Tensor],
        sent: tuple[Buffer, ExchangePlan] | SentPairs,
    ) -> Self:
        """Make the handle of a batch; sources: src_info and layout_range."""
        handle = cls((*sources, shape.max_tokens, shape.hidden_size, shape.num_experts))
        handle.ranks, handle.num_tokens, handle.sent = ranks, num_tokens, sent
        handle.slab_shape = (shape.num_local, shape.capacity, shape.hidden_size)
        return handle


@dataclass(frozen=True, kw_only=True, eq=False)
class ReceivedSlabs:
    """The tensors that a dispatch returns; receive() writes them.

    x: [L, W * M, H].   scales: its scales, [L, W * M, S], column-major.   counts: [L], int32.
    """

    x: Tensor
    scales: Tensor | None
    counts: Tensor
    handle: LowLatencyHandle
    receive: Receive


@dataclass(kw_only=True, eq=False)
class SentPairs:
    """The (token, expert) pairs of a batch by token, then k: [S] each. Masked entries are none.

    exchange: of the pairs; None until they are received.
    row_of_pair: [R], row of the flattened slabs that holds each received pair.
    """

    tokens: Tensor
    experts: Tensor
    exchange: RowExchange | None = None
    row_of_pair: Tensor | None = None

    @classmethod
    def of(cls, topk_ids: Tensor) -> Self:
        """Read topk_ids [T, K], int64."""
        is_chosen = topk_ids != -1
        return cls(tokens=is_chosen.nonzero()[:, 0], experts=topk_ids[is_chosen])

    def positions(self, topk_ids: Tensor, num_experts: int) -> Tensor:
        """Return the pair of each entry of topk_ids, [T, K]; -1 where none was dispatched."""
        pair_of = torch.full((topk_ids.shape[0], num_experts), -1, device=topk_ids.device)
        numbers = torch.arange(self.tokens.shape[0], device=topk_ids.device)
        pair_of[self.tokens, self.experts] = numbers
        is_known = (topk_ids >= 0) & (topk_ids < num_experts)
        return pair_of.gather(1, topk_ids.clamp(0, num_experts - 1)).masked_fill(~is_known, -1)


class LowLatency:
    """Dispatch and combine of low latency of one Buffer, whose arguments were checked.

    Both are collective. What they return is written when it is received.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._opened: dict[LowLatencyShape, OpenBuffer] = {}
        # Scales as float32 by the address of their rows.
        self._columns: dict[int, Tensor] = {}

    def dispatch(
        self, x: Tensor, topk_ids: Tensor, shape: LowLatencyShape, *, has_hook: bool
    ) -> ReceivedSlabs:
        """Begin a dispatch of x [T, H].

        has_hook: other work may come before the slabs are received; else the receiving kernel of
            a GPU is launched here, and overlaps with the sending one.
        """
        if self._ranks.returns_slots():
            return self._dispatch_slots(x, topk_ids, shape, has_hook=has_hook)
        return _dispatch_pairs(self._ranks, x, topk_ids.long(), shape)

    def combine(
        self,
        handle: LowLatencyHandle,
        x: Tensor,
        topk_ids: Tensor,
        topk_weights: Tensor,
        out: Tensor | None,
    ) -> tuple[Tensor, Receive]:
        """Begin to return the rows of x [L, W * M, H]; the second result writes y.

        Slots are sent by the routing of the dispatch. topk_weights, and topk_ids of pairs, are read
        by the second result, as in V1.
        """
        if isinstance(handle.sent, SentPairs):
            return _combine_pairs(handle, handle.sent, x, (topk_ids, topk_weights), out)
        buffer, plan = handle.sent
        assert isinstance(buffer, ReturnsSlots), "the class was chosen for it"
        pending = buffer.combine_slots_async(x.flatten(0, 1), plan, topk_weights, out=out)
        assert pending.record is not None, "y exists before it is received"

        def receive() -> None:
            pending.wait()

        return pending.record, receive

    def _dispatch_slots(
        self, x: Tensor, topk_ids: Tensor, shape: LowLatencyShape, *, has_hook: bool
    ) -> ReceivedSlabs:
        ranks, found = self._ranks, self._opened.get(shape)
        if found is None:
            spec = shape.spec()
            found = self._opened[shape] = (ranks.open(Mode.LOW_LATENCY, spec), spec)
            buffer = found[0]
        else:
            buffer = ranks.open_again(Mode.LOW_LATENCY, found)
        call = DispatchCall(
            hidden_states=x,
            topk_ids=topk_ids.long(),
            # Not read: weights come with combine.
            topk_weights=topk_ids,
            flags=BatchFlags.NONE,
        )
        pending = buffer.dispatch_async(call) if has_hook else None
        out = buffer.dispatch(call) if pending is None else pending.record
        assert out is not None, "rows exist before they are received"
        travelled = columns = out.rows.scales
        if travelled is not None and travelled.dtype == torch.float8_e8m0fnu:
            columns = self._columns_of(out.rows.data, travelled)

        def receive() -> None:
            if pending is not None:
                pending.wait()
            if columns is not None and travelled is not None and columns is not travelled:
                columns.copy_(travelled)

        plan = out.exchange_plan
        assert isinstance(plan, NVLinkLowLatencyExchangePlan), "the buffer returns slots"
        assert plan.sources is not None, "in the layout MASKED"
        sources = (plan.sources.token_of_slot, plan.sources.ranges)
        return ReceivedSlabs(
            x=out.rows.data,
            scales=columns,
            counts=out.index.num_tokens_per_expert,
            handle=LowLatencyHandle.of(ranks, x.shape[0], shape, sources, (buffer, plan)),
            receive=receive,
        )

    def _columns_of(self, rows: Tensor, scales: Tensor) -> Tensor:
        """Return memory for scales [L, W * M, S], column-major, at the address it had before."""
        found = self._columns.get(rows.data_ptr())
        if found is None:
            num_local, capacity, width = scales.shape
            memory = scales.new_empty(num_local, width, capacity, dtype=torch.float32)
            found = self._columns[rows.data_ptr()] = memory.transpose(1, 2)
        return found


def refuse_low_latency_combine(handle: LowLatencyHandle, error: EPError) -> NoReturn:
    """Take part in the combine of the other ranks without rows, so that they learn of `error`.

    Raises:
        error: always.
    """
    if isinstance(handle.sent, SentPairs):
        handle.ranks.refuse_combine(Mode.LOW_LATENCY, error)
    buffer, plan = handle.sent
    combine_error(buffer, handle.slab_shape[2], handle.ranks.device, error, plan)
    raise error


def _dispatch_pairs(
    ranks: Ranks, x: Tensor, topk_ids: Tensor, shape: LowLatencyShape
) -> ReceivedSlabs:
    """Begin a dispatch of pairs.

    x and topk_ids are read here, the exchange is in the second half: a send waits for nobody.
    """
    pairs, rows = SentPairs.of(topk_ids), Rows(x=x)
    if shape.use_fp8:
        quantized = quantize(x, shape.wire_format)
        assert quantized.scales is not None, "FP8 has scales"
        packed = pack_scales(quantized.scales) if shape.use_ue8m0 else quantized.scales.float()
        rows = Rows(x=quantized.data, scales=packed)
    error = _overflow_of(pairs, shape, ranks)
    weights = (pairs.tokens + ranks.rank * shape.max_tokens).float()
    scales = None if rows.scales is None else _rows_of(rows.scales, pairs.tokens)
    sent = Rows(x=_rows_of(rows.x, pairs.tokens), scales=scales)
    num_local, capacity = shape.num_local, shape.capacity
    if scales is not None:
        # Column-major: a GEMM reads the scales of neighbouring rows together.
        scales = scales.new_empty(num_local, scales.shape[1], capacity).transpose(1, 2)
    sources = (
        topk_ids.new_empty(num_local, capacity, dtype=torch.int32),
        topk_ids.new_empty(num_local, shape.num_ranks),
    )

    def receive() -> None:
        if pairs.exchange is not None:
            raise HandleError(f"low_latency_dispatch: the hook was called twice ({ranks.where})")
        received = dispatch_rows(
            ranks,
            sent,
            pairs.experts[:, None],
            weights[:, None],
            spec_of(sent.form, 1, num_local),
            options=Options(num_max_tokens_per_rank=shape.max_tokens),
            error=error,
        )
        pairs.exchange, pairs.row_of_pair = received.exchange, _write(slabs, received, shape)

    slabs = ReceivedSlabs(
        x=sent.x.new_empty(num_local, capacity, x.shape[1]),
        scales=scales,
        counts=topk_ids.new_empty(num_local, dtype=torch.int32),
        handle=LowLatencyHandle.of(ranks, x.shape[0], shape, sources, pairs),
        receive=receive,
    )
    return slabs


def _overflow_of(pairs: SentPairs, shape: LowLatencyShape, ranks: Ranks) -> EPError | None:
    """Return the error of a rank that names an expert so often that its slab could be too small."""
    is_known = (pairs.experts >= 0) & (pairs.experts < shape.num_experts)
    most = int(torch.bincount(pairs.experts[is_known], minlength=1).max())
    if most <= shape.max_tokens:
        return None
    return CapacityError(
        f"low_latency_dispatch: topk_idx names an expert {most} times, expected at most "
        f"num_max_dispatch_tokens_per_rank = {shape.max_tokens} ({ranks.where}); name each expert "
        "once in a row"
    )


def _rows_of(rows: Tensor, positions: Tensor) -> Tensor:
    """Return rows of a tensor of any dtype; indexing knows no 8-bit floats."""
    return rows.contiguous().view(torch.uint8)[positions].view(rows.dtype)


def _write(slabs: ReceivedSlabs, received: ReceivedRows, shape: LowLatencyShape) -> Tensor:
    """Write the slabs; return the row of each received pair in them."""
    index, num_ranks = received.dispatched.index, shape.num_ranks
    assert index.slots_of_row is not None, "an index over rows has its inverse"
    experts = received.topk_ids[:, 0]
    position = (index.slots_of_row[:, 0] - index.first_slot[experts]).long()
    row_of_pair = experts * shape.capacity + position
    source = received.topk_weights[:, 0].long()
    data = slabs.x.view(torch.uint8).flatten(0, 1)
    data[row_of_pair] = received.rows.x.view(torch.uint8)
    if slabs.scales is not None and received.rows.scales is not None:
        slabs.scales[experts, position] = received.rows.scales
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
    topk: tuple[Tensor, Tensor],
    out: Tensor | None,
) -> tuple[Tensor, Receive]:
    """Read the rows here, and topk, ids and weights, in the second half, as in V1."""
    exchange, where = pairs.exchange, handle.ranks.where
    if exchange is None:
        fault = f"low_latency_combine: handle is of a batch that is not received ({where})"
        error = f"{fault}, expected one whose hook was called; call the hook of its dispatch first"
        handle.ranks.refuse_combine(Mode.LOW_LATENCY, HandleError(error))
    rows = x.reshape(-1, x.shape[2])[pairs.row_of_pair]
    y = x.new_empty(handle.num_tokens, x.shape[2]) if out is None else out
    pending = [exchange]

    def receive() -> None:
        if not pending:
            raise HandleError(f"low_latency_combine: the hook was called twice ({where})")
        returned, _ = return_rows(pending.pop(), rows)
        ids, weights = topk[0].long(), detached(topk[1])
        positions = pairs.positions(ids, handle[4])
        # In float32 and in the order of k; what was not sent is NaN.
        total = returned.new_zeros(y.shape, dtype=torch.float32)
        for k in range(ids.shape[1]):
            position = positions[:, k]
            is_sent, is_chosen = position >= 0, ids[:, k] != -1
            total[is_sent] += returned[position[is_sent]].float() * weights[is_sent, k].unsqueeze(1)
            total[is_chosen & ~is_sent] = float("nan")
        detached(y).copy_(total)

    return y, receive
