"""Time calls by the time of the host that makes them, for bench_eager and bench_deep_ep.

An eager call is timed without waiting for the device, in bursts that do not fill the queue of
launches, in units of a small operator of torch. Bursts of this operator are timed in between, so
that a change of clock affects both.
"""

import cProfile
import io
import pstats
import statistics
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from epcomm.bench.machine import REPOSITORY
from epcomm.buffers.nvlink.normal_counts import Totals

# Calls of the reference operator in a burst.
_UNIT_CALLS = 100
# Bursts under the profiler.
_PROFILED_BURSTS = 5
_SHOWN_FUNCTIONS = 25


@dataclass(frozen=True, kw_only=True)
class EagerRow:
    """The host time of one call, by medians.

    us: time of the call.   waited_us: the part in which the host waited for counts.   unit_us: time
        of the unit.
    python_calls: functions of Python that the call runs.   torch_operators: operators of torch.
    profile: the functions with most internal time, as cProfile prints them.
    """

    us: float
    waited_us: float
    unit_us: float
    python_calls: float
    torch_operators: int
    profile: str

    @property
    def units(self) -> float:
        """The host time in units, without waiting."""
        return (self.us - self.waited_us) / self.unit_us


def eager_row(
    call: Callable[[], object], device: torch.device, *, rounds: int, burst: int
) -> EagerRow:
    """Time a call that all ranks make. Collective as the call.   Host sync: between bursts.

    Args:
        call: the timed call.
        device: on which it runs.
        rounds: bursts.
        burst: calls in one.
    """
    one = torch.zeros(1, device=device)
    # After these calls all variants of kernels are compiled.
    for _ in range(burst):
        call()
        _synchronize(device)
    calls_us, waited_us, units_us = [], [], []
    with waits_of_counts() as waits_ns:
        for _ in range(rounds):
            start_ns = time.perf_counter_ns()
            for _ in range(_UNIT_CALLS):
                one.add_(1)
            units_us.append((time.perf_counter_ns() - start_ns) / 1e3 / _UNIT_CALLS)
            _synchronize(device)
            for _ in range(burst):
                waits_ns.clear()
                start_ns = time.perf_counter_ns()
                call()
                calls_us.append((time.perf_counter_ns() - start_ns) / 1e3)
                waited_us.append(sum(waits_ns) / 1e3)
            _synchronize(device)
    with _OperatorCount() as operators:
        call()
    _synchronize(device)
    own_us = [us - waited for us, waited in zip(calls_us, waited_us, strict=True)]
    median_own, median_us = statistics.median(own_us), statistics.median(calls_us)
    python_calls, profile = _profile_of(call, device, burst)
    return EagerRow(
        us=median_us,
        waited_us=median_us - median_own,
        unit_us=statistics.median(units_us),
        python_calls=python_calls,
        torch_operators=operators.number,
        profile=profile,
    )


@contextmanager
def waits_of_counts() -> Iterator[list[int]]:
    """Collect the nanoseconds of each wait of normal mode for its counts."""
    waits_ns: list[int] = []
    wait = Totals.wait

    def timed(self: Totals, check: Callable[[], None], timeout_s: float) -> list[int] | None:
        start_ns = time.perf_counter_ns()
        try:
            return wait(self, check, timeout_s)
        finally:
            waits_ns.append(time.perf_counter_ns() - start_ns)

    Totals.wait = timed
    try:
        yield waits_ns
    finally:
        Totals.wait = wait


def _profile_of(call: Callable[[], object], device: torch.device, burst: int) -> tuple[float, str]:
    """Return the functions of Python in one call, and those with most internal time."""
    profiler = cProfile.Profile()
    for _ in range(_PROFILED_BURSTS):
        for _ in range(burst):
            profiler.runcall(call)
        _synchronize(device)
    text = io.StringIO()
    stats = pstats.Stats(profiler, stream=text).sort_stats("tottime")
    stats.print_stats(_SHOWN_FUNCTIONS)
    times: Mapping[tuple[str, int, str], tuple[int, int]] = stats.stats  # type: ignore[attr-defined]
    # Built-in functions have no file.
    num_calls = sum(each[1] for (path, _, _), each in times.items() if path != "~")
    # Files of the repository are named by their paths in it.
    return num_calls / (_PROFILED_BURSTS * burst), text.getvalue().replace(f"{REPOSITORY}/", "")


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class _OperatorCount(TorchDispatchMode):
    """Counts the operators of torch that run under it."""

    def __init__(self) -> None:
        super().__init__()
        self.number = 0

    def __torch_dispatch__(  # type: ignore[override]
        self,
        func: torch._ops.OpOverload,
        types: object,
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        self.number += 1
        return func(*args, **(kwargs or {}))
