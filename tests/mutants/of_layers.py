"""Faults that the layer suite must notice: of layers, gradients, and the buffer below."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from epcomm import EPGroup, ExpertParallelExperts, TopKOutput
from epcomm.buffers.base import Dispatched
from epcomm.buffers.collective.all_to_all import CollectiveBuffer
from epcomm.calls.call import DispatchCall
from epcomm.weights.unquantized import Activation, ExpertWeights
from tests.mutants.base import Mutant
from tests.testing.test_suites_catch_faults import OtherSlotOrder


class LayerOfOthers(ExpertParallelExperts):
    """What subclasses make of the experts that they are given."""

    def __init__(
        self, weights: ExpertWeights, group: EPGroup, *arguments: Any, **options: Any
    ) -> None:
        self.__dict__["_its_group"] = group
        super().__init__(self.of(weights), group, *arguments, **options)

    def of(self, weights: ExpertWeights) -> ExpertWeights:
        return weights


class ClampIsForgotten(LayerOfOthers):
    """Clamped activations are clamped where nothing is."""

    def of(self, weights: ExpertWeights) -> ExpertWeights:
        if weights.format.activation is not Activation.CLAMPED_SWIGLU:
            return weights
        return replace(weights, format=replace(weights.format, limit=1000.0))


class LayersShareExperts(LayerOfOthers):
    """All layers on a group compute with the experts of the last one."""

    def __init__(self, weights: ExpertWeights, group: EPGroup, *rest: Any, **options: Any) -> None:
        super().__init__(weights, group, *rest, **options)
        vars(group)["last_layer"] = self

    def forward(self, x: Tensor, topk: TopKOutput, **options: Any) -> Tensor:
        last = vars(self.__dict__["_its_group"])["last_layer"]
        return ExpertParallelExperts.forward(last, x, topk, **options)


class RemembersOneBatch(ExpertParallelExperts):
    """A batch that comes before the last one's backward gets no gradients."""

    _is_waiting = False

    def forward(self, x: Tensor, topk: TopKOutput, **options: Any) -> Tensor:
        y = super().forward(x, topk, **options)
        if not y.requires_grad:
            return y
        if self._is_waiting:
            return _cut(y)
        self._is_waiting = True
        y.register_hook(self._backward_came)
        return y

    def _backward_came(self, gradient: Tensor) -> None:
        self._is_waiting = False


def _cut(y: Tensor) -> Tensor:
    """The same values, whose gradient arrives as zeros."""
    return y * 0 + y.detach()


class OrderInTurns(OtherSlotOrder):
    """Every other dispatch puts each expert's slots backwards."""

    _is_turned = False

    def dispatch(self, call: DispatchCall) -> Dispatched:
        self._is_turned = not self._is_turned
        kind = OtherSlotOrder if self._is_turned else CollectiveBuffer
        return kind.dispatch(self, call)


class OwnFlagsAlone(CollectiveBuffer):
    """A rank goes by its own need of gradients."""

    def dispatch(self, call: DispatchCall) -> Dispatched:
        return replace(super().dispatch(call), any_flags=call.flags)


class NoInputNoGradients(LayerOfOthers):
    """Where no rank's inputs need a gradient, the experts get none."""

    def forward(self, x: Tensor, topk: TopKOutput, **options: Any) -> Tensor:
        y = super().forward(x, topk, **options)
        needs = x.requires_grad or topk.topk_weights.requires_grad
        group: EPGroup = self.__dict__["_its_group"]
        told = group.collectives.all_gather(torch.tensor(int(needs)))
        return y if told.any() or not y.requires_grad else _cut(y)


class FrozenExpertsPassNothing(ExpertParallelExperts):
    """Where no expert needs a gradient, inputs get none."""

    def forward(self, x: Tensor, topk: TopKOutput, **options: Any) -> Tensor:
        y = super().forward(x, topk, **options)
        is_frozen = not any(parameter.requires_grad for parameter in self.parameters())
        return _cut(y) if is_frozen and y.requires_grad else y


def in_layer(broken: type[Any], scenario: str, tells: str, **options: Any) -> Mutant:
    return Mutant(broken=broken, suite="layer", scenario=scenario, tells=tells, **options)


MUTANTS = [
    in_layer(ClampIsForgotten, "clamped_swiglu", "y is off by"),
    in_layer(LayersShareExperts, "two_layers", "y is off by"),
    in_layer(RemembersOneBatch, "two_batches", "dx is off by"),
    in_layer(OrderInTurns, "checkpointing", "is off by"),
    in_layer(OwnFlagsAlone, "rank_without_gradients", "rank 1 did not arrive"),
    in_layer(NoInputNoGradients, "frozen_inputs", "is off by"),
    in_layer(FrozenExpertsPassNothing, "frozen_experts", "dx is off by"),
]
