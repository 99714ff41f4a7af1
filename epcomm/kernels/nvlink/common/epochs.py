"""The number behind an epoch of low latency, and the number before it."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def next_epoch(epoch: tl.tensor) -> tl.tensor:
    """Return the epoch behind one of low latency: never 0, which lines hold that nobody wrote."""
    return tl.where(epoch == -1, 1, epoch + 1)


@triton.jit
def previous_epoch(epoch: tl.tensor) -> tl.tensor:
    """Return the epoch before: of the first one -1, which lines of 0 are not behind."""
    return tl.where(epoch == 1, -1, epoch - 1)
