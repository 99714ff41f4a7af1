"""Measure time by clocks, and compute the statistics of the slowest rank."""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Self

import torch


@dataclass(frozen=True, kw_only=True)
class Percentiles:
    """The percentiles over iterations, each as long as its slowest rank, in milliseconds."""

    p50: float
    p95: float
    p99: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Self:
        """Interpolated linearly: of 1, 2, 3, 4 the median is 2.5."""
        numbers = torch.tensor(list(values), dtype=torch.float64, device="cpu")
        at = torch.tensor([0.5, 0.95, 0.99], dtype=torch.float64, device="cpu")
        p50, p95, p99 = numbers.quantile(at).tolist()
        return cls(p50=p50, p95=p95, p99=p99)


def slowest_rank(spans_by_rank: Sequence[Sequence[Mapping[str, float]]]) -> dict[str, list[float]]:
    """Return each span's times on the slowest rank by iteration; spans_by_rank is [W][N]."""
    iterations = [list(ranks) for ranks in zip(*spans_by_rank, strict=True)]
    return {
        name: [max(rank[name] for rank in ranks) for ranks in iterations]
        for name in iterations[0][0]
    }


class Clock:
    """Marks moments of this rank's work on a device: by events of the current stream on CUDA."""

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        self._events: list[torch.cuda.Event] = []
        self._host_s: list[float] = []

    def mark(self) -> None:
        if self._is_cuda:
            self._events.append(torch.cuda.Event(enable_timing=True))
            self._events[-1].record()
        else:
            self._host_s.append(time.perf_counter())

    def take(self) -> list[float]:
        """Return the milliseconds between neighbouring marks; drop the marks. Host sync: yes."""
        events, host_s, self._events, self._host_s = self._events, self._host_s, [], []
        if self._is_cuda:
            torch.cuda.synchronize()
        laps = [float(start.elapsed_time(end)) for start, end in pairwise(events)]
        return laps + [(end - start) * 1e3 for start, end in pairwise(host_s)]


def peak_bytes_of(call: Callable[[], object]) -> int:
    """Return the most bytes of torch's that a call holds at a time on a GPU. Host sync: yes."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


@dataclass(frozen=True, eq=False)
class Captured:
    """A graph, and the call that it captured, which holds the tensors that a replay reads.

    Otherwise the next capture, which empties the allocator's cache, unmaps the memory of those that
    were allocated before the graph.
    """

    graph: torch.cuda.CUDAGraph
    call: Callable[[], object]

    def replay(self) -> None:
        """Launch the kernels of the call."""
        self.graph.replay()


def captured(call: Callable[[], object], *, warm_up: bool = True) -> Captured:
    """Capture a call as a graph, whose replay needs no launch from Python for each kernel.

    warm_up: make the call once before, to compile kernels and to allocate.
    """
    if warm_up:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return Captured(graph, call)
