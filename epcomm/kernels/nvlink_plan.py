"""Where the tokens of a rank go: places on every rank, and positions among the slots of experts.

Part of the kernel that pushes rows. Each program counts a run of tokens, tells the later programs,
and waits for the earlier ones alone, so that any number of programs may be resident. Then it writes
the places and positions of its tokens, which a route keeps.

Worked example, W = 2, L = 2, K = 2, two programs of two tokens each:

    ids          0 3 | 1 -1      2 3 | 0 1
    positions    0 0 | 0 0       0 1 | 1 1     earlier entries with the same expert
    places       0 0 | 1 -1      -1 1 | 2 -1   earlier tokens that go to rank 0 and to rank 1
    owners       0 1 | 0 -1      1 1 | 0 0
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _loaded_ids(
    ids_ptr: tl.tensor,
    token: tl.tensor,
    end: tl.tensor,
    K: tl.constexpr,
    K_LANES: tl.constexpr,
    E: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """[tokens, K_LANES]: ids, -1 for what is none, and whether any is out of range."""
    k = tl.arange(0, K_LANES)
    is_entry = (token < end)[:, None] & (k < K)[None, :]
    ids = tl.load(ids_ptr + token[:, None] * K + k[None, :], mask=is_entry, other=-1)
    is_bad = (ids < -1) | (ids >= E)
    return tl.where(is_bad, -1, ids).to(tl.int32), tl.max(tl.max(is_bad.to(tl.int32), 1), 0)


@triton.jit
def _needs(owners: tl.tensor, W_LANES: tl.constexpr) -> tl.tensor:
    """[tokens, W_LANES]: 1 where a token goes to a rank; owners [tokens, K_LANES]."""
    ranks = tl.arange(0, W_LANES)
    return tl.max((owners[:, :, None] == ranks[None, None, :]).to(tl.int32), 1)


@triton.jit
def _count(ids: tl.tensor, E_LANES: tl.constexpr) -> tl.tensor:
    """[E_LANES]: entries of each expert; ids [n], -1 for none."""
    return tl.histogram(tl.where(ids >= 0, ids, 0), E_LANES, mask=ids >= 0)


@triton.jit
def plan_tokens(
    ids_ptr: tl.tensor,
    scratch_ptr: tl.tensor,
    counted_ptr: tl.tensor,
    places_ptr: tl.tensor,
    positions_ptr: tl.tensor,
    owners_ptr: tl.tensor,
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
    TOKENS: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor]:
    """Plan the tokens from `first` to `end`, the run of this program.

    scratch_ptr: [P, E_LANES + W_LANES + 1], int32, of this rank.   counted_ptr: [P], int32: epochs.
    places_ptr: [T, W], int32, written.   positions_ptr, owners_ptr: [T, K], int32, written.

    Returns: slots of each expert [E_LANES] and rows to each rank [W_LANES], of this program and all
        before it, and 1 if any of those has met a bad id.
    """
    E: tl.constexpr = W * L
    STRIDE: tl.constexpr = E_LANES + W_LANES + 1
    PAIRS: tl.constexpr = TOKENS * K_LANES
    program = tl.program_id(0)
    expert, rank = tl.arange(0, E_LANES), tl.arange(0, W_LANES)
    k = tl.arange(0, K_LANES)

    counts = tl.zeros([E_LANES], tl.int32)
    rows = tl.zeros([W_LANES], tl.int32)
    is_bad = tl.full([], 0, tl.int32)
    for start in tl.range(first, end, TOKENS, num_stages=1):
        token = start + tl.arange(0, TOKENS)
        ids, is_bad_here = _loaded_ids(ids_ptr, token, end, K, K_LANES, E)  # pyright: ignore[reportGeneralTypeIssues]
        counts += _count(tl.reshape(ids, [PAIRS]), E_LANES)
        rows += tl.sum(_needs(tl.where(ids >= 0, ids // L, -1), W_LANES), 0)
        is_bad = tl.maximum(is_bad, is_bad_here)
    mine_ptr = scratch_ptr + program * STRIDE
    tl.store(mine_ptr + expert, counts)
    tl.store(mine_ptr + E_LANES + rank, rows)
    tl.store(mine_ptr + E_LANES + W_LANES, is_bad)
    # Read below by later programs of this rank.
    tl.debug_barrier()
    tl.atomic_xchg(counted_ptr + program, epoch, sem="release", scope="gpu")

    lane = tl.arange(0, P_LANES)
    is_earlier = lane < program
    num_late = program
    polls_left = max_polls
    while (num_late > 0) & (polls_left > 0):
        words = tl.load(counted_ptr + lane, mask=is_earlier, other=0, volatile=True)
        num_late = tl.sum((is_earlier & (words - epoch < 0)).to(tl.int32))
        polls_left -= 1
    # Acquires what they released; see peer_signals.await_words().
    words = tl.atomic_add(
        counted_ptr + lane, tl.zeros_like(lane), mask=is_earlier, sem="acquire", scope="gpu"
    )
    is_counted = tl.sum((is_earlier & (words - epoch >= 0)).to(tl.int32))
    tl.debug_barrier()

    for other in tl.range(0, is_counted, 1, num_stages=1):
        other_ptr = scratch_ptr + other * STRIDE
        counts_before = tl.load(other_ptr + expert)
        counts += counts_before
        rows += tl.load(other_ptr + E_LANES + rank)
        is_bad = tl.maximum(is_bad, tl.load(other_ptr + E_LANES + W_LANES))
    # What came before this run.
    counts -= tl.load(mine_ptr + expert)
    rows -= tl.load(mine_ptr + E_LANES + rank)

    for start in tl.range(first, end, TOKENS, num_stages=1):
        token = start + tl.arange(0, TOKENS)
        is_token = token < end
        ids, _ = _loaded_ids(ids_ptr, token, end, K, K_LANES, E)  # pyright: ignore[reportGeneralTypeIssues]
        flat = tl.reshape(ids, [PAIRS])
        pair = tl.arange(0, PAIRS)
        is_same = (flat[:, None] == flat[None, :]) & (pair[None, :] < pair[:, None])
        before = tl.gather(counts, tl.maximum(flat, 0), 0)
        positions = before + tl.sum(is_same.to(tl.int32), 1)
        owners = tl.where(ids >= 0, ids // L, -1)
        needs = _needs(owners, W_LANES)
        places = rows[None, :] + tl.cumsum(needs, 0) - needs
        at = token[:, None] * K + k[None, :]
        is_entry = is_token[:, None] & (k < K)[None, :]
        tl.store(positions_ptr + at, tl.reshape(positions, [TOKENS, K_LANES]), mask=is_entry)
        tl.store(owners_ptr + at, owners, mask=is_entry)
        places = tl.where(needs > 0, places, -1)
        at = token[:, None] * W + rank[None, :]
        tl.store(places_ptr + at, places, mask=is_token[:, None] & (rank < W)[None, :])
        counts += _count(flat, E_LANES)
        rows += tl.sum(needs, 0)
    # Its own threads read what was written here.
    tl.debug_barrier()
    return counts, rows, is_bad
