"""Wait for rows that came over NVLink in normal mode, and copy them into memory of their own.

Rows that lie in a receive buffer are overwritten by later dispatches; whoever keeps them for a
backward has them copied, once. Nothing but that: rows that are used at once stay there.
"""

from __future__ import annotations

from math import gcd

import triton
import triton.language as tl
from torch import Tensor

from epcomm.kernels.launch import next_power_of_two
from epcomm.kernels.masks import both
from epcomm.kernels.nvlink.common.epochs import DISPATCH_EPOCH
from epcomm.kernels.nvlink.common.exchange import VARYING
from epcomm.kernels.nvlink.common.plan_parts import Arrivals
from epcomm.kernels.nvlink.common.signals import await_or_abort
from epcomm.kernels.nvlink.common.status import WAIT_ROWS
from epcomm.kernels.nvlink.normal_exchange import NormalExchange
from epcomm.kernels.prepared import CHANGES, PreparedLaunch

# Rows that a program copies at once, for enough loads under way.
_ROWS = 4
_WARPS = 16
# The widest access.
_VECTOR_BYTES = 16

_DISPATCH_EPOCH = tl.constexpr(DISPATCH_EPOCH)


@triton.jit
def _copy_parts(
    region_address: tl.tensor,
    out_address: tl.tensor,
    from_row: tl.tensor,
    to_row: tl.tensor,
    is_row: tl.tensor,
    is_there: tl.tensor,
    FROM_BYTES: tl.constexpr,
    TO_BYTES: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    WORDS: tl.constexpr,
    WORD_LANES: tl.constexpr,
    WORD: tl.constexpr,
) -> None:
    """Copy WORDS words of each row, zeros for rows that are not there."""
    at = tl.arange(0, WORD_LANES)[None, :]
    pointer = tl.pointer_type(WORD)  # pyright: ignore[reportArgumentType]
    from_ptr = (region_address + from_row * FROM_BYTES).to(pointer)
    from_ptr = tl.multiple_of(from_ptr, 16)[:, None] + at
    to_ptr = (out_address + tl.cast(to_row, tl.int64) * TO_BYTES).to(pointer)
    to_ptr = tl.multiple_of(to_ptr, ALIGNMENT)[:, None] + at
    is_word = at < WORDS
    words = tl.load(from_ptr, mask=is_there[:, None] & is_word, other=0)
    tl.store(to_ptr, words, mask=is_row[:, None] & is_word)


@triton.jit(do_not_specialize=VARYING)
def _collect_kernel(
    rows_from_ptr: tl.tensor,
    row_base_ptr: tl.tensor,
    table_ptr: tl.tensor,
    excluded_ptr: tl.tensor,
    state_ptr: tl.tensor,
    report_ptr: tl.tensor,
    own_address: tl.tensor,
    rank: tl.tensor,
    region_address: tl.tensor,
    out_address: tl.tensor,
    scales_address: tl.tensor,
    out_scales_address: tl.tensor,
    num_senders: tl.tensor,
    max_polls: tl.tensor,
    ROW_BYTES: tl.constexpr,
    OUT_BYTES: tl.constexpr,
    OUT_ALIGNMENT: tl.constexpr,
    WORDS: tl.constexpr,
    WORD_LANES: tl.constexpr,
    WORD: tl.constexpr,
    SCALE_BYTES: tl.constexpr,
    OUT_SCALE_BYTES: tl.constexpr,
    OUT_SCALE_ALIGNMENT: tl.constexpr,
    SCALE_WORDS: tl.constexpr,
    SCALE_LANES: tl.constexpr,
    SCALE_WORD: tl.constexpr,
    ROWS: tl.constexpr,
    W: tl.constexpr,
    W_LANES: tl.constexpr,
    M: tl.constexpr,
    ROWS_READY_AT: tl.constexpr,
) -> None:
    """Copy ROWS rows of one source at once. Place 2 of source 1 with row_base 5 becomes row 7."""
    program, num_programs = tl.program_id(0), tl.num_programs(0)
    epoch = tl.load(state_ptr + _DISPATCH_EPOCH)
    peers = (own_address, table_ptr, excluded_ptr, report_ptr, rank)
    is_lost = await_or_abort(
        peers,
        own_address + ROWS_READY_AT,
        epoch * num_senders,
        max_polls,
        WAIT_ROWS,
        epoch,
        W,
        W_LANES,
    )
    if is_lost:
        return
    if WORDS > 0:
        PER_SOURCE: tl.constexpr = (M + ROWS - 1) // ROWS
        for block in tl.range(program, W * PER_SOURCE, num_programs, num_stages=1):
            source = block // PER_SOURCE
            place = (block % PER_SOURCE) * ROWS + tl.arange(0, ROWS)
            is_row = place < tl.load(rows_from_ptr + source)
            if tl.max(is_row.to(tl.int32)) > 0:
                # An excluded rank of a cached plan sent nothing; what is there is of an earlier
                # call.
                is_there = both(is_row, tl.load(excluded_ptr + source) == 0)
                row = tl.cast(source, tl.int64) * M + place
                to = tl.load(row_base_ptr + source) + place
                _copy_parts(
                    region_address,
                    out_address,
                    row,
                    to,
                    is_row,
                    is_there,
                    ROW_BYTES,
                    OUT_BYTES,
                    OUT_ALIGNMENT,
                    WORDS,
                    WORD_LANES,
                    WORD,
                )
                if SCALE_WORDS > 0:
                    _copy_parts(
                        scales_address,
                        out_scales_address,
                        row,
                        to,
                        is_row,
                        is_there,
                        SCALE_BYTES,
                        OUT_SCALE_BYTES,
                        OUT_SCALE_ALIGNMENT,
                        SCALE_WORDS,
                        SCALE_LANES,
                        SCALE_WORD,
                    )


def collect_rows(
    exchange: NormalExchange,
    arrivals: Arrivals,
    *,
    buffer_index: int,
    out: Tensor | None = None,
    scales: Tensor | None = None,
) -> None:
    """Wait for the rows of all ranks, and copy them; rows of excluded ranks are 0.

    Args:
        exchange: the memory of all ranks.
        arrivals: of the exchange plan.
        buffer_index: where the rows lie.
        out: [R, columns] of any dtype, contiguous, or None: only wait.
        scales: [R, columns] of any dtype, contiguous, to which scales are copied, or None.

    Collective: yes, after push_rows().   Allocates nothing.   Host sync: none.
    """
    peers, layout = exchange.peers, exchange.peers.layout
    parts = tuple(0 if each is None else each.shape[1] * each.itemsize for each in (out, scales))
    key = ("collect", parts)
    launch = exchange.launches.get(key)
    if launch is None:
        launch = exchange.launches[key] = _prepared(exchange, *parts)
    begin = peers.own_address + layout.buffer_offset(buffer_index)
    data_at, scales_at = begin + layout.offsets["data"], begin + layout.offsets["scales"]
    # Addresses, for a view of a tensor as words takes 3 us. Never 0, as of no rows: Triton would
    # take it for 32 bits, and no later address would fit.
    launch(
        1 if out is None else exchange.num_copiers,
        arrivals.rows_from,
        arrivals.row_base,
        data_at,
        data_at if out is None else out.data_ptr() or data_at,
        scales_at,
        scales_at if scales is None else scales.data_ptr() or scales_at,
    )


def _prepared(exchange: NormalExchange, row_bytes: int, scale_bytes: int) -> PreparedLaunch:
    """Prepare the kernel for so many bytes of each row and of its scales."""
    peers, layout = exchange.peers, exchange.peers.layout
    (words, word), (scale_words, scale_word) = _words_of(row_bytes), _words_of(scale_bytes)
    return PreparedLaunch(
        _collect_kernel,
        (
            CHANGES,
            CHANGES,
            peers.table,
            peers.excluded,
            exchange.state,
            peers.report,
            peers.own_address,
            peers.rank,
            *(CHANGES,) * 4,
            peers.num_programs,
            peers.max_polls,
        ),
        dict(
            ROW_BYTES=layout.data_bytes,
            OUT_BYTES=row_bytes,
            OUT_ALIGNMENT=gcd(row_bytes, _VECTOR_BYTES),
            WORDS=words,
            WORD_LANES=next_power_of_two(max(words, 1)),
            WORD=word,
            SCALE_BYTES=layout.scale_bytes,
            OUT_SCALE_BYTES=scale_bytes,
            OUT_SCALE_ALIGNMENT=gcd(scale_bytes, _VECTOR_BYTES),
            SCALE_WORDS=scale_words,
            SCALE_LANES=next_power_of_two(max(scale_words, 1)),
            SCALE_WORD=scale_word,
            ROWS=_ROWS,
            **layout.rank_constants,
            ROWS_READY_AT=layout.offsets["rows_ready"],
            num_warps=_WARPS,
        ),
    )


def _words_of(num_bytes: int) -> tuple[int, tl.dtype]:
    """Return how many words a row of so many bytes is, and the widest that divide it."""
    for word in (tl.int32, tl.int16):
        size = word.primitive_bitwidth // 8
        if num_bytes % size == 0:
            return num_bytes // size, word
    return num_bytes, tl.uint8
