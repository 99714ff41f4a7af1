"""Normal mode of deep_ep V2: one copy of a token per destination rank, ids beside each row.

Rows of one rank come in any order, which another dispatch of the same batch does not repeat.
Backward under activation checkpointing joins two dispatches, so rows are asked for in order here
(deterministic=True: a sort, and a pass over the rows, inside deep_ep). Without a wait of the host
(max_recv_slots) W * M rows are handed out, and only the counts on the device say how many are real:
ids, weights and rows behind them are whatever was in memory. Combine adds rows up and knows no
weights. Backward goes along the handle, with the number of SMs that it was made with: asked
for none, deep_ep would look for the number of experts where a cached call has none.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from epcomm.buffers.base import Combined, DispatchCall, Dispatched
from epcomm.buffers.deep_ep.rows import ElasticHandle, Rows, as_argument, as_wire, row_bytes_of
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
    WITH_ELASTIC_BUFFER,
    device_types,
    format_reasons,
    load_deep_ep,
    probe_deep_ep,
)
from epcomm.protocol import BatchFlags
from epcomm.records import ExchangePlan, SlotIndex
from epcomm.spec import Availability, BufferCaps, BufferSpec
from epcomm.types import Layout, RowsPer, WireDtype

# Source of the limits: deep_ep, csrc/elastic/buffer.hpp and impls.
_MAX_TOP_K = 32
_HIDDEN_MULTIPLE = 256
_MAX_LOCAL_EXPERTS, _MAX_EXPERTS, _MAX_RANKS = 256, 2048, 1024


@dataclass(frozen=True, kw_only=True, eq=False)
class DeepEPV2ExchangePlan(ExchangePlan):
    """As DeepEPV1ExchangePlan, with the handle of the elastic buffer."""

    num_tokens: int
    num_rows: int
    index: SlotIndex
    handle: ElasticHandle
    slots_by_row: Members | None
    rows_to_rank: Tensor
    rows_from_rank: Tensor
    has_failed: Tensor | None


class ElasticBase(VendorBuffer):
    """What all ways through the elastic buffer share.

    is_in_order: rows come by (source rank, token).
    empties_failed: a call that has failed here computes nothing for the others either.
    """

    name: ClassVar[str]
    is_in_order: ClassVar[bool]
    empties_failed: ClassVar[bool] = True

    @classmethod
    def probe(cls, environment: object) -> Availability:
        return probe_deep_ep(WITH_ELASTIC_BUFFER)

    @classmethod
    def lacks(cls, mode: Mode, spec: BufferSpec, world_size: int) -> tuple[str, ...]:
        reasons = format_reasons(spec)
        if spec.max_tokens_per_rank is None:
            reasons.append("allocates once; set max_tokens_per_rank")
        num_experts = spec.num_local_experts * world_size
        limits = (
            ("ranks", world_size, _MAX_RANKS),
            ("experts", num_experts, _MAX_EXPERTS),
            ("experts of one rank", spec.num_local_experts, _MAX_LOCAL_EXPERTS),
        )
        reasons += [
            f"{found} {what}, at most {most}" for what, found, most in limits if found > most
        ]
        return tuple(reasons)

    @classmethod
    def region_bytes(cls, spec: BufferSpec, world_size: int) -> tuple[Region, ...]:
        row, copies = row_bytes_of(spec), min(spec.top_k, world_size)
        max_rows = (spec.max_tokens_per_rank or 0) * world_size
        return (
            # Rows of every rank in dispatch and combine; its size hint, asked in prepare(), is a
            # little more.
            Region(name="deep_ep's rows", max_bytes=max_rows * max(row.dispatch, row.combine)),
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
        return BufferTraffic(
            dispatch_bytes=call.rows_sent * row.dispatch,
            combine_bytes=call.rows_received * row.combine,
        )

    def prepare(self) -> None:
        package: Any = load_deep_ep(WITH_ELASTIC_BUFFER)
        assert self._spec.max_tokens_per_rank is not None, "plan() has checked the limit"
        self._max_tokens = self._spec.max_tokens_per_rank
        self._num_rows = self._max_tokens * self._world_size
        is_fp8 = self._spec.dispatch_format.dtype is WireDtype.FP8_E4M3
        self._buffer = package.ElasticBuffer(
            self._process_group,
            num_max_tokens_per_rank=self._max_tokens,
            hidden=self._spec.hidden_size,
            num_topk=self._spec.top_k,
            # Gradients travel in bfloat16 along the same exchange plan, and need its capacity.
            use_fp8_dispatch=is_fp8 and not self.is_in_order,
            deterministic=self.is_in_order,
            explicitly_destroy=True,
        )

    def _exchange(
        self,
        call: DispatchCall,
        ids: Tensor,
        *,
        expert_alignment: int,
        do_cpu_sync: bool,
        do_expand: bool = False,
    ) -> tuple[Rows, Tensor, Tensor, ElasticHandle]:
        """dispatch() of the elastic buffer: rows, ids (not of expanded rows), weights, handle."""
        rows, local_ids, weights, handle, _ = self._buffer.dispatch(
            as_argument(call.wire_tensor(self._spec.dispatch_format)),
            topk_idx=ids,
            topk_weights=call.topk_weights.contiguous(),
            num_experts=self._num_experts,
            num_max_tokens_per_rank=self._max_tokens,
            expert_alignment=expert_alignment,
            do_cpu_sync=do_cpu_sync,
            do_expand=do_expand,
        )
        return rows, local_ids, weights, handle

    def cached_dispatch(self, hidden_states: Tensor, exchange_plan: ExchangePlan) -> Tensor:
        assert isinstance(exchange_plan, DeepEPV2ExchangePlan), "an exchange plan of this buffer"
        self._check_open()
        rows, *_ = self._buffer.dispatch(
            hidden_states.contiguous(),
            handle=exchange_plan.handle,
            num_sms=exchange_plan.handle.num_sms,
        )
        self._count_bytes(
            DISPATCH, exchange_plan.rows_to_rank, row_bytes_of(self._spec, backward=True).dispatch
        )
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
        assert isinstance(exchange_plan, DeepEPV2ExchangePlan), "an exchange plan of this buffer"
        self._check_open()
        if row_scalars is None:
            self._compare_combine()
        if rows_per is RowsPer.SLOT:
            rows = self._sums(rows, exchange_plan, slot_weights)
        if exchange_plan.has_failed is not None and self.empties_failed:
            # The others do not know, so that sums without this rank's part may not look right.
            rows = rows.masked_fill(exchange_plan.has_failed, float("nan"))
        y, scalars, _ = self._buffer.combine(
            rows.contiguous(),
            exchange_plan.handle,
            topk_weights=row_scalars,
            num_sms=exchange_plan.handle.num_sms,
        )
        row = row_bytes_of(self._spec, backward=row_scalars is not None)
        self._count_bytes(COMBINE, exchange_plan.rows_from_rank, row.combine)
        if exchange_plan.has_failed is not None:
            y = y.masked_fill(exchange_plan.has_failed, float("nan"))
        return Combined(y=y, scalars=scalars)

    def _sums(
        self, rows: Tensor, exchange_plan: DeepEPV2ExchangePlan, slot_weights: Tensor | None
    ) -> Tensor:
        """One row for each that deep_ep expects back."""
        assert exchange_plan.slots_by_row is not None, "an index over rows has its inverse"
        return reduce_rows(rows, exchange_plan.slots_by_row, slot_weights)

    def _exchange_plan(
        self,
        ids: Tensor,
        handle: ElasticHandle,
        index: SlotIndex,
        *,
        num_rows: int,
        members: Members | None,
        has_failed: Tensor | None,
    ) -> DeepEPV2ExchangePlan:
        to_rank = ranks_needed(ids, self._spec.num_local_experts, self._world_size)
        self._count_bytes(DISPATCH, to_rank, row_bytes_of(self._spec).dispatch)
        return DeepEPV2ExchangePlan(
            num_tokens=ids.shape[0],
            num_rows=num_rows,
            index=index,
            handle=handle,
            slots_by_row=members,
            rows_to_rank=to_rank,
            rows_from_rank=self._rows_from_ranks(handle),
            has_failed=has_failed,
        )

    def _rows_from_ranks(self, handle: ElasticHandle) -> Tensor:
        """[W], int64, on the device; prefix sums go by NVLink domains, so tokens are counted."""
        tokens = handle.recv_src_metadata[:, 0].to(torch.int64)
        num_received = handle.psum_num_recv_tokens_per_scaleup_rank[-1]
        is_received = torch.arange(tokens.shape[0], device=tokens.device) < num_received
        # Tokens are numbered rank * M + t. Behind the last row that came they are garbage.
        ranks = torch.where(is_received, tokens // self._max_tokens, self._world_size)
        counts = torch.zeros(self._world_size + 1, dtype=torch.int64, device=tokens.device)
        return counts.scatter_add_(0, ranks, torch.ones_like(ranks))[: self._world_size]

    def _destroy(self) -> None:
        self._buffer.destroy()


class DeepEPV2Buffer(ElasticBase):
    """Exact sizes; the host waits for the counts, once a dispatch."""

    name: ClassVar[str] = "deep_ep_v2"
    modes: ClassVar[frozenset[Mode]] = frozenset({Mode.NORMAL})
    is_in_order: ClassVar[bool] = True

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

    def dispatch(self, call: DispatchCall) -> Dispatched:
        self._check_open()
        ids, flags = self._guard(call)
        rows, local_ids, weights, handle = self._exchange(
            call, ids, expert_alignment=1, do_cpu_sync=True
        )
        self._raise_own(call)
        index = build_slot_index(
            local_ids,
            count_experts(local_ids, self._spec.num_local_experts),
            tuple(handle.num_recv_tokens_per_expert_list),
            expert_alignment=self._spec.expert_alignment,
        )
        return self._dispatched(ids, rows, weights, handle, index, flags, has_failed=None)

    def _dispatched(
        self,
        ids: Tensor,
        rows: Rows,
        weights: Tensor,
        handle: ElasticHandle,
        index: SlotIndex,
        flags: BatchFlags,
        has_failed: Tensor | None,
    ) -> Dispatched:
        wire = as_wire(rows, self._spec.dispatch_format)
        exchange_plan = self._exchange_plan(
            ids,
            handle,
            index,
            num_rows=wire.data.shape[0],
            members=slots_by_row(index),
            has_failed=has_failed,
        )
        return Dispatched(
            rows=wire,
            index=index,
            slot_weights=spread_to_slots(weights, index),
            exchange_plan=exchange_plan,
            any_flags=flags,
        )


class DeepEPV2StaticBuffer(DeepEPV2Buffer):
    """W * M rows and a budget of slots; the host reads nothing."""

    name: ClassVar[str] = "deep_ep_v2"

    @classmethod
    def caps(cls, mode: Mode) -> BufferCaps:
        return replace(super().caps(mode), is_static=True)

    def prepare(self) -> None:
        super().prepare()
        self._max_slots = self._spec.max_recv_slots or max_slots_of(self._spec, self._num_rows)

    def dispatch(self, call: DispatchCall) -> Dispatched:
        self._check_open()
        ids, fault, flags = self._guard_on_device(call)
        rows, local_ids, weights, handle = self._exchange(
            call, ids, expert_alignment=1, do_cpu_sync=False
        )
        local_ids = self._ids_received(local_ids, handle)
        num_local, alignment = self._spec.num_local_experts, self._spec.expert_alignment
        required = aligned_counts(count_experts(local_ids, num_local), alignment).sum()
        has_failed = self._record(call, fault, required, self._max_slots)
        index = build_static_slot_index(
            torch.where(has_failed, -1, local_ids),
            num_local,
            self._max_slots,
            expert_alignment=alignment,
        )
        return self._dispatched(ids, rows, weights, handle, index, flags, has_failed)

    @staticmethod
    def _ids_received(local_ids: Tensor, handle: ElasticHandle) -> Tensor:
        """-1 behind the last row that came, where ids are whatever was in memory."""
        num_received = handle.psum_num_recv_tokens_per_scaleup_rank[-1]
        is_received = torch.arange(local_ids.shape[0], device=local_ids.device) < num_received
        return torch.where(is_received.unsqueeze(1), local_ids, -1)


def ranks_needed(topk_ids: Tensor, num_local: int, world_size: int) -> Tensor:
    """[W], int64: tokens that need each rank, on the device. Host sync: none."""
    ranks = torch.where(topk_ids < 0, world_size, topk_ids // num_local)
    needs = torch.zeros(
        topk_ids.shape[0], world_size + 1, dtype=torch.int64, device=topk_ids.device
    )
    return needs.scatter_(1, ranks, 1).sum(0)[:world_size]
