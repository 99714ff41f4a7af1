"""Send one copy of a token per destination rank: the buffer over plain collectives.

A call has two messages: the header (in a dispatch with the counts), then the rows (in a dispatch
with their ids and weights). Both need only an all-to-all, so this buffer runs on any transport and
is the reference for other buffers. Worked example, 2 ranks, 1 expert each, on rank 0:

    topk_ids [[0, 1], [1, -1]]      token 0 goes to ranks 0 and 1, token 1 to rank 1
    row_of_rank [[0, 1], [-1, 2]]   rows are sent by rank, then token: 1 to rank 0, 2 to rank 1

A SendPlan counts, orders and packs the rows of one dispatch. RowsBuffer indexes the received rows.
A RowMover moves rows and sums by collectives; HostMover of shared_memory moves them through memory.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from epcomm.buffers.base import AddsBias, Dispatched
from epcomm.buffers.collective.base import (
    COLLECTIVE_CAPS,
    OverCollectives,
    SignedExchangePlan,
    row_bytes_of,
)
from epcomm.buffers.row_layout import RowLayout, Scratch, wire_tensor_of
from epcomm.buffers.sizes import (
    CallShape,
    Region,
    RowBytes,
    index_region,
    rows_region,
    slot_regions,
    sum_regions,
)
from epcomm.buffers.traffic import BufferTraffic
from epcomm.calls.call import DispatchCall
from epcomm.calls.counts import Counts, counts_bytes, empty_headers, guard_ids, make_headers, seal
from epcomm.calls.header import ANY_BATCH, HEADER_WORDS, PAIRS, ROWS, CallKind, CallSign
from epcomm.calls.order import Calls
from epcomm.collectives.base import Collectives
from epcomm.config import Mode
from epcomm.errors import EPError
from epcomm.ops.group_sums import GroupSums, SumGroups, pair_table
from epcomm.ops.slots import (
    AnyMembers,
    MemberTable,
    as_members,
    count_experts,
    localize,
    mark_pairs,
    members_of,
    number_pairs,
    reduce_rows,
    reduce_rows_onto,
    row_ops_of,
    slots_by_row,
)
from epcomm.protocol import BatchFlags, FaultCode, fault_word
from epcomm.records import ExchangePlan, Steps, to_the_end
from epcomm.spec import BufferCaps, BufferSpec
from epcomm.types import RowsPer

if TYPE_CHECKING:
    from epcomm.ops.with_triton import TritonRowOps

# The number of rows from each rank to each rank, [W][W].
RowTable = tuple[tuple[int, ...], ...]
# A function that writes a range of the rows that this rank sends into the given memory.
WriteRows = Callable[[slice, Tensor], None]
# A function that computes a range of the rows that combine returns.
MakeRows = Callable[[slice], Tensor]
# The number of elements of a row, and their dtype.
RowShape = tuple[int, torch.dtype]


@dataclass(frozen=True, kw_only=True, eq=False)
class SendOrder:
    """The N rows that this rank sends, by destination rank, then token.

    rows_of_token: the rows of each token, by rank.
    token_of_row: [N], int64; None if kernels read rows_of_token instead.
    """

    rows_of_token: AnyMembers
    token_of_row: Tensor | None

    def copy_tokens(self, hidden_states: Tensor, rows: slice, out: Tensor) -> None:
        """Write the tokens [T, H] of a range of rows; without token_of_row, of all rows."""
        if self.token_of_row is not None:
            torch.index_select(hidden_states, 0, self.token_of_row[rows], out=out)
            return
        ops = row_ops_of(hidden_states.device)
        assert ops is not None, "kernels made the order"
        assert isinstance(self.rows_of_token, MemberTable), "kernels made the order"
        nothing = (None, None, None)
        ops.scatter_tokens((hidden_states, *nothing), self.rows_of_token.table, (out, *nothing))


@dataclass(kw_only=True, eq=False)
class SendPlan:
    """Plans the rows that one dispatch sends; its methods are called in the order below.

    call: the dispatch.   layout: of its rows.   num_local: L.   groups: the sum groups.
    """

    call: DispatchCall
    layout: RowLayout
    num_local: int
    groups: SumGroups | None

    def headers(self, calls: Calls, sign: CallSign, *, has_rest: bool) -> tuple[Tensor, Tensor]:
        """Count the rows and slots and return the headers; see make_headers(). Host sync: none.

        Memory is allocated and tokens are converted here, before the headers are sent, so that they
        can report a failure.
        """
        call, num_local, world_size = self.call, self.num_local, calls.world_size
        num_experts = num_local * world_size
        self._topk_ids, fault = guard_ids(call.topk_ids, num_experts, call.error)
        destination = torch.div(self._topk_ids, num_local, rounding_mode="floor")
        # Whether token t goes to rank r, [T, W].
        self._needed = mark_pairs(destination, world_size)
        # Convert each token once, not once per copy; rows are gathered from the result.
        self._wire = wire_tensor_of(call, self.layout.format)
        counts = (fault, self._needed.sum(0), count_experts(self._topk_ids, num_experts))
        pairs = self._mark_pairs(world_size)
        return make_headers(calls, sign, call.flags, counts, has_rest=has_rest, pairs=pairs)

    def _mark_pairs(self, world_size: int) -> Tensor | None:
        """Mark the rows that return for each token; return their number by rank, [W], or None."""
        groups = self.groups
        if groups is None:
            return None
        self._columns = groups.columns(self._topk_ids)
        has_pair = mark_pairs(self._columns, world_size * groups.num_columns)
        # By token, rank and column of the rank.
        self._has_pair = has_pair.unflatten(1, (world_size, groups.num_columns))
        return self._has_pair.sum((0, 2))

    def returned_rows(self) -> Tensor:
        """Return the number of the returned row of each addend of a token, [T, G] or [T, K].

        -1 for none. Returned rows are numbered by rank, token and column.
        """
        by_rank = self._has_pair.transpose(0, 1)
        numbers = number_pairs(by_rank.flatten(0, 1)).view(by_rank.shape).transpose(0, 1)
        numbers = numbers.flatten(1)
        assert self.groups is not None, "only rows of groups are numbered"
        if not self.groups.sums_at_source:
            return numbers
        return torch.where(self._columns < 0, -1, numbers.gather(1, self._columns.clamp(min=0)))

    def run_ahead(self) -> None:
        """Launch work that does not depend on the headers of other ranks; plain torch has none."""

    def order(self, num_sends: int) -> SendOrder:
        """Return the order of the rows; num_sends is their number, known after the headers."""
        needed = self._needed
        rows_of_token = members_of(number_pairs(needed.T).T, num_sends)
        tokens = torch.arange(needed.shape[0], device=needed.device)
        token_of_row = torch.empty(num_sends, dtype=torch.int64, device=needed.device)
        token_of_row[rows_of_token.flat] = torch.repeat_interleave(
            tokens, needed.sum(1), output_size=num_sends
        )
        return SendOrder(rows_of_token=rows_of_token, token_of_row=token_of_row)

    def packed(self, order: SendOrder) -> Tensor | WriteRows:
        """Return all packed rows, or a function that writes a range of them."""
        assert order.token_of_row is not None, "as order() made it"
        token_of_row, weights = order.token_of_row, self.call.topk_weights

        def write(rows: slice, out: Tensor) -> None:
            self.layout.pack_tokens(
                self._wire, token_of_row[rows], self._topk_ids, weights, out=out
            )

        return write


@dataclass(kw_only=True, eq=False)
class KernelSendPlan(SendPlan):
    """Plans by kernels, which number and pack rows into memory during the exchange of headers."""

    ops: TritonRowOps
    memory: Scratch

    def headers(self, calls: Calls, sign: CallSign, *, has_rest: bool) -> tuple[Tensor, Tensor]:
        call, num_local = self.call, self.num_local
        self._topk_ids = call.topk_ids.contiguous()
        num_tokens, top_k = self._topk_ids.shape
        self._wire = wire_tensor_of(call, self.layout.format)
        # Allocate for the most rows; their number is known only after packing.
        most = num_tokens * min(top_k, calls.world_size)
        self._rows = self.memory.rows(most, self.layout.row_bytes, torch.uint8)
        words = calls.header(CallKind.DISPATCH, sign, flags=int(call.flags))[:ROWS]
        words[-2] = fault_word(call.error)
        self._header, rest = empty_headers(calls, num_local, has_rest=has_rest)
        self.ops.count_sends(
            self._topk_ids,
            self._header,
            rest,
            tuple(words),
            wrong_ids=int(FaultCode.IDS),
            slots_at=HEADER_WORDS,
            num_local=num_local,
        )
        if self.groups is not None:
            # The kernel reports ids that are out of range.
            is_expert = (self._topk_ids >= 0) & (self._topk_ids < num_local * calls.world_size)
            self._topk_ids = torch.where(is_expert, self._topk_ids, -1)
            pairs = self._mark_pairs(calls.world_size)
            assert pairs is not None, "the buffer has groups"
            self._header[:, PAIRS] = pairs
        seal(self._header)
        return self._header, rest

    def run_ahead(self) -> None:
        self._row_of_rank = self.ops.order_sends(
            self._topk_ids, self._header, rows_at=ROWS, num_local=self.num_local
        )
        layout, rows = self.layout, self._rows
        self.ops.scatter_tokens(
            (
                self._wire.data,
                self._wire.scales,
                self._topk_ids,
                self.call.topk_weights.contiguous(),
            ),
            self._row_of_rank,
            (layout.data(rows), layout.scales(rows), layout.ids(rows), layout.scalars(rows)),
        )

    def order(self, num_sends: int) -> SendOrder:
        self._rows = self._rows[:num_sends]
        return SendOrder(rows_of_token=MemberTable(table=self._row_of_rank), token_of_row=None)

    def packed(self, order: SendOrder) -> Tensor:
        return self._rows


@dataclass(frozen=True, kw_only=True, eq=False)
class CollectiveExchangePlan(SignedExchangePlan):
    """The rows that this rank sends and receives in one dispatch.

    send_splits, recv_splits: [W], number of rows to and from each rank.
    returned_splits: [W] each, number of rows that combine returns to and from each rank.
    table, returned_table: number of rows from each rank to each rank, in dispatch and in combine;
        None unless all ranks receive all headers.
    addends: with sum_groups, see SendPlan.returned_rows().
    views_epoch: the epoch of the exchange if the rows are views that a later exchange overwrites;
        else None.
    """

    send_splits: tuple[int, ...]
    recv_splits: tuple[int, ...]
    returned_splits: tuple[tuple[int, ...], tuple[int, ...]]
    sends: SendOrder
    table: RowTable | None = None
    returned_table: RowTable | None = None
    addends: Tensor | None = None
    views_epoch: int | None = None

    def rows_from_ranks(self) -> Tensor:
        device = self.index.num_tokens_per_expert.device
        return torch.tensor(self.recv_splits, dtype=torch.int32, device=device)

    def returned(self, rows: Tensor, rows_per: RowsPer, slot_weights: Tensor | None) -> MakeRows:
        """Return a function that computes a range of the rows that combine returns."""
        if rows_per is RowsPer.ROW:
            # With sum_groups they are those that another exchange has returned.
            return lambda part: rows[part].contiguous()
        if self.group_sums is not None:
            return self.group_sums.sums(rows, self.index, slot_weights)
        slots = slots_by_row(self.index)
        return lambda part: reduce_rows(rows, slots.part(part), slot_weights)

    def returned_scalars(self, row_scalars: Tensor) -> Tensor:
        """Return the scalars of the rows that combine returns, 0 for entries of other rows."""
        if self.group_sums is None:
            return row_scalars
        slots, row_of_slot = self.group_sums.table, self.index.row_of_slot
        assert slots is not None, "this exchange sums"
        assert row_of_slot is not None, "an index over rows has slots"
        # Every returned row has a slot.
        row = row_of_slot[slots.amax(1).long()].long()
        return torch.where(slots >= 0, row_scalars[row], 0)

    @property
    def returned_of_token(self) -> AnyMembers:
        """The returned rows of each token, in the order of the sum."""
        if self.addends is None:
            return self.sends.rows_of_token
        return as_members(self.addends, sum(self.returned_splits[1]))

    def total(
        self, returned: Tensor, dtype: torch.dtype, bias: Tensor | None = None, *, has_weights: bool
    ) -> Tensor:
        """Return y [T, H], in `dtype`, of the rows that all ranks return, [N, H], by rank."""
        if self.group_sums is not None and self.group_sums.source is not None:
            assert bias is None, "no client with a bias has experts of a group on several ranks"
            return self.group_sums.source.total(returned, has_weights=has_weights)
        members = self.returned_of_token
        if bias is None:
            return reduce_rows(returned, members).to(dtype)
        return reduce_rows_onto(bias, returned, members).to(dtype)


class RowMover:
    """Moves the rows of one buffer between its ranks, by one all-to-all.

    has_rest: see make_headers().
    table, pair_table: of rows and of pairs, as CollectiveExchangePlan.table, from the last headers.
    """

    table: RowTable | None = None
    pair_table: RowTable | None = None

    def __init__(self, collectives: Collectives, *, waits: bool) -> None:
        """Move rows over `collectives`; waits: whether the host waits in them."""
        self.has_rest = waits
        self._collectives = collectives
        self._sent = Scratch(collectives.device, keeps=waits)
        self._returned = Scratch(collectives.device, keeps=waits)

    @property
    def epoch(self) -> int | None:
        """The epoch of the last rows if they are views that a later exchange overwrites."""
        return None

    def prepare(self) -> None:
        """Allocate; collectives are open. Collective: yes.   Host sync: yes."""

    def check_open(self) -> None:
        """Raise HandleError if the memory is closed; collectives check themselves. Local."""

    def find_overwritten(self, exchange_plan: CollectiveExchangePlan) -> EPError | None:
        """Return the error of a batch whose rows a later exchange has overwritten, or None."""
        return None

    def exchange_headers(self, call: DispatchCall) -> Callable[[Tensor], Tensor] | None:
        """Return a function that exchanges the headers of a dispatch, or None for the default."""
        return None

    def send_rows(
        self,
        rows: Tensor | WriteRows,
        table: RowTable | None,
        splits: tuple[Sequence[int], Sequence[int]],
        shape: RowShape,
        *,
        phase: str,
        is_kept: bool,
    ) -> Tensor:
        """Send rows to the ranks of their experts; return the received rows, by source.

        Args:
            rows: all rows, by rank, then token; or a function that writes a range of them.
            table: see CollectiveExchangePlan.
            splits: number of rows to each rank, and from each rank.
            phase: name of the exchange, for errors.
            is_kept: the caller owns the received rows; otherwise they may be views that a later
                exchange overwrites.
        """
        if not isinstance(rows, Tensor):
            write, num_rows = rows, sum(splits[0])
            rows = self._sent.rows(num_rows, *shape)
            write(slice(0, num_rows), rows)
        return self._collectives.all_to_all(
            rows, send_splits=splits[0], recv_splits=splits[1], phase=phase
        )

    def write_sums(
        self, make: MakeRows, exchange_plan: CollectiveExchangePlan, shape: RowShape
    ) -> Callable[[str], Tensor]:
        """Compute the sums of received rows; return a function that exchanges them.

        The caller compares the call before the exchange. The returned function takes the name of
        the exchange, for errors, and returns the sums from all ranks, by rank of the experts.

        Args:
            make: computes a range of the sums, in the order of received rows.
            exchange_plan: the plan of the dispatch.
        """
        to_rank, from_rank = exchange_plan.returned_splits
        rows = make(slice(0, sum(to_rank)))

        def exchange(phase: str) -> Tensor:
            return self._collectives.all_to_all(
                rows,
                send_splits=to_rank,
                recv_splits=from_rank,
                out=self._returned.rows(sum(from_rank), *shape),
                phase=phase,
            )

        return exchange

    def close(self) -> None:
        """Free the memory. Local, idempotent."""
        self._sent.free()
        self._returned.free()


class RowsBuffer(OverCollectives, AddsBias):
    """Serves exact sizes with one host sync per dispatch; its mover moves the rows."""

    # Every dispatch has a header, because it has the counts.
    counts_calls = True

    @classmethod
    def region_bytes(cls, spec: BufferSpec, world_size: int) -> tuple[Region, ...]:
        row, copies = RowBytes.of(spec), min(spec.top_k, world_size)
        columns = spec.returned_columns(world_size)
        returned, of_row = min(spec.top_k, world_size * columns), min(spec.top_k, columns)
        max_tokens = spec.max_tokens_per_rank
        max_sent = None if max_tokens is None else max_tokens * copies
        max_rows = None if max_tokens is None else max_tokens * world_size
        max_pairs = None if max_rows is None else max_rows * of_row
        tables = []
        if spec.sum_groups is not None:
            addends = spec.top_k if spec.sums_at_source else spec.sum_groups
            # int32 for each entry of a returned row, and int64 for each addend of a token.
            tables = [
                rows_region("group slots", 4 * spec.top_k, per_token=returned, max_rows=max_pairs),
                rows_region("addends", 8 * addends, per_token=1, max_rows=max_tokens),
            ]
        max_returned = None if max_tokens is None else max_tokens * returned
        # SendOrder has two int64 for each row, and one offset for each token.
        order_bytes = 16 * copies + 8
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
            *tables,
            *sum_regions(spec, returned, sent=max_pairs, returned=max_returned),
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
            combine_bytes=call.sums_sent * row.combine,
            control_bytes=(call.world_size - 1) * header_bytes,
            bytes_between=sent_between + call.sums_sent_between * row.combine,
        )

    def __init__(self, calls: Calls, spec: BufferSpec, mover: RowMover) -> None:
        super().__init__(calls, spec)
        self._mover = mover
        self._has_rest = mover.has_rest
        # Memory for the rows that kernels pack during the exchange of headers.
        self._packed = Scratch(self._collectives.device, keeps=self._waits)

    def prepare(self) -> None:
        self._mover.prepare()

    def dispatch(self, call: DispatchCall) -> Dispatched:
        return to_the_end(self.dispatch_steps(call))

    def dispatch_steps(self, call: DispatchCall) -> Steps[Dispatched]:
        self._mover.check_open()
        layout, sending, batch = self._dispatch_layout, self._send_plan(call), self._new_batch(call)
        headers = sending.headers(self._calls, batch, has_rest=self._has_rest)
        counts = yield from self._exchange_counts(
            call, headers, exchange=self._mover.exchange_headers(call), meanwhile=sending.run_ahead
        )
        send_splits = counts.rows_to_rank
        sends = sending.order(sum(send_splits))
        self._traffic.dispatch(send_splits, layout.row_bytes)
        # Autograd keeps rows longer than the lifetime of a receive buffer.
        is_kept = bool(call.flags & BatchFlags.GRAD_ENABLED)
        received = self._mover.send_rows(
            sending.packed(sends),
            self._mover.table,
            (send_splits, counts.rows_from_rank),
            (layout.row_bytes, torch.uint8),
            phase="dispatch rows",
            is_kept=is_kept,
        )

        sizes = counts.device_tokens_per_expert, counts.tokens_per_expert
        index, slot_weights = self._index(layout.ids(received), layout.scalars(received), *sizes)
        exchange_plan = CollectiveExchangePlan(
            num_tokens=call.topk_ids.shape[0],
            num_rows=received.shape[0],
            index=index,
            send_splits=send_splits,
            recv_splits=counts.rows_from_rank,
            returned_splits=(counts.rows_from_rank, send_splits),
            sends=sends,
            table=self._mover.table,
            returned_table=self._mover.table,
            views_epoch=None if is_kept else self._mover.epoch,
            call=batch,
        )
        if self._groups is not None:
            exchange_plan = self._with_groups(exchange_plan, sending, received, counts)
        out = Dispatched(
            rows=layout.wire_tensor(received),
            index=index,
            slot_weights=slot_weights,
            exchange_plan=exchange_plan,
            any_flags=counts.any_flags,
        )
        return self._with_topk(out, received)

    def _with_groups(
        self, exchange_plan: CollectiveExchangePlan, sends: SendPlan, rows: Tensor, counts: Counts
    ) -> CollectiveExchangePlan:
        """Return the plan with the rows that combine returns for the received rows."""
        groups, call = sends.groups, sends.call
        assert groups is not None, "the buffer has groups"
        table, slots = None, exchange_plan.index.slots_of_row
        if slots is not None:
            ids = self._dispatch_layout.ids(rows)
            columns = groups.columns(localize(ids, self._first_expert, groups.num_local))
            numbers = number_pairs(mark_pairs(columns, groups.num_columns))
            table = pair_table(slots, columns, numbers, sum(counts.pairs_from_rank))
        addends = sends.returned_rows()
        return replace(
            exchange_plan,
            group_sums=GroupSums(
                table=table, source=groups.source(addends, call.topk_groups, call.topk_weights)
            ),
            returned_splits=(counts.pairs_from_rank, counts.pairs_to_rank),
            returned_table=self._mover.pair_table,
            addends=addends,
        )

    def _with_topk(self, out: Dispatched, received: Tensor) -> Dispatched:
        """Return `out`; a subclass without an index adds the experts and weights of each row."""
        return out

    def _send_plan(self, call: DispatchCall) -> SendPlan:
        kind = SendPlan
        if self._row_ops is not None:
            kind = partial(KernelSendPlan, ops=self._row_ops, memory=self._packed)
        return kind(
            call=call,
            layout=self._dispatch_layout,
            num_local=self._spec.num_local_experts,
            groups=self._groups,
        )

    def cached_dispatch(self, hidden_states: Tensor, exchange_plan: ExchangePlan) -> Tensor:
        assert isinstance(exchange_plan, CollectiveExchangePlan), "an exchange plan of this buffer"
        self._mover.check_open()
        rows = self._packed_dy(hidden_states)
        self._announce(CallKind.COMBINE_BACKWARD, exchange_plan.call, rows=rows)
        self._traffic.dispatch(exchange_plan.send_splits, row_bytes_of(rows))
        received = self._mover.send_rows(
            partial(exchange_plan.sends.copy_tokens, rows),
            exchange_plan.table,
            (exchange_plan.send_splits, exchange_plan.recv_splits),
            (rows.shape[1], rows.dtype),
            phase="backward of combine",
            is_kept=self._quantized_dy is None,
        )
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
        self._mover.check_open()
        if error is not None:
            self._announce(CallKind.COMBINE, ANY_BATCH, error=error)
            return rows, None
        assert isinstance(exchange_plan, CollectiveExchangePlan), "an exchange plan of this buffer"
        returned, scalars = self.return_rows(
            rows,
            exchange_plan,
            rows_per=rows_per,
            slot_weights=slot_weights,
            row_scalars=row_scalars,
        )
        if scalars is not None:
            scalars = reduce_rows(scalars.contiguous(), exchange_plan.returned_of_token)
        has_weights = slot_weights is not None
        return exchange_plan.total(returned, rows.dtype, bias, has_weights=has_weights), scalars

    def return_rows(
        self,
        rows: Tensor,
        exchange_plan: CollectiveExchangePlan,
        *,
        rows_per: RowsPer,
        slot_weights: Tensor | None,
        row_scalars: Tensor | None,
    ) -> tuple[Tensor, Tensor | None]:
        """Do the exchange of combine(); return the rows and scalars from all ranks, by rank.

        Rows without scalars are sent in BufferSpec.combine_format, rows with scalars in
        backward_format, and then returned in float32.
        """
        if (overwritten := self._mover.find_overwritten(exchange_plan)) is not None:
            # Announce the error, because ranks in grad mode own their rows and do not have it.
            self._announce(CallKind.COMBINE, exchange_plan.call, error=overwritten)
        make = exchange_plan.returned(rows, rows_per, slot_weights)
        kind, scalars = CallKind.COMBINE, row_scalars
        if row_scalars is not None:
            kind = CallKind.DISPATCH_BACKWARD
        if row_scalars is not None and rows_per is RowsPer.SLOT:
            scalars = exchange_plan.returned_scalars(row_scalars)
        quantized = self._quantized if scalars is None else self._quantized_dx
        if quantized is not None:
            returned = self._send_sums(
                lambda part: quantized.pack(make(part), None if scalars is None else scalars[part]),
                exchange_plan,
                (quantized.row_bytes, torch.uint8),
                kind,
            )
            found = None if scalars is None else quantized.scalars(returned)
            return quantized.restore(returned), found
        if scalars is None:
            return self._send_sums(make, exchange_plan, (rows.shape[1], rows.dtype), kind), None
        layout = self._scalar_layout(rows.dtype)

        def packed(part: slice) -> Tensor:
            return layout.pack_rows(make(part), scalars[part])

        shape = (layout.row_bytes, torch.uint8)
        returned = self._send_sums(packed, exchange_plan, shape, kind)
        return layout.data(returned), layout.scalars(returned)

    def _send_sums(
        self, make: MakeRows, exchange_plan: CollectiveExchangePlan, shape: RowShape, kind: CallKind
    ) -> Tensor:
        """Return the sums of received rows to their source ranks; see RowMover.write_sums().

        kind: the kind of the call, which is announced between computation and exchange.
        """
        exchange = self._mover.write_sums(make, exchange_plan, shape)
        self._announce(kind, exchange_plan.call)
        self._traffic.combine(exchange_plan.returned_splits[0], shape[0] * shape[1].itemsize)
        return exchange(kind.text)

    def close(self) -> None:
        self._mover.close()
        self._packed.free()


class CollectiveBuffer(RowsBuffer):
    """Serves normal mode over `Collectives`."""

    name: ClassVar[str] = "collective"
    modes: ClassVar[frozenset[Mode]] = frozenset({Mode.NORMAL})

    @classmethod
    def caps(cls, mode: Mode) -> BufferCaps:
        return COLLECTIVE_CAPS

    def __init__(self, calls: Calls, spec: BufferSpec) -> None:
        super().__init__(calls, spec, RowMover(calls.collectives, waits=calls.waits))
