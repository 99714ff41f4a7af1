"""Activations between the two matrices of an expert."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from epcomm.ops.slots import WITH_DATA, row_ops_of
from epcomm.weights.unquantized import Activation, ExpertFormat


def activate_slots(
    gate_up: Tensor, expert_format: ExpertFormat, slot_weights: Tensor | None
) -> Tensor:
    """Return activate(), with router weights [S] multiplied into it in sum_dtype() if they exist.

    On a GPU, SwiGLU is one kernel, which rounds once and is differentiable once.
    """
    is_plain = expert_format.activation is Activation.SWIGLU and not expert_format.is_interleaved
    is_read = type(gate_up) in WITH_DATA and gate_up.dtype is not torch.float64
    if is_plain and is_read and row_ops_of(gate_up.device) is not None:
        return _SwiGLU.apply(gate_up, slot_weights)
    hidden = activate(gate_up, expert_format)
    if slot_weights is None:
        return hidden
    return (hidden * slot_weights.unsqueeze(1)).to(hidden.dtype)


class _SwiGLU(torch.autograd.Function):
    """Keeps only its operands for backward, which computes the activation again."""

    @staticmethod
    def forward(ctx: FunctionCtx, gate_up: Tensor, slot_weights: Tensor | None) -> Tensor:
        gate_up = gate_up.contiguous()
        slot_weights = None if slot_weights is None else slot_weights.contiguous()
        ctx.save_for_backward(gate_up, slot_weights)  # type: ignore[arg-type]
        ops = row_ops_of(gate_up.device)
        assert ops is not None, "activate_slots() said so"
        return ops.swiglu(gate_up, slot_weights)

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        kept: Any = ctx
        ops = row_ops_of(grad.device)
        assert ops is not None, "as in forward"
        return ops.swiglu_backward(grad.contiguous(), *kept.saved_tensors)


def activate(gate_up: Tensor, expert_format: ExpertFormat) -> Tensor:
    """Apply the experts' activation to [S, 2I] ([S, I] without a gate) and return [S, I].

    The result has the dtype of gate_up. Differentiable.
    """
    if expert_format.activation is Activation.RELU2:
        return F.relu(gate_up).square()
    is_interleaved = expert_format.is_interleaved
    gate, up = (gate_up[..., ::2], gate_up[..., 1::2]) if is_interleaved else gate_up.chunk(2, -1)
    if expert_format.activation is Activation.SWIGLU:
        return F.silu(gate) * up
    limit = expert_format.limit
    assert limit is not None, "checked at creation"
    gate, up = gate.clamp(max=limit), up.clamp(min=-limit, max=limit)
    if expert_format.activation is Activation.LIMITED_SWIGLU:
        return F.silu(gate) * up
    assert expert_format.alpha is not None, "checked at creation"
    return (up + 1) * (gate * torch.sigmoid(gate * expert_format.alpha))
