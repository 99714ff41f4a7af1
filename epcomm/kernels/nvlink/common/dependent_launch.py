"""The next kernel of a stream may start while this one runs: programmatic dependent launch.

A receiver needs only the signals of the sender before it. So it starts while the sender runs, and
waits for its end only at its own end, so that later kernels find all data that both have written.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache

import torch
import triton
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from epcomm.kernels.launch import IS_INTERPRETED
from epcomm.platforms.cuda import has_dependent_launch


@cache
def overlapping(device: torch.device) -> Mapping[str, bool]:
    """Return constants and options of a kernel that starts during the one before it, if it can."""
    overlaps = not IS_INTERPRETED and has_dependent_launch(device)
    return {"OVERLAPS": True, "launch_pdl": True} if overlaps else {"OVERLAPS": False}


@triton.jit
def let_next_start() -> None:
    """Allow the next kernel to start when all programs of this one have called this or ended."""
    gdc_launch_dependents()


@triton.jit
def await_previous() -> None:
    """Wait until the kernel before this one has ended, and what it stored can be loaded."""
    gdc_wait()
