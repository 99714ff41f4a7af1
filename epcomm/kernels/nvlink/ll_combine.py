"""Low-latency combine over NVLink: experts' ranks send sums, or slots apart, to the tokens' ranks.

Two launches. Senders reduce the slots of a row, in k order, in float32, cast once, and store the
sum in the memory of the token's rank. Receivers add the sums of the ranks, in rank order, in
float32, and cast once, so that sums do not depend on arrival order.

If router weights come with combine (layout.returns_slots), the experts' rank does not know them: it
sends each slot as it is, and the receivers multiply and add. Slot k of token t is stored at
t * K + k of the memory of the token's rank, whichever rank sends it. This takes more bytes than
sums where a token has several experts on one rank.

Results of few tokens are sent in lines, in parts of a row, and lines/combine_recv.py receives them.
Every rank sends every rank a line that reports whether it refuses, and that is the credit of
dispatch.

Memory order: as in dispatch. Results are stored in the receive buffer of their dispatch, whose
sources have read the previous results there, because they sent the rows of these results after it.
"""

from __future__ import annotations

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
from epcomm.kernels.nvlink.common.exchange import (
    HELD_BATCH,
    SOURCES_AT,
    SUM_ARRIVALS,
    VARYING,
    LowLatencyExchange,
    Memory,
    Peers,
)
from epcomm.kernels.nvlink.common.launches import prepare
from epcomm.kernels.nvlink.common.layout import LINE_BYTES
from epcomm.kernels.nvlink.common.lines import (
    abort_if_late,
    await_all,
    bits_of_ranks,
    int64_at,
    line_of,
    next_epoch,
    send_to_all,
    word_of,
    words_of,
)
from epcomm.kernels.nvlink.common.signals import (
    abort_if_missing,
    await_at,
    int32_at,
    living_ranks,
    publish_as_last,
)
from epcomm.kernels.nvlink.common.status import (
    FAULT_HANDLE,
    FAULT_MASK,
    FLAGS_SHIFT,
    REPORT_ABORTED,
    WAIT_COMBINE,
    note_faults,
)
from epcomm.kernels.nvlink.lines.combine_recv import num_parts, prepare_lines
from epcomm.kernels.prepared import CHANGES, PreparedLaunch
from epcomm.kernels.rounding import cast

# 28 elements a thread of a row of 7168 elements.
_WARPS = 8
# Columns of the slots of a row that a program sends at once, half a row of 7168, so that the loads
# of all K slots are under way together.
_SLOT_COLUMNS = 4096
# Elements that a program sends in lines at once: four a thread.
_LINE_COLUMNS = 1024
# A receiver takes half a row at once, so that it fits on an SM beside a sender.
_RECEIVE_WARPS, _RECEIVED_COLUMNS = 8, 4096

_SUM_ARRIVALS = tl.constexpr(SUM_ARRIVALS)
_HELD_BATCH = tl.constexpr(HELD_BATCH)
_SOURCES_AT = tl.constexpr(SOURCES_AT)
_LINE_BYTES = tl.constexpr(LINE_BYTES)


@triton.jit
def _sum_of_slots(
    rows_ptr: tl.tensor,
    weights_ptr: tl.tensor | None,
    slots_ptr: tl.tensor,
    row: tl.tensor,
    column: tl.tensor,
    c: constexprs.Layout,
    results: constexprs.Results,
) -> tl.tensor:
    """Return some columns of the sum of a received row, in the dtype of the rows.

    With the slots 5 -1 2, which hold 10 and 2, and weights .5 and 2: 5 + 4.
    """
    is_element = column < results.HIDDEN
    if results.PER_ROW:
        row_ptr = rows_ptr + tl.cast(row, tl.int64) * results.ROWS_STRIDE
        total = tl.load(row_ptr + column, mask=is_element, other=0.0).to(tl.float32)
    else:
        total = tl.zeros(column.shape, tl.float32)
        for k in tl.static_range(c.K):
            slot = tl.load(slots_ptr + k)
            is_slot = slot >= 0
            row_ptr = rows_ptr + tl.cast(slot, tl.int64) * results.ROWS_STRIDE
            part = tl.load(row_ptr + column, mask=both(is_element, is_slot), other=0.0)
            part = part.to(tl.float32)
            if weights_ptr is not None:
                part *= tl.load(weights_ptr + slot, mask=is_slot, other=0.0)
            total += part
    return cast(total, rows_ptr.dtype.element_ty)  # pyright: ignore[reportAttributeAccessIssue]


@triton.jit
def _parts_of(
    rows_ptr: tl.tensor,
    weights_ptr: tl.tensor | None,
    slots_of_row_ptr: tl.tensor,
    row: tl.tensor,
    column: tl.tensor,
    c: constexprs.Layout,
    results: constexprs.Results,
) -> tl.tuple:
    """Return some columns of what is sent for a received row: (whether it exists, elements) each.

    One sum; or each of the K slots if these return.
    """
    slots_ptr = slots_of_row_ptr + row * c.K
    parts = ()
    if c.RETURNS_SLOTS:
        for k in tl.static_range(c.K):  # pyright: ignore[reportGeneralTypeIssues]
            slot = tl.load(slots_ptr + k)
            row_ptr = rows_ptr + tl.cast(slot, tl.int64) * results.ROWS_STRIDE
            is_there = both(column < results.HIDDEN, slot >= 0)
            parts += ((slot >= 0, tl.load(row_ptr + column, mask=is_there, other=0.0)),)
    else:
        total = _sum_of_slots(rows_ptr, weights_ptr, slots_ptr, row, column, c, results)
        parts = ((row >= 0, total),)
    return parts  # pyright: ignore[reportReturnType]


@triton.jit
def _slots_of(
    slots_of_row_ptr: tl.tensor,
    item: tl.tensor,
    num_items: tl.tensor,
    c: constexprs.Layout,
) -> tl.tensor:
    """Load the slots of token item // W of source item % W, -1 for none and after num_items."""
    k = tl.arange(0, c.K_LANES)
    row = item % c.W * c.M + item // c.W
    is_slot = both(k < c.K, item < num_items)
    return tl.load(slots_of_row_ptr + row * c.K + k, mask=is_slot, other=-1)


@triton.jit
def _begin_combine(
    peers: Peers, batch: tl.tensor, status: tl.tensor, c: constexprs.Layout
) -> tl.tuple:
    """Send every rank, in the first W programs, a credit, or why this rank refuses.

    Returns: the epoch; whether nothing may be sent, because some rank has timed out, or the receive
        buffer holds another batch; the most tokens of a source that arrived in bulk, and in lines;
        the sources of the latter as bits, and of the former.
    """
    program = tl.program_id(0)
    # All loads of this loop are in flight together.
    epoch = tl.load(peers.state + 1)
    aborted = tl.load(int32_at(peers.own_address), volatile=True)
    has_no_rows = tl.load(peers.state + 2)
    is_overwritten = tl.load(peers.state + _HELD_BATCH) != batch
    # The receiver of dispatch kept this number. Do not read the headers: once some programs have
    # published, a peer may write those of its next batch, and a program that starts late must count
    # as many arrivals as the others.
    source_lane = tl.arange(0, c.W_LANES)
    told = tl.load(peers.state + _SOURCES_AT + source_lane, mask=source_lane < c.W, other=0)
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
    most = tl.where(is_empty, 0, tl.max(tl.where(in_bulk, told >> 1, 0)))
    few = tl.where(is_empty, 0, tl.max(tl.where(in_bulk, 0, told >> 1)))
    sources_in_lines = bits_of_ranks((told & 1) != 0, c.W_LANES)
    is_idle = is_overwritten | (aborted != 0)
    return epoch, is_idle, most, few, sources_in_lines, in_bulk  # pyright: ignore[reportReturnType]


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
    if tl.load(peers.state + _HELD_BATCH) != batch:
        return
    epoch = tl.load(peers.state)
    tl.store(peers.state + 1, epoch)
    # A header as a dispatch sends it: it tells peers that this rank no longer reads their sums,
    # because the kernel that read them has ended. No rank can be an epoch ahead.
    send_to_all(peers, c.HEADER_LINES_AT, 2, epoch, c)  # pyright: ignore[reportArgumentType]
    late = await_all(peers, c.HEADER_LINES_AT, 2, epoch, c, 32)  # pyright: ignore[reportArgumentType]
    abort_if_late(peers, late, WAIT_COMBINE, epoch, c)


@triton.jit(do_not_specialize=VARYING)
def _send_combine_kernel(
    rows_ptr: tl.tensor,
    weights_ptr: tl.tensor | None,
    slots_of_row_ptr: tl.tensor,
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
    """Send pieces p, p + P, ... of rows in program p of P, counted over pieces, sources, tokens.

    First those of sources whose tokens came in lines, then those of the others.

    Row 3 has the slots 5 -1 2, which hold 10 and 1 (slot 5) and 2 and 3 (slot 2), with weights .5
    and 2: its sum is 5 + 4 and .5 + 6, at rank * M + 3 - M of rank 1 if M is 2 or 3. If slots
    return, rows 5 and 2 are sent to 3 * t and 3 * t + 2 of the source, where it is token t.
    """
    program = tl.program_id(0)
    peers = Peers(*memory, own_address, buffer_address, rank, max_polls)
    num_programs = tl.num_programs(0)
    if OVERLAPS:
        await_previous()
        let_next_start()
    PIECES: tl.constexpr = (results.HIDDEN + results.COLUMNS - 1) // results.COLUMNS
    LINE_PIECES: tl.constexpr = (results.HIDDEN + results.LINE_COLUMNS - 1) // results.LINE_COLUMNS
    PARTS: tl.constexpr = c.K if c.RETURNS_SLOTS else 1  # pyright: ignore[reportAssignmentType]
    following = _slots_of(slots_of_row_ptr, program // PIECES, c.M * c.W, c)
    if c.LINE_TOKENS > 0:
        next_slots = _slots_of(slots_of_row_ptr, program // LINE_PIECES, c.LINE_TOKENS * c.W, c)
    epoch, is_idle, most, few, sources_in_lines, in_bulk = _begin_combine(  # pyright: ignore[reportGeneralTypeIssues]
        peers, batch, status, c
    )
    if is_idle:
        return

    num_sent = 0
    if c.LINE_TOKENS > 0:
        for item in tl.range(program, few * (c.W * LINE_PIECES), num_programs, num_stages=1):
            piece, row_item = item % LINE_PIECES, item // LINE_PIECES
            source, token = row_item % c.W, row_item // c.W
            slots = next_slots
            next_item = (item + num_programs) // LINE_PIECES
            next_slots = _slots_of(slots_of_row_ptr, next_item, few * c.W, c)
            if (tl.max(slots) >= 0) & (((sources_in_lines >> source) & 1) != 0):
                column = piece * results.LINE_COLUMNS + tl.arange(0, results.LINE_COLUMNS)
                row = source * c.M + token
                parts = _parts_of(rows_ptr, weights_ptr, slots_of_row_ptr, row, column, c, results)
                first = token * c.K if c.RETURNS_SLOTS else rank * c.LINE_TOKENS + token
                sums_at = c.SUM_LINES_AT + first * (c.SUM_LINES * _LINE_BYTES)
                lines_ptr = int64_at(tl.load(peers.bases + source) + sums_at)
                for k in tl.static_range(PARTS):
                    is_there, elements = parts[k]
                    words = words_of(elements)
                    word = piece * words.shape[0] + tl.arange(0, words.shape[0])
                    is_word = both(word < c.RETURN_WORDS, is_there)
                    line_ptr = lines_ptr + k * c.SUM_LINES + word
                    tl.store(line_ptr, line_of(words, epoch), mask=is_word)
                is_counted = (source != rank) & (piece == 0)
                num_sent += tl.where(is_counted, _num_parts(slots, c), 0)
    for item in tl.range(program, most * (c.W * PIECES), num_programs, num_stages=1):
        piece, row_item = item % PIECES, item // PIECES
        source, token = row_item % c.W, row_item // c.W
        slots = following
        next_item = (item + num_programs) // PIECES
        following = _slots_of(slots_of_row_ptr, next_item, most * c.W, c)
        if (tl.max(slots) >= 0) & (((sources_in_lines >> source) & 1) == 0):
            column = piece * results.COLUMNS + tl.arange(0, results.COLUMNS)
            row = source * c.M + token
            parts = _parts_of(rows_ptr, weights_ptr, slots_of_row_ptr, row, column, c, results)
            first = tl.cast(token, tl.int64) * c.K
            if not c.RETURNS_SLOTS:
                first = tl.cast(rank, tl.int64) * c.M + token
            returned = tl.load(peers.bases + source) + c.RETURNED_AT + first * c.RETURN_BYTES
            for k in tl.static_range(PARTS):
                is_there, elements = parts[k]
                return_ptr = (returned + k * c.RETURN_BYTES).to(
                    tl.pointer_type(rows_ptr.dtype.element_ty)
                )
                return_ptr = tl.multiple_of(return_ptr, 16) + column
                tl.store(return_ptr, elements, mask=both(column < results.HIDDEN, is_there))
            is_counted = (source != rank) & (piece == 0)
            num_sent += tl.where(is_counted, _num_parts(slots, c), 0)
    # The host of this rank reads this counter.
    tl.atomic_add(peers.counters + 3, tl.cast(num_sent, tl.int64), sem="relaxed")
    # The first W programs have sent the lines of combine; the other programs without a row in bulk
    # have sent nothing that a signal covers. Sources that poll lines await no signal.
    num_arriving = tl.maximum(c.W, tl.minimum(num_programs, most * (c.W * PIECES)))
    if (program < num_arriving) & (tl.max(in_bulk.to(tl.int32)) > 0):
        publish_as_last(peers, _SUM_ARRIVALS, num_arriving, c.ARRIVED_SUMS_AT, epoch, in_bulk, c)


@triton.jit
def _num_parts(slots: tl.tensor, c: constexprs.Layout) -> tl.tensor:
    """Return the number of results of a row with slots [K_LANES], of which one is at least 0."""
    return tl.sum((slots >= 0).to(tl.int32)) if c.RETURNS_SLOTS else 1  # pyright: ignore[reportReturnType]


@triton.jit
def _sent_parts_of(
    is_sent_ptr: tl.tensor,
    token: tl.tensor,
    num_tokens: tl.tensor,
    PARTS: tl.constexpr,
    PART_LANES: tl.constexpr,
) -> tl.tensor:
    """Return the parts of a token as bits: 5 is parts 0 and 2; 0 after the last token."""
    part = tl.arange(0, PART_LANES)
    is_part = both(part < PARTS, token < num_tokens)
    # The load bypasses the L1 cache, which a later wait empties.
    is_sent = tl.load(is_sent_ptr + token * PARTS + part, mask=is_part, other=0, volatile=True)
    return tl.sum((is_sent != 0).to(tl.int32) << part)


@triton.jit(do_not_specialize=VARYING)
def _receive_combine_kernel(
    out_ptr: tl.tensor,
    weights_ptr: tl.tensor | None,
    is_sent_ptr: tl.tensor,
    memory: Memory,
    own_address: tl.tensor,
    buffer_address: tl.tensor,
    rank: tl.tensor,
    max_polls: tl.tensor,
    num_tokens: tl.tensor,
    batch: tl.tensor,
    c: constexprs.Layout,
    PARTS: tl.constexpr,
    PART_LANES: tl.constexpr,
    HIDDEN: tl.constexpr,
    COLUMNS: tl.constexpr,
    OVERLAPS: tl.constexpr,
) -> None:
    """Add up the parts of tokens p, p + P, ... in program p of P.

    Token 1 was sent to ranks 0 and 2: the sum of rows 1 and 2 * M + 1 of `returned`. With weights,
    and two slots a token: that of rows 2 and 3, times the weights of token 1.
    """
    program = tl.program_id(0)
    peers = Peers(*memory, own_address, buffer_address, rank, max_polls)
    # The load bypasses the L1 cache, which only the end of the previous kernel surely empties.
    epoch = tl.load(peers.state + 1, volatile=True)
    has_no_rows = tl.load(peers.state + 2, volatile=True)
    following = _sent_parts_of(is_sent_ptr, program, num_tokens, PARTS, PART_LANES)
    source_lane = tl.arange(0, c.W_LANES)
    is_source = living_ranks(peers, c)
    is_overwritten = tl.load(peers.state + _HELD_BATCH, volatile=True) != batch
    # The lines are read before it is known whether the batch is still in the buffer.
    missing, aborted = await_at(  # pyright: ignore[reportGeneralTypeIssues]
        int32_at(buffer_address + c.ARRIVED_SUMS_AT) + source_lane,
        both(is_source, is_overwritten == 0),
        source_lane < c.W,
        int32_at(own_address),
        epoch,
        max_polls,
        "sys",
        True,
    )
    is_lost = abort_if_missing(missing, aborted, peers, WAIT_COMBINE, epoch, c)

    # The row was sent before the signal, so it has arrived.
    combined_ptr = int64_at(buffer_address + c.COMBINED_LINES_AT) + source_lane
    codes = word_of(tl.load(combined_ptr, mask=both(is_source, is_lost == 0), other=0))
    codes = tl.where(is_overwritten, FAULT_HANDLE, codes)
    if program == 0:
        note_faults(peers.faults, codes & FAULT_MASK, is_source, c.W_LANES, codes >> FLAGS_SHIFT)
    has_failed = is_lost | (tl.max(codes) != 0) | (has_no_rows != 0)

    dtype = out_ptr.dtype.element_ty
    for token in tl.range(program, num_tokens, tl.num_programs(0), num_stages=1):
        parts = following
        next_token = token + tl.num_programs(0)
        following = _sent_parts_of(is_sent_ptr, next_token, num_tokens, PARTS, PART_LANES)
        out_row_ptr = out_ptr + tl.cast(token, tl.int64) * HIDDEN
        for begin in tl.range(0, HIDDEN, COLUMNS, num_stages=1):
            column = begin + tl.arange(0, COLUMNS)
            is_element = column < HIDDEN
            total = tl.zeros([COLUMNS], tl.float32)
            for index in tl.static_range(PARTS):
                is_there = (parts >> index) & 1 != 0
                place = index * c.M + tl.cast(token, tl.int64)
                if weights_ptr is not None:
                    place = tl.cast(token, tl.int64) * PARTS + index
                part_ptr = (buffer_address + c.RETURNED_AT + place * c.RETURN_BYTES).to(
                    tl.pointer_type(dtype)
                )
                part_ptr = tl.multiple_of(part_ptr, 16) + column
                # The load starts before it is known whether the call has failed.
                part = tl.load(part_ptr, mask=both(is_element, is_there), other=0.0).to(tl.float32)
                if weights_ptr is not None:
                    part *= tl.load(weights_ptr + token * PARTS + index, mask=is_there, other=0.0)
                total += part
            total = tl.where(has_failed, float("nan"), total)
            tl.store(out_row_ptr + column, cast(total, dtype), mask=is_element)
    if OVERLAPS:
        await_previous()


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
    *,
    per_row: bool,
    batch: int,
    status: int,
) -> None:
    """Send the sum of the slots of each received row, or each slot, to the rank of its token.

    Args:
        exchange: the receive buffer of the dispatch.
        rows: [C, H], or [W * M, H] with per_row, in the dtype of the sums; rows may be apart.
        slot_weights: [C], float32, multiplied into slots, or None, also if slots return.
        slots_of_row: [W * M, K], int32, as receive_dispatch() wrote it.
        per_row: rows are sums already, or this rank refuses.
        batch: as passed to send_dispatch().
        status: why this rank refuses the call, a FaultCode, or 0.

    Collective: yes.   Allocates nothing.   Host sync: none.   Graph capture: after one call.
    """
    hidden_size, row_stride = rows.shape[1], rows.stride(0)
    key = ("send sums", rows.dtype, hidden_size, row_stride, slot_weights is None, per_row)
    launch = exchange.launches.get(key)
    if launch is None:
        columns = max(4, next_power_of_two(hidden_size))
        most = _SLOT_COLUMNS if exchange.peers.layout.returns_slots else columns
        launch = exchange.launches[key] = prepare(
            exchange,
            _send_combine_kernel,
            [CHANGES] * 3,
            2,
            results=constexprs.constants(
                constexprs.Results,
                ROWS_STRIDE=row_stride,
                HIDDEN=hidden_size,
                COLUMNS=min(most, columns),
                LINE_COLUMNS=min(_LINE_COLUMNS, columns),
                PER_ROW=per_row,
            ),
            num_warps=_WARPS,
            **EXACT,
            **overlapping(rows.device),
        )
    launch(exchange.peers.num_programs, rows, slot_weights, slots_of_row, batch, status)


def receive_combine(
    exchange: LowLatencyExchange,
    out: Tensor,
    is_sent: Tensor,
    topk_weights: Tensor | None = None,
    *,
    batch: int,
    line_tokens: int | None = None,
) -> None:
    """Wait for the sums of all ranks and add them up.

    Args:
        exchange: the receive buffer.
        out: [T, H], contiguous, in the dtype of the sums; NaN if the call has failed, or if a
            replay has taken the receive buffer since, which is a fault of all ranks. Allocated
            before send_combine(), because kernels between the two may still run, and the host may
            have freed memory that they read. T = 0 if this rank refuses to combine.
        is_sent: as send_dispatch() wrote it.
        topk_weights: [T, K], float32, contiguous: weights of the slots that have returned; others
            are ignored.
        batch: as passed to send_dispatch().
        line_tokens: T of a dispatch that this rank sent in lines; None: it sent in bulk.

    Collective: yes, after send_combine().   Allocates nothing.   Host sync: none.
    """
    num_tokens, hidden_size = out.shape
    peers, in_lines = exchange.peers, line_tokens is not None
    key = ("receive sums", in_lines, out.dtype, hidden_size, topk_weights is None)
    launch = exchange.launches.get(key)
    if launch is None:
        launch = exchange.launches[key] = (
            prepare_lines(exchange, out) if in_lines else _prepare_bulk(exchange, out)
        )
    # Without tokens, one program still receives the faults.
    if line_tokens is None:
        grid = max(1, min(num_tokens, peers.num_programs))
        launch(grid, out, topk_weights, is_sent, num_tokens, batch)
    else:
        grid = max(1, line_tokens) * num_parts(peers.layout)
        launch(grid, out, topk_weights, is_sent, num_tokens, line_tokens, batch)


def _prepare_bulk(exchange: LowLatencyExchange, out: Tensor) -> PreparedLaunch:
    parts, hidden_size = exchange.peers.layout.parts_of_token, out.shape[1]
    return prepare(
        exchange,
        _receive_combine_kernel,
        [CHANGES] * 3,
        2,
        PARTS=parts,
        PART_LANES=next_power_of_two(parts),
        HIDDEN=hidden_size,
        COLUMNS=min(_RECEIVED_COLUMNS, next_power_of_two(hidden_size)),
        num_warps=_RECEIVE_WARPS,
        **EXACT,
        **overlapping(out.device),
    )
