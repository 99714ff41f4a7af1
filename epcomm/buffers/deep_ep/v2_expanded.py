"""deep_ep V2 with its rows expanded: one row a (token, expert) pair, packed by expert, no index.

The kernel that brings rows out of its memory writes them where a grouped GEMM reads them. Router
weights come beside the rows, one each; rows of one expert come in any order. There is no backward:
combine of expanded rows takes no gradients of weights. Its prefix sums count, for expert e, the
aligned rows of the experts before it and its own real ones, so that padding lies behind each
expert's rows.
"""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from epcomm.buffers.base import DispatchCall, Dispatched
from epcomm.buffers.deep_ep.rows import ElasticHandle, Rows, as_wire, row_bytes_of
from epcomm.buffers.deep_ep.v2 import DeepEPV2Buffer, DeepEPV2ExchangePlan, ElasticBase
from epcomm.buffers.sizes import Region, max_slots_of
from epcomm.config import Mode
from epcomm.ops.static_slots import aligned_counts
from epcomm.protocol import BatchFlags
from epcomm.records import SlotIndex
from epcomm.spec import BufferCaps, BufferSpec


class DeepEPV2ExpandBuffer(ElasticBase):
    """Exact sizes; the host waits for the counts, once a dispatch. For inference."""

    name: ClassVar[str] = "deep_ep_v2"
    modes: ClassVar[frozenset[Mode]] = frozenset({Mode.NORMAL})
    is_in_order: ClassVar[bool] = False

    @classmethod
    def caps(cls, mode: Mode) -> BufferCaps:
        return replace(DeepEPV2Buffer.caps(mode), trainable=False, ordered=False)

    @classmethod
    def region_bytes(cls, spec: BufferSpec, world_size: int) -> tuple[Region, ...]:
        row, max_rows = row_bytes_of(spec), (spec.max_tokens_per_rank or 0) * world_size
        num_slots = max_slots_of(spec, max_rows)
        sizes = {
            "deep_ep's rows": max_rows * max(row.dispatch, row.combine),
            "received slots": num_slots * row.dispatch,
            "expert results": num_slots * row.combine,
        }
        return tuple(Region(name=name, max_bytes=size) for name, size in sizes.items())

    def dispatch(self, call: DispatchCall) -> Dispatched:
        self._check_open()
        ids, flags = self._guard(call)
        rows, weights, handle, index = self._expanded(call, ids, do_cpu_sync=True)
        self._raise_own(call)
        return self._dispatched(ids, rows, weights, handle, index, flags, has_failed=None)

    def _expanded(
        self, call: DispatchCall, ids: Tensor, *, do_cpu_sync: bool
    ) -> tuple[Rows, Tensor, ElasticHandle, SlotIndex]:
        rows, _, weights, handle = self._exchange(
            call,
            ids,
            expert_alignment=self._spec.expert_alignment,
            do_cpu_sync=do_cpu_sync,
            do_expand=True,
        )
        # Where each expert's real rows end. The next one's begin at the next multiple.
        ends = handle.psum_num_recv_tokens_per_expert
        starts = F.pad(aligned_counts(ends, self._spec.expert_alignment), (1, 0))
        index = SlotIndex(
            row_of_slot=None,
            slots_of_row=None,
            num_tokens_per_expert=(ends - starts[:-1]).to(torch.int32),
            first_slot=starts.to(torch.int32),
            host_num_tokens_per_expert=None,
            expert_alignment=self._spec.expert_alignment,
        )
        return rows, weights, handle, index

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
            members=None,
            has_failed=has_failed,
        )
        return Dispatched(
            rows=wire,
            index=index,
            slot_weights=weights,
            exchange_plan=exchange_plan,
            any_flags=flags,
        )

    def _sums(
        self, rows: Tensor, exchange_plan: DeepEPV2ExchangePlan, slot_weights: Tensor | None
    ) -> Tensor:
        # deep_ep adds the rows of a token up itself.
        if slot_weights is None:
            return rows
        return (rows.float() * slot_weights.unsqueeze(1)).to(rows.dtype)


class DeepEPV2LowLatencyBuffer(DeepEPV2ExpandBuffer):
    """Static sizes: capacity for any routing of M tokens a rank; the host reads nothing."""

    name: ClassVar[str] = "deep_ep_v2"
    modes: ClassVar[frozenset[Mode]] = frozenset({Mode.LOW_LATENCY})
    # Tokens of the others arrive and are computed, whatever this rank has sent.
    empties_failed: ClassVar[bool] = False

    @classmethod
    def caps(cls, mode: Mode) -> BufferCaps:
        return replace(
            super().caps(mode),
            is_static=True,
            has_slot_budget=False,
        )

    def prepare(self) -> None:
        super().prepare()
        self._max_slots = max_slots_of(self._spec, self._num_rows)

    def dispatch(self, call: DispatchCall) -> Dispatched:
        self._check_open()
        ids, fault, flags = self._guard_on_device(call)
        has_failed = self._record(call, fault, fault * 0, self._max_slots)
        rows, weights, handle, index = self._expanded(call, ids, do_cpu_sync=False)
        return self._dispatched(ids, rows, weights, handle, index, flags, has_failed)
