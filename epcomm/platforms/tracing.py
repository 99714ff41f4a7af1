"""Ranges of a layer's phases for profilers, and graph breaks for torch.compile.

Under torch.profiler or emit_nvtx(), a range such as `epcomm::dispatch` is a record_function.
Otherwise, if torch is built for CUDA, it is an NVTX range, which tools such as Nsight Systems show.
Nothing has to be enabled.

A record_function costs 6 us even without a profiler (CPU with two cores, torch 2.13), so a range
first checks whether one is active, which takes 0.2 us.

torch.compile sees a layer as one graph break, instead of one at each collective. torch.export has
no graph breaks, so these functions refuse it.
"""

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch
from torch._C._autograd import _profiler_enabled
from torch._compile import _disable_dynamo
from torch.autograd.profiler import record_function
from torch.compiler import is_compiling

from epcomm.errors import ConfigError

P = ParamSpec("P")
R = TypeVar("R")

# The functions are None unless torch is built for CUDA. torch.cuda.nvtx would add a Python call to
# each range.
_nvtx = getattr(torch._C, "_nvtx", None)


def ranged(phase: str, *, is_traced: bool = True) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Show the calls of a function in profilers as `epcomm::<phase>`, on any thread.

    Compiled callers trace the function without its range. With is_traced=False the function is a
    graph break and cannot be exported, see untraced().
    """
    label = f"epcomm::{phase}"

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @wraps(function)
        def run(*args: P.args, **kwargs: P.kwargs) -> R:
            if is_compiling():
                return compiled(*args, **kwargs)
            if _profiler_enabled():
                with record_function(label):
                    return function(*args, **kwargs)
            if _nvtx is None:
                return function(*args, **kwargs)
            _nvtx.rangePushA(label)
            try:
                return function(*args, **kwargs)
            finally:
                _nvtx.rangePop()

        compiled = function if is_traced else untraced(run)
        return run

    return decorate


def untraced(function: Callable[P, R]) -> Callable[P, R]:
    """Exclude `function` from compilation, also if its caller is compiled.

    Raises:
        ConfigError: the caller is being exported.
    """
    # Unlike torch.compiler.disable, this imports the compiler only when called, which takes 1 s.
    run_untraced, name = _disable_dynamo(function), function.__qualname__

    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        if torch.compiler.is_compiling():
            # In torch 2.11 is_exporting() is true during any compilation.
            if torch.compiler._is_exporting_flag:
                raise ConfigError(
                    f"torch.export: {name} cannot be exported, because the sizes that "
                    "ranks exchange depend on data; export the parts of the model before and "
                    "after the expert-parallel layer, and call the layer itself"
                )
            return run_untraced(*args, **kwargs)
        return function(*args, **kwargs)

    return run
