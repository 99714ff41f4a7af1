"""Code that all programs of this folder share: ranks, clocks of one GPU, reports.

Programs of several ranks time calls by epcomm.bench.turns. Programs of one GPU time each call
alone, as a captured graph and with a cold cache, and compare it with a copy in the same run.
"""

import json
import shlex
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
import torch.distributed as dist
import typer

from epcomm import ConfigError
from epcomm.bench.check import CheckError
from epcomm.bench.machine import describe_hardware, describe_versions
from epcomm.bench.ranks import join_ranks
from epcomm.bench.timing import Clock, Percentiles, captured

# 256 MiB: several times the cache of any GPU, so that writing it leaves nothing else there.
_FLUSH_BYTES = 256 * 2**20
# 1 GiB: long enough that the launch does not count, and larger than every cache.
_COPY_BYTES = 2**30


@dataclass(frozen=True, kw_only=True)
class Output:
    """The option of every program: the file of its report."""

    output: Annotated[Path | None, typer.Option(help="Write the report there, as JSON.")] = None


@contextmanager
def ranks_of_torchrun() -> Iterator[torch.device]:
    """Join the ranks of torchrun and yield this rank's device; a failed check ends the program.

    Collective: yes.
    """
    join_ranks()
    try:
        with torch.no_grad():
            yield device_of_rank()
    except (CheckError, ConfigError) as error:
        sys.exit(str(error))
    finally:
        dist.destroy_process_group()


def device_of_rank() -> torch.device:
    """Return the device of the process group: the current GPU over nccl, else the CPU."""
    if dist.get_backend() == "nccl":
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def gpu_of(program: str) -> torch.device:
    """Return the current GPU; without one the program ends."""
    if not torch.cuda.is_available():
        sys.exit(f"{program}: no CUDA device; its kernels are measured on a GPU only")
    return torch.device("cuda", torch.cuda.current_device())


def time_cold(call: Callable[[], object], device: torch.device, num_calls: int) -> Percentiles:
    """Return milliseconds of a call, each alone and after the cache was overwritten.

    The call is captured, because a launch from Python would start after the GPU is ready.
    """
    flush = torch.empty(_FLUSH_BYTES, dtype=torch.uint8, device=device)
    graph, laps = captured(call), []
    for _ in range(num_calls):
        flush.zero_()
        clock = Clock(device)
        clock.mark()
        graph.replay()
        clock.mark()
        laps += clock.take()
    return Percentiles.of(laps)


def time_copy(num_bytes: int, device: torch.device, num_calls: int) -> Percentiles:
    """Return milliseconds of a copy that reads and writes `num_bytes` together, cache cold."""
    source = torch.ones(num_bytes // 2, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return time_cold(lambda: target.copy_(source), device, num_calls)


def copy_rate(device: torch.device, num_calls: int) -> float:
    """Return the GB/s that a long device-to-device copy reads and writes."""
    source = torch.ones(_COPY_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    target.copy_(source)
    clock = Clock(device)
    for _ in range(num_calls + 1):
        clock.mark()
        target.copy_(source)
    return 2 * _COPY_BYTES / statistics.median(clock.take()) / 1e6


def command_of(module: str) -> str:
    """Return the command that has started this module: by torchrun where there are ranks."""
    start = ["python", "-m", module]
    if dist.is_initialized():
        start = ["torchrun", "--nproc-per-node", str(dist.get_world_size()), "-m", module]
    return shlex.join([*start, *sys.argv[1:]])


def report_of(
    benchmark: str, configuration: Mapping[str, object], device: torch.device, module: str
) -> dict[str, object]:
    """Return a report with the conditions of a measurement, to which the numbers are added.

    module: the program.
    """
    ranks = {"ranks": dist.get_world_size()} if dist.is_initialized() else {}
    return {
        "benchmark": benchmark,
        "configuration": {**configuration, **ranks},
        "hardware": describe_hardware(device),
        "versions": describe_versions(device),
        "command": command_of(module),
    }


def write_report(report: Mapping[str, object], output: Output) -> None:
    """Write a report as JSON on rank 0, and make its folder; without a path do nothing."""
    path = output.output
    if path is None or (dist.is_initialized() and dist.get_rank() != 0):
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(rounded(report), indent=2) + "\n", encoding="utf-8")


def rounded(report: Mapping[str, object]) -> dict[str, object]:
    """Round all numbers to four digits after the point, below what any clock here resolves."""
    return {key: _rounded_value(value) for key, value in report.items()}


def _rounded_value(value: object) -> object:
    if isinstance(value, float):
        return round(value, 4)
    if isinstance(value, Mapping):
        return rounded(value)
    if isinstance(value, list | tuple):
        return [_rounded_value(each) for each in value]
    return value
