"""`epcomm bench`: check and time the backends that serve a layer here, and plain torch."""

import shlex
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated

import torch.distributed as dist
import typer
from rich.console import Console
from rich.progress import Progress

from epcomm.bench import exposure
from epcomm.bench.options import (
    SHAPES,
    BenchOptions,
    read_backends,
    read_modes,
    read_names,
    read_numbers,
    read_sums,
    read_wire,
    sizes_of,
)
from epcomm.bench.plot import check_plot, check_writable, draw
from epcomm.bench.ranks import (
    join_ranks,
    rank_of_environment,
    ranks_of_environment,
    report_error,
    run_work,
    start_ranks,
)
from epcomm.bench.records import Report
from epcomm.bench.report import as_json, times_table
from epcomm.bench.run import run_bench
from epcomm.cli.records import takes_records
from epcomm.errors import ConfigError, grouped, shown
from epcomm.types import MAX_RANKS, is_size

# The exit code if a contender is wrong or no backend of epcomm serves, so that something was not
# timed.
NOT_TIMED = 1


@dataclass(frozen=True, kw_only=True)
class RunOptions:
    """The ranks of a run and the measured cases, as text that BenchOptions reads."""

    ranks: Annotated[
        int | None, typer.Option(help="CPU ranks to start here; leave it out under torchrun.")
    ] = None
    tokens: Annotated[str, typer.Option(help="T of each rank, one after another.")] = "1,128,1024"
    shape: Annotated[
        str, typer.Option(help=f"Sizes of a model, which options change: {', '.join(SHAPES)[2:]}.")
    ] = ""
    hidden: Annotated[int | None, typer.Option(help="H.")] = None
    experts: Annotated[int | None, typer.Option(help="Of all ranks together.")] = None
    top_k: Annotated[int | None, typer.Option(help="Experts of a token, uniformly random.")] = None
    modes: Annotated[str, typer.Option(help="Of normal, low_latency and standard.")] = (
        "normal,low_latency"
    )
    backend: Annotated[
        str, typer.Option(help="auto for all, or names that `epcomm doctor` lists.")
    ] = "auto"
    layer: Annotated[bool, typer.Option("--layer", help="Time whole layers instead.")] = False
    intermediate: Annotated[int | None, typer.Option(help="I of an expert of --layer.")] = None
    weights: Annotated[
        str, typer.Option(help="Of --layer: fp8, --dtype or both; --dtype if not given.")
    ] = ""
    trace: Annotated[
        Path | None,
        typer.Option(help="Of --layer: write a trace for ui.perfetto.dev, print what is exposed."),
    ] = None
    chunks: Annotated[str, typer.Option(help="Of --layer: EPConfig.chunks, such as 2,4.")] = ""
    micro_batches: Annotated[int | None, typer.Option(help="Of --layer: batches in turn.")] = None
    backward: Annotated[bool, typer.Option("--backward", help="Of --layer: and backward.")] = False
    num_sms: Annotated[int | None, typer.Option(help="EPConfig.num_sms.")] = None
    product_sms: Annotated[int | None, typer.Option(help="Of --layer, as in EPConfig.")] = None
    dtype: Annotated[str, typer.Option(help="bf16, fp16 or fp32.")] = "bf16"
    wire: Annotated[
        str | None,
        typer.Option(help="Rows towards the experts of epcomm: fp8_e4m3, int8; --dtype if not."),
    ] = None
    combine: Annotated[str, typer.Option(help="Sums also in fp8_e4m3, mxfp8, nvfp4.")] = ""
    iterations: Annotated[int, typer.Option(help="Calls of each on the clock.")] = 30
    warm_up: Annotated[int, typer.Option(help="Calls of each before that.")] = 5
    seed: Annotated[int, typer.Option(help="Of tokens, routing and experts.")] = 0

    def read(self) -> BenchOptions:
        """Return the options; raise ConfigError if one of them is invalid."""
        sizes: dict[str, int | None] = dict(sizes_of(self.shape))
        given = {name: getattr(self, name) for name in sizes}
        sizes |= {name: size for name, size in given.items() if size is not None}
        weights = read_names(self.weights) if self.weights else (self.dtype,)
        if not self.layer:
            of_layer = ("intermediate", "weights", "trace", "chunks", "micro_batches")
            for name in (*of_layer, "backward", "product_sms"):
                if getattr(self, name) not in (None, "", False):
                    raise ConfigError(
                        f"epcomm bench: --{name.replace('_', '-')} is given without --layer, which "
                        "it describes; add --layer or leave it out"
                    )
            sizes["intermediate"], weights = None, ()
        # These fields of BenchOptions have the values of their options.
        names = ["shape", "dtype", "iterations", "warm_up", "seed"]
        names += ["micro_batches", "backward", "num_sms", "product_sms"]
        return BenchOptions(
            tokens=read_numbers(self.tokens),
            modes=read_modes(self.modes),
            backends=read_backends(self.backend),
            weights=weights,
            wire=read_wire(self.wire),
            combine=read_sums(self.combine),
            command=_command(),
            trace=str(self.trace or ""),
            chunks=read_numbers(self.chunks, "chunks"),
            **sizes,
            **{name: getattr(self, name) for name in names},
        )


@dataclass(frozen=True, kw_only=True)
class ReportOptions:
    """How a run is reported."""

    output: Annotated[Path | None, typer.Option(help="Write the report there after each T.")] = None
    plot: Annotated[Path | None, typer.Option(help="Draw it there; needs matplotlib.")] = None
    json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False
    verbose: Annotated[
        bool, typer.Option("--verbose", help="Print why backends were not timed.")
    ] = False


@takes_records
def bench_command(run: RunOptions, report: ReportOptions) -> None:
    """Check every backend that serves here against a formula, then time it and plain torch.

    Starts CPU ranks with --ranks, or runs on those of torchrun:
    torchrun --nproc-per-node 8 -m epcomm bench
    """
    try:
        options = run.read()
        num_started = _ranks_to_start(run.ranks)
        options.check_ranks(num_started or ranks_of_environment() or 1)
        # Refuse before the run what cannot be written after it.
        if report.plot is not None:
            check_plot(report.plot, command="epcomm bench")
        for path in (report.output, report.plot, run.trace):
            if path is not None and rank_of_environment() == 0:
                check_writable(path, command="epcomm bench")
    except ConfigError as error:
        raise typer.Exit(report_error(error, rank_of_environment())) from None
    work = partial(bench_on_rank, options, report)
    if num_started is not None:
        raise typer.Exit(start_ranks(num_started, work))
    join_ranks()
    raise typer.Exit(run_work(work))


def _command() -> str:
    """Return the command as a user types it."""
    started = ranks_of_environment()
    words = ["epcomm"]
    if started is not None:
        words = ["torchrun", "--nproc-per-node", str(started), "-m", "epcomm"]
    return shlex.join([*words, *sys.argv[1:]])


def _ranks_to_start(ranks: int | None) -> int | None:
    """Return how many ranks to start; None where torchrun has started them."""
    started = ranks_of_environment()
    if started is None and ranks is None:
        raise ConfigError(
            "epcomm bench: no ranks are running; pass --ranks 4 to start some on the CPU, or start "
            "it by torchrun --nproc-per-node 4 -m epcomm bench"
        )
    if started is not None and ranks not in (None, started):
        raise ConfigError(
            f"epcomm bench: --ranks is {ranks}, but torchrun has started {started}; leave it out"
        )
    if ranks is not None and not is_size(ranks, MAX_RANKS):
        raise ConfigError(f"epcomm bench: --ranks is {shown(ranks)}, expected 1 to {MAX_RANKS}")
    return ranks if started is None else None


def bench_on_rank(options: BenchOptions, shown_as: ReportOptions) -> int:
    """Run on one rank of the default process group; rank 0 prints and writes. Collective: yes."""
    is_first = dist.get_rank() == 0
    with Progress(console=Console(stderr=True, quiet=not is_first), transient=True) as progress:
        num_rounds = len(options.tokens) * options.iterations * max(1, len(options.weights))
        task = progress.add_task("checking", total=num_rounds)

        def show(tokens: int) -> None:
            progress.update(task, description=f"T = {tokens}", advance=1)

        report = run_bench(options, show, shown_as.output if is_first else None)
    if is_first:
        if options.trace:
            Path(options.trace).write_text(exposure.as_json(report.events), encoding="utf-8")
        _show(report, shown_as)
    is_timed = any(not each.is_of_torch for each in report.results)
    return 0 if is_timed and not report.wrong else NOT_TIMED


def _show(found: Report, report: ReportOptions) -> None:
    if report.plot is not None:
        draw(found).savefig(report.plot, dpi=110)
    if report.json:
        sys.stdout.write(as_json(found))
        return
    console = Console(highlight=False)
    write = partial(console.print, markup=False, soft_wrap=True)
    sizes = found.configuration
    write(
        f"{sizes['ranks']} ranks on {sizes['device']} over {sizes['transport']}, "
        f"H = {sizes['hidden']}, top-{sizes['top_k']} of {sizes['experts']}, {sizes['dtype']}"
    )
    console.print(times_table(found))
    for line in _absent_lines(found, is_verbose=report.verbose):
        write(line)
    for each in found.exposures:
        write(str(each))
    for each in found.wrong:
        write(f"wrong, and not timed, at T = {each.tokens}: {each.fault}")
    if report.output is not None:
        text = f"written to {report.output}"
        if not found.is_of_layers:
            text += f"; EPConfig(measurements={str(report.output)!r}) makes auto choose by it"
        write(text)
    write(found.advice)


def _absent_lines(report: Report, *, is_verbose: bool) -> list[str]:
    """Return the backends that were not timed, in one line; verbose: a line each with reasons."""
    if is_verbose:
        return [f"not timed, {e.mode.value}: {'; '.join(e.reasons)}" for e in report.absent]
    modes = grouped((each.backend, each.mode.value) for each in report.absent)
    timed = {each.backend for each in report.results}
    names = [f"{b} in {' and '.join(m)}" if b in timed else b for b, m in modes.items()]
    return [f"not timed (--verbose prints why): {', '.join(names)}"] if names else []
