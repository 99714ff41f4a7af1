"""Profile the time of one contender on the slowest rank."""

from __future__ import annotations

import cProfile
from collections.abc import Sequence
from typing import Generic, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import ProfilerActivity
from torch.profiler import profile as torch_profile

from benchmarks.measuring.host_profile import Section, sections_of
from epcomm.bench.contenders.base import Contender, Grouped
from epcomm.bench.contenders.sent_bytes import SentBytes
from epcomm.bench.timing import clock_for
from epcomm.bench.turns import run_call
from epcomm.testing.data import RankBatch

DispatchedT = TypeVar("DispatchedT")

# Milliseconds below which a section is noise.
MIN_MS = 0.05
# Kernels shown on an accelerator.
MAX_KERNELS = 20


def profile_contender(
    contender: Contender, batch: RankBatch, *, num_calls: int
) -> Sequence[Section]:
    """Sections of one call on the slowest rank, the same on all ranks. Collective: yes."""
    on_device = batch.x.device.type == "cuda"
    mine = (_profile_device if on_device else _profile_host)(contender, batch, num_calls)
    by_rank: list[Sequence[Section]] = [()] * dist.get_world_size()
    dist.all_gather_object(by_rank, mine)
    return max(by_rank, key=lambda tree: sum(one.ms for one in tree if one.depth == 0))


class _Profiled(Contender[DispatchedT], Generic[DispatchedT]):
    """A contender whose three steps run under a profiler each."""

    def __init__(self, contender: Contender[DispatchedT]) -> None:
        self._contender = contender
        self.profilers = [cProfile.Profile() for _ in range(3)]

    @property
    def num_roundings(self) -> int:
        return self._contender.num_roundings

    def dispatch(self, batch: RankBatch) -> DispatchedT:
        return self.profilers[0].runcall(self._contender.dispatch, batch)

    def group(self, dispatched: DispatchedT) -> Grouped:
        return self.profilers[1].runcall(self._contender.group, dispatched)

    def combine(self, results: Tensor, dispatched: DispatchedT) -> Tensor:
        return self.profilers[2].runcall(self._contender.combine, results, dispatched)

    def sent_bytes(self, batch: RankBatch) -> SentBytes:
        return self._contender.sent_bytes(batch)


def _profile_host(contender: Contender, batch: RankBatch, num_calls: int) -> list[Section]:
    clock, profiled = clock_for(batch.x.device), _Profiled(contender)
    for _ in range(num_calls):
        run_call(profiled, batch, clock)
    return [
        section
        for profiler in profiled.profilers
        for section in sections_of(profiler, num_calls=num_calls, min_ms=MIN_MS)
    ]


def _profile_device(contender: Contender, batch: RankBatch, num_calls: int) -> list[Section]:
    clock = clock_for(batch.x.device)
    with torch_profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as found:
        for _ in range(num_calls):
            run_call(contender, batch, clock)
        torch.cuda.synchronize()
    # Operators and library calls have device time too: that of the kernels below them.
    kernels = [event for event in found.key_averages() if event.device_type.name == "CUDA"]
    kernels.sort(key=lambda event: -event.self_device_time_total)
    return [
        Section(depth=0, name=event.key, ms=event.self_device_time_total / 1e3 / num_calls)
        for event in kernels[:MAX_KERNELS]
    ]
