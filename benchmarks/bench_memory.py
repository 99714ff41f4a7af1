"""Measure one backend beside copies of memory, and with a malloc that keeps the memory it frees.

    torchrun --nproc-per-node 4 -m benchmarks.bench_memory --tokens 1024 --hidden 2048
        --output memory.json

in one line, runs `epcomm bench` for one mode, backend and T. After each of its rounds all ranks
copy rows at the same time. Dispatch and combine are compared with these copies by bytes, counted in
two ways, each used for both sides. Copied: every row that is sent to an expert's rank and every sum
that is returned counts once, also those that a rank sends to itself, and the rate is bytes copied a
second. Touched: a copy reads and writes, so twice the rate; dispatch reads each token once and
writes each row, combine reads the result of each (token, expert) pair, writes and reads each sum,
and writes y. Further reads of a token, counts, indices and flags are not counted.

Worked example, 1 token of 4096 B with K = 8 whose experts are on 3 ranks; a row has ids and
weights, 8 B a pair:

    copied     3 * (4096 + 64) rows + 3 * 4096 sums
    touched    4096 token, 3 * 4160 rows; 8 * 4096 results, 2 * 3 * 4096 sums, 4096 y
"""

from __future__ import annotations

import ctypes
import json
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import torch
import torch.distributed as dist
import typer
from rich.console import Console
from torch import Tensor

from benchmarks.measuring import Output, command_of, device_of_rank, ranks_of_torchrun, write_report
from epcomm.bench.check import CheckError
from epcomm.bench.options import BenchOptions, dtype_of, read_modes
from epcomm.bench.ranks import of_all_ranks
from epcomm.bench.records import Report
from epcomm.bench.report import as_json, times_table
from epcomm.bench.run import run_bench
from epcomm.bench.timing import Clock, Percentiles
from epcomm.bench.turns import wait_for_all
from epcomm.cli.records import takes_records
from epcomm.testing.data import RankBatch

# 128 MiB to read and as much to write on each rank: four times a last-level cache of 32 MiB each.
_BUFFER_BYTES = 2**27
# An id and a weight of each (token, expert) pair, as they are sent.
_PAIR_BYTES = 8
# Each copied byte is read from memory and written to memory.
_TOUCHED_OF_COPIED = 2
# Parameters of glibc's mallopt(), from malloc.h.
_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4
# 2 GiB - 1: the largest value that mallopt takes, an int.
_MOST_FREE_BYTES = 2**31 - 1


@dataclass(frozen=True, kw_only=True)
class MovedBytes:
    """The bytes that all ranks move in one dispatch and combine; see the module."""

    copied: int
    touched: int

    @classmethod
    def of(cls, batches: Sequence[RankBatch], num_local: int) -> MovedBytes:
        """Count the bytes from the routing of all ranks.

        Args:
            batches: of all ranks; every entry of topk_ids is an expert.
            num_local: L.
        """
        tokens = pairs = rows = 0
        for batch in batches:
            ranks = (batch.topk_ids // num_local).tolist()
            tokens += len(ranks)
            pairs += batch.topk_ids.numel()
            rows += sum(len(set(of_token)) for of_token in ranks)
        hidden_bytes = batches[0].x.shape[1] * batches[0].x.element_size()
        row_bytes = hidden_bytes + _PAIR_BYTES * batches[0].topk_ids.shape[1]
        return cls(
            copied=rows * (row_bytes + hidden_bytes),
            touched=rows * row_bytes + (2 * tokens + pairs + 2 * rows) * hidden_bytes,
        )


class Copies:
    """Rows that every rank copies at the same time, once a round."""

    def __init__(self, rows: Tensor) -> None:
        """Allocate and touch both buffers, of rows like `rows` [T, H]."""
        num_rows = -(-_BUFFER_BYTES // (rows.shape[1] * rows.element_size()))
        self._source = rows.new_ones(num_rows, rows.shape[1])
        self._target = self._source.clone()
        self._clock = Clock(rows.device)
        self._ms: list[float] = []

    def run(self) -> None:
        """Run one round. Collective: yes."""
        wait_for_all(self._source.device)
        self._clock.mark()
        self._target.copy_(self._source)
        self._clock.mark()
        self._ms += self._clock.take()

    def gb_per_s(self) -> float:
        """Return the rate of all ranks together, by the median of rounds. Collective: yes."""
        by_rank = of_all_ranks(self._ms)
        slowest = Percentiles.of(max(ranks) for ranks in zip(*by_rank, strict=True))
        return len(by_rank) * self._source.nbytes / slowest.p50 / 1e6


def keep_freed_memory() -> bool:
    """Make malloc keep large blocks, as the caching allocator of CUDA does; return whether it does.

    By default glibc returns every block of 32 MiB to the system when it is freed, and the next call
    touches each of its pages again. That takes as long as a message of that size, and affects every
    call that needs blocks just above the limit.
    """
    if platform.libc_ver()[0] != "glibc":
        return False
    libc = ctypes.CDLL(None)
    settings = ((_M_MMAP_MAX, 0), (_M_TRIM_THRESHOLD, _MOST_FREE_BYTES))
    return all(libc.mallopt(name, value) == 1 for name, value in settings)


def run(options: BenchOptions) -> tuple[Report, dict[str, float]]:
    """Measure one T with copies in each round; return the report, and epcomm beside the copies.

    Collective: yes, over the default process group; the same on all ranks.
    Raises:
        CheckError: a contender is wrong.
    """
    device, (tokens,) = device_of_rank(), options.tokens
    world_size = dist.get_world_size()
    copies = Copies(torch.empty(0, options.hidden, dtype=dtype_of(options.dtype), device=device))
    report = run_bench(options, lambda tokens: copies.run())
    if report.wrong:
        raise CheckError("; ".join(each.fault for each in report.wrong))
    batches = options.make_batches(tokens, world_size, torch.device("cpu"))
    moved = MovedBytes.of(batches, options.experts // world_size)
    rate = copies.gb_per_s()
    us = next(each.us["pair"].p50 for each in report.results if not each.is_of_torch)
    return report, {
        "copied_bytes": moved.copied,
        "touched_bytes": moved.touched,
        "copy_gb_per_s": rate,
        "copied_over_copy_rate": moved.copied / us / 1e3 / rate,
        "touched_over_copy_rate": moved.touched / us / 1e3 / (_TOUCHED_OF_COPIED * rate),
    }


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """The options of a run."""

    tokens: Annotated[int, typer.Option(min=1, help="T, on each rank.")] = 1024
    hidden: Annotated[int, typer.Option(min=1, help="H.")] = 2048
    top_k: Annotated[int, typer.Option(min=1, help="K, distinct and uniformly random.")] = 8
    experts: Annotated[int, typer.Option(min=1, help="Of all ranks together.")] = 64
    dtype: Annotated[str, typer.Option(help="Of the hidden states.")] = "bf16"
    mode: Annotated[str, typer.Option(help="Of epcomm.")] = "normal"
    backend: Annotated[str, typer.Option(help="Of epcomm.")] = "shared_memory"
    iterations: Annotated[int, typer.Option(min=1, help="Measured calls of each.")] = 30
    keep_memory: Annotated[
        bool, typer.Option(help="Make malloc keep large blocks, for all contenders.")
    ] = False


@takes_records
def main(sizes: Sizes, output: Output) -> None:
    """Check the backend, measure it, and print the results."""
    keeps = sizes.keep_memory and keep_freed_memory()
    with ranks_of_torchrun():
        options = BenchOptions(
            tokens=(sizes.tokens,),
            hidden=sizes.hidden,
            experts=sizes.experts,
            top_k=sizes.top_k,
            modes=read_modes(sizes.mode),
            backends=(sizes.backend,),
            dtype=sizes.dtype,
            iterations=sizes.iterations,
            command=command_of("benchmarks.bench_memory"),
        )
        report, beside = run(options)
        console = Console(quiet=dist.get_rank() != 0, highlight=False, markup=False)
        console.print(times_table(report.results))
        console.print(f"{beside}, keeps freed memory: {keeps}", soft_wrap=True)
        values = {"copies": beside, "keeps_freed_memory": keeps, "benchmark": "memory"}
        write_report(json.loads(as_json(report)) | values, output)


if __name__ == "__main__":
    typer.run(main)
