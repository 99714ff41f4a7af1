"""Low-latency combine over NVLink that keeps slots apart: every result travels home by itself.

For router weights that come with combine: the experts' rank does not know them, so it sends its
results as they are, and the rank of the token multiplies and adds them up, by the receivers of
ll_combine.py and lines/combine_recv.py. More bytes than sums where a token has several experts on
one rank. Slot k of token t lies at t * K + k of the memory of the token's rank, whoever sends it.

Memory order: that of ll_combine.py, whose signal and lines these are.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from epcomm.kernels.launch import next_power_of_two
from epcomm.kernels.masks import both
from epcomm.kernels.nvlink.common.dependent_launch import (
    await_previous,
    let_next_start,
    overlapping,
)
from epcomm.kernels.nvlink.common.exchange import SUM_ARRIVALS, VARYING, LowLatencyExchange
from epcomm.kernels.nvlink.common.layout import LINE_BYTES
from epcomm.kernels.nvlink.common.lines import int64_at, line_of, words_of
from epcomm.kernels.nvlink.common.signals import publish_as_last
from epcomm.kernels.nvlink.ll_combine import begin_combine, slots_of
from epcomm.kernels.prepared import CHANGES, PreparedLaunch

_WARPS = 8
# Columns of the slots of a row that a program sends at once: half a row of 7168, so that the loads
# of all K are under way together.
_COLUMNS = 4096
# The same in lines: four a thread.
_LINE_COLUMNS = 1024

_SUM_ARRIVALS = tl.constexpr(SUM_ARRIVALS)
_LINE_BYTES = tl.constexpr(LINE_BYTES)


@triton.jit
def _load_slots(
    rows_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    column: tl.tensor,
    is_element: tl.tensor,
    ROWS_STRIDE: tl.constexpr,
    K: tl.constexpr,
) -> tl.tuple:
    """Load some columns of the slots of a row: for each k if there is one, and its elements."""
    found = ()
    for k in tl.static_range(K):  # pyright: ignore[reportGeneralTypeIssues]
        place = tl.load(slots_ptr + k)
        row_ptr = rows_ptr + tl.cast(place, tl.int64) * ROWS_STRIDE
        elements = tl.load(row_ptr + column, mask=both(is_element, place >= 0), other=0.0)
        found += ((place >= 0, elements),)
    return found  # pyright: ignore[reportReturnType]


@triton.jit(do_not_specialize=VARYING)
def _send_slots_kernel(
    rows_ptr: tl.tensor,
    slots_of_row_ptr: tl.tensor,
    bases_ptr: tl.tensor,
    state_ptr: tl.tensor,
    counters_ptr: tl.tensor,
    excluded_ptr: tl.tensor,
    report_ptr: tl.tensor,
    own_address: tl.tensor,
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
    LINE_TOKENS: tl.constexpr,
    LINE_COLUMNS: tl.constexpr,
    ARRIVED_SUMS_AT: tl.constexpr,
    COMBINED_LINES_AT: tl.constexpr,
    SUM_LINES_AT: tl.constexpr,
    SUM_LINES: tl.constexpr,
    RETURN_WORDS: tl.constexpr,
    RETURN_AT: tl.constexpr,
    RETURN_BYTES: tl.constexpr,
    OVERLAPS: tl.constexpr,
) -> None:
    """Send columns of the slots of rows p, p + P, ..., counted over columns, sources, then tokens.

    Before these, likewise, in lines to sources whose tokens came in lines. Row 3 has the slots
    5 -1 2 of three experts: rows 5 and 2 go to 3 * t and 3 * t + 2 of its source, where it is t.
    """
    program = tl.program_id(0)
    num_programs = tl.num_programs(0)
    if OVERLAPS:
        await_previous()
        let_next_start()
    PIECES: tl.constexpr = (HIDDEN + COLUMNS - 1) // COLUMNS
    LINE_PIECES: tl.constexpr = (HIDDEN + LINE_COLUMNS - 1) // LINE_COLUMNS
    following = slots_of(slots_of_row_ptr, program // PIECES, M * W, W, M, K, K_LANES)
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
    if LINE_TOKENS > 0:
        for item in tl.range(program, few * (W * LINE_PIECES), num_programs, num_stages=1):
            piece, row_item = item % LINE_PIECES, item // LINE_PIECES
            source, token = row_item % W, row_item // W
            slots = slots_of(slots_of_row_ptr, row_item, few * W, W, M, K, K_LANES)
            if (tl.max(slots) >= 0) & (((sources_in_lines >> source) & 1) != 0):
                column = piece * LINE_COLUMNS + tl.arange(0, LINE_COLUMNS)
                slots_ptr = slots_of_row_ptr + (source * M + token) * K
                found = _load_slots(rows_ptr, slots_ptr, column, column < HIDDEN, ROWS_STRIDE, K)
                lines_ptr = int64_at(
                    tl.load(bases_ptr + source)
                    + SUM_LINES_AT
                    + token * (K * SUM_LINES * _LINE_BYTES)
                )
                for k in tl.static_range(K):
                    is_slot, elements = found[k]
                    words = words_of(elements)
                    word = piece * words.shape[0] + tl.arange(0, words.shape[0])
                    is_word = both(word < RETURN_WORDS, is_slot)
                    line_ptr = lines_ptr + k * SUM_LINES + word
                    tl.store(line_ptr, line_of(words, epoch), mask=is_word)
                is_counted = (source != rank) & (piece == 0)
                num_sent += tl.where(is_counted, tl.sum((slots >= 0).to(tl.int32)), 0)
    for item in tl.range(program, most * (W * PIECES), num_programs, num_stages=1):
        piece, row_item = item % PIECES, item // PIECES
        source, token = row_item % W, row_item // W
        slots = following
        next_item = (item + num_programs) // PIECES
        following = slots_of(slots_of_row_ptr, next_item, most * W, W, M, K, K_LANES)
        if (tl.max(slots) >= 0) & (((sources_in_lines >> source) & 1) == 0):
            column = piece * COLUMNS + tl.arange(0, COLUMNS)
            slots_ptr = slots_of_row_ptr + (source * M + token) * K
            found = _load_slots(rows_ptr, slots_ptr, column, column < HIDDEN, ROWS_STRIDE, K)
            base = tl.load(bases_ptr + source)
            for k in tl.static_range(K):
                is_slot, elements = found[k]
                address = base + RETURN_AT + (tl.cast(token, tl.int64) * K + k) * RETURN_BYTES
                return_ptr = address.to(tl.pointer_type(rows_ptr.dtype.element_ty))
                return_ptr = tl.multiple_of(return_ptr, 16) + column
                tl.store(return_ptr, elements, mask=both(column < HIDDEN, is_slot))
            is_counted = (source != rank) & (piece == 0)
            num_sent += tl.where(is_counted, tl.sum((slots >= 0).to(tl.int32)), 0)
    # Of this rank alone, and read by its host.
    tl.atomic_add(counters_ptr + 3, tl.cast(num_sent, tl.int64), sem="relaxed")
    # As of sums: see _send_combine_kernel().
    num_arriving = tl.maximum(W, tl.minimum(num_programs, most * (W * PIECES)))
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


def send_slots(
    exchange: LowLatencyExchange, rows: Tensor, slots_of_row: Tensor, *, batch: int, status: int
) -> None:
    """Send the result of each slot to the rank of its token.

    Args:
        exchange: the receive buffer of the dispatch.
        rows: [C, H] in the dtype that travels; rows may lie apart.
        slots_of_row: [W * M, K], int32, as receive_dispatch() wrote it.
        batch: as send_dispatch() was given it.
        status: why this rank refuses the call, a FaultCode, or 0.

    Collective: yes.   Allocates nothing.   Host sync: none.   Graph capture: after one call.
    """
    hidden_size, row_stride = rows.shape[1], rows.stride(0)
    key = ("send slots", rows.dtype, hidden_size, row_stride)
    launch = exchange.launches.get(key)
    if launch is None:
        peers, layout = exchange.peers, exchange.peers.layout
        offsets, columns = layout.offsets, max(4, next_power_of_two(hidden_size))
        launch = exchange.launches[key] = PreparedLaunch(
            _send_slots_kernel,
            (
                CHANGES,
                CHANGES,
                exchange.bases,
                exchange.state,
                peers.counters,
                peers.excluded,
                peers.report,
                peers.own_address,
                peers.rank,
                CHANGES,
                CHANGES,
            ),
            dict(
                ROWS_STRIDE=row_stride,
                **layout.entry_constants,
                HIDDEN=hidden_size,
                COLUMNS=min(_COLUMNS, columns),
                LINE_TOKENS=layout.line_tokens,
                LINE_COLUMNS=min(_LINE_COLUMNS, columns),
                ARRIVED_SUMS_AT=offsets["arrived_sums"],
                COMBINED_LINES_AT=offsets["combined_lines"],
                SUM_LINES_AT=offsets["sum_lines"],
                SUM_LINES=layout.sum_lines,
                RETURN_WORDS=layout.return_words,
                RETURN_AT=offsets["returned"],
                RETURN_BYTES=layout.return_bytes,
                num_warps=_WARPS,
                **overlapping(rows.device),
            ),
        )
    launch(exchange.peers.num_programs, rows, slots_of_row, batch, status)
