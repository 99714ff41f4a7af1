"""Low-latency dispatch over NVLink, its sender of few tokens: rows travel in lines.

Receivers poll the lines themselves, so nothing is released: the first line may be read while the
last one is made. A row is shared by many programs, for one alone would take longer than the wire.

Memory order: common/lines.py.
"""

from __future__ import annotations

from functools import cache

import triton
import triton.language as tl
from torch import Tensor

from epcomm.kernels.launch import EXACT, next_power_of_two
from epcomm.kernels.masks import both
from epcomm.kernels.nvlink.common.dependent_launch import (
    await_previous,
    let_next_start,
    overlapping,
)
from epcomm.kernels.nvlink.common.exchange import VARYING, LowLatencyExchange
from epcomm.kernels.nvlink.common.layout import LINE_BYTES
from epcomm.kernels.nvlink.common.lines import await_credit, int64_at, line_of, words_of
from epcomm.kernels.nvlink.common.signals import taking_part
from epcomm.kernels.nvlink.ll_dispatch_header import (
    begin_dispatch,
    count_positions,
    send_header,
)
from epcomm.kernels.nvlink.ll_dispatch_send import (
    FP8,
    FP8_POWER_OF_TWO,
    INT8,
    PLAIN,
    load_scales,
    note_owners,
)
from epcomm.kernels.prepared import CHANGES, PreparedLaunch
from epcomm.kernels.quantize.fp8 import has_e4m3, quantize_blocks
from epcomm.kernels.quantize.int8 import largest_bits, quantize_part
from epcomm.protocol import FAULT_MASK

# Elements of a row that a program sends: eight a thread; a quarter of it, if they are words.
_PART = 1024
_WORD_BYTES = 4
# Blocks whose scales are whole words, whatever their type.
_LEAST_BLOCKS = 4
_WARPS = 4

_PLAIN = tl.constexpr(PLAIN)
_FP8_POWER_OF_TWO = tl.constexpr(FP8_POWER_OF_TWO)
_INT8 = tl.constexpr(INT8)
_LINE_BYTES = tl.constexpr(LINE_BYTES)


@triton.jit
def _send_metadata_lines(
    ids_ptr: tl.tensor,
    weights_ptr: tl.tensor | None,
    bases: tl.tuple,
    line: tl.tensor,
    epoch: tl.tensor,
    token: tl.tensor,
    W: tl.constexpr,
    K: tl.constexpr,
    K_LANES: tl.constexpr,
    L: tl.constexpr,
    CHUNK: tl.constexpr,
    ROW_LINES_AT: tl.constexpr,
) -> None:
    """Tell every rank which of its experts a token chose, at which positions and weights, if any.

    bases: of the receive buffers of all ranks, 0 of an excluded one.   line: the token's first.
    """
    k = tl.arange(0, K_LANES)
    ids = tl.load(ids_ptr + token * K + k, mask=k < K, other=-1).to(tl.int32)
    weight_lines = k.to(tl.int64)
    if weights_ptr is not None:
        weights = tl.load(weights_ptr + token * K + k, mask=k < K, other=0.0)
        weight_lines = line_of(weights.to(tl.int32, bitcast=True), epoch)
    position_lines = line_of(count_positions(ids_ptr, ids, token, K, K_LANES, CHUNK), epoch)
    owners = tl.where(ids >= 0, ids // L, -1)
    for peer in tl.static_range(W):
        is_entry = both(k >= 0, bases[peer] != 0)
        lines_ptr = int64_at(bases[peer] + ROW_LINES_AT) + line + k
        experts = tl.where(owners == peer, ids - peer * L, -1)
        tl.store(lines_ptr, line_of(experts, epoch), mask=is_entry)
        tl.store(lines_ptr + K_LANES, position_lines, mask=is_entry)
        if weights_ptr is not None:
            tl.store(lines_ptr + 2 * K_LANES, weight_lines, mask=is_entry)


@triton.jit(do_not_specialize=VARYING)
def _send_dispatch_lines_kernel(
    x_ptr: tl.tensor,
    x_scales_ptr: tl.tensor | None,
    ids_ptr: tl.tensor,
    weights_ptr: tl.tensor | None,
    table_ptr: tl.tensor,
    bases_ptr: tl.tensor,
    state_ptr: tl.tensor,
    is_sent_ptr: tl.tensor,
    counters_ptr: tl.tensor,
    excluded_ptr: tl.tensor,
    report_ptr: tl.tensor,
    own_address: tl.tensor,
    buffer_address: tl.tensor,
    rank: tl.tensor,
    num_tokens: tl.tensor,
    status: tl.tensor,
    batch: tl.tensor,
    is_captured: tl.tensor,
    scales_stride: tl.tensor,
    scale_stride: tl.tensor,
    max_polls: tl.tensor,
    X_STRIDE: tl.constexpr,
    SCALES: tl.constexpr,
    SCALE_LANES: tl.constexpr,
    W: tl.constexpr,
    W_LANES: tl.constexpr,
    M: tl.constexpr,
    K: tl.constexpr,
    K_LANES: tl.constexpr,
    L: tl.constexpr,
    L_LANES: tl.constexpr,
    LINE_TOKENS: tl.constexpr,
    HIDDEN: tl.constexpr,
    COLUMNS: tl.constexpr,
    PARTS: tl.constexpr,
    PART: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_LANES: tl.constexpr,
    BLOCKS: tl.constexpr,
    KIND: tl.constexpr,
    PROFILE: tl.constexpr,
    HAS_E4M3: tl.constexpr,
    NEEDS_DISTINCT: tl.constexpr,
    CHUNK: tl.constexpr,
    THREADS: tl.constexpr,
    COMBINED_LINES_AT: tl.constexpr,
    HEADER_LINES_AT: tl.constexpr,
    COUNT_LINES_AT: tl.constexpr,
    ROW_LINES_AT: tl.constexpr,
    ROW_LINES: tl.constexpr,
    DATA_LINES_AT: tl.constexpr,
    SCALE_LINES_AT: tl.constexpr,
    DATA_WORDS: tl.constexpr,
    SCALE_WORDS: tl.constexpr,
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
    epoch = begin_dispatch(
        bases_ptr,
        state_ptr,
        excluded_ptr,
        rank,
        batch,
        is_captured,
        W,
        W_LANES,
        COMBINED_LINES_AT,
    )

    item = program - W - num_tokens
    token, part = item // PARTS, item % PARTS
    is_row = item >= 0
    if (KIND == _PLAIN) | (KIND == _INT8):
        column = part * PART + tl.arange(0, PART)
        is_element = column < HIDDEN
    else:
        lane = tl.arange(0, BLOCK_LANES)[None, :]
        column = (part * BLOCKS + tl.arange(0, BLOCKS)[:, None]) * BLOCK + lane
        is_element = (lane < BLOCK) & (column < HIDDEN)
    # On their way while the credit is awaited.
    row_ptr = x_ptr + tl.cast(token, tl.int64) * X_STRIDE
    elements = tl.load(row_ptr + column, mask=both(is_element, is_row), other=0.0)
    if KIND == _INT8:
        whole = tl.arange(0, COLUMNS)
        row = tl.load(row_ptr + whole, mask=both(whole < HIDDEN, is_row), other=0.0)
        amax_bits = largest_bits(row.to(tl.float32))
    if x_scales_ptr is not None:
        scale_lane = tl.arange(0, SCALE_LANES)
        is_given = both(both(scale_lane < SCALES, is_row), part == 0)
        given = load_scales(x_scales_ptr, token, scale_lane, is_given, scales_stride, scale_stride)
    k = tl.arange(0, K_LANES)
    ids = tl.load(ids_ptr + token * K + k, mask=both(k < K, is_row), other=-1).to(tl.int32)
    bases = ()
    for peer in tl.static_range(W):  # pyright: ignore[reportGeneralTypeIssues]
        base = tl.load(bases_ptr + peer)
        bases += (tl.where(tl.load(excluded_ptr + peer) != 0, 0, base),)

    # Written by the combine of the last batch of this receive buffer, on every rank, which has
    # read it.
    peers = (own_address, table_ptr, excluded_ptr, report_ptr, rank)
    combined_at = buffer_address + COMBINED_LINES_AT
    if await_credit(peers, combined_at, epoch, max_polls, W, W_LANES, THREADS):
        return

    if program < W:
        is_header = tl.load(excluded_ptr + program) == 0
        if is_header:
            base = tl.load(bases_ptr + program)
            send_header(
                ids_ptr,
                base,
                program,
                rank,
                epoch,
                num_tokens,
                status,
                W,
                K,
                L,
                L_LANES,
                CHUNK,
                COUNT_LINES_AT,
                HEADER_LINES_AT,
                True,
                NEEDS_DISTINCT,
            )
        # Of this rank alone, and read by its host.
        num_headers = tl.where(is_header & (program != rank), 1, 0)
        tl.atomic_add(counters_ptr + 2, tl.cast(num_headers, tl.int64), sem="relaxed")
    elif is_row == 0:
        metadata_token = program - W
        _send_metadata_lines(
            ids_ptr,
            weights_ptr,
            bases,
            (rank * LINE_TOKENS + metadata_token) * ROW_LINES,
            epoch,
            metadata_token,
            W,
            K,
            K_LANES,
            L,
            CHUNK,
            ROW_LINES_AT,
        )
        num_others = tl.sum(taking_part(excluded_ptr, W, W_LANES).to(tl.int32)) - 1
        tl.atomic_add(counters_ptr + 1, tl.cast(num_others, tl.int64), sem="relaxed")
    else:
        if KIND == _PLAIN:
            # Bits, whatever they mean: an interpreter need not know the dtype.
            words = words_of(elements)
            if x_scales_ptr is not None:
                scale_words = words_of(given)
        elif KIND == _INT8:
            codes, scale = quantize_part(elements.to(tl.float32), amax_bits, PROFILE)  # pyright: ignore[reportGeneralTypeIssues]
            words = words_of(codes)
        else:
            codes, scales = quantize_blocks(  # pyright: ignore[reportGeneralTypeIssues]
                elements.to(tl.float32), KIND == _FP8_POWER_OF_TWO, HAS_E4M3
            )
            words = words_of(tl.reshape(codes, [BLOCKS * BLOCK_LANES]))
            scale_words = words_of(scales)
        place = tl.arange(0, words.shape[0])
        if (KIND == _PLAIN) | (KIND == _INT8):
            word = part * words.shape[0] + place
            is_word = word < DATA_WORDS
        else:
            # Whole words of a block, which may have lanes to spare.
            of_block = place % (BLOCK_LANES // 4)
            word = (part * BLOCKS + place // (BLOCK_LANES // 4)) * (BLOCK // 4) + of_block
            is_word = (of_block < BLOCK // 4) & (word < DATA_WORDS)
        lines = line_of(words, epoch)
        # Of the row of this token, in the memory of any rank.
        row_at = ROW_LINES_AT + (rank * LINE_TOKENS + token) * (ROW_LINES * _LINE_BYTES)
        owners = tl.where(ids >= 0, ids // L, -1)
        num_sent = 0
        # For the receiver of combine on this rank.
        if weights_ptr is None:  # noqa: SIM102 - what is not compiled must be a branch of its own
            if part == 0:
                note_owners(is_sent_ptr, token, owners, excluded_ptr, W, K, K_LANES)
        for peer in tl.static_range(W):
            # Entries of an excluded rank are as masked entries.
            is_owner = (owners == peer) & (bases[peer] != 0)
            is_needed = tl.max(is_owner.to(tl.int32))
            if part == 0:
                if weights_ptr is not None:
                    tl.store(is_sent_ptr + token * W + peer, is_needed.to(tl.uint8))
                num_sent += tl.where(peer == rank, 0, is_needed)
            if is_needed > 0:
                lines_ptr = int64_at(bases[peer] + row_at)
                tl.store(lines_ptr + DATA_LINES_AT + word, lines, mask=is_word)
                scales_ptr = lines_ptr + SCALE_LINES_AT
                if x_scales_ptr is not None:
                    scale_word = tl.arange(0, scale_words.shape[0])
                    is_scale = both(scale_word < SCALE_WORDS, part == 0)
                    scale_lines = line_of(scale_words, epoch)
                    tl.store(scales_ptr + scale_word, scale_lines, mask=is_scale)
                elif KIND == _INT8:
                    scale_line = line_of(scale.to(tl.int32, bitcast=True), epoch)
                    tl.store(scales_ptr, scale_line, mask=part == 0)
                elif KIND != _PLAIN:
                    scale_word = part * scale_words.shape[0] + tl.arange(0, scale_words.shape[0])
                    scale_lines = line_of(scale_words, epoch)
                    is_scale = scale_word < SCALE_WORDS
                    tl.store(scales_ptr + scale_word, scale_lines, mask=is_scale)
        tl.atomic_add(counters_ptr, tl.cast(num_sent, tl.int64), sem="relaxed")


@cache
def _num_parts(hidden_size: int, scale_block: int, kind: int, itemsize: int) -> int:
    """Return the programs that share a row."""
    if kind in (FP8, FP8_POWER_OF_TWO):
        return -(-hidden_size // (scale_block * _blocks_of(hidden_size, scale_block)))
    return -(-hidden_size // _part_of(hidden_size, itemsize))


def _part_of(hidden_size: int, itemsize: int) -> int:
    """Return the elements of a row that a program sends as they are, or with one scale for all."""
    # Words of a row have up to four elements.
    most = _PART if itemsize < _WORD_BYTES else _PART // _WORD_BYTES
    return max(4, min(most, next_power_of_two(hidden_size)))


def _blocks_of(hidden_size: int, scale_block: int) -> int:
    """Return the blocks of a row that a program sends, each with its scale."""
    blocks = next_power_of_two(-(-hidden_size // scale_block))
    return max(_LEAST_BLOCKS, min(_PART // next_power_of_two(scale_block), blocks))


def send_dispatch_lines(
    exchange: LowLatencyExchange,
    hidden_states: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor | None,
    is_sent: Tensor,
    *,
    status: int,
    batch: int,
    is_captured: bool,
    kind: int,
    scale_block: int,
    profile: str,
    scales: Tensor | None = None,
    needs_distinct_ids: bool = False,
) -> None:
    """Send tokens in lines, as send_dispatch() sends them in bulk; T <= layout.line_tokens.

    Arguments and contract: those of send_dispatch().
    """
    num_tokens, hidden_size = hidden_states.shape
    if status & FAULT_MASK:
        num_tokens = 0
    row_stride = hidden_states.stride(0) if num_tokens > 1 else hidden_size
    parts = _num_parts(hidden_size, scale_block, kind, hidden_states.itemsize)
    key = ("send lines", hidden_states.dtype, hidden_size, row_stride, kind, scale_block, profile)
    strides, num_scales = (0, 0), 1
    if scales is not None:
        strides, num_scales = scales.stride(), scales.shape[1]
        key += (scales.dtype, num_scales)
    peers, layout = exchange.peers, exchange.peers.layout
    launch = exchange.launches.get(key)
    if launch is None:
        offsets, device = layout.offsets, hidden_states.device
        launch = exchange.launches[key] = PreparedLaunch(
            _send_dispatch_lines_kernel,
            (
                CHANGES,
                CHANGES,
                CHANGES,
                CHANGES,
                peers.table,
                exchange.bases,
                exchange.state,
                CHANGES,
                peers.counters,
                peers.excluded,
                peers.report,
                peers.own_address,
                exchange.buffer_address,
                peers.rank,
                CHANGES,
                CHANGES,
                CHANGES,
                CHANGES,
                CHANGES,
                CHANGES,
                peers.max_polls,
            ),
            dict(
                X_STRIDE=row_stride,
                SCALES=num_scales,
                # Of scales of one byte, whole words.
                SCALE_LANES=max(_LEAST_BLOCKS, next_power_of_two(num_scales)),
                **layout.expert_constants,
                LINE_TOKENS=layout.line_tokens,
                HIDDEN=hidden_size,
                COLUMNS=next_power_of_two(hidden_size),
                PARTS=parts,
                PART=_part_of(hidden_size, hidden_states.itemsize),
                BLOCK=scale_block,
                BLOCK_LANES=next_power_of_two(scale_block),
                BLOCKS=_blocks_of(hidden_size, scale_block),
                KIND=kind,
                PROFILE=profile,
                HAS_E4M3=kind in (FP8, FP8_POWER_OF_TWO) and has_e4m3(device),
                NEEDS_DISTINCT=needs_distinct_ids,
                CHUNK=max(32, next_power_of_two(layout.line_tokens * layout.top_k)),
                THREADS=32 * _WARPS,
                COMBINED_LINES_AT=offsets["combined_lines"],
                HEADER_LINES_AT=offsets["header_lines"],
                COUNT_LINES_AT=offsets["count_lines"],
                ROW_LINES_AT=offsets["row_lines"],
                ROW_LINES=layout.row_lines,
                DATA_LINES_AT=layout.data_lines_at,
                SCALE_LINES_AT=layout.scale_lines_at,
                DATA_WORDS=layout.data_words,
                SCALE_WORDS=layout.scale_words,
                num_warps=_WARPS,
                **EXACT,
                **overlapping(device),
            ),
        )
    launch(
        layout.world_size + num_tokens * (1 + parts),
        hidden_states,
        scales,
        topk_ids,
        topk_weights,
        is_sent,
        num_tokens,
        status,
        batch,
        int(is_captured),
        *strides,
    )
