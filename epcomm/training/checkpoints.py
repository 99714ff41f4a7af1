"""Gather and load the state of a model with whole expert tensors."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from epcomm.errors import ShapeError
from epcomm.group import EPGroup
from epcomm.sharding.shards import ExpertShard, expert_shards, is_expert_tensor, put_together


def gather_state_dict(module: nn.Module, group: EPGroup) -> dict[str, Tensor]:
    """Return the state of `module` with whole expert tensors, as the unsharded model has it.

    Returns:
        Detached tensors; expert tensors are [E, ...] and owned by the caller, other tensors share
        the memory of the module.

    Collective: yes, one all-gather an expert parameter.   Host sync: as the transport.
    """
    shards = expert_shards(module)
    state = {}
    for name, tensor in module.state_dict().items():
        shard, tensor = shards.get(name), tensor.detach()
        if shard is None or not _is_own_share(tensor, shard):
            state[name] = _whole(tensor)
            continue
        local = tensor._local_tensor if is_expert_tensor(tensor) else tensor
        parts = group.collectives.all_gather(local.contiguous(), phase="gather_state_dict")
        state[name] = put_together(parts, shard)
    return state


def _is_own_share(tensor: Tensor, shard: ExpertShard) -> bool:
    if is_expert_tensor(tensor):
        return True
    return not hasattr(tensor, "full_tensor") and tensor.shape[0] == shard.num_local_experts


def _whole(tensor: Tensor) -> Tensor:
    """Return a tensor whole: gather a DTensor, which FSDP has cut. Collective for DTensors."""
    gather = getattr(tensor, "full_tensor", None)
    return tensor if gather is None else gather()


def load_full_state_dict(
    module: nn.Module, state: Mapping[str, Tensor], *, strict: bool = True
) -> None:
    """Load whole tensors, cutting this rank's experts and the shards of FSDP out of them. Local.

    Args:
        module: the module whose parameters and buffers are written.
        state: whole tensors by name, as the unsharded model has them.
        strict: `state` must have all tensors of the module; False: any of them, so that a large
            checkpoint may come one tensor at a time.

    Raises:
        ShapeError: an expert tensor does not hold all E experts.
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
    """Distribute a whole tensor as FSDP cut its parameter; a layer's hook cuts the experts."""
    if not hasattr(parameter, "device_mesh") or hasattr(value, "device_mesh"):
        return value
    if is_expert_tensor(parameter):
        return value
    from torch.distributed.tensor import distribute_tensor

    # No rank sends, because each has the whole tensor.
    mesh, placements = parameter.device_mesh, parameter.placements  # type: ignore[union-attr]
    return distribute_tensor(value.detach(), mesh, placements, src_data_rank=None)
