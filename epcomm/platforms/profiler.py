"""Ranges by which a profiler shows the phases of a layer: `epcomm::dispatch` and its kin.

Under torch.profiler, and under emit_nvtx(), a range is a record_function. Without, it is an NVTX
range where torch was built for CUDA, which a tool such as Nsight Systems shows; NVTX asks by itself
whether there is one. Nobody has to switch anything on.

A record_function costs 6 us also where nobody listens (CPU of two cores, torch 2.13), so a range
asks first whether somebody does, which takes 0.2 us.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch
from torch._C._autograd import _profiler_enabled
from torch.autograd.profiler import record_function
from torch.compiler import is_compiling
from torch.cuda import nvtx

from epcomm.platforms.compiler import untraced

P = ParamSpec("P")
R = TypeVar("R")

# Of this build of torch, whatever devices there are: elsewhere torch.cuda.nvtx raises.
_HAS_NVTX = hasattr(torch._C, "_nvtx")


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
            if not _HAS_NVTX:
                return function(*args, **kwargs)
            nvtx.range_push(label)
            try:
                return function(*args, **kwargs)
            finally:
                nvtx.range_pop()

        compiled = function if is_traced else untraced(run)
        return run

    return decorate
