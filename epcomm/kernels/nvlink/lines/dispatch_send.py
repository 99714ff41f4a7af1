"""Low-latency dispatch over NVLink, its sender of few tokens: rows are sent in lines.

Receivers poll the lines themselves, so nothing is released: the first line may be read while the
last one is made. A row is shared by many programs, because one program would take longer than the
wire.

Memory order: common/lines.py.
"""

from __future__ import annotations

from functools import cache

import triton
import triton.language as tl
from torch import Tensor

from epcomm.kernels.launch import EXACT, next_power_of_two
from epcomm.kernels.masks import both
from epcomm.kernels.nvlink.common import constexprs
from epcomm.kernels.nvlink.common.dependent_launch import (
    await_previous,
    let_next_start,
    overlapping,
)
from epcomm.kernels.nvlink.common.exchange import VARYING, LowLatencyExchange, Memory, Peers
from epcomm.kernels.nvlink.common.launches import prepare
from epcomm.kernels.nvlink.common.layout import LINE_BYTES
from epcomm.kernels.nvlink.common.lines import await_credit, int64_at, line_of, words_of
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
    note_owners,
    peer_in_turn,
    send_header,
    send_metadata,
)
from epcomm.kernels.prepared import CHANGES, PreparedLaunch
from epcomm.kernels.quantize.fp8 import quantize_blocks
from epcomm.kernels.quantize.int8 import largest_bits, quantize_part

# Elements of a row that a program sends: eight for each thread, or a quarter as many words.
_PART = 1024
_WORD_BYTES = 4
# Blocks whose scales are whole words, whatever their type.
LEAST_BLOCKS = 4
_WARPS = 4

_THREADS = tl.constexpr(32 * _WARPS)
_PLAIN = tl.constexpr(PLAIN)
_FP8_POWER_OF_TWO = tl.constexpr(FP8_POWER_OF_TWO)
_INT8 = tl.constexpr(INT8)
_LINE_BYTES = tl.constexpr(LINE_BYTES)


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
            peers,
            ids_ptr,
            program,
            epoch,
            num_tokens,
            status,
            c,
            CHUNK,
            True,
            rows.NEEDS_DISTINCT,
        )
    # The counter belongs to this rank alone, and its host reads it.
    num_headers = tl.where(is_header & (program != peers.rank), 1, 0)
    tl.atomic_add(peers.counters + 2, tl.cast(num_headers, tl.int64), sem="relaxed")


@triton.jit
def _place_of_words(
    part: tl.tensor, NUM_WORDS: tl.constexpr, c: constexprs.Layout, rows: constexprs.SentRows
) -> tl.tuple:
    """Return the indices of the words of a part in its row, and which of them exist."""
    place = tl.arange(0, NUM_WORDS)
    if (rows.KIND == _PLAIN) | (rows.KIND == _INT8):
        word = part * NUM_WORDS + place
        is_word = word < c.DATA_WORDS
    else:
        # Whole words of a block; some lanes may be unused.
        of_block = place % (rows.BLOCK_LANES // 4)
        block = part * rows.BLOCKS + place // (rows.BLOCK_LANES // 4)
        word = block * (rows.BLOCK // 4) + of_block
        is_word = (of_block < rows.BLOCK // 4) & (word < c.DATA_WORDS)
    return word, is_word  # pyright: ignore[reportReturnType]


@triton.jit(do_not_specialize=VARYING)
def _send_dispatch_lines_kernel(
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
    PART: tl.constexpr,
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
    column, is_element = columns_of(part, rows, PART)  # pyright: ignore[reportGeneralTypeIssues]
    # On their way while the credit is awaited.
    row_ptr = x_ptr + tl.cast(token, tl.int64) * rows.X_STRIDE
    elements = tl.load(row_ptr + column, mask=both(is_element, is_row), other=0.0)
    if rows.KIND == _INT8:
        whole = tl.arange(0, rows.COLUMNS)
        row = tl.load(row_ptr + whole, mask=both(whole < rows.HIDDEN, is_row), other=0.0)
        amax_bits = largest_bits(row.to(tl.float32))
    if x_scales_ptr is not None:
        scale_lane = tl.arange(0, rows.SCALE_LANES)
        is_given = both(both(scale_lane < rows.SCALES, is_row), part == 0)
        given = load_scales(x_scales_ptr, token, scale_lane, is_given, scales_stride, scale_stride)
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
        send_metadata(peers, ids_ptr, weights_ptr, bases, program - c.W, epoch, c, CHUNK, True)
        num_others = tl.sum(living_ranks(peers, c).to(tl.int32)) - 1
        tl.atomic_add(peers.counters + 1, tl.cast(num_others, tl.int64), sem="relaxed")
    else:
        scale_words = None
        if rows.KIND == _PLAIN:
            # Rows are copied as bits, so that an interpreter need not know the dtype.
            words = words_of(elements)
            if x_scales_ptr is not None:
                scale_words = words_of(given)
                scale_word = tl.arange(0, scale_words.shape[0])
                is_scale = both(scale_word < c.SCALE_WORDS, part == 0)
        elif rows.KIND == _INT8:
            codes, scale = quantize_part(elements.to(tl.float32), amax_bits, rows.PROFILE)  # pyright: ignore[reportGeneralTypeIssues]
            words = words_of(codes)
            scale_word = tl.arange(0, 1)
            scale_words = scale_word + scale.to(tl.int32, bitcast=True)
            is_scale = both(scale_word == 0, part == 0)
        else:
            codes, scales = quantize_blocks(  # pyright: ignore[reportGeneralTypeIssues]
                elements.to(tl.float32), rows.KIND == _FP8_POWER_OF_TWO, rows.HAS_E4M3
            )
            words = words_of(tl.reshape(codes, [rows.BLOCKS * rows.BLOCK_LANES]))
            scale_words = words_of(scales)
            scale_word = part * scale_words.shape[0] + tl.arange(0, scale_words.shape[0])
            is_scale = scale_word < c.SCALE_WORDS
        word, is_word = _place_of_words(part, words.shape[0], c, rows)  # pyright: ignore[reportGeneralTypeIssues]
        lines = line_of(words, epoch)
        # The lines of the row of this token, in the memory of any rank.
        row_at = c.ROW_LINES_AT + (rank * c.LINE_TOKENS + token) * (c.ROW_LINES * _LINE_BYTES)
        owners = tl.where(ids >= 0, ids // c.L, -1)
        num_sent = 0
        # The receiver of combine on this rank reads it.
        if weights_ptr is None:  # noqa: SIM102 - what is not compiled must be a branch of its own
            if part == 0:
                note_owners(peers, is_sent_ptr, token, owners, c)
        for turn in tl.static_range(c.W):
            peer = peer_in_turn(peers, token, turn, c)
            # Entries of an excluded rank are as masked entries.
            is_owner = (owners == peer) & (bases[turn] != 0)
            is_needed = tl.max(is_owner.to(tl.int32))
            if part == 0:
                if weights_ptr is not None:
                    tl.store(is_sent_ptr + token * c.W + peer, is_needed.to(tl.uint8))
                num_sent += tl.where(peer == rank, 0, is_needed)
            if is_needed > 0:
                lines_ptr = int64_at(bases[turn] + row_at)
                tl.store(lines_ptr + c.DATA_LINES + word, lines, mask=is_word)
                if scale_words is not None:
                    scale_lines = line_of(scale_words, epoch)
                    tl.store(lines_ptr + c.SCALE_LINES + scale_word, scale_lines, mask=is_scale)
        tl.atomic_add(peers.counters, tl.cast(num_sent, tl.int64), sem="relaxed")


@cache
def num_parts(hidden_size: int, scale_block: int, kind: int, itemsize: int) -> int:
    """Return the programs that share a row."""
    if kind in (FP8, FP8_POWER_OF_TWO):
        return -(-hidden_size // (scale_block * blocks_in_lines(hidden_size, scale_block)))
    return -(-hidden_size // _part_of(hidden_size, itemsize))


def _part_of(hidden_size: int, itemsize: int) -> int:
    """Return the elements of a row that a program sends as they are, or with one scale for all."""
    # Words of a row have up to four elements.
    most = _PART if itemsize < _WORD_BYTES else _PART // _WORD_BYTES
    return max(4, min(most, next_power_of_two(hidden_size)))


def blocks_in_lines(hidden_size: int, scale_block: int) -> int:
    """Return the blocks of a row that a program sends, each with its scale."""
    blocks = next_power_of_two(-(-hidden_size // scale_block))
    return max(LEAST_BLOCKS, min(_PART // next_power_of_two(scale_block), blocks))


def prepare_lines(
    exchange: LowLatencyExchange, rows: constexprs.SentRows, hidden_states: Tensor, parts: int
) -> PreparedLaunch:
    """Return the launch that sends `rows` in lines, each row in `parts` parts."""
    layout = exchange.peers.layout
    return prepare(
        exchange,
        _send_dispatch_lines_kernel,
        [CHANGES] * 5,
        6,
        rows=rows,
        PARTS=parts,
        PART=_part_of(hidden_states.shape[1], hidden_states.itemsize),
        CHUNK=max(32, next_power_of_two(layout.line_tokens * layout.top_k)),
        num_warps=_WARPS,
        **EXACT,
        **overlapping(hidden_states.device),
    )
