"""Profile the host time of one function as a call tree, with operators of torch as leaves.

Sections are the functions of the code itself, so a profile never names a step that is not there.
"""

from __future__ import annotations

import cProfile
import pstats
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import cast

# (file, line, name), as pstats knows a function.
_Function = tuple[str, int, str]
# Calls, calls without recursion, own seconds, cumulative seconds: of a function, or of its calls by
# one caller.
_Times = tuple[int, int, float, float]
_Stats = dict[_Function, tuple[int, int, float, float, dict[_Function, _Times]]]

# An exchange is a leaf of the tree, because the time below it is one long wait.
_LEAVES = ("all_to_all", "all_gather")


@dataclass(frozen=True, kw_only=True)
class Section:
    """A function below its caller.

    depth: 0 for the function that was measured.   ms: of one call, callees included.
    """

    depth: int
    name: str
    ms: float


@dataclass(frozen=True, kw_only=True)
class HostCost:
    """Hold what one call costs the thread that makes it; what it waits for costs nothing.

    cpu_us: median.   python_calls: of functions in Python, the same in every run of one version.
    """

    cpu_us: float
    python_calls: float


def host_cost(call: Callable[[], object], *, num_calls: int) -> HostCost:
    """Make a call some times to warm up, `num_calls` times on the clock, and under a profiler."""
    for _ in range(30):
        call()
    laps_ns = []
    for _ in range(num_calls):
        start_ns = time.thread_time_ns()
        call()
        laps_ns.append(time.thread_time_ns() - start_ns)
    profiler, num_profiled = cProfile.Profile(), 10
    for _ in range(num_profiled):
        profiler.runcall(call)
    stats = cast(_Stats, pstats.Stats(profiler).stats)  # type: ignore[attr-defined]
    # What is built in has no file.
    python_calls = sum(times[1] for (path, _, _), times in stats.items() if path != "~")
    return HostCost(
        cpu_us=statistics.median(laps_ns) / 1e3, python_calls=python_calls / num_profiled
    )


def sections_of(profiler: cProfile.Profile, *, num_calls: int, min_ms: float) -> list[Section]:
    """Return the functions that ran under `profiler`, longest first, without those below `min_ms`.

    Python's profiler knows pairs of caller and callee, not stacks: the time below a function with
    several callers is divided among the callers by their time.
    """
    stats = cast(_Stats, pstats.Stats(profiler).stats)  # type: ignore[attr-defined]
    ms_of_second = 1e3 / num_calls
    min_s = min_ms / ms_of_second
    roots = sorted(((times[3], one) for one, times in stats.items() if not times[4]), reverse=True)
    # The first is what was measured, however quick. Python 3.12 may leave it out, and then the
    # functions that it called have no caller.
    shown = roots[:1] + [root for root in roots[1:] if root[0] >= min_s]
    return [
        Section(depth=depth, name=_label(function), ms=seconds * ms_of_second)
        for root_seconds, root in shown
        for depth, function, seconds in _walk(stats, root, root_seconds, (), min_s)
    ]


def _walk(
    stats: _Stats,
    function: _Function,
    seconds: float,
    above: tuple[_Function, ...],
    min_s: float,
) -> Iterator[tuple[int, _Function, float]]:
    """Yield (depth, function, seconds) of `function`, then of the functions that it calls."""
    yield len(above), function, seconds
    if function[2] in _LEAVES:
        return
    share = seconds / (stats[function][3] or 1.0)
    callees = [(times[4][function][3], one) for one, times in stats.items() if function in times[4]]
    below = (*above, function)
    for callee_seconds, callee in sorted(callees, reverse=True):
        if callee_seconds * share >= min_s and callee not in below:
            yield from _walk(stats, callee, callee_seconds * share, below, min_s)


def _label(function: _Function) -> str:
    """`slots.reduce_rows`, or `torch.embedding_bag` for what is built in."""
    path, _, name = function
    if path == "~":
        return name.strip("<>").removeprefix("built-in method ").removeprefix("method ")
    module = path.rpartition("/")[2].removesuffix(".py")
    return f"{module}.{name}"
