"""Measure backends of epcomm between hosts of a slow network, against plain torch.

    python -m tests.hosts.launch --hosts 2 --ranks 4 --rate 1gbit benchmarks/hosts/bench_hosts.py
        --output benchmarks/results/cpu_hosts_1gbit.json

in one line, makes the hosts and limits the rate at which each sends. The times are those of `epcomm
bench`, which checks all contenders first. The bytes between hosts are those that the kernel has
counted, headers and acknowledgements among them; no call can be faster than the busiest host needs
to send them at its rate.
"""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Annotated

import torch.distributed as dist
import typer

from benchmarks.measuring import Output, ranks_of_torchrun, rounded, write_report
from benchmarks.tables import render
from epcomm import EPGroup, Mode, WireDtype
from epcomm.bench.check import CheckError
from epcomm.bench.contenders.backends import Epcomm
from epcomm.bench.contenders.base import Contender, DispatchedT
from epcomm.bench.options import BenchOptions, read_names
from epcomm.bench.ranks import of_all_ranks
from epcomm.bench.records import Timing
from epcomm.bench.run import ALTERNATIVES, run_bench
from epcomm.bench.turns import wait_for_all
from epcomm.cli.records import takes_records
from epcomm.testing.data import RankBatch
from tests.hosts.network import sent_bytes

# Calls whose bytes are counted, after the measurement.
_COUNTED_CALLS = 4
# Spans of the result, and what `epcomm bench` calls them.
_SPANS = {
    "dispatch_without_grouping": "dispatch",
    "combine": "combine",
    "total_without_grouping": "pair",
}


def count_bytes(contender: Contender[DispatchedT], batch: RankBatch) -> float:
    """Return the bytes of one call of the host that sends most to others. Collective: yes."""
    before = _sent_of_all(batch)
    for _ in range(_COUNTED_CALLS):
        dispatched = contender.dispatch(batch)
        contender.combine(contender.group(dispatched).rows.contiguous(), dispatched)
    mine = (_sent_of_all(batch) - before) / _COUNTED_CALLS
    return max(of_all_ranks(mine))


def _sent_of_all(batch: RankBatch) -> int:
    """Return the bytes of this host so far, read while no rank sends any. Collective: yes."""
    wait_for_all(batch.x.device)
    found = sent_bytes()
    wait_for_all(batch.x.device)
    return found


def bytes_of_contenders(options: BenchOptions, group: EPGroup) -> dict[str, float]:
    """Count the bytes of every backend, and of the plain torch contenders. Collective: yes."""
    (tokens,), spec = options.tokens, options.moe_spec()
    contenders: list[Contender] = []
    for backend, sums in product(options.backends, (None, *options.combine)):
        config = options.config(Mode.NORMAL, tokens, backend, sums)
        contenders.append(Epcomm(group, spec, config))
    contenders += [make(options.experts) for make in ALTERNATIVES.values()]
    batch = options.make_batches(tokens, group.world_size, group.device)[group.rank]
    return {each.backend: count_bytes(each, batch) for each in contenders}


def _contender_record(timing: Timing, num_bytes: float) -> Mapping[str, object]:
    assert timing.sent_bytes is not None, "not a whole layer"
    ms = {
        name: {quantile: us / 1e3 for quantile, us in asdict(timing.us[span]).items()}
        for name, span in _SPANS.items()
    }
    return {
        "ms": ms,
        "sent_bytes": {**asdict(timing.sent_bytes), "total": timing.sent_bytes.total_bytes},
        "host_bytes": {"total": num_bytes},
    }


def run(options: BenchOptions, gbit_per_s: float) -> dict[str, object]:
    """Check and measure contenders, and count bytes; the result is the same on all ranks.
    Collective: yes.

    Raises:
        CheckError: a contender is wrong.
    """
    report = run_bench(options, lambda tokens: None)
    if report.wrong:
        raise CheckError("; ".join(each.fault for each in report.wrong))
    timings = {each.backend: each for each in report.results}
    with EPGroup(dist.group.WORLD) as group:
        sent = bytes_of_contenders(options, group)
    return {
        "benchmark": "hosts",
        "configuration": {
            **report.configuration,
            "tokens": options.tokens[0],
            "hosts": int(os.environ["NNODES"]),
            "gbit_per_s": gbit_per_s,
        },
        "hardware": report.hardware,
        "versions": report.versions,
        "command": report.command,
        "contenders": {name: _contender_record(timings[name], each) for name, each in sent.items()},
    }


def command_of_hosts(program: str, rate: str) -> str:
    """Return the command that has started a program of this folder on the ranks of hosts.

    rate: what each host may send, as the user says.
    """
    num_hosts, num_ranks = int(os.environ.get("NNODES", "1")), dist.get_world_size()
    options = ["--hosts", str(num_hosts), "--ranks", str(num_ranks // num_hosts)]
    options += ["--rate", rate, f"benchmarks/hosts/{Path(program).name}", *sys.argv[1:]]
    return shlex.join(["python", "-m", "tests.hosts.launch", *options])


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """The options of a run."""

    backends: Annotated[str, typer.Option(help="Of epcomm.")] = "hierarchical,collective"
    tokens: Annotated[int, typer.Option(min=1, help="T, on each rank.")] = 512
    hidden: Annotated[int, typer.Option(min=1, help="H.")] = 1024
    top_k: Annotated[int, typer.Option(min=1, help="K, distinct and uniformly random.")] = 8
    experts: Annotated[int, typer.Option(min=1, help="Of all ranks together.")] = 64
    dtype: Annotated[str, typer.Option(help="Of the hidden states.")] = "fp32"
    combine: Annotated[str, typer.Option(help="Formats of sums, measured too.")] = ""
    iterations: Annotated[int, typer.Option(min=1, help="Measured calls of each.")] = 30
    warm_up: Annotated[int, typer.Option(min=1, help="Calls of each before that.")] = 5
    gbit_per_s: Annotated[float, typer.Option(help="The rate of a host.")] = 1.0


@takes_records
def main(sizes: Sizes, output: Output) -> None:
    """Check all contenders, measure them in turn, and print the results."""
    with ranks_of_torchrun():
        options = BenchOptions(
            tokens=(sizes.tokens,),
            hidden=sizes.hidden,
            experts=sizes.experts,
            top_k=sizes.top_k,
            modes=(Mode.NORMAL,),
            backends=tuple(sizes.backends.split(",")),
            dtype=sizes.dtype,
            combine=tuple(WireDtype(each) for each in read_names(sizes.combine)),
            iterations=sizes.iterations,
            warm_up=sizes.warm_up,
            command=command_of_hosts(__file__, f"{sizes.gbit_per_s:g}gbit"),
        )
        result = rounded(run(options, sizes.gbit_per_s))
        write_report(result, output)
        if dist.get_rank() == 0:
            sys.stdout.write(render(result))


if __name__ == "__main__":
    typer.run(main)
