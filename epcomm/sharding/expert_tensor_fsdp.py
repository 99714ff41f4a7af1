"""Refuse calls of torch's fully_shard that ExpertTensors do not allow, before FSDP changes a model.

FSDP cuts parameters one after the other. It refuses experts by an error that names no parameter,
after it has cut the parameters before them. But first FSDP compares the device of all parameters
with its own device, and an ExpertTensor notices that. There is no public way to find the mesh and
the other parameters at that point, so they are read from the frames of the callers. With a release
of torch that names these variables otherwise, this check passes, and FSDP raises its own errors.
"""

from __future__ import annotations

from types import FrameType
from typing import TYPE_CHECKING

from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from epcomm.errors import ConfigError
from epcomm.sharding.shards import ExpertParameters, is_expert_tensor

if TYPE_CHECKING:
    from epcomm.sharding.expert_tensor import ExpertTensor

# The function of FSDP that looks at all parameters first; its local variable `params` holds them.
LOOKS_AT_DEVICES = "_move_states_to_device"
# fully_shard calls LOOKS_AT_DEVICES directly or through one other function.
_NUM_CALLERS = 3


def check_fully_shard(tensor: ExpertTensor, caller: FrameType) -> None:
    """Refuse parameters that FSDP cannot cut, or would reduce over too few ranks. Local.

    Args:
        tensor: one of the parameters that FSDP is to cut.
        caller: the frame that runs LOOKS_AT_DEVICES.

    Raises:
        ConfigError: the experts are placed; the mesh joins ranks that hold different experts; or it
            joins ranks with copies of the experts, and parameters that are no experts came too,
            though each rank has its own tokens.
    """
    parameters = caller.f_locals.get("params")
    frame, mesh, modules = caller.f_back, None, None
    for _ in range(_NUM_CALLERS):
        if frame is None or isinstance(mesh, DeviceMesh):
            break
        mesh, modules = frame.f_locals.get("mesh"), frame.f_locals.get("module")
        frame = frame.f_back
    if not isinstance(mesh, DeviceMesh) or not isinstance(parameters, list):
        return
    own, others = tensor.device_mesh, [p for p in parameters if not is_expert_tensor(p)]
    expert_ranks, ranks = _ranks(own), _ranks(mesh)
    where = f"rank {own.get_local_rank()} of {own.size()}"
    if tensor.shard is not None:
        raise ConfigError(
            f"fully_shard: an expert parameter of {list(tensor.shape)} came, whose experts a "
            "placement may move, and FSDP's pieces would neither move with it nor be saved in the "
            f"order of the model ({where}); set EPConfig.redundant_experts to None, or pass "
            "ignored_params=set(epcomm.sharding.shards.sharded_parameters(model))"
        )
    if len(set(expert_ranks) & set(ranks)) > 1:
        raise ConfigError(
            f"fully_shard: an expert parameter of {list(tensor.shape)} came, of which ranks "
            f"{expert_ranks} hold different experts, with a mesh of ranks {ranks} ({where}); on a "
            "model built anew call epcomm.training.gradients.scale_expert_gradients(model, "
            f"1 / {mesh.size()}), then fully_shard(model, ignored_params=set("
            "epcomm.sharding.shards.sharded_parameters(model)))"
        )
    if len(expert_ranks) > 1 and others and not _share_tokens(modules):
        raise ConfigError(
            f"fully_shard: {len(others)} ordinary parameters came together with experts and a mesh "
            f"of ranks {ranks}, which hold the same experts, so that nothing would reduce these "
            f"parameters over ranks {expert_ranks} ({where}); on a model built anew call "
            "fully_shard with this mesh for each ExpertParallelExperts alone, then "
            "fully_shard(model) over all ranks"
        )


def _ranks(mesh: DeviceMesh) -> list[int]:
    return mesh.mesh.flatten().tolist()


def _share_tokens(modules: object) -> bool:
    """Return whether the configuration of a layer says that all ranks have the same tokens."""
    roots = modules if isinstance(modules, list | tuple) else [modules]
    parts = [part for root in roots if isinstance(root, nn.Module) for part in root.modules()]
    layers = [part for part in parts if isinstance(part, ExpertParameters)]
    configs = [getattr(layer, "config", None) for layer in layers]
    return any(getattr(config, "replicated", False) for config in configs)
