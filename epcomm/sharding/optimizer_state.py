"""Check before each optimizer step that the state of expert parameters is this rank's part.

torch asks no parameter when an optimizer loads a state, and torch.load() returns plain DTensors for
ExpertTensors. The first step after loading turns them into ExpertTensors again, or refuses them.
"""

from __future__ import annotations

from functools import cache

from torch.distributed.tensor import DTensor
from torch.optim import LBFGS, Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from epcomm.errors import ConfigError, ShapeError
from epcomm.sharding.expert_tensor import ExpertTensor
from epcomm.sharding.state_hooks import part_of


@cache
def watch_optimizers() -> RemovableHandle:
    """Check the state of every optimizer of this process before each step from now on. Local."""
    return register_optimizer_step_pre_hook(_before_step)


def _before_step(optimizer: Optimizer, args: object, kwargs: object) -> None:
    for group in optimizer.param_groups:
        experts = [p for p in group["params"] if isinstance(p, ExpertTensor)]
        if 0 < len(experts) < len(group["params"]) and isinstance(optimizer, LBFGS):
            raise ConfigError(
                f"{type(optimizer).__name__}.step: its parameters are {len(experts)} expert "
                f"parameters and {len(group['params']) - len(experts)} others "
                f"({_where(experts[0])}), of which it makes one vector, but no rank holds all; "
                "give it epcomm.sharding.shards.replicated_parameters(model), and "
                "sharded_parameters(model) to another optimizer"
            )
        for parameter in experts:
            _take_own(optimizer, parameter)


def _take_own(optimizer: Optimizer, parameter: ExpertTensor) -> None:
    """Replace the DTensors of a loaded state by ExpertTensors that share their memory.

    Raises:
        ShapeError: a DTensor is the part of another rank, or of another number of ranks.
        ConfigError: the experts were moved, and the state was not.
    """
    state = optimizer.state.get(parameter, {})
    for name, value in state.items():
        if not isinstance(value, DTensor):
            continue
        if isinstance(value, ExpertTensor):
            if value.shard is not parameter.shard and value.shard != parameter.shard:
                raise ConfigError(
                    f"{type(optimizer).__name__}.step: {name} of an expert parameter of "
                    f"{list(parameter.shape)} is of another placement than the parameter "
                    f"({_where(parameter)}); call rebalance(placement, optimizer) with this "
                    "optimizer"
                )
            continue
        saved, own = part_of(value), part_of(parameter)
        if saved != own or value.shape[0] != parameter.shape[0]:
            raise ShapeError(
                f"{type(optimizer).__name__}.step: {name} of an expert parameter of "
                f"{list(parameter.shape)} is the part of {list(value.shape)} that rank {saved[0]} "
                f"of {saved[1]} saved as {list(saved[2])}, expected that of rank {own[0]} of "
                f"{own[1]} ({_where(parameter)}); load the state that this rank saved, or load by "
                "torch.distributed.checkpoint, which puts the parts together"
            )
        state[name] = parameter.like_self(value.to_local())


def _where(parameter: ExpertTensor) -> str:
    return f"rank {parameter.device_mesh.get_local_rank()} of {parameter.device_mesh.size()}"
