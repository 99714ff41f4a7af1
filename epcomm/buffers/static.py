"""Static shapes over plain collectives: low latency, and normal mode with a slot budget.

The host reads nothing that depends on the routing, so the buffer runs under FakeTensorMode and in
captured graphs. A dispatch is one all-gather of [1 + M, row_bytes], the header first; a combine is
one all-to-all of [W * M] partial sums. Every rank sees all ids, so each computes the slot totals of
all ranks: an overflow or a fault is known everywhere without a message, makes the y of the call
NaN everywhere, and waits on the device for check().
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from epcomm.buffers.base import (
    Availability,
    Buffer,
    BufferCaps,
    BufferSpec,
    Combined,
    DispatchCall,
    Dispatched,
)
from epcomm.buffers.faults import DeviceFaults, assume_all_need_grad, guard_ids
from epcomm.buffers.row_layout import RowLayout, localize
from epcomm.buffers.sizes import CallShape, Region, RowBytes, index_bytes, most_slots_of
from epcomm.buffers.traffic import BufferTraffic, TrafficMeter
from epcomm.collectives.base import Collectives
from epcomm.config import Mode
from epcomm.ops.slots import (
    Members,
    count_experts,
    reduce_rows,
    slots_by_row,
    spread_to_slots,
    sum_parts,
)
from epcomm.ops.static_slots import aligned_counts, build_static_slot_index
from epcomm.records import Route, SlotIndex
from epcomm.types import Layout, RowsPer, WeightsAppliedBy, WireDtype, WireFormat


@dataclass(frozen=True, kw_only=True, eq=False)
class StaticRoute(Route):
    """The W * M received rows, tokens and padding alike.

    slots_by_row: the slots of each row, in k order.
    has_no_slot: [R], bool, rows that no expert of this rank computes.
    has_failed: bool scalar on the device; the call was refused, on every rank.
    """

    num_tokens: int
    num_rows: int
    index: SlotIndex
    slots_by_row: Members
    has_no_slot: Tensor
    has_failed: Tensor


class StaticCollectiveBuffer(Buffer):
    """M rows to every rank, whatever the routing; no host read."""

    name: ClassVar[str] = "collective_static"
    modes: ClassVar[frozenset[Mode]] = frozenset({Mode.NORMAL, Mode.LOW_LATENCY})

    @classmethod
    def probe(cls, environment: Mapping[str, str]) -> Availability:
        return Availability(ok=True)

    @classmethod
    def caps(cls, mode: Mode) -> BufferCaps:
        return BufferCaps(
            layout=Layout.ROWS,
            trainable=mode is Mode.NORMAL,
            graph_safe=True,
            ordered=True,
            wire_dtypes=frozenset({WireDtype.BF16, WireDtype.FP16, WireDtype.FP32}),
            weights_applied_by=frozenset(WeightsAppliedBy),
            is_static=True,
            host_reads=0,
        )

    @classmethod
    def region_bytes(cls, spec: BufferSpec, world_size: int) -> tuple[Region, ...]:
        row, max_tokens = RowBytes.of(spec), _max_tokens(spec)
        hidden_bytes = spec.dispatch_format.data_bytes(spec.hidden_size)
        num_rows, num_slots = max_tokens * world_size, num_static_slots(spec, world_size)
        index = index_bytes(
            spec,
            num_rows=num_rows,
            num_slots=num_slots,
            num_members=min(num_rows * spec.top_k, num_slots),
        )
        sizes = {
            "sent message": (1 + max_tokens) * row.dispatch,
            "received message": world_size * (1 + max_tokens) * row.dispatch,
            # The message of several ranks is copied, so that its headers do not part the rows.
            "received rows": num_rows * row.dispatch if world_size > 1 else 0,
            # One slot takes the entries that have none, and one more offset closes the tail.
            "slot index": index + 4 + 8,
            "row flags": num_rows + 1,
            "packed slots": num_slots * hidden_bytes,
            "expert results": num_slots * row.combine,
            "partial sums": num_rows * row.combine,
            "home rows": num_rows * row.combine,
        }
        return tuple(Region(name=name, max_bytes=size) for name, size in sizes.items())

    @classmethod
    def wire_bytes(
        cls, spec: BufferSpec, call: CallShape, *, backward: bool = False
    ) -> BufferTraffic:
        row, num_others = RowBytes.of(spec, backward=backward), call.world_size - 1
        num_rows = num_others * _max_tokens(spec)
        return BufferTraffic(
            dispatch_bytes=num_rows * row.dispatch,
            combine_bytes=num_rows * row.combine,
            control_bytes=0 if backward else num_others * row.dispatch,
        )

    def __init__(self, collectives: Collectives, spec: BufferSpec) -> None:
        self._collectives = collectives
        self._spec = spec
        self._traffic = TrafficMeter(collectives.rank)
        self._faults = DeviceFaults(collectives.rank, collectives.world_size, collectives.device)
        self._max_tokens = _max_tokens(spec)
        self._num_rows = self._max_tokens * collectives.world_size
        self._num_slots = num_static_slots(spec, collectives.world_size)

    def prepare(self) -> None:
        """Nothing to allocate: records own their rows."""

    def traffic(self) -> BufferTraffic:
        return self._traffic.snapshot()

    def check(self) -> None:
        self._faults.check(self._num_slots)

    def close(self) -> None:
        """Nothing is held between calls but the faults."""

    def dispatch(self, call: DispatchCall) -> Dispatched:
        rank, num_local = self._collectives.rank, self._spec.num_local_experts
        num_experts = self._collectives.world_size * num_local
        layout = self._row_layout(self._spec.dispatch_format, has_ids=True)
        topk_ids, fault = guard_ids(call.topk_ids, num_experts, call.error)
        self._traffic.control([1] * self._collectives.world_size, layout.row_bytes)
        received = self._gather(
            self._message(layout, call, topk_ids, fault), layout.row_bytes, phase="dispatch"
        )
        headers, rows = received[:, 0].view(torch.int32), received[:, 1:].flatten(0, 1)

        all_ids = layout.ids(rows)
        required = self._slots_required(all_ids, num_experts)
        has_failed = self._faults.record(headers, required > self._num_slots, required, call.error)
        local_ids = localize(torch.where(has_failed, -1, all_ids), rank, num_local)
        index = build_static_slot_index(
            local_ids, num_local, self._num_slots, slot_alignment=self._spec.slot_alignment
        )
        route = StaticRoute(
            num_tokens=topk_ids.shape[0],
            num_rows=self._num_rows,
            index=index,
            slots_by_row=slots_by_row(index),
            has_no_slot=(local_ids < 0).all(dim=1),
            has_failed=has_failed,
        )
        return Dispatched(
            rows=layout.wire_tensor(rows),
            index=index,
            slot_weights=spread_to_slots(layout.scalars(rows), index),
            route=route,
            any_flags=assume_all_need_grad(call.flags),
        )

    def redispatch(self, hidden_states: Tensor, route: Route) -> Tensor:
        assert isinstance(route, StaticRoute), "a route of this buffer"
        rows = self._padded(hidden_states)
        row_bytes = rows.shape[1] * rows.element_size()
        return self._gather(rows, row_bytes, phase="backward of combine").flatten(0, 1)

    def combine(
        self,
        rows: Tensor,
        route: Route,
        *,
        rows_per: RowsPer,
        slot_weights: Tensor | None = None,
        row_scalars: Tensor | None = None,
    ) -> Combined:
        assert isinstance(route, StaticRoute), "a route of this buffer"
        if rows_per is RowsPer.SLOT:
            rows = reduce_rows(rows, route.slots_by_row, slot_weights)
        else:
            # Rows without a slot are undefined, and here all of them travel.
            rows = rows.masked_fill(route.has_no_slot.unsqueeze(1), 0)
        if row_scalars is None:
            home = self._send_home(rows.contiguous(), phase="combine")
            return Combined(y=self._sum_home(home, rows.dtype, route), scalars=None)
        layout = self._row_layout(WireFormat.of(rows.dtype), has_ids=False)
        packed = layout.pack_rows(rows, row_scalars)
        home = self._send_home(packed, phase="backward of dispatch").flatten(0, 1)
        shape = (self._collectives.world_size, self._max_tokens)
        parts, scalars = layout.data(home), layout.scalars(home)
        return Combined(
            y=self._sum_home(parts.unflatten(0, shape), rows.dtype, route),
            scalars=self._sum_home(scalars.unflatten(0, shape), scalars.dtype, route),
        )

    def _message(
        self, layout: RowLayout, call: DispatchCall, topk_ids: Tensor, fault: Tensor
    ) -> Tensor:
        """[1 + M, row_bytes], uint8: header, tokens, padding rows that go nowhere."""
        num_tokens = topk_ids.shape[0]
        message = torch.empty(
            1 + self._max_tokens, layout.row_bytes, dtype=torch.uint8, device=topk_ids.device
        )
        header = message[0].view(torch.int32)
        header[:1] = fault
        header[1:2] = int(call.flags)
        layout.ids(message[1 + num_tokens :]).fill_(-1)
        layout.write_tokens(
            message[1 : 1 + num_tokens], call.hidden_states, topk_ids, call.topk_weights
        )
        return message

    def _slots_required(self, all_ids: Tensor, num_experts: int) -> Tensor:
        """[W], int64: slots that each rank needs for this call, alignment included."""
        counts = aligned_counts(count_experts(all_ids, num_experts), self._spec.slot_alignment)
        return counts.view(self._collectives.world_size, -1).sum(1)

    def _padded(self, rows: Tensor) -> Tensor:
        """[T, H] to [M, H]; the padding is undefined."""
        padded = rows.new_empty(self._max_tokens, rows.shape[1])
        padded[: rows.shape[0]] = rows
        return padded

    def _gather(self, rows: Tensor, row_bytes: int, *, phase: str) -> Tensor:
        """[N, ...] of each rank to [W, N, ...]; a header before the M rows is counted apart."""
        self._traffic.dispatch([self._max_tokens] * self._collectives.world_size, row_bytes)
        return self._collectives.all_gather(rows, phase=phase)

    def _send_home(self, rows: Tensor, *, phase: str) -> Tensor:
        """Partial sums of all ranks for this rank's M rows: [W, M, ...]."""
        world_size = self._collectives.world_size
        row_bytes = rows.shape[1] * rows.element_size()
        self._traffic.combine([self._max_tokens] * world_size, row_bytes)
        home = self._collectives.all_to_all(rows, phase=phase)
        return home.unflatten(0, (world_size, self._max_tokens))

    def _sum_home(self, parts: Tensor, dtype: torch.dtype, route: StaticRoute) -> Tensor:
        """[W, M, ...] to [T, ...]; NaN if the call has failed."""
        total = sum_parts(parts[:, : route.num_tokens], dtype)
        return total.masked_fill(route.has_failed, float("nan"))

    def _row_layout(self, wire: WireFormat, *, has_ids: bool) -> RowLayout:
        return RowLayout(
            hidden_size=self._spec.hidden_size,
            top_k=self._spec.top_k,
            format=wire,
            has_ids=has_ids,
        )


def num_static_slots(spec: BufferSpec, world_size: int) -> int:
    """C: the budget, or as many as any routing of M tokens a rank needs."""
    return spec.max_recv_slots or most_slots_of(spec, _max_tokens(spec) * world_size)


def _max_tokens(spec: BufferSpec) -> int:
    assert spec.max_tokens_per_rank is not None, "plan() has checked the limit"
    return spec.max_tokens_per_rank
