"""Plan what a rank sends: count tokens by rank and expert, and number the rows that leave.

Both kernels read only topk_ids. The first writes the counts into the headers of the call. Numbering
needs the counts of all tokens, so a second kernel does it, while the headers are exchanged.
"""

import triton
import triton.language as tl
from torch import Tensor

from epcomm.kernels.masks import both
from epcomm.kernels.prepared import launch

# Tokens that a program reads at a time, and those of its segment; longer segments would leave most
# SMs without a program where ranks are few.
_TOKENS, _WARPS = 512, 8
_SEGMENT_TOKENS = 1024
# A count needs no scan, and many small programs hide the latency of their atomics.
_COUNTED_TOKENS, _COUNT_WARPS = 32, 4
# The first words of a header.
_WORDS = ("kind", "check", "buffer", "dispatcher", "batch", "number", "size", "fault", "flags")


@triton.jit
def _ids_of(
    ids_ptr: tl.tensor,
    token: tl.tensor,
    end: tl.tensor,
    W: tl.constexpr,
    L: tl.constexpr,
    K: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Load the ids of tokens before `end`, [tokens, lanes], -1 for none; and which are wrong."""
    k = tl.arange(0, triton.next_power_of_2(K))[None, :]
    is_entry = (token < end)[:, None] & (k < K)
    ids = tl.load(ids_ptr + token.to(tl.int64)[:, None] * K + k, mask=is_entry, other=-1)
    is_wrong = (ids < -1) | (ids >= W * L)
    return tl.where(is_wrong, -1, ids).to(tl.int32), is_wrong


@triton.jit(do_not_specialize=["num_tokens", *_WORDS])
def _count_sends_kernel(
    ids_ptr: tl.tensor,
    header_ptr: tl.tensor,
    rest_ptr: tl.tensor,
    num_tokens: tl.tensor,
    kind: tl.tensor,
    check: tl.tensor,
    buffer: tl.tensor,
    dispatcher: tl.tensor,
    batch: tl.tensor,
    number: tl.tensor,
    size: tl.tensor,
    fault: tl.tensor,
    flags: tl.tensor,
    WRONG_IDS: tl.constexpr,
    FAULT_AT: tl.constexpr,
    FLAGS_AT: tl.constexpr,
    ROWS_AT: tl.constexpr,
    SLOTS_AT: tl.constexpr,
    WORDS: tl.constexpr,
    NUM_HERE: tl.constexpr,
    W: tl.constexpr,
    L: tl.constexpr,
    K: tl.constexpr,
    TOKENS: tl.constexpr,
) -> None:
    """Add the counts of TOKENS tokens to the header for each rank, which begins as zeros.

    W = 2, L = 1, ids 0 1 | 1 -1: the header for rank 0 gets one row and one slot, that for rank 1
    two rows and two slots.
    """
    program = tl.program_id(0)
    token = program * TOKENS + tl.arange(0, TOKENS)
    ids, is_wrong = _ids_of(ids_ptr, token, num_tokens, W, L, K)  # pyright: ignore[reportGeneralTypeIssues]
    lane = tl.arange(0, triton.next_power_of_2(W))
    word_ptr = header_ptr + lane * WORDS
    if program == 0:
        is_rank = lane < W
        zeros = tl.zeros(lane.shape, tl.int64)
        words = (kind, check, buffer, dispatcher, batch, number, size)
        for place in tl.static_range(len(words)):
            tl.store(word_ptr + place, zeros + words[place], mask=is_rank)
        tl.store(word_ptr + FLAGS_AT, zeros + flags, mask=is_rank)
        # If all ids are valid, the word stays zero; otherwise a program that finds a wrong id
        # writes it.
        tl.store(word_ptr + FAULT_AT, zeros + fault, mask=both(is_rank, fault != 0))
    has_wrong = tl.max(tl.max(is_wrong.to(tl.int32), 1), 0) > 0
    is_reported = both((lane < W) & has_wrong, fault == 0)
    tl.store(word_ptr + FAULT_AT, tl.zeros(lane.shape, tl.int64) + WRONG_IDS, mask=is_reported)

    rank, local = ids // L, ids % L
    one = tl.zeros(ids.shape, tl.int64) + 1
    # Sums of integers do not depend on the order of the additions.
    is_here = (ids >= 0) & (local < NUM_HERE)
    here_ptr = header_ptr + rank * WORDS + SLOTS_AT + local
    tl.atomic_add(here_ptr, one, mask=is_here, sem="relaxed")
    if NUM_HERE < L:
        later_ptr = rest_ptr + rank * (L - NUM_HERE) + local - NUM_HERE
        tl.atomic_add(later_ptr, one, mask=(ids >= 0) & (local >= NUM_HERE), sem="relaxed")
    for destination in range(W):
        needed = tl.max(((ids >= 0) & (rank == destination)).to(tl.int32), 1)
        num_rows = tl.sum(needed, 0).to(tl.int64)
        tl.atomic_add(header_ptr + destination * WORDS + ROWS_AT, num_rows, sem="relaxed")


@triton.jit(do_not_specialize=["num_tokens"])
def _order_sends_kernel(
    ids_ptr: tl.tensor,
    header_ptr: tl.tensor,
    row_of_rank_ptr: tl.tensor,
    num_tokens: tl.tensor,
    ROWS_AT: tl.constexpr,
    WORDS: tl.constexpr,
    W: tl.constexpr,
    L: tl.constexpr,
    K: tl.constexpr,
    TOKENS: tl.constexpr,
    SEGMENT: tl.constexpr,
) -> None:
    """Assign numbers to the rows of one segment of tokens to one rank.

    W = 2, L = 1, ids 0 1 | 1 -1: row 0 goes to rank 0, rows 1 and 2 to rank 1, so row_of_rank is
    0 1 | -1 2.
    """
    destination, segment = tl.program_id(0) % W, tl.program_id(0) // W
    lane, offset = tl.arange(0, triton.next_power_of_2(W)), tl.arange(0, TOKENS)
    before = tl.load(header_ptr + lane * WORDS + ROWS_AT, mask=lane < destination, other=0)
    row = tl.sum(before).to(tl.int32)
    begin = segment * SEGMENT
    for at in range(0, begin, TOKENS):
        ids, _ = _ids_of(ids_ptr, at + offset, begin, W, L, K)  # pyright: ignore[reportGeneralTypeIssues]
        is_needed = tl.max(((ids >= 0) & (ids // L == destination)).to(tl.int32), 1)
        row += tl.sum(is_needed)
    end = tl.minimum(begin + SEGMENT, num_tokens)
    for at in range(begin, end, TOKENS):
        token = at + offset
        ids, _ = _ids_of(ids_ptr, token, end, W, L, K)  # pyright: ignore[reportGeneralTypeIssues]
        is_needed = tl.max(((ids >= 0) & (ids // L == destination)).to(tl.int32), 1)
        place = row + tl.cumsum(is_needed, 0) - 1
        rank_ptr = row_of_rank_ptr + token.to(tl.int64) * W + destination
        tl.store(rank_ptr, tl.where(is_needed > 0, place, -1), mask=token < end)
        row += tl.sum(is_needed)


def count_sends(
    topk_ids: Tensor,
    header: Tensor,
    rest: Tensor,
    words: tuple[int, ...],
    *,
    wrong_ids: int,
    slots_at: int,
    num_local: int,
) -> None:
    """Write the headers of a dispatch, with the rows and slots that each rank will receive.

    Args:
        topk_ids: [T, K], int64, contiguous, -1 for none.
        header: [W, words], int64, zeros: gets `words`, the rows for each rank, and from word
            slots_at on the slots of its first experts.
        rest: [W, L minus those experts], int64, zeros: gets the slots of its other experts.
        words: kind, check, buffer, dispatcher, batch, number, size, fault, flags: the first words
            of a header, in their order; the rows follow them.
        wrong_ids: fault of a call with an id out of range, unless `words` has another; such ids are
            counted nowhere.
        slots_at: the index of the word of the first expert.
        num_local: L.

    Allocates nothing.   Compiled for each W, K and L.
    Host sync: none.   Graph capture: after one call.   Deterministic: yes.
    """
    num_tokens, top_k = topk_ids.shape
    world_size, num_words = header.shape
    place = len(words)
    launch(
        _count_sends_kernel,
        max(1, -(-num_tokens // _COUNTED_TOKENS)),
        (topk_ids, header, rest, num_tokens, *words),
        WRONG_IDS=wrong_ids,
        FAULT_AT=place - 2,
        FLAGS_AT=place - 1,
        ROWS_AT=place,
        SLOTS_AT=slots_at,
        WORDS=num_words,
        NUM_HERE=num_local - rest.shape[1],
        TOKENS=_COUNTED_TOKENS,
        W=world_size,
        L=num_local,
        K=top_k,
        num_warps=_COUNT_WARPS,
    )


def order_sends(
    topk_ids: Tensor, header: Tensor, row_of_rank: Tensor, *, rows_at: int, num_local: int
) -> None:
    """Assign numbers to the rows that are sent, by destination rank, then token.

    Args:
        topk_ids: as for count_sends().
        header: as count_sends() wrote it; word rows_at of line r has the rows to rank r.
        row_of_rank: [T, W], int32, written: the row that carries token t to rank r, or -1.
        num_local: L.

    Costs are those of count_sends().
    """
    num_tokens, top_k = topk_ids.shape
    world_size, num_words = header.shape
    if num_tokens == 0:
        return
    launch(
        _order_sends_kernel,
        world_size * -(-num_tokens // _SEGMENT_TOKENS),
        (topk_ids, header, row_of_rank, num_tokens),
        ROWS_AT=rows_at,
        WORDS=num_words,
        TOKENS=_TOKENS,
        SEGMENT=_SEGMENT_TOKENS,
        W=world_size,
        L=num_local,
        K=top_k,
        num_warps=_WARPS,
    )
