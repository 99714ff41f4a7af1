"""Refuse DDP and FSDP over expert parameters where they would train wrongly.

DDP's C++ code does not support DTensors: it broadcasts the experts of one rank, or reduces
gradients from memory that was not written. A wrapper is refused when it registers its module,
before either.

FSDP refuses a mesh of ranks with different experts. It accepts a mesh over copies of the same
experts, where two uses are wrong; a layer refuses them when it first reads parameters that FSDP has
cut.
"""

from functools import cache

import torch.distributed as dist
from torch import nn
from torch.nn.modules.module import register_module_module_registration_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils.hooks import RemovableHandle

from epcomm.errors import ConfigError, ShapeError
from epcomm.sharding import shards


@cache
def watch_ddp() -> RemovableHandle:
    """Make every DistributedDataParallel built from now on refuse experts. Local."""
    return register_module_module_registration_hook(_check_ddp)


def _check_ddp(wrapper: nn.Module, name: str, module: nn.Module | None) -> None:
    if not isinstance(wrapper, DistributedDataParallel) or module is None:
        return
    left_alone = getattr(module, "_ddp_params_and_buffers_to_ignore", ())
    for name, parameter in module.named_parameters():
        if shards.is_expert_tensor(parameter) and name not in left_alone:
            num_ranks, mesh = dist.get_world_size(wrapper.process_group), parameter.device_mesh
            raise ShapeError(
                f"DistributedDataParallel was given expert parameters, such as {name} "
                f"{list(parameter.shape)}, of which each of {mesh.size()} ranks holds other "
                f"experts (rank {mesh.get_local_rank()} of {mesh.size()}); before wrapping, call "
                "epcomm.training.gradients.ignore_experts_in_ddp(model) and "
                f"scale_expert_gradients(model, 1 / {num_ranks}), or, for transformers' Trainer, "
                "epcomm.integrations.transformers.prepare_trainer(trainer)"
            )


def check_fsdp(layer: shards.ExpertParameters, *, shares_tokens: bool) -> None:
    """Refuse cuts of FSDP with which a layer would train or move wrongly. Local.

    shares_tokens: whether all ranks of the layer's group have the same tokens.
    Raises:
        ConfigError: the experts are placed; or other parameters are cut together with them over
            ranks with copies of the experts, though each rank of a group has its own tokens.
    """
    check_fsdp_of_placed(layer)
    parameter = _cut_parameter(layer)
    if parameter is None or shares_tokens or not _cut_with_others(layer):
        return
    mesh = parameter.device_mesh  # type: ignore[attr-defined]
    raise ConfigError(
        "fully_shard: experts were cut together with ordinary parameters, over ranks with copies "
        "of the experts, so that nothing would reduce the ordinary parameters over ranks "
        f"{mesh.mesh.flatten().tolist()} of {mesh}; on a model built again call fully_shard with "
        "the mesh of the copies for each ExpertParallelExperts alone, then fully_shard(model) over "
        "all ranks"
    )


def check_fsdp_of_placed(layer: shards.ExpertParameters) -> None:
    """Refuse placed experts that FSDP has cut. Local."""
    if layer.shard.physical_to_logical is None:
        return
    parameter = _cut_parameter(layer)
    if parameter is not None:
        raise ConfigError(
            f"fully_shard: an expert parameter of {list(parameter.shape)} was cut, but a placement "
            "may move its experts, and the pieces of FSDP would neither follow nor be saved in the "
            "order of the model; on a model built again set EPConfig.redundant_experts to None, or "
            "pass ignored_params=set(epcomm.sharding.shards.sharded_parameters(model))"
        )


def _cut_parameter(layer: shards.ExpertParameters) -> nn.Parameter | None:
    """Return a parameter that FSDP has replaced an ExpertTensor with, or None."""
    held = layer.expert_parameters().values()
    cut = [each for each in held if isinstance(each, nn.Parameter) and shards.is_cut_by_fsdp(each)]
    return cut[0] if cut else None


def _cut_with_others(layer: shards.ExpertParameters) -> bool:
    from torch.distributed.fsdp import FSDPModule

    if not isinstance(layer, FSDPModule):
        return True  # fully_shard() was called for a module around it
    # torch has no public name for the modules that one call of fully_shard() was given.
    return any(shards.replicated_parameters(root) for root in layer._get_fsdp_state()._modules)
