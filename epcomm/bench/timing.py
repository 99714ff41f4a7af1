"""Measure time by clocks, and compute the statistics of the slowest rank."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch


@dataclass(frozen=True, kw_only=True)
class Percentiles:
    """The percentiles over iterations, each as long as its slowest rank, in milliseconds."""

    p50: float
    p95: float
    p99: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Percentiles:
        """Interpolated linearly: of 1, 2, 3, 4 the median is 2.5."""
        numbers = torch.tensor(list(values), dtype=torch.float64, device="cpu")
        at = torch.tensor([0.5, 0.95, 0.99], dtype=torch.float64, device="cpu")
        p50, p95, p99 = numbers.quantile(at).tolist()
        return cls(p50=p50, p95=p95, p99=p99)


def slowest_rank(
    spans_by_rank: Sequence[Sequence[Mapping[str, float]]],
) -> dict[str, list[float]]:
    """Return each span's times on the slowest rank by iteration; spans_by_rank is [W][N]."""
    iterations = [list(ranks) for ranks in zip(*spans_by_rank, strict=True)]
    return {
        name: [max(rank[name] for rank in ranks) for ranks in iterations]
        for name in iterations[0][0]
    }


class Clock(ABC):
    """Marks moments of this rank's work."""

    @abstractmethod
    def mark(self) -> None:
        """Mark the current time."""

    @abstractmethod
    def take(self) -> list[float]:
        """Return the milliseconds between neighbouring marks; drop the marks. Host sync: yes."""


class HostClock(Clock):
    """A clock for a device whose operators return when they are done."""

    def __init__(self) -> None:
        """Start without a mark."""
        self._marks_s: list[float] = []

    def mark(self) -> None:
        self._marks_s.append(time.perf_counter())

    def take(self) -> list[float]:
        marks, self._marks_s = self._marks_s, []
        return [(end - start) * 1e3 for start, end in pairwise(marks)]


class EventClock(Clock):
    """A clock for CUDA, by events of the current stream."""

    def __init__(self) -> None:
        """Start without a mark."""
        self._events: list[torch.cuda.Event] = []

    def mark(self) -> None:
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        self._events.append(event)

    def take(self) -> list[float]:
        events, self._events = self._events, []
        torch.cuda.synchronize()
        return [float(start.elapsed_time(end)) for start, end in pairwise(events)]


def clock_for(device: torch.device) -> Clock:
    """Return the clock that sees the end of work on `device`."""
    return EventClock() if device.type == "cuda" else HostClock()


def captured(call: Callable[[], object], *, warm_up: bool = True) -> torch.cuda.CUDAGraph:
    """Capture a call as a graph, whose replay needs no launch from Python for each kernel.

    warm_up: make the call once before, to compile kernels and to allocate.
    """
    if warm_up:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph
