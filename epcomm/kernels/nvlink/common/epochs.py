"""Numbers of the dispatches and combines of a rank, which kernels count by themselves.

A number lies in memory of the device, so that a graph may be replayed. Programs read the last one
and add one; the last program to leave writes it back, when all have read it.
"""

from __future__ import annotations

import triton
import triton.language as tl

# Places in the state of a rank (int32): the last dispatch and combine, programs that have left,
# tokens that are taken, which kernels/nvlink/normal_combine.cu counts, blocks that have sent
# metadata, which kernels/nvlink/dispatch_cuda counts, whether a program of a dispatch has timed
# out, and programs that have left the index of normal_dispatch_recv.py.
DISPATCH_EPOCH, COMBINE_EPOCH, DISPATCH_LEFT, COMBINE_LEFT, COMBINE_TOKENS = 0, 1, 2, 3, 4
DISPATCH_COUNTED, DISPATCH_LOST, INDEX_LEFT = 5, 6, 7
STATE_WORDS = 8
# From there on the mark of the dispatch that each receive buffer holds.
BUFFER_MARKS = STATE_WORDS

_WRAPPED = tl.constexpr(-(2**31))


@triton.jit
def mark_of(epoch: tl.tensor) -> tl.tensor:
    """Return what words hold that are written in some epochs alone: never 0, as they are at first.

    Such words are compared for equality: that of a long past epoch may look as if it were ahead.
    """
    return tl.where(epoch == 0, _WRAPPED, epoch)


@triton.jit
def end_epoch(
    state_ptr: tl.tensor, EPOCH: tl.constexpr, LEFT: tl.constexpr, epoch: tl.tensor
) -> None:
    """Leave the kernel of `epoch`; whoever leaves last writes it down."""
    tl.debug_barrier()
    num_left = tl.atomic_add(state_ptr + LEFT, 1, sem="acq_rel", scope="gpu")
    if num_left == tl.num_programs(0) - 1:
        tl.store(state_ptr + LEFT, 0)
        tl.store(state_ptr + EPOCH, epoch)


@triton.jit
def next_epoch(epoch: tl.tensor) -> tl.tensor:
    """Return the epoch behind one of low latency: never 0, which lines hold that nobody wrote."""
    return tl.where(epoch == -1, 1, epoch + 1)


@triton.jit
def previous_epoch(epoch: tl.tensor) -> tl.tensor:
    """Return the epoch before: of the first one -1, which lines of 0 are not behind."""
    return tl.where(epoch == 1, -1, epoch - 1)
