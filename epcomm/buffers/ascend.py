"""Normal mode of the Ascend deep_ep: packed rows, one a (token, expert) pair, ready for a GEMM.

Its combine multiplies by the router weights that it kept from dispatch, so nobody else may. The ids
and weights that it seems to return are memory that nobody wrote, and where nothing arrives one row
of garbage comes: only the counts are read. A layout call comes right before each dispatch, for it
leaves state behind. No cached handles, hence no backward.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from epcomm.ascend_facts import (
    MAX_TOP_K,
    NORMAL_LIMITS,
    normal_window_bytes,
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
from epcomm.types import Int8Profile, Layout, RowsPer, WeightsAppliedBy, WireTensor


@dataclass(frozen=True, kw_only=True, eq=False)
class AscendRoute(Route):
    """Its handle, and what the bytes of a combine are counted by.

    slots_from_rank: [W], int64, on the device.
    """

    num_tokens: int
    num_rows: int
    index: SlotIndex
    handle: Any
    slots_from_rank: Tensor


class AscendNormalBuffer(AscendBuffer):
    """Exact sizes; the host waits for the counts, once a dispatch. For inference."""

    name: ClassVar[str] = "ascend"
    modes: ClassVar[frozenset[Mode]] = frozenset({Mode.NORMAL})

    @classmethod
    def caps(cls, mode: Mode) -> BufferCaps:
        return BufferCaps(
            layout=Layout.ROWS,
            trainable=False,
            graph_safe=False,
            ordered=True,
            wire_dtypes=WIRE_DTYPES,
            weights_applied_by=frozenset({WeightsAppliedBy.COMBINE}),
            max_top_k=MAX_TOP_K,
            reuses_route=False,
            announces_faults=False,
            fills_holes=True,
            # By the second. They differ below magnitudes of 2e-5, where 1e-12 still counts.
            int8_profiles=frozenset({Int8Profile.RINT127, Int8Profile.RINT127EPS}),
            needs_process_group=True,
        )

    @classmethod
    def lacks(cls, mode: Mode, spec: BufferSpec, world_size: int) -> tuple[str, ...]:
        reasons = format_reasons(spec) + size_reasons(spec, world_size, NORMAL_LIMITS)
        if spec.slot_alignment > 1:
            reasons.append("ignores alignments, so slot_alignment must be 1")
        tokens = spec.max_tokens_per_rank or NORMAL_LIMITS.tokens
        variables = environment()
        reasons += window_reasons(normal_window_bytes(spec, tokens), variables)
        return tuple(reasons + variable_reasons(spec, variables))

    @classmethod
    def region_bytes(cls, spec: BufferSpec, world_size: int) -> tuple[Region, ...]:
        tokens = spec.max_tokens_per_rank
        row, home = slot_bytes(spec)
        most = None if tokens is None else tokens * world_size * spec.top_k
        window = normal_window_bytes(spec, tokens or NORMAL_LIMITS.tokens)

        def slots(name: str, size: int) -> Region:
            return Region(
                name=name,
                bytes_per_token=spec.top_k * size,
                max_bytes=None if most is None else most * size,
            )

        return (
            Region(name="window of the process group", max_bytes=window),
            slots("received slots", row),
            slots("expert results", home),
        )

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
        self._buffer = package.Buffer(self._process_group)

    def dispatch(self, call: DispatchCall) -> Dispatched:
        self._check_open()
        ids, _ = self._guard(call)
        ids, weights = fill_holes(ids, call.topk_weights, self._num_experts)
        per_rank, _, per_expert, is_in_rank, _ = self._buffer.get_dispatch_layout(
            ids, self._num_experts
        )
        received, _, _, counts, handle, _ = self._buffer.dispatch(
            call.hidden_states.contiguous(),
            num_tokens_per_rank=per_rank,
            is_token_in_rank=is_in_rank,
            num_tokens_per_expert=per_expert,
            topk_idx=ids,
            topk_weights=weights,
            quant_mode=self._quant_mode,
        )
        self._raise_own(call)
        num_slots = sum(counts)
        wire = self._wire(received)
        index = _index_of(counts, ids.device)
        out = slot_bytes(self._spec)[0]
        self._count_bytes(DISPATCH, slots_to_ranks(ids, self._num_experts, self._world_size), out)
        route = AscendRoute(
            num_tokens=ids.shape[0],
            num_rows=num_slots,
            index=index,
            handle=handle,
            slots_from_rank=slots_from_ranks(handle[5], self._world_size),
        )
        return Dispatched(
            # Where nothing arrived there is one row of garbage.
            rows=_first_rows(wire, num_slots),
            index=index,
            slot_weights=None,
            route=route,
            any_flags=BatchFlags.NONE,
        )

    def redispatch(self, hidden_states: Tensor, route: Route) -> Tensor:
        raise NotImplementedError("there is no cached dispatch (caps.reuses_route)")

    def combine(
        self,
        rows: Tensor,
        route: Route,
        *,
        rows_per: RowsPer,
        slot_weights: Tensor | None = None,
        row_scalars: Tensor | None = None,
    ) -> Combined:
        assert isinstance(route, AscendRoute), "a route of this buffer"
        assert slot_weights is None, "weights are applied at home"
        assert row_scalars is None, "there is no backward"
        self._check_open()
        self._compare_combine()
        if route.num_rows == 0:
            # As many rows as dispatch allocated.
            rows = rows.new_zeros(1, rows.shape[1])
        y, _, _ = self._buffer.combine(rows.contiguous(), route.handle)
        self._count_bytes(COMBINE, route.slots_from_rank, slot_bytes(self._spec)[1])
        return Combined(y=y, scalars=None)


def _first_rows(wire: WireTensor, num_rows: int) -> WireTensor:
    scales = None if wire.scales is None else wire.scales[:num_rows]
    return replace(wire, data=wire.data[:num_rows], scales=scales)


def _index_of(counts: list[int], device: torch.device) -> SlotIndex:
    host = torch.tensor(counts, dtype=torch.int32)
    first = torch.cat([torch.zeros(1, dtype=torch.int32), host.cumsum(0).to(torch.int32)])
    return SlotIndex(
        row_of_slot=None,
        slots_of_row=None,
        num_slots_per_expert=host.to(device, non_blocking=True),
        first_slot=first.to(device, non_blocking=True),
        host_num_slots_per_expert=tuple(counts),
        is_dense=True,
    )
