"""Measure the host time of eager calls over NVLink, in units of torch's one-element `add_`.

    torchrun --standalone --nproc-per-node 2 -m benchmarks.bench_eager --output eager.json

A low-latency pair through the dispatcher, a decode layer and a normal layer, of one token on each
rank, with FP8 experts of the shape of Qwen3-30B-A3B. What comes of the calls is checked; a row that
fails is told, and the others still run. On a CPU it is a dry run over the backend collective: pass
small sizes.
"""

from __future__ import annotations

import json
import logging
import shlex
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import torch
import torch.distributed as dist
import typer
from rich.console import Console
from torch import Tensor

from benchmarks.bench_nvlink_low_latency import init_process_group
from benchmarks.measuring.eager_rows import EagerRow, eager_row
from epcomm import (
    DeepEPLowLatencyDispatcher,
    EPConfig,
    EPGroup,
    ExpertParallelExperts,
    Fp8BlockWeights,
    Mode,
    MoESpec,
    RowsDispatchOutput,
    TopKOutput,
    WireDtype,
)
from epcomm.bench.check import CheckError
from epcomm.bench.machine import describe_hardware, describe_versions
from epcomm.bench.ranks import of_all_ranks

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Options:
    """The size of a layer, and how often it is called. M: most tokens of a rank in decode."""

    hidden: int
    inner: int
    experts: int
    top_k: int
    max_tokens: int
    rounds: int
    burst: int


def batch_of(options: Options, group: EPGroup) -> tuple[Tensor, TopKOutput]:
    """Return one token of this rank, and routing to experts of all ranks with equal weights."""
    x = torch.randn(1, options.hidden, device=group.device, dtype=torch.bfloat16)
    step = max(1, options.experts // options.top_k)
    ids = (torch.arange(options.top_k, device=group.device) * step + group.rank) % options.experts
    weights = torch.full((1, options.top_k), 1 / options.top_k, device=group.device)
    return x, TopKOutput(topk_ids=ids.view(1, -1), topk_weights=weights)


def backend_of(group: EPGroup) -> str:
    """Return the backend that is measured, or of the dry run."""
    return "nvlink" if group.device.type == "cuda" else "collective"


def pair(options: Options, group: EPGroup) -> Callable[[], Tensor]:
    """Return a dispatch with a combine of rows of ones: y is the sum of the weights, which is 1."""
    spec = MoESpec(hidden_size=options.hidden, num_experts=options.experts, top_k=options.top_k)
    config = EPConfig(
        backend=backend_of(group),
        dispatch_dtype=WireDtype.FP8_E4M3,
        max_tokens_per_rank=options.max_tokens,
    )
    dispatcher = DeepEPLowLatencyDispatcher(group, spec, config)
    x, topk = batch_of(options, group)
    out = dispatcher.dispatch(x, topk)
    assert isinstance(out, RowsDispatchOutput), "nvlink hands out rows"
    rows = x.new_ones(out.num_slots, options.hidden)
    dispatcher.combine(out.combine_input(rows))

    def call() -> Tensor:
        return dispatcher.combine(dispatcher.dispatch(x, topk).combine_input(rows))

    for _ in range(4):
        check("low-latency pair", call(), torch.ones_like(x))
    dispatcher.check()
    return call


def layer(options: Options, group: EPGroup, *, decode: bool) -> Callable[[], Tensor]:
    """Return a call of a layer with FP8 experts, in decode or in normal mode."""
    torch.manual_seed(0)
    num_local = options.experts // group.world_size
    weights = fp8_weights(num_local, options, group.device)
    config = EPConfig(
        mode=Mode.AUTO if decode else Mode.NORMAL,
        backend=backend_of(group),
        max_tokens_per_rank=options.max_tokens,
    )
    experts = ExpertParallelExperts(weights, group, config, top_k=options.top_k, is_local=True)
    x, topk = batch_of(options, group)

    def call() -> Tensor:
        return experts(x, topk, decode=decode)

    first = call()
    for _ in range(4):
        check("decode layer" if decode else "normal layer", call(), first)
    experts.check()
    return call


def fp8_weights(num_local: int, options: Options, device: torch.device) -> Fp8BlockWeights:
    """Return random codes in FP8 with small scales."""

    def codes(*shape: int) -> Tensor:
        return torch.randn(shape, device=device, dtype=torch.bfloat16).to(torch.float8_e4m3fn)

    def scales(rows: int, columns: int) -> Tensor:
        blocks = (num_local, -(-rows // 128), -(-columns // 128))
        return torch.full(blocks, 0.02, device=device)

    hidden, inner = options.hidden, options.inner
    return Fp8BlockWeights(
        gate_up_proj=codes(num_local, 2 * inner, hidden),
        gate_up_scale=scales(2 * inner, hidden),
        down_proj=codes(num_local, hidden, inner),
        down_scale=scales(hidden, inner),
    )


def check(what: str, y: Tensor, wanted: Tensor) -> None:
    """Refuse results that differ: launches that were prepared are to give the same bits."""
    if not torch.equal(y, wanted):
        raise CheckError(f"{what}: y is {y.flatten()[:4].tolist()}..., expected other elements")


def measured(options: Options, console: Console) -> dict[str, EagerRow]:
    """Return what the rows cost on this rank. Collective: yes."""
    rows: dict[str, EagerRow] = {}
    makers: Mapping[str, Callable[[EPGroup], Callable[[], Tensor]]] = {
        "low-latency pair": lambda group: pair(options, group),
        "decode layer": lambda group: layer(options, group, decode=True),
        "normal layer": lambda group: layer(options, group, decode=False),
    }
    for name, make in makers.items():
        try:
            # Its own, for after an error a group may be lost.
            with EPGroup(dist.group.WORLD) as group, torch.no_grad():
                call = make(group)
                rows[name] = eager_row(
                    call, group.device, rounds=options.rounds, burst=options.burst
                )
        except Exception:
            # Whatever it is, the machine is here for the other rows too.
            _logger.exception("%s on rank %d", name, dist.get_rank())
        else:
            console.print(text_of(name, rows[name]), soft_wrap=True)
    return rows


def text_of(name: str, row: EagerRow) -> str:
    """Return a line for the terminal."""
    return (
        f"{name:>18}: {row.units:6.1f} units of {row.unit_us:.2f} us; {row.us:.1f} us, waiting "
        f"{row.waited_us:.1f}; {row.python_calls:.0f} functions of Python, {row.torch_operators} "
        "operators of torch"
    )


def main(
    hidden: Annotated[int, typer.Option(min=128, help="H.")] = 2048,
    inner: Annotated[int, typer.Option(min=128, help="I.")] = 768,
    experts: Annotated[int, typer.Option(min=1, help="Of all ranks together.")] = 128,
    top_k: Annotated[int, typer.Option(min=1, help="K.")] = 8,
    max_tokens: Annotated[int, typer.Option(min=1, help="M.")] = 128,
    rounds: Annotated[int, typer.Option(min=1, help="Bursts of each row.")] = 25,
    # At most ten launches each, of a queue of 1024.
    burst: Annotated[int, typer.Option(min=1, help="Calls without waiting for the device.")] = 20,
    profile: Annotated[bool, typer.Option(help="Print where the time goes.")] = True,
    output: Annotated[Path | None, typer.Option(help="Write the report there, as JSON.")] = None,
) -> None:
    """Measure the rows, and print the slowest rank's."""
    options = Options(
        hidden=hidden,
        inner=inner,
        experts=experts,
        top_k=top_k,
        max_tokens=max_tokens,
        rounds=rounds,
        burst=burst,
    )
    init_process_group()
    rank = dist.get_rank()
    console = Console(quiet=rank != 0, highlight=False, markup=False)
    try:
        rows = measured(options, console)
        if profile:
            for name, row in rows.items():
                console.print(f"\n{name}, rank 0, own time\n{row.profile}", soft_wrap=True)
        by_rank = of_all_ranks(
            {name: asdict(row) | {"units": row.units} for name, row in rows.items()}
        )
        found = {name: [rank[name] for rank in by_rank if name in rank] for name in rows}
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        report = {
            "benchmark": "eager",
            "configuration": {**asdict(options), "ranks": dist.get_world_size()},
            "hardware": describe_hardware(device),
            "versions": describe_versions(device),
            "command": shlex.join([Path(__file__).name, *sys.argv[1:]]),
            "slowest_rank": {
                name: max(rows, key=lambda row: row["units"]) for name, rows in found.items()
            },
        }
        if output is not None and rank == 0:
            output.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    typer.run(main)
