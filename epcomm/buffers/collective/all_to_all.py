"""Send one copy of a token per destination rank, over plain collectives.

A call has two messages: the header (in a dispatch with the counts), then the rows (in a dispatch
with their ids and weights). Both run on any transport with an all-to-all, so this buffer is also
the reference for other buffers. What leaves a rank is planned in sends.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from epcomm.buffers.base import AddsBias, Dispatched
from epcomm.buffers.collective.base import COLLECTIVE_CAPS, OverCollectives, row_bytes_of
from epcomm.buffers.collective.sends import KernelSendPlan, PlainSendPlan, SendOrder, SendPlan
from epcomm.buffers.sizes import (
    CallShape,
    Region,
    RowBytes,
    index_region,
    rows_region,
    slot_regions,
)
from epcomm.buffers.traffic import BufferTraffic
from epcomm.calls.call import DispatchCall
from epcomm.calls.counts import Counts, counts_bytes
from epcomm.calls.header import CallKind, CallSign
from epcomm.config import Mode
from epcomm.errors import EPError
from epcomm.ops.slots import (
    AnyMembers,
    index_slots,
    reduce_rows,
    reduce_rows_onto,
    slots_by_row,
)
from epcomm.records import ExchangePlan, SlotIndex
from epcomm.spec import BufferCaps, BufferSpec
from epcomm.types import RowsPer

# The number of rows from each rank to each rank, [W][W].
RowTable = tuple[tuple[int, ...], ...]


@dataclass(frozen=True, kw_only=True, eq=False)
class CollectiveExchangePlan(ExchangePlan):
    """The rows that this rank sends and receives in one dispatch.

    send_splits, recv_splits: [W], number of rows to and from each rank.
    slots_by_row: the slots of each row, in k order; None where the rows are not computed here.
    table: number of rows from each rank to each rank, where all ranks see all headers.
    views_epoch: epoch of the exchange that brought the rows, where they are views that a later
        exchange overwrites.
    call: the sign of the dispatch that all ranks compare.
    """

    num_tokens: int
    num_rows: int
    index: SlotIndex
    send_splits: tuple[int, ...]
    recv_splits: tuple[int, ...]
    sends: SendOrder
    slots_by_row: AnyMembers | None
    call: CallSign
    table: RowTable | None = None
    views_epoch: int | None = None

    def rows_from_ranks(self) -> Tensor:
        device = self.index.num_tokens_per_expert.device
        return torch.tensor(self.recv_splits, dtype=torch.int32, device=device)


class CollectiveBuffer(OverCollectives, AddsBias):
    """Serves normal mode over `Collectives`, with exact sizes and one host sync a dispatch."""

    name: ClassVar[str] = "collective"
    modes: ClassVar[frozenset[Mode]] = frozenset({Mode.NORMAL})
    # Every call has a header, because it brings the counts.
    counts_calls = True
    # Rows between ranks from the last headers, where all ranks see all headers.
    _table: RowTable | None = None
    # Epoch of the rows of the current dispatch, where they are views.
    _views_epoch: int | None = None

    @classmethod
    def caps(cls, mode: Mode) -> BufferCaps:
        return COLLECTIVE_CAPS

    @classmethod
    def region_bytes(cls, spec: BufferSpec, world_size: int) -> tuple[Region, ...]:
        row, copies = RowBytes.of(spec), min(spec.top_k, world_size)
        max_tokens = spec.max_tokens_per_rank
        max_sent = None if max_tokens is None else max_tokens * copies
        max_rows = None if max_tokens is None else max_tokens * world_size
        # SendOrder has two int64 for each row, and K int64 and one offset for each token.
        order_bytes = 16 * copies + 8 * spec.top_k + 8
        return (
            Region(name="headers", max_bytes=2 * world_size * counts_bytes(spec.num_local_experts)),
            Region(
                name="send order",
                bytes_per_token=order_bytes,
                max_bytes=None if max_tokens is None else max_tokens * order_bytes + 8,
            ),
            rows_region("sent rows", row.dispatch, per_token=copies, max_rows=max_sent),
            rows_region("received rows", row.dispatch, per_token=copies, max_rows=max_rows),
            index_region(spec, rows_per_token=copies, max_rows=max_rows),
            *slot_regions(spec, row_bytes=row.dispatch, max_rows=max_rows),
            rows_region("partial sums", row.combine, per_token=copies, max_rows=max_rows),
            rows_region("returned rows", row.combine, per_token=copies, max_rows=max_sent),
        )

    @classmethod
    def wire_bytes(
        cls, spec: BufferSpec, call: CallShape, *, backward: bool = False
    ) -> BufferTraffic:
        row = RowBytes.of(spec, backward=backward)
        header_bytes = 0 if backward else counts_bytes(spec.num_local_experts)
        sent_between = call.rows_sent_between * row.dispatch
        return BufferTraffic(
            dispatch_bytes=call.rows_sent * row.dispatch,
            combine_bytes=call.rows_received * row.combine,
            control_bytes=(call.world_size - 1) * header_bytes,
            bytes_between=sent_between + call.rows_received_between * row.combine,
        )

    def dispatch(self, call: DispatchCall) -> Dispatched:
        layout, sending, batch = self._dispatch_layout, self._send_plan(call), self._new_batch(call)
        headers = sending.headers(self._calls, batch, has_rest=self._has_rest)
        counts = self._exchange_counts(call, headers, sending.run_ahead)
        send_splits = counts.rows_to_rank
        sends = sending.order(sum(send_splits))
        self._traffic.dispatch(send_splits, layout.row_bytes)
        received = self._send_rows(
            sending.packed(sends),
            self._table,
            send_splits,
            counts.rows_from_rank,
            (layout.row_bytes, torch.uint8),
            phase="dispatch rows",
        )

        index, slot_weights = self._index_rows(received, counts)
        exchange_plan = CollectiveExchangePlan(
            num_tokens=call.topk_ids.shape[0],
            num_rows=received.shape[0],
            index=index,
            send_splits=send_splits,
            recv_splits=counts.rows_from_rank,
            sends=sends,
            slots_by_row=None if index.slots_of_row is None else slots_by_row(index),
            table=self._table,
            views_epoch=self._views_epoch,
            call=batch,
        )
        return Dispatched(
            rows=layout.wire_tensor(received),
            index=index,
            slot_weights=slot_weights,
            exchange_plan=exchange_plan,
            any_flags=counts.any_flags,
            row_topk=self._row_topk(received),
        )

    def _index_rows(self, received: Tensor, counts: Counts) -> tuple[SlotIndex, Tensor | None]:
        """Make the index over received rows, and bring their weights into its order."""
        layout = self._dispatch_layout
        return index_slots(
            layout.ids(received),
            layout.scalars(received),
            counts.device_tokens_per_expert,
            counts.tokens_per_expert,
            first_expert=self._first_expert,
            expert_alignment=self._spec.expert_alignment,
        )

    def _row_topk(self, received: Tensor) -> tuple[Tensor, Tensor] | None:
        """Return the experts and weights of each row, where a caller reads these and no index."""
        return None

    def _send_plan(self, call: DispatchCall) -> SendPlan:
        layout, num_local = self._dispatch_layout, self._spec.num_local_experts
        if self._row_ops is None:
            return PlainSendPlan(call, layout, num_local)
        return KernelSendPlan(call, layout, num_local, ops=self._row_ops, memory=self._sent)

    def cached_dispatch(self, hidden_states: Tensor, exchange_plan: ExchangePlan) -> Tensor:
        assert isinstance(exchange_plan, CollectiveExchangePlan), "an exchange plan of this buffer"
        self._announce(CallKind.COMBINE_BACKWARD, exchange_plan.call, rows=hidden_states)
        self._traffic.dispatch(exchange_plan.send_splits, row_bytes_of(hidden_states))
        return self._send_rows(
            partial(exchange_plan.sends.copy_tokens, hidden_states),
            exchange_plan.table,
            exchange_plan.send_splits,
            exchange_plan.recv_splits,
            (hidden_states.shape[1], hidden_states.dtype),
            phase="backward of combine",
        )

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
            return self._announce_error(rows, error)
        assert isinstance(exchange_plan, CollectiveExchangePlan), "an exchange plan of this buffer"
        kind = CallKind.COMBINE if row_scalars is None else CallKind.DISPATCH_BACKWARD

        def sums(part: slice) -> Tensor:
            if rows_per is RowsPer.ROW:
                return rows[part].contiguous()
            assert exchange_plan.slots_by_row is not None, "slots are of this rank"
            return reduce_rows(rows, exchange_plan.slots_by_row.part(part), slot_weights)

        rows_of_token = exchange_plan.sends.rows_of_token
        if row_scalars is None:
            shape = (rows.shape[1], rows.dtype)
            returned = self._send_sums(sums, exchange_plan, shape, kind)
            return _summed(returned, rows_of_token, bias), None
        layout = self._scalar_layout(rows.dtype)

        def packed(part: slice) -> Tensor:
            return layout.pack_rows(sums(part), row_scalars[part])

        shape = (layout.row_bytes, torch.uint8)
        returned = self._send_sums(packed, exchange_plan, shape, kind)
        scalars = reduce_rows(layout.scalars(returned).contiguous(), rows_of_token)
        return _summed(layout.data(returned), rows_of_token, bias), scalars

    def _send_rows(
        self,
        rows: Tensor | Callable[[slice, Tensor], None],
        table: RowTable | None,
        send_splits: Sequence[int],
        recv_splits: Sequence[int],
        shape: tuple[int, torch.dtype],
        *,
        phase: str,
    ) -> Tensor:
        """Send rows to the ranks of experts.

        Args:
            rows: all rows, by rank, then token, or what writes a range of them into the memory that
                they are sent from.
            table: see CollectiveExchangePlan.
            send_splits, recv_splits: number of rows to and from each rank.
            shape: number of elements of a row, and their dtype.
            phase: name of the exchange, for errors.

        Returns: the rows from all ranks, by source.
        """
        if not isinstance(rows, Tensor):
            write, num_rows = rows, sum(send_splits)
            rows = self._sent.rows(num_rows, *shape)
            write(slice(0, num_rows), rows)
        return self._collectives.all_to_all(
            rows, send_splits=send_splits, recv_splits=recv_splits, phase=phase
        )

    def _send_sums(
        self,
        make: Callable[[slice], Tensor],
        exchange_plan: CollectiveExchangePlan,
        shape: tuple[int, torch.dtype],
        kind: CallKind,
    ) -> Tensor:
        """Send the results for received rows back to the ranks that the rows came from.

        Args:
            make: computes a range of the rows to send, numbered as they arrived.
            exchange_plan: the plan of the dispatch.
            shape: number of elements of a row, and their dtype.
            kind: kind of the call, which ranks compare between the local work and the exchange.

        Returns: the rows from all ranks, by rank of the experts.
        """
        width, dtype = shape
        rows = make(slice(0, exchange_plan.num_rows))
        self._announce(kind, exchange_plan.call)
        self._traffic.combine(exchange_plan.recv_splits, row_bytes_of(rows))
        return self._collectives.all_to_all(
            rows,
            send_splits=exchange_plan.recv_splits,
            recv_splits=exchange_plan.send_splits,
            out=self._returned.rows(sum(exchange_plan.send_splits), width, dtype),
            phase=kind.text,
        )


def _summed(rows: Tensor, members: AnyMembers, bias: Tensor | None) -> Tensor:
    return reduce_rows(rows, members) if bias is None else reduce_rows_onto(bias, rows, members)
