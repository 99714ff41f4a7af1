"""Compute experts by two grouped matrix products over slots, without host sync: the default.

The router weight is folded in before the second product, (w h) D = w (h D): I columns are scaled
instead of H, and backward needs no copy of the unweighted result.
"""

from functools import partial
from typing import ClassVar

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable
from torch.nn.functional import grouped_mm

from epcomm.ops.activation import activate
from epcomm.ops.precision import cast_experts, compute_dtype
from epcomm.ops.slots import expert_of_slot, pack
from epcomm.platforms.machine import Machine
from epcomm.quantization import dequantize
from epcomm.records import RowsDispatchOutput, SlotIndex
from epcomm.runners.base import ExpertRunner, size_reasons, slot_weights_to_apply, weight_slots
from epcomm.types import ROW_ALIGNMENT_BYTES, ROW_DTYPES, Layout, WireDtype
from epcomm.weights.unquantized import ExpertTensors, ExpertWeights, LateGradient


class GroupedMMRunner(ExpertRunner):
    """Runs torch's grouped matmul over ROWS, on CPU and CUDA."""

    name: ClassVar[str] = "grouped_mm"
    kinds: ClassVar[tuple[type[ExpertTensors], ...]] = (ExpertWeights,)
    layouts: ClassVar[frozenset[Layout]] = frozenset({Layout.ROWS})
    wire_dtypes: ClassVar[frozenset[WireDtype]] = ROW_DTYPES
    has_gradients: ClassVar[bool] = True

    @classmethod
    def _reasons(cls, weights: ExpertTensors, machine: Machine) -> list[str]:
        if weights.dtype is torch.float64:
            return ["torch's grouped matmul has no float64"]
        return size_reasons(weights, multiple=ROW_ALIGNMENT_BYTES // weights.dtype.itemsize)

    def _compute_rows(self, dispatched: RowsDispatchOutput, weights: ExpertTensors) -> Tensor:
        assert isinstance(weights, ExpertWeights), "supports() said so"
        dtype, index = _dtype_of(dispatched, weights), dispatched.index
        weights = cast_experts(weights, dtype)
        wire = dispatched.hidden_states
        rows = wire.data.to(dtype) if wire.scales is None else dequantize(wire, dtype)
        slots = pack(rows, index)
        # Padding is computed with the expert before it: results of padding are never combined.
        ends = index.first_slot[1:]
        late = weights.late
        hidden = _product(slots, weights.gate_up_matrices(), ends, late.get("gate_up_proj"))
        if weights.gate_up_bias is not None:
            hidden = hidden + bias_of_slots(weights.gate_up_bias, index, slots.shape[0])
        hidden = activate(hidden, weights.format)
        scale = slot_weights_to_apply(dispatched, self.name)
        if scale is not None:
            if index.row_of_slot is not None and not index.is_dense:
                # Weights of padding are undefined, and would enter the gradients of the experts.
                scale = scale.masked_fill(index.row_of_slot < 0, 0)
            hidden = weight_slots(hidden, scale)
        results = _product(hidden, weights.down_matrices(), ends, late.get("down_proj"))
        if weights.down_bias is not None:
            bias = bias_of_slots(weights.down_bias, index, slots.shape[0])
            results = results + (bias if scale is None else weight_slots(bias, scale))
        return results


class _LateProduct(torch.autograd.Function):
    """A product whose backward leaves the gradient of the matrices for later."""

    @staticmethod
    def forward(
        ctx: FunctionCtx, slots: Tensor, matrices: Tensor, ends: Tensor, late: LateGradient
    ) -> Tensor:
        ctx.save_for_backward(slots, matrices, ends)
        ctx.late = late  # type: ignore[attr-defined]
        return grouped_mm(slots, matrices, offs=ends)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor | None, None, None, None]:  # type: ignore[override]
        slots, matrices, ends = ctx.saved_tensors  # type: ignore[attr-defined]
        ctx.late.leave(partial(_gradient_of, matrices, slots, grad, ends))  # type: ignore[attr-defined]
        needed = ctx.needs_input_grad[0]  # type: ignore[attr-defined]
        return grouped_mm(grad, matrices.mT, offs=ends) if needed else None, None, None, None


def _gradient_of(matrices: Tensor, slots: Tensor, grad: Tensor, ends: Tensor) -> Tensor:
    """Return the gradient of the parameter, of which `matrices` is this view or its transpose."""
    left, right = (slots, grad) if matrices.stride(2) == 1 else (grad, slots)
    return grouped_mm(left.t(), right, offs=ends)


def _product(slots: Tensor, matrices: Tensor, ends: Tensor, late: LateGradient | None) -> Tensor:
    """Multiply the slots [C, in] of each expert by its matrix, [L, in, out]."""
    if late is None:
        return grouped_mm(slots, matrices, offs=ends)
    return _LateProduct.apply(slots, matrices, ends, late)


def _dtype_of(dispatched: RowsDispatchOutput, weights: ExpertWeights) -> torch.dtype:
    """Return compute_dtype(), or float32 where torch's grouped matmul refuses that dtype."""
    dtype = compute_dtype(dispatched, weights)
    per_row = ROW_ALIGNMENT_BYTES // dtype.itemsize
    is_aligned = weights.hidden_size % per_row == 0 and weights.intermediate_size % per_row == 0
    return dtype if is_aligned and dtype is not torch.float64 else torch.float32


def bias_of_slots(bias: Tensor, index: SlotIndex, num_slots: int) -> Tensor:
    """Return the bias row of the expert that computes each slot, [C, *]; bias is [L, *].

    Slots after the last expert get a row of zeros that is part of no bias, because the gradients of
    these slots are undefined.
    """
    experts = expert_of_slot(index, num_slots)
    return torch.cat([bias, bias.new_zeros(1, bias.shape[1])])[experts]
