"""The suites fail when a buffer breaks its contract in one way, and say where."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from epcomm import EPConfig, EPGroup, Mode
from epcomm.buffers.base import Combined, Dispatched
from epcomm.buffers.collective import all_to_all
from epcomm.buffers.collective.all_to_all import CollectiveBuffer, CollectiveExchangePlan
from epcomm.buffers.traffic import TrafficMeter
from epcomm.calls.call import DispatchCall
from epcomm.calls.order import Calls
from epcomm.ops.members import Members, MemberTable
from epcomm.ops.slots import members_of, slots_by_row
from epcomm.records import ExchangePlan
from epcomm.spec import BufferSpec
from epcomm.testing import buffer_suite, layer_suite
from epcomm.types import RowsPer

NUM_RANKS = 2
# A fault that only one rank notices would leave the other one waiting so long.
PATIENCE = timedelta(seconds=20)


class Unchanged(CollectiveBuffer):
    """Shows that injection alone fails nothing."""


class OtherSlotOrder(CollectiveBuffer):
    """Each expert's slots backwards; index, weights and exchange plan agree with one another."""

    def dispatch(self, call: DispatchCall) -> Dispatched:
        out = super().dispatch(call)
        old, exchange_plan = out.index, out.exchange_plan
        assert isinstance(exchange_plan, CollectiveExchangePlan)
        assert old.row_of_slot is not None
        assert old.slots_of_row is not None
        assert old.host_num_tokens_per_expert is not None
        order = torch.arange(old.row_of_slot.shape[0], device=old.row_of_slot.device)
        for expert, count in enumerate(old.host_num_tokens_per_expert):
            first = int(old.first_slot[expert])
            order[first : first + count] = order[first : first + count].flip(0)
        slots_of_row = torch.where(
            old.slots_of_row < 0, -1, order[old.slots_of_row.clamp(min=0).long()]
        )
        index = replace(
            old, row_of_slot=old.row_of_slot[order], slots_of_row=slots_of_row.to(torch.int32)
        )
        return replace(
            out,
            index=index,
            slot_weights=None if out.slot_weights is None else out.slot_weights[order],
            exchange_plan=replace(exchange_plan, index=index, slots_by_row=slots_by_row(index)),
        )


class WeightsOfOtherSlots(CollectiveBuffer):
    """The weights stay where they were when the slots were sorted."""

    def dispatch(self, call: DispatchCall) -> Dispatched:
        out = super().dispatch(call)
        assert out.slot_weights is not None
        return replace(out, slot_weights=out.slot_weights.flip(0))


class HostCountsOfOtherExperts(CollectiveBuffer):
    """The copy of the counts on the host is not that of the device."""

    def dispatch(self, call: DispatchCall) -> Dispatched:
        out = super().dispatch(call)
        counts = out.index.host_num_tokens_per_expert
        assert counts is not None
        return replace(out, index=replace(out.index, host_num_tokens_per_expert=counts[::-1]))


class CombineAddsTwice(CollectiveBuffer):
    """The first row that comes back is added twice."""

    def combine(
        self,
        rows: Tensor,
        exchange_plan: ExchangePlan,
        *,
        rows_per: RowsPer,
        slot_weights: Tensor | None = None,
        row_scalars: Tensor | None = None,
    ) -> Combined:
        assert isinstance(exchange_plan, CollectiveExchangePlan)
        once = exchange_plan.sends.rows_of_token
        if isinstance(once, MemberTable):
            once = members_of(once.table, sum(exchange_plan.send_splits))
        offsets = once.offsets + 1
        offsets[0] = 0
        twice = Members(flat=torch.cat([once.flat[:1], once.flat]), offsets=offsets)
        return super().combine(
            rows,
            replace(exchange_plan, sends=replace(exchange_plan.sends, rows_of_token=twice)),
            rows_per=rows_per,
            slot_weights=slot_weights,
            row_scalars=row_scalars,
        )


class CombineReadsPadding(CollectiveBuffer):
    """Every row is read, and most are multiplied by zero."""

    def combine(
        self,
        rows: Tensor,
        exchange_plan: ExchangePlan,
        *,
        rows_per: RowsPer,
        slot_weights: Tensor | None = None,
        row_scalars: Tensor | None = None,
    ) -> Combined:
        return super().combine(
            rows + 0 * rows.sum(0),
            exchange_plan,
            rows_per=rows_per,
            slot_weights=slot_weights,
            row_scalars=row_scalars,
        )


class CachedDispatchReturnsOldRows(CollectiveBuffer):
    """The rows of the dispatch come again, whatever is sent."""

    def __init__(self, calls: Calls, spec: BufferSpec) -> None:
        super().__init__(calls, spec)
        self._old_rows: dict[int, Tensor] = {}

    def dispatch(self, call: DispatchCall) -> Dispatched:
        out = super().dispatch(call)
        self._old_rows[id(out.exchange_plan)] = out.rows.data.clone()
        return out

    def cached_dispatch(self, hidden_states: Tensor, exchange_plan: ExchangePlan) -> Tensor:
        super().cached_dispatch(hidden_states, exchange_plan)
        return self._old_rows[id(exchange_plan)]


class ScalarsToOtherK(CollectiveBuffer):
    """The gradient of weight k comes back as that of another k."""

    def combine(
        self,
        rows: Tensor,
        exchange_plan: ExchangePlan,
        *,
        rows_per: RowsPer,
        slot_weights: Tensor | None = None,
        row_scalars: Tensor | None = None,
    ) -> Combined:
        home = super().combine(
            rows,
            exchange_plan,
            rows_per=rows_per,
            slot_weights=slot_weights,
            row_scalars=row_scalars,
        )
        return replace(home, scalars=None if home.scalars is None else home.scalars.flip(1))


class _MeterOfAllRows(TrafficMeter):
    def _add(self, kind: str, rows_to_rank: list[int], row_bytes: int) -> None:  # type: ignore[override]
        self._bytes[kind] += sum(rows_to_rank) * row_bytes


class TrafficCountsLocalRows(CollectiveBuffer):
    """Rows that stay on the rank count as sent."""

    def __init__(self, calls: Calls, spec: BufferSpec) -> None:
        super().__init__(calls, spec)
        self._traffic = _MeterOfAllRows(calls.collectives.rank)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A broken buffer, a scenario, and what the failure tells.

    ranks: those that notice.
    """

    buffer: type[CollectiveBuffer]
    suite: str
    scenario: str
    tells: str
    ranks: tuple[int, ...] = (0, 1)

    @property
    def id(self) -> str:
        return f"{self.buffer.__name__} in {self.suite} suite, {self.scenario}"


CASES = [
    Case(buffer=OtherSlotOrder, suite="buffer", scenario="uneven", tells="slot 0"),
    Case(buffer=OtherSlotOrder, suite="buffer", scenario="aligned", tells="slot "),
    Case(buffer=WeightsOfOtherSlots, suite="buffer", scenario="uneven", tells="weight of slot 0"),
    Case(buffer=WeightsOfOtherSlots, suite="layer", scenario="uneven", tells="y is off by"),
    Case(
        buffer=HostCountsOfOtherExperts,
        suite="buffer",
        scenario="uneven",
        tells="host_num_tokens_per_expert",
    ),
    Case(buffer=CombineAddsTwice, suite="buffer", scenario="uneven", tells="combine with weights"),
    Case(buffer=CombineAddsTwice, suite="layer", scenario="uneven", tells="y is off by"),
    Case(
        buffer=CombineReadsPadding,
        suite="buffer",
        scenario="aligned",
        tells="combine with weights is off by inf",
    ),
    Case(
        buffer=CachedDispatchReturnsOldRows,
        suite="buffer",
        scenario="uneven",
        tells="slot of a cached dispatch 0",
    ),
    Case(
        buffer=CachedDispatchReturnsOldRows, suite="layer", scenario="uneven", tells="dx is off by"
    ),
    Case(buffer=ScalarsToOtherK, suite="buffer", scenario="uneven", tells="scalars"),
    Case(buffer=ScalarsToOtherK, suite="layer", scenario="uneven", tells="dw is off by"),
    Case(buffer=TrafficCountsLocalRows, suite="buffer", scenario="traffic", tells="traffic is"),
]


def run(suite: str, scenario: str, group: EPGroup) -> None:
    if suite == "buffer":
        env = buffer_suite.BufferEnv(group=group, backend="CollectiveBuffer", mode=Mode.NORMAL)
        buffer_suite.run_scenario(scenario, env)
    else:
        env = layer_suite.pipeline_env(group, EPConfig(mode="normal", backend="collective"))
        layer_suite.run_scenario(scenario, env)


@pytest.mark.ranks(NUM_RANKS)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_broken_buffer_fails(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(all_to_all, "CollectiveBuffer", case.buffer)
    failure = ""
    with EPGroup(dist.new_group(timeout=PATIENCE)) as group:
        try:
            run(case.suite, case.scenario, group)
        except AssertionError as error:
            failure = str(error)
    assert bool(failure) == (dist.get_rank() in case.ranks), failure
    assert not failure or case.tells in failure


@pytest.mark.ranks(NUM_RANKS)
@pytest.mark.parametrize(
    ("suite", "scenario"), sorted({(case.suite, case.scenario) for case in CASES})
)
def test_whole_buffer_passes(suite: str, scenario: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(all_to_all, "CollectiveBuffer", Unchanged)
    with EPGroup() as group:
        run(suite, scenario, group)
