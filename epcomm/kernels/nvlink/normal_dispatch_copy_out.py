"""Wait for rows that came over NVLink in normal mode, and copy them into memory of their own.

Rows that lie in a receive buffer are overwritten by later dispatches; whoever keeps them for a
backward has them copied, once. Nothing but that: rows that are used at once stay there.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from epcomm.kernels.launch import next_power_of_two
from epcomm.kernels.nvlink.common.epochs import DISPATCH_EPOCH
from epcomm.kernels.nvlink.common.exchange import VARYING
from epcomm.kernels.nvlink.common.signals import await_or_abort
from epcomm.kernels.nvlink.common.status import WAIT_ROWS
from epcomm.kernels.nvlink.normal_exchange import Arrivals, NormalExchange
from epcomm.kernels.prepared import CHANGES, PreparedLaunch

# Rows that a program copies at once, for enough loads under way.
_ROWS = 4
_WARPS = 16

_DISPATCH_EPOCH = tl.constexpr(DISPATCH_EPOCH)


@triton.jit(do_not_specialize=VARYING)
def _collect_kernel(
    out_ptr: tl.tensor,
    rows_from_ptr: tl.tensor,
    row_base_ptr: tl.tensor,
    table_ptr: tl.tensor,
    excluded_ptr: tl.tensor,
    state_ptr: tl.tensor,
    report_ptr: tl.tensor,
    own_address: tl.tensor,
    rank: tl.tensor,
    region_address: tl.tensor,
    num_senders: tl.tensor,
    max_polls: tl.tensor,
    COPIES: tl.constexpr,
    ROW_BYTES: tl.constexpr,
    WORDS: tl.constexpr,
    WORD_LANES: tl.constexpr,
    OUT_STRIDE: tl.constexpr,
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
    if COPIES:
        PER_SOURCE: tl.constexpr = (M + ROWS - 1) // ROWS
        at = tl.arange(0, WORD_LANES)[None, :]
        for block in tl.range(program, W * PER_SOURCE, num_programs, num_stages=1):
            source = block // PER_SOURCE
            place = (block % PER_SOURCE) * ROWS + tl.arange(0, ROWS)
            is_row = place < tl.load(rows_from_ptr + source)
            if tl.max(is_row.to(tl.int32)) > 0:
                mask = is_row[:, None] & (at < WORDS)
                # An excluded rank of a cached plan sent nothing; what is there is of an earlier
                # call.
                is_there = mask & (tl.load(excluded_ptr + source) == 0)
                row = tl.cast(source, tl.int64) * M + place
                from_ptr = (region_address + row * ROW_BYTES).to(
                    tl.pointer_type(out_ptr.dtype.element_ty)
                )
                from_ptr = tl.multiple_of(from_ptr, 16)[:, None] + at
                to = tl.cast(tl.load(row_base_ptr + source) + place, tl.int64) * OUT_STRIDE
                words = tl.load(from_ptr, mask=is_there, other=0)
                tl.store(out_ptr + to[:, None] + at, words, mask=mask)


def collect_rows(
    exchange: NormalExchange,
    arrivals: Arrivals,
    *,
    buffer_index: int,
    region: str = "data",
    out: Tensor | None = None,
) -> None:
    """Wait for the rows of all ranks, and copy a region of them; rows of excluded ranks are 0.

    Args:
        exchange: the memory of all ranks.
        arrivals: of the exchange plan.
        buffer_index: where the rows lie.
        region: `data` or `scales`.
        out: [R, words] of any dtype, with adjacent columns, or None: only wait.

    Collective: yes, after push_rows().   Allocates nothing.   Host sync: none.
    """
    peers, layout = exchange.peers, exchange.peers.layout
    words, stride = (1, 1) if out is None else (out.shape[1], out.stride(0))
    key = ("collect", region, words, stride, None if out is None else out.dtype)
    launch = exchange.launches.get(key)
    if launch is None:
        launch = exchange.launches[key] = PreparedLaunch(
            _collect_kernel,
            (
                CHANGES,
                CHANGES,
                CHANGES,
                peers.table,
                peers.excluded,
                exchange.state,
                peers.report,
                peers.own_address,
                peers.rank,
                CHANGES,
                peers.num_programs,
                peers.max_polls,
            ),
            dict(
                COPIES=out is not None,
                ROW_BYTES=layout.data_bytes if region == "data" else layout.scale_bytes,
                WORDS=words,
                WORD_LANES=next_power_of_two(words),
                OUT_STRIDE=stride,
                ROWS=_ROWS,
                **layout.rank_constants,
                ROWS_READY_AT=layout.offsets["rows_ready"],
                num_warps=_WARPS,
            ),
        )
    region_at = layout.buffer_offset(buffer_index) + layout.offsets[region]
    launch(
        1 if out is None else peers.num_programs,
        out,
        arrivals.rows_from,
        arrivals.row_base,
        peers.own_address + region_at,
    )
