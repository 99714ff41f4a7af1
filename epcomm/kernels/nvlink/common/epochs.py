"""Numbers of the dispatches and combines of a rank, which kernels count by themselves.

A number lies in memory of the device, so that a graph may be replayed. Programs read the last one
and add one; the last program to leave writes it back, when all have read it.
"""

from __future__ import annotations

import triton
import triton.language as tl

# Places in the state of a rank (int32): the last dispatch and combine, programs that have left,
# tokens that are taken, which kernels/nvlink/normal_combine.cu counts, and blocks that have sent
# metadata, which kernels/nvlink/dispatch_cuda counts.
DISPATCH_EPOCH, COMBINE_EPOCH, DISPATCH_LEFT, COMBINE_LEFT, COMBINE_TOKENS = 0, 1, 2, 3, 4
DISPATCH_COUNTED = 5
STATE_WORDS = 6


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
