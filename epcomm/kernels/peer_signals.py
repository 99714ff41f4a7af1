"""Words by which the kernels of the ranks of one host wait for one another.

A word belongs to a source rank, lies in the memory of the rank that waits, and grows by one for
each program of the source that has sent. The adds release, so all of them together say that what
all programs stored is there; who waits acquires it once the count is full. Words never shrink, and
are compared by the sign of a difference, for a fast rank may be one epoch ahead.

Waits end after a number of polls. The rank that gives up says so in a report that its host reads,
and in a word of every rank, by which all later kernels return at once.

Ranks that are masked, for they are dead, are not waited for, and nothing is sent to them.
"""

from __future__ import annotations

import triton
import triton.language as tl

# Places in a report (int32): what it waited for, in which epoch, 1 + the rank that gave up first,
# and then one word for each rank that is late.
REPORT_PHASE, REPORT_EPOCH, REPORT_ABORTED, REPORT_LATE = 0, 1, 2, 4

_REPORT_PHASE = tl.constexpr(REPORT_PHASE)
_REPORT_EPOCH = tl.constexpr(REPORT_EPOCH)
_REPORT_ABORTED = tl.constexpr(REPORT_ABORTED)
_REPORT_LATE = tl.constexpr(REPORT_LATE)


@triton.jit
def words_at(address: tl.tensor) -> tl.tensor:
    """int32 words at an address."""
    return tl.multiple_of(address.to(tl.pointer_type(tl.int32)), 16)


@triton.jit
def taking_part(masked_ptr: tl.tensor | None, W: tl.constexpr, LANES: tl.constexpr) -> tl.tensor:
    """[LANES]: ranks that are waited for and sent to. Of the words 0 1 0 of masked: yes, no, yes.

    masked_ptr: [W], int32, of this rank, written by its host between kernels; None: all take part.
    """
    lane = tl.arange(0, LANES)
    is_rank = lane < W
    if masked_ptr is not None:
        is_rank = is_rank & (tl.load(masked_ptr + lane, mask=is_rank, other=0) == 0)
    return is_rank


@triton.jit
def publish(
    bases_ptr: tl.tensor,
    offset: tl.tensor,
    amount: tl.tensor,
    W: tl.constexpr,
    LANES: tl.constexpr,
    masked_ptr: tl.tensor | None = None,
) -> None:
    """Add `amount` to a word of every rank: whatever this program stored is there before it.

    bases_ptr: [W] addresses of the ranks.   offset: of the word, in bytes, the same on all ranks.
    masked_ptr: as of taking_part().
    """
    lane = tl.arange(0, LANES)
    is_rank = taking_part(masked_ptr, W, LANES)
    # The release is made by a few threads: it covers the stores of the others only after this.
    tl.debug_barrier()
    bases = tl.load(bases_ptr + lane, mask=is_rank, other=0)
    words = (bases + offset).to(tl.pointer_type(tl.int32))
    # Read by await_words() on every rank. One vector, hence one fence for all ranks.
    tl.atomic_add(words, tl.zeros_like(lane) + amount, mask=is_rank, sem="release", scope="sys")


@triton.jit
def await_words(
    words_ptr: tl.tensor,
    abort_ptr: tl.tensor,
    wanted: tl.tensor,
    max_polls: tl.tensor,
    W: tl.constexpr,
    LANES: tl.constexpr,
    masked_ptr: tl.tensor | None = None,
) -> tuple[tl.tensor, tl.tensor]:
    """Wait until W words are at least `wanted`; what their sources stored before is visible then.

    words_ptr: [W], of this rank.   abort_ptr: not 0 once any rank has given up.
    masked_ptr: as of taking_part(); who is masked is not late.
    Returns: [LANES], int32, 1 where a word is still late, and the word at abort_ptr.
    Of the words 4 and 2 and a `wanted` of 3: late are 0 1 until the second is 3.
    """
    lane = tl.arange(0, LANES)
    is_rank = taking_part(masked_ptr, W, LANES)
    num_late = 1
    polls_left = max_polls
    # Only scalars go around: a tensor would have to keep its layout.
    while (num_late > 0) & (polls_left > 0):
        words = tl.load(words_ptr + lane, mask=is_rank, other=0, volatile=True)
        num_late = tl.sum((is_rank & (words - wanted < 0)).to(tl.int32))
        polls_left = tl.where(tl.load(abort_ptr, volatile=True) != 0, 0, polls_left - 1)
    # Volatile loads leave stale lines in the L1 cache. This acquires what publish() released, and
    # would be deleted if its value were not used.
    words = tl.atomic_add(
        words_ptr + lane, tl.zeros_like(lane), mask=is_rank, sem="acquire", scope="sys"
    )
    late = (is_rank & (words - wanted < 0)).to(tl.int32)
    # The other threads may load only after those that acquired.
    tl.debug_barrier()
    return late, tl.load(abort_ptr, volatile=True)


@triton.jit
def give_up(
    late: tl.tensor,
    aborted: tl.tensor,
    report_ptr: tl.tensor,
    aborts_ptr: tl.tensor,
    phase: tl.constexpr,
    epoch: tl.tensor,
    rank: tl.tensor,
    W: tl.constexpr,
    LANES: tl.constexpr,
    masked_ptr: tl.tensor | None = None,
) -> None:
    """Report why this rank cannot go on, and tell every rank, unless some rank did before.

    report_ptr: [REPORT_LATE + W], read by the host.   aborts_ptr: [W] addresses of their words.
    masked_ptr: as of taking_part().
    """
    lane = tl.arange(0, LANES)
    is_rank = taking_part(masked_ptr, W, LANES)
    if aborted != 0:
        tl.store(report_ptr + _REPORT_ABORTED, aborted)
    else:
        tl.store(report_ptr + _REPORT_LATE + lane, late, mask=lane < W)
        tl.store(report_ptr + _REPORT_EPOCH, epoch)
        tl.store(report_ptr + _REPORT_PHASE, phase)
        tl.debug_barrier()
        addresses = tl.load(aborts_ptr + lane, mask=is_rank, other=0)
        # Read by await_words() of later kernels, which only return; the report is for this host.
        words = addresses.to(tl.pointer_type(tl.int32))
        mine = tl.zeros_like(lane) + rank + 1
        tl.atomic_xchg(words, mine, mask=is_rank, sem="release", scope="sys")
