"""A barrier of the ranks on their devices, which ends when all have arrived or no polls are left.

Memory order: what a rank's stream did before the barrier is visible to all ranks after it, by the
release of the signals and the acquire of await_at(). Unlike a barrier of the host's transport it
ends when a rank is dead, and it needs only the memory that the ranks share.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from epcomm.kernels.launch import next_power_of_two
from epcomm.kernels.nvlink.common.exchange import VARYING
from epcomm.kernels.nvlink.common.signals import await_at, int32_at
from epcomm.platforms.cuda import on_device


@triton.jit(do_not_specialize=VARYING)
def _barrier_kernel(
    flags_table_ptr: tl.tensor,
    excluded_ptr: tl.tensor,
    missing_ptr: tl.tensor,
    flags_address: tl.tensor,
    rank: tl.tensor,
    number: tl.tensor,
    max_polls: tl.tensor,
    W: tl.constexpr,
    W_LANES: tl.constexpr,
) -> None:
    """Wait: in the third barrier rank 0 finds the signals 3 2, and 3 3 once rank 1 has come."""
    lane = tl.arange(0, W_LANES)
    is_rank = (lane < W) & (tl.load(excluded_ptr + lane, mask=lane < W, other=1) == 0)
    flags = tl.load(flags_table_ptr + lane, mask=is_rank, other=0) + rank * 4
    # The release is made by a few threads: it covers the stores of the others only after this.
    tl.debug_barrier()
    # Read by await_at() on every rank. One vector, hence one fence for all ranks.
    flags_ptr = flags.to(tl.pointer_type(tl.int32))
    tl.atomic_add(flags_ptr, is_rank.to(tl.int32), mask=is_rank, sem="release", scope="sys")
    missing, _ = await_at(  # pyright: ignore[reportGeneralTypeIssues]
        int32_at(flags_address) + lane,
        is_rank,
        None,
        number,
        max_polls,
        "sys",
        False,
    )
    tl.store(missing_ptr + lane, missing, mask=lane < W)


def device_barrier(
    flags_table: Tensor,
    excluded: Tensor,
    missing: Tensor,
    *,
    flags_address: int,
    rank: int,
    number: int,
    max_polls: int,
) -> None:
    """Wait for all ranks that are not excluded, in barrier `number`, from 1.

    Args:
        flags_table: [W], int64: addresses of the W signals of each rank, see LivingRanks.
        excluded: [W], int32, not 0 for ranks that do not take part.
        missing: [W], int32, written: 1 for each rank that did not arrive.
        flags_address, rank, max_polls: as of PeerBlocks, of the signals of this rank.

    Collective: yes, among those that take part.   Allocates nothing.   Host sync: none.
    """
    world_size = flags_table.shape[0]
    with on_device(flags_table.device):
        _barrier_kernel[(1,)](
            flags_table,
            excluded,
            missing,
            flags_address,
            rank,
            number,
            max_polls,
            W=world_size,
            W_LANES=next_power_of_two(world_size),
            num_warps=1,  # pyright: ignore[reportCallIssue]
        )
