"""Correct gradients under expert parallelism: sums over ranks, factors, norms.

An expert has seen the tokens of all ranks of its group, so when backward ends its gradients are the
sum over the losses of these ranks. Every other parameter is replicated and has seen only the rank's
own tokens. docs/training.md covers DDP and FSDP.
"""

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from epcomm.errors import ConfigError, grouped
from epcomm.experts import ExpertParallelExperts
from epcomm.group import EPGroup
from epcomm.placement.expert_placement import ExpertPlacement
from epcomm.sharding import shards
from epcomm.types import sum_dtype


def sum_replicated_gradients(model: nn.Module, group: EPGroup) -> None:
    """Add the gradients of replicated parameters over the ranks, where no DDP does.

    Afterwards all gradients are gradients of the sum of the losses of all ranks; divide each loss
    by the number of ranks, or of all tokens, for a mean. A missing gradient counts as zero.

    Collective: yes, two messages a dtype.   Host sync: as the transport.
    Raises:
        ConfigError: a gradient is a DTensor, which FSDP has reduced already.
    """
    parameters = [p for p in shards.replicated_parameters(model) if p.requires_grad]
    if any(isinstance(parameter, DTensor) for parameter in parameters):
        raise ConfigError(
            "sum_replicated_gradients: a parameter is a DTensor, whose gradients FSDP reduces "
            f"itself ({group.where}); leave the call out"
        )
    _sum_gradients(parameters, group, phase="sum_replicated_gradients")


def _sum_gradients(parameters: Iterable[nn.Parameter], group: EPGroup, *, phase: str) -> None:
    for same in grouped((parameter.dtype, parameter) for parameter in parameters).values():
        flat = torch.cat([_local_gradient(parameter).flatten() for parameter in same])
        # Reduce-scatter and all-gather: the sums are bit-equal on all ranks.
        size, world_size, collectives = flat.shape[0], group.world_size, group.collectives
        padded = torch.nn.functional.pad(flat, (0, -size % world_size))
        padded = padded.view(world_size, padded.shape[0] // world_size)
        parts = collectives.all_to_all(padded, phase=phase)
        total = parts.to(sum_dtype(flat.dtype)).sum(dim=0).to(flat.dtype)
        total = collectives.all_gather(total, phase=phase).flatten()[:size]
        sizes = [shards.piece_of(parameter).numel() for parameter in same]
        for parameter, part in zip(same, total.split(sizes), strict=True):
            _set_gradient(parameter, part)


def scale_expert_gradients(model: nn.Module, factor: float) -> None:
    """Multiply the gradients of every expert parameter by `factor` at the end of each backward.

    With DDP, which takes the mean over its W ranks, the factor is 1 / W: an expert's gradient is
    a sum over the same ranks. Gradients that add up over several backwards are each scaled once.
    Parameters that are replaced later are scaled too. For parametrised experts, the gradient of the
    original parameter is scaled, and the gradients of the parametrisation are not: adapters of LoRA
    are reduced like any parameter.

    Local; call it once after construction, and after parametrising.
    """
    for layer in model.modules():
        if isinstance(layer, ExpertParallelExperts):
            layer.scale_gradients(factor)


def ignore_experts_in_ddp(model: nn.Module) -> None:
    """Make DistributedDataParallel(model) ignore the expert parameters. Local.

    Call it on the module that DDP will wrap, before wrapping. Otherwise DDP would send the experts
    of rank 0 to all ranks, or raise an error for ExpertTensors. Parameters that were ignored before
    stay ignored.
    """
    # torch keeps the ignored names in this attribute and has no public function to extend it.
    ignored = set(getattr(model, "_ddp_params_and_buffers_to_ignore", ()))
    sharded = {id(parameter) for parameter in shards.sharded_parameters(model)}
    ignored |= {
        name
        for name, parameter in model.named_parameters(remove_duplicate=False)
        if id(parameter) in sharded
    }
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, sorted(ignored))


def sum_expert_gradients(model: nn.Module, copies: EPGroup) -> None:
    """Add the gradients of expert parameters over the ranks that hold copies of the same experts.

    Several expert groups need this call, because each group's experts have seen only the tokens of
    their group. Then pass sum_replicated_gradients() the group of all ranks.

    copies: the ranks that hold the same experts, one of each expert group.

    Collective: yes, two messages a dtype.   Host sync: as the transport.
    """
    parameters = [p for p in shards.sharded_parameters(model) if p.requires_grad]
    _sum_gradients(parameters, copies, phase="sum_expert_gradients")


def sum_replica_gradients(model: nn.Module) -> None:
    """Add the gradients of the copies of an expert, over the ranks of its layer that hold them.

    Every copy has seen a part of the tokens. Layers whose placement has several copies of an expert
    need this call after backward, before norms and steps: added in the order of ranks, gradients of
    copies are equal to the bit, and so the copies stay equal. A missing gradient counts as zero.

    Collective: yes, one message a parameter of a layer with copies.   Host sync: yes.
    """
    for layer in model.modules():
        if isinstance(layer, ExpertParallelExperts) and layer.placement is not None:
            _sum_over_copies(layer, layer.placement)


def _sum_over_copies(layer: ExpertParallelExperts, placement: ExpertPlacement) -> None:
    if placement.num_physical_experts == placement.num_experts:
        return
    held = placement.experts_of_rank(layer.group.rank)
    copied = [place for place, expert in enumerate(held) if len(placement.replicas[expert]) > 1]
    copied.sort(key=held.__getitem__)
    # For each rank, the local experts of which it also has copies, in the order of logical ids.
    # Their gradients are sent to the rank and received from it.
    shared = [
        [place for place in copied if held[place] in placement.experts_of_rank(rank)]
        for rank in range(placement.num_ranks)
    ]
    splits = [len(places) for places in shared]
    for parameter in layer.expert_parameters().values():
        if isinstance(parameter, nn.Parameter) and parameter.requires_grad:
            gradient = _local_gradient(parameter)
            sent = [place for places in shared for place in places]
            index = torch.tensor(sent, dtype=torch.int64, device=gradient.device)
            came = layer.group.collectives.all_to_all(
                gradient.index_select(0, index),
                send_splits=splits,
                recv_splits=splits,
                phase="sum_replica_gradients",
            )
            total = torch.zeros_like(gradient, dtype=sum_dtype(gradient.dtype))
            for places, part in zip(shared, came.split(splits), strict=True):
                total[places] += part
            gradient[copied] = total[copied].to(gradient.dtype)
            _set_gradient(parameter, gradient)


def clip_grad_norm(model: nn.Module, group: EPGroup | None, max_norm: float) -> Tensor:
    """Scale all gradients so that their norm, with the experts of all ranks, is max_norm at most.

    Call it when replicated gradients are equal on all ranks. For DTensors, which FSDP and models
    loaded by transformers hold, it adds up the squares over all ranks.

    group: the ranks that share the experts; None for a model that transformers loaded.

    Returns: the norm before scaling, a float32 scalar, equal on all ranks.

    Collective: yes.   Host sync: as the transport.
    """
    gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
    square = _square_of(shards.replicated_parameters(model), next(model.parameters()).device)
    experts = shards.sharded_parameters(model)
    if group is not None:
        own = _square_of(
            [p for p in experts if not shards.is_cut_by_fsdp(p)], group.collectives.device
        )
        square = square + group.collectives.all_gather(own, phase="clip_grad_norm").sum()
        square = square + _square_of(
            [p for p in experts if shards.is_cut_by_fsdp(p)], square.device
        )
    norm = square.sqrt()
    # 1e-6 guards against gradients of zero, as in torch.nn.utils.clip_grad_norm_.
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for gradient in gradients:
        shards.piece_of(gradient).detach().mul_(factor)
    return norm


def _square_of(parameters: Iterable[nn.Parameter], device: torch.device) -> Tensor:
    """Sum the squares of gradients, of DTensors that are not ExpertTensors over all ranks."""
    total = torch.zeros((), dtype=torch.float32, device=device)
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is not None:
            if shards.is_expert_tensor(gradient):
                gradient = shards.counted_once(gradient).detach()
            square = gradient.float().square().sum()
            total = total + (square.full_tensor() if isinstance(square, DTensor) else square)
    return total


def _local_gradient(parameter: nn.Parameter) -> Tensor:
    if parameter.grad is None:
        return torch.zeros_like(shards.piece_of(parameter))
    return shards.piece_of(parameter.grad).detach()


def _set_gradient(parameter: nn.Parameter, gradient: Tensor) -> None:
    if isinstance(parameter, DTensor) and parameter.grad is not None:
        shards.piece_of(parameter.grad).detach().copy_(gradient.view_as(shards.piece_of(parameter)))
    elif shards.is_expert_tensor(parameter):
        parameter.grad = parameter.like_self(gradient.view_as(shards.piece_of(parameter)))
    else:
        parameter.grad = gradient.view_as(parameter)
