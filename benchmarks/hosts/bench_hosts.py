"""Measure backends of epcomm between hosts of a slow network, against a row for each expert.

    python -m tests.hosts.launch --hosts 2 --ranks 4 --rate 1gbit benchmarks/hosts/bench_hosts.py
        --output benchmarks/results/cpu_hosts_1gbit.json

in one line, makes the hosts and shapes what each sends. All contenders are checked first: rows must
arrive bit-equal and y must be the dense result, or the program ends without a number. Then they run
in turn, and an iteration takes as long as its slowest rank. The bytes between hosts are those that
the kernel has counted, headers and acknowledgements among them; no call can be faster than the
busiest host needs to send them at its rate.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, TypeVar

import torch
import torch.distributed as dist
import typer

from benchmarks.hosts.table import HostsResult, render_hosts
from benchmarks.measuring.profiles import profile_contender
from benchmarks.report import Finding, profile_summary
from epcomm import ConfigError, EPGroup, Mode
from epcomm.bench.check import CheckError, check_contender
from epcomm.bench.contenders.backends import Epcomm
from epcomm.bench.contenders.base import Contender, Experts
from epcomm.bench.contenders.expert_rows import ExpertRows
from epcomm.bench.machine import describe_hardware, describe_versions, load_average
from epcomm.bench.options import BenchOptions
from epcomm.bench.ranks import join_ranks, of_all_ranks
from epcomm.bench.turns import run_in_turn, wait_for_all
from epcomm.testing.data import RankBatch
from tests.hosts.network import sent_bytes

DispatchedT = TypeVar("DispatchedT")

_BENCHMARK = "hosts"
# Calls whose bytes are counted, after the measurement.
_COUNTED_CALLS = 4
_PROFILED_CALLS = 10


@dataclass(frozen=True, kw_only=True)
class HostBytes:
    """The bytes of one call that the host which sends most sends to others."""

    dispatch: float
    combine: float

    @property
    def total(self) -> float:
        """Both halves."""
        return self.dispatch + self.combine


def count_bytes(contender: Contender[DispatchedT], batch: RankBatch) -> HostBytes:
    """Let the kernel count the bytes of some calls between hosts. Collective: yes."""
    found = [_count_call(contender, batch) for _ in range(_COUNTED_CALLS)]
    dispatch, combine = (sum(bytes_of) / _COUNTED_CALLS for bytes_of in zip(*found, strict=True))
    dispatches, combines = zip(*of_all_ranks((dispatch, combine)), strict=True)
    return HostBytes(dispatch=max(dispatches), combine=max(combines))


def _count_call(contender: Contender[DispatchedT], batch: RankBatch) -> tuple[int, int]:
    """Return the bytes of one dispatch and of its combine on this host."""
    counted = [_sent_of_all(batch)]
    dispatched = contender.dispatch(batch)
    counted.append(_sent_of_all(batch))
    contender.combine(contender.group(dispatched).rows.contiguous(), dispatched)
    counted.append(_sent_of_all(batch))
    before, between, after = counted
    return between - before, after - between


def _sent_of_all(batch: RankBatch) -> int:
    """Return the bytes of this host so far, read while no rank sends any. Collective: yes."""
    wait_for_all(batch.x.device)
    found = sent_bytes()
    wait_for_all(batch.x.device)
    return found


def run(
    sizes: BenchOptions, group: EPGroup, contenders: Sequence[Contender], gbit_per_s: float
) -> HostsResult:
    """Check, measure, count: the same result on all ranks.

    Args:
        sizes: one number of tokens, iterations and warm-up among them.
        group: the ranks.
        contenders: the first is compared with the others.
        gbit_per_s: what a host may send.

    Collective: yes.
    Raises:
        CheckError: on all ranks, before anything was measured.
    """
    batches = sizes.make_batches(sizes.tokens[0], group.world_size, group.device)
    for contender in contenders:
        check_contender(contender, batches, group.rank, sizes.experts // group.world_size)
    batch = batches[group.rank]
    del batches
    run_in_turn(contenders, batch, num_rounds=sizes.warm_up)
    load_before = load_average()
    laps = run_in_turn(contenders, batch, num_rounds=sizes.iterations)
    load_after = load_average()
    found = {}
    for contender in contenders:
        sent = contender.sent_bytes(batch)
        finding = Finding.of(of_all_ranks(laps[contender.name]), of_all_ranks(sent))
        between = count_bytes(contender, batch)
        found[contender.name] = {
            "ms": {span: _rounded(asdict(ms)) for span, ms in finding.ms.items()},
            "sent_bytes": {**asdict(finding.sent_bytes), "total": finding.sent_bytes.total},
            "host_bytes": _rounded({**asdict(between), "total": between.total}),
        }
    return HostsResult(
        benchmark=_BENCHMARK,
        configuration={
            "ranks": group.world_size,
            "hosts": int(os.environ["NNODES"]),
            "gbit_per_s": gbit_per_s,
            "tokens": sizes.tokens[0],
            "hidden": sizes.hidden,
            "experts": sizes.experts,
            "top_k": sizes.top_k,
            "dtype": sizes.dtype,
            "iterations": sizes.iterations,
            "warm_up": sizes.warm_up,
            "transport": str(dist.get_backend()),
        },
        hardware=describe_hardware(group.device),
        versions=describe_versions(group.device),
        command=_command(group.world_size, gbit_per_s),
        load_average=[load_before, load_after],
        contenders=found,
    )


def _rounded(values: dict[str, float]) -> dict[str, float]:
    return {name: round(value, 3) for name, value in values.items()}


def _command(world_size: int, gbit_per_s: float) -> str:
    num_hosts = int(os.environ["NNODES"])
    program = Path(__file__).relative_to(Path(__file__).parents[2])
    options = ["--hosts", str(num_hosts), "--ranks", str(world_size // num_hosts)]
    options += ["--rate", f"{gbit_per_s:g}gbit", str(program), *sys.argv[1:]]
    return shlex.join(["python", "-m", "tests.hosts.launch", *options])


def main(
    backends: Annotated[str, typer.Option(help="Of epcomm.")] = "hierarchical,collective",
    tokens: Annotated[int, typer.Option(min=1, help="T, on each rank.")] = 512,
    hidden: Annotated[int, typer.Option(min=1, help="H.")] = 1024,
    top_k: Annotated[int, typer.Option(min=1, help="K, distinct and uniformly random.")] = 8,
    experts: Annotated[int, typer.Option(min=1, help="Of all ranks together.")] = 64,
    dtype: Annotated[str, typer.Option(help="Of the hidden states.")] = "fp32",
    iterations: Annotated[int, typer.Option(min=1, help="Measured calls of each.")] = 30,
    warm_up: Annotated[int, typer.Option(min=1, help="Calls of each before that.")] = 5,
    gbit_per_s: Annotated[float, typer.Option(help="What a host may send.")] = 1.0,
    output: Annotated[Path | None, typer.Option(help="Write the result there.")] = None,
    profile: Annotated[bool, typer.Option(help="Show where the time of the first goes.")] = False,
) -> None:
    """Check all contenders, measure them in turn, and print what came of it."""
    join_ranks()
    is_first = dist.get_rank() == 0
    try:
        sizes = BenchOptions(
            tokens=(tokens,),
            hidden=hidden,
            experts=experts,
            top_k=top_k,
            dtype=dtype,
            iterations=iterations,
            warm_up=warm_up,
        )
        with EPGroup(dist.group.WORLD) as group, torch.no_grad():
            sizes.check_ranks(group.world_size)
            ours: list[Contender] = [
                Epcomm(
                    group,
                    sizes.moe_spec(),
                    sizes.config(Mode.NORMAL, tokens, backend),
                    name=backend,
                )
                for backend in backends.split(",")
            ]
            owners = Experts(
                rank=group.rank,
                world_size=group.world_size,
                num_local=experts // group.world_size,
            )
            result = run(sizes, group, [*ours, ExpertRows(owners)], gbit_per_s)
            if is_first:
                sys.stdout.write(render_hosts(result))
                if output is not None:
                    output.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")
            if profile:
                batches = sizes.make_batches(tokens, group.world_size, group.device)
                sections = profile_contender(
                    ours[0], batches[group.rank], num_calls=_PROFILED_CALLS
                )
                if is_first:
                    told = profile_summary(sections)
                    sys.stdout.write(f"\n{ours[0].name}, ms of a call, slowest rank\n{told}\n")
    except (CheckError, ConfigError) as error:
        sys.exit(str(error))
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    typer.run(main)
