"""Launch kernels; Triton's Python runs only once for each form of their arguments."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from epcomm.kernels.prepared import CHANGES, PreparedLaunch

# Dtypes of tensors, or types of other arguments, in order; and constants by name.
Form = tuple[tuple[torch.dtype | type, ...], tuple[tuple[str, Any], ...]]


def launch(
    kernel: object, grid: int, arguments: tuple[Tensor | int | None, ...], **constants: object
) -> None:
    """Launch `grid` programs on the device of the arguments.

    Args:
        kernel: decorated by triton.jit; it is specialised for no integer among its arguments.
        grid: number of programs.
        arguments: in the order of the kernel's parameters, which constants follow.
        constants: those, and options of the compiler.

    Host sync: none.
    """
    device = next(each.device for each in arguments if isinstance(each, Tensor))
    dtypes = tuple(each.dtype if isinstance(each, Tensor) else type(each) for each in arguments)
    _prepared(kernel, device, (dtypes, tuple(constants.items())))(grid, *arguments)


# A layer in training calls a kernel in about ten forms.
@lru_cache(maxsize=256)
def _prepared(kernel: object, device: torch.device, form: Form) -> PreparedLaunch:
    dtypes, constants = form
    return PreparedLaunch(kernel, (CHANGES,) * len(dtypes), dict(constants))
