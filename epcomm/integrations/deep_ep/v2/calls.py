"""The calls of V2 on received rows: checks, exchange, places; tests make them strict."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

import torch
from torch import Tensor

from epcomm.config import Mode
from epcomm.errors import EPError
from epcomm.integrations.deep_ep.events import AsyncCall, EventOverlap
from epcomm.integrations.deep_ep.normal import (
    Rows,
    bias_of,
    detached,
    refuse_along,
    return_rows,
    send_along,
)
from epcomm.integrations.deep_ep.ranks import Ranks
from epcomm.integrations.deep_ep.v2 import checks
from epcomm.integrations.deep_ep.v2.exchange import (
    Arrived,
    DispatchRequest,
    exchange,
    send_weights,
)
from epcomm.integrations.deep_ep.v2.handle import EPHandle
from epcomm.integrations.deep_ep.v2.places import Places, place_rows, places_of, zero_padding
from epcomm.ops.members import AnyMembers, MemberTable
from epcomm.ops.select import row_ops_for
from epcomm.ops.slots import gather_scalars, members_of, reduce_rows, spread_to_slots
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
        error = checks.fault_of(request, self._ranks)
        if error is not None:
            self._ranks.refuse_on_hosts(Mode.NORMAL, error, is_static=not request.do_cpu_sync)
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
        return self._hand_out(
            received.rows, weights, handle, form, places, do_expand=request.do_expand
        )

    def dispatch_along(
        self,
        rows: Rows,
        topk_weights: Tensor | None,
        handle: EPHandle,
        form: OutputForm,
        *,
        do_expand: bool,
    ) -> Dispatched:
        """Send other rows, and weights [T, K], of the same tokens on the routes of a handle.

        do_expand: the rows are returned by expert, which needs a handle of such a dispatch.

        Collective: yes; with weights or without them on all ranks.
        """
        arrived, places = handle.arrived, handle.places
        x, has_weights = rows.x, topk_weights is not None
        self._ranks.go_along("dispatch along a handle", x, has_weights=has_weights)
        weights = None if topk_weights is None else send_weights(arrived.way, topk_weights)
        received = send_along(arrived.way, rows)
        if handle.do_expand and not do_expand:
            places = places_of(arrived, do_expand=False)
        if weights is not None:
            if do_expand:
                weights = spread_to_slots(weights, arrived.index)
            weights = places.from_elements(weights)
        return self._hand_out(received, weights, handle, form, places, do_expand=do_expand)

    def refuse_along(self, handle: EPHandle, topk_weights: object, error: EPError) -> NoReturn:
        """Take part in dispatch_along() of the other ranks, so that they learn of `error`.

        Over NVLink no host reads what others say: they receive NaN from this rank.

        Collective: in place of dispatch_along().
        Raises:
            error: always.
        """
        way = handle.arrived.way
        if not way.buffer.needs_nvlink:
            self._ranks.refuse_combine(Mode.NORMAL, error)
        if topk_weights is not None:
            shape = (way.num_tokens, way.spec.top_k)
            send_weights(way, torch.full(shape, torch.nan, dtype=torch.float32, device=way.device))
        refuse_along(way, error)

    def refuse_combine(self, handle: EPHandle, error: EPError) -> NoReturn:
        """Take part in combine() of the other ranks, so that they learn of `error`.

        Over NVLink no host reads what others say: their sums are NaN.

        Collective: in place of combine().
        Raises:
            error: always.
        """
        way = handle.arrived.way
        if not way.buffer.needs_nvlink:
            self._ranks.refuse_combine(Mode.NORMAL, error)
        for _ in range(self._num_combines(way.spec.top_k, do_expand=handle.do_expand)):
            way.buffer.refuse_combine(error)
        raise error

    def combine(self, request: CombineRequest) -> tuple[Tensor, Tensor | None]:
        """Sum the rows of each token, unweighted; return sums and weights. Collective: yes."""
        x, handle, weights = request.x, request.handle, request.topk_weights
        arrived, bias = handle.arrived, bias_of(request.biases)
        self._ranks.go_along("combine", x, has_weights=weights is not None)
        if handle.do_expand:
            y, weights = self._sum_slots(x, weights, handle, bias)
        else:
            elements = handle.places.to_elements(x)
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
        self,
        received: Rows,
        weights: Tensor | None,
        handle: EPHandle,
        form: OutputForm,
        places: Places,
        *,
        do_expand: bool,
    ) -> Dispatched:
        """Put what arrived where the caller looks for it."""
        arrived = handle.arrived
        rows = place_rows(
            received,
            arrived,
            places,
            do_expand=do_expand,
            is_sf_col_major=form.is_sf_col_major,
        )
        if form.do_zero_padding:
            for tensor in (rows.x, rows.scales, weights):
                zero_padding(tensor, places)
        ids = None if do_expand else places.from_elements(arrived.topk_ids)
        return Dispatched(rows=rows, topk_idx=ids, topk_weights=weights, handle=handle)

    def _num_combines(self, top_k: int, *, do_expand: bool) -> int:
        """Return the combines of epcomm's buffer that one of V2 makes."""
        return top_k if do_expand and not self._is_reduced_twice else 1

    def _sum_slots(
        self, x: Tensor, weights: Tensor | None, handle: EPHandle, bias: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Sum expanded rows x [N, H] by token, onto bias [T, H]; return weights [N] as [T, K]."""
        arrived, way, named = handle.arrived, handle.arrived.way, handle.named_slots()
        if named is None:
            slots_of_row = arrived.slots_of_row
            x = handle.places.to_elements(x)
            weights = None if weights is None else handle.places.to_elements(weights)
        else:
            slots_of_row = torch.where(named < x.shape[0], named, -1)
        scalars = None
        if weights is not None:
            # Only the rank of an expert has a say about its weight.
            own_slots = torch.where(arrived.topk_ids < 0, -1, slots_of_row)
            scalars = gather_scalars(detached(weights), own_slots)
        if self._is_reduced_twice and named is None:
            return return_rows(way, x, scalars, bias, rows_per=RowsPer.SLOT)
        if self._is_reduced_twice:
            rows = reduce_rows(detached(x), _members_of(slots_of_row))
            return return_rows(way, _without_unknown(rows, named, x), scalars, bias)
        shape = (way.num_tokens, x.shape[1])
        total = torch.zeros(shape, dtype=torch.float32, device=x.device) if bias is None else bias
        sums = None
        for slots_of_k in slots_of_row.unbind(1):
            is_slot = (slots_of_k >= 0).unsqueeze(1)
            rows = x.new_zeros(way.num_rows, x.shape[1])
            if x.shape[0]:
                rows = torch.where(is_slot, x[slots_of_k.clamp(min=0).long()], rows)
            y, returned = return_rows(way, _without_unknown(rows, named, x), scalars)
            total, sums, scalars = total + y.float(), sums if scalars is None else returned, None
        return total.to(x.dtype), sums


def _members_of(table: Tensor) -> AnyMembers:
    """Return the rows that each line of a table [R, K] names. Host sync: on CPUs."""
    if row_ops_for(table) is not None:
        return MemberTable(table=table.contiguous())
    return members_of(table, int((table >= 0).sum()))


def _without_unknown(rows: Tensor, named: Tensor | None, x: Tensor) -> Tensor:
    """Return rows [R, H], with NaN where a program named rows that x does not have."""
    if named is None:
        return rows
    return rows.masked_fill((named >= x.shape[0]).any(1, keepdim=True), float("nan"))
