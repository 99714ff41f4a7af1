"""Say which experts a rank holds; cut shares out of whole tensors and put them together again."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeGuard, runtime_checkable

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from epcomm.sharding.expert_tensor import ExpertTensor


@dataclass(frozen=True, kw_only=True)
class ExpertShard:
    """The experts of a whole tensor that a parameter holds, along dimension 0."""

    first_expert: int
    num_local_experts: int
    num_experts: int


@runtime_checkable
class ExpertParameters(Protocol):
    """A module whose own parameters hold one rank's experts."""

    shard: ExpertShard

    def expert_parameters(self) -> Mapping[str, Tensor]:
        """Return the expert parameters by name below the module, as state_dict() names them."""
        ...


def shard_of_rank(*, rank: int, world_size: int, num_experts: int) -> ExpertShard:
    """Return the share of a rank in P experts; W divides P. Local."""
    num_local = num_experts // world_size
    return ExpertShard(
        first_expert=rank * num_local, num_local_experts=num_local, num_experts=num_experts
    )


def logical_experts(shard: ExpertShard) -> range:
    """Return the logical expert of each local expert, by local index.

    Checkpoints have their experts in logical order. All code that cuts shares out of whole tensors,
    or puts whole tensors together, uses this order.
    """
    return range(shard.first_expert, shard.first_expert + shard.num_local_experts)


def cut_share(full: Tensor, shard: ExpertShard) -> Tensor:
    """Return one rank's experts [L, ...] of a whole tensor [P, ...], as a view. Local."""
    experts = logical_experts(shard)
    return full.narrow(0, experts.start, len(experts))


def local_share(full: Tensor, shard: ExpertShard) -> Tensor:
    """Return a copy of one rank's experts, so that the whole tensor can be freed. Local."""
    return cut_share(full.detach(), shard).clone(memory_format=torch.contiguous_format)


def put_together(parts: Tensor, shards: Sequence[ExpertShard]) -> Tensor:
    """Return [P, ...] in logical order from the pieces [W, L, ...] of all ranks. Local."""
    order = [expert for shard in shards for expert in logical_experts(shard)]
    whole = parts.flatten(0, 1)
    if order == list(range(len(order))):
        return whole
    return whole[torch.tensor(order, device=whole.device).argsort()]


def shard_of(parameter: Tensor) -> ExpertShard | None:
    """Return the share that an ExpertTensor holds, or None for any other tensor. Local.

    In groups without a DeviceMesh (MPI), parameters are ordinary tensors. For these, and for
    parameters that FSDP has replaced, see expert_shards().
    """
    if not is_expert_tensor(parameter):
        return None
    mesh = parameter.device_mesh
    return shard_of_rank(
        rank=mesh.get_local_rank(), world_size=mesh.size(), num_experts=parameter.shape[0]
    )


def is_expert_tensor(tensor: object) -> TypeGuard[ExpertTensor]:
    """Return whether `tensor` is an ExpertTensor. Local; imports nothing."""
    # A program that has an ExpertTensor has imported its module; others need not import it.
    module = sys.modules.get("epcomm.sharding.expert_tensor")
    return module is not None and isinstance(tensor, module.ExpertTensor)


def expert_shards(module: nn.Module) -> dict[str, ExpertShard]:
    """Return the shares of a model's expert parameters, by all names of each parameter. Local."""
    found = {}
    for prefix, part in module.named_modules(remove_duplicate=False):
        if isinstance(part, ExpertParameters):
            dot = f"{prefix}." if prefix else ""
            found |= {f"{dot}{name}": part.shard for name in part.expert_parameters()}
    return found


def sharded_parameters(module: nn.Module) -> list[nn.Parameter]:
    """Return the expert-parallel parameters of a model, for optimizers and data parallelism."""
    sharded = _sharded_ids(module)
    return [parameter for parameter in module.parameters() if id(parameter) in sharded]


def replicated_parameters(module: nn.Module) -> list[nn.Parameter]:
    """Return the parameters that every rank holds whole."""
    sharded = _sharded_ids(module)
    return [parameter for parameter in module.parameters() if id(parameter) not in sharded]


def _sharded_ids(module: nn.Module) -> set[int]:
    own = [part for part in module.modules() if isinstance(part, ExpertParameters)]
    ids = {id(tensor) for part in own for tensor in part.expert_parameters().values()}
    return ids | {id(p) for p in module.parameters() if is_expert_tensor(p)}
