"""Measure how much dispatch on some SMs slows a matrix product on another stream, and the reverse.

    torchrun --standalone --nproc-per-node 2 -m benchmarks.bench_overlap --output overlap.json

Normal mode over NVLink with `num_sms`, checked first; everything is a captured graph. A timed graph
begins while the other one runs, and ends before it:

    narrow_product   on the SMs that are left; it is meant to run beside dispatches
    product          on all SMs; beside dispatches its programs keep their SMs until they end,
                     and those of a dispatch, and its peers, wait for them
    product_lost     time of the narrow product beside dispatches / of the product alone
    allowed          SMs of the GPU / SMs left to the product, and 5%

Dispatches run on a stream with priority, as the exchange of an engine does: otherwise its few
programs would wait until those of the product end.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Annotated, Self

import torch
import torch.distributed as dist
import typer
from rich.console import Console

from benchmarks.bench_nvlink import WIRES, open_normal
from benchmarks.measuring import Output, ranks_of_torchrun, report_of, write_report
from epcomm import EPGroup
from epcomm.bench.bounds import dense_product
from epcomm.bench.check import CheckError
from epcomm.bench.options import BenchOptions, read_numbers
from epcomm.bench.ranks import of_all_ranks
from epcomm.bench.timing import Captured, captured
from epcomm.bench.turns import percentiles_of, wait_for_all
from epcomm.cli.records import takes_records
from epcomm.platforms.cuda import num_sms_of

# The longest time of the product, relative to its time on the remaining SMs.
TOLERANCE = 1.05
# Calls in a graph, so that its launch is short beside it.
_PER_GRAPH = 4
# Graphs beside a measured one, which must not end before it does.
_MOST_OTHERS = 64


@dataclass(frozen=True, kw_only=True, eq=False)
class Load:
    """Calls in a graph, and the stream that they run on."""

    graph: Captured
    stream: torch.cuda.Stream

    @classmethod
    def of(cls, call: Callable[[], object], stream: torch.cuda.Stream) -> Self:
        """Capture _PER_GRAPH calls.   Collective: as the call.   Host sync: yes."""

        def calls() -> None:
            for _ in range(_PER_GRAPH):
                call()

        return cls(graph=captured(calls), stream=stream)

    def launch(self) -> None:
        """Replay the graph on its stream."""
        with torch.cuda.stream(self.stream):
            self.graph.replay()


@dataclass(frozen=True, kw_only=True)
class Product:
    """The sizes of a matrix product, [m, k] by [k, n]."""

    m: Annotated[int, typer.Option(min=1, help="Rows of the product.")] = 8192
    n: Annotated[int, typer.Option(min=1, help="Columns of the product.")] = 8192
    k: Annotated[int, typer.Option(min=1, help="Inner size of the product.")] = 7168

    def on(self, device: torch.device) -> Callable[[], object]:
        """Return the product of two FP8 matrices, which can be asked to leave SMs free."""
        return dense_product("fp8", self.m, self.n, self.k, device)


def time_once(measured: Load, other: Load | None, num_others: int) -> tuple[float, bool]:
    """Return the milliseconds of one graph, and whether the other graph ran during all of it.

    Collective: yes.   Host sync: yes.
    """
    begin, end, last = (torch.cuda.Event(enable_timing=True) for _ in range(3))
    wait_for_all(measured.stream.device)
    # A GPU that was idle is slower at first, so a graph that is timed alone follows another replay
    # of it.
    (other or measured).launch()
    if other is not None:
        measured.stream.wait_stream(other.stream)
        other.launch()
    begin.record(measured.stream)
    measured.launch()
    end.record(measured.stream)
    if other is not None:
        for _ in range(num_others):
            other.launch()
        last.record(other.stream)
    torch.cuda.synchronize()
    return begin.elapsed_time(end), other is None or end.elapsed_time(last) > 0


def times_of(measured: Load, other: Load | None, iterations: int) -> dict[str, float]:
    """Return percentiles of one call in us, on the slowest rank.   Collective: yes.

    Raises:
        CheckError: the graphs beside the measured one end before it.
    """
    num_others = 4
    while num_others <= _MOST_OTHERS:
        spans = [time_once(measured, other, num_others) for _ in range(iterations + 1)]
        if all(all(rank) for rank in of_all_ranks([is_covered for _, is_covered in spans])):
            calls = [{"call": ms / _PER_GRAPH} for ms, _ in spans[1:]]
            return asdict(percentiles_of(calls)["call"])
        num_others *= 2
    raise CheckError(f"{_MOST_OTHERS} graphs ended before the measured graph beside them")


@contextmanager
def free_sms(number: int) -> Iterator[None]:
    """Ask cuBLAS to leave this many SMs free in what is captured here."""
    torch._C._set_sm_carveout_experimental(number)
    try:
        yield
    finally:
        torch._C._set_sm_carveout_experimental(None)


def measure(
    options: BenchOptions, product: Product, num_sms: int, wire: str, group: EPGroup
) -> dict[str, object]:
    """Time dispatches of one format beside the product.   Collective: yes."""
    device, options = group.device, replace(options, wire=WIRES[wire])
    stream, urgent = torch.cuda.Stream(device), torch.cuda.Stream(device, priority=-1)
    call, num_all_sms = product.on(device), num_sms_of(device)
    wide = Load.of(call, stream)
    with free_sms(num_sms):
        narrow = Load.of(call, stream)
    batches = options.make_batches(options.tokens[0], group.world_size, device)
    normal = open_normal(options, group, num_sms, batches)
    dispatch = Load.of(partial(normal.dispatch, batches[group.rank]), urgent)
    loads: dict[str, tuple[Load, Load | None]] = {
        "product": (wide, None),
        "narrow_product": (narrow, None),
        "narrow_product_beside": (narrow, dispatch),
        "product_beside": (wide, dispatch),
        "dispatch": (dispatch, None),
        "dispatch_beside": (dispatch, narrow),
    }
    us = {name: times_of(*load, options.iterations) for name, load in loads.items()}
    normal.check()
    return {
        "wire": wire,
        "num_sms": num_sms,
        "us": us,
        "product_lost": us["narrow_product_beside"]["p50"] / us["product"]["p50"],
        # Of 132 SMs, 32 of them for dispatch: 132 / 100 * 1.05 = 1.386.
        "allowed": num_all_sms / (num_all_sms - num_sms) * TOLERANCE,
    }


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """The options of dispatches."""

    sms: Annotated[str, typer.Option(help="SMs of dispatch.")] = "8,16,32"
    sms_tokens: Annotated[int, typer.Option("--tokens", min=1, help="T, on each rank.")] = 4096
    hidden: Annotated[int, typer.Option(min=1, help="H.")] = 7168
    top_k: Annotated[int, typer.Option(min=1, help="K, distinct and uniformly random.")] = 8
    experts: Annotated[int, typer.Option(min=1, help="Of all ranks together.")] = 256
    iterations: Annotated[int, typer.Option(min=1, help="Measured.")] = 40


@takes_records
def main(sizes: Sizes, product: Product, output: Output) -> None:
    """Check the calls, measure them, and print the results."""
    options = BenchOptions(
        tokens=(sizes.sms_tokens,),
        hidden=sizes.hidden,
        top_k=sizes.top_k,
        experts=sizes.experts,
        iterations=sizes.iterations,
    )
    with ranks_of_torchrun() as device:
        console = Console(quiet=dist.get_rank() != 0, highlight=False, markup=False, soft_wrap=True)
        configuration = asdict(sizes) | asdict(product)
        report = report_of("overlap", configuration, device, "benchmarks.bench_overlap")
        findings: list[dict[str, object]] = []
        for num_sms in read_numbers(sizes.sms):
            for wire in WIRES:
                with EPGroup(dist.group.WORLD) as group:
                    findings.append(measure(options, product, num_sms, wire, group))
                console.print(findings[-1])
        write_report({**report, "findings": findings}, output)


if __name__ == "__main__":
    typer.run(main)
