"""Low-latency combine over NVLink, its sender: sums, or slots apart, to the tokens' ranks.

Senders reduce the slots of a row in each group of experts, in k order, in float32,
cast once, and store the sum in the memory of the token's rank. By default all
experts of a rank are one group.

If router weights come with combine (layout.returns_slots), the experts' rank does not know them: it
sends each slot as it is, and the receiver multiplies and adds. Slot k of token t is stored at
t * K + k of the memory of the token's rank, whichever rank sends it. This takes more bytes than
sums where a token has several experts on one rank.

Results of few tokens are sent in lines, in parts of a row, and lines/combine_recv.py receives them.
Every rank sends every rank a line that reports whether it refuses, and that is the credit of
dispatch.

Results in bulk are signalled in chunks of tokens, each by programs of its own, so that receivers
add up the first chunks while the last ones are on the wire.

Memory order: as in dispatch. Results are stored in the receive buffer of their dispatch, whose
sources have read the previous results there, because they sent the rows of these results after it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from epcomm.kernels.launch import EXACT, next_power_of_two
from epcomm.kernels.masks import both
from epcomm.kernels.nvlink.common import constexprs, sum_codes
from epcomm.kernels.nvlink.common.constexprs import (
    HELD_BATCH,
    LINE_BYTES,
    LINE_WORDS,
    PART_LINES,
    SOURCES_AT,
    SUM_ARRIVALS,
)
from epcomm.kernels.nvlink.common.dependent_launch import (
    await_previous,
    let_next_start,
    overlapping,
)
from epcomm.kernels.nvlink.common.exchange import VARYING, LowLatencyExchange, Memory, Peers
from epcomm.kernels.nvlink.common.launches import prepare
from epcomm.kernels.nvlink.common.lines import (
    abort_if_late,
    await_all,
    bits_of_ranks,
    in_lanes,
    int64_at,
    line_of,
    next_epoch,
    send_to_all,
    store_lines,
    words_of,
)
from epcomm.kernels.nvlink.common.signals import int32_at, living_ranks, publish_as_last
from epcomm.kernels.nvlink.common.status import REPORT_ABORTED, WAIT_COMBINE
from epcomm.kernels.prepared import CHANGES
from epcomm.kernels.rounding import cast

# A whole row of 7168 elements, 32 for each thread: an item takes about 2 us whatever its size, and
# two programs fit on an SM.
_WARPS, _SENT_COLUMNS = 8, 8192
# Slots of a row that a program adds at once, 1 of whole rows. With 4, a program fills the registers
# of an SM.
_SLOTS = 2
# Tokens of a rank for which one grid of senders suffices, and the most grids: several programs of
# an SM have more loads under way than one that goes through more rows.
_TOKENS_OF_GRID, _MOST_GRIDS = 8, 2
# Parts of a sum in lines that a program sends at once. Programs send a piece each, as far as that
# goes, because a piece takes 1.6 us whatever its size.
_LINE_PARTS = 32 * _WARPS // PART_LINES.value


class _Sent(NamedTuple):
    """Pointers to the results that a sender reads, to slot weights or None, and to the index."""

    rows: Any
    weights: Any
    slots_of_row: Any
    first_slot: Any


@triton.jit
def _sums_of_slots(
    sent: _Sent,
    slots: tl.tensor,
    is_slot: tl.tensor,
    row: tl.tensor,
    columns: tl.tuple,
    are_elements: tl.tuple,
    c: constexprs.Layout,
    results: constexprs.Results,
) -> tl.tuple:
    """Return some blocks of columns of the sum of a row's slots, in the dtype of the rows.

    With the slots 5 -1 2, which hold 10 and 2, and weights .5 and 2: 5 + 4.

    slots, is_slot: [K_LANES].   columns, are_elements: of each block, and which of them exist.
    """
    totals = ()
    for each in tl.static_range(len(columns)):  # pyright: ignore[reportGeneralTypeIssues]
        total = tl.zeros(columns[each].shape, tl.float32)
        if results.PER_ROW:
            row_ptr = sent.rows + tl.cast(row, tl.int64) * results.ROWS_STRIDE
            elements = tl.load(row_ptr + columns[each], mask=are_elements[each], other=0.0)
            total += elements.to(tl.float32)
        totals += (total,)
    if not results.PER_ROW:
        # With many ranks most of the K slots are none: only some are looked up and added at once.
        k = tl.arange(0, c.K_LANES)
        bits = tl.sum(is_slot.to(tl.int32) << k)
        num_slots = tl.sum(is_slot.to(tl.int32))
        for _ in tl.range(0, num_slots, results.SLOTS, num_stages=1):
            parts, weights = (), ()
            for _each in tl.static_range(results.SLOTS):  # pyright: ignore[reportGeneralTypeIssues]
                slot = tl.sum(tl.where((bits & -bits) == (1 << k), slots, 0))
                has_slot = bits != 0
                bits &= bits - 1
                row_ptr = sent.rows + tl.cast(slot, tl.int64) * results.ROWS_STRIDE
                blocks = ()
                for each in tl.static_range(len(columns)):
                    is_element = both(are_elements[each], has_slot)
                    blocks += (tl.load(row_ptr + columns[each], mask=is_element, other=0.0),)
                parts += (blocks,)
                if sent.weights is not None:
                    weights += (tl.load(sent.weights + slot, mask=has_slot, other=0.0),)
            for of_slot in tl.static_range(results.SLOTS):
                sums = ()
                for each in tl.static_range(len(columns)):
                    part = parts[of_slot][each].to(tl.float32)
                    if sent.weights is not None:
                        part *= weights[of_slot]
                    sums += (totals[each] + part,)
                totals = sums
    rounded = ()
    for each in tl.static_range(len(columns)):  # pyright: ignore[reportGeneralTypeIssues]
        rounded += (cast(totals[each], sent.rows.dtype.element_ty),)
    return rounded  # pyright: ignore[reportReturnType]


@triton.jit
def _is_in_group(
    sent: _Sent, slots: tl.tensor, group: tl.tensor, c: constexprs.Layout
) -> tl.tensor:
    """Return whether slots are slots of a group of consecutive experts of this rank."""
    is_slot = slots >= 0
    if c.GROUPS > 1:
        # The slots of an expert follow those of the expert before.
        first_slot_ptr = sent.first_slot + group * (c.L // c.GROUPS)
        is_slot = slots >= tl.load(first_slot_ptr)
        is_slot &= slots < tl.load(first_slot_ptr + c.L // c.GROUPS)
    return is_slot


@triton.jit
def _slot_of_row(
    sent: _Sent,
    row: tl.tensor,
    k: tl.constexpr,
    columns: tl.tuple,
    are_elements: tl.tuple,
    c: constexprs.Layout,
    results: constexprs.Results,
) -> tl.tuple:
    """Return some blocks of columns of the result of slot k of a row, zeros without that slot."""
    slot = tl.load(sent.slots_of_row + row * c.K + k)
    row_ptr = sent.rows + tl.cast(slot, tl.int64) * results.ROWS_STRIDE
    blocks = ()
    for each in tl.static_range(len(columns)):  # pyright: ignore[reportGeneralTypeIssues]
        is_element = both(are_elements[each], slot >= 0)
        blocks += (tl.load(row_ptr + columns[each], mask=is_element, other=0.0),)
    return blocks  # pyright: ignore[reportReturnType]


@triton.jit
def _slots_of(
    sent: _Sent, item: tl.tensor, num_items: tl.tensor, c: constexprs.Layout
) -> tl.tensor:
    """Load the slots of token item // W of source item % W, -1 for none and after num_items."""
    k = tl.arange(0, c.K_LANES)
    row = item % c.W * c.M + item // c.W
    is_slot = both(k < c.K, item < num_items)
    return tl.load(sent.slots_of_row + row * c.K + k, mask=is_slot, other=-1)


@triton.jit
def _begin_combine(
    peers: Peers, batch: tl.tensor, status: tl.tensor, c: constexprs.Layout
) -> tl.tuple:
    """Send every rank, in the first W programs, a credit, or why this rank refuses.

    Returns: the epoch; whether nothing may be sent, because some rank has timed out, or the receive
        buffer holds another batch; the most tokens of a source that arrived in bulk, and in lines;
        the sources of the latter as bits; the tokens of each source in bulk.
    """
    program = tl.program_id(0)
    # All these loads are in flight together.
    epoch = tl.load(peers.state + 1)
    aborted = tl.load(int32_at(peers.own_address), volatile=True)
    has_no_rows = tl.load(peers.state + 2)
    is_overwritten = tl.load(peers.state + HELD_BATCH) != batch
    # Kept by the receiver of dispatch, not from the headers: once some programs have published, a
    # peer may write those of its next batch, and a program that starts late must count as many
    # arrivals as the others.
    source_lane = tl.arange(0, c.W_LANES)
    told = tl.load(peers.state + SOURCES_AT + source_lane, mask=source_lane < c.W, other=0)
    is_source = living_ranks(peers, c)
    # The epoch is then that of a replay on every rank: no rank sends, and no rank waits.
    if (program == 0) & (is_overwritten == 0):
        tl.store(peers.state, next_epoch(epoch))
    # If only this rank has no rows, all ranks learn the reason.
    code = tl.where((status == 0) & (has_no_rows > 1), has_no_rows, status)
    if aborted != 0:
        tl.store(peers.report + REPORT_ABORTED, aborted)
    elif (
        (program < c.W)
        & (is_overwritten == 0)
        & (tl.load(peers.excluded + program, mask=program < c.W, other=1) == 0)
    ):
        combined_ptr = int64_at(tl.load(peers.bases + program) + c.COMBINED_LINES_AT)
        # The credit, too: all that read this batch has ended, but for this kernel, which reads what
        # this rank unpacked itself, or what is awaited by the signal of its sums.
        tl.store(combined_ptr + peers.rank, line_of(code, epoch))
    in_bulk = is_source & ((told & 1) == 0)
    # A call that was refused has no rows; neither has this rank if it refuses now.
    is_empty = (has_no_rows != 0) | (status != 0)
    bulk_tokens = tl.where(in_bulk, told >> 1, 0)
    most = tl.where(is_empty, 0, tl.max(bulk_tokens))
    few = tl.where(is_empty, 0, tl.max(tl.where(in_bulk, 0, told >> 1)))
    sources_in_lines = bits_of_ranks((told & 1) != 0, c.W_LANES)
    is_idle = is_overwritten | (aborted != 0)
    return epoch, is_idle, most, few, sources_in_lines, bulk_tokens  # pyright: ignore[reportReturnType]


@triton.jit(do_not_specialize=VARYING)
def _begin_again_kernel(
    memory: Memory,
    own_address: tl.tensor,
    buffer_address: tl.tensor,
    rank: tl.tensor,
    max_polls: tl.tensor,
    batch: tl.tensor,
    c: constexprs.Layout,
) -> None:
    """Begin an epoch without a dispatch: batch 5 is combined again as 6, once all have its sums.

    Nothing is begun if a replay has taken the receive buffer.
    """
    peers = Peers(*memory, own_address, buffer_address, rank, max_polls)
    if tl.load(peers.state + HELD_BATCH) != batch:
        return
    epoch = tl.load(peers.state)
    tl.store(peers.state + 1, epoch)
    # A header as a dispatch sends it: it tells peers that this rank no longer reads their sums,
    # because the kernel that read them has ended. No rank can be an epoch ahead.
    send_to_all(peers, c.HEADER_LINES_AT, 2, epoch, c)  # pyright: ignore[reportArgumentType]
    late = await_all(peers, c.HEADER_LINES_AT, 2, epoch, c, 32)  # pyright: ignore[reportArgumentType]
    abort_if_late(peers, late, WAIT_COMBINE, epoch, c)


@triton.jit
def row_at(
    address: tl.tensor, place: tl.tensor, dtype: tl.constexpr, c: constexprs.Layout
) -> tl.tensor:
    """Return a pointer to a returned row."""
    return tl.multiple_of((address + place * c.RETURN_BYTES).to(tl.pointer_type(dtype)), 16)  # pyright: ignore[reportArgumentType]


@triton.jit
def _store_result(
    to: tl.tensor,
    place: tl.tensor,
    blocks: tl.tuple,
    piece: tl.tensor,
    at: tl.tensor,
    is_there: tl.tensor,
    has_slot: tl.tensor,
    epoch: tl.tensor,
    c: constexprs.Layout,
    results: constexprs.Results,
    IN_LINES: tl.constexpr,
) -> None:
    """Store blocks of a result, a piece, in lines or columns `at` of row `place` of a rank."""
    is_stored = both(is_there, has_slot)
    row_scale = sum_codes.scale_of_row(blocks, c) if c.SUM_ROW_SCALE else None
    if IN_LINES:
        to += place * (c.SUM_LINES * LINE_BYTES)  # pyright: ignore[reportOperatorIssue]
        words, scale_words = (), ()
        for plane in tl.static_range(LINE_WORDS):  # pyright: ignore[reportArgumentType, reportGeneralTypeIssues]
            if c.SUM_BLOCK > 0:
                codes, scales = sum_codes.quantize_sums(blocks[plane], row_scale, c)
                words += (words_of(tl.ravel(codes)),)
                scale_words += (in_lanes(words_of(scales), at.shape[0]),)
            else:
                words += (words_of(tl.ravel(blocks[plane])),)
        store_lines(to, at, words, epoch, is_stored)  # pyright: ignore[reportArgumentType]
        if c.SUM_BLOCK > 0:
            is_scale = is_stored & (at % c.SCALED_WORDS == 0)
            scale_line = c.SUM_SCALE_LINES + at // c.SCALED_WORDS
            store_lines(to, scale_line, scale_words, epoch, is_scale)
        if row_scale is not None:
            bits = tl.zeros_like(at) + row_scale.to(tl.int32, bitcast=True)
            # One lane stores the last line of the sum.
            last = at + (c.SUM_LINES - 1)
            store_lines(to, last, (bits, bits, bits), epoch, is_stored & (at == 0))  # pyright: ignore[reportArgumentType]
    elif c.SUM_BLOCK > 0:
        codes, scales = sum_codes.quantize_sums(blocks[0], row_scale, c)
        row_ptr = row_at(to, place, tl.uint8, c)
        block = sum_codes.blocks_of_sum(piece, results.COLUMNS, c)
        if row_scale is not None:
            # Two codes in a byte.
            at = block[:, None] * (c.SUM_BLOCK // 2) + tl.arange(0, c.SUM_BLOCK // 2)[None, :]
            is_stored = both(at < results.HIDDEN // 2, has_slot)
            tl.store(row_at(to, place, tl.float32, c) + c.RETURN_WORDS, row_scale, mask=has_slot)
        tl.store(row_ptr + at, codes, mask=is_stored)
        is_block = both(block * c.SUM_BLOCK < results.HIDDEN, has_slot)
        tl.store(sum_codes.scales_of_sum(row_ptr, c) + block, scales, mask=is_block)
    else:
        tl.store(row_at(to, place, blocks[0].dtype, c) + at, blocks[0], mask=is_stored)  # pyright: ignore[reportArgumentType]


@triton.jit
def _send_pieces(
    peers: Peers,
    sent: _Sent,
    following: tl.tensor,
    first: tl.tensor,
    end: tl.tensor,
    step: tl.tensor,
    sources_in_lines: tl.tensor,
    epoch: tl.tensor,
    c: constexprs.Layout,
    results: constexprs.Results,
    IN_LINES: tl.constexpr,
) -> tl.tensor:
    """Send each step-th piece of rows, from `first` on, of tokens before `end`.

    Pieces are counted over pieces, sources, tokens. In lines, they have LINE_PARTS parts.

    following: the slots of the first piece.
    IN_LINES: rows of sources whose tokens came in lines, in lines; else those of the others.
    Returns: the results sent to other ranks.
    """
    PIECES: tl.constexpr = results.LINE_PIECES if IN_LINES else results.PIECES
    dtype: tl.constexpr = sent.rows.dtype.element_ty
    EACH: tl.constexpr = c.SUM_COLUMNS if c.SUM_BLOCK > 0 else 32 // dtype.primitive_bitwidth  # pyright: ignore[reportAssignmentType, reportAttributeAccessIssue]
    num_sent = 0
    for item in tl.range(first, end * (c.W * PIECES), step, num_stages=1):  # pyright: ignore[reportGeneralTypeIssues]
        row_item = item // PIECES
        source, token = row_item % c.W, row_item // c.W
        slots = following
        following = _slots_of(sent, (item + step) // PIECES, end * c.W, c)
        came_in_lines = (sources_in_lines >> source) & 1
        if (tl.max(slots) >= 0) & (came_in_lines != 0 if IN_LINES else came_in_lines == 0):
            columns, are_elements = (), ()
            if IN_LINES:
                # A part is a row of these blocks, in which one line or element follows the other.
                part = item % PIECES * results.LINE_PARTS
                part += tl.arange(0, results.LINE_PARTS)[:, None]  # pyright: ignore[reportGeneralTypeIssues]
                line_lane, lane = tl.arange(0, PART_LINES), tl.arange(0, PART_LINES * EACH)
                at = part * c.RETURN_PLANE + line_lane[None, :]
                is_there = (line_lane[None, :] < c.RETURN_PLANE) & (at < c.SUM_SCALE_LINES)
                at = tl.reshape(at, [results.LINE_PARTS * PART_LINES])
                is_there = tl.reshape(is_there, [results.LINE_PARTS * PART_LINES])
                for plane in tl.static_range(LINE_WORDS):  # pyright: ignore[reportArgumentType]
                    column = (part * LINE_WORDS + plane) * (c.RETURN_PLANE * EACH) + lane[None, :]
                    columns += (column,)
                    is_element = (lane[None, :] < c.RETURN_PLANE * EACH) & (column < results.HIDDEN)
                    are_elements += (is_element,)
            else:
                at = sum_codes.columns_of_sum(item % PIECES, results.COLUMNS, c)
                is_there = at < results.HIDDEN
                columns, are_elements = (at,), (is_there,)
            row = source * c.M + token
            to = tl.load(peers.bases + source) + (c.SUM_LINES_AT if IN_LINES else c.RETURNED_AT)
            num_parts = 0
            if c.RETURNS_SLOTS:
                # Loads of all slots are under way together.
                parts = ()
                for k in tl.static_range(c.K):  # pyright: ignore[reportGeneralTypeIssues]
                    parts += (_slot_of_row(sent, row, k, columns, are_elements, c, results),)
                for k in tl.static_range(c.K):
                    has_slot = tl.load(sent.slots_of_row + row * c.K + k) >= 0
                    place = (token if IN_LINES else tl.cast(token, tl.int64)) * c.K + k
                    _store_result(
                        *(to, place, parts[k], item % PIECES, at, is_there, has_slot, epoch),
                        *(c, results, IN_LINES),
                    )
                    num_parts += has_slot.to(tl.int32)
            else:
                for group in tl.range(0, c.GROUPS, num_stages=1):
                    is_slot = _is_in_group(sent, slots, group, c)
                    has_slot = tl.max(is_slot.to(tl.int32)) > 0
                    sums = _sums_of_slots(
                        sent, slots, is_slot, row, columns, are_elements, c, results
                    )
                    place = peers.rank * c.GROUPS + group
                    if IN_LINES:
                        place = place * c.LINE_TOKENS + token
                    else:
                        place = tl.cast(place, tl.int64) * c.M + token
                    _store_result(
                        *(to, place, sums, item % PIECES, at, is_there, has_slot, epoch),
                        *(c, results, IN_LINES),
                    )
                    num_parts += has_slot.to(tl.int32)
            is_counted = (source != peers.rank) & (item % PIECES == 0)
            num_sent += tl.where(is_counted, num_parts, 0)
    return num_sent  # pyright: ignore[reportReturnType]


@triton.jit(do_not_specialize=VARYING)
def _send_combine_kernel(
    rows_ptr: tl.tensor,
    weights_ptr: tl.tensor | None,
    slots_of_row_ptr: tl.tensor,
    first_slot_ptr: tl.tensor,
    memory: Memory,
    own_address: tl.tensor,
    buffer_address: tl.tensor,
    rank: tl.tensor,
    max_polls: tl.tensor,
    batch: tl.tensor,
    status: tl.tensor,
    c: constexprs.Layout,
    results: constexprs.Results,
    OVERLAPS: tl.constexpr,
) -> None:
    """Send rows of sources whose tokens came in lines, then a chunk of those that came in bulk.

    Row 3 has the slots 5 -1 2, which hold 10 and 1 (slot 5) and 2 and 3 (slot 2), with weights .5
    and 2: its sum is 5 + 4 and .5 + 6, at rank * M + 3 - M of rank 1 if M is 2 or 3. If slots
    return, rows 5 and 2 are sent to 3 * t and 3 * t + 2 of the source, where it is token t.

    WORKERS programs send a chunk, at most one for each piece: with 128, the first 128 of 256
    programs send chunks 0 and 2, the others 1 and 3.
    """
    program = tl.program_id(0)
    peers = Peers(*memory, own_address, buffer_address, rank, max_polls)
    num_programs = tl.num_programs(0)
    if OVERLAPS:
        await_previous()
        let_next_start()
    sent = _Sent(rows_ptr, weights_ptr, slots_of_row_ptr, first_slot_ptr)
    if c.LINE_TOKENS > 0:
        slots = _slots_of(sent, program // results.LINE_PIECES, c.LINE_TOKENS * c.W, c)
    epoch, is_idle, most, few, sources_in_lines, bulk_tokens = _begin_combine(  # pyright: ignore[reportGeneralTypeIssues]
        peers, batch, status, c
    )
    if is_idle:
        return

    num_sent = 0
    if c.LINE_TOKENS > 0:
        num_sent += _send_pieces(
            *(peers, sent, slots, program, few, num_programs, sources_in_lines, epoch),
            *(c, results, True),
        )
    num_chunks = (most + c.CHUNK_TOKENS - 1) // c.CHUNK_TOKENS
    num_workers = tl.minimum(num_programs, results.WORKERS)
    worker = program % num_workers
    at_once = num_programs // num_workers
    # Programs that do not make up all workers of a chunk send nothing.
    first = tl.where(program < at_once * num_workers, program // num_workers, num_chunks)
    for chunk in tl.range(first, num_chunks, at_once, num_stages=1):
        begin = chunk * c.CHUNK_TOKENS
        end = tl.minimum(begin + c.CHUNK_TOKENS, most)
        piece = begin * (c.W * results.PIECES) + worker
        slots = _slots_of(sent, piece // results.PIECES, end * c.W, c)
        num_sent += _send_pieces(
            *(peers, sent, slots, piece, end, num_workers, sources_in_lines, epoch),
            *(c, results, False),
        )
        num_arriving = tl.minimum(num_workers, (end - begin) * (c.W * results.PIECES))
        if worker < num_arriving:
            signal_at = c.ARRIVED_SUMS_AT + (rank * c.NUM_CHUNKS + chunk) * 4
            # Sources that poll lines await no signal.
            publish_as_last(
                peers, SUM_ARRIVALS + chunk, num_arriving, signal_at, epoch, bulk_tokens > begin, c
            )
    # The host of this rank reads this counter.
    tl.atomic_add(peers.counters + 3, tl.cast(num_sent, tl.int64), sem="relaxed")


def begin_again(exchange: LowLatencyExchange, batch: int) -> None:
    """Wait until all ranks have received the sums of a combine, whose batch is combined again.

    Collective: yes, between receive_combine() and another send_combine() of the same batch.
    Allocates nothing.   Host sync: none.
    """
    launch = exchange.launches.get("begin again")
    if launch is None:
        launch = prepare(exchange, _begin_again_kernel, [], 1, num_warps=1)
        exchange.launches["begin again"] = launch
    launch(1, batch)


def send_combine(
    exchange: LowLatencyExchange,
    rows: Tensor,
    slot_weights: Tensor | None,
    slots_of_row: Tensor,
    first_slot: Tensor,
    *,
    num_tokens: int,
    per_row: bool,
    batch: int,
    status: int,
) -> None:
    """Send the sums of the slots of each received row, or each slot, to the rank of its token.

    Args:
        exchange: the receive buffer of the dispatch.
        rows: [C, H], or [W * M, H] with per_row, in the dtype of the sums; rows may be apart.
        slot_weights: [C], float32, multiplied into slots, or None, also if slots return.
        slots_of_row: [W * M, K], int32, as receive_dispatch() wrote it.   first_slot: [L + 1],
            int32, likewise.
        num_tokens: T of this rank's dispatch; other ranks are expected to have about as many.
        per_row: rows are sums already, of one group for each rank, or this rank refuses.
        batch: as passed to send_dispatch().
        status: why this rank refuses the call, a FaultCode, or 0.

    Collective: yes.   Allocates nothing.   Host sync: none.   Graph capture: after one call.
    """
    hidden_size, row_stride = rows.shape[1], rows.stride(0)
    layout = exchange.peers.layout
    key = ("send sums", rows.dtype, hidden_size, row_stride, slot_weights is None, per_row)
    launch = exchange.launches.get(key)
    if launch is None:
        columns = max(4, layout.sum_block, next_power_of_two(hidden_size))
        line_parts, num_warps = _LINE_PARTS, _WARPS
        if layout.sum_row_scale:
            # The scale of the row is needed for the first code.
            line_parts = max(line_parts, next_power_of_two(layout.sum_parts))
            num_warps = max(num_warps, _WARPS * columns // _SENT_COLUMNS)
        else:
            columns = min(columns, _SENT_COLUMNS)
        launch = exchange.launches[key] = prepare(
            *(exchange, _send_combine_kernel, [CHANGES] * 4, 2),
            results=constexprs.constants(
                constexprs.Results,
                ROWS_STRIDE=row_stride,
                HIDDEN=hidden_size,
                COLUMNS=columns,
                PIECES=-(-hidden_size // columns),
                SLOTS=1 if layout.sum_row_scale else _SLOTS,
                WORKERS=min(
                    exchange.peers.num_programs,
                    layout.chunk_tokens * layout.world_size * -(-hidden_size // columns),
                ),
                LINE_PARTS=line_parts,
                LINE_PIECES=-(-layout.sum_parts // line_parts),
                PER_ROW=per_row,
            ),
            num_warps=num_warps,
            **EXACT,
            **overlapping(rows.device),
        )
    num_programs = _num_programs(exchange, num_tokens or layout.max_tokens)
    launch(num_programs, rows, slot_weights, slots_of_row, first_slot, batch, status)


def _num_programs(exchange: LowLatencyExchange, num_tokens: int) -> int:
    """Return how many programs send about num_tokens tokens of each rank: a multiple of P."""
    layout, each = exchange.peers.layout, exchange.peers.num_programs
    grids = -(-num_tokens // _TOKENS_OF_GRID)
    if num_tokens <= layout.line_tokens:
        pieces = num_tokens * layout.world_size * -(-layout.sum_parts // _LINE_PARTS)
        grids = -(-pieces // each)
    return each * min(grids, _MOST_GRIDS)
