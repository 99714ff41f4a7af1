"""Measure one backend against rows over all-to-all, down to what a copy of the memory would take.

`epcomm bench` times every backend at every T. This program adds what it does not: rows grouped by
expert, for a grouped GEMM that reads no index; a profile; and copies in the same run.

    scripts/launch_multi_rank.sh 4 benchmarks/bench_dispatch_combine.py --tokens 1024 --hidden 2048

Both are checked first: rows must arrive bit-equal and y must be the dense result, or the program
ends without a number. Then they run in turn, and an iteration takes as long as its slowest rank.

`--backend` chooses the buffer of epcomm. `--copy-rate` lets all ranks copy memory in each round and
relates dispatch and combine to that; measuring/copy_rate.py says what is counted. The
result cpu_shared_memory of docs/performance.md is made on an idle machine by

    scripts/launch_multi_rank.sh 4 benchmarks/bench_dispatch_combine.py --tokens 1024 --hidden 2048
        --backend shared_memory --copy-rate --output benchmarks/results/cpu_shared_memory.json
    python -m benchmarks.readme_table README.md docs/performance.md

where the first is one line.
"""

from __future__ import annotations

import shlex
import sys
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import torch
import torch.distributed as dist
import typer
from rich.console import Console

from benchmarks.measuring.copy_rate import Copies, CopyFinding, MovedBytes, moved_bytes
from benchmarks.measuring.profiles import profile_contender
from benchmarks.report import (
    Finding,
    Report,
    bytes_summary,
    copies_summary,
    profile_summary,
    table_of,
)
from epcomm import ConfigError, EPConfig, EPGroup, Mode
from epcomm.bench.check import CheckError, check_contender
from epcomm.bench.contenders.backends import Epcomm
from epcomm.bench.contenders.base import Contender, Experts
from epcomm.bench.contenders.expert_rows import ExpertRows
from epcomm.bench.machine import (
    describe_hardware,
    describe_versions,
    keep_freed_memory,
    load_average,
)
from epcomm.bench.options import BenchOptions, dtype_of
from epcomm.bench.ranks import join_ranks, of_all_ranks
from epcomm.bench.turns import run_in_turn


class ModeName(StrEnum):
    """Modes of epcomm that hand out rows."""

    NORMAL = "normal"
    LOW_LATENCY = "low_latency"
    STANDARD = "standard"


class DtypeName(StrEnum):
    """The dtype of the hidden states."""

    BF16 = "bf16"
    FP16 = "fp16"
    FP32 = "fp32"


@dataclass(frozen=True, kw_only=True)
class Options:
    """The arguments of a run, equal on all ranks; see main()."""

    tokens: int
    hidden: int
    top_k: int
    experts: int
    dtype: DtypeName
    mode: ModeName
    backend: str
    pairs: int
    warm_up: int
    seed: int
    keep_freed_memory: bool

    def sizes(self) -> BenchOptions:
        """Return what `epcomm bench` calls these sizes."""
        return BenchOptions(
            tokens=(self.tokens,),
            hidden=self.hidden,
            experts=self.experts,
            top_k=self.top_k,
            dtype=self.dtype,
            seed=self.seed,
        )

    def make_contenders(self, group: EPGroup) -> tuple[Epcomm, Contender]:
        """epcomm, then the alternative. Collective: yes."""
        config = EPConfig(
            mode=Mode(self.mode.value), backend=self.backend, max_tokens_per_rank=self.tokens
        )
        experts = Experts(
            rank=group.rank,
            world_size=group.world_size,
            num_local=self.experts // group.world_size,
        )
        return Epcomm(group, self.sizes().moe_spec(), config), ExpertRows(experts)


def run(
    options: Options,
    group: EPGroup,
    contenders: tuple[Epcomm, Contender],
    *,
    profile_calls: int = 0,
    copies: Copies | None = None,
) -> Report:
    """Check, measure, gather: the same report on all ranks.

    Args:
        options: of the run.
        group: the ranks.
        contenders: epcomm and the alternative.
        profile_calls: calls of epcomm under a profiler, after the measurement.
        copies: measured in each round, or None.

    Collective: yes.
    Raises:
        CheckError: on all ranks, before anything was measured.
    """
    rank = group.rank
    batches = options.sizes().make_batches(options.tokens, group.world_size, group.device)
    num_local = options.experts // group.world_size
    for contender in contenders:
        check_contender(contender, batches, rank, num_local)
    batch, moved = batches[rank], moved_bytes(batches, num_local)
    del batches
    sent = {contender.name: contender.sent_bytes(batch) for contender in contenders}
    run_in_turn(contenders, batch, num_rounds=options.warm_up)
    load_before = load_average()
    on_round = copies.run if copies else _nothing
    laps = run_in_turn(contenders, batch, num_rounds=options.pairs, on_round=on_round)
    load_after = load_average()
    findings = {
        name: Finding.of(of_all_ranks(laps[name]), of_all_ranks(sent[name])) for name in laps
    }
    profile = (
        profile_contender(contenders[0], batch, num_calls=profile_calls) if profile_calls else ()
    )
    return Report(
        configuration={
            **asdict(options),
            "backend": contenders[0].plan.backend,
            "ranks": group.world_size,
            "transport": _transport(),
        },
        hardware=describe_hardware(group.device),
        versions=describe_versions(group.device),
        command=_command(group.world_size),
        load_average=(load_before, load_after),
        findings=findings,
        profile=profile,
        copies=_finding_of_copies(copies, moved, findings[contenders[0].name]) if copies else None,
    )


def _nothing() -> None:
    """Do nothing between rounds."""


def _finding_of_copies(copies: Copies, moved: MovedBytes, ours: Finding) -> CopyFinding:
    return CopyFinding(
        moved=moved,
        ms=ours.ms["total_without_grouping"].p50,
        copy_gb_per_s=copies.gb_per_s(of_all_ranks(copies.ms)),
    )


def _transport() -> str:
    return str(dist.get_backend())


def _command(world_size: int) -> str:
    program = Path(__file__).relative_to(Path(__file__).parents[1])
    words = ["scripts/launch_multi_rank.sh", str(world_size), str(program), *sys.argv[1:]]
    return shlex.join(words)


def show(report: Report, console: Console) -> None:
    """Print everything that report holds, and nothing where the console is quiet."""
    ratio = report.ratios()["total"]
    console.print(table_of(report))
    console.print(bytes_summary(report), soft_wrap=True)
    console.print(f"epcomm is {ratio:.2f} times as fast, by medians of dispatch + combine")
    if report.copies:
        console.print(copies_summary(report.copies), soft_wrap=True)
    if report.profile:
        console.print(
            f"epcomm, ms of a call on the slowest rank\n{profile_summary(report.profile)}"
        )


def main(
    tokens: Annotated[int, typer.Option(min=1, help="T, on each rank.")] = 1024,
    hidden: Annotated[int, typer.Option(min=1, help="H.")] = 2048,
    top_k: Annotated[int, typer.Option(min=1, help="K, distinct and uniformly random.")] = 8,
    experts: Annotated[int, typer.Option(min=1, help="Of all ranks together.")] = 64,
    dtype: Annotated[DtypeName, typer.Option(help="Of the hidden states.")] = DtypeName.BF16,
    mode: Annotated[ModeName, typer.Option(help="Of epcomm.")] = ModeName.NORMAL,
    backend: Annotated[str, typer.Option(help="The buffer of epcomm.")] = "auto",
    pairs: Annotated[int, typer.Option(min=1, help="Measured calls of each.")] = 30,
    warm_up: Annotated[int, typer.Option(min=1, help="Calls of each before that.")] = 5,
    seed: Annotated[int, typer.Option(help="Of tokens and routing.")] = 0,
    output: Annotated[Path | None, typer.Option(help="Write the report there, as JSON.")] = None,
    profile: Annotated[bool, typer.Option(help="Show where the time of epcomm goes.")] = False,
    copy_rate: Annotated[
        bool, typer.Option(help="Copy in each round, and relate epcomm to that.")
    ] = False,
    keep_memory: Annotated[
        bool, typer.Option(help="Let malloc recycle large blocks, for all contenders.")
    ] = False,
) -> None:
    """Check both contenders, measure them in turn, and print what came of it."""
    keeps = keep_memory and keep_freed_memory()
    options = Options(
        tokens=tokens,
        hidden=hidden,
        top_k=top_k,
        experts=experts,
        dtype=dtype,
        mode=mode,
        backend=backend,
        pairs=pairs,
        warm_up=warm_up,
        seed=seed,
        keep_freed_memory=keeps,
    )
    join_ranks()
    console = Console(quiet=dist.get_rank() != 0, highlight=False, markup=False)
    try:
        with EPGroup(dist.group.WORLD) as group, torch.no_grad():
            contenders = options.make_contenders(group)
            like = torch.empty(0, hidden, dtype=dtype_of(dtype), device=group.device)
            report = run(
                options,
                group,
                contenders,
                profile_calls=10 if profile else 0,
                copies=Copies(like) if copy_rate else None,
            )
        show(report, console)
        if output is not None and dist.get_rank() == 0:
            report.write(output)
    except (CheckError, ConfigError) as error:
        sys.exit(str(error))
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    typer.run(main)
