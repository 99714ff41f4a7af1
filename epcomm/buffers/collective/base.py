"""The common base of the buffers over plain collectives."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from epcomm.buffers.collective.quantized_rows import QuantizedRows
from epcomm.buffers.row_layout import RowLayout
from epcomm.buffers.traffic import BufferTraffic, TrafficMeter
from epcomm.calls.call import DispatchCall
from epcomm.calls.counts import Counts, exchange_counts
from epcomm.calls.header import CallKind, CallSign, rows_size
from epcomm.calls.order import Calls
from epcomm.errors import EPError
from epcomm.ops.group_sums import GroupSums, SumGroups, pair_table
from epcomm.ops.slots import index_slots, localize, reduce_rows, row_ops_of, slots_by_row, sum_parts
from epcomm.platforms.machine import Machine
from epcomm.records import ExchangePlan, SlotIndex, Steps
from epcomm.spec import Availability, BufferCaps, BufferSpec
from epcomm.types import GRADIENT_DTYPES, ROW_DTYPES, SUM_DTYPES, Layout, RowsPer, WireFormat

# The capabilities of every buffer over collectives.
COLLECTIVE_CAPS = BufferCaps(
    layout=Layout.ROWS,
    trainable=True,
    ordered=True,
    wire_dtypes=ROW_DTYPES,
    combine_dtypes=SUM_DTYPES,
    backward_dtypes=GRADIENT_DTYPES,
)


@dataclass(frozen=True, kw_only=True, eq=False)
class SignedExchangePlan(ExchangePlan):
    """The plan of a buffer over collectives.

    call: the sign of the dispatch, for the calls along this plan.
    group_sums: the sums by group, with BufferSpec.sum_groups.
    """

    call: CallSign
    group_sums: GroupSums | None = None

    def sums(self, rows: Tensor, rows_per: RowsPer, slot_weights: Tensor | None) -> Tensor:
        """Return the sum of the expert results of each row, [R, H], zero without a slot.

        With group_sums, one for each of its columns, [R, num_columns * H].
        """
        if self.group_sums is not None:
            sums = self.group_sums.sums(rows, self.index, slot_weights)
            columns = self.group_sums.num_columns
            return sums(slice(0, self.num_rows * columns)).view(-1, columns * rows.shape[1])
        if rows_per is RowsPer.SLOT:
            return reduce_rows(rows, slots_by_row(self.index), slot_weights)
        assert self.index.slots_of_row is not None, "an index over rows"
        # Rows without a slot are undefined.
        return rows.masked_fill((self.index.slots_of_row < 0).all(dim=1, keepdim=True), 0)

    def total(
        self, returned: Tensor, dtype: torch.dtype, bias: Tensor | None = None, *, has_weights: bool
    ) -> Tensor:
        """Return y [T, H], in `dtype`, of the sums that all ranks return, [W, T, ...].

        returned: in `dtype`, or dequantised, in float32.
        bias: [T, H] or None, see sum_parts().
        has_weights: router weights are to be applied, unless they have been.
        """
        if self.group_sums is not None:
            return self.group_sums.total(returned, dtype, bias, has_weights=has_weights)
        return sum_parts(returned, dtype, bias)


class OverCollectives:
    """The base of buffers that need only `Collectives`, so they serve any group."""

    name: ClassVar[str]
    sums_groups: ClassVar[bool] = True
    # Documented in Buffer.
    counts_calls: bool
    begins_calls = True

    @classmethod
    def probe(cls, machine: Machine) -> Availability:
        return Availability(ok=True)

    def __init__(self, calls: Calls, spec: BufferSpec) -> None:
        collectives = calls.collectives
        self._calls, self._collectives = calls, collectives
        self._spec = spec
        self._rank, self._world_size = collectives.rank, collectives.world_size
        self._num_experts = spec.num_local_experts * self._world_size
        self._first_expert = spec.num_local_experts * self._rank
        self._groups = SumGroups.of(spec, self._world_size)
        self._traffic = TrafficMeter(collectives.rank, spec.hosts)
        self._waits = calls.waits
        self._number = self._calls.add_buffer(self.name)
        # If the host does not wait in collectives, comparing calls would add a host sync.
        self._compares_calls = self._waits or spec.compares_calls
        self.counts_calls |= self._compares_calls
        # If the host waits in collectives, ranks in different calls must send equal lengths. So
        # headers have a fixed size, and the other counts need a second message.
        self._has_rest = self._waits
        self._row_ops = row_ops_of(collectives.device)
        device, gradients = collectives.device, spec.backward_format
        self._quantized = QuantizedRows.of(spec, spec.combine_format, device)
        # The gradients of y, and those of rows with the gradients of router weights.
        self._quantized_dy = QuantizedRows.of(spec, gradients, device)
        self._quantized_dx = QuantizedRows.of(spec, gradients, device, top_k=spec.top_k)
        self._dispatch_layout = self._row_layout(spec.dispatch_format, has_ids=True)
        self._scalar_layouts: dict[tuple[torch.dtype, int], RowLayout] = {}

    def prepare(self) -> None:
        """Allocate nothing, because sizes are known only in the calls."""

    def _new_batch(self, call: DispatchCall) -> CallSign:
        """Return the sign of this dispatch and of the calls along its plan, equal on all ranks."""
        return CallSign(
            buffer=self._number, dispatcher=call.dispatcher, batch=self._calls.next_batch
        )

    def _announce(
        self,
        kind: CallKind,
        batch: CallSign,
        *,
        rows: Tensor | None = None,
        error: EPError | None = None,
    ) -> None:
        """Compare the call on all ranks before rows are sent; see Calls.announce().

        It does nothing if the host does not wait in collectives and spec.compares_calls is not set,
        to avoid a host sync. Traffic does not count these headers.

        rows: the rows that will be sent, to compare their columns and dtype too; or None.
        """
        if self._compares_calls:
            size = None if rows is None else rows_size(rows.shape[1], rows.dtype)
            self._calls.announce(kind, batch, size=size, error=error)

    def _exchange_counts(
        self,
        call: DispatchCall,
        headers: tuple[Tensor, Tensor],
        *,
        rows_have_slots: bool = True,
        exchange: Callable[[Tensor], Tensor] | None = None,
        meanwhile: Callable[[], None] | None = None,
    ) -> Steps[Counts]:
        """Exchange row and slot counts: the only host sync of a dispatch; see exchange_counts()."""
        words_to_rank = headers[0].shape[1] + headers[1].shape[1]
        self._traffic.control([1] * self._world_size, 8 * words_to_rank)
        return exchange_counts(
            self._calls,
            call,
            headers,
            self._spec,
            rows_have_slots=rows_have_slots,
            exchange=exchange,
            start_read=None if self._row_ops is None else self._row_ops.start_read,
            meanwhile=meanwhile,
        )

    def _index(
        self, ids: Tensor, weights: Tensor, counts: Tensor, size: Sequence[int] | int
    ) -> tuple[SlotIndex, Tensor | None]:
        """Return the index over rows that have arrived, and slot weights; see index_slots()."""
        first, alignment = self._first_expert, self._spec.expert_alignment
        return index_slots(
            ids, weights, counts, size, first_expert=first, expert_alignment=alignment
        )

    def _exchange_sums(
        self, sums: Tensor, row_scalars: Tensor | None, send: Callable[[Tensor, CallKind], Tensor]
    ) -> tuple[Tensor, Tensor | None]:
        """Send sums [N, C * H], with scalars or quantised if that is asked for.

        C: BufferSpec.returned_columns().   row_scalars: [N, K], or None.
        send: exchanges rows [N, ...], contiguous; returns those for this rank, [W, T, ...].

        Returns: sums [W, T, C * H], float32 if they were quantised, and totals of scalars, [T, K].
        """
        if row_scalars is None:
            if self._quantized is None:
                return send(sums.contiguous(), CallKind.COMBINE), None
            returned = send(self._quantized.pack(sums), CallKind.COMBINE)
            return self._quantized.restore(returned), None
        quantized, kind = self._quantized_dx, CallKind.DISPATCH_BACKWARD
        if quantized is not None:
            returned = send(quantized.pack(sums, row_scalars), kind)
            rows, scalars = quantized.restore(returned), quantized.scalars(returned)
        else:
            layout = self._scalar_layout(sums.dtype, sums.shape[1] // self._spec.hidden_size)
            returned = send(layout.pack_rows(sums, row_scalars), kind)
            rows, scalars = layout.data(returned), layout.scalars(returned)
        return rows, sum_parts(scalars, row_scalars.dtype)

    def _packed_dy(self, hidden_states: Tensor) -> Tensor:
        """Return the gradients of y as they are sent."""
        quantized = self._quantized_dy
        return hidden_states if quantized is None else quantized.pack(hidden_states)

    def _restored_dy(self, received: Tensor, dtype: torch.dtype) -> Tensor:
        """Return received gradients of y in `dtype`, which unquantised ones have."""
        quantized = self._quantized_dy
        return received if quantized is None else quantized.restore(received).to(dtype)

    def traffic(self) -> BufferTraffic:
        return self._traffic.snapshot()

    def check(self) -> None:
        """Do nothing, because the calls raise all faults."""

    def close(self) -> None:
        """Do nothing, because calls allocate their memory."""

    def _group_sums(
        self, call: DispatchCall, topk_ids: Tensor, ids: Tensor, index: SlotIndex
    ) -> GroupSums | None:
        """Return the sums by group of received rows with these ids, or None without sum_groups.

        topk_ids: [T, K], the checked ids of this rank's tokens.
        ids: [R, K], the ids of received rows.
        """
        groups, num_local = self._groups, self._spec.num_local_experts
        if groups is None:
            return None
        columns = groups.columns(localize(ids, self._first_expert, num_local))
        num_pairs = ids.shape[0] * groups.num_columns
        numbers = torch.arange(num_pairs, device=ids.device).view(-1, groups.num_columns)
        assert index.slots_of_row is not None, "an index over rows has its inverse"
        source = None
        if groups.sums_at_source:
            # Returned rows are numbered by rank, token and entry.
            owner = torch.div(topk_ids, num_local, rounding_mode="floor")
            entry = torch.arange(topk_ids.numel(), device=ids.device).view_as(topk_ids)
            entries = torch.where(topk_ids < 0, -1, owner * topk_ids.numel() + entry)
            source = groups.source(entries, call.topk_groups, call.topk_weights)
        return GroupSums(
            table=pair_table(index.slots_of_row, columns, numbers, num_pairs),
            source=source,
            num_columns=groups.num_columns,
        )

    def _scalar_layout(self, dtype: torch.dtype, num_columns: int = 1) -> RowLayout:
        """Return the layout of combine's rows with elements of `dtype` and row scalars.

        num_columns: the row has num_columns * H elements.
        """
        layout = self._scalar_layouts.get((dtype, num_columns))
        if layout is None:
            layout = self._row_layout(WireFormat.of(dtype), has_ids=False, num_columns=num_columns)
            self._scalar_layouts[dtype, num_columns] = layout
        return layout

    def _row_layout(self, wire: WireFormat, *, has_ids: bool, num_columns: int = 1) -> RowLayout:
        return RowLayout(
            hidden_size=num_columns * self._spec.hidden_size,
            top_k=self._spec.top_k,
            format=wire,
            has_ids=has_ids,
        )


def row_bytes_of(rows: Tensor) -> int:
    """Return the bytes of one row of a matrix."""
    return rows.shape[1] * rows.element_size()
