"""Time the dispatch and combine of contenders in turn, on all ranks together."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
import torch.distributed as dist

from epcomm.bench.check import run_experts
from epcomm.bench.contenders.base import Contender, DispatchedT
from epcomm.bench.options import BenchOptions
from epcomm.bench.ranks import of_all_ranks
from epcomm.bench.timing import Clock, Percentiles, captured, slowest_rank
from epcomm.planning.plans import PhasePlan
from epcomm.testing.data import RankBatch

# Times one call on this rank, in milliseconds by span.
Timed = Callable[[Clock], Mapping[str, float]]

# Cycles that all GPUs sleep after a collective, so that the host is ahead of them: 60 us.
_HEAD_START = 100_000
# Pairs in a graph: receive buffers that are used in turn must end as they began.
_PAIRS = 2


def wait_for_all(device: torch.device) -> None:
    """Wait until every rank has arrived here and finished its work. Collective: yes."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        dist.barrier(device_ids=[device.index])
        torch.cuda.synchronize(device)
    else:
        dist.barrier()


def time_launch(launch: Callable[[], object], device: torch.device, clock: Clock) -> float:
    """Return the milliseconds of the work that `launch` starts on all ranks together.

    On GPUs the ranks wait for one another on the device and the host is ahead of it, so that
    neither the launch nor the end of a barrier on the host counts.

    Collective: yes.   Host sync: yes.
    """
    if device.type == "cuda":
        dist.all_reduce(torch.zeros(1, dtype=torch.float32, device=device))
        torch.cuda._sleep(_HEAD_START)
    else:
        dist.barrier()
    clock.mark()
    launch()
    clock.mark()
    (ms,) = clock.take()
    return ms


def take_turns(
    calls: Mapping[str, Timed],
    device: torch.device,
    *,
    num_rounds: int,
    on_round: Callable[[], None] = lambda: None,
) -> dict[str, list[Mapping[str, float]]]:
    """Make each call in turn, repeatedly, so that a slow machine slows all of them.

    Returns: by name, the spans that the call measured on this rank in each round.
    """
    clock = Clock(device)
    spans: dict[str, list[Mapping[str, float]]] = {name: [] for name in calls}
    for _ in range(num_rounds):
        for name, call in calls.items():
            spans[name].append(call(clock))
        on_round()
    return spans


def time_all(
    calls: Mapping[str, Timed],
    device: torch.device,
    options: BenchOptions,
    *,
    on_round: Callable[[], None] = lambda: None,
) -> dict[str, dict[str, Percentiles]]:
    """Time each call in turn after a warm-up: microseconds on the slowest rank, by call and span.

    Collective: yes.
    """
    take_turns(calls, device, num_rounds=options.warm_up)
    spans = take_turns(calls, device, num_rounds=options.iterations, on_round=on_round)
    return {name: percentiles_of(found) for name, found in spans.items()}


def percentiles_of(spans: Sequence[Mapping[str, float]]) -> dict[str, Percentiles]:
    """Return percentiles in microseconds of this and all other ranks' spans. Collective: yes."""
    slowest = slowest_rank(of_all_ranks(spans))
    return {name: Percentiles.of(1e3 * ms for ms in times) for name, times in slowest.items()}


def call_of(contender: Contender, batch: RankBatch, first_expert: int) -> Timed:
    """Return a function that times a call: replayed from graphs if possible, else eager.

    Collective: yes.
    """
    if is_in_graph(contender, batch.x.device):
        return graph_call(contender, batch, first_expert)
    return partial(run_call, contender, batch)


def run_call(
    contender: Contender[DispatchedT], batch: RankBatch, clock: Clock
) -> Mapping[str, float]:
    """Time one dispatch and combine, with stand-ins of experts between them that are not timed.

    Both halves start on all ranks together, so neither includes a wait for earlier work of another
    rank.
    """
    device = batch.x.device
    wait_for_all(device)
    clock.mark()
    dispatched = contender.dispatch(batch)
    clock.mark()
    grouped = contender.group(dispatched)
    clock.mark()
    results = grouped.rows.clone(memory_format=torch.contiguous_format)
    del grouped
    wait_for_all(device)
    clock.mark()
    contender.combine(results, dispatched)
    clock.mark()
    dispatch, group, _, combine = clock.take()
    return {
        "dispatch": dispatch,
        "grouped_dispatch": dispatch + group,
        "combine": combine,
        "pair": dispatch + combine,
        "grouped_pair": dispatch + group + combine,
    }


def is_in_graph(what: Contender | PhasePlan, device: torch.device) -> bool:
    """Return whether calls are replayed from a graph here: where they can, on a GPU. Local."""
    return what.is_capturable and device.type == "cuda"


def graph_call(contender: Contender[DispatchedT], batch: RankBatch, first_expert: int) -> Timed:
    """Capture a dispatch, its combine and pairs of both as graphs; return the call that times them.

    The time includes no launch from Python. Results of experts are computed before. The routing of
    `batch` is replayed.

    Collective: yes.
    """
    device = batch.x.device
    dispatched = contender.dispatch(batch)
    results = run_experts(contender.group(dispatched), first_expert)
    contender.combine(results, dispatched)
    waiting: list[DispatchedT] = []
    # Dispatch and combine alternate, so neither can be run alone for warm-up.
    dispatching = captured(lambda: waiting.append(contender.dispatch(batch)), warm_up=False)
    combining = captured(lambda: contender.combine(results, waiting[-1]), warm_up=False)

    def pairs() -> None:
        for _ in range(_PAIRS):
            contender.combine(results, contender.dispatch(batch))

    pairing = captured(pairs)

    def call(clock: Clock) -> Mapping[str, float]:
        both, dispatch, combine = (
            time_launch(graph.replay, device, clock) for graph in (pairing, dispatching, combining)
        )
        return {"dispatch": dispatch, "combine": combine, "pair": both / _PAIRS}

    return call
