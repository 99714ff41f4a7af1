"""Low latency of the Ascend deep_ep: packed rows in memory of fixed size, counts on the device.

M * W * min(K, L) rows are handed out, of which the first sum of the counts are defined. Combine
takes all of them, and multiplies by the router weights, which stay with the route. Hooks, events
and cleaning do nothing there: everything is in the order of the stream.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from epcomm.ascend_facts import (
    LOW_LATENCY_LIMITS,
    MAX_LOCAL_EXPERTS_TIMES_RANKS,
    MAX_TOP_K,
    low_latency_window_bytes,
    size_reasons,
    variable_reasons,
    window_reasons,
)
from epcomm.buffers.ascend_package import (
    KINDS,
    WIRE_DTYPES,
    AscendBuffer,
    format_reasons,
    slot_bytes,
    slots_from_ranks,
    slots_to_ranks,
)
from epcomm.buffers.base import BufferCaps, BufferSpec, Combined, DispatchCall, Dispatched
from epcomm.buffers.deep_ep_package import load_deep_ep
from epcomm.buffers.faults import BatchFlags
from epcomm.buffers.foreign import COMBINE, DISPATCH
from epcomm.buffers.sizes import CallShape, Region
from epcomm.buffers.traffic import BufferTraffic
from epcomm.config import Mode, environment
from epcomm.ops.holes import fill_holes
from epcomm.records import Route, SlotIndex
from epcomm.types import Int8Profile, Layout, RowsPer, WeightsAppliedBy


@dataclass(frozen=True, kw_only=True, eq=False)
class AscendLowLatencyRoute(Route):
    """What combine needs of its dispatch.

    topk_ids: [T, K], as they were sent.   topk_weights: [T, K], float32, 0 where there was a hole.
    """

    num_tokens: int
    num_rows: int
    index: SlotIndex
    handle: Any
    topk_ids: Tensor
    topk_weights: Tensor
    slots_from_rank: Tensor
    has_failed: Tensor


class AscendLowLatencyBuffer(AscendBuffer):
    """Static sizes, no host read."""

    name: ClassVar[str] = "ascend_low_latency"
    modes: ClassVar[frozenset[Mode]] = frozenset({Mode.LOW_LATENCY})

    @classmethod
    def caps(cls, mode: Mode) -> BufferCaps:
        return BufferCaps(
            layout=Layout.ROWS,
            trainable=False,
            graph_safe=True,
            ordered=True,
            wire_dtypes=WIRE_DTYPES,
            weights_applied_by=frozenset({WeightsAppliedBy.COMBINE}),
            max_top_k=MAX_TOP_K,
            reuses_route=False,
            is_static=True,
            host_reads=0,
            has_slot_budget=False,
            announces_faults=False,
            fills_holes=True,
            int8_profiles=frozenset({Int8Profile.RINT127}),
            needs_process_group=True,
        )

    @classmethod
    def lacks(cls, mode: Mode, spec: BufferSpec, world_size: int) -> tuple[str, ...]:
        reasons = format_reasons(spec) + size_reasons(spec, world_size, LOW_LATENCY_LIMITS)
        rows = spec.num_local_experts * world_size
        if rows > MAX_LOCAL_EXPERTS_TIMES_RANKS:
            reasons.append(
                f"experts of one rank * ranks is {rows}, at most {MAX_LOCAL_EXPERTS_TIMES_RANKS}"
            )
        if spec.slot_alignment > 1:
            reasons.append("packs its rows, so slot_alignment must be 1")
        variables = environment()
        if spec.max_tokens_per_rank is not None:
            reasons += window_reasons(low_latency_window_bytes(spec, world_size), variables)
        return tuple(reasons + variable_reasons(spec, variables))

    @classmethod
    def region_bytes(cls, spec: BufferSpec, world_size: int) -> tuple[Region, ...]:
        num_slots, (row, home) = _num_slots(spec, world_size), slot_bytes(spec)
        sizes = {
            "window of the process group": low_latency_window_bytes(spec, world_size),
            "received slots": num_slots * row,
            "expert results": num_slots * home,
        }
        return tuple(Region(name=name, max_bytes=size) for name, size in sizes.items())

    @classmethod
    def wire_bytes(
        cls, spec: BufferSpec, call: CallShape, *, backward: bool = False
    ) -> BufferTraffic:
        out, home = slot_bytes(spec)
        return BufferTraffic(
            dispatch_bytes=call.slots_sent * out, combine_bytes=call.slots_received * home
        )

    def prepare(self) -> None:
        package: Any = load_deep_ep(KINDS)
        self._buffer = package.Buffer(self._process_group, low_latency_mode=True)
        self._max_slots = _num_slots(self._spec, self._world_size)

    def dispatch(self, call: DispatchCall) -> Dispatched:
        self._check_open()
        ids, fault, _ = self._guard_on_device(call)
        has_failed = self._record(call, fault, fault * 0, self._max_slots)
        ids, weights = fill_holes(ids, call.topk_weights, self._num_experts)
        received, counts, handle, _, _ = self._buffer.low_latency_dispatch(
            call.hidden_states.contiguous(),
            ids,
            self._spec.max_tokens_per_rank,
            self._num_experts,
            # The name is that of the other package; here it means INT8.
            use_fp8=self._quant_mode == "int8",
            topk_weights=weights,
            quant_mode=self._quant_mode,
        )
        index = SlotIndex(
            row_of_slot=None,
            slots_of_row=None,
            num_slots_per_expert=counts.to(torch.int32),
            first_slot=F.pad(counts.cumsum(0), (1, 0)).to(torch.int32),
            host_num_slots_per_expert=None,
        )
        to_rank = slots_to_ranks(ids, self._num_experts, self._world_size)
        self._count_bytes(DISPATCH, to_rank, slot_bytes(self._spec)[0])
        route = AscendLowLatencyRoute(
            num_tokens=ids.shape[0],
            num_rows=self._max_slots,
            index=index,
            handle=handle,
            topk_ids=ids,
            topk_weights=weights,
            slots_from_rank=slots_from_ranks(handle[1], self._world_size),
            has_failed=has_failed,
        )
        return Dispatched(
            rows=self._wire(received),
            index=index,
            slot_weights=None,
            route=route,
            any_flags=BatchFlags.NONE,
        )

    def redispatch(self, hidden_states: Tensor, route: Route) -> Tensor:
        raise NotImplementedError("low latency has no backward (caps.reuses_route)")

    def combine(
        self,
        rows: Tensor,
        route: Route,
        *,
        rows_per: RowsPer,
        slot_weights: Tensor | None = None,
        row_scalars: Tensor | None = None,
    ) -> Combined:
        assert isinstance(route, AscendLowLatencyRoute), "a route of this buffer"
        assert slot_weights is None, "weights are applied at home"
        assert row_scalars is None, "there is no backward"
        self._check_open()
        self._compare_combine()
        y, _, _ = self._buffer.low_latency_combine(
            rows.contiguous(), route.topk_ids, route.topk_weights, route.handle
        )
        self._count_bytes(COMBINE, route.slots_from_rank, slot_bytes(self._spec)[1])
        return Combined(y=y.masked_fill(route.has_failed, float("nan")), scalars=None)


def _num_slots(spec: BufferSpec, world_size: int) -> int:
    """Rows that the package allocates."""
    assert spec.max_tokens_per_rank is not None, "low latency has a limit"
    return spec.max_tokens_per_rank * world_size * min(spec.top_k, spec.num_local_experts)
