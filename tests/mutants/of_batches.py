"""Faults of the collective buffer that show with one kind of batch alone, whatever is done with it.

Each is small, and such as kernels have: a loop that takes some elements at a time, a count that is
taken for granted, a memory of one.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from epcomm.buffers.base import Combined, Dispatched
from epcomm.buffers.collective.all_to_all import CollectiveBuffer, CollectiveExchangePlan
from epcomm.calls.call import DispatchCall
from epcomm.records import ExchangePlan
from tests.mutants.base import Mutant


class Spoiling(CollectiveBuffer):
    """What subclasses spoil: what was dispatched, redispatched or combined."""

    def dispatch(self, call: DispatchCall) -> Dispatched:
        out = super().dispatch(call)
        assert isinstance(out.exchange_plan, CollectiveExchangePlan)
        return self.spoil_dispatched(out, out.exchange_plan, call)

    def cached_dispatch(self, hidden_states: Tensor, exchange_plan: ExchangePlan) -> Tensor:
        assert isinstance(exchange_plan, CollectiveExchangePlan)
        return super().cached_dispatch(self.spoil_sent(hidden_states, exchange_plan), exchange_plan)

    def combine(self, rows: Tensor, exchange_plan: ExchangePlan, **options: Any) -> Combined:
        assert isinstance(exchange_plan, CollectiveExchangePlan)
        return self.spoil_combined(super().combine(rows, exchange_plan, **options), exchange_plan)

    def spoil_dispatched(
        self, out: Dispatched, exchange_plan: CollectiveExchangePlan, call: DispatchCall
    ) -> Dispatched:
        return out

    def spoil_sent(self, hidden_states: Tensor, exchange_plan: CollectiveExchangePlan) -> Tensor:
        return hidden_states

    def spoil_combined(self, home: Combined, exchange_plan: CollectiveExchangePlan) -> Combined:
        return home


def with_data(out: Dispatched, data: Tensor) -> Dispatched:
    """The same with other rows."""
    return replace(out, rows=replace(out.rows, data=data))


class WhoReceivesNothingReturnsNothing(Spoiling):
    """A rank that received no row does not look for the results of its own tokens."""

    def spoil_combined(self, home: Combined, exchange_plan: CollectiveExchangePlan) -> Combined:
        return home if exchange_plan.num_rows else replace(home, y=torch.zeros_like(home.y))


class TokensOfNobodyAreLeft(Spoiling):
    """A rank whose tokens go nowhere does not write their y."""

    def spoil_combined(self, home: Combined, exchange_plan: CollectiveExchangePlan) -> Combined:
        if sum(exchange_plan.send_splits):
            return home
        return replace(home, y=torch.full_like(home.y, float("nan")))


class CopiesFourElements(Spoiling):
    """Rows are copied four elements at a time, and what is left over is not."""

    def spoil_dispatched(
        self, out: Dispatched, exchange_plan: CollectiveExchangePlan, call: DispatchCall
    ) -> Dispatched:
        data = out.rows.data.clone()
        data[:, data.shape[1] // 4 * 4 :] = 0
        return with_data(out, data)


class CountsOfFourExperts(Spoiling):
    """A header has place for the counts of four experts of a rank."""

    def spoil_dispatched(
        self, out: Dispatched, exchange_plan: CollectiveExchangePlan, call: DispatchCall
    ) -> Dispatched:
        assert out.index.host_num_tokens_per_expert is not None
        counts = out.index.num_tokens_per_expert.clone()
        counts[4:] = 0
        index = replace(
            out.index,
            num_tokens_per_expert=counts,
            host_num_tokens_per_expert=tuple(counts.tolist()),
        )
        return replace(out, index=index)


class ExpertHasOneBlock(Spoiling):
    """Where slots are aligned, those behind an expert's first block are taken for padding."""

    def spoil_dispatched(
        self, out: Dispatched, exchange_plan: CollectiveExchangePlan, call: DispatchCall
    ) -> Dispatched:
        size, counts = out.index.expert_alignment, out.index.num_tokens_per_expert
        if size == 1:
            return out
        blocks = counts.clamp(max=size)
        return replace(out, index=replace(out.index, num_tokens_per_expert=blocks))


class NoSlotTakesABlock(Spoiling):
    """Where slots are aligned, an expert without any takes a block."""

    def spoil_dispatched(
        self, out: Dispatched, exchange_plan: CollectiveExchangePlan, call: DispatchCall
    ) -> Dispatched:
        size, counts = out.index.expert_alignment, out.index.num_tokens_per_expert
        missing = int((counts == 0).sum()) * size
        if size == 1 or not missing:
            return out
        assert out.index.row_of_slot is not None
        padding = out.index.row_of_slot.new_zeros(missing)
        longer = torch.cat([out.index.row_of_slot, padding])
        return replace(out, index=replace(out.index, row_of_slot=longer))


class RepeatsHaveTheFirstWeight(Spoiling):
    """Two entries of a token with one expert have the weight of the first."""

    def dispatch(self, call: DispatchCall) -> Dispatched:
        weights, ids = call.topk_weights.clone(), call.topk_ids
        for k in range(1, ids.shape[1]):
            is_repeat = (ids[:, k] == ids[:, k - 1]) & (ids[:, k] >= 0)
            weights[:, k] = torch.where(is_repeat, weights[:, k - 1], weights[:, k])
        return super().dispatch(replace(call, topk_weights=weights))


MUTANTS = [
    Mutant(
        broken=WhoReceivesNothingReturnsNothing, scenario="one_expert", tells="combine with weights"
    ),
    Mutant(broken=TokensOfNobodyAreLeft, scenario="nowhere", tells="is off by inf"),
    Mutant(broken=CopiesFourElements, scenario="odd_hidden", tells="slot 0"),
    Mutant(broken=CountsOfFourExperts, scenario="many_experts", tells="num_tokens_per_expert is"),
    Mutant(broken=ExpertHasOneBlock, scenario="aligned", tells="num_tokens_per_expert is"),
    Mutant(broken=RepeatsHaveTheFirstWeight, scenario="repeated_ids", tells="weight of slot"),
    Mutant(broken=NoSlotTakesABlock, scenario="aligned_holes", tells="padding is"),
]
