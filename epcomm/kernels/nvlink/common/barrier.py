"""A barrier of the ranks on their devices, which ends when all have arrived or no polls are left.

Memory order: what a rank's stream did before the barrier is visible to all ranks after it, by the
release of the signals and the acquire of await_at(). Unlike a barrier of the host's transport it
ends when a rank is dead, and it needs only the memory that the ranks share.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

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
        int32_at(flags_address) + lane, is_rank, None, number, max_polls, "sys", False
    )
    tl.store(missing_ptr + lane, missing, mask=lane < W)


class LivingRanks:
    """The ranks that take part in a barrier: all but those that were excluded.

    excluded: [W], int32, on the device, not 0 for dead ranks. Kernels read it from this rank's own
        memory, and neither wait for a dead rank nor send to it.
    """

    def __init__(self, addresses: Sequence[int], rank: int, device: torch.device) -> None:
        """Begin with all ranks.

        Args:
            addresses: of W signals in the block of each rank, zero at first, used for nothing else.
            rank: this one.
            device: of the blocks.
        """
        self._rank, self._address, self._num_barriers = rank, addresses[rank], 0
        self._table = torch.tensor(addresses, dtype=torch.int64, device=device)
        self.excluded = torch.zeros(len(addresses), dtype=torch.int32, device=device)
        self._missing = torch.zeros_like(self.excluded)

    def dead(self) -> tuple[int, ...]:
        """Return the ranks that are excluded.   Host sync: yes."""
        return tuple(rank for rank, value in enumerate(self.excluded.tolist()) if value)

    def device_barrier(self, max_polls: int) -> list[int]:
        """Wait for all ranks on the device, and return the ranks that are missing after max_polls.

        Collective: yes, and ends if some do not arrive.   Host sync: yes.
        """
        self._num_barriers += 1
        world_size = len(self._table)
        with on_device(self._table.device):
            _barrier_kernel[(1,)](
                *(self._table, self.excluded, self._missing, self._address, self._rank),
                *(self._num_barriers, max_polls),
                W=world_size,
                W_LANES=next_power_of_two(world_size),
                num_warps=1,  # pyright: ignore[reportCallIssue]
            )
        return [rank for rank, is_missing in enumerate(self._missing.tolist()) if is_missing]
