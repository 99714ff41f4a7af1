"""The calls of V2 on received rows: checks, exchange, places; tests make them strict."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

import torch
from torch import Tensor

from epcomm.errors import EPError, ShapeError
from epcomm.integrations.deep_ep.events import AsyncCall, EventOverlap
from epcomm.integrations.deep_ep.normal import (
    Rows,
    bias_of,
    refuse_along,
    return_rows,
    send_along,
)
from epcomm.integrations.deep_ep.ranks import Ranks
from epcomm.integrations.deep_ep.v2 import checks
from epcomm.integrations.deep_ep.v2.exchange import Arrived, DispatchRequest, exchange
from epcomm.integrations.deep_ep.v2.handle import EPHandle
from epcomm.integrations.deep_ep.v2.places import Places, place_rows, places_of, zero_padding
from epcomm.types import RowsPer


@dataclass(frozen=True, kw_only=True)
class OutputForm:
    """The form of what dispatch returns.

    do_zero_padding: rows of alignment are zero, else undefined.
    is_sf_col_major: scales of consecutive rows are adjacent.
    """

    do_zero_padding: bool
    is_sf_col_major: bool


@dataclass(frozen=True, kw_only=True, eq=False)
class CombineRequest:
    """One combine; see ElasticBuffer.combine. biases: none to two, [T, H]."""

    x: Tensor
    handle: EPHandle
    topk_weights: Tensor | None
    biases: tuple[Tensor, ...]


@dataclass(frozen=True, kw_only=True, eq=False)
class Dispatched:
    """Holds what ElasticBuffer.dispatch() returns."""

    rows: Rows
    topk_idx: Tensor | None
    topk_weights: Tensor | None
    handle: EPHandle

    def tensors(self) -> list[Tensor | None]:
        """Return the tensors that a caller gets."""
        return [self.rows.x, self.rows.scales, self.topk_idx, self.topk_weights]


class ElasticCalls:
    """Dispatch and combine on the current stream."""

    def __init__(self, ranks: Ranks, *, allow_multiple_reduction: bool) -> None:
        """Keep the ranks.

        allow_multiple_reduction: expanded rows of a token are summed and rounded at their rank
            before the sums travel; else each travels, and they are rounded once.
        """
        self._ranks = ranks
        self._is_reduced_twice = allow_multiple_reduction

    def dispatch(self, request: DispatchRequest, form: OutputForm) -> Dispatched:
        """Send tokens on new routes. Collective: yes."""
        where = self._ranks.where
        error = checks.fault_of(request, self._ranks.size, where)
        top_k = request.topk_idx.shape[-1]
        received, arrived = exchange(
            self._ranks,
            request,
            error,
            num_combines=self._num_combines(top_k, do_expand=request.do_expand),
        )
        counts = arrived.index.num_tokens_per_expert
        if request.recv_stats is not None:
            request.recv_stats.add_(counts)
        places = self.places(arrived, request)
        handle = EPHandle(request, arrived, places, received.num_tokens_per_expert)
        weights = None
        if arrived.topk_weights is not None:
            weights = arrived.slot_weights if request.do_expand else arrived.topk_weights
            weights = places.from_elements(weights)
        return self._hand_out(received.rows, weights, handle, form)

    def dispatch_along(self, rows: Rows, handle: EPHandle, form: OutputForm) -> Dispatched:
        """Send other rows of the same tokens on the routes of a handle. Collective: yes."""
        way = handle.arrived.way
        try:
            checks.check_along(rows, way, self._ranks.where)
        except ShapeError as error:
            refuse_along(way, error)
        received = send_along(way, rows)
        return self._hand_out(received, None, handle, form)

    def combine(self, request: CombineRequest) -> tuple[Tensor, Tensor | None]:
        """Sum the rows of each token, unweighted; return sums and weights. Collective: yes."""
        x, handle, weights = request.x, request.handle, request.topk_weights
        try:
            checks.check_combine(x, handle, weights, request.biases, self._ranks.where)
        except ShapeError as error:
            way = handle.arrived.way
            for _ in range(self._num_combines(way.top_k, do_expand=handle.do_expand)):
                way.buffer.refuse_combine(error)
            if self._reads_faults(handle.arrived):
                # What the others raise here would else wait for the next dispatch.
                with suppress(EPError):
                    way.buffer.check()
            raise
        arrived, elements = handle.arrived, handle.places.to_elements(x)
        bias = bias_of(request.biases)
        if handle.do_expand:
            y = self._sum_slots(elements, arrived, bias)
        else:
            if weights is not None:
                # Only the rank of an expert has a say about its weight.
                weights = handle.places.to_elements(weights)
                weights = weights.masked_fill(arrived.topk_ids < 0, 0.0)
            y, weights = return_rows(arrived.way, elements, weights, bias)
        if self._reads_faults(arrived):
            arrived.way.buffer.check()
        return y, weights

    def places(self, arrived: Arrived, request: DispatchRequest) -> Places:
        """Return where received rows lie in the tensors of the caller."""
        return places_of(arrived, do_expand=request.do_expand)

    def event(
        self, call: AsyncCall, given: Sequence[Tensor | None], made: Sequence[Tensor | None]
    ) -> EventOverlap:
        """Return the event behind a call, which read the tensors given and wrote those made."""
        return call.event([*given, *made])

    def _reads_faults(self, arrived: Arrived) -> bool:
        """Tell whether faults of what arrived are read at once: its sizes are static."""
        return arrived.is_row is not None and self._ranks.reads_faults

    def _hand_out(
        self, received: Rows, weights: Tensor | None, handle: EPHandle, form: OutputForm
    ) -> Dispatched:
        """Put what arrived where the caller looks for it."""
        arrived, places = handle.arrived, handle.places
        rows = place_rows(
            received,
            arrived,
            places,
            do_expand=handle.do_expand,
            is_sf_col_major=form.is_sf_col_major,
        )
        if form.do_zero_padding:
            for tensor in (rows.x, rows.scales, weights):
                zero_padding(tensor, places)
        ids = None if handle.do_expand else places.from_elements(arrived.topk_ids)
        return Dispatched(rows=rows, topk_idx=ids, topk_weights=weights, handle=handle)

    def _num_combines(self, top_k: int, *, do_expand: bool) -> int:
        """Return the combines of epcomm's buffer that one of V2 makes."""
        return top_k if do_expand and not self._is_reduced_twice else 1

    def _sum_slots(self, slots: Tensor, arrived: Arrived, bias: Tensor | None) -> Tensor:
        """Sum results of slots [C, H] by token, onto bias [T, H]."""
        way = arrived.way
        if self._is_reduced_twice:
            return return_rows(way, slots, bias=bias, rows_per=RowsPer.SLOT)[0]
        shape = (way.num_tokens, slots.shape[1])
        total = torch.zeros(shape, device=slots.device) if bias is None else bias
        for slots_of_k in arrived.slots_of_row.unbind(1):
            is_slot = (slots_of_k >= 0).unsqueeze(1)
            rows = slots.new_zeros(way.num_rows, slots.shape[1])
            if slots.shape[0]:
                rows = torch.where(is_slot, slots[slots_of_k.clamp(min=0).long()], rows)
            total = total + return_rows(way, rows)[0].float()
        return total.to(slots.dtype)
