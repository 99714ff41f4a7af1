"""Compute experts by two grouped matrix products over slots, without host sync: the default.

The router weight is folded in before the second product, (w h) D = w (h D): I columns are scaled
instead of H, and backward needs no copy of the unweighted result.
"""

from collections.abc import Sequence
from functools import partial
from typing import Any, ClassVar, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable
from torch.nn.functional import grouped_mm

from epcomm.ops.activation import activate_slots
from epcomm.ops.precision import cast_experts, compute_dtype
from epcomm.ops.slots import expert_of_slot, pack
from epcomm.platforms.cuda import num_sms_of, temporary
from epcomm.platforms.machine import Machine
from epcomm.quantization import dequantizer_for
from epcomm.records import RowsDispatchOutput, SlotIndex
from epcomm.runners.base import ExpertRunner, size_reasons, slot_weights_to_apply, weight_slots
from epcomm.types import ROW_ALIGNMENT_BYTES, ROW_DTYPES, Layout, WireDtype
from epcomm.weights.unquantized import ExpertTensors, ExpertWeights, LateGradient


class Part(NamedTuple):
    """The slots of one chunk; the gradient of an expert's matrix is left.T @ right over its slots.

    left: [C, *].   right: [C, *].   ends: [L], int32, of each expert.
    """

    left: Tensor
    right: Tensor
    ends: Tensor


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

    @classmethod
    def limit_reasons(cls, weights: ExpertTensors, machine: Machine) -> list[str]:
        device = machine.device_of(weights.gate_up_proj)
        # Otherwise torch calls a product for each expert.
        if weights.dtype is torch.bfloat16 and machine.capability(device)[0] in (9, 10):
            return []
        return ["torch's products obey EPConfig.product_sms in bfloat16 on sm_90 and sm_100 alone"]

    def _compute_rows(self, dispatched: RowsDispatchOutput, weights: ExpertTensors) -> Tensor:
        assert isinstance(weights, ExpertWeights), "supports() said so"
        dtype, index = _dtype_of(dispatched, weights), dispatched.index
        weights = cast_experts(weights, dtype)
        wire = dispatched.hidden_states
        if wire.scales is None:
            rows = wire.data.to(dtype)
        else:
            rows = dequantizer_for(wire.data.device)(wire, dtype)
        slots = pack(rows, index)
        # Padding is computed with the expert before it: results of padding are never combined.
        ends = index.first_slot[1:]
        late, num_sms = weights.late, self.product_sms if slots.is_cuda else None
        late_gate_up, late_down = late.get("gate_up_proj"), late.get("down_proj")
        hidden = _product(slots, weights.gate_up_matrices(), ends, late_gate_up, num_sms)
        if weights.gate_up_bias is not None:
            hidden = hidden + bias_of_slots(weights.gate_up_bias, index, slots.shape[0])
        scale = slot_weights_to_apply(dispatched, self.name)
        if scale is not None and index.row_of_slot is not None and not index.is_dense:
            # Weights of padding are undefined, and would enter the gradients of the experts.
            scale = scale.masked_fill(index.row_of_slot < 0, 0)
        hidden = activate_slots(hidden, weights.format, scale)
        results = _product(hidden, weights.down_matrices(), ends, late_down, num_sms)
        if weights.down_bias is not None:
            bias = bias_of_slots(weights.down_bias, index, slots.shape[0])
            results = results + (bias if scale is None else weight_slots(bias, scale))
        return results


class _OwnProduct(torch.autograd.Function):
    """A product whose backward has its limit, or leaves the gradient of the matrices for later."""

    @staticmethod
    def forward(
        ctx: FunctionCtx,
        slots: Tensor,
        matrices: Tensor,
        ends: Tensor,
        late: LateGradient[Part] | None,
        num_sms: int | None,
    ) -> Tensor:
        ctx.save_for_backward(slots, matrices, ends)
        ctx.late, ctx.num_sms = late, num_sms  # type: ignore[attr-defined]
        return multiply_groups(slots, matrices, ends, num_sms)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        kept: Any = ctx
        (slots, matrices, ends), needed = kept.saved_tensors, kept.needs_input_grad
        # Of the parameter, of which `matrices` is this view or its transpose.
        left, right = (slots, grad) if matrices.stride(2) == 1 else (grad, slots)
        part, compute = Part(left, right, ends), partial(_gradient_of, num_sms=kept.num_sms)
        found = None
        if kept.late is not None:
            kept.late.leave(part, compute)
        elif needed[1]:
            found = compute([part]) if matrices.stride(2) == 1 else compute([part]).mT
        rows = multiply_groups(grad, matrices.mT, ends, kept.num_sms) if needed[0] else None
        return rows, found, None, None, None


def _gradient_of(parts: Sequence[Part], *, num_sms: int | None) -> Tensor:
    left, right, ends = parts[0] if len(parts) == 1 else _joined(parts)
    return multiply_groups(left.t(), right, ends, num_sms)


def _joined(parts: Sequence[Part]) -> Part:
    """Return the slots of all parts, by expert.   Host sync: none.

    Slots a a b and a b b give a a a b b b: they move to 0 1 3 and 2 4 5.
    """
    # The last size is that of the slots after the last expert.
    sizes = torch.stack(
        [
            ends.diff(prepend=ends.new_zeros(1), append=ends.new_full((1,), len(left)))
            for left, _, ends in parts
        ]
    )
    ends = sizes.sum(0).cumsum(0)
    firsts = ends - sizes.sum(0) + sizes.cumsum(0) - sizes
    moves = firsts - (sizes.cumsum(1) - sizes)
    num_slots = sum(len(part.left) for part in parts)
    joined = [each.new_empty(num_slots, each.shape[1]) for each in (parts[0].left, parts[0].right)]
    for part, size, move in zip(parts, sizes, moves, strict=True):
        number = len(part.left)
        place = torch.arange(number, device=ends.device)
        place += move.repeat_interleave(size, output_size=number)
        for target, rows in zip(joined, part, strict=False):
            target[place] = rows
    return Part(joined[0], joined[1], ends[:-1].to(torch.int32))


def _product(
    slots: Tensor,
    matrices: Tensor,
    ends: Tensor,
    late: LateGradient[Part] | None,
    num_sms: int | None,
) -> Tensor:
    """Multiply the slots [C, in] of each expert by its matrix, [L, in, out]."""
    if late is None and num_sms is None:
        return grouped_mm(slots, matrices, offs=ends)
    return _OwnProduct.apply(slots, matrices, ends, late, num_sms)


def multiply_groups(left: Tensor, right: Tensor, ends: Tensor, num_sms: int | None) -> Tensor:
    """Call torch's grouped matmul, on at most num_sms SMs of a GPU; None: no limit."""
    if num_sms is None:
        return grouped_mm(left, right, offs=ends)
    # Its programs come in clusters of two SMs, and torch refuses an odd number.
    free = max(0, num_sms_of(left.device) - max(2, num_sms // 2 * 2))
    get, change = torch._C._get_sm_carveout_experimental, torch._C._set_sm_carveout_experimental
    with temporary(free, get, change):
        return grouped_mm(left, right, offs=ends)


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
    return torch.cat([bias, bias.new_zeros(1, bias.shape[1])])[expert_of_slot(index, num_slots)]
