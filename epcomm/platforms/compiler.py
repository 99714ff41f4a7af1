"""Functions that torch.compile leaves alone: one graph break, instead of one at each collective.

torch.export has no graph breaks, so these functions refuse it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch
from torch._compile import _disable_dynamo

from epcomm.errors import ConfigError

P = ParamSpec("P")
R = TypeVar("R")


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
