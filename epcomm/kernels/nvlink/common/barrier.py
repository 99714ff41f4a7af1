"""A meeting of ranks on their devices: none goes on before all have come, or polls are spent.

Memory order: what a rank's stream did before its launch is visible to all who have met, by the
release of publish() and the acquire of await_words(). Unlike a barrier of the host's transport it
ends when a rank is dead, and it needs nothing but the memory that the ranks share.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from epcomm.kernels.launch import next_power_of_two
from epcomm.kernels.nvlink.common.exchange import on_device
from epcomm.kernels.nvlink.common.signals import await_words, publish, words_at


@triton.jit(do_not_specialize=["words_address", "rank", "number", "max_polls"])
def _meet_kernel(
    words_table_ptr: tl.tensor,
    masked_ptr: tl.tensor,
    never_ptr: tl.tensor,
    late_ptr: tl.tensor,
    words_address: tl.tensor,
    rank: tl.tensor,
    number: tl.tensor,
    max_polls: tl.tensor,
    W: tl.constexpr,
    W_LANES: tl.constexpr,
) -> None:
    """The third meeting of ranks 0 and 1: rank 1 finds 3 2 or 3 3, and 3 3 once rank 0 has come."""
    publish(words_table_ptr, rank * 4, 1, W, W_LANES, masked_ptr)
    late, _ = await_words(  # pyright: ignore[reportGeneralTypeIssues]
        words_at(words_address), never_ptr, number, max_polls, W, W_LANES, masked_ptr
    )
    lane = tl.arange(0, W_LANES)
    tl.store(late_ptr + lane, late, mask=lane < W)


def meet(
    words_table: Tensor,
    masked: Tensor,
    never: Tensor,
    late: Tensor,
    *,
    words_address: int,
    rank: int,
    number: int,
    max_polls: int,
) -> None:
    """Wait for all ranks that are not masked.

    Args:
        words_table: [W], int64: where the W words of each rank lie, zero at first, used for nothing
            else.
        masked: [W], int32: not 0: a rank that does not take part.
        never: [1], int32, zero: a word to give up by that nobody sets.
        late: [W], int32, written: 1 for each rank that did not come.
        words_address: of the words of this rank.
        rank: this one.
        number: of the meeting, from 1.
        max_polls: before it gives up, see signals.py.

    Collective: yes, among those that take part.   Allocates nothing.   Host sync: none.
    """
    world_size = words_table.shape[0]
    with on_device(words_table):
        _meet_kernel[(1,)](
            words_table,
            masked,
            never,
            late,
            words_address,
            rank,
            number,
            max_polls,
            W=world_size,
            W_LANES=next_power_of_two(world_size),
            num_warps=1,  # pyright: ignore[reportCallIssue]
        )
