"""Refuse expert parameters in DistributedDataParallel before it changes or reduces a value.

Its C++ code knows no DTensors: depending on its arguments it fails by the name of an operator, or
trains with gradients from memory that nothing wrote. But first its constructor asks all parameters
for their device, and an ExpertTensor notices that. With a release of torch that asks no more, this
check passes.
"""

from __future__ import annotations

from types import FrameType
from typing import TYPE_CHECKING

import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from epcomm.errors import ShapeError

if TYPE_CHECKING:
    from epcomm.sharding.expert_tensor import ExpertTensor

# The code that asks: a set comprehension, before Python 3.12 a frame of its own, in __init__().
_COMPREHENSION = "<setcomp>"
ASKS_FOR_DEVICES = ("__init__", _COMPREHENSION)


def check_ddp(tensor: ExpertTensor, caller: FrameType) -> None:
    """Refuse a parameter that DistributedDataParallel was not told to leave alone. Local.

    Args:
        tensor: the parameter.
        caller: a frame that asked for its device, of a name in ASKS_FOR_DEVICES.

    Raises:
        ShapeError: the caller is the constructor of DistributedDataParallel.
    """
    frame = caller.f_back if caller.f_code.co_name == _COMPREHENSION else caller
    wrapper = frame.f_locals.get("self") if frame is not None else None
    if frame is None or not isinstance(wrapper, DistributedDataParallel):
        return
    parameters = frame.f_locals["module"].named_parameters()
    name = next((name for name, parameter in parameters if parameter is tensor), "one")
    num_ranks, mesh = dist.get_world_size(wrapper.process_group), tensor.device_mesh
    raise ShapeError(
        f"DistributedDataParallel was given expert parameters, such as {name} {list(tensor.shape)},"
        f" of which each of {mesh.size()} ranks holds other experts (rank {mesh.get_local_rank()} "
        f"of {mesh.size()}); before it call epcomm.training.gradients.ignore_experts_in_ddp(model) "
        f"and scale_expert_gradients(model, 1 / {num_ranks}), or, for transformers' Trainer, "
        "epcomm.integrations.transformers.prepare_trainer(trainer)"
    )
