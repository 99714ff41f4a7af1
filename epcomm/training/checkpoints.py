"""Gather and load the state of a model with whole expert tensors."""

from collections.abc import Mapping

from torch import Tensor, nn

from epcomm.errors import ShapeError
from epcomm.group import EPGroup
from epcomm.sharding import shards


def gather_state_dict(module: nn.Module, group: EPGroup) -> dict[str, Tensor]:
    """Return the state of `module` with whole expert tensors, as the unsharded model has it.

    Returns: detached tensors; expert tensors are [E, ...] and owned by the caller, other tensors
        share the memory of the module.

    Collective: yes, one all-gather an expert parameter.   Host sync: as the transport.
    """
    shard_of, state = shards.expert_shards(module), {}
    for name, tensor in module.state_dict().items():
        shard, tensor = shard_of.get(name), tensor.detach()
        is_plain = not hasattr(tensor, "full_tensor")
        is_share = is_plain and shard is not None and tensor.shape[0] == shard.num_local_experts
        if shard is not None and (is_share or shards.is_expert_tensor(tensor)):
            local = shards.piece_of(tensor).contiguous()
            parts = group.collectives.all_gather(local, phase="gather_state_dict")
            state[name] = shards.put_together(parts, shard)
        else:
            # FSDP has cut other DTensors.
            state[name] = tensor if is_plain else tensor.full_tensor()  # type: ignore[operator]
    return state


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
    for name, shard in shards.expert_shards(module).items():
        if name not in state:
            continue
        value = state[name]
        num_experts = (value.to_local() if shards.is_expert_tensor(value) else value).shape[0]
        if num_experts != shard.num_experts:
            raise ShapeError(
                f"load_full_state_dict: {name} holds {num_experts} experts, expected all "
                f"{shard.num_experts}; gather the state first"
            )
    fitting = dict(state)
    for name, parameter in module.named_parameters(remove_duplicate=False):
        # A layer's hook cuts the experts out.
        is_whole = name in state and not hasattr(state[name], "device_mesh")
        if is_whole and shards.is_cut_by_fsdp(parameter):
            fitting[name] = shards.cut_as(state[name], parameter)
    module.load_state_dict(fitting, strict=strict)
