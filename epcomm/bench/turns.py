"""Time the dispatch and combine of contenders in turn, on all ranks together."""

from collections.abc import Callable, Mapping, Sequence

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
# Calls in a graph: receive buffers that are used in turn must end as they began.
_CALLS = 2


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


def call_of(contender: Contender[DispatchedT], batch: RankBatch, first_expert: int) -> Timed:
    """Return a function that times dispatch, combine and pairs of both: from a graph if possible.

    Results of experts are computed before. The routing of `batch` is replayed.

    Collective: yes.
    """
    waiting = [contender.dispatch(batch)]
    results = run_experts(contender.group(waiting[0]), first_expert)
    contender.combine(results, waiting[0])

    def dispatch() -> None:
        waiting[0] = contender.dispatch(batch)

    parts = {
        "dispatch": dispatch,
        "combine": lambda: contender.combine(results, waiting[0]),
        "pair": lambda: contender.combine(results, contender.dispatch(batch)),
    }
    device = batch.x.device
    return time_parts(parts, "pair", device, in_graph=is_in_graph(contender, device))


def time_parts(
    parts: Mapping[str, Callable[[], object]], whole: str, device: torch.device, *, in_graph: bool
) -> Timed:
    """Return a function that times each part, all ranks together; one may end what another began.

    whole: the part that is a whole call.   in_graph: parts are replayed from graphs; else eager.

    Collective: as the parts.
    """
    num_calls, timed = (_CALLS, time_launch) if in_graph else (1, _time_eager)

    def calls() -> None:
        for _ in range(num_calls):
            parts[whole]()

    launches = {**parts, whole: calls}
    if in_graph:
        for part in launches.values():
            part()
        # No part can be made alone to warm up, because it ends what another one began.
        launches = {name: captured(part, warm_up=False).replay for name, part in launches.items()}

    def call(clock: Clock) -> Mapping[str, float]:
        ms = {name: timed(launch, device, clock) for name, launch in launches.items()}
        return {**ms, whole: ms[whole] / num_calls}

    return call


def _time_eager(call: Callable[[], object], device: torch.device, clock: Clock) -> float:
    """Return the milliseconds of a call without a wait for earlier work of another rank."""
    wait_for_all(device)
    clock.mark()
    call()
    clock.mark()
    (ms,) = clock.take()
    return ms


def is_in_graph(what: Contender | PhasePlan, device: torch.device) -> bool:
    """Return whether calls are replayed from a graph here: where they can, on a GPU. Local."""
    return what.is_capturable and has_graphs(device)


def has_graphs(device: torch.device) -> bool:
    return device.type == "cuda"
