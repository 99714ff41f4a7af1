"""Compute experts by two grouped matrix products over slots, without host sync: the default.

The router weight is folded in before the second product, (w h) D = w (h D): I columns are scaled
instead of H, and backward needs no copy of the unweighted result.
"""

from __future__ import annotations

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
from epcomm.types import ROW_ALIGNMENT_BYTES, Layout, WireDtype
from epcomm.weights.unquantized import ExpertTensors, ExpertWeights, LateGradient


class GroupedMMRunner(ExpertRunner):
    """Runs torch's grouped matmul over ROWS, on CPU and CUDA."""

    name: ClassVar[str] = "grouped_mm"
    kinds: ClassVar[tuple[type[ExpertTensors], ...]] = (ExpertWeights,)
    layouts: ClassVar[frozenset[Layout]] = frozenset({Layout.ROWS})
    wire_dtypes: ClassVar[frozenset[WireDtype]] = frozenset(WireDtype)
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
        transposed = weights.format.is_transposed
        late = weights.late.get("gate_up_proj")
        hidden = product(slots, weights.gate_up_proj, ends, is_transposed=transposed, late=late)
        if weights.gate_up_bias is not None:
            hidden = hidden + bias_of_slots(weights.gate_up_bias, index, slots.shape[0])
        hidden = activate(hidden, weights.format)
        scale = slot_weights_to_apply(dispatched, self.name)
        if scale is not None:
            if index.row_of_slot is not None and not index.is_dense:
                # Weights of padding are undefined, and would enter the gradients of the experts.
                scale = scale.masked_fill(index.row_of_slot < 0, 0)
            hidden = weight_slots(hidden, scale)
        late = weights.late.get("down_proj")
        results = product(hidden, weights.down_proj, ends, is_transposed=transposed, late=late)
        if weights.down_bias is not None:
            bias = bias_of_slots(weights.down_bias, index, slots.shape[0])
            results = results + (bias if scale is None else weight_slots(bias, scale))
        return results


class _LateProduct(torch.autograd.Function):
    """A product whose backward leaves the gradient of the matrices for later."""

    @staticmethod
    def forward(
        ctx: FunctionCtx,
        slots: Tensor,
        matrices: Tensor,
        ends: Tensor,
        is_transposed: bool,
        late: LateGradient,
    ) -> Tensor:
        ctx.save_for_backward(slots, matrices, ends)
        ctx.is_transposed, ctx.late = is_transposed, late  # type: ignore[attr-defined]
        return product(slots, matrices, ends, is_transposed=is_transposed)

    @staticmethod
    @once_differentiable
    def backward(  # type: ignore[override]
        ctx: FunctionCtx, grad: Tensor
    ) -> tuple[Tensor | None, None, None, None, None]:
        slots, matrices, ends = ctx.saved_tensors  # type: ignore[attr-defined]
        is_transposed = ctx.is_transposed  # type: ignore[attr-defined]
        left, right = (slots, grad) if is_transposed else (grad, slots)
        ctx.late.compute = partial(grouped_mm, left.t(), right, offs=ends)  # type: ignore[attr-defined]
        grad_slots = None
        if ctx.needs_input_grad[0]:  # type: ignore[attr-defined]
            grad_slots = product(grad, matrices, ends, is_transposed=not is_transposed)
        return grad_slots, None, None, None, None


def product(
    slots: Tensor,
    matrices: Tensor,
    ends: Tensor,
    *,
    is_transposed: bool,
    late: LateGradient | None = None,
) -> Tensor:
    """Multiply the slots of each expert by its matrix.

    Args:
        slots: [C, in].
        matrices: [L, out, in], or if is_transposed [L, in, out].
        ends: [L], the end of each expert's slots.
        is_transposed: the layout of the matrices.
        late: takes the gradient of the matrices; None: autograd computes it with that of the slots.
    """
    if late is not None:
        return _LateProduct.apply(slots, matrices, ends, is_transposed, late)
    return grouped_mm(slots, matrices if is_transposed else matrices.transpose(1, 2), offs=ends)


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
