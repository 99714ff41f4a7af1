"""Measure the host time of eager calls over NVLink, in units of torch's one-element `add_`.

    torchrun --standalone --nproc-per-node 2 -m benchmarks.bench_eager --output eager.json

A low-latency pair through the dispatcher, a decode layer and a normal layer, of one token on each
rank, with FP8 experts of the shape of Qwen3-30B-A3B. The results of the calls are checked; a row
that fails is reported, and the others still run. On a CPU it is a dry run over the backend
collective: pass small sizes.
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from typing import Annotated

import torch
import torch.distributed as dist
import typer
from rich.console import Console
from torch import Tensor

from benchmarks.host_time import EagerRow, eager_row
from benchmarks.measuring import Output, report_of, write_report
from epcomm import (
    DeepEPLowLatencyDispatcher,
    EPConfig,
    EPGroup,
    ExpertParallelExperts,
    ExpertWeights,
    Fp8BlockWeights,
    Mode,
    MoESpec,
    RowsDispatchOutput,
    TopKOutput,
    WireDtype,
)
from epcomm.bench.check import CheckError
from epcomm.bench.ranks import join_ranks, of_all_ranks
from epcomm.cli.records import takes_records

_logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Options:
    """The size of a layer, and how often it is called. M: most tokens of a rank in decode."""

    hidden: Annotated[int, typer.Option(min=128, help="H.")] = 2048
    inner: Annotated[int, typer.Option(min=128, help="I.")] = 768
    experts: Annotated[int, typer.Option(min=1, help="Of all ranks together.")] = 128
    top_k: Annotated[int, typer.Option(min=1, help="K.")] = 8
    max_tokens: Annotated[int, typer.Option(min=1, help="M.")] = 128
    rounds: Annotated[int, typer.Option(min=1, help="Bursts of each row.")] = 25
    # Each call makes at most ten launches, and the queue holds 1024.
    burst: Annotated[int, typer.Option(min=1, help="Calls without waiting for the device.")] = 20


def batch_of(options: Options, group: EPGroup) -> tuple[Tensor, TopKOutput]:
    """Return one token of this rank, and routing to experts of all ranks with equal weights."""
    x = torch.randn(1, options.hidden, device=group.device, dtype=torch.bfloat16)
    step = max(1, options.experts // options.top_k)
    ids = (torch.arange(options.top_k, device=group.device) * step + group.rank) % options.experts
    weights = torch.full((1, options.top_k), 1 / options.top_k, device=group.device)
    return x, TopKOutput(topk_ids=ids.view(1, -1), topk_weights=weights)


def config_of(
    options: Options, group: EPGroup, mode: Mode, wire: WireDtype | None = None
) -> EPConfig:
    """Return the configuration of what is measured, or of the dry run on a CPU."""
    backend = "nvlink" if group.device.type == "cuda" else "collective"
    return EPConfig(
        mode=mode,
        backend=backend,
        max_tokens_per_rank=options.max_tokens,
        dispatch_dtype=wire,
    )


def pair(options: Options, group: EPGroup) -> Callable[[], Tensor]:
    """Return a dispatch with a combine of rows of ones: y is the sum of the weights, which is 1."""
    spec = MoESpec(hidden_size=options.hidden, num_experts=options.experts, top_k=options.top_k)
    config = config_of(options, group, Mode.LOW_LATENCY, WireDtype.FP8_E4M3)
    dispatcher = DeepEPLowLatencyDispatcher(group, spec, config)
    x, topk = batch_of(options, group)
    out = dispatcher.dispatch(x, topk)
    assert isinstance(out, RowsDispatchOutput), "nvlink returns rows"
    rows = x.new_ones(out.num_slots, options.hidden)
    dispatcher.combine(out.combine_input(rows))

    def call() -> Tensor:
        return dispatcher.combine(dispatcher.dispatch(x, topk).combine_input(rows))

    check("low-latency pair", call, torch.ones_like(x))
    dispatcher.check()
    return call


def layer(options: Options, group: EPGroup, *, decode: bool) -> Callable[[], Tensor]:
    """Return a call of a layer with FP8 experts, in decode or in normal mode."""
    torch.manual_seed(0)
    weights = fp8_weights(options.experts // group.world_size, options, group.device)
    config = config_of(options, group, Mode.AUTO if decode else Mode.NORMAL)
    experts = ExpertParallelExperts(weights, group, config, top_k=options.top_k, is_local=True)
    x, topk = batch_of(options, group)

    def call() -> Tensor:
        return experts(x, topk, decode=decode)

    check("decode layer" if decode else "normal layer", call, call())
    experts.check()
    return call


def fp8_weights(num_local: int, options: Options, device: torch.device) -> Fp8BlockWeights:
    """Return random experts in FP8."""

    def matrices(rows: int, columns: int) -> Tensor:
        return torch.randn(num_local, rows, columns, device=device, dtype=torch.bfloat16) / 50

    plain = ExpertWeights(
        gate_up_proj=matrices(2 * options.inner, options.hidden),
        down_proj=matrices(options.hidden, options.inner),
    )
    return Fp8BlockWeights.from_unquantized(plain)


def check(what: str, call: Callable[[], Tensor], wanted: Tensor) -> None:
    """Raise an error if results differ: prepared launches must give the same bits."""
    for _ in range(4):
        y = call()
        if not torch.equal(y, wanted):
            raise CheckError(f"{what}: y is {y.flatten()[:4].tolist()}..., expected others")


def measure(options: Options, console: Console) -> dict[str, EagerRow]:
    """Return the host time of each row on this rank. Collective: yes."""
    makers: dict[str, Callable[[EPGroup], Callable[[], Tensor]]] = {
        "low-latency pair": partial(pair, options),
        "decode layer": partial(layer, options, decode=True),
        "normal layer": partial(layer, options, decode=False),
    }
    rows: dict[str, EagerRow] = {}
    for name, make in makers.items():
        try:
            # Each row has its own group, because a group may be unusable after an error.
            with EPGroup(dist.group.WORLD) as group, torch.no_grad():
                call = make(group)
                row = eager_row(call, group.device, rounds=options.rounds, burst=options.burst)
        except Exception:
            # Any error is reported in the row, so that the other rows are still measured.
            _logger.exception("%s on rank %d", name, dist.get_rank())
        else:
            rows[name] = row
            console.print(
                f"{name:>18}: {row.units:6.1f} units of {row.unit_us:.2f} us; {row.us:.1f} us, "
                f"waiting {row.waited_us:.1f}; {row.python_calls:.0f} functions of Python, "
                f"{row.torch_operators} operators of torch",
                soft_wrap=True,
            )
    return rows


def slowest_of(rows: Mapping[str, EagerRow]) -> Mapping[str, Mapping[str, object]]:
    """Return each row from the rank on which it takes longest. Collective: yes."""
    by_rank = of_all_ranks(rows)
    slowest = {
        name: max((found[name] for found in by_rank if name in found), key=lambda row: row.units)
        for name in rows
    }
    return {name: asdict(row) | {"units": row.units} for name, row in slowest.items()}


@takes_records
def main(options: Options, output: Output) -> None:
    """Measure the rows, and print the slowest rank's."""
    join_ranks()
    console = Console(quiet=dist.get_rank() != 0, highlight=False, markup=False)
    try:
        rows = measure(options, console)
        for name, row in rows.items():
            console.print(f"\n{name}, rank 0, own time\n{row.profile}", soft_wrap=True)
        device = torch.device("cuda" if dist.get_backend() == "nccl" else "cpu")
        report = report_of("eager", asdict(options), device, "benchmarks.bench_eager")
        write_report({**report, "slowest_rank": slowest_of(rows)}, output)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    typer.run(main)
