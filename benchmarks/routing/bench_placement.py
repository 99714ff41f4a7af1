"""Time a layer whose load is skewed, with experts in order and placed by the counted load.

    torchrun --nproc-per-node 2 -m benchmarks.routing.bench_placement --output placement.json

Tokens choose experts by a Zipf law over their ids, so the first rank has most of them; with
`--shuffled`, over the experts in random order. Some batches are counted; from their load `balance`
makes a placement with one redundant expert a rank. Other batches are timed, before and after, in
turn, in device graphs where the ranks have GPUs, after the results of one have been compared.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import partial
from typing import Annotated

import torch
import torch.distributed as dist
import typer
from rich.console import Console
from torch import Tensor

from benchmarks.measuring import Output, ranks_of_torchrun, report_of, write_report
from epcomm import (
    ConfigError,
    EPConfig,
    EPGroup,
    ExpertParallelExperts,
    ExpertPlacement,
    ExpertWeights,
    TopKOutput,
    balance,
)
from epcomm.bench.check import CheckError
from epcomm.bench.ranks import of_all_ranks
from epcomm.bench.timing import Percentiles
from epcomm.bench.turns import is_in_graph, percentiles_of, take_turns, time_parts
from epcomm.cli.records import takes_records
from epcomm.placement.balance import highest_load
from epcomm.testing.oracle import relative_error

# Tolerance for bfloat16: after a move the sums of the ranks differ, and they and y are rounded in
# both layers.
TOLERANCE = 4 * 2**-8


@dataclass(frozen=True, kw_only=True)
class Options:
    """The layer, Qwen3-30B-A3B's by default, its load, and how it is measured."""

    tokens: Annotated[int, typer.Option(min=1, help="T, on each rank, and M.")] = 128
    mode: Annotated[str, typer.Option(help="Of the dispatcher.")] = "low_latency"
    hidden: Annotated[int, typer.Option(min=1, help="H.")] = 2048
    intermediate: Annotated[int, typer.Option(min=1, help="I.")] = 768
    experts: Annotated[int, typer.Option(min=1, help="E, of all ranks together.")] = 128
    top_k: Annotated[int, typer.Option(min=1, help="K.")] = 8
    exponent: Annotated[float, typer.Option(help="Of the Zipf law.")] = 1.0
    shuffled: Annotated[bool, typer.Option(help="Popular experts are anywhere.")] = False
    counted: Annotated[int, typer.Option(min=1, help="Batches whose load is counted.")] = 50
    iterations: Annotated[int, typer.Option(min=2, help="Other batches, measured.")] = 50
    seed: Annotated[int, typer.Option(help="Of experts, tokens and routing.")] = 0


@dataclass(frozen=True, kw_only=True)
class Way:
    """One of the two layers: its times of a call, and how its load is spread over the ranks.

    us: of the slowest rank.
    slots_ratio: the most slots of a rank over the mean, of the timed batches, where copies of an
        expert share its tokens equally.
    """

    name: str
    us: Percentiles
    slots_ratio: float


def experts_of_tokens(options: Options, rank: int, batch: int, device: torch.device) -> Tensor:
    """Draw distinct experts for each token, [T, K], by a Zipf law, largest first."""
    numbers = torch.Generator().manual_seed(options.seed)
    chances = torch.arange(1, options.experts + 1).double() ** -options.exponent
    if options.shuffled:
        chances = chances[torch.randperm(options.experts, generator=numbers)]
    numbers.manual_seed(1 + options.seed + 7919 * rank + 104729 * batch)
    # The largest of log p plus Gumbel noise are a draw without replacement.
    uniform = torch.rand(options.tokens, options.experts, generator=numbers, dtype=torch.float64)
    return (chances.log() - (-uniform.log()).log()).topk(options.top_k).indices.to(device)


def count(options: Options, batches: range, num_ranks: int) -> Tensor:
    """Return the tokens of all ranks that chose each expert in these batches, [E]."""
    chosen = [
        experts_of_tokens(options, rank, batch, torch.device("cpu")).flatten()
        for rank in range(num_ranks)
        for batch in batches
    ]
    return torch.cat(chosen).bincount(minlength=options.experts)


def make_weights(options: Options, device: torch.device) -> ExpertWeights:
    """Make all experts in their order, in bfloat16, equal on all ranks."""
    numbers = torch.Generator(device).manual_seed(options.seed)

    def matrix(rows: int, columns: int) -> Tensor:
        values = torch.empty(options.experts, rows, columns, dtype=torch.bfloat16, device=device)
        return values.normal_(std=columns**-0.5, generator=numbers)

    return ExpertWeights(
        gate_up_proj=matrix(2 * options.intermediate, options.hidden),
        down_proj=matrix(options.hidden, options.intermediate),
    )


def run(options: Options, group: EPGroup) -> tuple[list[Way], ExpertPlacement]:
    """Count the load, place experts, compare results and time both layers. Collective: yes.

    Raises:
        CheckError: placed experts give other results.
    """
    world_size, device = group.world_size, group.device
    load = count(options, range(options.counted), world_size)
    placement = balance(
        load, num_ranks=world_size, num_physical_experts=options.experts + world_size
    )
    weights = make_weights(options, device)
    layers = {
        name: ExpertParallelExperts(
            weights,
            group,
            EPConfig(
                mode=options.mode,  # type: ignore[arg-type]
                max_tokens_per_rank=options.tokens,
                redundant_experts=num_redundant,
            ),
            top_k=options.top_k,
        )
        for name, num_redundant in (("in order", None), ("placed", world_size))
    }
    layers["placed"].rebalance(placement)
    numbers = torch.Generator(device).manual_seed(options.seed + group.rank)
    x = torch.randn(options.tokens, options.hidden, generator=numbers, device=device).bfloat16()
    ids = experts_of_tokens(options, group.rank, options.counted, device)
    topk = TopKOutput(topk_ids=ids, topk_weights=torch.full(ids.shape, 0.1, device=device))
    expected, moved = (layer(x, topk).clone() for layer in layers.values())
    error = max(of_all_ranks(relative_error(moved, expected)))
    if not error <= TOLERANCE:
        raise CheckError(f"results with placed experts have an error of {error:.1e}")
    calls = {
        name: time_parts(
            {"layer": partial(layer, x, topk)},
            "layer",
            device,
            in_graph=is_in_graph(layer.plan.prefill, device),
        )
        for name, layer in layers.items()
    }
    take_turns(calls, device, num_rounds=3)
    batches = range(options.counted, options.counted + options.iterations)
    spans: dict[str, list[Mapping[str, float]]] = {name: [] for name in layers}
    for batch in batches:
        # Write to the memory of the previous batch, which graphs read.
        ids.copy_(experts_of_tokens(options, group.rank, batch, device))
        for name, found in take_turns(calls, device, num_rounds=1).items():
            spans[name] += found
    timed = count(options, batches, world_size).tolist()
    in_order = ExpertPlacement.spread(
        num_experts=options.experts, num_ranks=world_size, num_physical_experts=options.experts
    )
    places = {"in order": in_order, "placed": placement}
    ways = [
        Way(
            name=name,
            us=percentiles_of(spans[name])["layer"],
            slots_ratio=highest_load(places[name], timed) * world_size / sum(timed),
        )
        for name in layers
    ]
    return ways, placement


@takes_records
def main(options: Options, output: Output) -> None:
    """Check both layers, measure them, and print the results."""
    with ranks_of_torchrun() as device, EPGroup(dist.group.WORLD) as group:
        if group.world_size == 1:
            raise ConfigError("bench_placement: 1 rank has all experts; start it with 2 or more")
        report = report_of(
            "placement", asdict(options), device, "benchmarks.routing.bench_placement"
        )
        ways, placement = run(options, group)
        console = Console(quiet=group.rank != 0, highlight=False, markup=False)
        for each in ways:
            console.print(
                f"{each.name:>8}: {each.us.p50:9.1f} {each.us.p99:9.1f} us p50, p99; most slots of "
                f"a rank {each.slots_ratio:.3f} of the mean"
            )
        report["replicas"] = max(map(len, placement.replicas))
        write_report({**report, "ways": [asdict(each) for each in ways]}, output)


if __name__ == "__main__":
    typer.run(main)
