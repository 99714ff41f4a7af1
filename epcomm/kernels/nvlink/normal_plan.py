"""Plan where the tokens of a rank go: places on every rank, positions among the slots of experts.

Part of the kernel that pushes rows. Each program counts a run of tokens, tells the later programs,
and waits for the earlier ones alone, so that any number of programs may be resident. Then it writes
the places and positions of its tokens, which an exchange plan keeps.

Who goes where is a bit for each token, in words of each expert and rank: what came earlier are the
bits below. So nothing is compared with anything, and a token that two experts of a rank want is
counted once there. Where a token of the run names an expert twice, which the bits do not show,
the entries of the run are compared with one another instead.

Worked example, W = 2, L = 2, K = 2, two programs of two tokens each:

    ids          0 3 | 1 -1      2 3 | 0 1
    positions    0 0 | 0 0       0 1 | 1 1     earlier entries with the same expert
    places       0 0 | 1 -1      -1 1 | 2 -1   earlier tokens that go to rank 0 and to rank 1
"""

from __future__ import annotations

import triton
import triton.language as tl

from epcomm.kernels.nvlink.common.epochs import mark_of
from epcomm.kernels.nvlink.common.signals import await_at

# Tokens of a group, and words of their bits: two entries a thread at K = 8.
GROUP_TOKENS, GROUP_WORDS = 128, 4
# Earlier programs whose counts are read at once.
_EARLIER = 16

_GROUP_TOKENS = tl.constexpr(GROUP_TOKENS)
_GROUP_WORDS = tl.constexpr(GROUP_WORDS)
_EARLIER_PROGRAMS = tl.constexpr(_EARLIER)


@triton.jit
def _num_bits(words: tl.tensor) -> tl.tensor:
    """Count the bits that are set: of 5, two."""
    bits = words.to(tl.uint32, bitcast=True)
    bits = bits - ((bits >> 1) & 0x55555555)
    bits = (bits & 0x33333333) + ((bits >> 2) & 0x33333333)
    bits = (bits + (bits >> 4)) & 0x0F0F0F0F
    return ((bits * 0x01010101) >> 24).to(tl.int32)


@triton.jit
def _below(place: tl.tensor, word: tl.constexpr) -> tl.tensor:
    """Return the bits of a word below a place: word 0 of place 2 is 3, word 0 of 40 all bits."""
    own = place // 32
    return tl.where(own > word, -1, tl.where(own == word, (1 << (place % 32)) - 1, 0))


@triton.jit
def _totals(bits_ptr: tl.tensor, LANES: tl.constexpr) -> tl.tensor:
    """Count the bits of each row of words [LANES, GROUP_WORDS], set by this program's atomics."""
    at = tl.arange(0, LANES)[:, None] * _GROUP_WORDS + tl.arange(0, _GROUP_WORDS)[None, :]
    return tl.sum(_num_bits(tl.load(bits_ptr + at, volatile=True)), 1)


@triton.jit
def _loaded_ids(
    ids_ptr: tl.tensor,
    excluded_ptr: tl.tensor,
    token: tl.tensor,
    end: tl.tensor,
    K: tl.constexpr,
    K_LANES: tl.constexpr,
    L: tl.constexpr,
    E: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Load ids [tokens, K_LANES], -1 if none or excluded; also tell whether any is out of range."""
    k = tl.arange(0, K_LANES)
    is_entry = (token < end)[:, None] & (k < K)[None, :]
    ids = tl.load(ids_ptr + token[:, None] * K + k[None, :], mask=is_entry, other=-1)
    is_bad = (ids < -1) | (ids >= E)
    is_excluded = tl.load(excluded_ptr + ids // L, mask=(ids >= 0) & (ids < E), other=1) != 0
    return tl.where(is_excluded, -1, ids).to(tl.int32), tl.max(tl.max(is_bad.to(tl.int32), 1), 0)


@triton.jit
def _mark(
    bits_ptr: tl.tensor,
    ids: tl.tensor,
    L: tl.constexpr,
    E_LANES: tl.constexpr,
    W_LANES: tl.constexpr,
) -> tl.tensor:
    """Set the bits of the tokens of a group; return 1 if a token names an expert twice, else 0.

    bits_ptr: [E_LANES + W_LANES, GROUP_WORDS].
    """
    words = tl.arange(0, E_LANES * _GROUP_WORDS)
    tl.store(bits_ptr + words, tl.zeros_like(words))
    words = tl.arange(0, W_LANES * _GROUP_WORDS)
    tl.store(bits_ptr + E_LANES * _GROUP_WORDS + words, tl.zeros_like(words))
    tl.debug_barrier()
    place = tl.arange(0, _GROUP_TOKENS)[:, None]
    word, bit = place // 32, 1 << (place % 32)
    bits = tl.zeros_like(ids) + bit
    is_entry = ids >= 0
    # Read by this program alone, behind the barrier.
    expert_ptr = bits_ptr + ids * _GROUP_WORDS + word
    before = tl.atomic_or(expert_ptr, bits, mask=is_entry, sem="relaxed", scope="gpu")
    is_repeated = is_entry & ((before & bits) != 0)
    rank_ptr = bits_ptr + (E_LANES + ids // L) * _GROUP_WORDS + word
    tl.atomic_or(rank_ptr, bits, mask=is_entry, sem="relaxed", scope="gpu")
    tl.debug_barrier()
    return tl.max(tl.max(is_repeated.to(tl.int32), 1), 0)


@triton.jit
def _counts_of(
    bits_ptr: tl.tensor,
    ids: tl.tensor,
    has_repeats: tl.tensor,
    K_LANES: tl.constexpr,
    E_LANES: tl.constexpr,
) -> tl.tensor:
    """Count the entries of a group for each expert, [E_LANES]: its bits, unless some repeat."""
    counts = _totals(bits_ptr, E_LANES)
    if has_repeats != 0:
        flat = tl.reshape(ids, [_GROUP_TOKENS * K_LANES])
        counts = tl.histogram(tl.maximum(flat, 0), E_LANES, mask=flat >= 0)
    return counts


@triton.jit
def _positions_of_repeats(
    ids_ptr: tl.tensor,
    ids: tl.tensor,
    start: tl.tensor,
    end: tl.tensor,
    K: tl.constexpr,
    K_LANES: tl.constexpr,
) -> tl.tensor:
    """Count the earlier entries of a group with the same expert: of 0 0 | 0 they are 0 1 | 2."""
    k = tl.arange(0, K_LANES)[None, :]
    entry = tl.arange(0, _GROUP_TOKENS)[:, None] * K + k
    earlier = tl.zeros_like(ids)
    for other in tl.range(0, tl.minimum(end - start, _GROUP_TOKENS) * K, num_stages=1):  # pyright: ignore[reportGeneralTypeIssues]
        expert = tl.load(ids_ptr + start * K + other).to(tl.int32)
        earlier += ((ids == expert) & (entry > other) & (k < K)).to(tl.int32)
    return earlier


@triton.jit
def plan_tokens(
    ids_ptr: tl.tensor,
    excluded_ptr: tl.tensor,
    scratch_ptr: tl.tensor,
    bits_ptr: tl.tensor,
    counted_ptr: tl.tensor,
    places_ptr: tl.tensor,
    positions_ptr: tl.tensor,
    first: tl.tensor,
    end: tl.tensor,
    epoch: tl.tensor,
    max_polls: tl.tensor,
    W: tl.constexpr,
    W_LANES: tl.constexpr,
    K: tl.constexpr,
    K_LANES: tl.constexpr,
    L: tl.constexpr,
    E_LANES: tl.constexpr,
    P_LANES: tl.constexpr,
    GROUPS: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Plan the tokens from `first` to `end`, the run of this program, at most GROUPS groups.

    excluded_ptr: [W], int32: not 0: entries of this rank's experts are as entries of -1.
    scratch_ptr: [P, E_LANES + W_LANES + 1], int32, of this rank.   counted_ptr: [P], int32: epochs.
    bits_ptr: [P, GROUPS, E_LANES + W_LANES, GROUP_WORDS], int32, of this rank.
    places_ptr: [T, W], int32, written.   positions_ptr: [T, K], int32, written.

    Returns: slots of each expert [E_LANES] and rows to each rank [W_LANES], of this program and all
        before it; 1 if any of them met a bad id; and how many earlier programs timed out. Unless
        that is 0, the other results are not valid.
    """
    E: tl.constexpr = W * L
    STRIDE: tl.constexpr = E_LANES + W_LANES + 1
    GROUP_BITS: tl.constexpr = (E_LANES + W_LANES) * _GROUP_WORDS
    RANKS_AT: tl.constexpr = E_LANES * _GROUP_WORDS
    program = tl.program_id(0)
    expert, rank = tl.arange(0, E_LANES), tl.arange(0, W_LANES)
    lane = tl.arange(0, _GROUP_TOKENS)
    k = tl.arange(0, K_LANES)
    own_bits_ptr = bits_ptr + program * (GROUPS * GROUP_BITS)

    counts = tl.zeros([E_LANES], tl.int32)
    rows = tl.zeros([W_LANES], tl.int32)
    is_bad = tl.full([], 0, tl.int32)
    # Of this run.
    has_repeats = tl.full([], 0, tl.int32)
    for start in tl.range(first, end, _GROUP_TOKENS, num_stages=1):
        ids, is_bad_here = _loaded_ids(ids_ptr, excluded_ptr, start + lane, end, K, K_LANES, L, E)  # pyright: ignore[reportGeneralTypeIssues]
        group_ptr = own_bits_ptr + (start - first) // _GROUP_TOKENS * GROUP_BITS
        is_repeated = _mark(group_ptr, ids, L, E_LANES, W_LANES)
        counts += _counts_of(group_ptr, ids, is_repeated, K_LANES, E_LANES)
        has_repeats = tl.maximum(has_repeats, is_repeated)
        rows += _totals(group_ptr + RANKS_AT, W_LANES)
        is_bad = tl.maximum(is_bad, is_bad_here)
    mine_ptr = scratch_ptr + program * STRIDE
    tl.store(mine_ptr + expert, counts)
    tl.store(mine_ptr + E_LANES + rank, rows)
    tl.store(mine_ptr + E_LANES + W_LANES, is_bad)
    # Read below by later programs of this rank.
    tl.debug_barrier()
    mark = mark_of(epoch)
    tl.atomic_xchg(counted_ptr + program, mark, sem="release", scope="gpu")

    # All earlier programs, unless the wait times out.
    before = tl.arange(0, P_LANES)
    is_earlier = before < program
    missing, _ = await_at(  # pyright: ignore[reportGeneralTypeIssues]
        counted_ptr + before, None, is_earlier, is_earlier, None, mark, max_polls, "gpu", True
    )
    num_missing = tl.sum(missing)
    num_earlier = program - num_missing
    counts = tl.zeros([E_LANES], tl.int32)
    rows = tl.zeros([W_LANES], tl.int32)
    for start in tl.range(0, num_earlier, _EARLIER_PROGRAMS, num_stages=1):
        other = start + tl.arange(0, _EARLIER_PROGRAMS)
        is_other = (other < num_earlier)[:, None]
        other_ptr = scratch_ptr + other[:, None] * STRIDE
        counts += tl.sum(tl.load(other_ptr + expert[None, :], mask=is_other, other=0), 0)
        other_ptr += E_LANES
        rows += tl.sum(tl.load(other_ptr + rank[None, :], mask=is_other, other=0), 0)
        is_bad_there = tl.load(other_ptr + W_LANES, mask=is_other, other=0)
        is_bad = tl.maximum(is_bad, tl.max(tl.max(is_bad_there, 1), 0))

    for start in tl.range(first, end, _GROUP_TOKENS, num_stages=1):
        token = start + lane
        is_token = token < end
        ids, _ = _loaded_ids(ids_ptr, excluded_ptr, token, end, K, K_LANES, L, E)  # pyright: ignore[reportGeneralTypeIssues]
        is_entry = ids >= 0
        group_ptr = own_bits_ptr + (start - first) // _GROUP_TOKENS * GROUP_BITS
        flat = tl.reshape(tl.maximum(ids, 0), [_GROUP_TOKENS * K_LANES])
        first_positions = tl.reshape(tl.gather(counts, flat, 0), [_GROUP_TOKENS, K_LANES])
        positions = first_positions
        places = tl.zeros([_GROUP_TOKENS, W_LANES], tl.int32) + rows[None, :]
        is_sent = tl.zeros([_GROUP_TOKENS, W_LANES], tl.int32)
        for word in tl.static_range(_GROUP_WORDS):
            earlier = _below(lane, word)[:, None]
            expert_ptr = group_ptr + ids * _GROUP_WORDS + word
            bits = tl.load(expert_ptr, mask=is_entry, other=0, volatile=True)
            positions += _num_bits(bits & earlier)
            rank_ptr = group_ptr + RANKS_AT + rank[None, :] * _GROUP_WORDS + word
            bits = tl.load(rank_ptr, volatile=True)
            places += _num_bits(bits & earlier)
            own = tl.where(lane // 32 == word, 1 << (lane % 32), 0)[:, None]
            is_sent = is_sent | (bits & own)
        if has_repeats != 0:
            positions = first_positions + _positions_of_repeats(
                ids_ptr, ids, start, end, K, K_LANES
            )
        at = token[:, None] * K + k[None, :]
        is_stored = is_token[:, None] & (k < K)[None, :]
        tl.store(positions_ptr + at, positions, mask=is_stored)
        at = token[:, None] * W + rank[None, :]
        is_stored = is_token[:, None] & (rank < W)[None, :]
        tl.store(places_ptr + at, tl.where(is_sent != 0, places, -1), mask=is_stored)
        counts += _counts_of(group_ptr, ids, has_repeats, K_LANES, E_LANES)
        rows += _totals(group_ptr + RANKS_AT, W_LANES)
    # Its own threads read what was written here.
    tl.debug_barrier()
    return counts, rows, is_bad, num_missing
