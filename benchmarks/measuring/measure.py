"""Run contenders in turn and time each half; every rank does the same."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.contenders import Contender
from benchmarks.measuring.timing import Clock, Laps, clock_for
from epcomm.testing.data import RankBatch

DispatchedT = TypeVar("DispatchedT")


def wait_for_all(device: torch.device) -> None:
    """Return when every rank has come here and finished its work. Collective: yes."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        dist.barrier(device_ids=[device.index])
        torch.cuda.synchronize(device)
    else:
        dist.barrier()


def run_call(contender: Contender[DispatchedT], batch: RankBatch, clock: Clock) -> Laps:
    """One dispatch and combine, with experts between them that nobody waits for.

    Both halves start on all ranks together, so neither pays for what the other rank did before.
    """
    device = batch.x.device
    wait_for_all(device)
    clock.mark()
    dispatched = contender.dispatch(batch)
    clock.mark()
    grouped = contender.group(dispatched)
    clock.mark()
    results = _run_experts(grouped.rows)
    del grouped
    wait_for_all(device)
    clock.mark()
    contender.combine(results, dispatched)
    clock.mark()
    dispatch, group, _, combine = clock.take()
    return Laps(dispatch=dispatch, group=group, combine=combine)


def run_in_turn(
    contenders: Sequence[Contender],
    batch: RankBatch,
    *,
    num_rounds: int,
    on_round: Callable[[], None] = lambda: None,
) -> dict[str, list[Laps]]:
    """Call each contender in turn, repeatedly, so that a slow machine slows all of them.

    Returns: by contender, the laps of this rank.
    """
    clock = clock_for(batch.x.device)
    laps: dict[str, list[Laps]] = {contender.name: [] for contender in contenders}
    for _ in range(num_rounds):
        for contender in contenders:
            laps[contender.name].append(run_call(contender, batch, clock))
        on_round()
    return laps


def _run_experts(rows: Tensor) -> Tensor:
    """Return the results of identity experts: new memory, without gaps between rows."""
    return rows.clone(memory_format=torch.contiguous_format)
