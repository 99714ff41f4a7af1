"""Low latency of V1 on buffers whose slots come home apart: low latency over NVLink.

Slabs, counts and sources are memory of a receive buffer, used in turn: their addresses stay, also
in a captured graph, and a third batch overwrites the first, as in V1. Scales are copied once, into
columns.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NoReturn, Protocol, runtime_checkable

import torch
from torch import Tensor

from epcomm.buffers.base import Buffer, DispatchCall, Dispatched
from epcomm.config import Mode
from epcomm.errors import EPError
from epcomm.integrations.deep_ep.ranks import Ranks
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
from epcomm.types import WireFormat

_BF16 = WireFormat.of(torch.bfloat16)


class SlotSources(Protocol):
    """Where slots came from, see the buffers: [L, W * M], int32, and [L, W], int64."""

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
        self,
        ranks: Ranks,
        x: Tensor,
        topk_ids: Tensor,
        topk_weights: Tensor,
        out: Tensor | None,
    ) -> tuple[Tensor, Receive]:
        """Send by the routing of the dispatch; topk_weights are read in the second half."""
        del ranks, topk_ids
        pending = self.buffer.combine_slots_async(
            x.flatten(0, 1), self.exchange_plan, topk_weights, out=out
        )
        assert pending.record is not None, "y exists before it is received"
        return pending.record.y, lambda: _forget(pending.wait())

    def refuse_combine(self, error: EPError) -> NoReturn:
        self.buffer.refuse_combine_of(self.exchange_plan, error)
        raise error


@dataclass(kw_only=True, eq=False)
class SlotMemory:
    """The scales in columns of each receive buffer, by the address of its rows."""

    columns: dict[tuple[int, torch.dtype], Tensor] = field(default_factory=dict)

    def of(self, rows: Tensor, scales: Tensor) -> Tensor:
        """Return memory for scales [L, W * M, S], column-major, at the address it had before."""
        dtype = scales.dtype if scales.dtype == torch.int32 else torch.float32
        key = (rows.data_ptr(), dtype)
        found = self.columns.get(key)
        if found is None:
            num_local, capacity, width = scales.shape
            memory = scales.new_empty(num_local, width, capacity, dtype=dtype)
            found = self.columns[key] = memory.transpose(1, 2)
        return found


def begin_dispatch(
    ranks: Ranks, memory: SlotMemory, x: Tensor, topk_ids: Tensor, sizes: Sizes, wire: Wire
) -> tuple[Slabs, Receive]:
    """Begin a dispatch of x [T, H]; what is returned beside the slabs receives them."""
    row = (x.shape[1], topk_ids.shape[1])
    buffer = ranks.open(Mode.LOW_LATENCY, _spec_of(row, sizes, _format_of(wire)))
    call = DispatchCall(
        hidden_states=x,
        topk_ids=topk_ids.long(),
        # Not read: weights come with combine.
        topk_weights=topk_ids,
        flags=BatchFlags.NONE,
    )
    pending = buffer.dispatch_async(call)
    out = pending.record
    assert out is not None, "rows exist before they are received"
    scales, columns = _scales_of(out, wire), None
    if scales is not None:
        columns = memory.of(out.rows.data, scales)

    def receive() -> None:
        pending.wait()
        if scales is not None and columns is not None:
            columns.copy_(scales)

    slabs = Slabs(
        x=out.rows.data,
        scales=columns,
        counts=out.index.num_tokens_per_expert,
        handle=_handle_of(buffer, out, x, sizes),
    )
    return slabs, receive


def memory_bytes(
    sizes: tuple[int, int, int], hidden_size: int, top_k: int, *, use_fp8: bool
) -> int:
    """Return the bytes that a rank takes for low latency over NVLink; sizes: M, E, W. Local."""
    max_tokens, num_experts, num_ranks = sizes
    shape = Sizes(max_tokens=max_tokens, num_experts=num_experts, num_ranks=num_ranks)
    wire = FP8_FLOAT32_SCALES if use_fp8 else _BF16
    regions = buffer_class("NVLinkMaskedBuffer").region_bytes(
        _spec_of((hidden_size, top_k), shape, wire), num_ranks
    )
    return sum(region.max_bytes or 0 for region in regions)


def _spec_of(row: tuple[int, int], sizes: Sizes, wire: WireFormat) -> BufferSpec:
    """Return the specification of the buffer; row: H and K."""
    return BufferSpec(
        hidden_size=row[0],
        top_k=row[1],
        num_local_experts=sizes.num_local,
        dispatch_format=wire,
        hidden_format=_BF16,
        max_tokens_per_rank=sizes.max_tokens,
        returns_slots=True,
    )


def _format_of(wire: Wire) -> WireFormat:
    if not wire.fp8:
        return _BF16
    return FP8_POWER_OF_TWO_SCALES if wire.power_of_two else FP8_FLOAT32_SCALES


def _handle_of(buffer: Buffer, out: Dispatched, x: Tensor, sizes: Sizes) -> SlotsHandle:
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
    handle.keep(x.shape[0], sizes)
    handle.buffer, handle.exchange_plan = buffer, plan
    return handle


def _scales_of(out: Dispatched, wire: Wire) -> Tensor | None:
    """Return scales [L, W * M, S] as they arrive; packed: four exponents in an int32."""
    scales = out.rows.scales
    if scales is None or scales.dtype == torch.float32:
        return scales
    return scales.view(torch.int32) if wire.packed else scales


def _forget(record: object) -> None:
    del record
