"""Low-latency combine over NVLink: reduce on the experts' rank, store one sum a (token, rank).

Memory order: as in dispatch. The sums lie in the receive buffer of their dispatch: its sources have
read what they got there before, for they sent the rows to which these sums belong.

Sums of few tokens travel in lines, in parts of a row, and lines/combine_recv.py receives them. The
line that every rank sends to every rank says whether it refuses, and is the credit of dispatch.

Two launches: senders reduce the slots of a row, in k order, in float32, cast once, and store the
sum in the memory of the token's rank; receivers add the sums of the ranks, in rank order, in
float32, and cast once. Sums do not depend on arrival order.
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
from epcomm.kernels.nvlink.common.epochs import next_epoch
from epcomm.kernels.nvlink.common.exchange import (
    HELD_BATCH,
    SOURCES_AT,
    SUM_ARRIVALS,
    VARYING,
    LowLatencyExchange,
    on_device,
)
from epcomm.kernels.nvlink.common.layout import LINE_BYTES
from epcomm.kernels.nvlink.common.lines import (
    abort_if_late,
    begin_wait,
    bits_of_ranks,
    end_look,
    flag_of,
    int64_at,
    is_waiting,
    line_of,
    word_of,
    words_of,
)
from epcomm.kernels.nvlink.common.signals import (
    abort_if_missing,
    await_at,
    int32_at,
    publish_as_last,
    taking_part,
)
from epcomm.kernels.nvlink.common.status import (
    FAULT_HANDLE,
    FAULT_MASK,
    FLAGS_SHIFT,
    REPORT_ABORTED,
    WAIT_COMBINE,
    note_faults,
)
from epcomm.kernels.prepared import CHANGES, PreparedLaunch
from epcomm.kernels.rounding import cast

# A row of 7168 elements is then 28 of them a thread.
_WARPS = 8
# A receiver takes half a row at once: it is to fit on an SM beside a sender.
_RECEIVE_WARPS, _RECEIVED_COLUMNS = 8, 4096

# Elements of a sum that a program sends in lines at once: four a thread.
_LINE_PART = 1024

_SUM_ARRIVALS = tl.constexpr(SUM_ARRIVALS)
_HELD_BATCH = tl.constexpr(HELD_BATCH)
_SOURCES_AT = tl.constexpr(SOURCES_AT)
_LINE_BYTES = tl.constexpr(LINE_BYTES)


@triton.jit
def _sum_of_slots(
    rows_ptr: tl.tensor,
    weights_ptr: tl.tensor,
    slots_of_row_ptr: tl.tensor,
    row: tl.tensor,
    column: tl.tensor,
    is_element: tl.tensor,
    ROWS_STRIDE: tl.constexpr,
    K: tl.constexpr,
    HAS_WEIGHTS: tl.constexpr,
    PER_ROW: tl.constexpr,
) -> tl.tensor:
    """Return some columns of the sum of a received row, in the dtype of the rows.

    With the slots 5 -1 2, which hold 10 and 2, and weights .5 and 2: 5 + 4.
    """
    if PER_ROW:
        row_ptr = rows_ptr + tl.cast(row, tl.int64) * ROWS_STRIDE
        total = tl.load(row_ptr + column, mask=is_element, other=0.0).to(tl.float32)
    else:
        total = tl.zeros(column.shape, tl.float32)
        for k in tl.static_range(K):
            place = tl.load(slots_of_row_ptr + row * K + k)
            is_slot = place >= 0
            row_ptr = rows_ptr + tl.cast(place, tl.int64) * ROWS_STRIDE
            part = tl.load(row_ptr + column, mask=both(is_element, is_slot), other=0.0)
            part = part.to(tl.float32)
            if HAS_WEIGHTS:
                part *= tl.load(weights_ptr + place, mask=is_slot, other=0.0)
            total += part
    return cast(total, rows_ptr.dtype.element_ty)  # pyright: ignore[reportAttributeAccessIssue]


@triton.jit
def slots_of(
    slots_of_row_ptr: tl.tensor,
    item: tl.tensor,
    num_items: tl.tensor,
    W: tl.constexpr,
    M: tl.constexpr,
    K: tl.constexpr,
    K_LANES: tl.constexpr,
) -> tl.tensor:
    """Load the slots of row item // W of source item % W, -1 for none; none behind the last."""
    k = tl.arange(0, K_LANES)
    row = item % W * M + item // W
    is_slot = both(k < K, item < num_items)
    return tl.load(slots_of_row_ptr + row * K + k, mask=is_slot, other=-1)


@triton.jit
def begin_combine(
    bases_ptr: tl.tensor,
    state_ptr: tl.tensor,
    excluded_ptr: tl.tensor,
    report_ptr: tl.tensor,
    own_address: tl.tensor,
    rank: tl.tensor,
    batch: tl.tensor,
    status: tl.tensor,
    W: tl.constexpr,
    W_LANES: tl.constexpr,
    COMBINED_LINES_AT: tl.constexpr,
) -> tl.tuple:
    """Tell every rank, in the first W programs, that it may send again, or why this one refuses.

    Returns: the epoch; whether nothing may be sent, for some rank has timed out, or the receive
        buffer holds another batch; the most tokens of a source that came in bulk, and in lines; the
        sources of the latter as bits, and of the former.
    """
    program = tl.program_id(0)
    # All these are on their way together.
    epoch = tl.load(state_ptr + 1)
    aborted = tl.load(int32_at(own_address), volatile=True)
    has_no_rows = tl.load(state_ptr + 2)
    is_overwritten = tl.load(state_ptr + _HELD_BATCH) != batch
    # Kept by the receiver of dispatch, not from the headers: once some programs have published, a
    # peer may write those of its next batch, and a program that starts late must count as many
    # arrivals as the others.
    source_lane = tl.arange(0, W_LANES)
    told = tl.load(state_ptr + _SOURCES_AT + source_lane, mask=source_lane < W, other=0)
    is_source = taking_part(excluded_ptr, W, W_LANES)
    # The epoch is that of a replay then, on every rank alike: nobody sends, and nobody waits.
    if (program == 0) & (is_overwritten == 0):
        tl.store(state_ptr, next_epoch(epoch))
    # Why this rank alone has no rows, if it is so, is for all to hear.
    code = tl.where((status == 0) & (has_no_rows > 1), has_no_rows, status)
    if aborted != 0:
        tl.store(report_ptr + REPORT_ABORTED, aborted)
    elif (
        (program < W)
        & (is_overwritten == 0)
        & (tl.load(excluded_ptr + program, mask=program < W, other=1) == 0)
    ):
        combined_ptr = int64_at(tl.load(bases_ptr + program) + COMBINED_LINES_AT)
        # The credit, too: all that read this batch has ended, but for this kernel, which reads what
        # this rank unpacked itself, or what is awaited by the signal of its sums.
        tl.store(combined_ptr + rank, line_of(code, epoch))
    in_bulk = is_source & ((told & 1) == 0)
    # A call that was refused has no rows; neither has this rank if it refuses now.
    is_empty = (has_no_rows != 0) | (status != 0)
    most = tl.where(is_empty, 0, tl.max(tl.where(in_bulk, told >> 1, 0)))
    few = tl.where(is_empty, 0, tl.max(tl.where(in_bulk, 0, told >> 1)))
    sources_in_lines = bits_of_ranks((told & 1) != 0, W_LANES)
    is_idle = is_overwritten | (aborted != 0)
    return epoch, is_idle, most, few, sources_in_lines, in_bulk  # pyright: ignore[reportReturnType]


@triton.jit(do_not_specialize=VARYING)
def _begin_again_kernel(
    table_ptr: tl.tensor,
    bases_ptr: tl.tensor,
    state_ptr: tl.tensor,
    excluded_ptr: tl.tensor,
    report_ptr: tl.tensor,
    own_address: tl.tensor,
    buffer_address: tl.tensor,
    rank: tl.tensor,
    batch: tl.tensor,
    max_polls: tl.tensor,
    W: tl.constexpr,
    W_LANES: tl.constexpr,
    THREADS: tl.constexpr,
    HEADER_LINES_AT: tl.constexpr,
) -> None:
    """Begin an epoch without a dispatch: batch 5 is combined again as 6, once all have its sums.

    Nothing is begun if a replay has taken the receive buffer.
    """
    if tl.load(state_ptr + _HELD_BATCH) != batch:
        return
    epoch = tl.load(state_ptr)
    tl.store(state_ptr + 1, epoch)
    lane = tl.arange(0, W_LANES)
    is_rank = taking_part(excluded_ptr, W, W_LANES)
    bases = tl.load(bases_ptr + lane, mask=is_rank, other=0)
    # The header of a dispatch, by which peers know that this rank no longer reads their sums: the
    # kernel that did has ended.
    lines_ptr = (bases + HEADER_LINES_AT + rank * (2 * _LINE_BYTES)).to(tl.pointer_type(tl.int64))
    tl.store(lines_ptr, line_of(tl.zeros([W_LANES], tl.int32), epoch), mask=is_rank)
    headers_ptr = int64_at(buffer_address + HEADER_LINES_AT) + lane * 2
    late, polls_left, num_looks, end_ns = begin_wait(max_polls)  # pyright: ignore[reportGeneralTypeIssues]
    while is_waiting(late, polls_left):
        aborted = tl.load(int32_at(own_address), volatile=True)
        headers = tl.load(headers_ptr, mask=is_rank, other=0, volatile=True)
        is_late = is_rank & (flag_of(headers) != epoch)
        late, polls_left, num_looks, end_ns = end_look(  # pyright: ignore[reportGeneralTypeIssues]
            bits_of_ranks(is_late, W_LANES), aborted, polls_left, num_looks, end_ns, THREADS
        )
    peers = (own_address, table_ptr, excluded_ptr, report_ptr, rank)
    abort_if_late(peers, late, WAIT_COMBINE, epoch, W, W_LANES)


@triton.jit(do_not_specialize=VARYING)
def _send_combine_kernel(
    rows_ptr: tl.tensor,
    weights_ptr: tl.tensor,
    slots_of_row_ptr: tl.tensor,
    bases_ptr: tl.tensor,
    state_ptr: tl.tensor,
    counters_ptr: tl.tensor,
    excluded_ptr: tl.tensor,
    report_ptr: tl.tensor,
    own_address: tl.tensor,
    buffer_address: tl.tensor,
    rank: tl.tensor,
    batch: tl.tensor,
    status: tl.tensor,
    ROWS_STRIDE: tl.constexpr,
    W: tl.constexpr,
    W_LANES: tl.constexpr,
    M: tl.constexpr,
    K: tl.constexpr,
    K_LANES: tl.constexpr,
    HIDDEN: tl.constexpr,
    COLUMNS: tl.constexpr,
    HAS_WEIGHTS: tl.constexpr,
    PER_ROW: tl.constexpr,
    LINE_TOKENS: tl.constexpr,
    PART: tl.constexpr,
    ARRIVED_SUMS_AT: tl.constexpr,
    COMBINED_LINES_AT: tl.constexpr,
    SUM_LINES_AT: tl.constexpr,
    SUM_LINES: tl.constexpr,
    RETURN_WORDS: tl.constexpr,
    RETURN_AT: tl.constexpr,
    RETURN_BYTES: tl.constexpr,
    OVERLAPS: tl.constexpr,
) -> None:
    """Send the sums of rows p, p + P, ... in program p of P, counted over tokens, then sources.

    Before these, likewise, parts of the sums of sources whose tokens came in lines.

    Row 3 has the slots 5 -1 2, which hold 10 and 1 (slot 5) and 2 and 3 (slot 2), with weights .5
    and 2: its sum is 5 + 4 and .5 + 6, at rank * M + 3 - M of rank 1 if M is 2 or 3.
    """
    program = tl.program_id(0)
    num_programs = tl.num_programs(0)
    if OVERLAPS:
        await_previous()
        let_next_start()
    following = slots_of(slots_of_row_ptr, program, M * W, W, M, K, K_LANES)
    PARTS: tl.constexpr = (HIDDEN + PART - 1) // PART
    if LINE_TOKENS > 0:
        next_slots = slots_of(slots_of_row_ptr, program // PARTS, LINE_TOKENS * W, W, M, K, K_LANES)
    epoch, is_idle, most, few, sources_in_lines, in_bulk = begin_combine(  # pyright: ignore[reportGeneralTypeIssues]
        bases_ptr,
        state_ptr,
        excluded_ptr,
        report_ptr,
        own_address,
        rank,
        batch,
        status,
        W,
        W_LANES,
        COMBINED_LINES_AT,
    )
    if is_idle:
        return

    num_sent = 0
    column = tl.arange(0, COLUMNS)
    is_element = column < HIDDEN
    if LINE_TOKENS > 0:
        for item in tl.range(program, few * (W * PARTS), num_programs, num_stages=1):
            source = (item // PARTS) % W
            token = item // (PARTS * W)
            row = source * M + token
            slots = next_slots
            next_slots = slots_of(
                slots_of_row_ptr, (item + num_programs) // PARTS, few * W, W, M, K, K_LANES
            )
            if (tl.max(slots) >= 0) & (((sources_in_lines >> source) & 1) != 0):
                part_column = (item % PARTS) * PART + tl.arange(0, PART)
                value = _sum_of_slots(
                    rows_ptr,
                    weights_ptr,
                    slots_of_row_ptr,
                    row,
                    part_column,
                    part_column < HIDDEN,
                    ROWS_STRIDE,
                    K,
                    HAS_WEIGHTS,
                    PER_ROW,
                )
                words = words_of(value)
                word = (item % PARTS) * words.shape[0] + tl.arange(0, words.shape[0])
                sum_at = SUM_LINES_AT + (rank * LINE_TOKENS + token) * (SUM_LINES * _LINE_BYTES)
                lines_ptr = int64_at(tl.load(bases_ptr + source) + sum_at)
                tl.store(lines_ptr + word, line_of(words, epoch), mask=word < RETURN_WORDS)
                num_sent += tl.where((source == rank) | (item % PARTS != 0), 0, 1)
    for item in tl.range(program, most * W, num_programs, num_stages=1):
        source = item % W
        token = item // W
        row = source * M + token
        slots = following
        following = slots_of(slots_of_row_ptr, item + num_programs, most * W, W, M, K, K_LANES)
        if (tl.max(slots) >= 0) & (((sources_in_lines >> source) & 1) == 0):
            value = _sum_of_slots(
                rows_ptr,
                weights_ptr,
                slots_of_row_ptr,
                row,
                column,
                is_element,
                ROWS_STRIDE,
                K,
                HAS_WEIGHTS,
                PER_ROW,
            )
            base = tl.load(bases_ptr + source)
            return_address = base + RETURN_AT + (tl.cast(rank, tl.int64) * M + token) * RETURN_BYTES
            return_ptr = return_address.to(tl.pointer_type(rows_ptr.dtype.element_ty))
            tl.store(tl.multiple_of(return_ptr, 16) + column, value, mask=is_element)
            num_sent += tl.where(source == rank, 0, 1)
    # Of this rank alone, and read by its host.
    tl.atomic_add(counters_ptr + 3, tl.cast(num_sent, tl.int64), sem="relaxed")
    # The first W programs have sent the lines of combine, all others without a row in bulk nothing
    # that a signal tells of. Those that poll the lines themselves await no signal.
    num_arriving = tl.maximum(W, tl.minimum(num_programs, most * W))
    if (program < num_arriving) & (tl.max(in_bulk.to(tl.int32)) > 0):
        publish_as_last(
            state_ptr + _SUM_ARRIVALS,
            num_arriving,
            bases_ptr,
            ARRIVED_SUMS_AT + rank * 4,
            epoch,
            in_bulk,
            W_LANES,
        )


@triton.jit
def _parts_of(
    is_sent_ptr: tl.tensor,
    token: tl.tensor,
    num_tokens: tl.tensor,
    PARTS: tl.constexpr,
    PART_LANES: tl.constexpr,
) -> tl.tensor:
    """Return what comes home for a token: 5 is parts 0 and 2; 0 behind the last token."""
    part = tl.arange(0, PART_LANES)
    is_part = both(part < PARTS, token < num_tokens)
    # Not from the L1 cache: a wait that empties it comes only later.
    is_sent = tl.load(is_sent_ptr + token * PARTS + part, mask=is_part, other=0, volatile=True)
    return tl.sum((is_sent != 0).to(tl.int32) << part)


@triton.jit(do_not_specialize=VARYING)
def _receive_combine_kernel(
    out_ptr: tl.tensor,
    weights_ptr: tl.tensor | None,
    table_ptr: tl.tensor,
    state_ptr: tl.tensor,
    is_sent_ptr: tl.tensor,
    faults_ptr: tl.tensor,
    excluded_ptr: tl.tensor,
    report_ptr: tl.tensor,
    own_address: tl.tensor,
    buffer_address: tl.tensor,
    rank: tl.tensor,
    num_tokens: tl.tensor,
    batch: tl.tensor,
    max_polls: tl.tensor,
    W: tl.constexpr,
    W_LANES: tl.constexpr,
    M: tl.constexpr,
    PARTS: tl.constexpr,
    PART_LANES: tl.constexpr,
    HIDDEN: tl.constexpr,
    COLUMNS: tl.constexpr,
    ARRIVED_SUMS_AT: tl.constexpr,
    COMBINED_LINES_AT: tl.constexpr,
    RETURN_AT: tl.constexpr,
    RETURN_BYTES: tl.constexpr,
    OVERLAPS: tl.constexpr,
) -> None:
    """Add up the parts of tokens p, p + P, ... in program p of P.

    Token 1 was sent to ranks 0 and 2: the sum of rows 1 and 2 * M + 1 of `returned`. With weights,
    and two slots a token: that of rows 2 and 3, times the weights of token 1.
    """
    program = tl.program_id(0)
    # Not from the L1 cache: only the end of the kernel before would empty it for sure.
    epoch = tl.load(state_ptr + 1, volatile=True)
    has_no_rows = tl.load(state_ptr + 2, volatile=True)
    following = _parts_of(is_sent_ptr, program, num_tokens, PARTS, PART_LANES)
    peers = (own_address, table_ptr, excluded_ptr, report_ptr, rank)
    source_lane = tl.arange(0, W_LANES)
    is_source = taking_part(excluded_ptr, W, W_LANES)
    is_overwritten = tl.load(state_ptr + _HELD_BATCH, volatile=True) != batch
    # Looked at before it is known whether the batch is still there.
    missing, aborted = await_at(  # pyright: ignore[reportGeneralTypeIssues]
        int32_at(buffer_address + ARRIVED_SUMS_AT) + source_lane,
        both(is_source, is_overwritten == 0),
        source_lane < W,
        int32_at(own_address),
        epoch,
        max_polls,
        "sys",
        True,
    )
    is_lost = abort_if_missing(missing, aborted, peers, WAIT_COMBINE, epoch, W, W_LANES)

    # Sent before the signal, so there.
    combined_ptr = int64_at(buffer_address + COMBINED_LINES_AT) + source_lane
    codes = word_of(tl.load(combined_ptr, mask=both(is_source, is_lost == 0), other=0))
    codes = tl.where(is_overwritten, FAULT_HANDLE, codes)
    if program == 0:
        note_faults(faults_ptr, codes & FAULT_MASK, is_source, W_LANES, codes >> FLAGS_SHIFT)
    has_failed = is_lost | (tl.max(codes) != 0) | (has_no_rows != 0)

    dtype = out_ptr.dtype.element_ty
    for token in tl.range(program, num_tokens, tl.num_programs(0), num_stages=1):
        parts = following
        next_token = token + tl.num_programs(0)
        following = _parts_of(is_sent_ptr, next_token, num_tokens, PARTS, PART_LANES)
        out_row_ptr = out_ptr + tl.cast(token, tl.int64) * HIDDEN
        for begin in tl.range(0, HIDDEN, COLUMNS, num_stages=1):
            column = begin + tl.arange(0, COLUMNS)
            is_element = column < HIDDEN
            total = tl.zeros([COLUMNS], tl.float32)
            for index in tl.static_range(PARTS):
                is_there = (parts >> index) & 1 != 0
                place = index * M + tl.cast(token, tl.int64)
                if weights_ptr is not None:
                    place = tl.cast(token, tl.int64) * PARTS + index
                part_ptr = (buffer_address + RETURN_AT + place * RETURN_BYTES).to(
                    tl.pointer_type(dtype)
                )
                part_ptr = tl.multiple_of(part_ptr, 16) + column
                # On its way before it is known whether the call has failed.
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
    peers, layout = exchange.peers, exchange.peers.layout
    with on_device(peers.table):
        _begin_again_kernel[(1,)](
            peers.table,
            exchange.bases,
            exchange.state,
            peers.excluded,
            peers.report,
            peers.own_address,
            exchange.buffer_address,
            peers.rank,
            batch,
            peers.max_polls,
            W=layout.world_size,
            W_LANES=layout.world_lanes,
            THREADS=32,
            HEADER_LINES_AT=layout.offsets["header_lines"],
            num_warps=1,  # pyright: ignore[reportCallIssue]
        )


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
    """Sum the slots of each received row and send the sum to the rank of its token.

    Args:
        exchange: the receive buffer of the dispatch.
        rows: [C, H], or [W * M, H] with per_row, in the dtype of the sums; rows may lie apart.
        slot_weights: [C], float32, multiplied into slots, or None.
        slots_of_row: [W * M, K], int32, as receive_dispatch() wrote it.
        per_row: rows are sums already.
        batch: as send_dispatch() was given it.
        status: why this rank refuses the call, a FaultCode, or 0.

    Collective: yes.   Allocates nothing.   Host sync: none.   Graph capture: after one call.
    """
    hidden_size, row_stride = rows.shape[1], rows.stride(0)
    key = ("send sums", rows.dtype, hidden_size, row_stride, slot_weights is None, per_row)
    launch = exchange.launches.get(key)
    if launch is None:
        peers, layout = exchange.peers, exchange.peers.layout
        offsets = layout.offsets
        launch = exchange.launches[key] = PreparedLaunch(
            _send_combine_kernel,
            (
                CHANGES,
                CHANGES,
                CHANGES,
                exchange.bases,
                exchange.state,
                peers.counters,
                peers.excluded,
                peers.report,
                peers.own_address,
                exchange.buffer_address,
                peers.rank,
                CHANGES,
                CHANGES,
            ),
            dict(
                ROWS_STRIDE=row_stride,
                **layout.entry_constants,
                HIDDEN=hidden_size,
                COLUMNS=next_power_of_two(hidden_size),
                HAS_WEIGHTS=slot_weights is not None,
                PER_ROW=per_row,
                LINE_TOKENS=layout.line_tokens,
                PART=max(4, min(_LINE_PART, next_power_of_two(hidden_size))),
                ARRIVED_SUMS_AT=offsets["arrived_sums"],
                COMBINED_LINES_AT=offsets["combined_lines"],
                SUM_LINES_AT=offsets["sum_lines"],
                SUM_LINES=layout.sum_lines,
                RETURN_WORDS=layout.return_words,
                RETURN_AT=offsets["returned"],
                RETURN_BYTES=layout.return_bytes,
                num_warps=_WARPS,
                **EXACT,
                **overlapping(rows.device),
            ),
        )
    launch(exchange.peers.num_programs, rows, slot_weights, slots_of_row, batch, status)


def receive_combine(
    exchange: LowLatencyExchange,
    out: Tensor,
    is_sent: Tensor,
    topk_weights: Tensor | None = None,
    *,
    batch: int,
) -> None:
    """Wait for the sums of all ranks and add them up.

    Args:
        exchange: the receive buffer.
        out: [T, H], contiguous, in the dtype of the sums; NaN if the call has failed, or if a
            replay has taken the receive buffer since, which is a fault of all ranks. Allocated
            before send_combine(): kernels between the two may run still, and memory that they
            read is given away once the host has launched them.
        is_sent: as send_dispatch() wrote it.
        topk_weights: [T, K], float32, contiguous: slots have come home apart, and are multiplied by
            these; of those that do not, the weight is ignored.
        batch: as send_dispatch() was given it.

    Collective: yes, after send_combine().   Allocates nothing.   Host sync: none.
    """
    num_tokens, hidden_size = out.shape
    num_programs = exchange.peers.num_programs
    key = ("receive sums", out.dtype, hidden_size, topk_weights is None)
    launch = exchange.launches.get(key)
    if launch is None:
        peers, layout = exchange.peers, exchange.peers.layout
        offsets = layout.offsets
        launch = exchange.launches[key] = PreparedLaunch(
            _receive_combine_kernel,
            (
                CHANGES,
                CHANGES,
                peers.table,
                exchange.state,
                CHANGES,
                peers.faults,
                peers.excluded,
                peers.report,
                peers.own_address,
                exchange.buffer_address,
                peers.rank,
                CHANGES,
                CHANGES,
                peers.max_polls,
            ),
            dict(
                **layout.rank_constants,
                PARTS=layout.parts_of_token,
                PART_LANES=next_power_of_two(layout.parts_of_token),
                HIDDEN=hidden_size,
                COLUMNS=min(_RECEIVED_COLUMNS, next_power_of_two(hidden_size)),
                ARRIVED_SUMS_AT=offsets["arrived_sums"],
                COMBINED_LINES_AT=offsets["combined_lines"],
                RETURN_AT=offsets["returned"],
                RETURN_BYTES=layout.return_bytes,
                num_warps=_RECEIVE_WARPS,
                **EXACT,
                **overlapping(out.device),
            ),
        )
    # One program without tokens still hears of faults.
    launch(max(1, min(num_tokens, num_programs)), out, topk_weights, is_sent, num_tokens, batch)
