"""Start ranks on this machine's CPU, or join those that torchrun has started."""

import logging
import os
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import TypeVar

import torch
import torch.distributed as dist

from epcomm.config import environment
from epcomm.errors import ConfigError, EPError

T = TypeVar("T")

# The exit code of a command with bad input.
BAD_INPUT = 2

# 120 s: if a rank fails, the others must not wait for long.
COLLECTIVE_TIMEOUT = timedelta(seconds=120)
# The file to which rank 0 writes the exit code.
_EXIT_CODE = "exit_code"
# Seconds that all ranks but 0 wait before they report an error: most errors are those of all
# ranks, and rank 0 has reported it and ended the run by then.
_PATIENCE_S = 2.0


def ranks_of_environment() -> int | None:
    """Return the number of ranks that torchrun has started; None without torchrun. Local."""
    variables = environment()
    if "RANK" not in variables or "WORLD_SIZE" not in variables:
        return None
    try:
        return int(variables["WORLD_SIZE"])
    except ValueError:
        raise ConfigError(
            f"epcomm bench: WORLD_SIZE is {variables['WORLD_SIZE']!r}, expected a number; start it "
            "under torchrun"
        ) from None


def rank_of_environment() -> int:
    """Return this rank's number under torchrun; 0 without torchrun. Local."""
    text = environment().get("RANK", "0")
    return int(text) if text.isdecimal() else 0


def report_error(error: EPError, rank: int) -> int:
    """Write an error in one line and return the exit code: 2 for bad input, else 1. Local.

    If all ranks have the error, rank 0 writes it first, which ends the run.
    """
    if rank:
        time.sleep(_PATIENCE_S)
    sys.stderr.write(f"{' '.join(str(error).splitlines())}\n")
    sys.stderr.flush()
    return BAD_INPUT if isinstance(error, ConfigError) else 1


def start_ranks(num_ranks: int, work: Callable[[], int]) -> int:
    """Start ranks on the CPU that run `work` over gloo; return its exit code.

    work: a function that can be pickled, and returns the same on all ranks.
    """
    # A large import, which ranks under torchrun do not need.
    from torch.multiprocessing.spawn import ProcessExitedException, ProcessRaisedException, spawn

    log = logging.getLogger("torch.multiprocessing.spawn")
    level = log.level
    # A rank that fails has reported the reason; a message that the others were ended would add
    # nothing.
    log.setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory(prefix="epcomm-bench-") as folder:
        try:
            spawn(_run_rank, (num_ranks, folder, work), nprocs=num_ranks)
            return int(Path(folder, _EXIT_CODE).read_text("utf-8"))
        except ProcessExitedException as ended:
            if ended.exit_code < 0:
                # A signal ended the rank, so it has reported nothing.
                sys.stderr.write(f"epcomm bench: rank {ended.error_index}: {ended}\n")
            return max(ended.exit_code, 1)
        except ProcessRaisedException as raised:
            sys.stderr.write(f"{raised}\n")
            return 1
        finally:
            log.setLevel(level)


def _run_rank(rank: int, num_ranks: int, folder: str, work: Callable[[], int]) -> None:
    # With a thread for each core on every rank, ranks would only wait for one another.
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // num_ranks))
    dist.init_process_group(
        "gloo",
        init_method=Path(folder, "store").as_uri(),
        rank=rank,
        world_size=num_ranks,
        timeout=COLLECTIVE_TIMEOUT,
    )
    code = run_work(work)
    if rank == 0:
        # A nonzero exit code of this process would end the other ranks while they exit.
        Path(folder, _EXIT_CODE).write_text(str(code), encoding="utf-8")


def join_ranks() -> None:
    """Join the ranks of torchrun: over nccl if this host has a GPU for each, else gloo."""
    variables = environment()
    num_local_ranks = int(variables.get("LOCAL_WORLD_SIZE", variables["WORLD_SIZE"]))
    if torch.cuda.device_count() >= num_local_ranks:
        device = torch.device("cuda", int(variables["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", timeout=COLLECTIVE_TIMEOUT, device_id=device)
    else:
        dist.init_process_group("gloo", timeout=COLLECTIVE_TIMEOUT)


def run_work(work: Callable[[], int]) -> int:
    """Run `work` on this rank of the default process group, then leave it; return the exit code.

    An EPError is reported in one line, by rank 0 where all ranks have it.
    """
    rank = dist.get_rank()
    try:
        code = work()
        # Rank 0 has printed by then; the first rank that exits with an error ends the others.
        dist.barrier()
    except EPError as error:
        # destroy_process_group() is left out, because it may wait for ranks that never arrive.
        os._exit(report_error(error, rank))
    dist.destroy_process_group()
    return code


def of_all_ranks(value: T) -> list[T]:
    """Gather the values of all ranks, by rank. Collective: yes."""
    values: list[T | None] = [None] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return [value for value in values if value is not None]


def faults_of_all(fault: str | None) -> str:
    """Return the faults of all ranks in one text, each with its rank; empty if there are none.

    Collective: yes.
    """
    faults = enumerate(of_all_ranks(fault or ""))
    return "; ".join(f"rank {rank}: {found}" for rank, found in faults if found)
