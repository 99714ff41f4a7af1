"""Compute experts in a plain loop, in both layouts; other runners are checked against it."""

from __future__ import annotations

from typing import ClassVar, overload

import torch
from torch import Tensor

from epcomm.ops.activation import activate
from epcomm.ops.pack import pack
from epcomm.ops.precision import cast_experts, compute_dtype
from epcomm.quantization import dequantize
from epcomm.records import (
    CombineInput,
    DispatchOutput,
    MaskedCombineInput,
    MaskedDispatchOutput,
    RowsCombineInput,
    RowsDispatchOutput,
)
from epcomm.runners.base import ExpertRunner, slot_weights_to_apply, weight_slots
from epcomm.types import Layout, WireDtype
from epcomm.weights.unquantized import ExpertTensors, ExpertWeights


class ReferenceRunner(ExpertRunner):
    """Runs two matrix products for each expert; host sync if the host has no copy of the counts."""

    name: ClassVar[str] = "reference"
    kinds: ClassVar[tuple[type[ExpertTensors], ...]] = (ExpertWeights,)
    layouts: ClassVar[frozenset[Layout]] = frozenset(Layout)

    @classmethod
    def wire_dtypes(cls, weights: ExpertTensors) -> frozenset[WireDtype]:
        return frozenset(WireDtype)

    @overload
    def run(self, dispatched: RowsDispatchOutput, weights: ExpertTensors) -> RowsCombineInput: ...

    @overload
    def run(
        self, dispatched: MaskedDispatchOutput, weights: ExpertTensors
    ) -> MaskedCombineInput: ...

    def run(self, dispatched: DispatchOutput, weights: ExpertTensors) -> CombineInput:
        assert isinstance(weights, ExpertWeights), "supports() said so"
        weights = cast_experts(weights, compute_dtype(dispatched, weights))
        if isinstance(dispatched, MaskedDispatchOutput):
            return _run_masked(dispatched, weights)
        return _run_rows(dispatched, weights)


def _run_rows(dispatched: RowsDispatchOutput, weights: ExpertWeights) -> RowsCombineInput:
    index = dispatched.index
    slots = pack(dequantize(dispatched.hidden_states, weights.dtype), index)
    starts = index.first_slot.tolist()
    counts = index.host_num_tokens_per_expert or index.num_tokens_per_expert.tolist()
    slot_weights = slot_weights_to_apply(dispatched, ReferenceRunner.name)
    pieces = []
    for expert, count in enumerate(counts):
        mine = slice(starts[expert], starts[expert] + count)
        scale = None if slot_weights is None else slot_weights[mine]
        pieces.append(_run_expert(slots[mine], scale, weights, expert))
        # Padding behind the slots of an expert is zero, so that gradients stay finite.
        pieces.append(slots.new_zeros(starts[expert + 1] - mine.stop, slots.shape[1]))
    pieces.append(slots.new_zeros(dispatched.num_slots - starts[-1], slots.shape[1]))
    return dispatched.combine_input(torch.cat(pieces))


def _run_masked(dispatched: MaskedDispatchOutput, weights: ExpertWeights) -> MaskedCombineInput:
    rows = dequantize(dispatched.hidden_states, weights.dtype)
    results = torch.zeros_like(rows)
    slot_weights = slot_weights_to_apply(dispatched, ReferenceRunner.name)
    for expert, count in enumerate(dispatched.num_tokens_per_expert.tolist()):
        scale = None if slot_weights is None else slot_weights[expert, :count]
        results[expert, :count] = _run_expert(rows[expert, :count], scale, weights, expert)
    return dispatched.combine_input(results)


def _run_expert(
    hidden: Tensor, scale: Tensor | None, weights: ExpertWeights, expert: int
) -> Tensor:
    gate_up = hidden @ weights.gate_up_matrices()[expert]
    if weights.gate_up_bias is not None:
        gate_up = gate_up + weights.gate_up_bias[expert]
    result = activate(gate_up, weights.format) @ weights.down_matrices()[expert]
    if weights.down_bias is not None:
        result = result + weights.down_bias[expert]
    return result if scale is None else weight_slots(result, scale)
