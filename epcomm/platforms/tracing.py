"""How calls of a layer appear to profilers and to torch.compile.

Ranges by which a profiler shows the phases of a layer: `epcomm::dispatch` and its kin.

Under torch.profiler, and under emit_nvtx(), a range is a record_function. Without, it is an NVTX
range where torch was built for CUDA, which a tool such as Nsight Systems shows; NVTX asks by itself
whether there is one. Nobody has to switch anything on.

A record_function costs 6 us also where nobody listens (CPU of two cores, torch 2.13), so a range
asks first whether somebody does, which takes 0.2 us.

torch.compile leaves a layer alone: one graph break, instead of one at each collective. torch.export
has no graph breaks, so these functions refuse it.
"""

from __future__ import annotations

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

# None unless torch was built for CUDA. torch.cuda.nvtx would add a Python call to each.
_nvtx = getattr(torch._C, "_nvtx", None)


def ranged(phase: str, *, is_traced: bool = True) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Let a profiler show the calls of a function as `epcomm::<phase>`, on whatever thread.

    Compiled callers see the function without its range, and no graph break; without `is_traced`
    they leave it alone, and it cannot be exported, as untraced() says.
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
    """Run `function` as it is, also where its caller is compiled.

    Raises:
        ConfigError: the caller is being exported.
    """
    # Unlike torch.compiler.disable this imports the compiler, a second's work, only when called.
    run_untraced, name = _disable_dynamo(function), function.__qualname__

    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        if torch.compiler.is_compiling():
            # is_exporting() is true in torch 2.11 wherever a function is compiled.
            if torch.compiler._is_exporting_flag:
                raise ConfigError(
                    f"torch.export: {name} cannot be exported, because how much "
                    "ranks exchange depends on data; export the parts of the model before and "
                    "after the expert-parallel layer, and call the layer itself"
                )
            return run_untraced(*args, **kwargs)
        return function(*args, **kwargs)

    return run
