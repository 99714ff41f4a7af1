"""Low-latency dispatch over NVLink, its sender: quantise, store where the experts' rank reads.

Some programs send metadata in lines: of each token its experts, positions and weights, and the
counts for the receiver's experts. A receiver makes its index of them while rows are on the wire.
Others send rows: they quantise each token once and store one row a rank, and the last of them to
arrive sets, releasing, a signal of each peer. A receive buffer is written again
only after the lines of combine report that every rank has read its last batch. Nothing is cleared.
Few tokens are sent by the kernel of lines/dispatch_send.py instead.

Memory order: signals.py.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from epcomm import protocol
from epcomm.kernels.launch import EXACT, next_power_of_two
from epcomm.kernels.masks import both
from epcomm.kernels.nvlink.common import constexprs
from epcomm.kernels.nvlink.common.constexprs import ROW_ARRIVALS
from epcomm.kernels.nvlink.common.dependent_launch import (
    await_previous,
    let_next_start,
    overlapping,
)
from epcomm.kernels.nvlink.common.exchange import VARYING, LowLatencyExchange, Memory, Peers
from epcomm.kernels.nvlink.common.launches import prepare
from epcomm.kernels.nvlink.common.lines import await_credit
from epcomm.kernels.nvlink.common.signals import living_ranks, publish_as_last
from epcomm.kernels.nvlink.common.status import FAULT_MASK
from epcomm.kernels.nvlink.lines.dispatch_send import (
    lines_constants,
    num_parts,
    send_dispatch_lines_kernel,
)
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
from epcomm.kernels.prepared import CHANGES
from epcomm.kernels.quantize.fp8 import has_e4m3, quantize_blocks
from epcomm.kernels.quantize.int8 import quantize_row

# Pairs of an id and an expert that a program compares in one step: 16 for each thread.
_COMPARISONS = 8192
# A thread then has 28 elements of a row of 7168.
_WARPS = 8
# Most programs that send rows, and metadata: together one on each of the SMs of an H200, where more
# of the former slow one another.
_MOST_ROW_PROGRAMS, _MOST_METADATA_PROGRAMS = 64, 64

# Ids that a program counts in one step: those of 128 tokens at K = 8.
_COUNTED = tl.constexpr(1024)
_THREADS = tl.constexpr(32 * _WARPS)
_PLAIN = tl.constexpr(PLAIN)
_FP8_POWER_OF_TWO = tl.constexpr(FP8_POWER_OF_TWO)
_INT8 = tl.constexpr(INT8)


@triton.jit
def _load_token(
    x_ptr: tl.tensor,
    token: tl.tensor,
    num_tokens: tl.tensor,
    at: tl.tensor,
    is_element: tl.tensor,
    rows: constexprs.SentRows,
) -> tl.tensor:
    """Load the elements `at` of a token, zeros after the last token."""
    row_ptr = x_ptr + tl.cast(token, tl.int64) * rows.X_STRIDE
    return tl.load(row_ptr + at, mask=both(is_element, token < num_tokens), other=0.0)


@triton.jit
def _wire_form(
    elements: tl.tensor,
    x_scales_ptr: tl.tensor | None,
    token: tl.tensor,
    scales_stride: tl.tensor,
    scale_stride: tl.tensor,
    rows: constexprs.SentRows,
) -> tl.tuple:
    """Return a row as it is sent, and its scales, if any, their lanes, and which of them exist."""
    # Functions of Triton 3.6 cannot return None.
    scales, lane, is_scale = 0, 0, 0
    if rows.KIND == _PLAIN:
        # Rows are copied as bits, so that an interpreter need not know the dtype.
        row = elements
        if x_scales_ptr is not None:
            lane = tl.arange(0, rows.SCALE_LANES)
            is_scale = lane < rows.SCALES
            scales = load_scales(x_scales_ptr, token, lane, is_scale, scales_stride, scale_stride)
    elif rows.KIND == _INT8:
        row, scale = quantize_row(elements.to(tl.float32), rows.PROFILE)  # pyright: ignore[reportGeneralTypeIssues]
        lane = tl.arange(0, 1)
        is_scale = lane == 0
        scales = tl.zeros([1], tl.float32) + scale
    else:
        row, scales = quantize_blocks(  # pyright: ignore[reportGeneralTypeIssues]
            elements.to(tl.float32), rows.KIND == _FP8_POWER_OF_TWO, rows.HAS_E4M3
        )
        lane = tl.arange(0, rows.BLOCKS)
        is_scale = lane * rows.BLOCK < rows.HIDDEN
    return row, scales, lane, is_scale  # pyright: ignore[reportReturnType]


@triton.jit(do_not_specialize=VARYING)
def _send_dispatch_kernel(
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
    CHUNK: tl.constexpr,
    METADATA_PROGRAMS: tl.constexpr,
    OVERLAPS: tl.constexpr,
) -> None:
    """Send metadata of tokens p, p + P, ... in the first P programs, and rows alike in the rest.

    The first W programs send the headers. W = 2, L = 2, ids 0 3 | 3 -1, weights .6 .4 | 1 0, rank
    1: row M of rank 0 gets the first token with the metadata 0 -1, 0 0, .6 .4; row M of rank 1 the
    same token with -1 1, 0 0, .6 .4, and row M + 1 of rank 1 the second token with 1 -1, 1 0, 1 0.
    """
    program = tl.program_id(0)
    if OVERLAPS:
        await_previous()
        let_next_start()
    num_tokens = tl.where((status & FAULT_MASK) != 0, 0, num_tokens)
    peers = Peers(*memory, own_address, buffer_address, rank, max_polls)
    epoch = begin_dispatch(peers, batch, is_captured, c)
    first, num_programs = program - METADATA_PROGRAMS, tl.num_programs(0) - METADATA_PROGRAMS
    at, is_element = columns_of(0, rows, rows.COLUMNS, rows.COLUMNS)  # pyright: ignore[reportArgumentType, reportGeneralTypeIssues]
    # On its way while the credit is awaited, and each later one while the one before is stored.
    is_loaded = both(is_element, first >= 0)
    following = _load_token(x_ptr, first, num_tokens, at, is_loaded, rows)
    next_ids = load_ids(ids_ptr, first, (first >= 0) & (first < num_tokens), c)
    is_living = living_ranks(peers, c)
    if await_credit(peers, epoch, c, _THREADS):
        return

    if program < METADATA_PROGRAMS:
        # A program beyond the last rank has no header to send.
        is_excluded = tl.load(peers.excluded + program, mask=program < c.W, other=1)
        is_header = (program < c.W) & (is_excluded == 0)
        if is_header:
            send_header(
                *(peers, ids_ptr, program, epoch, num_tokens, status, c),
                *(_COUNTED, False, rows.NEEDS_DISTINCT),
            )
        num_metadata = 0
        num_others = tl.sum(is_living.to(tl.int32)) - 1
        for token in tl.range(program, num_tokens, METADATA_PROGRAMS, num_stages=1):
            send_metadata(peers, ids_ptr, weights_ptr, None, token, epoch, c, CHUNK, _THREADS)
            num_metadata += num_others
        # The counter belongs to this rank alone, and its host reads it.
        tl.atomic_add(peers.counters + 1, tl.cast(num_metadata, tl.int64), sem="relaxed")
        num_headers = tl.where(is_header & (program != rank), 1, 0)
        tl.atomic_add(peers.counters + 2, tl.cast(num_headers, tl.int64), sem="relaxed")
    else:
        num_sent = 0
        for token in tl.range(first, num_tokens, num_programs, num_stages=1):
            ids = next_ids
            owners = tl.where(ids >= 0, ids // c.L, -1)
            next_token = token + num_programs
            next_ids = load_ids(ids_ptr, next_token, next_token < num_tokens, c)
            elements = following
            following = _load_token(x_ptr, next_token, num_tokens, at, is_element, rows)
            row, scales, lane, is_scale = _wire_form(  # pyright: ignore[reportGeneralTypeIssues]
                elements, x_scales_ptr, token, scales_stride, scale_stride, rows
            )
            # The receiver of combine on this rank reads what is noted.
            if c.RETURNS_SLOTS | (c.GROUPS > 1):
                note_parts(peers, is_sent_ptr, token, ids, c)
            # The row of this token, in the memory of any rank.
            place = tl.cast(rank, tl.int64) * c.M + token
            for turn in tl.range(c.W, num_stages=1):
                peer = peer_in_turn(peers, token, turn, c)
                base = base_of(peers, peer)
                # Entries of an excluded rank are as masked entries.
                is_needed = tl.max(((owners == peer) & (base != 0)).to(tl.int32)) > 0
                if not (c.RETURNS_SLOTS | (c.GROUPS > 1)):
                    tl.store(is_sent_ptr + token * c.W + peer, is_needed.to(tl.uint8))
                # By masks: in a branch for each peer, scales would change threads each time.
                if (rows.KIND != _PLAIN) | (x_scales_ptr is not None):
                    scales_ptr = base + c.SCALES_AT + place * c.SCALE_BYTES
                    scales_ptr = scales_ptr.to(tl.pointer_type(scales.dtype))
                    scales_ptr = tl.multiple_of(scales_ptr, 16) + lane
                    tl.store(scales_ptr, scales, mask=both(is_scale, is_needed))
                if is_needed:
                    data_ptr = base + c.DATA_AT + place * c.DATA_BYTES
                    data_ptr = data_ptr.to(tl.pointer_type(row.dtype))
                    tl.store(tl.multiple_of(data_ptr, 16) + at, row, mask=is_element)
                num_sent += tl.where(peer == rank, 0, is_needed.to(tl.int32))
        tl.atomic_add(peers.counters, tl.cast(num_sent, tl.int64), sem="relaxed")
        # If no program has a row, the first one sends the signal.
        num_arriving = tl.maximum(1, tl.minimum(num_programs, num_tokens))
        if first < num_arriving:
            signal_at = c.ARRIVED_ROWS_AT + 4 * rank
            publish_as_last(peers, ROW_ARRIVALS, num_arriving, signal_at, epoch, is_living, c)


def _metadata_programs(exchange: LowLatencyExchange) -> int:
    """Return the programs that send metadata, the first W of which send headers."""
    peers = exchange.peers
    return max(peers.layout.world_size, min(peers.num_programs, _MOST_METADATA_PROGRAMS))


def send_dispatch(
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
    in_lines: bool = False,
) -> None:
    """Send tokens to the ranks of their experts.

    Args:
        exchange: the receive buffer, whose last batch was combined or released, as far as the host
            knows.
        hidden_states: [T, H], bfloat16, float16 or float32; rows may have gaps. Of rows that are
            quantised already, [T, words], integers, and `kind` is PLAIN.
        topk_ids: [T, K], int64, contiguous.
        topk_weights: [T, K], float32, contiguous; None if each slot returns.
        is_sent: [M, W * groups], uint8, written: whether the token has entries in the group. If
            slots return, [M, K]: 1 + the rank that has the slot, 0 for none.
        status: fault and flags of this rank, as pack_header() packs them.
        batch: its number, at most 2**31 - 1, which combine is given too.
        is_captured: whether a graph holds this call. A replay ends an eager batch that was not
            combined.
        kind: PLAIN, FP8, FP8_POWER_OF_TWO or INT8.
        scale_block: elements that share a scale; of PLAIN and INT8 rows any.
        profile: of INT8 rows, a value of Int8Profile.
        scales: [T, n], int32 or uint8, of any strides: of rows that are quantised already.
        needs_distinct_ids: a token that names an expert twice is a fault, in all calls or in none.
        in_lines: send in lines, not in bulk; T is at most layout.line_tokens then.

    Collective: yes.   Allocates nothing.   Host sync: none.   Graph capture: after one call.
    """
    num_tokens, hidden_size = hidden_states.shape
    if in_lines and status & protocol.FAULT_MASK:
        num_tokens = 0
    row_stride = hidden_states.stride(0) if num_tokens > 1 else hidden_size
    key = (in_lines, hidden_states.dtype, hidden_size, row_stride, kind, scale_block, profile)
    strides, num_scales = (0, 0), 1
    if scales is not None:
        strides, num_scales = scales.stride(), scales.shape[1]
        key += (scales.dtype, num_scales)
    layout = exchange.peers.layout
    if in_lines:
        num_programs = layout.world_size + num_tokens * (1 + num_parts(layout))
    else:
        num_programs = _metadata_programs(exchange)
        num_programs += min(exchange.peers.num_programs, _MOST_ROW_PROGRAMS)
    launch = exchange.launches.get(key)
    if launch is None:
        device = hidden_states.device
        rows = constexprs.constants(
            constexprs.SentRows,
            X_STRIDE=row_stride,
            HIDDEN=hidden_size,
            COLUMNS=next_power_of_two(hidden_size),
            KIND=kind,
            PROFILE=profile,
            HAS_E4M3=kind in (FP8, FP8_POWER_OF_TWO) and has_e4m3(device),
            BLOCK=scale_block,
            BLOCK_LANES=next_power_of_two(scale_block),
            BLOCKS=4 * layout.data_plane // scale_block
            if in_lines
            else next_power_of_two(-(-hidden_size // scale_block)),
            SCALES=num_scales,
            SCALE_LANES=next_power_of_two(num_scales),
            NEEDS_DISTINCT=needs_distinct_ids,
        )
        if in_lines:
            kernel: object = send_dispatch_lines_kernel
            constants = lines_constants(layout, hidden_states.itemsize, kind, scale_block)
        else:
            kernel = _send_dispatch_kernel
            constants = {
                "CHUNK": max(32, _COMPARISONS // layout.metadata_words),
                "METADATA_PROGRAMS": _metadata_programs(exchange),
                "num_warps": _WARPS,
            }
        launch = exchange.launches[key] = prepare(
            *(exchange, kernel, [CHANGES] * 5, 6),
            rows=rows,
            **constants,
            **EXACT,
            **overlapping(device),
        )
    tensors = (hidden_states, scales, topk_ids, topk_weights, is_sent)
    launch(num_programs, *tensors, num_tokens, status, batch, int(is_captured), *strides)
