"""Low latency of V1 on buffers whose slots come home apart: low latency over NVLink.

Slabs, scales, counts and sources are memory of a receive buffer, used in turn: their addresses
stay, also in a captured graph, and a third batch overwrites the first, as in V1. Powers of two that
are wanted as float32 are copied once, for they travel as bytes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NoReturn, Protocol, runtime_checkable

import torch
from torch import Tensor

from epcomm.buffers.base import Buffer, Dispatched
from epcomm.calls.call import DispatchCall
from epcomm.config import Mode
from epcomm.errors import EPError
from epcomm.integrations.deep_ep.ranks import OpenBuffer, Ranks
from epcomm.integrations.deep_ep.v1.low_latency import (
    LowLatencyHandle,
    Receive,
    Sizes,
    Slabs,
    Wire,
)
from epcomm.protocol import BatchFlags
from epcomm.quantization import FP8_FLOAT32_SCALES, FP8_POWER_OF_TWO_SCALES
from epcomm.records import ExchangePlan
from epcomm.registry import buffer_class
from epcomm.spec import BufferSpec
from epcomm.types import ROW_MAJOR, ScaleLayout, WireFormat

_BF16 = WireFormat.of(torch.bfloat16)
# Rows of a column of scales: 16 bytes, at whose multiples the tensor memory access unit reads.
_ALIGNMENT = 4


class SlotSources(Protocol):
    """Tells where slots came from, see the buffers: [L, W * M], int32, and [L, W], int64."""

    @property
    def token_of_slot(self) -> Tensor: ...

    @property
    def ranges(self) -> Tensor: ...


@runtime_checkable
class WithSources(Protocol):
    """An exchange plan that knows them."""

    @property
    def sources(self) -> SlotSources | None: ...


class SlotsHandle(LowLatencyHandle):
    """A handle whose slots come home apart."""

    buffer: Buffer
    exchange_plan: ExchangePlan

    def begin_combine(
        self, x: Tensor, topk_ids: Tensor, topk_weights: Tensor, out: Tensor | None
    ) -> tuple[Tensor, Receive]:
        """Send by the routing of the dispatch; topk_weights are read in the second half."""
        del topk_ids
        pending = self.buffer.combine_slots_async(
            x.flatten(0, 1), self.exchange_plan, topk_weights, out=out
        )
        assert pending.record is not None, "y exists before it is received"
        return pending.record.y, lambda: _forget(pending.wait())

    def refuse_combine(self, error: EPError) -> NoReturn:
        self.buffer.refuse_combine(error, self.exchange_plan)
        raise error


@dataclass(kw_only=True, eq=False)
class SlotMemory:
    """The buffers by the sizes of their calls, and scales as float32 by the address of their rows.

    buffers: by H, K, M, E and the three flags of the wire; a key takes less time than a BufferSpec.
    """

    buffers: dict[tuple[int, ...], OpenBuffer] = field(default_factory=dict)
    columns: dict[int, Tensor] = field(default_factory=dict)

    def buffer(self, ranks: Ranks, row: tuple[int, int], sizes: Sizes, wire: Wire) -> Buffer:
        """Return the buffer for such rows, H and K; see Ranks.open()."""
        flags = (wire.fp8, wire.power_of_two, wire.packed)
        key = (*row, sizes.max_tokens, sizes.num_experts, *flags)
        found = self.buffers.get(key)
        if found is not None:
            return ranks.open_again(Mode.LOW_LATENCY, found)
        spec = spec_of(row, sizes, wire)
        buffer = ranks.open(Mode.LOW_LATENCY, spec)
        self.buffers[key] = (buffer, spec)
        return buffer

    def of(self, rows: Tensor, scales: Tensor) -> Tensor:
        """Return memory for scales [L, W * M, S], column-major, at the address it had before."""
        found = self.columns.get(rows.data_ptr())
        if found is None:
            num_local, capacity, width = scales.shape
            memory = scales.new_empty(num_local, width, capacity, dtype=torch.float32)
            found = self.columns[rows.data_ptr()] = memory.transpose(1, 2)
        return found


def begin_dispatch(
    ranks: Ranks,
    memory: SlotMemory,
    x: Tensor,
    topk_ids: Tensor,
    sizes: Sizes,
    wire: Wire,
    *,
    has_hook: bool,
) -> tuple[Slabs, Receive]:
    """Begin a dispatch of x [T, H]; what is returned beside the slabs receives them.

    has_hook: other work may come before they are received; else the receiving kernel is launched
        here, and overlaps with the sending one.
    """
    row = (x.shape[1], topk_ids.shape[1])
    buffer = memory.buffer(ranks, row, sizes, wire)
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
        columns = memory.of(out.rows.data, travelled)

    def receive() -> None:
        if pending is not None:
            pending.wait()
        if columns is not None and travelled is not None and columns is not travelled:
            columns.copy_(travelled)

    slabs = Slabs(
        x=out.rows.data,
        scales=columns,
        counts=out.index.num_tokens_per_expert,
        handle=_handle_of(ranks, buffer, out, x, sizes),
    )
    return slabs, receive


def memory_bytes(
    sizes: tuple[int, int, int], hidden_size: int, top_k: int, *, use_fp8: bool
) -> int:
    """Return the bytes that a rank takes for low latency over NVLink; sizes: M, E, W. Local."""
    max_tokens, num_experts, num_ranks = sizes
    shape = Sizes(max_tokens=max_tokens, num_experts=num_experts, num_ranks=num_ranks)
    wire = Wire(fp8=use_fp8, power_of_two=False, packed=False)
    regions = buffer_class("NVLinkMaskedBuffer").region_bytes(
        spec_of((hidden_size, top_k), shape, wire), num_ranks
    )
    return sum(region.max_bytes or 0 for region in regions)


def spec_of(row: tuple[int, int], sizes: Sizes, wire: Wire) -> BufferSpec:
    """Return the specification of the buffer; row: H and K."""
    return BufferSpec(
        hidden_size=row[0],
        top_k=row[1],
        num_local_experts=sizes.num_local,
        dispatch_format=_format_of(wire),
        hidden_format=_BF16,
        max_tokens_per_rank=sizes.max_tokens,
        returns_slots=True,
        scale_layout=_layout_of(wire),
    )


def _format_of(wire: Wire) -> WireFormat:
    if not wire.fp8:
        return _BF16
    return FP8_POWER_OF_TWO_SCALES if wire.power_of_two else FP8_FLOAT32_SCALES


def _layout_of(wire: Wire) -> ScaleLayout:
    """Return how the scales of slabs lie: by column, four exponents in an int32 if packed."""
    if not wire.fp8 or (wire.power_of_two and not wire.packed):
        return ROW_MAJOR
    return ScaleLayout(column_major=True, alignment=_ALIGNMENT, packed=wire.packed)


def _handle_of(
    ranks: Ranks, buffer: Buffer, out: Dispatched, x: Tensor, sizes: Sizes
) -> SlotsHandle:
    plan = out.exchange_plan
    assert isinstance(plan, WithSources), "buffers whose slots come home apart know their sources"
    assert plan.sources is not None, "in the layout MASKED"
    handle = SlotsHandle(
        (
            plan.sources.token_of_slot,
            plan.sources.ranges,
            sizes.max_tokens,
            x.shape[1],
            sizes.num_experts,
        )
    )
    handle.keep(ranks, x.shape[0], sizes)
    handle.buffer, handle.exchange_plan = buffer, plan
    return handle


def _forget(record: object) -> None:
    del record
