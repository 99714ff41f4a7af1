"""Gather every token on every rank: the buffer of StandardDispatcher.

A dispatch is a small exchange of headers with counts and an all-gather of tokens with their ids and
weights. A combine is an all-to-all of partial sums, which are added in float32 (a reduce-scatter).
Bytes do not depend on the routing; at 8 ranks and top-8 they are 1.5 times the bytes of one copy
per destination, but no rows need to be numbered and sorted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from epcomm.buffers.base import Buffer, Dispatched
from epcomm.buffers.collective.base import COLLECTIVE_CAPS, OverCollectives, row_bytes_of
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
from epcomm.calls.counts import Counts, counts_bytes, guard_ids, make_headers
from epcomm.calls.header import ANY_BATCH, CallKind, CallSign
from epcomm.config import Mode
from epcomm.errors import EPError
from epcomm.ops.slots import (
    AnyMembers,
    count_experts,
    index_slots,
    reduce_rows,
    slots_by_row,
    sum_parts,
)
from epcomm.records import ExchangePlan, SlotIndex
from epcomm.spec import BufferCaps, BufferSpec
from epcomm.types import RowsPer, WireTensor


@dataclass(frozen=True, kw_only=True, eq=False)
class GatheredExchangePlan(ExchangePlan):
    """The plan of a gathered dispatch: the rows that are tokens.

    tokens_of_rank: [W], T of each rank.
    max_tokens: gathered rows per rank, padding last.
    row_of_token: [sum T], int64, the gathered row of each token, by rank, then token.
    call: the sign of the dispatch.
    """

    num_tokens: int
    num_rows: int
    index: SlotIndex
    tokens_of_rank: tuple[int, ...]
    max_tokens: int
    row_of_token: Tensor
    call: CallSign


@dataclass(frozen=True, kw_only=True, eq=False)
class AllGatherExchangePlan(GatheredExchangePlan):
    """The plan of a gathered dispatch, with the slots of each row.

    slots_by_row: the slots of each gathered row, in k order.
    has_no_slot: [R], bool, rows without an expert on this rank.
    """

    slots_by_row: AnyMembers
    has_no_slot: Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class Gathered:
    """The tokens of all ranks; padding rows have only ids of -1.

    rows: [W * max T, H].   topk_ids: [W * max T, K], int32.   topk_weights: [W * max T, K],
        float32. All three are views of one message.
    row_of_token: [sum T], int64, the rows of tokens.   batch: the sign of this dispatch.
    counts: the counts from the headers.
    """

    batch: CallSign
    counts: Counts
    rows: WireTensor
    topk_ids: Tensor
    topk_weights: Tensor
    row_of_token: Tensor


class AllGatherBuffer(OverCollectives, Buffer):
    """Serves standard mode over `Collectives`: gather all, compute locally, reduce-scatter."""

    name: ClassVar[str] = "collective"
    modes: ClassVar[frozenset[Mode]] = frozenset({Mode.STANDARD})
    # Every dispatch has a header, because it has the counts.
    counts_calls = True
    _rows_have_slots: ClassVar[bool] = False

    @classmethod
    def caps(cls, mode: Mode) -> BufferCaps:
        return COLLECTIVE_CAPS

    @classmethod
    def region_bytes(cls, spec: BufferSpec, world_size: int) -> tuple[Region, ...]:
        row, max_tokens = RowBytes.of(spec), spec.max_tokens_per_rank
        max_rows = None if max_tokens is None else max_tokens * world_size
        return (
            Region(name="headers", max_bytes=2 * world_size * counts_bytes(spec.num_local_experts)),
            rows_region("sent rows", row.dispatch, per_token=1, max_rows=max_tokens),
            rows_region("received rows", row.dispatch, per_token=world_size, max_rows=max_rows),
            # row_of_token, int64, and has_no_slot, bool.
            rows_region("padding map", 8 + 1, per_token=world_size, max_rows=max_rows),
            index_region(spec, rows_per_token=world_size, max_rows=max_rows),
            *slot_regions(spec, row_bytes=row.dispatch, max_rows=max_rows),
            rows_region("partial sums", row.combine, per_token=world_size, max_rows=max_rows),
            rows_region("returned rows", row.combine, per_token=world_size, max_rows=max_rows),
        )

    @classmethod
    def wire_bytes(
        cls, spec: BufferSpec, call: CallShape, *, backward: bool = False
    ) -> BufferTraffic:
        row, tokens = RowBytes.of(spec, backward=backward), call.tokens_of_rank
        header_bytes = 0 if backward else counts_bytes(spec.num_local_experts)
        num_others, elsewhere = call.world_size - 1, spec.ranks_elsewhere(call.rank)
        num_summed = sum(tokens[other] for other in elsewhere)
        return BufferTraffic(
            dispatch_bytes=num_others * max(tokens) * row.dispatch,
            combine_bytes=(sum(tokens) - tokens[call.rank]) * row.combine,
            control_bytes=num_others * header_bytes,
            bytes_between=len(elsewhere) * max(tokens) * row.dispatch + num_summed * row.combine,
        )

    def dispatch(self, call: DispatchCall) -> Dispatched:
        gathered = self._gather_call(call)
        counts, row_of_token = gathered.counts, gathered.row_of_token
        index, slot_weights = index_slots(
            gathered.topk_ids,
            gathered.topk_weights,
            counts.device_tokens_per_expert,
            counts.tokens_per_expert,
            first_expert=self._first_expert,
            expert_alignment=self._spec.expert_alignment,
        )
        assert index.slots_of_row is not None, "an index over rows"
        exchange_plan = AllGatherExchangePlan(
            num_tokens=call.topk_ids.shape[0],
            num_rows=gathered.topk_ids.shape[0],
            index=index,
            tokens_of_rank=counts.rows_from_rank,
            max_tokens=max(counts.rows_from_rank),
            row_of_token=row_of_token,
            call=gathered.batch,
            slots_by_row=slots_by_row(index),
            has_no_slot=(index.slots_of_row < 0).all(dim=1),
        )
        return Dispatched(
            rows=gathered.rows,
            index=index,
            slot_weights=slot_weights,
            exchange_plan=exchange_plan,
            any_flags=counts.any_flags,
        )

    def _gather_call(self, call: DispatchCall) -> Gathered:
        topk_ids, fault = guard_ids(call.topk_ids, self._num_experts, call.error)
        batch, slots = self._new_batch(call), count_experts(topk_ids, self._num_experts)
        num_tokens = torch.tensor(topk_ids.shape[0], device="cpu")
        layout = self._dispatch_layout
        message = torch.empty(
            topk_ids.shape[0], layout.row_bytes, dtype=torch.uint8, device=topk_ids.device
        )
        # Pack before the header is sent, so that the header can report a failure of packing.
        layout.write_tokens(message, call, topk_ids)
        headers = make_headers(
            self._calls, batch, call.flags, (fault, num_tokens, slots), has_rest=self._has_rest
        )
        counts = self._exchange_counts(call, headers)
        max_tokens = max(counts.rows_from_rank)
        received = self._gather(message, max_tokens, phase="dispatch rows")
        return Gathered(
            batch=batch,
            counts=counts,
            rows=layout.wire_tensor(received),
            topk_ids=layout.ids(received),
            topk_weights=layout.scalars(received),
            row_of_token=_rows_of_tokens(counts.rows_from_rank, max_tokens, topk_ids.device),
        )

    def cached_dispatch(self, hidden_states: Tensor, exchange_plan: ExchangePlan) -> Tensor:
        assert isinstance(exchange_plan, AllGatherExchangePlan), "an exchange plan of this buffer"
        self._announce(CallKind.COMBINE_BACKWARD, exchange_plan.call)
        return self._gather(hidden_states, exchange_plan.max_tokens, phase="backward of combine")

    def combine(
        self,
        rows: Tensor,
        exchange_plan: ExchangePlan | None,
        *,
        rows_per: RowsPer,
        slot_weights: Tensor | None = None,
        row_scalars: Tensor | None = None,
        error: EPError | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        if error is not None:
            self._announce(CallKind.COMBINE, ANY_BATCH, error=error)
            return rows, None
        assert isinstance(exchange_plan, AllGatherExchangePlan), "an exchange plan of this buffer"
        if rows_per is RowsPer.SLOT:
            rows = reduce_rows(rows, exchange_plan.slots_by_row, slot_weights)
        else:
            # Rows without a slot are undefined, but all rows are sent.
            rows = rows.masked_fill(exchange_plan.has_no_slot.unsqueeze(1), 0)
        if row_scalars is None:
            return self._sum_returned(rows, exchange_plan), None
        rows = _tokens_of(rows, exchange_plan)
        layout = self._scalar_layout(rows.dtype)
        packed = layout.pack_rows(rows, row_scalars[exchange_plan.row_of_token])
        self._announce(CallKind.DISPATCH_BACKWARD, exchange_plan.call)
        returned = self._send_sums(packed, exchange_plan, phase="backward of dispatch").flatten(
            0, 1
        )
        shape = (self._world_size, exchange_plan.num_tokens)
        y = sum_parts(layout.data(returned).unflatten(0, shape), rows.dtype)
        return y, sum_parts(layout.scalars(returned).unflatten(0, shape), row_scalars.dtype)

    def _gather(self, rows: Tensor, max_tokens: int, *, phase: str) -> Tensor:
        """Gather [T, ...] of each rank into [W * max_tokens, ...]; bytes of padding are 255."""
        world_size = self._world_size
        if rows.shape[0] < max_tokens:
            padding = rows.new_empty(max_tokens - rows.shape[0], rows.shape[1])
            # In a message, these bytes are ids of -1.
            padding.view(torch.uint8).fill_(255)
            rows = torch.cat([rows, padding])
        self._traffic.dispatch([max_tokens] * world_size, row_bytes_of(rows))
        return self._collectives.all_gather(rows.contiguous(), phase=phase).flatten(0, 1)

    def _sum_returned(self, rows: Tensor, exchange_plan: GatheredExchangePlan) -> Tensor:
        """Exchange partial sums [W * max T, H]; return the totals of this rank's tokens [T, H]."""
        rows = _tokens_of(rows, exchange_plan).contiguous()
        self._announce(CallKind.COMBINE, exchange_plan.call)
        returned = self._send_sums(rows, exchange_plan, phase="combine")
        return sum_parts(returned, rows.dtype)

    def _send_sums(
        self, rows: Tensor, exchange_plan: GatheredExchangePlan, *, phase: str
    ) -> Tensor:
        """Exchange partial sums; return those of all ranks for this rank's tokens, [W, T, ...]."""
        self._traffic.combine(exchange_plan.tokens_of_rank, row_bytes_of(rows))
        world_size = self._world_size
        returned = self._collectives.all_to_all(
            rows,
            send_splits=exchange_plan.tokens_of_rank,
            recv_splits=[exchange_plan.num_tokens] * world_size,
            phase=phase,
        )
        return returned.view(world_size, exchange_plan.num_tokens, rows.shape[1])


def _tokens_of(rows: Tensor, exchange_plan: GatheredExchangePlan) -> Tensor:
    """Return gathered rows without padding."""
    num_tokens = sum(exchange_plan.tokens_of_rank)
    return (
        rows
        if rows.shape[0] == num_tokens
        else torch.index_select(rows, 0, exchange_plan.row_of_token)
    )


def _rows_of_tokens(
    tokens_of_rank: tuple[int, ...], max_tokens: int, device: torch.device
) -> Tensor:
    """Return the indices of gathered rows that hold tokens, by rank, then token."""
    return torch.cat(
        [
            torch.arange(rank * max_tokens, rank * max_tokens + num_tokens, device=device)
            for rank, num_tokens in enumerate(tokens_of_rank)
        ]
    )
