"""Combine of normal mode over NVLink: senders and reducers in one launch.

Senders sum the slots of a row in k order, in float32, cast once, and store the sum at the place of
its token on the token's rank; reducers there add the sums of the ranks up, in rank order, in
float32, and cast once. Sums are signalled item by item, a few dozen rows of one source each, so
that reducers follow while the wire is busy.

Memory order: a rank signals that it has begun a combine, so it no longer reads the sums of the
previous one. A rank that has that signal stores there, and releases the number of the combine into
a signal of each item, which the reducer acquires. Reducers come behind all senders of their rank,
and senders wait for no reducer: any number of programs may be resident.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from epcomm.kernels.launch import EXACT, next_power_of_two
from epcomm.kernels.masks import both
from epcomm.kernels.nvlink import normal_combine_cuda
from epcomm.kernels.nvlink.common.epochs import (
    BUFFER_MARKS,
    COMBINE_EPOCH,
    COMBINE_LEFT,
    end_epoch,
    mark_of,
)
from epcomm.kernels.nvlink.common.exchange import VARYING, on_device
from epcomm.kernels.nvlink.common.plan_parts import Arrivals, Sends
from epcomm.kernels.nvlink.common.signals import (
    abort_if_missing,
    await_at,
    await_or_abort,
    int32_at,
    publish,
    taking_part,
)
from epcomm.kernels.nvlink.common.status import (
    FAULT_HANDLE,
    WAIT_COMBINE_BEGIN,
    WAIT_SUMS,
    note_faults,
)
from epcomm.kernels.nvlink.normal_exchange import NormalExchange
from epcomm.kernels.rounding import cast

# Rows and columns that a program sums at once.
_ROWS, _COLUMNS, _WARPS = 16, 512, 16
# Rows whose loads are under way at once, of senders and of reducers.
_STAGES, _REDUCE_STAGES = 3, 1
# Tokens of a reducer, whose sums it waits for together; at most the item_rows of a layout.
_WAITED = 16
# Share of the programs that add up returned sums.
_REDUCER_SHARE = 0.29

_COMBINE_EPOCH = tl.constexpr(COMBINE_EPOCH)
_COMBINE_LEFT = tl.constexpr(COMBINE_LEFT)
_BUFFER_MARKS = tl.constexpr(BUFFER_MARKS)


@triton.jit
def _next_slot(
    slots: tl.tensor, last: tl.tensor, K_LANES: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Find each row's first slot behind entry `last`, -1 for none, and its entry: [rows], twice.

    Of -1 5 -1 2 behind -1 it is 5, entry 1; behind that 2, entry 3. No scan: Triton 3.6 cannot make
    one of four columns in the layout that rows are read in.
    """
    k = tl.arange(0, K_LANES)[None, :]
    entry = tl.min(tl.where((slots >= 0) & (k > last[:, None]), k, K_LANES), 1)
    return tl.max(tl.where(k == entry[:, None], slots, -1), 1), entry


@triton.jit
def _part(
    rows_ptr: tl.tensor,
    places: tl.tensor,
    weights: tl.tensor,
    column: tl.tensor,
    is_element: tl.tensor,
    ROWS_STRIDE: tl.constexpr,
    HAS_WEIGHTS: tl.constexpr,
) -> tl.tensor:
    """Load results times weights, [rows, columns], float32, 0 where there is none (-1)."""
    is_there = (places >= 0)[:, None] & is_element
    row_ptr = rows_ptr + tl.cast(places, tl.int64)[:, None] * ROWS_STRIDE + column
    part = tl.load(row_ptr, mask=is_there, other=0.0).to(tl.float32)
    if HAS_WEIGHTS:
        part *= weights[:, None]
    return part


@triton.jit
def _weights_of(weights_ptr: tl.tensor, slots: tl.tensor, HAS_WEIGHTS: tl.constexpr) -> tl.tensor:
    """Load the weights of slots, [rows], float32; of no use where none are given."""
    if HAS_WEIGHTS:
        return tl.load(weights_ptr + slots, mask=slots >= 0, other=0.0)
    return slots.to(tl.float32)


@triton.jit
def _send_rows(
    rows_ptr: tl.tensor,
    weights_ptr: tl.tensor,
    slots: tl.tensor,
    return_ptr: tl.tensor,
    is_row: tl.tensor,
    K_LANES: tl.constexpr,
    HAS_WEIGHTS: tl.constexpr,
    ROWS_STRIDE: tl.constexpr,
    HIDDEN: tl.constexpr,
    COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
) -> None:
    """Sum the slots of a few rows, in k order, to where return_ptr [rows] points."""
    # Nine rows in ten have no fourth slot; these three are loaded together, ahead of the sums.
    none = tl.zeros_like(tl.max(slots, 1)) - 1
    first, entry = _next_slot(slots, none, K_LANES)  # pyright: ignore[reportGeneralTypeIssues]
    second, entry = _next_slot(slots, entry, K_LANES)  # pyright: ignore[reportGeneralTypeIssues]
    third, third_entry = _next_slot(slots, entry, K_LANES)  # pyright: ignore[reportGeneralTypeIssues]
    first_weights = _weights_of(weights_ptr, first, HAS_WEIGHTS)
    second_weights = _weights_of(weights_ptr, second, HAS_WEIGHTS)
    third_weights = _weights_of(weights_ptr, third, HAS_WEIGHTS)
    most = tl.max(tl.sum((slots >= 0).to(tl.int32), 1), 0)
    for begin in tl.range(0, HIDDEN, COLUMNS, num_stages=STAGES):
        column = begin + tl.arange(0, COLUMNS)[None, :]
        is_in = column < HIDDEN
        total = _part(rows_ptr, first, first_weights, column, is_in, ROWS_STRIDE, HAS_WEIGHTS)
        total += _part(rows_ptr, second, second_weights, column, is_in, ROWS_STRIDE, HAS_WEIGHTS)
        total += _part(rows_ptr, third, third_weights, column, is_in, ROWS_STRIDE, HAS_WEIGHTS)
        if most > 3:
            entry = third_entry
            for _ in tl.range(3, most, num_stages=1):
                later, entry = _next_slot(slots, entry, K_LANES)  # pyright: ignore[reportGeneralTypeIssues]
                weights = _weights_of(weights_ptr, later, HAS_WEIGHTS)
                total += _part(rows_ptr, later, weights, column, is_in, ROWS_STRIDE, HAS_WEIGHTS)
        value = cast(total, rows_ptr.dtype.element_ty)
        tl.store(return_ptr[:, None] + column, value, mask=is_row[:, None] & is_in)


@triton.jit
def _slots_of(
    slots_of_row_ptr: tl.tensor,
    row: tl.tensor,
    is_row: tl.tensor,
    K: tl.constexpr,
    K_LANES: tl.constexpr,
    PER_ROW: tl.constexpr,
) -> tl.tensor:
    """Load the slots of rows in k order, [rows, K_LANES], -1 for none; PER_ROW: the row itself."""
    k = tl.arange(0, K_LANES)[None, :]
    if PER_ROW:
        return tl.where(is_row[:, None] & (k == 0), row[:, None], -1)
    else:  # noqa: RET505 - what is not compiled must be the other branch
        is_entry = is_row[:, None] & (k < K)
        return tl.load(slots_of_row_ptr + row[:, None] * K + k, mask=is_entry, other=-1)


@triton.jit(do_not_specialize=VARYING)
def _combine_kernel(
    rows_ptr: tl.tensor,
    weights_ptr: tl.tensor,
    slots_of_row_ptr: tl.tensor,
    scalars_ptr: tl.tensor,
    rows_from_ptr: tl.tensor,
    row_base_ptr: tl.tensor,
    has_failed_ptr: tl.tensor,
    places_ptr: tl.tensor,
    bias_ptr: tl.tensor | None,
    out_ptr: tl.tensor,
    out_scalars_ptr: tl.tensor,
    table_ptr: tl.tensor,
    excluded_ptr: tl.tensor,
    state_ptr: tl.tensor,
    counters_ptr: tl.tensor,
    faults_ptr: tl.tensor,
    report_ptr: tl.tensor,
    own_address: tl.tensor,
    rank: tl.tensor,
    status: tl.tensor,
    buffer_index: tl.tensor,
    num_tokens: tl.tensor,
    num_senders: tl.tensor,
    max_polls: tl.tensor,
    PER_ROW: tl.constexpr,
    HAS_WEIGHTS: tl.constexpr,
    HAS_SCALARS: tl.constexpr,
    ROWS_STRIDE: tl.constexpr,
    HIDDEN: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    STAGES: tl.constexpr,
    REDUCE_STAGES: tl.constexpr,
    ITEM_ROWS: tl.constexpr,
    ITEMS: tl.constexpr,
    WAITED: tl.constexpr,
    W: tl.constexpr,
    W_LANES: tl.constexpr,
    M: tl.constexpr,
    K: tl.constexpr,
    K_LANES: tl.constexpr,
    COMBINE_BEGIN_AT: tl.constexpr,
    COMBINE_STATUS_AT: tl.constexpr,
    SUMS_READY_AT: tl.constexpr,
    RETURN_AT: tl.constexpr,
    RETURN_BYTES: tl.constexpr,
    SCALARS_AT: tl.constexpr,
) -> None:
    """Send items p, p + S, ... in sender p of S; the other programs reduce.

    W = 2: of the example of normal_plan.py, the sum of place 1 of rank 1 on rank 0 goes to row
    0 * M + 1 of rank 1, whose token 1 is there alone.
    """
    program = tl.program_id(0)
    epoch = tl.load(state_ptr + _COMBINE_EPOCH) + 1
    peers = (own_address, table_ptr, excluded_ptr, report_ptr, rank)
    source_lane = tl.arange(0, W_LANES)
    # A plan may be older than the exclusion.
    is_source = taking_part(excluded_ptr, W, W_LANES)
    # Ranks may be one combine apart.
    combine_status_at = COMBINE_STATUS_AT + (epoch & 1) * (W * 4)
    if program == 0:
        if buffer_index >= 0:
            # Another dispatch took the receive buffer, such as that of a graph: the host of a
            # replay counts nothing.
            mark = tl.load(state_ptr + _BUFFER_MARKS + buffer_index)
            is_overwritten = (status == 0) & (mark != tl.load(has_failed_ptr + 1))
            status = tl.where(is_overwritten, FAULT_HANDLE, status)
        bases = tl.load(table_ptr + source_lane, mask=is_source, other=0)
        combine_status_ptr = (bases + combine_status_at + rank * 4).to(tl.pointer_type(tl.int32))
        tl.store(combine_status_ptr, tl.zeros_like(source_lane) + status, mask=is_source)
        # Awaited below, on every rank: this one has done with the sums of its last combine.
        publish(table_ptr, COMBINE_BEGIN_AT + rank * 4, 1, W, W_LANES, excluded_ptr)
    begin_at = own_address + COMBINE_BEGIN_AT
    is_lost = await_or_abort(
        peers, begin_at, epoch, max_polls, WAIT_COMBINE_BEGIN, epoch, W, W_LANES
    )
    combine_status_ptr = int32_at(own_address + COMBINE_STATUS_AT) + (epoch & 1) * W + source_lane
    codes = tl.load(combine_status_ptr, mask=both(is_source, is_lost == 0), other=0)
    if program == 0:
        note_faults(faults_ptr, codes, is_source, W_LANES)
    has_failed = is_lost | (tl.max(codes) != 0) | (tl.load(has_failed_ptr) != 0)

    dtype = rows_ptr.dtype.element_ty
    lane = tl.arange(0, ROWS)
    k = tl.arange(0, K_LANES)[None, :]
    if program < num_senders:
        num_sent = 0
        rows_from = tl.load(rows_from_ptr + source_lane, mask=is_source, other=0)
        num_items = (tl.max(rows_from) + ITEM_ROWS - 1) // ITEM_ROWS * W
        num_items = tl.where(has_failed, 0, num_items)
        for number in tl.range(program, num_items, num_senders, num_stages=1):
            # Each rank begins elsewhere, so that they do not all store to the same one.
            source = (number + rank) % W
            item = number // W
            row_base = tl.load(row_base_ptr + source)
            num_rows = tl.sum(tl.where(source_lane == source, rows_from, 0))
            end = tl.minimum((item + 1) * ITEM_ROWS, num_rows)
            base = tl.load(table_ptr + source)
            if item * ITEM_ROWS < end:
                first = item * ITEM_ROWS + lane
                following = _slots_of(
                    slots_of_row_ptr, row_base + first, first < end, K, K_LANES, PER_ROW
                )
                for start in tl.range(item * ITEM_ROWS, end, ROWS, num_stages=1):
                    place = start + lane
                    is_row = place < end
                    row = row_base + place
                    entry_at = row[:, None] * K + k
                    is_entry = is_row[:, None] & (k < K)
                    slots = following
                    # On their way while these rows are summed.
                    following = _slots_of(
                        slots_of_row_ptr, row + ROWS, place + ROWS < end, K, K_LANES, PER_ROW
                    )
                    target = tl.cast(rank, tl.int64) * M + place
                    return_ptr = (base + RETURN_AT + target * RETURN_BYTES).to(
                        tl.pointer_type(dtype)
                    )
                    _send_rows(
                        rows_ptr,
                        weights_ptr,
                        slots,
                        tl.multiple_of(return_ptr, 16),
                        is_row,
                        K_LANES,
                        HAS_WEIGHTS,
                        ROWS_STRIDE,
                        HIDDEN,
                        COLUMNS,
                        STAGES,
                    )
                    if HAS_SCALARS:
                        scalars = tl.load(scalars_ptr + entry_at, mask=is_entry, other=0.0)
                        return_ptr = (base + SCALARS_AT + target * (4 * K_LANES)).to(
                            tl.pointer_type(tl.float32)
                        )
                        tl.store(
                            tl.multiple_of(return_ptr, 16)[:, None] + k, scalars, mask=is_entry
                        )
                num_sent += tl.where(source == rank, 0, end - item * ITEM_ROWS)
                # The release is made by one thread: it covers the stores of the others only so.
                tl.debug_barrier()
                sums_ready_ptr = int32_at(base + SUMS_READY_AT) + rank * ITEMS + item
                # Acquired by await_at() below, on the rank of the tokens.
                tl.atomic_xchg(sums_ready_ptr, mark_of(epoch), sem="release", scope="sys")
        # Of this rank alone, and read by its host.
        counter_ptr = counters_ptr + (4 if HAS_SCALARS else 3)
        tl.atomic_add(counter_ptr, tl.cast(num_sent, tl.int64), sem="relaxed")
    else:
        num_reducers = tl.num_programs(0) - num_senders
        step = num_reducers * WAITED
        for start in tl.range((program - num_senders) * WAITED, num_tokens, step, num_stages=1):
            token = start + tl.arange(0, WAITED)
            is_place = (token < num_tokens)[:, None] & is_source[None, :]
            at = token[:, None] * W + source_lane[None, :]
            places = tl.load(places_ptr + at, mask=both(is_place, has_failed == 0), other=-1)
            # Places of one rank ascend with the tokens, so they span as many at most.
            highest = tl.max(places, 0)
            lowest = tl.min(tl.where(places >= 0, places, 0x7FFFFFFF), 0)
            lowest = tl.where(highest >= 0, lowest, 0)
            # Within two items of each rank.
            items_ptr = int32_at(own_address + SUMS_READY_AT) + source_lane * ITEMS
            missing, aborted = await_at(  # pyright: ignore[reportGeneralTypeIssues]
                items_ptr + tl.maximum(lowest, 0) // ITEM_ROWS,
                items_ptr + tl.maximum(highest, 0) // ITEM_ROWS,
                highest >= 0,
                highest >= 0,
                int32_at(own_address),
                mark_of(epoch),
                tl.where(has_failed, 1, max_polls),
                "sys",
                True,
            )
            is_missing = abort_if_missing(missing, aborted, peers, WAIT_SUMS, epoch, W, W_LANES)
            is_void = has_failed | is_missing
            for first in tl.range(start, start + WAITED, ROWS, num_stages=1):
                each = first + lane
                is_each = each < num_tokens
                is_read = both(is_each, is_void == 0)
                for begin in tl.range(0, HIDDEN, COLUMNS, num_stages=REDUCE_STAGES):
                    column = begin + tl.arange(0, COLUMNS)[None, :]
                    is_element = column < HIDDEN
                    out_at = tl.cast(each, tl.int64)[:, None] * HIDDEN + column
                    total = tl.zeros([ROWS, COLUMNS], tl.float32)
                    if bias_ptr is not None:
                        is_bias = is_each[:, None] & is_element
                        total = tl.load(bias_ptr + out_at, mask=is_bias, other=0.0)
                    for source in tl.static_range(W):
                        place = tl.load(places_ptr + each * W + source, mask=is_read, other=-1)
                        return_at = source * M + tl.cast(place, tl.int64)
                        part_ptr = (own_address + RETURN_AT + return_at * RETURN_BYTES).to(
                            tl.pointer_type(dtype)
                        )
                        part_ptr = tl.multiple_of(part_ptr, 16)[:, None] + column
                        is_part = both(place >= 0, tl.load(excluded_ptr + source) == 0)
                        is_part = is_part[:, None] & is_element
                        total += tl.load(part_ptr, mask=is_part, other=0.0).to(tl.float32)
                    total = tl.where(is_void, float("nan"), total)
                    value = cast(total, dtype)
                    tl.store(out_ptr + out_at, value, mask=is_each[:, None] & is_element)
                if HAS_SCALARS:
                    entry_at = each[:, None] * K + k
                    is_entry = is_each[:, None] & (k < K)
                    scalar_ptr = (own_address + SCALARS_AT).to(tl.pointer_type(tl.float32))
                    scalars = tl.zeros([ROWS, K_LANES], tl.float32)
                    for source in tl.static_range(W):
                        place = tl.load(places_ptr + each * W + source, mask=is_read, other=-1)
                        scalar_at = (source * M + tl.cast(place, tl.int64)) * K_LANES
                        is_part = both(place >= 0, tl.load(excluded_ptr + source) == 0)
                        is_part = is_part[:, None] & is_entry
                        scalar_at = scalar_at[:, None] + k
                        scalars += tl.load(scalar_ptr + scalar_at, mask=is_part, other=0.0)
                    scalars = tl.where(is_void, float("nan"), scalars)
                    tl.store(out_scalars_ptr + entry_at, scalars, mask=is_entry)
    end_epoch(state_ptr, _COMBINE_EPOCH, _COMBINE_LEFT, epoch)


def combine_rows(
    exchange: NormalExchange,
    rows: Tensor,
    sends: Sends,
    arrivals: Arrivals,
    slots_of_row: Tensor | None,
    out: Tensor,
    *,
    slot_weights: Tensor | None = None,
    row_scalars: Tensor | None = None,
    out_scalars: Tensor | None = None,
    bias: Tensor | None = None,
    status: int = 0,
    buffer_index: int = -1,
    num_sms: int | None = None,
) -> None:
    """Sum the slots of each received row, send each sum to its token's rank, and add it up there.

    Of an excluded rank nothing is added, though the plan may have sent tokens there.

    Args:
        exchange: the memory of all ranks.
        rows: [C, H], or [R, H] if slots_of_row is None, of any floating dtype; rows may lie apart.
        sends, arrivals: of the exchange plan.
        slots_of_row: [R, K], int32, as index_rows() wrote it.
        out: [T, H], contiguous, written, in the dtype of rows; NaN if the call has failed.
        slot_weights: [C], float32, multiplied into slots, or None.
        row_scalars: [R, K], float32, that travel with the rows, and whose sums over the rows of a
            token are written to out_scalars [T, K].
        bias: [T, H], float32, contiguous, to which the sums of ranks are added, or None.
        status: why this rank refuses the call, a FaultCode, or 0.
        buffer_index: of the receive buffer whose rows the caller has used; if another dispatch has
            taken it, this rank refuses the call. -1: rows are in memory of their own.
        num_sms: programs at most, None for those of the exchange; other ranks may have others.

    Collective: yes.   Allocates nothing.   Host sync: none.   Graph capture: after one call.
    """
    if normal_combine_cuda.serves(exchange, rows, out, bias):
        normal_combine_cuda.combine_rows_cpp(
            exchange,
            rows,
            sends,
            arrivals,
            slots_of_row,
            out,
            slot_weights=slot_weights,
            row_scalars=row_scalars,
            out_scalars=out_scalars,
            bias=bias,
            status=status,
            buffer_index=buffer_index,
            num_sms=num_sms,
        )
        return
    peers, layout, offsets = exchange.peers, exchange.peers.layout, exchange.peers.layout.offsets
    num_tokens, hidden_size = out.shape
    programs = min(num_sms or peers.num_programs, peers.num_programs)
    num_senders = max(1, programs - max(1, round(programs * _REDUCER_SHARE)))
    with on_device(out):
        _combine_kernel[(max(programs, num_senders + 1),)](
            rows,
            slot_weights,
            slots_of_row,
            row_scalars,
            arrivals.rows_from,
            arrivals.row_base,
            arrivals.has_failed,
            sends.places,
            bias,
            out,
            out_scalars,
            peers.table,
            peers.excluded,
            exchange.state,
            peers.counters,
            peers.faults,
            peers.report,
            peers.own_address,
            peers.rank,
            status,
            buffer_index,
            num_tokens,
            num_senders,
            peers.max_polls,
            PER_ROW=slots_of_row is None,
            HAS_WEIGHTS=slot_weights is not None,
            HAS_SCALARS=row_scalars is not None,
            ROWS_STRIDE=rows.stride(0) if rows.shape[0] > 1 else hidden_size,
            HIDDEN=hidden_size,
            COLUMNS=min(_COLUMNS, next_power_of_two(hidden_size)),
            ROWS=_ROWS,
            STAGES=_STAGES,
            REDUCE_STAGES=_REDUCE_STAGES,
            ITEM_ROWS=layout.item_rows,
            ITEMS=layout.num_items,
            WAITED=_WAITED,
            **layout.entry_constants,
            COMBINE_BEGIN_AT=offsets["combine_begin"],
            COMBINE_STATUS_AT=offsets["combine_status"],
            SUMS_READY_AT=offsets["sums_ready"],
            RETURN_AT=offsets["returned"],
            RETURN_BYTES=layout.return_bytes,
            SCALARS_AT=offsets["returned_scalars"],
            num_warps=_WARPS,  # pyright: ignore[reportCallIssue]
            **EXACT,
        )
