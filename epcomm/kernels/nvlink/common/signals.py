"""Words by which the kernels of the ranks of one host wait for one another.

A word belongs to a source rank, lies in the memory of the rank that waits, and grows by one for
each program of the source that has sent. The adds release, so all of them together say that what
all programs stored is there; who waits acquires it once the count is full. Words never shrink, and
are compared by the sign of a difference, for a fast rank may be one epoch ahead.

Waits end after a number of polls. One of a GPU lasts a millisecond, by its clock, and is as many
looks as fit, for how fast it looks depends on all else that it does. The rank that gives up says so
in a report that its host reads, and in a word of every rank, by which all later kernels return at
once; the word tells who gave up, and on whom.

Ranks that are masked, for they are dead, are not waited for, and nothing is sent to them.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import globaltimer

from epcomm.kernels.launch import IS_INTERPRETED

# Places in a report (int32): what it waited for, in which epoch, the word of the rank that gave up
# first, and then one word for each rank that is late.
REPORT_PHASE, REPORT_EPOCH, REPORT_ABORTED, REPORT_LATE = 0, 1, 2, 4

# Of the word to give up by: 1 + the rank that did, then a bit for each late rank, as many as fit.
LATE_SHIFT, MOST_LATE = 8, 23

# Looks of a GPU between two looks at its clock: a fifth of a millisecond, so that most waits, of
# microseconds, never read it.
LOOKS_PER_TICK = 1024
# Nanoseconds of one poll of a GPU.
POLL_NS = 1_000_000

_IS_TIMED, _POLL_NS = tl.constexpr(not IS_INTERPRETED), tl.constexpr(POLL_NS)
_LOOKS_PER_TICK = tl.constexpr(LOOKS_PER_TICK)
_LATE_SHIFT, _MOST_LATE = tl.constexpr(LATE_SHIFT), tl.constexpr(MOST_LATE)
_REPORT_PHASE = tl.constexpr(REPORT_PHASE)
_REPORT_EPOCH = tl.constexpr(REPORT_EPOCH)
_REPORT_ABORTED = tl.constexpr(REPORT_ABORTED)
_REPORT_LATE = tl.constexpr(REPORT_LATE)


def who_gave_up(word: int) -> tuple[int, list[int]]:
    """Return the rank that gave up, and the late ranks: of 2 + 2**8 + 2**10, 1 and [0, 2]."""
    late = [rank for rank in range(MOST_LATE) if word >> (LATE_SHIFT + rank) & 1]
    return (word & (2**LATE_SHIFT - 1)) - 1, late


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
def polls_spent(num_looks: tl.tensor, end_ns: tl.tensor) -> tuple[tl.tensor | int, tl.tensor]:
    """Polls that a look uses up, and when the next poll ends: one each, unless a clock tells.

    num_looks: those of the wait so far, this one among them.
    end_ns: int64: what the look before returned; 0 at first.
    """
    if _IS_TIMED:
        spent = num_looks * 0
        if num_looks % _LOOKS_PER_TICK == 0:
            now_ns = globaltimer()
            is_over = now_ns >= end_ns
            spent = is_over.to(tl.int32)
            end_ns = tl.where(is_over, now_ns + _POLL_NS, end_ns)
        return spent, end_ns
    else:  # noqa: RET505 - what is not compiled must be the other branch
        return 1, end_ns


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
    num_looks = max_polls * 0
    end_ns = num_looks.to(tl.int64)
    # Only scalars go around: a tensor would have to keep its layout.
    while (num_late > 0) & (polls_left > 0):
        words = tl.load(words_ptr + lane, mask=is_rank, other=0, volatile=True)
        num_late = tl.sum((is_rank & (words - wanted < 0)).to(tl.int32))
        num_looks += 1
        spent, end_ns = polls_spent(num_looks, end_ns)  # pyright: ignore[reportGeneralTypeIssues]
        polls_left = tl.where(tl.load(abort_ptr, volatile=True) != 0, 0, polls_left - spent)
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

    Rank 1, which gives up on ranks 0 and 2, tells 2 + 2**8 + 2**10.

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
        # Read by await_words() of later kernels, which only return, and report it to their hosts.
        words = addresses.to(tl.pointer_type(tl.int32))
        is_told = (lane < _MOST_LATE) & (late != 0)
        bits = tl.where(is_told, 1, 0) << tl.where(is_told, lane + _LATE_SHIFT, 0)
        mine = tl.zeros_like(lane) + tl.sum(bits) + rank + 1
        tl.atomic_xchg(words, mine, mask=is_rank, sem="release", scope="sys")
