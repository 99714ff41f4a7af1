"""Measure what a call costs the host: CPU time of the calling thread, and functions it runs.

    python -m benchmarks.bench_host

One rank over gloo with few small tokens, so that almost nothing is copied or computed, and nobody
waits. CPU times are those of this machine; the number of Python functions has no noise.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

import torch
import torch.distributed as dist
import typer
from rich.console import Console
from rich.table import Table
from torch import nn
from torch._C._distributed_c10d import HashStore

from benchmarks.host_time import HostCost, host_cost
from epcomm import (
    DeepEPLowLatencyDispatcher,
    DeepEPNormalDispatcher,
    EPConfig,
    EPGroup,
    ExpertParallelExperts,
    ExpertWeights,
    Mode,
    MoESpec,
    RowsDispatchOutput,
    TopKOutput,
)

NUM_TOKENS, HIDDEN, NUM_EXPERTS, TOP_K = 8, 64, 8, 2
_DISPATCHERS = {
    Mode.NORMAL: DeepEPNormalDispatcher,
    Mode.LOW_LATENCY: DeepEPLowLatencyDispatcher,
}


def measure(group: EPGroup, mode: Mode, *, num_calls: int) -> Mapping[str, HostCost]:
    """Return the cost of each call over the backend collective. Collective: yes, of one rank."""
    config = EPConfig(mode=mode, backend="collective", max_tokens_per_rank=NUM_TOKENS)
    spec = MoESpec(hidden_size=HIDDEN, num_experts=NUM_EXPERTS, top_k=TOP_K, dtype=torch.bfloat16)
    x = torch.ones(NUM_TOKENS, HIDDEN, dtype=torch.bfloat16)
    ids = torch.arange(NUM_TOKENS * TOP_K).view(NUM_TOKENS, TOP_K) % NUM_EXPERTS
    topk = TopKOutput(topk_ids=ids, topk_weights=torch.full(ids.shape, 0.5))
    trains = mode is Mode.NORMAL
    gate_up = torch.zeros(NUM_EXPERTS, 2 * HIDDEN, HIDDEN, dtype=x.dtype)
    down = torch.zeros(NUM_EXPERTS, HIDDEN, HIDDEN, dtype=x.dtype)
    weights = ExpertWeights(
        gate_up_proj=nn.Parameter(gate_up, requires_grad=trains),
        down_proj=nn.Parameter(down, requires_grad=trains),
    )
    dispatcher = _DISPATCHERS[mode](group, spec, config)
    layer = ExpertParallelExperts(weights, group, config, top_k=TOP_K)
    out = dispatcher.dispatch(x, topk)
    assert isinstance(out, RowsDispatchOutput), "the backend returns rows"
    rows = x.new_ones(out.num_slots, HIDDEN)
    dispatcher.combine(out.combine_input(rows))

    def dispatch_and_combine() -> None:
        dispatcher.combine(dispatcher.dispatch(x, topk).combine_input(rows))

    costs = {}
    with torch.no_grad():
        costs["dispatch + combine"] = host_cost(dispatch_and_combine, num_calls=num_calls)
        costs["layer"] = host_cost(lambda: layer(x, topk), num_calls=num_calls)
    if trains:
        costs["layer, forward for training"] = host_cost(
            lambda: layer(x, topk), num_calls=num_calls
        )
    return costs


def main(
    calls: Annotated[int, typer.Option(min=1, help="On the clock, of each.")] = 300,
) -> None:
    """Measure both modes and print a table."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    table = Table("mode", "call", "CPU us", "Python functions")
    try:
        with EPGroup(dist.group.WORLD) as group:
            for mode in _DISPATCHERS:
                for name, cost in measure(group, mode, num_calls=calls).items():
                    table.add_row(
                        mode.value, name, f"{cost.cpu_us:.0f}", f"{cost.python_calls:.0f}"
                    )
    finally:
        dist.destroy_process_group()
    Console().print(table)


if __name__ == "__main__":
    typer.run(main)
