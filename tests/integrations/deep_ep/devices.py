"""The device of tensors in tests of the drop-in: the GPU of the rank, if it has one.

    MULTI_RANK_BACKEND=gloo_on_gpus scripts/launch_multi_rank.sh 4 tests/integrations/deep_ep

runs them on the GPUs of this machine, four ranks on two of them too; `nccl` where each rank has a
GPU of its own. Buffers are then those that the drop-in chooses for GPUs.
"""

import os

import torch
import torch.distributed as dist

from tests.multi_rank import BACKEND_ENV, GPU_BACKENDS


def on_gpus() -> bool:
    return os.environ.get(BACKEND_ENV) in GPU_BACKENDS


def here() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device()) if on_gpus() else torch.device("cpu")


def world() -> dist.ProcessGroup:
    assert dist.group.WORLD is not None
    return dist.group.WORLD
