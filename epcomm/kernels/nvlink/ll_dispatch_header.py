"""Device functions of both senders of low-latency dispatch over NVLink.

Headers and metadata are always sent in lines: no fence delays the index that the receiver makes of
them, and it learns from a header whether rows come in lines.
"""

from __future__ import annotations

import triton
import triton.language as tl

from epcomm.kernels.masks import both
from epcomm.kernels.nvlink.common import constexprs
from epcomm.kernels.nvlink.common.constexprs import EAGER_EPOCH, HELD_BATCH, LINE_BYTES
from epcomm.kernels.nvlink.common.exchange import Peers
from epcomm.kernels.nvlink.common.lines import (
    give_credit,
    int64_at,
    line_of,
    next_epoch,
    store_lines,
)
from epcomm.kernels.nvlink.common.status import FAULT_IDS, FAULT_MASK, FAULT_REPEATED_IDS

# Kinds of rows on the wire.
PLAIN, FP8, FP8_POWER_OF_TWO, INT8 = 0, 1, 2, 3

_PLAIN, _INT8 = tl.constexpr(PLAIN), tl.constexpr(INT8)
# Bits of what is wrong with an entry; an id that is not an expert counts more.
_REPEATED, _BAD = tl.constexpr(1), tl.constexpr(2)


@triton.jit
def dispatch_epoch(peers: Peers, is_captured: tl.tensor) -> tl.tensor:
    """Return the epoch of a dispatch, in its sender and in its receiver.

    A host releases the receive buffer first if its batch was not combined. The host does not learn
    of a replay: if the buffer holds an eager batch 5 without a combine, a captured dispatch is 6.
    """
    # The load bypasses the L1 cache, which only the end of the previous kernel surely empties.
    epoch = tl.load(peers.state, volatile=True)
    # An eager sender writes this word while its receiver runs; neither reads it.
    is_open = (is_captured != 0) & (tl.load(peers.state + EAGER_EPOCH, volatile=True) == epoch)
    return tl.where(is_open, next_epoch(epoch), epoch)


@triton.jit
def begin_dispatch(
    peers: Peers, batch: tl.tensor, is_captured: tl.tensor, c: constexprs.Layout
) -> tl.tensor:
    """Note the batch that the receive buffer holds from now on; return its epoch.

    No program reads a word that its own kernel updates: combine writes the word that all programs
    read, and a captured dispatch does not write that of eager ones.
    """
    epoch = dispatch_epoch(peers, is_captured)
    if tl.program_id(0) == 0:
        tl.store(peers.state + 1, epoch)
        tl.store(peers.state + HELD_BATCH, batch)
        if is_captured == 0:
            tl.store(peers.state + EAGER_EPOCH, epoch)
        else:
            last = tl.load(peers.state)
            if last != epoch:
                # The eager batch ends on every rank.
                give_credit(peers, last, c)
    return epoch


@triton.jit
def send_header(
    peers: Peers,
    ids_ptr: tl.tensor,
    peer: tl.tensor,
    epoch: tl.tensor,
    num_tokens: tl.tensor,
    status: tl.tensor,
    c: constexprs.Layout,
    CHUNK: tl.constexpr,
    IN_LINES: tl.constexpr,
    NEEDS_DISTINCT: tl.constexpr,
) -> None:
    """Send `peer` a header: how T rows are sent, and the counts of its L experts.

    ids 0 2 | 3 2 with L = 2: rank 1 receives the counts 2 1 of its experts 2 and 3. If an id is
    neither -1 nor an expert, or NEEDS_DISTINCT and a token names an expert twice, every rank
    receives the fault and no counts.
    """
    base = tl.load(peers.bases + peer)
    counts = tl.zeros([c.L_LANES], tl.int32)
    fault = tl.full([], 0, tl.int32)
    for start in tl.range(0, num_tokens * c.K, CHUNK, num_stages=1):  # pyright: ignore[reportGeneralTypeIssues]
        at = start + tl.arange(0, CHUNK)
        ids = tl.load(ids_ptr + at, mask=at < num_tokens * c.K, other=-1)
        faults = ((ids < -1) | (ids >= c.W * c.L)).to(tl.int32) * _BAD
        if NEEDS_DISTINCT:
            # These loads are independent; one reduction finds both kinds of faults.
            for step in tl.static_range(1, c.K):  # pyright: ignore[reportGeneralTypeIssues]
                has_later = (at % c.K + step < c.K) & (at < num_tokens * c.K)
                later = tl.load(ids_ptr + at + step, mask=has_later, other=-1)
                faults |= ((ids == later) & (ids >= 0)).to(tl.int32) * _REPEATED
        fault = tl.maximum(fault, tl.max(faults))
        local = ids.to(tl.int32) - peer * c.L
        is_local = (local >= 0) & (local < c.L)
        counts += tl.histogram(tl.where(is_local, local, 0), c.L_LANES, mask=is_local)
    word = status
    if ((status & FAULT_MASK) == 0) & (fault != 0):
        word += tl.where(fault >= _BAD, FAULT_IDS, FAULT_REPEATED_IDS)
    is_faulty = (word & FAULT_MASK) != 0
    lane = tl.arange(0, c.L_LANES)
    counts_ptr = int64_at(base + c.COUNT_LINES_AT) + peers.rank * c.L + lane
    count_lines = line_of(tl.where(is_faulty, 0, counts), epoch)
    tl.store(counts_ptr, count_lines, mask=lane < c.L)
    sent = tl.where(is_faulty, 0, num_tokens) * 2 + IN_LINES
    part = tl.arange(0, 2)
    header_ptr = int64_at(base + c.HEADER_LINES_AT) + peers.rank * 2 + part
    tl.store(header_ptr, line_of(tl.where(part == 0, sent, word), epoch))


@triton.jit
def count_positions(
    ids_ptr: tl.tensor, ids: tl.tensor, token: tl.tensor, c: constexprs.Layout, CHUNK: tl.constexpr
) -> tl.tensor:
    """Count the entries before (token, k) with the same expert, [K_LANES].

    ids 0 2 | 2 0: the positions of the second token are 1 1.
    """
    limit = token * c.K + tl.arange(0, c.K_LANES)
    positions = tl.zeros([c.K_LANES], tl.int32)
    for start in tl.range(0, (token + 1) * c.K, CHUNK, num_stages=1):
        at = start + tl.arange(0, CHUNK)
        earlier = tl.load(ids_ptr + at, mask=at < (token + 1) * c.K, other=-1).to(tl.int32)
        is_same = (earlier[:, None] == ids[None, :]) & (at[:, None] < limit[None, :])
        positions += tl.sum(is_same.to(tl.int32), axis=0)
    return positions


@triton.jit
def load_ids(
    ids_ptr: tl.tensor, token: tl.tensor, has_token: tl.tensor, c: constexprs.Layout
) -> tl.tensor:
    """Load the experts of a token as int32, [K_LANES]; -1 without a token."""
    k = tl.arange(0, c.K_LANES)
    return tl.load(ids_ptr + token * c.K + k, mask=both(k < c.K, has_token), other=-1).to(tl.int32)


@triton.jit
def peer_in_turn(
    peers: Peers, token: tl.tensor, turn: tl.constexpr, c: constexprs.Layout
) -> tl.tensor:
    """Return the rank to which this rank sends a token after `turn` others: 2 0 1 for 1 + 1 of 3.

    For each token every rank begins with a different peer. If all began with rank 0, the rows of
    all would queue for one GPU after another.
    """
    peer = (peers.rank + token) % c.W + turn
    return tl.where(peer < c.W, peer, peer - c.W)


@triton.jit
def base_of(peers: Peers, peer: tl.tensor) -> tl.tensor:
    """Load the address of the receive buffer of a rank, 0 if the rank is excluded."""
    base = tl.load(peers.bases + peer)
    return tl.where(tl.load(peers.excluded + peer) != 0, 0, base)


@triton.jit
def send_metadata(
    peers: Peers,
    ids_ptr: tl.tensor,
    weights_ptr: tl.tensor | None,
    bases: tl.tuple | None,
    token: tl.tensor,
    epoch: tl.tensor,
    c: constexprs.Layout,
    CHUNK: tl.constexpr,
    THREADS: tl.constexpr,
) -> None:
    """Send every rank its experts of a token, their positions, and weights, if any.

    bases: base_of() the ranks from peer_in_turn() of 0 on, or None to load each when it is needed,
        which takes fewer registers.
    """
    # A line for each of K experts, which some threads store: the others have lanes, too.
    LANES: tl.constexpr = max(c.K_LANES, THREADS)  # pyright: ignore[reportAssignmentType]
    k = tl.arange(0, LANES)
    ids = tl.load(ids_ptr + token * c.K + k, mask=k < c.K, other=-1).to(tl.int32)
    weight_words = k * 0
    if weights_ptr is not None:
        weights = tl.load(weights_ptr + token * c.K + k, mask=k < c.K, other=0.0)
        weight_words = weights.to(tl.int32, bitcast=True)
    positions = count_positions(ids_ptr, load_ids(ids_ptr, token, token >= 0, c), token, c, CHUNK)
    # 1 2 1 2 of 1 2.
    rows = tl.broadcast_to(positions[None, :], [LANES // c.K_LANES, c.K_LANES])
    positions = tl.reshape(rows, [LANES])
    owners = tl.where(ids >= 0, ids // c.L, -1)
    for turn in tl.static_range(c.W):
        peer = peer_in_turn(peers, token, turn, c)
        base = base_of(peers, peer) if bases is None else bases[turn]
        experts = tl.where(owners == peer, ids - peer * c.L, -1)
        row = tl.cast(peers.rank, tl.int64) * c.M + token
        to = base + c.METADATA_LINES_AT + row * (c.K_LANES * LINE_BYTES)
        is_entry = both(k < c.K, base != 0)
        store_lines(to, k, (experts, positions, weight_words), epoch, is_entry)  # pyright: ignore[reportArgumentType]


@triton.jit
def columns_of(
    part: tl.tensor, rows: constexprs.SentRows, PART: tl.constexpr, LANES: tl.constexpr
) -> tl.tuple:
    """Return the columns of a part of a row, and which of them exist: whole blocks if these scale.

    PART: columns of a part whose blocks do not scale, in LANES lanes.
    """
    if (rows.KIND == _PLAIN) | (rows.KIND == _INT8):
        lane = tl.arange(0, LANES)
        column = part * PART + lane
        is_element = (lane < PART) & (column < rows.HIDDEN)
    else:
        lane = tl.arange(0, rows.BLOCK_LANES)[None, :]
        column = (part * rows.BLOCKS + tl.arange(0, rows.BLOCKS)[:, None]) * rows.BLOCK + lane
        is_element = (lane < rows.BLOCK) & (column < rows.HIDDEN)
    return column, is_element  # pyright: ignore[reportReturnType]


@triton.jit
def load_scales(
    scales_ptr: tl.tensor,
    token: tl.tensor,
    at: tl.tensor,
    is_scale: tl.tensor,
    scales_stride: tl.tensor,
    scale_stride: tl.tensor,
) -> tl.tensor:
    """Load the scales `at` of a token whose row was quantised before.

    scales_stride: elements from the scales of a token to those of the next.
    scale_stride: elements from one scale of a token to the next.
    """
    row_ptr = scales_ptr + tl.cast(token, tl.int64) * scales_stride
    return tl.load(row_ptr + at.to(tl.int64) * scale_stride, mask=is_scale, other=0)


@triton.jit
def note_parts(
    peers: Peers, is_sent_ptr: tl.tensor, token: tl.tensor, ids: tl.tensor, c: constexprs.Layout
) -> None:
    """Keep for combine which rows return to a token, [PARTS], see LowLatencyLayout.

    Of groups of experts: whether the token has entries there. Of slots: 1 + the rank that has it, 0
    for none. Entries of an excluded rank are as masked entries.

    ids: [K_LANES], the experts of the token.
    """
    owners = tl.where(ids >= 0, ids // c.L, -1)
    if c.RETURNS_SLOTS:
        part = tl.arange(0, c.K_LANES)
        is_rank = (owners >= 0) & (owners < c.W) & (part < c.K)
        is_excluded = tl.load(peers.excluded + owners, mask=is_rank, other=1) != 0
        noted = tl.where(is_excluded, 0, owners + 1)
    else:
        part = tl.arange(0, c.PART_LANES)
        GROUP: tl.constexpr = c.L // c.GROUPS  # pyright: ignore[reportAssignmentType]
        has_entry = (ids[:, None] >= 0) & (ids[:, None] // GROUP == part[None, :])
        is_excluded = tl.load(peers.excluded + part // c.GROUPS, mask=part < c.PARTS, other=1) != 0
        noted = tl.where(is_excluded, 0, tl.max(has_entry.to(tl.int32), axis=0))
    tl.store(is_sent_ptr + token * c.PARTS + part, noted.to(tl.uint8), mask=part < c.PARTS)
