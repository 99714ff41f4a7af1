"""Faults of buffers that show in what is called and when, or on some numbers of ranks alone."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from epcomm.buffers.base import Combined, Dispatched
from epcomm.buffers.collective.all_to_all import CollectiveBuffer, CollectiveExchangePlan
from epcomm.buffers.collective.all_to_all_static import StaticCollectiveBuffer
from epcomm.buffers.nvlink.normal import NVLinkBuffer
from epcomm.calls.call import DispatchCall
from epcomm.calls.order import Calls
from epcomm.errors import EPError
from epcomm.ops.members import Members, MemberTable
from epcomm.ops.slots import members_of, slots_by_row
from epcomm.records import ExchangePlan
from epcomm.spec import BufferSpec
from tests.mutants.base import Mutant


class CombinesTheLastBatch(CollectiveBuffer):
    """Combine goes the way of the last dispatch, whatever batch it is given."""

    _last: ExchangePlan

    def dispatch(self, call: DispatchCall) -> Dispatched:
        out = super().dispatch(call)
        self._last = out.exchange_plan
        return out

    def combine(self, rows: Tensor, exchange_plan: ExchangePlan, **options: Any) -> Combined:
        is_forward = options.get("row_scalars") is None
        return super().combine(rows, self._last if is_forward else exchange_plan, **options)


class SumsInTurns(CollectiveBuffer):
    """Every other combine adds the rows of a token up from the last rank to the first."""

    _is_turned = True

    def combine(self, rows: Tensor, exchange_plan: ExchangePlan, **options: Any) -> Combined:
        assert isinstance(exchange_plan, CollectiveExchangePlan)
        self._is_turned = not self._is_turned
        if not self._is_turned:
            return super().combine(rows, exchange_plan, **options)
        members = exchange_plan.sends.rows_of_token
        if isinstance(members, MemberTable):
            members = members_of(members.table, sum(exchange_plan.send_splits))
        ends = pairwise(members.offsets.tolist())
        parts = [members.flat[begin:end].flip(0) for begin, end in ends]
        flat = torch.cat([*parts, members.flat[:0]])
        sends = replace(
            exchange_plan.sends, rows_of_token=Members(flat=flat, offsets=members.offsets)
        )
        return super().combine(rows, replace(exchange_plan, sends=sends), **options)


class BadCallIsKeptQuiet(CollectiveBuffer):
    """A rank that refuses its call sends the others a good one."""

    def dispatch(self, call: DispatchCall) -> Dispatched:
        out = super().dispatch(replace(call, error=None))
        if call.error is not None:
            raise call.error
        return out


class AsManyInFlightAsUsual(NVLinkBuffer):
    """The number of batches in flight that the caller asks for is not heard."""

    def __init__(self, calls: Calls, spec: BufferSpec) -> None:
        super().__init__(calls, replace(spec, batches_in_flight=None))


class NegativeIdsAreHoles(CollectiveBuffer):
    """Every negative id is taken for none."""

    def dispatch(self, call: DispatchCall) -> Dispatched:
        return super().dispatch(replace(call, topk_ids=call.topk_ids.clamp(min=-1)))


class BudgetOfOneMore(StaticCollectiveBuffer):
    """There is place for one slot more than the budget says."""

    def __init__(self, calls: Calls, spec: BufferSpec) -> None:
        budget = spec.max_recv_slots
        super().__init__(
            calls, replace(spec, max_recv_slots=None if budget is None else budget + 1)
        )


class FaultIsToldForEver(StaticCollectiveBuffer):
    """What waits on the device is told again and again."""

    _told: EPError | None = None

    def check(self) -> None:
        if self._told is not None:
            raise self._told
        try:
            super().check()
        except EPError as error:
            self._told = error
            raise


class RefusedCombineIsZero(StaticCollectiveBuffer):
    """The y of a combine that another rank refused is zero."""

    def combine(self, rows: Tensor, exchange_plan: ExchangePlan, **options: Any) -> Combined:
        home = super().combine(rows, exchange_plan, **options)
        return replace(home, y=home.y.nan_to_num(0)) if home.y.isnan().all() else home


class SourcesBackwards(CollectiveBuffer):
    """Each expert's slots come by source in the order 0, W - 1, ..., 1."""

    def dispatch(self, call: DispatchCall) -> Dispatched:
        out = super().dispatch(call)
        old, exchange_plan = out.index, out.exchange_plan
        assert isinstance(exchange_plan, CollectiveExchangePlan)
        assert old.row_of_slot is not None
        assert old.slots_of_row is not None
        assert old.host_num_tokens_per_expert is not None
        if not old.is_dense:
            return out
        world_size = self._collectives.world_size
        source = torch.arange(world_size).repeat_interleave(torch.tensor(exchange_plan.recv_splits))
        source_of_slot = (-source[old.row_of_slot.long()]) % world_size
        order = torch.arange(len(source_of_slot))
        for expert, count in enumerate(old.host_num_tokens_per_expert):
            first = int(old.first_slot[expert])
            mine = slice(first, first + count)
            order[mine] = order[mine][torch.sort(source_of_slot[mine], stable=True).indices]
        place = torch.empty_like(order)
        place[order] = torch.arange(len(order))
        slots_of_row = torch.where(
            old.slots_of_row < 0, -1, _at(place, old.slots_of_row.clamp(min=0))
        )
        index = replace(
            old, row_of_slot=old.row_of_slot[order], slots_of_row=slots_of_row.to(torch.int32)
        )
        assert out.slot_weights is not None
        return replace(
            out,
            index=index,
            slot_weights=out.slot_weights[order],
            exchange_plan=replace(exchange_plan, index=index, slots_by_row=slots_by_row(index)),
        )


def _at(values: Tensor, places: Tensor) -> Tensor:
    return values[places.long()] if len(values) else torch.zeros_like(places)


MUTANTS = [
    Mutant(broken=CombinesTheLastBatch, scenario="stand_alone", tells="Error"),
    Mutant(broken=BadCallIsKeptQuiet, scenario="faults", tells="got None"),
    Mutant(
        broken=AsManyInFlightAsUsual,
        scenario="more_in_flight",
        tells="slot 0",
        dtype=torch.bfloat16,
    ),
    Mutant(broken=NegativeIdsAreHoles, scenario="ids_out_of_range", tells="got None"),
    Mutant(broken=BudgetOfOneMore, scenario="budget", tells="is not NaN everywhere"),
    Mutant(broken=FaultIsToldForEver, scenario="faults", tells="a fault was told twice"),
    Mutant(broken=RefusedCombineIsZero, scenario="combine_faults", tells="is not NaN"),
    Mutant(broken=SourcesBackwards, scenario="uneven", world=3, tells="slot"),
    Mutant(broken=SumsInTurns, scenario="stand_alone", world=3, tells="gave other sums"),
]
