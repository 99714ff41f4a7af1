"""Say of tokens what both senders of low-latency dispatch over NVLink do: headers and positions.

Headers travel in lines, whether rows do or not: a receiver learns from them where rows come.
"""

from __future__ import annotations

import triton
import triton.language as tl

from epcomm.kernels.nvlink.common.lines import int64_at, line_of
from epcomm.kernels.nvlink.common.status import FAULT_IDS, FAULT_MASK, FAULT_REPEATED_IDS

# Bits of what is wrong with an entry; an id that is no expert counts more.
_REPEATED, _BAD = tl.constexpr(1), tl.constexpr(2)


@triton.jit
def send_header(
    ids_ptr: tl.tensor,
    base: tl.tensor,
    peer: tl.tensor,
    rank: tl.tensor,
    epoch: tl.tensor,
    num_tokens: tl.tensor,
    status: tl.tensor,
    W: tl.constexpr,
    K: tl.constexpr,
    L: tl.constexpr,
    L_LANES: tl.constexpr,
    CHUNK: tl.constexpr,
    COUNT_LINES_AT: tl.constexpr,
    HEADER_LINES_AT: tl.constexpr,
    IN_LINES: tl.constexpr,
    NEEDS_DISTINCT: tl.constexpr,
) -> None:
    """Tell `peer`, whose receive buffer is at `base`, how T rows come, and its L experts' counts.

    ids 0 2 | 3 2 with L = 2: rank 1 is told 2 1, for its experts 2 and 3. With an id that is
    neither -1 nor an expert, every rank is told of the fault, and of no token; likewise, if
    NEEDS_DISTINCT, where a token names an expert twice.
    """
    counts = tl.zeros([L_LANES], tl.int32)
    fault = tl.full([], 0, tl.int32)
    for start in tl.range(0, num_tokens * K, CHUNK, num_stages=1):  # pyright: ignore[reportGeneralTypeIssues]
        at = start + tl.arange(0, CHUNK)
        ids = tl.load(ids_ptr + at, mask=at < num_tokens * K, other=-1)
        faults = ((ids < -1) | (ids >= W * L)).to(tl.int32) * _BAD
        if NEEDS_DISTINCT:
            # Loads that depend on nothing; one reduction finds both kinds of faults.
            for step in tl.static_range(1, K):  # pyright: ignore[reportGeneralTypeIssues]
                has_later = (at % K + step < K) & (at < num_tokens * K)
                later = tl.load(ids_ptr + at + step, mask=has_later, other=-1)
                faults |= ((ids == later) & (ids >= 0)).to(tl.int32) * _REPEATED
        fault = tl.maximum(fault, tl.max(faults))
        local = ids.to(tl.int32) - peer * L
        is_local = (local >= 0) & (local < L)
        counts += tl.histogram(tl.where(is_local, local, 0), L_LANES, mask=is_local)
    word = status
    if ((status & FAULT_MASK) == 0) & (fault != 0):
        word += tl.where(fault >= _BAD, FAULT_IDS, FAULT_REPEATED_IDS)
    is_faulty = (word & FAULT_MASK) != 0
    lane = tl.arange(0, L_LANES)
    counts_ptr = int64_at(base + COUNT_LINES_AT) + rank * L + lane
    count_lines = line_of(tl.where(is_faulty, 0, counts), epoch)
    tl.store(counts_ptr, count_lines, mask=lane < L)
    sent = tl.where(is_faulty, 0, num_tokens) * 2 + IN_LINES
    part = tl.arange(0, 2)
    header_ptr = int64_at(base + HEADER_LINES_AT) + rank * 2 + part
    tl.store(header_ptr, line_of(tl.where(part == 0, sent, word), epoch))


@triton.jit
def count_positions(
    ids_ptr: tl.tensor,
    ids: tl.tensor,
    token: tl.tensor,
    K: tl.constexpr,
    K_LANES: tl.constexpr,
    CHUNK: tl.constexpr,
) -> tl.tensor:
    """Count the entries before (token, k) with the same expert, [K_LANES].

    ids 0 2 | 2 0: the positions of the second token are 1 1.
    """
    limit = token * K + tl.arange(0, K_LANES)
    positions = tl.zeros([K_LANES], tl.int32)
    for start in tl.range(0, (token + 1) * K, CHUNK, num_stages=1):
        at = start + tl.arange(0, CHUNK)
        earlier = tl.load(ids_ptr + at, mask=at < (token + 1) * K, other=-1).to(tl.int32)
        is_same = (earlier[:, None] == ids[None, :]) & (at[:, None] < limit[None, :])
        positions += tl.sum(is_same.to(tl.int32), axis=0)
    return positions
