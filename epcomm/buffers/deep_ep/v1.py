"""Normal mode of deep_ep V1: one copy of a token per destination rank, over NVLink and RDMA.

Its dispatch returns rows by (source rank, token) with the ids of each; the expert-major index is
built here from those. Its combine adds rows up and knows no weights, so the runner applies them, or
the reduction of slots to rows that comes before. Backward goes along the cached handle.

With max_recv_slots nothing is read on the host: deep_ep then hands out W * M rows, whose unused
ones have ids of -1 (num_worst_tokens, which it has on one host only).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from epcomm.buffers.base import Combined, DispatchCall, Dispatched
from epcomm.buffers.deep_ep.rows import LegacyHandle, Rows, as_argument, as_wire, row_bytes_of
from epcomm.buffers.sizes import (
    CallShape,
    Region,
    index_region,
    max_slots_of,
    rows_region,
    slot_regions,
)
from epcomm.buffers.traffic import BufferTraffic
from epcomm.buffers.vendor import COMBINE, DISPATCH, VendorBuffer
from epcomm.config import Mode
from epcomm.ops.slots import (
    Members,
    build_slot_index,
    count_experts,
    reduce_rows,
    slots_by_row,
    spread_to_slots,
)
from epcomm.ops.static_slots import aligned_counts, build_static_slot_index
from epcomm.platforms.deep_ep_package import (
    WIRE_DTYPES,
    WITH_LEGACY_BUFFER,
    device_types,
    format_reasons,
    load_deep_ep,
    probe_deep_ep,
)
from epcomm.protocol import BatchFlags
from epcomm.records import ExchangePlan, SlotIndex
from epcomm.spec import Availability, BufferCaps, BufferSpec
from epcomm.types import Layout, RowsPer

# Ranks for which it has a table of chunk sizes.
_WORLD_SIZES = (2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 144, 160)
# Ranks that NVLink joins; beyond them it needs RDMA.
MAX_NVLINK_RANKS = 8
# Source of the limits: deep_ep, csrc/kernels/legacy.
_MAX_TOP_K, _MAX_LOCAL_EXPERTS = 32, 1024
# Half a row of bfloat16 is copied 16 bytes at a time, in pieces of 8192 bytes less a word.
_HIDDEN_MULTIPLE, _MAX_HIDDEN = 16, 8176
# Entries of a handle of ranks that NVLink joins.
_NVLINK_HANDLE = 6
# Source of the NVLink memory: deep_ep, csrc/kernels/legacy, Config.get_nvl_buffer_size_hint, with
# 20 SMs, 256 tokens a chunk, and capacity for 128 ids, weights and scales a token.
_NUM_CHANNELS, _CHUNK_TOKENS = 10, 256
_CHUNK_ENTRY_BYTES = 8 + 128 * (8 + 4 + 4)


@dataclass(frozen=True, kw_only=True, eq=False)
class DeepEPV1ExchangePlan(ExchangePlan):
    """Its handle, and the index over the rows.

    slots_by_row: the slots of each received row, in k order.
    rows_to_rank, rows_from_rank: [W], int32 and int64, on the device.
    has_failed: bool scalar on the device, or None where faults are raised in dispatch.
    """

    num_tokens: int
    num_rows: int
    index: SlotIndex
    handle: LegacyHandle
    slots_by_row: Members
    rows_to_rank: Tensor
    rows_from_rank: Tensor
    has_failed: Tensor | None


class DeepEPV1Buffer(VendorBuffer):
    """Exact sizes; the host waits for the counts, once a dispatch."""

    name: ClassVar[str] = "deep_ep_v1"
    modes: ClassVar[frozenset[Mode]] = frozenset({Mode.NORMAL})

    @classmethod
    def probe(cls, environment: object) -> Availability:
        return probe_deep_ep(WITH_LEGACY_BUFFER)

    @classmethod
    def caps(cls, mode: Mode) -> BufferCaps:
        return BufferCaps(
            layout=Layout.ROWS,
            trainable=True,
            ordered=True,
            wire_dtypes=WIRE_DTYPES,
            max_top_k=_MAX_TOP_K,
            hidden_multiple=_HIDDEN_MULTIPLE,
            reports_faults=False,
            device_types=device_types(),
        )

    @classmethod
    def lacks(cls, mode: Mode, spec: BufferSpec, world_size: int) -> tuple[str, ...]:
        reasons = format_reasons(spec)
        if spec.hidden_size > _MAX_HIDDEN:
            reasons.append(f"hidden_size is {spec.hidden_size}, at most {_MAX_HIDDEN}")
        if world_size not in _WORLD_SIZES:
            sizes = ", ".join(map(str, _WORLD_SIZES))
            reasons.append(f"serves {sizes} ranks, not {world_size}")
        if spec.num_local_experts > _MAX_LOCAL_EXPERTS:
            reasons.append(f"has at most {_MAX_LOCAL_EXPERTS} experts a rank")
        return tuple(reasons)

    @classmethod
    def region_bytes(cls, spec: BufferSpec, world_size: int) -> tuple[Region, ...]:
        row, copies = row_bytes_of(spec), min(spec.top_k, world_size)
        max_tokens = spec.max_tokens_per_rank
        max_rows = None if max_tokens is None else max_tokens * world_size
        nvlink_ranks = min(world_size, MAX_NVLINK_RANKS)
        chunk = 2 * spec.hidden_size + _CHUNK_ENTRY_BYTES
        nvlink_bytes = _NUM_CHANNELS * nvlink_ranks * _CHUNK_TOKENS * chunk
        return (
            Region(name="deep_ep's chunks over NVLink", max_bytes=nvlink_bytes),
            rows_region("received rows", row.dispatch, per_token=copies, max_rows=max_rows),
            index_region(spec, rows_per_token=copies, max_rows=max_rows),
            *slot_regions(spec, row_bytes=row.dispatch, max_rows=max_rows),
            rows_region("partial sums", row.combine, per_token=copies, max_rows=max_rows),
        )

    @classmethod
    def wire_bytes(
        cls, spec: BufferSpec, call: CallShape, *, backward: bool = False
    ) -> BufferTraffic:
        row = row_bytes_of(spec, backward=backward)
        # The exchange of counts is deep_ep's own.
        return BufferTraffic(
            dispatch_bytes=call.rows_sent * row.dispatch,
            combine_bytes=call.rows_received * row.combine,
        )

    def prepare(self) -> None:
        package: Any = load_deep_ep(WITH_LEGACY_BUFFER)
        hidden_bytes = 2 * self._spec.hidden_size
        configs = [
            package.Buffer.get_dispatch_config(self._world_size),
            package.Buffer.get_combine_config(self._world_size),
        ]
        ranks = self._world_size
        self._buffer = package.Buffer(
            self._process_group,
            num_nvl_bytes=max(c.get_nvl_buffer_size_hint(hidden_bytes, ranks) for c in configs),
            num_rdma_bytes=max(c.get_rdma_buffer_size_hint(hidden_bytes, ranks) for c in configs),
            explicitly_destroy=True,
        )

    def dispatch(self, call: DispatchCall) -> Dispatched:
        self._check_open()
        ids, flags = self._guard(call)
        received = self._exchange(call, ids, num_worst_tokens=0)
        self._raise_own(call)
        counts = count_experts(received.local_ids, self._spec.num_local_experts)
        index = build_slot_index(
            received.local_ids,
            counts,
            received.host_counts,
            expert_alignment=self._spec.expert_alignment,
        )
        return self._dispatched(call, received, index, flags, has_failed=None)

    def cached_dispatch(self, hidden_states: Tensor, exchange_plan: ExchangePlan) -> Tensor:
        assert isinstance(exchange_plan, DeepEPV1ExchangePlan), "an exchange plan of this buffer"
        self._check_open()
        rows, *_ = self._buffer.dispatch(hidden_states.contiguous(), handle=exchange_plan.handle)
        backward = row_bytes_of(self._spec, backward=True)
        self._count_bytes(DISPATCH, exchange_plan.rows_to_rank, backward.dispatch)
        return rows

    def combine(
        self,
        rows: Tensor,
        exchange_plan: ExchangePlan,
        *,
        rows_per: RowsPer,
        slot_weights: Tensor | None = None,
        row_scalars: Tensor | None = None,
    ) -> Combined:
        assert isinstance(exchange_plan, DeepEPV1ExchangePlan), "an exchange plan of this buffer"
        self._check_open()
        if row_scalars is None:
            self._compare_combine()
        if rows_per is RowsPer.SLOT:
            rows = reduce_rows(rows, exchange_plan.slots_by_row, slot_weights)
        if exchange_plan.has_failed is not None:
            # The others do not know, so that sums without this rank's part may not look right.
            rows = rows.masked_fill(exchange_plan.has_failed, float("nan"))
        y, scalars, _ = self._buffer.combine(
            rows.contiguous(), exchange_plan.handle, topk_weights=row_scalars
        )
        row = row_bytes_of(self._spec, backward=row_scalars is not None)
        self._count_bytes(COMBINE, exchange_plan.rows_from_rank, row.combine)
        if exchange_plan.has_failed is not None:
            y = y.masked_fill(exchange_plan.has_failed, float("nan"))
        return Combined(y=y, scalars=scalars)

    def _exchange(self, call: DispatchCall, ids: Tensor, *, num_worst_tokens: int) -> _Received:
        per_rank, per_rdma_rank, per_expert, is_in_rank, _ = self._buffer.get_dispatch_layout(
            ids, self._num_experts
        )
        rows, local_ids, weights, counts, handle, _ = self._buffer.dispatch(
            as_argument(call.wire_tensor(self._spec.dispatch_format)),
            num_tokens_per_rank=per_rank,
            num_tokens_per_rdma_rank=per_rdma_rank,
            is_token_in_rank=is_in_rank,
            num_tokens_per_expert=per_expert,
            topk_idx=ids,
            topk_weights=call.topk_weights.contiguous(),
            num_worst_tokens=num_worst_tokens,
        )
        self._count_bytes(DISPATCH, per_rank, row_bytes_of(self._spec).dispatch)
        return _Received(
            rows=rows,
            local_ids=local_ids,
            weights=weights,
            host_counts=tuple(counts),
            handle=handle,
            rows_to_rank=per_rank,
        )

    def _dispatched(
        self,
        call: DispatchCall,
        received: _Received,
        index: SlotIndex,
        flags: BatchFlags,
        has_failed: Tensor | None,
    ) -> Dispatched:
        wire = as_wire(received.rows, self._spec.dispatch_format)
        ends = _row_ends(received.handle, self._rank)
        exchange_plan = DeepEPV1ExchangePlan(
            num_tokens=call.topk_ids.shape[0],
            num_rows=wire.data.shape[0],
            index=index,
            handle=received.handle,
            slots_by_row=slots_by_row(index),
            rows_to_rank=received.rows_to_rank,
            rows_from_rank=ends.diff(prepend=ends.new_zeros(1)),
            has_failed=has_failed,
        )
        return Dispatched(
            rows=wire,
            index=index,
            slot_weights=spread_to_slots(received.weights, index),
            exchange_plan=exchange_plan,
            any_flags=flags,
        )

    def _destroy(self) -> None:
        self._buffer.destroy()


class DeepEPV1StaticBuffer(DeepEPV1Buffer):
    """W * M rows and a budget of slots; the host reads nothing."""

    name: ClassVar[str] = "deep_ep_v1"

    @classmethod
    def caps(cls, mode: Mode) -> BufferCaps:
        return replace(super().caps(mode), is_static=True)

    @classmethod
    def lacks(cls, mode: Mode, spec: BufferSpec, world_size: int) -> tuple[str, ...]:
        reasons = super().lacks(mode, spec, world_size)
        if world_size > MAX_NVLINK_RANKS:
            reasons += (f"has static sizes for at most {MAX_NVLINK_RANKS} ranks of one host",)
        return reasons

    def prepare(self) -> None:
        super().prepare()
        assert self._spec.max_tokens_per_rank is not None, "plan() has checked the limit"
        self._num_rows = self._spec.max_tokens_per_rank * self._world_size
        self._max_slots = self._spec.max_recv_slots or max_slots_of(self._spec, self._num_rows)

    def dispatch(self, call: DispatchCall) -> Dispatched:
        self._check_open()
        ids, fault, flags = self._guard_on_device(call)
        received = self._exchange(call, ids, num_worst_tokens=self._num_rows)
        num_local, alignment = self._spec.num_local_experts, self._spec.expert_alignment
        required = aligned_counts(count_experts(received.local_ids, num_local), alignment).sum()
        has_failed = self._record(call, fault, required, self._max_slots)
        local_ids = torch.where(has_failed, -1, received.local_ids)
        index = build_static_slot_index(
            local_ids, num_local, self._max_slots, expert_alignment=alignment
        )
        return self._dispatched(call, received, index, flags, has_failed)


@dataclass(frozen=True, kw_only=True, eq=False)
class _Received:
    """What dispatch() of deep_ep returned.

    local_ids: [R, K], int64, experts of this rank or -1.   weights: [R, K], float32.
    host_counts: slots of each expert; empty where the host did not wait.
    """

    rows: Rows
    local_ids: Tensor
    weights: Tensor
    host_counts: tuple[int, ...]
    handle: LegacyHandle
    rows_to_rank: Tensor


def _row_ends(handle: LegacyHandle, rank: int) -> Tensor:
    """[W], int64: where the rows of each source rank end, as the handle says."""
    # Over NVLink its first entry is [W, W], from rank to rank; with RDMA its seventh is [W].
    ends = handle[0][:, rank] if len(handle) == _NVLINK_HANDLE else handle[6]
    return ends.to(torch.int64)
