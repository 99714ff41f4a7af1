"""Functions that torch.compile leaves alone: one graph break, instead of one at each collective."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch
from torch._compile import _disable_dynamo

P = ParamSpec("P")
R = TypeVar("R")


def untraced(function: Callable[P, R]) -> Callable[P, R]:
    """Run `function` as it is, also where its caller is compiled."""
    # Unlike torch.compiler.disable this imports the compiler, a second's work, only when called.
    run_untraced = _disable_dynamo(function)

    @wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        if torch.compiler.is_compiling():
            return run_untraced(*args, **kwargs)
        return function(*args, **kwargs)

    return run
