"""Low-latency combine over NVLink that keeps slots apart: every result returns separately.

It serves router weights that are passed to combine: the experts' rank does not know them, so it
sends its results as they are, and the rank of the token multiplies and adds them up, by the
receivers of ll_combine.py and lines/combine_recv.py. It sends more bytes than sums do where a token
has several experts on one rank. Slot k of token t is at t * K + k of the memory of the token's
rank, whoever sends it.

Memory order: that of ll_combine.py, whose signal and lines these are.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from epcomm.kernels.launch import next_power_of_two
from epcomm.kernels.masks import both
from epcomm.kernels.nvlink.common import constexprs
from epcomm.kernels.nvlink.common.dependent_launch import (
    await_previous,
    let_next_start,
    overlapping,
)
from epcomm.kernels.nvlink.common.exchange import (
    SUM_ARRIVALS,
    VARYING,
    LowLatencyExchange,
    Memory,
    Peers,
)
from epcomm.kernels.nvlink.common.launches import prepare
from epcomm.kernels.nvlink.common.layout import LINE_BYTES
from epcomm.kernels.nvlink.common.lines import int64_at, line_of, words_of
from epcomm.kernels.nvlink.common.signals import publish_as_last
from epcomm.kernels.nvlink.ll_combine import begin_combine, slots_of
from epcomm.kernels.prepared import CHANGES

_WARPS = 8
# Columns of the slots of a row that a program sends at a time: half a row of 7168, so that loads
# of all K are in flight together.
_COLUMNS = 4096
# Columns that a program sends in lines: four for each thread.
_LINE_COLUMNS = 1024

_SUM_ARRIVALS = tl.constexpr(SUM_ARRIVALS)
_LINE_BYTES = tl.constexpr(LINE_BYTES)


@triton.jit
def _load_slots(
    rows_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    column: tl.tensor,
    is_element: tl.tensor,
    c: constexprs.Layout,
    results: constexprs.Results,
) -> tl.tuple:
    """Load some columns of the slots of a row: for each k if there is one, and its elements."""
    found = ()
    for k in tl.static_range(c.K):  # pyright: ignore[reportGeneralTypeIssues]
        place = tl.load(slots_ptr + k)
        row_ptr = rows_ptr + tl.cast(place, tl.int64) * results.ROWS_STRIDE
        elements = tl.load(row_ptr + column, mask=both(is_element, place >= 0), other=0.0)
        found += ((place >= 0, elements),)
    return found  # pyright: ignore[reportReturnType]


@triton.jit(do_not_specialize=VARYING)
def _send_slots_kernel(
    rows_ptr: tl.tensor,
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
    """Send columns of the slots of rows p, p + P, ..., counted over columns, sources, then tokens.

    Before these, likewise, in lines to sources whose tokens arrived in lines. Row 3 has the slots
    5 -1 2 of three experts: rows 5 and 2 go to 3 * t and 3 * t + 2 of its source, where it is t.
    """
    program = tl.program_id(0)
    peers = Peers(*memory, own_address, buffer_address, rank, max_polls)
    num_programs = tl.num_programs(0)
    if OVERLAPS:
        await_previous()
        let_next_start()
    PIECES: tl.constexpr = (results.HIDDEN + results.COLUMNS - 1) // results.COLUMNS
    LINE_PIECES: tl.constexpr = (results.HIDDEN + results.LINE_COLUMNS - 1) // results.LINE_COLUMNS
    following = slots_of(slots_of_row_ptr, program // PIECES, c.M * c.W, c)
    epoch, is_idle, most, few, sources_in_lines, in_bulk = begin_combine(  # pyright: ignore[reportGeneralTypeIssues]
        peers, batch, status, c
    )
    if is_idle:
        return

    num_sent = 0
    if c.LINE_TOKENS > 0:
        for item in tl.range(program, few * (c.W * LINE_PIECES), num_programs, num_stages=1):
            piece, row_item = item % LINE_PIECES, item // LINE_PIECES
            source, token = row_item % c.W, row_item // c.W
            slots = slots_of(slots_of_row_ptr, row_item, few * c.W, c)
            if (tl.max(slots) >= 0) & (((sources_in_lines >> source) & 1) != 0):
                column = piece * results.LINE_COLUMNS + tl.arange(0, results.LINE_COLUMNS)
                slots_ptr = slots_of_row_ptr + (source * c.M + token) * c.K
                found = _load_slots(
                    rows_ptr, slots_ptr, column, column < results.HIDDEN, c, results
                )
                lines_ptr = int64_at(
                    tl.load(peers.bases + source)
                    + c.SUM_LINES_AT
                    + token * (c.K * c.SUM_LINES * _LINE_BYTES)
                )
                for k in tl.static_range(c.K):
                    is_slot, elements = found[k]
                    words = words_of(elements)
                    word = piece * words.shape[0] + tl.arange(0, words.shape[0])
                    is_word = both(word < c.RETURN_WORDS, is_slot)
                    line_ptr = lines_ptr + k * c.SUM_LINES + word
                    tl.store(line_ptr, line_of(words, epoch), mask=is_word)
                is_counted = (source != rank) & (piece == 0)
                num_sent += tl.where(is_counted, tl.sum((slots >= 0).to(tl.int32)), 0)
    for item in tl.range(program, most * (c.W * PIECES), num_programs, num_stages=1):
        piece, row_item = item % PIECES, item // PIECES
        source, token = row_item % c.W, row_item // c.W
        slots = following
        next_item = (item + num_programs) // PIECES
        following = slots_of(slots_of_row_ptr, next_item, most * c.W, c)
        if (tl.max(slots) >= 0) & (((sources_in_lines >> source) & 1) == 0):
            column = piece * results.COLUMNS + tl.arange(0, results.COLUMNS)
            slots_ptr = slots_of_row_ptr + (source * c.M + token) * c.K
            found = _load_slots(rows_ptr, slots_ptr, column, column < results.HIDDEN, c, results)
            base = tl.load(peers.bases + source)
            for k in tl.static_range(c.K):
                is_slot, elements = found[k]
                address = (
                    base + c.RETURNED_AT + (tl.cast(token, tl.int64) * c.K + k) * c.RETURN_BYTES
                )
                return_ptr = address.to(tl.pointer_type(rows_ptr.dtype.element_ty))
                return_ptr = tl.multiple_of(return_ptr, 16) + column
                tl.store(return_ptr, elements, mask=both(column < results.HIDDEN, is_slot))
            is_counted = (source != rank) & (piece == 0)
            num_sent += tl.where(is_counted, tl.sum((slots >= 0).to(tl.int32)), 0)
    # The counter belongs to this rank alone, and its host reads it.
    tl.atomic_add(peers.counters + 3, tl.cast(num_sent, tl.int64), sem="relaxed")
    # The number is the same as for sums: see _send_combine_kernel().
    num_arriving = tl.maximum(c.W, tl.minimum(num_programs, most * (c.W * PIECES)))
    if (program < num_arriving) & (tl.max(in_bulk.to(tl.int32)) > 0):
        publish_as_last(peers, _SUM_ARRIVALS, num_arriving, c.ARRIVED_SUMS_AT, epoch, in_bulk, c)


def send_slots(
    exchange: LowLatencyExchange, rows: Tensor, slots_of_row: Tensor, *, batch: int, status: int
) -> None:
    """Send the result of each slot to the rank of its token.

    Args:
        exchange: the receive buffer of the dispatch.
        rows: [C, H] in the dtype that is sent; rows may have gaps between them.
        slots_of_row: [W * M, K], int32, as receive_dispatch() wrote it.
        batch: as send_dispatch() was given it.
        status: why this rank refuses the call, a FaultCode, or 0.

    Collective: yes.   Allocates nothing.   Host sync: none.   Graph capture: after one call.
    """
    hidden_size, row_stride = rows.shape[1], rows.stride(0)
    key = ("send slots", rows.dtype, hidden_size, row_stride)
    launch = exchange.launches.get(key)
    if launch is None:
        columns = max(4, next_power_of_two(hidden_size))
        launch = exchange.launches[key] = prepare(
            exchange,
            _send_slots_kernel,
            [CHANGES] * 2,
            2,
            results=constexprs.constants(
                constexprs.Results,
                ROWS_STRIDE=row_stride,
                HIDDEN=hidden_size,
                COLUMNS=min(_COLUMNS, columns),
                LINE_COLUMNS=min(_LINE_COLUMNS, columns),
                PER_ROW=False,
            ),
            num_warps=_WARPS,
            **overlapping(rows.device),
        )
    launch(exchange.peers.num_programs, rows, slots_of_row, batch, status)
