"""Low-latency dispatch over NVLink, its sender: quantise, store where the experts' rank reads.

Some programs send metadata: of each token its experts, positions and weights, and the counts for
the receiver's experts. Others send rows: they quantise each token once and store one row a rank.
The last program of either kind to arrive sets, releasing, a signal of each peer, so a receiver
makes its index of the metadata while rows are still on the wire. A receive buffer is written again
only after the lines of combine say that every rank has read its last batch. Nothing is cleared.
Few tokens are sent by lines/dispatch_send.py instead.

Memory order: signals.py.
"""

from __future__ import annotations

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
from epcomm.kernels.nvlink.common.exchange import (
    METADATA_ARRIVALS,
    ROW_ARRIVALS,
    VARYING,
    LowLatencyExchange,
)
from epcomm.kernels.nvlink.common.lines import await_credit
from epcomm.kernels.nvlink.common.signals import int32_at, publish_as_last, taking_part
from epcomm.kernels.nvlink.common.status import FAULT_MASK
from epcomm.kernels.nvlink.ll_dispatch_header import (
    begin_dispatch,
    count_positions,
    send_header,
)
from epcomm.kernels.prepared import CHANGES, PreparedLaunch
from epcomm.kernels.quantize.fp8 import has_e4m3, quantize_blocks
from epcomm.kernels.quantize.int8 import quantize_row

# Kinds of rows on the wire.
PLAIN, FP8, FP8_POWER_OF_TWO, INT8 = 0, 1, 2, 3

# Pairs of an id and an expert that a program compares at once: sixteen a thread.
_COMPARISONS = 8192
# Ids that a program counts at once: those of 128 tokens at K = 8.
_COUNTED = 1024
# A row of 7168 elements is then 28 of them a thread.
_WARPS = 8
# Most programs that send rows, and metadata: together one on each of the SMs of an H200, where more
# of the former slow one another.
_MOST_ROW_PROGRAMS, _MOST_METADATA_PROGRAMS = 64, 64

_PLAIN = tl.constexpr(PLAIN)
_FP8_POWER_OF_TWO = tl.constexpr(FP8_POWER_OF_TWO)
_INT8 = tl.constexpr(INT8)
_METADATA_ARRIVALS = tl.constexpr(METADATA_ARRIVALS)
_ROW_ARRIVALS = tl.constexpr(ROW_ARRIVALS)


@triton.jit
def _load_token(
    x_ptr: tl.tensor,
    token: tl.tensor,
    num_tokens: tl.tensor,
    X_STRIDE: tl.constexpr,
    at: tl.tensor,
    is_element: tl.tensor,
) -> tl.tensor:
    """Load the elements `at` of a token, zeros behind the last token."""
    row_ptr = x_ptr + tl.cast(token, tl.int64) * X_STRIDE
    return tl.load(row_ptr + at, mask=both(is_element, token < num_tokens), other=0.0)


@triton.jit
def load_scales(
    scales_ptr: tl.tensor,
    token: tl.tensor,
    at: tl.tensor,
    is_scale: tl.tensor,
    scales_stride: tl.tensor,
    scale_stride: tl.tensor,
) -> tl.tensor:
    """Load the scales `at` of a token whose row was quantised before it came.

    scales_stride: elements from the scales of a token to those of the next.
    scale_stride: elements from one scale of a token to the next.
    """
    row_ptr = scales_ptr + tl.cast(token, tl.int64) * scales_stride
    return tl.load(row_ptr + at.to(tl.int64) * scale_stride, mask=is_scale, other=0)


@triton.jit
def _load_ids(
    ids_ptr: tl.tensor,
    token: tl.tensor,
    num_tokens: tl.tensor,
    k: tl.tensor,
    K: tl.constexpr,
) -> tl.tensor:
    """Load the experts of a token as int32, [K_LANES], -1 behind the last token."""
    is_entry = both(k < K, token < num_tokens)
    return tl.load(ids_ptr + token * K + k, mask=is_entry, other=-1).to(tl.int32)


@triton.jit
def _send_metadata(
    ids_ptr: tl.tensor,
    weights_ptr: tl.tensor | None,
    bases_ptr: tl.tensor,
    excluded_ptr: tl.tensor,
    rank: tl.tensor,
    token: tl.tensor,
    W: tl.constexpr,
    M: tl.constexpr,
    K: tl.constexpr,
    K_LANES: tl.constexpr,
    L: tl.constexpr,
    CHUNK: tl.constexpr,
    METADATA_AT: tl.constexpr,
    METADATA_BYTES: tl.constexpr,
) -> None:
    """Tell every rank its experts of a token, their positions in these, and weights, if any."""
    k = tl.arange(0, K_LANES)
    ids = _load_ids(ids_ptr, token, token + 1, k, K)
    weight_bits = k
    if weights_ptr is not None:
        weights = tl.load(weights_ptr + token * K + k, mask=k < K, other=0.0)
        weight_bits = weights.to(tl.int32, bitcast=True)
    positions = count_positions(ids_ptr, ids, token, K, K_LANES, CHUNK)
    owners = tl.where(ids >= 0, ids // L, -1)
    place = tl.cast(rank, tl.int64) * M + token
    for peer in tl.static_range(W):
        is_entry = both(k >= 0, tl.load(excluded_ptr + peer) == 0)
        base = tl.load(bases_ptr + peer)
        metadata_ptr = int32_at(base + METADATA_AT + place * METADATA_BYTES) + k
        tl.store(metadata_ptr, tl.where(owners == peer, ids - peer * L, -1), mask=is_entry)
        tl.store(metadata_ptr + K_LANES, positions, mask=is_entry)
        if weights_ptr is not None:
            tl.store(metadata_ptr + 2 * K_LANES, weight_bits, mask=is_entry)


@triton.jit
def note_owners(
    is_sent_ptr: tl.tensor,
    token: tl.tensor,
    owners: tl.tensor,
    excluded_ptr: tl.tensor,
    W: tl.constexpr,
    K: tl.constexpr,
    K_LANES: tl.constexpr,
) -> None:
    """Keep for combine which rank has each slot of a token: 1 + the rank, 0 for none."""
    k = tl.arange(0, K_LANES)
    is_rank = (owners >= 0) & (owners < W) & (k < K)
    is_excluded = tl.load(excluded_ptr + owners, mask=is_rank, other=1) != 0
    noted = tl.where(is_excluded, 0, owners + 1).to(tl.uint8)
    tl.store(is_sent_ptr + token * K + k, noted, mask=k < K)


@triton.jit(do_not_specialize=VARYING)
def _send_dispatch_kernel(
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
    HIDDEN: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_LANES: tl.constexpr,
    BLOCKS: tl.constexpr,
    KIND: tl.constexpr,
    PROFILE: tl.constexpr,
    HAS_E4M3: tl.constexpr,
    NEEDS_DISTINCT: tl.constexpr,
    CHUNK: tl.constexpr,
    COUNT_CHUNK: tl.constexpr,
    METADATA_PROGRAMS: tl.constexpr,
    THREADS: tl.constexpr,
    ARRIVED_METADATA_AT: tl.constexpr,
    ARRIVED_ROWS_AT: tl.constexpr,
    COMBINED_LINES_AT: tl.constexpr,
    HEADER_LINES_AT: tl.constexpr,
    COUNT_LINES_AT: tl.constexpr,
    METADATA_AT: tl.constexpr,
    DATA_AT: tl.constexpr,
    SCALES_AT: tl.constexpr,
    METADATA_BYTES: tl.constexpr,
    DATA_BYTES: tl.constexpr,
    SCALE_BYTES: tl.constexpr,
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
    # Written by the combine of the last batch of this receive buffer, on every rank, which has
    # read it.
    peers = (own_address, table_ptr, excluded_ptr, report_ptr, rank)
    combined_at = buffer_address + COMBINED_LINES_AT
    first, num_programs = program - METADATA_PROGRAMS, tl.num_programs(0) - METADATA_PROGRAMS
    if (KIND == _PLAIN) | (KIND == _INT8):
        at = tl.arange(0, COLUMNS)
        is_element = at < HIDDEN
    else:
        lane = tl.arange(0, BLOCK_LANES)[None, :]
        at = tl.arange(0, BLOCKS)[:, None] * BLOCK + lane
        is_element = (lane < BLOCK) & (at < HIDDEN)
    # On its way while the credit is awaited, and each later one while the one before is stored.
    is_loaded = both(is_element, first >= 0)
    following = _load_token(x_ptr, first, num_tokens, X_STRIDE, at, is_loaded)
    k = tl.arange(0, K_LANES)
    next_ids = _load_ids(ids_ptr, tl.maximum(first, 0), num_tokens, k, K)
    is_living = taking_part(excluded_ptr, W, W_LANES)
    if await_credit(peers, combined_at, epoch, max_polls, W, W_LANES, THREADS):
        return

    if program < METADATA_PROGRAMS:
        # A program beyond the last rank has no header to send.
        is_excluded = tl.load(excluded_ptr + program, mask=program < W, other=1)
        is_header = (program < W) & (is_excluded == 0)
        if is_header:
            send_header(
                ids_ptr,
                tl.load(bases_ptr + program),
                program,
                rank,
                epoch,
                num_tokens,
                status,
                W,
                K,
                L,
                L_LANES,
                COUNT_CHUNK,
                COUNT_LINES_AT,
                HEADER_LINES_AT,
                False,
                NEEDS_DISTINCT,
            )
        num_metadata = 0
        num_others = tl.sum(is_living.to(tl.int32)) - 1
        for token in tl.range(program, num_tokens, METADATA_PROGRAMS, num_stages=1):
            _send_metadata(
                ids_ptr,
                weights_ptr,
                bases_ptr,
                excluded_ptr,
                rank,
                token,
                W,
                M,
                K,
                K_LANES,
                L,
                CHUNK,
                METADATA_AT,
                METADATA_BYTES,
            )
            num_metadata += num_others
        # Of this rank alone, and read by its host.
        tl.atomic_add(counters_ptr + 1, tl.cast(num_metadata, tl.int64), sem="relaxed")
        num_headers = tl.where(is_header & (program != rank), 1, 0)
        tl.atomic_add(counters_ptr + 2, tl.cast(num_headers, tl.int64), sem="relaxed")
        # All others have sent neither a header nor metadata.
        num_arriving = tl.maximum(W, tl.minimum(METADATA_PROGRAMS, num_tokens))
        if program < num_arriving:
            publish_as_last(
                state_ptr + _METADATA_ARRIVALS,
                num_arriving,
                bases_ptr,
                ARRIVED_METADATA_AT + rank * 4,
                epoch,
                is_living,
                W_LANES,
            )
    else:
        num_sent = 0
        for token in tl.range(first, num_tokens, num_programs, num_stages=1):
            owners = tl.where(next_ids >= 0, next_ids // L, -1)
            next_ids = _load_ids(ids_ptr, token + num_programs, num_tokens, k, K)
            elements = following
            following = _load_token(
                x_ptr, token + num_programs, num_tokens, X_STRIDE, at, is_element
            )
            if KIND == _PLAIN:
                # Bits, whatever they mean: an interpreter need not know the dtype.
                row = elements
                scale = 0
                if x_scales_ptr is not None:
                    lane = tl.arange(0, SCALE_LANES)
                    scale = load_scales(
                        x_scales_ptr, token, lane, lane < SCALES, scales_stride, scale_stride
                    )
            elif KIND == _INT8:
                row, scale = quantize_row(elements.to(tl.float32), PROFILE)  # pyright: ignore[reportGeneralTypeIssues]
            else:
                row, scale = quantize_blocks(  # pyright: ignore[reportGeneralTypeIssues]
                    elements.to(tl.float32), KIND == _FP8_POWER_OF_TWO, HAS_E4M3
                )

            # For the receiver of combine on this rank.
            if weights_ptr is None:
                note_owners(is_sent_ptr, token, owners, excluded_ptr, W, K, K_LANES)
            # The row of this token, in the memory of any rank.
            place = tl.cast(rank, tl.int64) * M + token
            for peer in tl.static_range(W):
                # Entries of an excluded rank are as masked entries.
                is_owner = (owners == peer) & (tl.load(excluded_ptr + peer) == 0)
                is_needed = tl.max(is_owner.to(tl.int32)) > 0
                if weights_ptr is not None:
                    tl.store(is_sent_ptr + token * W + peer, is_needed.to(tl.uint8))
                base = tl.load(bases_ptr + peer)
                scale_address = base + SCALES_AT + place * SCALE_BYTES
                # By masks: in a branch for each peer, scales would change threads anew.
                if x_scales_ptr is not None:
                    scales_ptr = scale_address.to(tl.pointer_type(scale.dtype))
                    lane = tl.arange(0, SCALE_LANES)
                    is_scale = both(lane < SCALES, is_needed)
                    tl.store(tl.multiple_of(scales_ptr, 16) + lane, scale, mask=is_scale)
                elif KIND == _INT8:
                    scale_ptr = scale_address.to(tl.pointer_type(tl.float32))
                    tl.store(scale_ptr, scale, mask=is_needed)
                elif KIND != _PLAIN:
                    scales_ptr = scale_address.to(tl.pointer_type(scale.dtype))
                    block = tl.arange(0, BLOCKS)
                    is_block = both(block * BLOCK < HIDDEN, is_needed)
                    tl.store(tl.multiple_of(scales_ptr, 16) + block, scale, mask=is_block)
                if is_needed:
                    data_ptr = (base + DATA_AT + place * DATA_BYTES).to(tl.pointer_type(row.dtype))
                    tl.store(tl.multiple_of(data_ptr, 16) + at, row, mask=is_element)
                num_sent += tl.where(peer == rank, 0, is_needed.to(tl.int32))
        tl.atomic_add(counters_ptr, tl.cast(num_sent, tl.int64), sem="relaxed")
        # Of programs without a row the first alone speaks, if there are no others.
        num_arriving = tl.maximum(1, tl.minimum(num_programs, num_tokens))
        if first < num_arriving:
            publish_as_last(
                state_ptr + _ROW_ARRIVALS,
                num_arriving,
                bases_ptr,
                ARRIVED_ROWS_AT + rank * 4,
                epoch,
                is_living,
                W_LANES,
            )


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
) -> None:
    """Send tokens to the ranks of their experts.

    Args:
        exchange: the receive buffer, whose last batch was combined or released, as far as the host
            knows.
        hidden_states: [T, H], bfloat16, float16 or float32; rows may lie apart. Of rows that are
            quantised already, [T, words], integers, and `kind` is PLAIN.
        topk_ids: [T, K], int64, contiguous.
        topk_weights: [T, K], float32, contiguous; None where slots come home apart.
        is_sent: [M, W], uint8, written: whether a rank got the token. Where slots come home apart,
            [M, K]: 1 + the rank that has the slot, 0 for none.
        status: fault and flags of this rank, as pack_header() packs them.
        batch: its number, at most 2**31 - 1, which combine is given too.
        is_captured: whether a graph holds this call. A replay ends an eager batch that was not
            combined.
        kind: PLAIN, FP8, FP8_POWER_OF_TWO or INT8.
        scale_block: elements that share a scale; of PLAIN and INT8 rows any.
        profile: of INT8 rows, a value of Int8Profile.
        scales: [T, n], int32 or uint8, of any strides: of rows that are quantised already.
        needs_distinct_ids: a token that names an expert twice is a fault, in all calls or in none.

    Collective: yes.   Allocates nothing.   Host sync: none.   Graph capture: after one call.
    """
    num_tokens, hidden_size = hidden_states.shape
    row_stride = hidden_states.stride(0) if num_tokens > 1 else hidden_size
    key = ("send rows", hidden_states.dtype, hidden_size, row_stride, kind, scale_block, profile)
    strides, num_scales = (0, 0), 1
    if scales is not None:
        strides, num_scales = scales.stride(), scales.shape[1]
        key += (scales.dtype, num_scales)
    peers, layout = exchange.peers, exchange.peers.layout
    # Headers are sent by the first W of these.
    metadata_programs = max(layout.world_size, min(peers.num_programs, _MOST_METADATA_PROGRAMS))
    launch = exchange.launches.get(key)
    if launch is None:
        offsets, device = layout.offsets, hidden_states.device
        launch = exchange.launches[key] = PreparedLaunch(
            _send_dispatch_kernel,
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
                SCALE_LANES=next_power_of_two(num_scales),
                **layout.expert_constants,
                HIDDEN=hidden_size,
                COLUMNS=next_power_of_two(hidden_size),
                BLOCK=scale_block,
                BLOCK_LANES=next_power_of_two(scale_block),
                BLOCKS=next_power_of_two(-(-hidden_size // scale_block)),
                KIND=kind,
                PROFILE=profile,
                HAS_E4M3=kind in (FP8, FP8_POWER_OF_TWO) and has_e4m3(device),
                NEEDS_DISTINCT=needs_distinct_ids,
                CHUNK=max(32, _COMPARISONS // layout.metadata_words),
                COUNT_CHUNK=_COUNTED,
                METADATA_PROGRAMS=metadata_programs,
                THREADS=32 * _WARPS,
                ARRIVED_METADATA_AT=offsets["arrived_metadata"],
                ARRIVED_ROWS_AT=offsets["arrived_rows"],
                COMBINED_LINES_AT=offsets["combined_lines"],
                HEADER_LINES_AT=offsets["header_lines"],
                COUNT_LINES_AT=offsets["count_lines"],
                METADATA_AT=offsets["metadata"],
                DATA_AT=offsets["data"],
                SCALES_AT=offsets["scales"],
                METADATA_BYTES=layout.metadata_bytes,
                DATA_BYTES=layout.data_bytes,
                SCALE_BYTES=layout.scale_bytes,
                num_warps=_WARPS,
                **EXACT,
                **overlapping(device),
            ),
        )
    launch(
        metadata_programs + min(peers.num_programs, _MOST_ROW_PROGRAMS),
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
