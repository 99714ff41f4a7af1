"""The suites fail on each of these mutants: buffers and layers with one small fault.

A mutant changes the arguments or results of its methods, so that it does not depend on the
internals of the buffer.
"""

from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from epcomm import EPConfig, EPError, EPGroup, EPTimeout, ExpertParallelExperts, Mode, TopKOutput
from epcomm.buffers.base import Dispatched
from epcomm.buffers.collective.all_to_all import CollectiveBuffer
from epcomm.buffers.collective.all_to_all_static import StaticCollectiveBuffer
from epcomm.buffers.traffic import BufferTraffic
from epcomm.calls.call import DispatchCall
from epcomm.calls.order import Calls
from epcomm.records import ExchangePlan, Steps
from epcomm.spec import BufferSpec
from epcomm.testing import buffer_suite, layer_suite

# Seconds that a rank waits for one that has failed; on a busy machine opening a buffer takes two.
PATIENCE_S = 4.0
# The result of combine(): y and scalars.
Sums = tuple[Tensor, Tensor | None]


def mutant(
    spoil_call: Callable[[DispatchCall], DispatchCall] = lambda call: call,
    out: Callable[[Dispatched], Dispatched] = lambda out: out,
    spoil_rows: Callable[[Tensor], Tensor] = lambda rows: rows,
    sums: Callable[[Tensor, Tensor | None], Sums] = lambda y, scalars: (y, scalars),
) -> type[CollectiveBuffer]:
    """Return a buffer that changes the call and result of dispatch, or those of combine."""

    class Mutant(CollectiveBuffer):
        def dispatch(self, call: DispatchCall) -> Dispatched:
            return out(super().dispatch(spoil_call(call)))

        def combine(self, rows: Tensor, exchange_plan: ExchangePlan | None, **options: Any) -> Sums:
            return sums(*super().combine(spoil_rows(rows), exchange_plan, **options))

    return Mutant


def zeroed(tensor: Tensor, *where: slice) -> Tensor:
    tensor = tensor.clone()
    tensor[where] = 0
    return tensor


def with_data(out: Dispatched, data: Tensor) -> Dispatched:
    return replace(out, rows=replace(out.rows, data=data))


def with_counts(out: Dispatched, counts: Tensor) -> Dispatched:
    return replace(out, index=replace(out.index, num_tokens_per_expert=counts))


def swap_even_experts(call: DispatchCall) -> DispatchCall:
    ids = call.topk_ids
    return replace(call, topk_ids=torch.where(ids < 0, ids, ids ^ 1))


def copy_whole_fours(out: Dispatched) -> Dispatched:
    data = out.rows.data
    return with_data(out, zeroed(data, slice(None), slice(data.shape[1] // 4 * 4, None)))


def count_one_block(out: Dispatched) -> Dispatched:
    size, counts = out.index.expert_alignment, out.index.num_tokens_per_expert
    return with_counts(out, counts if size == 1 else counts.clamp(max=size))


def give_repeats_the_first_weight(call: DispatchCall) -> DispatchCall:
    weights, ids = call.topk_weights.clone(), call.topk_ids
    for k in range(1, ids.shape[1]):
        is_repeat = (ids[:, k] == ids[:, k - 1]) & (ids[:, k] >= 0)
        weights[:, k] = torch.where(is_repeat, weights[:, k - 1], weights[:, k])
    return replace(call, topk_weights=weights)


class IgnoresWeights(CollectiveBuffer):
    """Sum rows without the weights that combine is given."""

    def combine(self, rows: Tensor, exchange_plan: ExchangePlan | None, **options: Any) -> Sums:
        options["slot_weights"] = None
        return super().combine(rows, exchange_plan, **options)


class TokensBackwards(CollectiveBuffer):
    """Send the last token first, and turn y around."""

    def __init__(self, calls: Calls, spec: BufferSpec) -> None:
        super().__init__(calls, spec)
        self._turned: list[ExchangePlan] = []

    def turns(self) -> bool:
        return True

    def dispatch_steps(self, call: DispatchCall) -> Steps[Dispatched]:
        if not self.turns():
            return (yield from super().dispatch_steps(call))
        out = yield from super().dispatch_steps(
            replace(
                call,
                hidden_states=call.unquantized.flip(0),
                topk_ids=call.topk_ids.flip(0),
                topk_weights=call.topk_weights.flip(0),
            )
        )
        self._turned.append(out.exchange_plan)
        return out

    def combine(self, rows: Tensor, exchange_plan: ExchangePlan | None, **options: Any) -> Sums:
        y, scalars = super().combine(rows, exchange_plan, **options)
        scalars = None if scalars is None else self._in_order(scalars, exchange_plan)
        return self._in_order(y, exchange_plan), scalars

    def cached_dispatch(self, hidden_states: Tensor, exchange_plan: ExchangePlan) -> Tensor:
        return super().cached_dispatch(self._in_order(hidden_states, exchange_plan), exchange_plan)

    def _in_order(self, rows: Tensor, exchange_plan: ExchangePlan | None) -> Tensor:
        return rows.flip(0) if any(exchange_plan is each for each in self._turned) else rows


class SumsDiffer(CollectiveBuffer):
    """Round every other sum differently, as a sum in order of arrival does."""

    _is_odd = False

    def combine(self, rows: Tensor, exchange_plan: ExchangePlan | None, **options: Any) -> Sums:
        y, scalars = super().combine(rows, exchange_plan, **options)
        self._is_odd = not self._is_odd
        return y * (1 + torch.finfo(y.dtype).eps * self._is_odd), scalars


class LeavesYUnwritten(CollectiveBuffer):
    """Leave y unwritten on a rank whose tokens go to no expert."""

    _goes_nowhere = False

    def dispatch(self, call: DispatchCall) -> Dispatched:
        self._goes_nowhere = bool((call.topk_ids < 0).all())
        return super().dispatch(call)

    def combine(self, rows: Tensor, exchange_plan: ExchangePlan | None, **options: Any) -> Sums:
        y, scalars = super().combine(rows, exchange_plan, **options)
        return y * float("nan") if self._goes_nowhere else y, scalars


class CombinesTheLastBatch(CollectiveBuffer):
    """Combine along the last dispatch instead of the given batch."""

    _last: ExchangePlan

    def dispatch(self, call: DispatchCall) -> Dispatched:
        out = super().dispatch(call)
        self._last = out.exchange_plan
        return out

    def combine(self, rows: Tensor, exchange_plan: ExchangePlan | None, **options: Any) -> Sums:
        is_forward = options.get("row_scalars") is None
        return super().combine(rows, self._last if is_forward else exchange_plan, **options)


class CachedRowsAreStale(CollectiveBuffer):
    """Return the rows of the dispatch again, instead of those sent along its plan."""

    _rows: Tensor

    def dispatch(self, call: DispatchCall) -> Dispatched:
        out = super().dispatch(call)
        self._rows = out.rows.data.clone()
        return out

    def cached_dispatch(self, hidden_states: Tensor, exchange_plan: ExchangePlan) -> Tensor:
        super().cached_dispatch(hidden_states, exchange_plan)
        return self._rows


class CountsNoBytes(CollectiveBuffer):
    """Omit the bytes of dispatch in traffic()."""

    def traffic(self) -> BufferTraffic:
        return replace(super().traffic(), dispatch_bytes=0)


class KeepsFaultsQuiet(CollectiveBuffer):
    """Raise the error of a bad call only on its rank."""

    def dispatch(self, call: DispatchCall) -> Dispatched:
        out = super().dispatch(replace(call, error=None))
        if call.error is not None:
            raise call.error
        return out


class BudgetOfOneMore(StaticCollectiveBuffer):
    """Allow one slot more than the budget."""

    def __init__(self, calls: Calls, spec: BufferSpec) -> None:
        budget = spec.max_recv_slots
        one_more = None if budget is None else budget + 1
        super().__init__(calls, replace(spec, max_recv_slots=one_more))


class RaisesFaultsTwice(StaticCollectiveBuffer):
    """Raise a fault of the device in every check()."""

    _fault: EPError | None = None

    def check(self) -> None:
        if self._fault is not None:
            raise self._fault
        try:
            super().check()
        except EPError as error:
            self._fault = error
            raise


class RefusedCombineIsZero(StaticCollectiveBuffer):
    """Return zeros from a combine that another rank refused."""

    def combine(self, rows: Tensor, exchange_plan: ExchangePlan | None, **options: Any) -> Sums:
        y, scalars = super().combine(rows, exchange_plan, **options)
        return y.nan_to_num(0) if y.isnan().all() else y, scalars


class OrderInTurns(TokensBackwards):
    """Send every other batch backwards, so that recomputation gives other rows."""

    _is_odd = False

    def turns(self) -> bool:
        self._is_odd = not self._is_odd
        return self._is_odd


class OwnFlagsAlone(CollectiveBuffer):
    """Need gradients where this rank needs them, not where any rank does."""

    def dispatch_steps(self, call: DispatchCall) -> Steps[Dispatched]:
        return replace((yield from super().dispatch_steps(call)), any_flags=call.flags)


def _without_gradient(y: Tensor) -> Tensor:
    """Return the same values, whose gradient arrives as zeros."""
    return y * 0 + y.detach()


class RemembersOneBatch(ExpertParallelExperts):
    """Drop the gradients of a batch that starts before the backward of the last one."""

    _is_waiting = False

    def forward(self, x: Tensor, topk: TopKOutput, **options: Any) -> Tensor:
        y = super().forward(x, topk, **options)
        if not y.requires_grad:
            return y
        if self._is_waiting:
            return _without_gradient(y)
        self._is_waiting = True
        y.register_hook(lambda gradient: setattr(self, "_is_waiting", False))
        return y


class FrozenExpertsStopGradients(ExpertParallelExperts):
    """Drop the gradients of inputs if no expert needs one."""

    def forward(self, x: Tensor, topk: TopKOutput, **options: Any) -> Tensor:
        y = super().forward(x, topk, **options)
        is_frozen = not any(parameter.requires_grad for parameter in self.parameters())
        return _without_gradient(y) if is_frozen and y.requires_grad else y


# A scenario of the buffer suite, and the buffers that it finds.
BUFFERS: dict[str, dict[str, type[CollectiveBuffer | StaticCollectiveBuffer]]] = {
    "uneven": {
        "WrongExpert": mutant(swap_even_experts),
        "LosesTheLastRow": mutant(
            out=lambda out: with_data(out, zeroed(out.rows.data, slice(-1, None)))
        ),
        "WeightsOfOtherSlots": mutant(
            out=lambda out: replace(out, slot_weights=out.slot_weights.flip(0))
        ),
        "IgnoresWeights": IgnoresWeights,
        "TokensBackwards": TokensBackwards,
        "AddsARowTwice": mutant(sums=lambda y, scalars: (torch.cat([2 * y[:1], y[1:]]), scalars)),
        "ReturnsRowsInBfloat16": mutant(spoil_rows=lambda rows: rows.bfloat16().to(rows.dtype)),
        "CachedRowsAreStale": CachedRowsAreStale,
        "ScalarsToOtherK": mutant(
            sums=lambda y, scalars: (y, None if scalars is None else scalars.flip(1))
        ),
    },
    "odd_hidden": {"CopiesFourElements": mutant(out=copy_whole_fours)},
    "many_experts": {
        "CountsFourExperts": mutant(
            out=lambda out: with_counts(
                out, zeroed(out.index.num_tokens_per_expert, slice(4, None))
            )
        )
    },
    "aligned": {
        "CountsOneBlock": mutant(out=count_one_block),
        "ReadsPadding": mutant(spoil_rows=lambda rows: rows + 0 * rows.sum(0)),
    },
    "repeated_ids": {"RepeatsHaveTheFirstWeight": mutant(give_repeats_the_first_weight)},
    "stand_alone": {"SumsDiffer": SumsDiffer, "CombinesTheLastBatch": CombinesTheLastBatch},
    "nowhere": {"LeavesYUnwritten": LeavesYUnwritten},
    "traffic": {"CountsNoBytes": CountsNoBytes},
    "faults": {"KeepsFaultsQuiet": KeepsFaultsQuiet, "RaisesFaultsTwice": RaisesFaultsTwice},
    "ids_out_of_range": {
        "NegativeIdsAreHoles": mutant(
            lambda call: replace(call, topk_ids=call.topk_ids.clamp(min=-1))
        )
    },
    "budget": {"BudgetOfOneMore": BudgetOfOneMore},
    "combine_faults": {"RefusedCombineIsZero": RefusedCombineIsZero},
}
# The same of the layer suite: layers, and buffers of a layer.
LAYERS: dict[str, dict[str, type[CollectiveBuffer | ExpertParallelExperts]]] = {
    "checkpointing": {"OrderInTurns": OrderInTurns},
    "rank_without_gradients": {"OwnFlagsAlone": OwnFlagsAlone},
    "two_batches": {"RemembersOneBatch": RemembersOneBatch},
    "frozen_experts": {"FrozenExpertsStopGradients": FrozenExpertsStopGradients},
}
CASES = [
    pytest.param(scenario, kind, id=name)
    for suite in (BUFFERS, LAYERS)
    for scenario, kinds in suite.items()
    for name, kind in kinds.items()
]


@pytest.fixture(scope="module", autouse=True)
def whole_layer() -> None:
    """Run a layer without a fault first, because its imports take longer than the timeout."""
    with EPGroup() as group:
        config = EPConfig(mode="normal", backend="collective")
        layer_suite.run_scenario("uneven", layer_suite.pipeline_env(group, config))


def run(scenario: str, mutant: type[Any], group: EPGroup) -> None:
    whole = next(base for base in mutant.__mro__ if base.__module__.startswith("epcomm."))
    is_layer = whole is ExpertParallelExperts
    with pytest.MonkeyPatch.context() as patch:
        if not is_layer:
            # The registry finds the mutant under the name of the buffer.
            patch.setattr(import_module(whole.__module__), whole.__name__, mutant)
        if scenario in BUFFERS:
            env = buffer_suite.BufferEnv(group=group, backend=whole.__name__, mode=Mode.NORMAL)
            buffer_suite.run_scenario(scenario, env)
            return
        config = EPConfig(mode="normal", backend="collective", timeout_s=PATIENCE_S)
        kind = mutant if is_layer else ExpertParallelExperts
        layer_env = replace(
            layer_suite.pipeline_env(group, config),
            make_layer=lambda weights, top_k: kind(weights, group, config, top_k=top_k),
        )
        layer_suite.run_scenario(scenario, layer_env)


def is_noticed_within(patience_s: float, scenario: str, mutant: type[Any]) -> bool:
    try:
        with EPGroup(dist.new_group()) as group:
            group.limit_waits(patience_s)
            run(scenario, mutant, group)
    except EPTimeout:
        # The rank waited for one that has failed; only for this mutant nothing else is detected.
        return mutant is OwnFlagsAlone
    # EPError: one that the suite did not expect. IndexError: rows of one batch and the exchange
    # plan of another.
    except (AssertionError, EPError, IndexError):
        return True
    return False


@pytest.mark.ranks(2)
@pytest.mark.parametrize(("scenario", "mutant"), CASES)
def test_the_suite_fails_on_this_mutant(scenario: str, mutant: type[Any]) -> None:
    of_ranks: list[bool] = [False, False]
    # On a busy machine both ranks may have timed out.
    for patience_s in (PATIENCE_S, 5 * PATIENCE_S):
        if not any(of_ranks):
            dist.all_gather_object(of_ranks, is_noticed_within(patience_s, scenario, mutant))
    assert any(of_ranks)
