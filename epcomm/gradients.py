"""Gradients beside expert parallelism: sums over ranks, factors, norms.

An expert has seen the tokens of all ranks of its group, so when backward ends its gradients are the
sum over the losses of these ranks. Every other parameter is replicated and has seen only the rank's
own tokens. docs/training.md tells what follows beside DDP and FSDP.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from epcomm.collectives.base import Collectives
from epcomm.errors import ConfigError
from epcomm.group import EPGroup
from epcomm.sharding import replicated_parameters, sharded_parameters
from epcomm.types import sum_dtype


def sum_replicated_gradients(model: nn.Module, group: EPGroup) -> None:
    """Add the gradients of replicated parameters over the ranks, where no DDP does.

    Afterwards all gradients are those of the sum of the losses of all ranks; divide each loss by
    the number of ranks, or of all tokens, for a mean. A rank without a gradient counts as zero.

    Collective: yes, two messages a dtype.   Host sync: as the transport.
    Raises:
        ConfigError: a gradient is a DTensor, which FSDP has reduced already.
    """
    by_dtype: dict[torch.dtype, list[nn.Parameter]] = {}
    for parameter in replicated_parameters(model):
        if isinstance(parameter, DTensor):
            raise ConfigError(
                "sum_replicated_gradients: a parameter is a DTensor, whose gradients FSDP reduces "
                f"itself ({group.where}); leave the call out"
            )
        if parameter.requires_grad:
            by_dtype.setdefault(parameter.dtype, []).append(parameter)
    for parameters in by_dtype.values():
        flat = torch.cat([_gradient_of(parameter).flatten() for parameter in parameters])
        total = _sum_over_ranks(flat, group.collectives, phase="sum_replicated_gradients")
        parts = total.split([parameter.numel() for parameter in parameters])
        for parameter, part in zip(parameters, parts, strict=True):
            parameter.grad = part.view_as(parameter)


def scale_expert_gradients(model: nn.Module, factor: float) -> None:
    """Multiply the gradients of every expert parameter by `factor` at the end of each backward.

    Beside DDP, which takes the mean over its W ranks, the factor is 1 / W: an expert's gradient is
    a sum over the same ranks. Gradients that add up over several backwards are each scaled once.

    Local; call it once after construction.
    """
    for parameter in sharded_parameters(model):
        parameter.register_hook(lambda gradient: gradient * factor)


def clip_grad_norm(model: nn.Module, group: EPGroup | None, max_norm: float) -> Tensor:
    """Scale all gradients so that the norm of all of them, experts of all ranks included, fits.

    Call it when replicated gradients are equal on all ranks. Beside FSDP, and for models that
    transformers loaded, which hold DTensors, it gathers what those need.

    Args:
        model: with any parameters of its own, sharded or not.
        group: the ranks that share the experts; None for a model that transformers loaded.
        max_norm: the largest norm that stays as it is.

    Returns:
        float32 scalar, the norm before, equal on all ranks.

    Collective: yes.   Host sync: as the transport.
    """
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    square = _square_of(replicated_parameters(model), next(model.parameters()).device)
    if group is not None:
        own = _square_of(sharded_parameters(model), group.collectives.device)
        square = square + group.collectives.all_gather(own, phase="clip_grad_norm").sum()
    norm = square.sqrt()
    # 1e-6 as torch.nn.utils.clip_grad_norm_ has it, against gradients of zero.
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for gradient in gradients:
        local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
        local.mul_(factor)
    return norm


def _square_of(parameters: Iterable[nn.Parameter], device: torch.device) -> Tensor:
    """The sum of all squares, also of the parts of DTensors that lie on other ranks."""
    total = torch.zeros((), device=device)
    for parameter in parameters:
        if parameter.grad is not None:
            square = parameter.grad.float().square().sum()
            total = total + (square.full_tensor() if isinstance(square, DTensor) else square)
    return total


def _gradient_of(parameter: nn.Parameter) -> Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad


def _sum_over_ranks(flat: Tensor, collectives: Collectives, *, phase: str) -> Tensor:
    """Reduce-scatter and all-gather: [N] of each rank to their sum, bit-equal on all ranks."""
    world_size = collectives.world_size
    share = -(-flat.shape[0] // world_size)
    padded = torch.nn.functional.pad(flat, (0, share * world_size - flat.shape[0]))
    parts = collectives.all_to_all(padded.view(world_size, share), phase=phase)
    total = parts.to(sum_dtype(flat.dtype)).sum(dim=0).to(flat.dtype)
    return collectives.all_gather(total, phase=phase).flatten()[: flat.shape[0]]
