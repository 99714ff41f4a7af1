"""Time whole layers: dispatch, experts by a runner, combine; from Python, and in a device graph.

Experts are random SwiGLU, each made from its own seed, so that any rank can compute any token in
float64 without the others: the first tokens of each rank are checked so before a layer is timed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from epcomm.bench.contenders.backends import find_backends
from epcomm.bench.options import BenchOptions, dtype_of
from epcomm.bench.ranks import faults_of_all
from epcomm.bench.records import Timing, Wrong
from epcomm.bench.timing import Clock, captured
from epcomm.bench.turns import Timed, is_in_graph, time_all, time_launch, wait_for_all
from epcomm.config import Mode
from epcomm.errors import EPError
from epcomm.experts import ExpertParallelExperts
from epcomm.group import EPGroup
from epcomm.records import TopKOutput
from epcomm.testing.data import RankBatch
from epcomm.testing.oracle import relative_error
from epcomm.weights.unquantized import ExpertWeights

# Tokens of each rank that are compared: each costs K experts in float64.
_CHECKED_TOKENS = 8
# Roundings of a value before it is y: both products, the activation, the weighted result, the sum
# of a rank and y.
_NUM_ROUNDINGS = 6
# Calls in a graph: receive buffers that are used in turn must end as they began.
_CALLS = 2


@dataclass(frozen=True, kw_only=True, eq=False)
class _Layer:
    """A layer that is timed, in a graph or launched from Python."""

    mode: Mode
    layer: ExpertParallelExperts
    in_graph: bool = False

    @property
    def name(self) -> str:
        how = ", graph" if self.in_graph else ""
        return f"layer in {self.mode.value} on {self.layer.plan.prefill.backend}{how}"


def measure_layers(
    options: BenchOptions, group: EPGroup, batch: RankBatch
) -> tuple[list[Timing], list[Wrong]]:
    """Check and time a layer on every backend that serves, in every mode, in turn.

    Collective: yes.   Host sync: yes.
    """
    topk = TopKOutput(topk_ids=batch.topk_ids, topk_weights=batch.topk_weights)
    tokens = batch.x.shape[0]
    right: list[_Layer] = []
    wrong: list[Wrong] = []
    expected = _expected(options, batch)
    for each in _open_layers(options, tokens, group):
        faults = faults_of_all(_find_fault(options, each, batch.x, topk, expected))
        if faults:
            wrong.append(Wrong(name=each.name, tokens=tokens, fault=faults))
            continue
        right.append(each)
        if is_in_graph(each.layer.plan.prefill, group.device):
            right.append(replace(each, in_graph=True))
    calls = {e.name: layer_call(e.layer, batch.x, topk, in_graph=e.in_graph) for e in right}
    us = time_all(calls, group.device, options)
    for each in right:
        each.layer.check()
    timings = [
        Timing(
            mode=each.mode.value,
            backend=each.layer.plan.prefill.backend,
            runner=each.layer.plan.runner or "",
            tokens=tokens,
            in_graph=each.in_graph,
            us=us[each.name],
        )
        for each in right
    ]
    return timings, wrong


def _open_layers(options: BenchOptions, tokens: int, group: EPGroup) -> list[_Layer]:
    num_local = options.experts // group.world_size
    first = group.rank * num_local
    made = [_expert(options, expert, group.device) for expert in range(first, first + num_local)]
    weights = ExpertWeights(
        gate_up_proj=torch.stack([gate_up for gate_up, _ in made]),
        down_proj=torch.stack([down for _, down in made]),
    )
    opened = []
    for mode in options.modes:
        config = options.config(mode, tokens)
        serving, _ = find_backends(group, options.moe_spec(), config, options.backends)
        for backend in serving:
            config = options.config(mode, tokens, backend)
            layer = ExpertParallelExperts(
                weights, group, config, top_k=options.top_k, is_local=True
            )
            opened.append(_Layer(mode=mode, layer=layer))
    return opened


def _expert(options: BenchOptions, expert: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Make gate_up [2I, H] and down [H, I] of one expert, which are equal on any rank."""
    assert options.intermediate is not None, "a whole layer was asked for"
    hidden, inner = options.hidden, options.intermediate
    generator = torch.Generator(device).manual_seed(options.seed + 104729 * (expert + 1))

    def matrix(rows: int, columns: int) -> Tensor:
        shape = (rows, columns)
        values = torch.randn(shape, generator=generator, dtype=torch.float32, device=device)
        return (values / columns**0.5).to(dtype_of(options.dtype))

    return matrix(2 * inner, hidden), matrix(hidden, inner)


def _expected(options: BenchOptions, batch: RankBatch) -> Tensor:
    """Compute y of the first tokens in float64, [at most _CHECKED_TOKENS, H]."""
    x = batch.x[:_CHECKED_TOKENS].double()
    y = torch.zeros_like(x)
    for token, experts in enumerate(batch.topk_ids[:_CHECKED_TOKENS].tolist()):
        for k, expert in enumerate(experts):
            gate_up, down = (each.double() for each in _expert(options, expert, x.device))
            gate, up = (gate_up @ x[token]).chunk(2)
            result = down @ (gate / (1 + torch.exp(-gate)) * up)
            y[token] += batch.topk_weights[token, k].double() * result
    return y


def _find_fault(
    options: BenchOptions, each: _Layer, x: Tensor, topk: TopKOutput, expected: Tensor
) -> str:
    """Return how far the layer is from the formula on this rank, '' if within its roundings."""
    try:
        y = each.layer(x, topk)
    except EPError as error:
        return str(error)
    error = relative_error(y[:_CHECKED_TOKENS], expected)
    limit = _tolerance(options)
    return "" if error <= limit else f"y is off by {error:.1e}, allowed {limit:.1e}"


def _tolerance(options: BenchOptions) -> float:
    """Return the largest error of y, as a share of its largest value.

    Besides the roundings, products add H and I terms in float32, whose errors add up like a random
    walk.
    """
    assert options.intermediate is not None, "a whole layer was asked for"
    adding = math.sqrt(options.hidden + options.intermediate) * torch.finfo(torch.float32).eps
    return _NUM_ROUNDINGS * torch.finfo(dtype_of(options.dtype)).eps + adding


def layer_call(
    layer: ExpertParallelExperts, x: Tensor, topk: TopKOutput, *, in_graph: bool
) -> Timed:
    """Return a function that times a call of a layer as the span `layer`, eager or replayed.

    Collective: in a graph.
    """
    device = x.device
    if not in_graph:

        def eager(clock: Clock) -> Mapping[str, float]:
            wait_for_all(device)
            clock.mark()
            layer(x, topk)
            clock.mark()
            return {"layer": clock.take()[0]}

        return eager

    def calls() -> None:
        for _ in range(_CALLS):
            layer(x, topk)

    graph = captured(calls)
    return lambda clock: {"layer": time_launch(graph.replay, device, clock) / _CALLS}
