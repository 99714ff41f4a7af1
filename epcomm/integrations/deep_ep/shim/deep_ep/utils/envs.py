"""The module deep_ep.utils.envs: how DeepEP's tests start their ranks, on CPUs too.

Source: deepseek-ai/DeepEP, deep_ep/utils/envs.py, for names, arguments and results.
"""

from __future__ import annotations

import random

import torch
import torch.distributed as dist

from epcomm.config import environment

from .. import get_logical_domain_size, get_physical_domain_size

__all__ = [
    "check_nvlink_connections",
    "check_torch_deterministic",
    "dist_print",
    "get_global_seed",
    "get_local_seed",
    "get_logical_domain_size",
    "get_physical_domain_size",
    "init_dist",
    "init_seed",
]


def init_dist(
    local_rank: int, num_local_ranks: int, seed: int = 0
) -> tuple[int, int, dist.ProcessGroup]:
    """Start the default process group; return rank, number of ranks and a group of all.

    MASTER_ADDR, MASTER_PORT, WORLD_SIZE (the number of hosts) and RANK (of this host) are read.
    With GPUs the backend is nccl and the default device of torch the GPU of this rank, else gloo
    and the CPU. The default dtype of torch becomes bfloat16, as in DeepEP.

    Process-wide. Collective: yes.
    """
    variables = environment()
    host = int(variables.get("RANK", 0))
    address = f"{variables.get('MASTER_ADDR', '127.0.0.1')}:{variables.get('MASTER_PORT', 8361)}"
    has_gpus = torch.cuda.is_available()
    dist.init_process_group(
        "nccl" if has_gpus else "gloo",
        init_method=f"tcp://{address}",
        world_size=int(variables.get("WORLD_SIZE", 1)) * num_local_ranks,
        rank=host * num_local_ranks + local_rank,
        device_id=torch.device("cuda", local_rank) if has_gpus else None,
    )
    torch.set_default_dtype(torch.bfloat16)
    if has_gpus:
        torch.cuda.set_device(local_rank)
        torch.set_default_device("cuda")
    init_seed(seed)
    group = dist.new_group(list(range(dist.get_world_size())))
    assert isinstance(group, dist.ProcessGroup), "this rank is a member"
    return dist.get_rank(), dist.get_world_size(), group


def init_seed(global_seed: int) -> None:
    """Seed torch and random with global_seed + rank."""
    torch.manual_seed(global_seed + dist.get_rank())
    random.seed(global_seed + dist.get_rank())


def get_local_seed() -> int:
    """Return the seed of this rank."""
    return torch.initial_seed()


def get_global_seed() -> int:
    """Return the seed that init_seed() was called with."""
    return torch.initial_seed() - dist.get_rank()


def dist_print(s: str = "", once_in_node: bool = False) -> None:
    """Print on every rank, or on rank 0 of the host alone, and wait for all ranks.

    Collective: yes.
    """
    if not once_in_node or dist.get_rank() == 0:
        print(s, flush=True)  # noqa: T201 - what it is for
    dist.barrier()


def check_nvlink_connections(group: dist.ProcessGroup) -> None:
    """Do nothing: a Buffer checks how its GPUs are connected when it opens."""
    del group


def check_torch_deterministic() -> None:
    """Do nothing: the calls allow torch to fill new memory."""
