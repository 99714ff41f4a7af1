"""Compute experts in a plain loop, in both layouts; other runners are checked against it."""

from typing import ClassVar

import torch
from torch import Tensor

from epcomm.ops.activation import activate
from epcomm.ops.precision import cast_experts, compute_dtype
from epcomm.ops.slots import pack
from epcomm.quantization import dequantize
from epcomm.records import RowsDispatchOutput
from epcomm.runners.base import ExpertRunner, slot_weights_to_apply, weight_slots
from epcomm.types import ROW_DTYPES, Layout, WireDtype
from epcomm.weights.unquantized import ExpertTensors, ExpertWeights


class ReferenceRunner(ExpertRunner):
    """Runs two matrix products for each expert; host sync if the host has no copy of the counts."""

    name: ClassVar[str] = "reference"
    kinds: ClassVar[tuple[type[ExpertTensors], ...]] = (ExpertWeights,)
    layouts: ClassVar[frozenset[Layout]] = frozenset(Layout)
    wire_dtypes: ClassVar[frozenset[WireDtype]] = ROW_DTYPES
    has_gradients: ClassVar[bool] = True

    def _compute_rows(self, dispatched: RowsDispatchOutput, weights: ExpertTensors) -> Tensor:
        assert isinstance(weights, ExpertWeights), "supports() said so"
        weights = cast_experts(weights, compute_dtype(dispatched, weights))
        index = dispatched.index
        slots = pack(dequantize(dispatched.hidden_states, weights.dtype), index)
        starts = index.first_slot.tolist()
        counts = index.host_num_tokens_per_expert or index.num_tokens_per_expert.tolist()
        slot_weights = slot_weights_to_apply(dispatched, self.name)
        pieces = []
        for expert, count in enumerate(counts):
            mine = slice(starts[expert], starts[expert] + count)
            scale = None if slot_weights is None else slot_weights[mine]
            pieces.append(run_expert(slots[mine], scale, weights, expert))
            # Padding after the slots of an expert; zeros, so that gradients stay finite.
            pieces.append(slots.new_zeros(starts[expert + 1] - mine.stop, slots.shape[1]))
        pieces.append(slots.new_zeros(dispatched.num_slots - starts[-1], slots.shape[1]))
        return torch.cat(pieces)


def run_expert(hidden: Tensor, scale: Tensor | None, weights: ExpertWeights, expert: int) -> Tensor:
    """Return the results of one expert for tokens [..., H], multiplied by the scale if given."""
    gate_up = hidden @ weights.gate_up_matrices()[expert]
    if weights.gate_up_bias is not None:
        gate_up = gate_up + weights.gate_up_bias[expert]
    result = activate(gate_up, weights.format) @ weights.down_matrices()[expert]
    if weights.down_bias is not None:
        result = result + weights.down_bias[expert]
    return result if scale is None else weight_slots(result, scale)
