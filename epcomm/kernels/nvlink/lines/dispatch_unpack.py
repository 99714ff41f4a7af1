"""Store rows in lines where rows in bulk are stored, so that only receivers of dispatch know lines.

A part of the receiver of low-latency dispatch over NVLink. Memory order: common/lines.py.
"""

from __future__ import annotations

import triton
import triton.language as tl

from epcomm.kernels.masks import both
from epcomm.kernels.nvlink.common import constexprs
from epcomm.kernels.nvlink.common.constexprs import LINE_BYTES, LINE_WORDS, PART_LINES
from epcomm.kernels.nvlink.common.exchange import Peers, SlabMemory
from epcomm.kernels.nvlink.common.layout import LowLatencyLayout
from epcomm.kernels.nvlink.common.lines import (
    Looks,
    abort_if_late,
    begin_wait,
    end_look,
    flag_of,
    int64_at,
    is_waiting,
    load_lines,
    word_in_row,
    word_of,
)
from epcomm.kernels.nvlink.common.signals import int32_at, living_ranks
from epcomm.kernels.nvlink.common.status import WAIT_DISPATCH
from epcomm.kernels.nvlink.ll_dispatch_pack import scales_at

# Tokens of which a program unpacks a line each thread at once: one after another, each would take
# the time of a look.
UNPACKED_TOKENS = 4
# Most programs that unpack rows: four on each of the SMs of an H200.
_MOST_UNPACKERS = 528


@triton.jit
def _await_lines(
    lines_ptr: tl.tensor,
    is_needed: tl.tensor,
    source_lane: tl.tensor,
    peers: Peers,
    epoch: tl.tensor,
    THREADS: tl.constexpr,
) -> tl.tensor:
    """Wait for short lines [W_LANES, n] of all sources; return the bits of ranks that are missing.

    Nothing that is loaded here is returned: code that needs the words loads them after the wait.
    """
    looks = begin_wait(peers.max_polls)
    while is_waiting(looks):
        aborted = tl.load(int32_at(peers.own_address), volatile=True)
        lines = tl.load(lines_ptr, mask=is_needed, other=0, volatile=True)
        is_absent = is_needed & (flag_of(lines) != epoch)
        bits = tl.where(is_absent, 1 << source_lane[:, None], 0)
        looks = end_look(looks, tl.max(tl.max(bits, axis=1)), aborted, THREADS)
    return looks.late


@triton.jit
def _slots_of_token(
    peers: Peers,
    source: tl.tensor,
    address: tl.tensor,
    is_row: tl.tensor,
    epoch: tl.tensor,
    c: constexprs.Layout,
    index: constexprs.Index,
    THREADS: tl.constexpr,
) -> tl.tuple:
    """Return the slots of a token, [K_LANES], -1 for none, and the ranks whose counts are missing.

    address: of the lines of the token's metadata, which are there.   is_row: whether it has slots
        here.
    """
    source_lane = tl.arange(0, c.W_LANES)
    k = tl.arange(0, c.K_LANES)
    # Not what the look has loaded: the compiler would load that once for each layout, and the line
    # might come between these loads. From here on it stays as it is.
    local_ids, positions, _, _ = load_lines(address, k, both(k < c.K, is_row))  # pyright: ignore[reportGeneralTypeIssues]
    is_slot = both((k < c.K) & (local_ids >= 0) & (local_ids < c.L), is_row)
    counts_ptr = int64_at(peers.buffer_address + c.COUNT_LINES_AT)
    counts_ptr += source_lane[:, None] * c.L + local_ids[None, :]
    is_before = living_ranks(peers, c) & (source_lane < source)
    is_count = is_before[:, None] & is_slot[None, :]
    late = _await_lines(counts_ptr, is_count, source_lane, peers, epoch, THREADS)
    counts = word_of(tl.load(counts_ptr, mask=is_count, other=0, volatile=True))
    before = tl.sum(tl.where(is_count, counts, 0), axis=0)
    slots = local_ids * index.CAPACITY + before + positions
    # No expert has more rows than its slab, whatever a rank has sent.
    is_slot = both(is_slot & (before + positions < index.CAPACITY), late == 0)
    return tl.where(is_slot, slots, -1), late  # pyright: ignore[reportReturnType]


@triton.jit
def _store_words(
    peers: Peers,
    slabs: SlabMemory,
    row: tl.tensor,
    slots: tl.tensor,
    words: tl.tuple,
    line: tl.tensor,
    is_row: tl.tensor,
    c: constexprs.Layout,
    index: constexprs.Index,
) -> None:
    """Store the words of some lines of a row where rows are, or in slabs at slots [K_LANES].

    words: of each plane.   line: their lines in the row.
    """
    k = tl.arange(0, c.K_LANES)
    for plane in tl.static_range(LINE_WORDS):  # pyright: ignore[reportArgumentType, reportGeneralTypeIssues]
        word = word_in_row(line, plane, c.DATA_PLANE)
        is_datum = both((line < c.SCALE_LINES) & (word < c.DATA_WORDS), is_row)
        scale = word_in_row(tl.maximum(line - c.SCALE_LINES, 0), plane, c.SCALE_PLANE)
        is_scale = both((line >= c.SCALE_LINES) & (scale < c.SCALE_WORDS), is_row)
        if slabs.data is not None:
            # One after the other: as a block they would take more registers than there are.
            for each in tl.static_range(c.K):  # pyright: ignore[reportGeneralTypeIssues]
                slot = tl.max(tl.where(k == each, slots, -1)).to(tl.int64)
                to_ptr = slabs.data + slot * (c.DATA_BYTES // 4) + word
                tl.store(to_ptr, words[plane], mask=both(is_datum, slot >= 0))
                if slabs.scales is not None:
                    place = scales_at(slot, scale, index)
                    tl.store(slabs.scales + place, words[plane], mask=both(is_scale, slot >= 0))
        else:
            data_ptr = int32_at(peers.buffer_address + c.DATA_AT + row * c.DATA_BYTES)
            tl.store(data_ptr + word, words[plane], mask=is_datum)
            if c.SCALE_WORDS > 0:
                scales_ptr = int32_at(peers.buffer_address + c.SCALES_AT + row * c.SCALE_BYTES)
                tl.store(scales_ptr + scale, words[plane], mask=is_scale)


@triton.jit
def _unpack_tokens(
    peers: Peers,
    slabs: SlabMemory,
    source: tl.tensor,
    first: tl.tensor,
    piece: tl.tensor,
    epoch: tl.tensor,
    c: constexprs.Layout,
    index: constexprs.Index,
    THREADS: tl.constexpr,
) -> tl.tuple:
    """Wait for some lines of the rows of TOKENS tokens from `first` on, if they come; unpack them.

    The header of the source and the metadata of a token, which are looked at beside the lines of
    the row, decide whether these come. With slabs, they are stored at the slots of the token's
    experts, which depend on the counts of the sources before.

    Returns: the bits of ranks whose lines did not come, as end_look() leaves them; T of the source
        if it sent in lines, else 0.
    """
    k = tl.arange(0, c.K_LANES)
    # The entries of all tokens, one line each.
    entry = tl.arange(0, index.TOKENS * c.K_LANES)
    token_of_entry, k_of_entry = entry // c.K_LANES, entry % c.K_LANES
    has_entry = (first + token_of_entry < c.LINE_TOKENS) & (k_of_entry < c.K)
    header_ptr = int64_at(peers.buffer_address + c.HEADER_LINES_AT) + source * 2
    rows_at = (source * c.LINE_TOKENS + first) * (c.ROW_LINES * LINE_BYTES)
    rows_at += peers.buffer_address + c.ROW_LINES_AT
    metadata_at = (source * c.M + first).to(tl.int64) * (c.K_LANES * LINE_BYTES)
    metadata_at += peers.buffer_address + c.METADATA_LINES_AT
    line = piece * PART_LINES + tl.arange(0, PART_LINES)
    is_line = line < c.ROW_LINES

    num_tokens = 0
    looks = begin_wait(peers.max_polls)
    while is_waiting(looks):
        # All loads are under way together.
        aborted = tl.load(int32_at(peers.own_address), volatile=True)
        header = tl.load(header_ptr, volatile=True)
        experts, _, _, told = load_lines(metadata_at, entry, has_entry)  # pyright: ignore[reportGeneralTypeIssues]
        words, flags = (), ()
        for each in tl.static_range(index.TOKENS):  # pyright: ignore[reportGeneralTypeIssues]
            is_there = both(is_line, first + each < c.LINE_TOKENS)
            row_line = each * c.ROW_LINES + line
            word0, word1, word2, flag = load_lines(rows_at, row_line, is_there)  # pyright: ignore[reportGeneralTypeIssues]
            words += ((word0, word1, word2),)
            flags += (flag,)
        in_lines = (word_of(header) & 1) != 0
        sent_tokens = tl.where(in_lines, tl.minimum(word_of(header) >> 1, c.LINE_TOKENS), 0)
        # 2: not there; 1: a slot; 0: none.
        state = tl.where((k_of_entry < c.K) & (experts >= 0), 1, 0)
        state = tl.where(has_entry & (told != epoch), 2, state)
        # What a header of another epoch says decides nothing. One reduction serves all threads.
        is_late = both(line >= 0, flag_of(header) != epoch)
        is_row = ()
        for each in tl.static_range(index.TOKENS):  # pyright: ignore[reportGeneralTypeIssues]
            state_of_token = tl.max(tl.where(token_of_entry == each, state, 0))
            is_sent = first + each < sent_tokens
            is_absent = both(is_line & (flags[each] != epoch), state_of_token == 1)
            is_late |= both(is_absent | (state_of_token == 2), is_sent)
            is_row += (is_sent & (state_of_token == 1),)
        looks = end_look(looks, tl.where(is_late, 1 << source, 0), aborted, THREADS)
        if looks.late == 0:
            num_tokens = sent_tokens
            # Of the look that found them: to load them again would take as long as to look.
            for each in tl.static_range(index.TOKENS):  # pyright: ignore[reportGeneralTypeIssues]
                slots = k
                if slabs.data is not None:
                    slots, missing = _slots_of_token(  # pyright: ignore[reportGeneralTypeIssues]
                        *(peers, source, metadata_at + each * (c.K_LANES * LINE_BYTES)),
                        *(is_row[each], epoch, c, index, THREADS),
                    )
                    # That wait was as long as any: it is not begun again.
                    polls_left = tl.where(missing != 0, 0, looks.polls_left)
                    looks = Looks(looks.late | missing, polls_left, looks.number, looks.end_ns)
                row = (source * c.M + first + each).to(tl.int64)
                _store_words(peers, slabs, row, slots, words[each], line, is_row[each], c, index)
    return looks.late, num_tokens  # pyright: ignore[reportReturnType]


@triton.jit
def unpack_rows(
    peers: Peers,
    slabs: SlabMemory,
    worker: tl.tensor,
    num_workers: tl.tensor,
    epoch: tl.tensor,
    c: constexprs.Layout,
    index: constexprs.Index,
    THREADS: tl.constexpr,
) -> tl.tensor:
    """Unpack the pieces of rows in lines that belong to `worker` of num_workers.

    A piece has a line for each thread. A row of 200 lines has two pieces: with two sources, TOKENS
    of 4 and four workers, worker 2 unpacks the first pieces of the rows of rank 1 until the T of
    its header; with eight workers, those of its tokens 0 to 3, 8 to 11, ...

    num_workers: of num_unpackers().   Returns: whether this rank cannot continue.
    """
    PAIRS: tl.constexpr = c.W * c.ROW_PIECES  # pyright: ignore[reportAssignmentType]
    any_late = epoch * 0
    for pair in tl.range(worker % PAIRS, PAIRS, num_workers, num_stages=1):  # pyright: ignore[reportGeneralTypeIssues]
        source, piece = pair // c.ROW_PIECES, pair % c.ROW_PIECES
        token = worker // PAIRS * index.TOKENS
        num_tokens = tl.where(tl.load(peers.excluded + source) != 0, 0, c.LINE_TOKENS)
        while token < num_tokens:
            late, num_tokens = _unpack_tokens(  # pyright: ignore[reportGeneralTypeIssues]
                peers, slabs, source, token, piece, epoch, c, index, THREADS
            )
            abort_if_late(peers, late, WAIT_DISPATCH, epoch, c)
            any_late |= late
            token += tl.maximum(num_workers // PAIRS, 1) * index.TOKENS
    return any_late != 0


def num_unpackers(layout: LowLatencyLayout, num_tokens: int) -> int:
    """Return the programs that unpack rows, if each rank sends about num_tokens tokens.

    As many for each piece of each source: with 48 pieces 3 for 12 tokens and 8 for 32, with 80
    pieces 6 for 32, because more would not be resident. If most ranks send in bulk, they must not
    hold the SMs: 1. Without lines 0.
    """
    if not layout.line_tokens:
        return 0
    pairs = layout.world_size * layout.row_pieces
    looks = -(-(num_tokens or layout.line_tokens) // UNPACKED_TOKENS)
    if num_tokens > layout.line_tokens:
        looks = 1
    return min(_MOST_UNPACKERS, pairs * min(looks, max(1, _MOST_UNPACKERS // pairs)))
