"""Activations between the two matrices of an expert, in plain torch."""

import torch
import torch.nn.functional as F
from torch import Tensor

from epcomm.weights.unquantized import Activation, ExpertFormat


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
