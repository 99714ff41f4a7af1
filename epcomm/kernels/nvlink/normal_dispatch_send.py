"""Dispatch of normal mode over NVLink: one copy of a token to each rank that owns its experts.

Memory order: a rank signals that it has begun a dispatch, so it no longer reads that receive
buffer. A rank that has the signals of all ranks stores rows at places of its own in their memory,
and adds 1, releasing, to a signal of each. A receiver acquires the signal once all programs have
added.

One launch: programs plan their tokens (normal_plan.py), the last one tells all ranks how many rows
and slots will come, and hears the same of them, for a host that waits for sizes; then each pushes
its rows. A row is loaded once, and the next while it is stored. In a cached dispatch nothing is
planned: rows alone travel.

Place q of source s is row s * M + q, so that nobody needs to know how many rows others send.

Where all ranks have a copy engine, dispatch_cuda does this, and the index behind it.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from epcomm.kernels.launch import next_power_of_two
from epcomm.kernels.masks import both
from epcomm.kernels.nvlink.common.epochs import (
    BUFFER_MARKS,
    DISPATCH_EPOCH,
    DISPATCH_LEFT,
    DISPATCH_LOST,
    end_epoch,
    mark_of,
)
from epcomm.kernels.nvlink.common.exchange import VARYING
from epcomm.kernels.nvlink.common.plan_parts import Sends
from epcomm.kernels.nvlink.common.signals import (
    abort_if_missing,
    await_or_abort,
    int32_at,
    publish,
    taking_part,
)
from epcomm.kernels.nvlink.common.status import (
    FAULT_IDS,
    FAULT_MASK,
    HEADER_WORDS,
    WAIT_DISPATCH_BEGIN,
    WAIT_HEADERS,
)
from epcomm.kernels.nvlink.normal_exchange import NormalExchange
from epcomm.kernels.nvlink.normal_plan import plan_tokens
from epcomm.kernels.prepared import CHANGES, PreparedLaunch

# Tokens that a program holds at once.
_TOKENS, _WARPS = 2, 16

_DISPATCH_EPOCH = tl.constexpr(DISPATCH_EPOCH)
_DISPATCH_LEFT = tl.constexpr(DISPATCH_LEFT)
_DISPATCH_LOST = tl.constexpr(DISPATCH_LOST)
_BUFFER_MARKS = tl.constexpr(BUFFER_MARKS)


@triton.jit
def _send_headers(
    table_ptr: tl.tensor,
    excluded_ptr: tl.tensor,
    status: tl.tensor,
    num_tokens: tl.tensor,
    rows: tl.tensor,
    counts: tl.tensor,
    rank: tl.tensor,
    header_at: tl.tensor,
    W: tl.constexpr,
    W_LANES: tl.constexpr,
    E: tl.constexpr,
    E_LANES: tl.constexpr,
    HEADER_BYTES: tl.constexpr,
) -> None:
    """Tell every rank what this one sends to all of them: all ranks see the same totals."""
    is_sent = (status & FAULT_MASK) == 0
    lane, expert = tl.arange(0, W_LANES), tl.arange(0, E_LANES)
    for peer in tl.static_range(W):  # pyright: ignore[reportGeneralTypeIssues]
        base = tl.load(table_ptr + peer)
        is_notified = tl.load(excluded_ptr + peer) == 0
        header_ptr = int32_at(base + header_at + rank * HEADER_BYTES)
        tl.store(header_ptr, status, mask=is_notified)
        tl.store(header_ptr + 1, num_tokens, mask=is_notified)
        is_row = both(lane < W, is_notified)
        tl.store(header_ptr + HEADER_WORDS + lane, tl.where(is_sent, rows, 0), mask=is_row)
        slots_ptr = header_ptr + HEADER_WORDS + W + expert
        tl.store(slots_ptr, tl.where(is_sent, counts, 0), mask=both(expert < E, is_notified))


@triton.jit
def _report_totals(
    totals_ptr: tl.tensor,
    excluded_ptr: tl.tensor,
    headers_address: tl.tensor,
    rank: tl.tensor,
    W: tl.constexpr,
    W_LANES: tl.constexpr,
    L: tl.constexpr,
    L_LANES: tl.constexpr,
    HEADER_BYTES: tl.constexpr,
) -> None:
    """Report to the host, which waits until no entry is negative: see push_rows()."""
    source, expert = tl.arange(0, W_LANES), tl.arange(0, L_LANES)
    is_rank, is_source = source < W, taking_part(excluded_ptr, W, W_LANES)
    header_ptr = int32_at(headers_address) + source * (HEADER_BYTES // 4)
    words = tl.load(header_ptr, mask=is_source, other=0)
    tokens = tl.load(header_ptr + 1, mask=is_source, other=0)
    rows = tl.load(header_ptr + HEADER_WORDS + rank, mask=is_source, other=0)
    slots_ptr = header_ptr[:, None] + HEADER_WORDS + W + rank * L + expert[None, :]
    is_slot = is_source[:, None] & (expert < L)[None, :]
    slots = tl.sum(tl.load(slots_ptr, mask=is_slot, other=0), 0)
    tl.store(totals_ptr + source, words, mask=is_rank)
    tl.store(totals_ptr + W + source, tokens, mask=is_rank)
    tl.store(totals_ptr + 2 * W + source, rows, mask=is_rank)
    tl.store(totals_ptr + 3 * W + expert, slots, mask=expert < L)


@triton.jit(do_not_specialize=VARYING)
def _push_kernel(
    x_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    ids_ptr: tl.tensor,
    weights_ptr: tl.tensor,
    places_ptr: tl.tensor,
    positions_ptr: tl.tensor,
    scratch_ptr: tl.tensor,
    bits_ptr: tl.tensor,
    counted_ptr: tl.tensor,
    totals_ptr: tl.tensor,
    table_ptr: tl.tensor,
    excluded_ptr: tl.tensor,
    state_ptr: tl.tensor,
    counters_ptr: tl.tensor,
    report_ptr: tl.tensor,
    own_address: tl.tensor,
    rank: tl.tensor,
    buffer_index: tl.tensor,
    num_tokens: tl.tensor,
    wanted_tokens: tl.tensor,
    status: tl.tensor,
    max_polls: tl.tensor,
    IS_PLANNED: tl.constexpr,
    X_STRIDE: tl.constexpr,
    SCALES_STRIDE: tl.constexpr,
    WORDS: tl.constexpr,
    WORD_LANES: tl.constexpr,
    SCALES: tl.constexpr,
    SCALE_LANES: tl.constexpr,
    TOKENS: tl.constexpr,
    GROUPS: tl.constexpr,
    P_LANES: tl.constexpr,
    W: tl.constexpr,
    W_LANES: tl.constexpr,
    M: tl.constexpr,
    K: tl.constexpr,
    K_LANES: tl.constexpr,
    L: tl.constexpr,
    L_LANES: tl.constexpr,
    E_LANES: tl.constexpr,
    BUFFERS_AT: tl.constexpr,
    BUFFER_BYTES: tl.constexpr,
    DISPATCH_BEGIN_AT: tl.constexpr,
    COUNTS_READY_AT: tl.constexpr,
    ROWS_READY_AT: tl.constexpr,
    HEADER_AT: tl.constexpr,
    HEADER_BYTES: tl.constexpr,
    METADATA_AT: tl.constexpr,
    METADATA_BYTES: tl.constexpr,
    DATA_AT: tl.constexpr,
    DATA_BYTES: tl.constexpr,
    SCALES_AT: tl.constexpr,
    SCALE_BYTES: tl.constexpr,
) -> None:
    """Push tokens in P runs, one in each program.

    The example of normal_plan.py on rank 1: token 1 goes to place 1 of rank 0, row M + 1, with the
    metadata 1 -1, 0 0 and the weights of its two entries.
    """
    program = tl.program_id(0)
    num_programs = tl.num_programs(0)
    epoch = tl.load(state_ptr + _DISPATCH_EPOCH) + 1
    peers = (own_address, table_ptr, excluded_ptr, report_ptr, rank)
    if program == 0:
        # All earlier work of this stream is done, so rows may come to this receive buffer.
        publish(table_ptr, DISPATCH_BEGIN_AT + rank * 4, 1, W, W_LANES, excluded_ptr)

    run = (num_tokens + num_programs - 1) // num_programs
    first = tl.minimum(program * run, num_tokens)
    end = tl.minimum(first + run, num_tokens)
    if IS_PLANNED:
        counts, rows, is_bad, num_missing = plan_tokens(  # pyright: ignore[reportGeneralTypeIssues]
            ids_ptr,
            excluded_ptr,
            scratch_ptr,
            bits_ptr,
            counted_ptr,
            places_ptr,
            positions_ptr,
            first,
            end,
            epoch,
            max_polls,
            W,
            W_LANES,
            K,
            K_LANES,
            L,
            E_LANES,
            P_LANES,
            GROUPS,
        )

    begin_at = own_address + DISPATCH_BEGIN_AT
    is_lost = await_or_abort(
        peers, begin_at, epoch, max_polls, WAIT_DISPATCH_BEGIN, epoch, W, W_LANES
    )
    if IS_PLANNED:
        # This rank itself is late: its programs do not run at the same time.
        missing = tl.where(tl.arange(0, W_LANES) == rank, num_missing, 0)
        is_lost |= abort_if_missing(missing, 0, peers, WAIT_DISPATCH_BEGIN, epoch, W, W_LANES)
    if is_lost:
        # The index of this dispatch is empty then.
        tl.atomic_xchg(state_ptr + _DISPATCH_LOST, 1, sem="relaxed", scope="gpu")
        return

    buffer_at = BUFFERS_AT + tl.cast(buffer_index, tl.int64) * BUFFER_BYTES
    if program == num_programs - 1:
        if IS_PLANNED:
            own_status = status
            if ((own_status & FAULT_MASK) == 0) & (is_bad != 0):
                own_status += FAULT_IDS
            header_at = buffer_at + HEADER_AT
            _send_headers(
                table_ptr,
                excluded_ptr,
                own_status,
                wanted_tokens,
                rows,
                counts,
                rank,
                header_at,
                W,
                W_LANES,
                W * L,
                E_LANES,
                HEADER_BYTES,
            )
            is_notified = taking_part(excluded_ptr, W, W_LANES) & (tl.arange(0, W_LANES) != rank)
            num_notified = tl.sum(is_notified.to(tl.int32))
            tl.atomic_add(counters_ptr, tl.cast(num_notified, tl.int64), sem="relaxed")
        publish(table_ptr, COUNTS_READY_AT + rank * 4, 1, W, W_LANES, excluded_ptr)
        if totals_ptr is not None:
            is_lost = await_or_abort(
                peers,
                own_address + COUNTS_READY_AT,
                epoch,
                max_polls,
                WAIT_HEADERS,
                epoch,
                W,
                W_LANES,
            )
            if is_lost == 0:
                _report_totals(
                    totals_ptr,
                    excluded_ptr,
                    own_address + buffer_at + HEADER_AT,
                    rank,
                    W,
                    W_LANES,
                    L,
                    L_LANES,
                    HEADER_BYTES,
                )

    num_sent = 0
    lane = tl.arange(0, TOKENS)
    k = tl.arange(0, K_LANES)[None, :]
    at = tl.arange(0, WORD_LANES)[None, :]
    is_word = at < WORDS
    scale_at = tl.arange(0, SCALE_LANES)[None, :]
    token = first + lane
    row_ptr = x_ptr + tl.cast(token, tl.int64)[:, None] * X_STRIDE + at
    following = tl.load(row_ptr, mask=(token < end)[:, None] & is_word, other=0)
    for start in tl.range(first, end, TOKENS, num_stages=1):
        row = following
        token = start + lane
        is_token = token < end
        following_token = token + TOKENS
        row_ptr = x_ptr + tl.cast(following_token, tl.int64)[:, None] * X_STRIDE + at
        # On its way while this one is stored.
        following = tl.load(row_ptr, mask=(following_token < end)[:, None] & is_word, other=0)
        if SCALES > 0:
            token_scales_ptr = scales_ptr + tl.cast(token, tl.int64)[:, None] * SCALES_STRIDE
            is_scale = is_token[:, None] & (scale_at < SCALES)
            scales = tl.load(token_scales_ptr + scale_at, mask=is_scale, other=0)
        if IS_PLANNED:
            entry_at = token[:, None] * K + k
            is_entry = is_token[:, None] & (k < K)
            ids = tl.load(ids_ptr + entry_at, mask=is_entry, other=-1).to(tl.int32)
            positions = tl.load(positions_ptr + entry_at, mask=is_entry, other=0)
            weights = tl.load(weights_ptr + entry_at, mask=is_entry, other=0.0)
            weight_bits = weights.to(tl.int32, bitcast=True)
        for turn in tl.static_range(W):  # pyright: ignore[reportGeneralTypeIssues]
            # Each rank begins elsewhere, so that they do not all store to the same one.
            peer = (rank + turn) % W
            place = tl.load(places_ptr + token * W + peer, mask=is_token, other=-1)
            is_sent = place >= 0
            if IS_PLANNED == 0:
                # A dispatch leaves excluded ranks out; a cached plan may be older than the
                # exclusion.
                is_sent = both(is_sent, tl.load(excluded_ptr + peer) == 0)
            num_here = tl.sum(is_sent.to(tl.int32))
            if num_here > 0:
                base = tl.load(table_ptr + peer) + buffer_at
                target = tl.cast(rank, tl.int64) * M + place
                target_ptr = (base + DATA_AT + target * DATA_BYTES).to(
                    tl.pointer_type(x_ptr.dtype.element_ty)
                )
                target_ptr = tl.multiple_of(target_ptr, 16)[:, None] + at
                tl.store(target_ptr, row, mask=is_sent[:, None] & is_word)
                if SCALES > 0:
                    target_ptr = (base + SCALES_AT + target * SCALE_BYTES).to(
                        tl.pointer_type(scales_ptr.dtype.element_ty)
                    )
                    target_ptr = tl.multiple_of(target_ptr, 16)[:, None] + scale_at
                    tl.store(target_ptr, scales, mask=is_sent[:, None] & (scale_at < SCALES))
                if IS_PLANNED:
                    metadata_ptr = (base + METADATA_AT + target * METADATA_BYTES).to(
                        tl.pointer_type(tl.int32)
                    )
                    metadata_ptr = tl.multiple_of(metadata_ptr, 16)[:, None] + k
                    is_owned = (ids >= peer * L) & (ids < (peer + 1) * L)
                    experts = tl.where(is_owned, ids - peer * L, -1)
                    tl.store(metadata_ptr, experts, mask=is_sent[:, None])
                    tl.store(metadata_ptr + K_LANES, positions, mask=is_sent[:, None])
                    tl.store(metadata_ptr + 2 * K_LANES, weight_bits, mask=is_sent[:, None])
                num_sent += tl.where(peer == rank, 0, num_here)
    # Of this rank alone, and read by its host.
    counter_ptr = counters_ptr + (1 if IS_PLANNED else 2)
    tl.atomic_add(counter_ptr, tl.cast(num_sent, tl.int64), sem="relaxed")
    publish(table_ptr, ROWS_READY_AT + rank * 4, 1, W, W_LANES, excluded_ptr)
    if program == 0:
        # Read by combine, of this dispatch and of the one before in this receive buffer.
        tl.store(state_ptr + _BUFFER_MARKS + buffer_index, mark_of(epoch))
    end_epoch(state_ptr, _DISPATCH_EPOCH, _DISPATCH_LEFT, epoch)


def push_rows(
    exchange: NormalExchange,
    data: Tensor,
    scales: Tensor | None,
    sends: Sends,
    *,
    buffer_index: int,
    topk: tuple[Tensor, Tensor] | None,
    status: int = 0,
    wanted_tokens: int = 0,
    totals: Tensor | None = None,
) -> None:
    """Send tokens to the ranks of their experts, in a dispatch or a cached dispatch.

    Args:
        exchange: the memory of all ranks.
        data: [T, words] of any dtype: what a row is, as words.
        scales: [T, num_scales], of any dtype, or None.
        sends: of the exchange plan; written if topk is given.
        buffer_index: where rows go, on every rank.
        topk: topk_ids [T, K], int64, and topk_weights [T, K], float32, contiguous; None: a cached
            dispatch, for which the rest is not needed.
        status: fault and flags of this rank, as pack_status() packs them.
        wanted_tokens: T as the caller gave it.
        totals: [3 * W + L], int32, in memory that the host reads: negative before; then fault and
            flags, T and rows from each rank, 0 if it is excluded, and slots for each expert of this
            rank.

    Collective: yes.   Allocates nothing.   Host sync: none.   Graph capture: after one call, unless
    there are totals.
    """
    num_tokens, num_words = data.shape
    row_stride = data.stride(0) if num_tokens > 1 else num_words
    scale_form = None if scales is None else (scales.dtype, scales.shape[1], scales.stride(0))
    key = ("push", data.dtype, num_words, row_stride, scale_form, topk is None, totals is None)
    launch = exchange.launches.get(key)
    if launch is None:
        launch = exchange.launches[key] = _prepared_push(
            exchange, data, scales, row_stride=row_stride, is_planned=topk is not None
        )
    ids, weights = (None, None) if topk is None else topk
    launch(
        exchange.peers.num_programs,
        data,
        scales,
        ids,
        weights,
        sends.places,
        sends.positions,
        totals,
        buffer_index,
        num_tokens,
        wanted_tokens,
        status,
    )


def _prepared_push(
    exchange: NormalExchange,
    data: Tensor,
    scales: Tensor | None,
    *,
    row_stride: int,
    is_planned: bool,
) -> PreparedLaunch:
    peers, plan = exchange.peers, exchange.plan
    layout, offsets, num_words = peers.layout, peers.layout.offsets, data.shape[1]
    return PreparedLaunch(
        _push_kernel,
        (
            CHANGES,
            CHANGES,
            CHANGES,
            CHANGES,
            CHANGES,
            CHANGES,
            plan.scratch,
            plan.bits,
            plan.counted,
            CHANGES,
            peers.table,
            peers.excluded,
            exchange.state,
            peers.counters,
            peers.report,
            peers.own_address,
            peers.rank,
            CHANGES,
            CHANGES,
            CHANGES,
            CHANGES,
            peers.max_polls,
        ),
        dict(
            IS_PLANNED=is_planned,
            X_STRIDE=row_stride,
            SCALES_STRIDE=1 if scales is None else scales.stride(0),
            WORDS=num_words,
            WORD_LANES=next_power_of_two(num_words),
            SCALES=0 if scales is None else scales.shape[1],
            SCALE_LANES=1 if scales is None else next_power_of_two(scales.shape[1]),
            TOKENS=_TOKENS,
            GROUPS=plan.num_groups,
            P_LANES=next_power_of_two(peers.num_programs) if is_planned else 1,
            **layout.expert_constants,
            E_LANES=layout.expert_lanes,
            BUFFERS_AT=layout.buffers_at,
            BUFFER_BYTES=layout.buffer_bytes,
            DISPATCH_BEGIN_AT=offsets["dispatch_begin"],
            COUNTS_READY_AT=offsets["counts_ready"],
            ROWS_READY_AT=offsets["rows_ready"],
            HEADER_AT=offsets["header"],
            HEADER_BYTES=layout.header_bytes,
            METADATA_AT=offsets["metadata"],
            METADATA_BYTES=layout.metadata_bytes,
            DATA_AT=offsets["data"],
            DATA_BYTES=layout.data_bytes,
            SCALES_AT=offsets["scales"],
            SCALE_BYTES=layout.scale_bytes,
            num_warps=_WARPS,
        ),
    )
