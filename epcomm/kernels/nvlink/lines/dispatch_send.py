"""Low-latency dispatch over NVLink, its sender of few tokens: rows are sent in lines.

Receivers poll the lines themselves, so nothing is released: the first line may be read while the
last one is made. A row is shared by many programs, because one program would take longer than the
wire.

Memory order: common/lines.py.
"""

from __future__ import annotations

import triton
import triton.language as tl

from epcomm.kernels.launch import next_power_of_two
from epcomm.kernels.masks import both
from epcomm.kernels.nvlink.common import constexprs
from epcomm.kernels.nvlink.common.constexprs import LINE_BYTES, LINE_WORDS
from epcomm.kernels.nvlink.common.dependent_launch import await_previous, let_next_start
from epcomm.kernels.nvlink.common.exchange import VARYING, Memory, Peers
from epcomm.kernels.nvlink.common.layout import PART_LINES, LowLatencyLayout
from epcomm.kernels.nvlink.common.lines import await_credit, in_lanes, store_lines, words_of
from epcomm.kernels.nvlink.common.signals import living_ranks
from epcomm.kernels.nvlink.ll_dispatch_header import (
    FP8,
    FP8_POWER_OF_TWO,
    INT8,
    PLAIN,
    base_of,
    begin_dispatch,
    columns_of,
    load_ids,
    load_scales,
    note_parts,
    peer_in_turn,
    send_header,
    send_metadata,
)
from epcomm.kernels.quantize.fp8 import quantize_blocks
from epcomm.kernels.quantize.int8 import largest_bits, quantize_part

_WORD_BYTES = 4
# A line of a part of a row for each thread.
_WARPS = 4

_THREADS = tl.constexpr(32 * _WARPS)
_PLAIN = tl.constexpr(PLAIN)
_FP8_POWER_OF_TWO = tl.constexpr(FP8_POWER_OF_TWO)
_INT8 = tl.constexpr(INT8)


@triton.jit
def _send_header_lines(
    peers: Peers,
    ids_ptr: tl.tensor,
    epoch: tl.tensor,
    num_tokens: tl.tensor,
    status: tl.tensor,
    c: constexprs.Layout,
    rows: constexprs.SentRows,
    CHUNK: tl.constexpr,
) -> None:
    """Send the header for the rank that has the number of this program, and count it."""
    program = tl.program_id(0)
    is_header = tl.load(peers.excluded + program) == 0
    if is_header:
        send_header(
            peers, ids_ptr, program, epoch, num_tokens, status, c, CHUNK, True, rows.NEEDS_DISTINCT
        )
    # The counter belongs to this rank alone, and its host reads it.
    num_headers = tl.where(is_header & (program != peers.rank), 1, 0)
    tl.atomic_add(peers.counters + 2, tl.cast(num_headers, tl.int64), sem="relaxed")


@triton.jit
def _places_in_plane(
    c: constexprs.Layout, rows: constexprs.SentRows, LANES: tl.constexpr
) -> tl.tuple:
    """Return the index in a plane of the word in each lane, and which lanes have a word."""
    lane = tl.arange(0, LANES)
    if (rows.KIND == _PLAIN) | (rows.KIND == _INT8):
        place = lane
        is_word = lane < c.DATA_PLANE
    else:
        # Whole words of a block; some lanes may be unused.
        of_block = lane % (rows.BLOCK_LANES // 4)
        place = lane // (rows.BLOCK_LANES // 4) * (rows.BLOCK // 4) + of_block
        is_word = of_block < rows.BLOCK // 4
    return place, is_word  # pyright: ignore[reportReturnType]


@triton.jit
def _given_scales(
    x_scales_ptr: tl.tensor,
    token: tl.tensor,
    word: tl.tensor,
    is_loaded: tl.tensor,
    scales_stride: tl.tensor,
    scale_stride: tl.tensor,
    rows: constexprs.SentRows,
) -> tl.tensor:
    """Load words of the scales of a row that was quantised before: one scale each, or four."""
    EACH: tl.constexpr = 32 // x_scales_ptr.dtype.element_ty.primitive_bitwidth  # pyright: ignore[reportAttributeAccessIssue]
    words = tl.zeros(word.shape, tl.int32)
    for each in tl.static_range(EACH):
        at = word * EACH + each
        is_scale = is_loaded & (at < rows.SCALES)
        scale = load_scales(x_scales_ptr, token, at, is_scale, scales_stride, scale_stride)
        words |= scale.to(tl.int32) << (each * (32 // EACH))
    return words


@triton.jit(do_not_specialize=VARYING)
def send_dispatch_lines_kernel(
    x_ptr: tl.tensor,
    x_scales_ptr: tl.tensor | None,
    ids_ptr: tl.tensor,
    weights_ptr: tl.tensor | None,
    is_sent_ptr: tl.tensor,
    memory: Memory,
    own_address: tl.tensor,
    buffer_address: tl.tensor,
    rank: tl.tensor,
    max_polls: tl.tensor,
    num_tokens: tl.tensor,
    status: tl.tensor,
    batch: tl.tensor,
    is_captured: tl.tensor,
    scales_stride: tl.tensor,
    scale_stride: tl.tensor,
    c: constexprs.Layout,
    rows: constexprs.SentRows,
    PARTS: tl.constexpr,
    PLANE: tl.constexpr,
    LANES: tl.constexpr,
    ELEMENT_LANES: tl.constexpr,
    CHUNK: tl.constexpr,
    OVERLAPS: tl.constexpr,
) -> None:
    """Send a header in each of the first W programs, then a token's metadata, then a part of a row.

    W = 2, T = 1, rows of two parts: programs 0 and 1 send headers to ranks 0 and 1, program 2 the
    metadata of the token to both, programs 3 and 4 the halves of its row to those that need it.
    """
    program = tl.program_id(0)
    if OVERLAPS:
        await_previous()
        let_next_start()
    peers = Peers(*memory, own_address, buffer_address, rank, max_polls)
    epoch = begin_dispatch(peers, batch, is_captured, c)

    item = program - c.W - num_tokens
    token, part = item // PARTS, item % PARTS
    is_row = item >= 0
    place, has_word = _places_in_plane(c, rows, LANES)  # pyright: ignore[reportGeneralTypeIssues]
    # Lines of scales are stored by some of the lanes.
    SCALE_LANES: tl.constexpr = LANES // c.SCALE_PLANE  # pyright: ignore[reportOperatorIssue]
    lane = tl.arange(0, LANES)
    scale_place = lane // SCALE_LANES
    # On their way while the credit is awaited.
    row_ptr = x_ptr + tl.cast(token, tl.int64) * rows.X_STRIDE
    elements, given = (), ()
    for plane in tl.static_range(LINE_WORDS):  # pyright: ignore[reportArgumentType]
        column, is_element = columns_of(  # pyright: ignore[reportGeneralTypeIssues]
            part * LINE_WORDS + plane, rows, PLANE, ELEMENT_LANES
        )
        elements += (tl.load(row_ptr + column, mask=both(is_element, is_row), other=0.0),)
        if x_scales_ptr is not None:
            scale_word = (part * LINE_WORDS + plane) * c.SCALE_PLANE + scale_place
            is_given = both(lane % SCALE_LANES == 0, is_row)
            given += (
                _given_scales(
                    x_scales_ptr, token, scale_word, is_given, scales_stride, scale_stride, rows
                ),
            )
    if rows.KIND == _INT8:
        whole = tl.arange(0, rows.COLUMNS)
        row = tl.load(row_ptr + whole, mask=both(whole < rows.HIDDEN, is_row), other=0.0)
        amax_bits = largest_bits(row.to(tl.float32))
    ids = load_ids(ids_ptr, token, is_row, c)
    bases = ()
    sent_token = tl.where(is_row, token, tl.maximum(program - c.W, 0))
    for turn in tl.static_range(c.W):  # pyright: ignore[reportGeneralTypeIssues]
        bases += (base_of(peers, peer_in_turn(peers, sent_token, turn, c)),)

    if await_credit(peers, epoch, c, _THREADS):
        return

    if program < c.W:
        _send_header_lines(peers, ids_ptr, epoch, num_tokens, status, c, rows, CHUNK)
    elif is_row == 0:
        send_metadata(peers, ids_ptr, weights_ptr, bases, program - c.W, epoch, c, CHUNK, _THREADS)
        num_others = tl.sum(living_ranks(peers, c).to(tl.int32)) - 1
        tl.atomic_add(peers.counters + 1, tl.cast(num_others, tl.int64), sem="relaxed")
    else:
        words, scale_words = (), given
        for plane in tl.static_range(LINE_WORDS):  # pyright: ignore[reportArgumentType]
            if rows.KIND == _PLAIN:
                # Rows are copied as bits, so that an interpreter need not know the dtype.
                words += (words_of(elements[plane]),)
            elif rows.KIND == _INT8:
                codes, scale = quantize_part(  # pyright: ignore[reportGeneralTypeIssues]
                    elements[plane].to(tl.float32), amax_bits, rows.PROFILE
                )
                words += (words_of(codes),)
                scale_words += (lane * 0 + scale.to(tl.int32, bitcast=True),)
            else:
                codes, scales = quantize_blocks(  # pyright: ignore[reportGeneralTypeIssues]
                    elements[plane].to(tl.float32), rows.KIND == _FP8_POWER_OF_TWO, rows.HAS_E4M3
                )
                words += (words_of(tl.reshape(codes, [LANES * 4])),)  # pyright: ignore[reportOperatorIssue]
                scale_words += (in_lanes(words_of(scales), LANES),)
        is_word = has_word & (part * (LINE_WORDS * c.DATA_PLANE) + place < c.DATA_WORDS)
        line = part * c.DATA_PLANE + place
        scale_line = part * c.SCALE_PLANE + scale_place
        first_scale = part * (LINE_WORDS * c.SCALE_PLANE) + scale_place
        is_scale = (lane % SCALE_LANES == 0) & (first_scale < c.SCALE_WORDS)
        # The lines of the row of this token, in the memory of any rank.
        row_at = c.ROW_LINES_AT + (rank * c.LINE_TOKENS + token) * (c.ROW_LINES * LINE_BYTES)
        owners = tl.where(ids >= 0, ids // c.L, -1)
        num_sent = 0
        # The receiver of combine on this rank reads it.
        if part == 0:
            note_parts(peers, is_sent_ptr, token, ids, c)
        for turn in tl.static_range(c.W):
            peer = peer_in_turn(peers, token, turn, c)
            # Entries of an excluded rank are as masked entries.
            is_owner = (owners == peer) & (bases[turn] != 0)
            is_needed = tl.max(is_owner.to(tl.int32))
            if part == 0:
                num_sent += tl.where(peer == rank, 0, is_needed)
            if is_needed > 0:
                to = bases[turn] + row_at
                store_lines(to, line, words, epoch, is_word)  # pyright: ignore[reportArgumentType]
                if c.SCALE_WORDS > 0:
                    to += c.SCALE_LINES * LINE_BYTES
                    store_lines(to, scale_line, scale_words, epoch, is_scale)  # pyright: ignore[reportArgumentType]
        tl.atomic_add(peers.counters, tl.cast(num_sent, tl.int64), sem="relaxed")


def num_parts(layout: LowLatencyLayout) -> int:
    """Return the programs that share a row."""
    return -(-layout.data_words // (LINE_WORDS.value * layout.data_plane))


def lines_constants(
    layout: LowLatencyLayout, itemsize: int, kind: int, scale_block: int
) -> dict[str, int]:
    """Return the constants with which rows are sent in num_parts() parts.

    itemsize: bytes of an element of the rows that are given.
    """
    # Words of quantised rows have four elements.
    elements_of_word = _WORD_BYTES // itemsize if kind == PLAIN else _WORD_BYTES
    lanes = layout.data_plane
    if kind in (FP8, FP8_POWER_OF_TWO):
        lanes = layout.data_plane * next_power_of_two(scale_block) // scale_block
    lanes = max(PART_LINES, next_power_of_two(lanes))
    return {
        "PARTS": num_parts(layout),
        "PLANE": layout.data_plane * elements_of_word,
        "LANES": lanes,
        "ELEMENT_LANES": lanes * elements_of_word,
        "CHUNK": max(32, next_power_of_two(layout.line_tokens * layout.top_k)),
        "num_warps": _WARPS,
    }
