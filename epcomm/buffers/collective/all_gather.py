"""Gather every token on every rank: the buffer of StandardDispatcher.

A dispatch is a small exchange of headers with counts and an all-gather of tokens with their ids and
weights. A combine is an all-to-all of partial sums, which are added in float32 (a reduce-scatter).
Bytes do not depend on the routing; at 8 ranks and top-8 they are 1.5 times the bytes of one copy
per destination, but no rows need to be numbered and sorted.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from epcomm.buffers.base import Buffer, Dispatched
from epcomm.buffers.collective.base import (
    COLLECTIVE_CAPS,
    OverCollectives,
    SignedExchangePlan,
    row_bytes_of,
)
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
from epcomm.calls.counts import Counts, counts_bytes, guard_ids, make_headers
from epcomm.calls.header import ANY_BATCH, CallKind, CallSign
from epcomm.config import Mode
from epcomm.errors import EPError
from epcomm.ops.slots import count_experts
from epcomm.records import ExchangePlan, Steps, to_the_end
from epcomm.spec import BufferCaps, BufferSpec
from epcomm.types import RowsPer, WireTensor


@dataclass(frozen=True, kw_only=True, eq=False)
class GatheredExchangePlan(SignedExchangePlan):
    """The plan of a gathered dispatch: the rows that are tokens.

    tokens_of_rank: [W], T of each rank; all have as many rows as the largest, padding last.
    row_of_token: [sum T], int64, the gathered row of each token, by rank, then token.
    """

    tokens_of_rank: tuple[int, ...]
    row_of_token: Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class Gathered:
    """The tokens of all ranks; padding rows have only ids of -1.

    rows: [W * max T, H].   topk_ids: [W * max T, K], int32.   topk_weights: [W * max T, K],
        float32. All three are views of one message.
    sent_ids: [T, K], the checked ids of this rank's tokens.
    row_of_token: [sum T], int64, the rows of tokens.   batch: the sign of this dispatch.
    counts: the counts from the headers.
    """

    batch: CallSign
    counts: Counts
    sent_ids: Tensor
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

    @classmethod
    def caps(cls, mode: Mode) -> BufferCaps:
        return COLLECTIVE_CAPS

    @classmethod
    def region_bytes(cls, spec: BufferSpec, world_size: int) -> tuple[Region, ...]:
        row, max_tokens = RowBytes.of(spec, world_size), spec.max_tokens_per_rank
        max_rows = None if max_tokens is None else max_tokens * world_size
        columns = spec.returned_columns(world_size)
        return (
            Region(name="headers", max_bytes=2 * world_size * counts_bytes(spec.num_local_experts)),
            rows_region("sent rows", row.dispatch, per_token=1, max_rows=max_tokens),
            rows_region("received rows", row.dispatch, per_token=world_size, max_rows=max_rows),
            # row_of_token, int64.
            rows_region("padding map", 8, per_token=world_size, max_rows=max_rows),
            index_region(spec, rows_per_token=world_size, max_rows=max_rows),
            *slot_regions(spec, row_bytes=row.dispatch, max_rows=max_rows),
            *sum_regions(spec, world_size, sent=max_rows, returned=max_rows, columns=columns),
        )

    @classmethod
    def wire_bytes(
        cls, spec: BufferSpec, call: CallShape, *, backward: bool = False
    ) -> BufferTraffic:
        row, tokens = RowBytes.of(spec, call.world_size, backward=backward), call.tokens_of_rank
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
        return to_the_end(self.dispatch_steps(call))

    def dispatch_steps(self, call: DispatchCall) -> Steps[Dispatched]:
        gathered = yield from self._gather_call(call)
        counts = gathered.counts
        sizes = counts.device_tokens_per_expert, counts.tokens_per_expert
        index, slot_weights = self._index(gathered.topk_ids, gathered.topk_weights, *sizes)
        return Dispatched(
            rows=gathered.rows,
            index=index,
            slot_weights=slot_weights,
            exchange_plan=GatheredExchangePlan(
                num_tokens=call.topk_ids.shape[0],
                num_rows=gathered.topk_ids.shape[0],
                index=index,
                call=gathered.batch,
                group_sums=self._group_sums(call, gathered.sent_ids, gathered.topk_ids, index),
                tokens_of_rank=counts.rows_from_rank,
                row_of_token=gathered.row_of_token,
            ),
            any_flags=counts.any_flags,
        )

    def _gather_call(self, call: DispatchCall) -> Steps[Gathered]:
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
        counts = yield from self._exchange_counts(call, headers, rows_have_slots=False)
        max_tokens = max(counts.rows_from_rank)
        received = self._gather(message, max_tokens, phase="dispatch rows")
        tokens = [
            torch.arange(rank * max_tokens, rank * max_tokens + num, device=received.device)
            for rank, num in enumerate(counts.rows_from_rank)
        ]
        return Gathered(
            batch=batch,
            counts=counts,
            sent_ids=topk_ids,
            rows=layout.wire_tensor(received),
            topk_ids=layout.ids(received),
            topk_weights=layout.scalars(received),
            row_of_token=torch.cat(tokens),
        )

    def cached_dispatch(self, hidden_states: Tensor, exchange_plan: ExchangePlan) -> Tensor:
        assert isinstance(exchange_plan, GatheredExchangePlan), "an exchange plan of this buffer"
        kind, max_tokens = CallKind.COMBINE_BACKWARD, max(exchange_plan.tokens_of_rank)
        rows = self._packed_dy(hidden_states)
        self._announce(kind, exchange_plan.call)
        received = self._gather(rows, max_tokens, phase=kind.text)
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
    ) -> tuple[Tensor, Tensor | None]:
        if error is not None:
            self._announce(CallKind.COMBINE, ANY_BATCH, error=error)
            return rows, None
        assert isinstance(exchange_plan, GatheredExchangePlan), "an exchange plan of this buffer"
        returned, scalars = self._exchange_sums(
            exchange_plan.sums(rows, rows_per, slot_weights),
            row_scalars,
            lambda sums, kind: self._send_sums(sums, exchange_plan, kind),
        )
        has_weights = slot_weights is not None
        return exchange_plan.total(returned, rows.dtype, has_weights=has_weights), scalars

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

    def _send_sums(
        self, rows: Tensor, exchange_plan: GatheredExchangePlan, kind: CallKind
    ) -> Tensor:
        """Exchange partial sums [W * max T, ...]; return those of this rank's tokens, [W, T, ...].

        kind: the kind of the call, which is announced before the exchange.
        """
        tokens_of_rank, world_size = exchange_plan.tokens_of_rank, self._world_size
        if rows.shape[0] != sum(tokens_of_rank):
            # Leave out the padding.
            rows = torch.index_select(rows, 0, exchange_plan.row_of_token)
        rows = rows.contiguous()
        self._announce(kind, exchange_plan.call)
        self._traffic.combine(tokens_of_rank, row_bytes_of(rows))
        return self._collectives.all_to_all(
            rows,
            send_splits=tokens_of_rank,
            recv_splits=[exchange_plan.num_tokens] * world_size,
            phase=kind.text,
        ).view(world_size, exchange_plan.num_tokens, rows.shape[1])
