"""The module deep_ep.utils.testing: times of calls on the GPU, or of the host on CPU ranks.

Source: deepseek-ai/DeepEP, deep_ep/utils/testing.py, for names, arguments and results.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

from epcomm.bench.timing import Clock

# More than the L2 cache of any GPU.
_FLUSHED_BYTES = 256_000_000


def flush_l2_cache(enabled: bool = True) -> None:
    """Overwrite the L2 cache of the current GPU."""
    if enabled and torch.cuda.is_available():
        torch.empty(_FLUSHED_BYTES, dtype=torch.uint8, device="cuda").zero_()


def bench(
    fn: Callable[[], object],
    num_warmups: int = 30,
    num_tests: int = 30,
    post_fn: Callable[[], object] | None = None,
    flush_l2: bool = True,
) -> tuple[float, float, float]:
    """Return the average, smallest and largest time of fn in seconds, without the first call."""
    for _ in range(num_warmups):
        fn()
    clock = Clock(torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    for _ in range(num_tests):
        flush_l2_cache(flush_l2)
        clock.mark()
        fn()
        clock.mark()
        if post_fn is not None:
            post_fn()
    # The times between calls alternate with those of the calls.
    seconds = [each / 1e3 for each in clock.take()[::2]][1:]
    return sum(seconds) / len(seconds), min(seconds), max(seconds)


def bench_kineto(
    fn: Callable[[], object],
    kernel_names: str | tuple[str, ...],
    num_tests: int = 30,
    suppress_kineto_output: bool = False,
    trace_path: str | None = None,
    flush_l2: bool = True,
    barrier_comm_profiling: bool = False,
    num_kernels_per_period: int = 1,
    barrier: Callable[[], object] | None = None,
) -> float | tuple[float, ...]:
    """Return the average seconds of the kernels whose names contain each of kernel_names.

    0 where no kernel has such a name: those of epcomm have other names than those of DeepEP. On CPU
    ranks, the time of fn for each name.
    """
    del suppress_kineto_output
    if num_kernels_per_period != 1:
        raise NotImplementedError(
            f"bench_kineto: num_kernels_per_period is {num_kernels_per_period}, expected 1; name "
            "the kernels apart"
        )
    names = (kernel_names,) if isinstance(kernel_names, str) else kernel_names
    fn()
    if not torch.cuda.is_available():
        found = (bench(fn, 0, num_tests + 1)[0],) * len(names)
        return found[0] if isinstance(kernel_names, str) else found
    wait = barrier or dist.barrier
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(num_tests):
            flush_l2_cache(flush_l2)
            if barrier_comm_profiling:
                wait()
            fn()
        torch.cuda.synchronize()
    if trace_path is not None:
        profiler.export_chrome_trace(trace_path)
    kernels = [each for each in profiler.events() or [] if each.device_type.name == "CUDA"]
    found = tuple(_average([k.device_time for k in kernels if name in k.name]) for name in names)
    return found[0] if isinstance(kernel_names, str) else found


def _average(microseconds: list[float]) -> float:
    return sum(microseconds) / max(len(microseconds), 1) / 1e6
