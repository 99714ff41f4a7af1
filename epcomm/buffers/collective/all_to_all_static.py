"""Move tokens with static shapes over plain collectives: low latency, or a slot budget.

The host reads nothing that depends on the routing, so the buffer runs under FakeTensorMode and in
captured graphs. A dispatch is one all-gather of [1 + M, row_bytes], a combine one all-to-all of
[W * (1 + M)] partial sums. The first row of each rank is a header, with ids of -1, so received rows
are used in place. Every rank receives all ids and computes the slot totals of all ranks, so
overflows and faults need no extra message: every rank sets y of the call to NaN and records the
fault on the device for check().
"""

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from epcomm.buffers.base import AddsBias, Dispatched
from epcomm.buffers.collective.base import (
    COLLECTIVE_CAPS,
    OverCollectives,
    SignedExchangePlan,
    row_bytes_of,
)
from epcomm.buffers.row_layout import RowLayout
from epcomm.buffers.sizes import CallShape, Region, RowBytes, index_bytes, max_slots_of, sum_regions
from epcomm.buffers.traffic import BufferTraffic
from epcomm.calls.call import DispatchCall
from epcomm.calls.counts import guard_ids
from epcomm.calls.faults import DeviceFaults, assume_all_need_grad, pack_header
from epcomm.calls.header import ANY_BATCH, CallKind, CallSign
from epcomm.calls.order import Calls
from epcomm.config import Mode
from epcomm.errors import EPError
from epcomm.ops.slots import aligned_counts, count_experts
from epcomm.protocol import fault_word, unpack_fault
from epcomm.records import ExchangePlan
from epcomm.spec import BufferCaps, BufferSpec
from epcomm.types import RowsPer


@dataclass(frozen=True, kw_only=True, eq=False)
class StaticExchangePlan(SignedExchangePlan):
    """The plan of W * (1 + M) received rows: headers, tokens and padding.

    has_failed: bool scalar on the device: whether the dispatch has a fault, equal on every rank.
    """

    has_failed: Tensor


class StaticCollectiveBuffer(OverCollectives, AddsBias):
    """Sends M rows to every rank, independent of the routing, without host sync."""

    name: ClassVar[str] = "collective"
    modes: ClassVar[frozenset[Mode]] = frozenset({Mode.NORMAL, Mode.LOW_LATENCY})

    @classmethod
    def caps(cls, mode: Mode) -> BufferCaps:
        return replace(COLLECTIVE_CAPS, trainable=mode is Mode.NORMAL, is_static=True)

    @classmethod
    def region_bytes(cls, spec: BufferSpec, world_size: int) -> tuple[Region, ...]:
        row, max_tokens = RowBytes.of(spec, world_size), _max_tokens(spec)
        num_rows, num_slots = (1 + max_tokens) * world_size, num_static_slots(spec, world_size)
        index = index_bytes(
            spec,
            num_rows=num_rows,
            num_slots=num_slots,
            num_members=min(num_rows * spec.top_k, num_slots),
        )
        sizes = {
            "sent message": (1 + max_tokens) * row.dispatch,
            "received rows": num_rows * row.dispatch,
            # An extra slot (4 B) receives the entries without a slot, an extra offset (8 B) ends
            # the tail, and a flag (1 B) reports a failure.
            "slot index": index + 4 + 8 + 1,
            "packed slots": num_slots * row.dispatch,
            "expert results": num_slots * spec.hidden_format.data_bytes(spec.hidden_size),
        }
        num_columns = spec.returned_columns(world_size)
        sums = sum_regions(spec, 0, sent=num_rows, returned=num_rows, columns=num_columns)
        sizes |= {each.name: each.max_bytes or 0 for each in sums}
        if spec.sum_groups is not None:
            # The slot of each entry, in a line of a table for each column of a row.
            sizes["sum groups"] = 4 * num_rows * num_columns * spec.top_k
        return tuple(Region(name=name, max_bytes=size) for name, size in sizes.items())

    @classmethod
    def wire_bytes(
        cls, spec: BufferSpec, call: CallShape, *, backward: bool = False
    ) -> BufferTraffic:
        num_rows = _max_tokens(spec)
        row = RowBytes.of(spec, call.world_size, backward=backward)
        num_others, num_elsewhere = call.world_size - 1, len(spec.ranks_elsewhere(call.rank))
        header_bytes = row.dispatch + row.combine
        return BufferTraffic(
            dispatch_bytes=num_others * num_rows * row.dispatch,
            combine_bytes=num_others * num_rows * row.combine,
            control_bytes=num_others * header_bytes,
            bytes_between=num_elsewhere * num_rows * (row.dispatch + row.combine),
        )

    def __init__(self, calls: Calls, spec: BufferSpec) -> None:
        super().__init__(calls, spec)
        self._faults = DeviceFaults(calls.names, calls.collectives.device)
        self._rows_per_rank = 1 + _max_tokens(spec)
        self._num_rows = self._rows_per_rank * self._world_size
        self._num_slots = num_static_slots(spec, self._world_size)
        self._num_columns = spec.returned_columns(self._world_size)
        self._has_budget = spec.max_recv_slots is not None

    def check(self) -> None:
        self._faults.check(self._num_slots, has_budget=self._has_budget)

    def dispatch(self, call: DispatchCall) -> Dispatched:
        layout = self._dispatch_layout
        topk_ids, fault = guard_ids(call.topk_ids, self._num_experts, call.error)
        # Pack before the header is sent, so that the header can report a failure of packing.
        message = self._message(layout, call, topk_ids, fault)
        batch = self._new_batch(call)
        # If this rank raises in dispatch, all ranks must, because it will not take part in the
        # combine and the backward.
        error = call.error if call.error is not None and call.error.was_raised else None
        if self._compares_calls:
            self._calls.announce(
                CallKind.DISPATCH,
                batch,
                error=error,
                flags=int(call.flags),
                expert_names=call.expert_names,
            )
        rows = self._gather(message, phase="dispatch")
        headers = layout.first_words(rows[:: self._rows_per_rank])

        ids = layout.ids(rows)
        counts = count_experts(ids, self._num_experts).view(self._world_size, -1)
        # The aligned slots that each rank needs for this call, [W].
        required = aligned_counts(counts, self._spec.expert_alignment).sum(1)
        has_failed = self._faults.record(headers, required > self._num_slots, required, call.error)
        ids = torch.where(has_failed, -1, ids)
        own = torch.where(has_failed, 0, counts[self._rank])
        index, slot_weights = self._index(ids, layout.scalars(rows), own, self._num_slots)
        return Dispatched(
            rows=layout.wire_tensor(rows),
            index=index,
            slot_weights=slot_weights,
            exchange_plan=StaticExchangePlan(
                num_tokens=topk_ids.shape[0],
                num_rows=self._num_rows,
                index=index,
                has_failed=has_failed,
                call=batch,
                group_sums=self._group_sums(call, topk_ids, ids, index),
            ),
            any_flags=assume_all_need_grad(call.flags),
        )

    def cached_dispatch(self, hidden_states: Tensor, exchange_plan: ExchangePlan) -> Tensor:
        assert isinstance(exchange_plan, StaticExchangePlan), "an exchange plan of this buffer"
        sent = self._packed_dy(hidden_states)
        rows = sent.new_empty(self._rows_per_rank, sent.shape[1])
        rows[1 : 1 + sent.shape[0]] = sent
        self._announce(CallKind.COMBINE_BACKWARD, exchange_plan.call, rows=sent)
        received = self._gather(rows, phase="backward of combine")
        return self._restored_dy(received, hidden_states.dtype)

    def combine(
        self,
        rows: Tensor,
        exchange_plan: ExchangePlan | None,
        *,
        rows_per: RowsPer,
        slot_weights: Tensor | None = None,
        row_scalars: Tensor | None = None,
        error: EPError | None = None,
        bias: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        if error is not None:
            # Send rows of zeros, with the code of the error in the header rows.
            code, _ = unpack_fault(fault_word(error, in_combine=True), 0)
            rows = rows.new_zeros(self._num_rows, self._num_columns * rows.shape[1])
            if self._quantized is not None:
                rows = self._quantized.pack(rows)
            rows[:: self._rows_per_rank, :1] = int(code)
            sign = replace(ANY_BATCH, buffer=self._number)
            returned = self._send_sums(rows, CallKind.COMBINE, sign)
            self._faults.record_combine(_read_codes(returned), error)
            return rows[:0], None
        assert isinstance(exchange_plan, StaticExchangePlan), "an exchange plan of this buffer"
        num_tokens, has_failed = exchange_plan.num_tokens, exchange_plan.has_failed

        def send(sums: Tensor, kind: CallKind) -> Tensor:
            nonlocal has_failed
            returned = self._send_sums(sums, kind, exchange_plan.call)
            if kind is CallKind.COMBINE:
                has_failed = self._faults.record_combine(_read_codes(returned), None) | has_failed
            return returned[:, 1 : 1 + num_tokens]

        # Header rows have no slot, so their sums are zero: no fault on this rank.
        sums = exchange_plan.sums(rows, rows_per, slot_weights)
        returned, scalars = self._exchange_sums(sums, row_scalars, send)
        has_weights, nan = slot_weights is not None, float("nan")
        total = exchange_plan.total(returned, rows.dtype, bias, has_weights=has_weights)
        total = total.masked_fill(has_failed, nan)
        return total, None if scalars is None else scalars.masked_fill(has_failed, nan)

    def _message(
        self, layout: RowLayout, call: DispatchCall, topk_ids: Tensor, fault: Tensor
    ) -> Tensor:
        """Pack the header, the tokens and padding into [1 + M, row_bytes], uint8."""
        end = 1 + topk_ids.shape[0]
        message = torch.empty(
            self._rows_per_rank, layout.row_bytes, dtype=torch.uint8, device=topk_ids.device
        )
        layout.ids(message[:1]).fill_(-1)
        layout.first_words(message[:1])[:] = pack_header(fault, call.flags)
        layout.write_tokens(message[1:end], call, topk_ids)
        layout.ids(message[end:]).fill_(-1)
        return message

    def _gather(self, rows: Tensor, *, phase: str) -> Tensor:
        """Gather [1 + M, ...] of each rank into [W * (1 + M), ...]."""
        ranks = self._world_size
        self._traffic.control([1] * ranks, row_bytes_of(rows))
        self._traffic.dispatch([self._rows_per_rank - 1] * ranks, row_bytes_of(rows))
        return self._collectives.all_gather(rows, phase=phase).flatten(0, 1)

    def _send_sums(self, rows: Tensor, kind: CallKind, sign: CallSign) -> Tensor:
        """Announce the call and exchange partial sums; return those for this rank, [W, 1 + M, ...].

        rows: [W * (1 + M), ...].
        """
        self._announce(kind, sign)
        ranks = self._world_size
        self._traffic.control([1] * ranks, row_bytes_of(rows))
        self._traffic.combine([self._rows_per_rank - 1] * ranks, row_bytes_of(rows))
        returned = self._collectives.all_to_all(rows, phase=kind.text)
        return returned.unflatten(0, (ranks, self._rows_per_rank))


def _read_codes(returned: Tensor) -> Tensor:
    """Return the FaultCode of each rank, [W], int64, from the header rows of sums [W, 1 + M, ...].

    Every dtype of sums, and a byte of quantised ones, represents these small integers exactly.
    """
    return returned[:, 0, 0].long()


def num_static_slots(spec: BufferSpec, world_size: int) -> int:
    """Return C: the budget, or the slots that suffice for any routing of M tokens per rank."""
    return spec.max_recv_slots or max_slots_of(spec, _max_tokens(spec) * world_size)


def _max_tokens(spec: BufferSpec) -> int:
    assert spec.max_tokens_per_rank is not None, "plan() has checked the limit"
    return spec.max_tokens_per_rank
