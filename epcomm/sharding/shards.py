"""Which experts a rank holds: shares of whole tensors, cut out and put together again."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeGuard, runtime_checkable

import torch
from torch import Tensor, nn

from epcomm.errors import ShapeError
from epcomm.group import EPGroup

if TYPE_CHECKING:
    from epcomm.sharding.expert_tensor import ExpertTensor


@dataclass(frozen=True, kw_only=True)
class ExpertShard:
    """Which experts of the whole tensor a parameter holds, along dimension 0."""

    first_expert: int
    num_local_experts: int
    num_experts: int


@runtime_checkable
class ExpertParameters(Protocol):
    """A module whose own parameters hold one rank's experts."""

    shard: ExpertShard

    def expert_parameters(self) -> Mapping[str, Tensor]:
        """By name below the module, as named_parameters() and state_dict() have it."""
        ...


def shard_of_rank(*, rank: int, world_size: int, num_experts: int) -> ExpertShard:
    """Return what a rank holds of P experts; W divides P. Local."""
    num_local = num_experts // world_size
    return ExpertShard(
        first_expert=rank * num_local, num_local_experts=num_local, num_experts=num_experts
    )


def logical_experts(shard: ExpertShard) -> range:
    """Return the logical expert that each local expert is, by local index.

    Checkpoints have their experts in logical order. Everything that cuts shares out of whole
    tensors, or puts whole tensors together, asks here.
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

    Of groups without a DeviceMesh (MPI) parameters are ordinary tensors; for them, and for
    parameters that FSDP has replaced, see expert_shards().
    """
    if not is_expert_tensor(parameter):
        return None
    mesh = parameter.device_mesh
    return shard_of_rank(
        rank=mesh.get_local_rank(), world_size=mesh.size(), num_experts=parameter.shape[0]
    )


def is_expert_tensor(tensor: object) -> TypeGuard[ExpertTensor]:
    """Whether `tensor` is an ExpertTensor. Local; imports nothing."""
    # Who has one has imported its module; others need not wait for it.
    module = sys.modules.get("epcomm.sharding.expert_tensor")
    return module is not None and isinstance(tensor, module.ExpertTensor)


def expert_shards(module: nn.Module) -> dict[str, ExpertShard]:
    """Return what each expert parameter of a model holds, by its names. Local."""
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


def gather_state_dict(module: nn.Module, group: EPGroup) -> dict[str, Tensor]:
    """Return the state of `module` with whole expert tensors, as the unsharded model has it.

    Returns:
        Detached tensors; expert tensors are [P, ...] and owned by the caller, the others alias.

    Collective: yes, one all-gather an expert parameter.   Host sync: as the transport.
    """
    shards = expert_shards(module)
    state = {}
    for name, tensor in module.state_dict().items():
        shard, tensor = shards.get(name), tensor.detach()
        if shard is None or not _is_own_share(tensor, shard):
            state[name] = _whole(tensor)
            continue
        local = tensor.to_local() if is_expert_tensor(tensor) else tensor
        parts = group.collectives.all_gather(local.contiguous(), phase="gather_state_dict")
        ranks = range(group.world_size)
        all_shards = [
            shard_of_rank(rank=rank, world_size=len(ranks), num_experts=shard.num_experts)
            for rank in ranks
        ]
        state[name] = put_together(parts, all_shards)
    return state


def _is_own_share(tensor: Tensor, shard: ExpertShard) -> bool:
    if is_expert_tensor(tensor):
        return True
    return not hasattr(tensor, "full_tensor") and tensor.shape[0] == shard.num_local_experts


def _whole(tensor: Tensor) -> Tensor:
    """What FSDP has cut into DTensors, whole again. Collective for those."""
    gather = getattr(tensor, "full_tensor", None)
    return tensor if gather is None else gather()


def load_full_state_dict(
    module: nn.Module, state: Mapping[str, Tensor], *, strict: bool = True
) -> None:
    """Load whole tensors, cutting out this rank's experts, and what FSDP has cut. Local.

    Args:
        module: whose parameters and buffers are written.
        state: whole tensors by name, as the unsharded model has them.
        strict: all of them; else as many as `state` has, so that a large checkpoint may come one
            tensor at a time.

    Raises:
        ShapeError: an expert tensor does not hold all P experts.
        RuntimeError: missing or unexpected names, as nn.Module.load_state_dict.
    """
    for name, shard in expert_shards(module).items():
        if name not in state:
            continue
        value = state[name]
        num_experts = value.to_local().shape[0] if is_expert_tensor(value) else value.shape[0]
        if num_experts != shard.num_experts:
            raise ShapeError(
                f"load_full_state_dict: {name} holds {num_experts} experts, expected all "
                f"{shard.num_experts}; gather the state first"
            )
    parameters = dict(module.named_parameters(remove_duplicate=False))
    fitting = {name: _fitting(value, parameters.get(name)) for name, value in state.items()}
    module.load_state_dict(fitting, strict=strict)


def _fitting(value: Tensor, parameter: nn.Parameter | None) -> Tensor:
    """A whole tensor as FSDP's parameters want it; experts are cut by the hook of their layer."""
    if not hasattr(parameter, "device_mesh") or hasattr(value, "device_mesh"):
        return value
    if is_expert_tensor(parameter):
        return value
    from torch.distributed.tensor import distribute_tensor

    # No rank sends: each has the whole.
    mesh, placements = parameter.device_mesh, parameter.placements  # type: ignore[union-attr]
    return distribute_tensor(value.detach(), mesh, placements, src_data_rank=None)
