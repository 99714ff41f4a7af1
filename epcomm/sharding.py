"""Expert parameters live on one rank each: how they are tagged, gathered and cut out again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from epcomm.errors import ShapeError
from epcomm.group import EPGroup

_TAG = "epcomm_shard"


@dataclass(frozen=True, kw_only=True)
class ExpertShard:
    """Which experts of the whole tensor a parameter holds, along dimension 0."""

    first_expert: int
    num_local_experts: int
    num_experts: int


def tag_as_sharded(parameter: Tensor, shard: ExpertShard) -> None:
    """Mark a parameter as one rank's share, so that data parallelism leaves it alone."""
    setattr(parameter, _TAG, shard)


def shard_of(parameter: Tensor) -> ExpertShard | None:
    """The share that a parameter holds, or None if it is no expert-parallel parameter."""
    return getattr(parameter, _TAG, None)


def gather_state_dict(module: nn.Module, group: EPGroup) -> dict[str, Tensor]:
    """The state of `module` with whole expert tensors, as the unsharded model would have it.

    Returns:
        Detached tensors; expert tensors are [P, ...] and owned by the caller, the others alias.

    Collective: yes, one all-gather an expert parameter.   Host sync: as the transport.
    """
    state = {name: _whole(tensor.detach()) for name, tensor in module.state_dict().items()}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        if shard_of(parameter) is not None:
            parts = group.collectives.all_gather(
                parameter.detach().contiguous(), phase="gather_state_dict"
            )
            state[name] = parts.flatten(0, 1)
    return state


def _whole(tensor: Tensor) -> Tensor:
    """What FSDP has cut into DTensors, whole again. Collective for those."""
    gather = getattr(tensor, "full_tensor", None)
    return tensor if gather is None else gather()


def load_full_state_dict(module: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Load whole tensors, cutting out this rank's experts. Local.

    Raises:
        ShapeError: an expert tensor does not hold all P experts.
        RuntimeError: missing or unexpected names, as nn.Module.load_state_dict.
    """
    cut = dict(state)
    for name, parameter in module.named_parameters(remove_duplicate=False):
        shard = shard_of(parameter)
        if shard is None or name not in cut:
            continue
        if cut[name].shape[0] != shard.num_experts:
            raise ShapeError(
                f"load_full_state_dict: {name} holds {cut[name].shape[0]} experts, expected all "
                f"{shard.num_experts}; gather the state first"
            )
        cut[name] = cut[name].narrow(0, shard.first_expert, shard.num_local_experts)
    module.load_state_dict(cut)


def sharded_parameters(module: nn.Module) -> list[nn.Parameter]:
    """The expert-parallel parameters of a model, for optimizers and data parallelism."""
    return [parameter for parameter in module.parameters() if shard_of(parameter) is not None]


def replicated_parameters(module: nn.Module) -> list[nn.Parameter]:
    """The parameters that every rank holds whole."""
    return [parameter for parameter in module.parameters() if shard_of(parameter) is None]


def local_share(full: Tensor, shard: ExpertShard) -> Tensor:
    """A copy of one rank's experts, so that the whole tensor can be freed."""
    share = full.detach().narrow(0, shard.first_expert, shard.num_local_experts)
    return share.clone(memory_format=torch.contiguous_format)
