"""Low-latency combine over NVLink, its receiver of many tokens: sums, or slots, came in bulk.

It adds the sums of a token in the order of groups, in float32, and casts once, so that sums do
not depend on arrival order. Slots that have groups are added by group first, and cast for each.
Programs wait for the chunk of their tokens alone. Few tokens are received by lines/combine_recv.py.

Memory order: as in ll_combine_send.py.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from epcomm.kernels.launch import EXACT, next_power_of_two
from epcomm.kernels.masks import both
from epcomm.kernels.nvlink.common import constexprs, sum_codes
from epcomm.kernels.nvlink.common.constexprs import HELD_BATCH
from epcomm.kernels.nvlink.common.dependent_launch import await_previous, overlapping
from epcomm.kernels.nvlink.common.exchange import VARYING, LowLatencyExchange, Memory, Peers
from epcomm.kernels.nvlink.common.launches import prepare
from epcomm.kernels.nvlink.common.lines import abort_if_late, await_all, int64_at, word_of
from epcomm.kernels.nvlink.common.signals import await_signals, int32_at, living_ranks
from epcomm.kernels.nvlink.common.status import (
    FAULT_HANDLE,
    FAULT_MASK,
    FLAGS_SHIFT,
    WAIT_COMBINE,
    note_faults,
)
from epcomm.kernels.nvlink.lines.combine_recv import WARPS as LINES_WARPS
from epcomm.kernels.nvlink.lines.combine_recv import receive_combine_lines_kernel
from epcomm.kernels.nvlink.ll_combine_send import row_at
from epcomm.kernels.prepared import CHANGES
from epcomm.kernels.rounding import cast

# A receiver takes half a row at once, so that it fits on an SM beside a sender.
_WARPS, _COLUMNS = 8, 4096
# Most receivers, in multiples of P: as many as fit on the SMs without a sender.
_GRIDS = 2

_THREADS = tl.constexpr(32 * _WARPS)


@triton.jit
def _sent_parts_of(
    is_sent_ptr: tl.tensor, token: tl.tensor, num_tokens: tl.tensor, c: constexprs.Layout
) -> tl.tensor:
    """Return the parts of a token as bits: 5 is parts 0 and 2; 0 after the last token."""
    part = tl.arange(0, c.PART_LANES)
    is_part = both(part < c.PARTS, token < num_tokens)
    # The load bypasses the L1 cache, which a later wait empties.
    is_sent = tl.load(is_sent_ptr + token * c.PARTS + part, mask=is_part, other=0, volatile=True)
    return tl.sum((is_sent != 0).to(tl.int32) << part)


@triton.jit
def _await_codes(
    peers: Peers, epoch: tl.tensor, is_overwritten: tl.tensor, c: constexprs.Layout
) -> tl.tuple:
    """Wait for the line of combine of every rank; return their codes, [W_LANES], and if it is lost.

    is_overwritten: the buffer holds another batch, and nothing comes; its code is a fault's.
    """
    late = epoch * 0
    if is_overwritten == 0:
        late = await_all(peers, c.COMBINED_LINES_AT, 1, epoch, c, _THREADS)  # pyright: ignore[reportArgumentType]
    is_lost = abort_if_late(peers, late, WAIT_COMBINE, epoch, c)
    is_source = living_ranks(peers, c)
    combined_ptr = int64_at(peers.buffer_address + c.COMBINED_LINES_AT) + tl.arange(0, c.W_LANES)
    lines = tl.load(combined_ptr, mask=both(is_source, is_lost == 0), other=0, volatile=True)
    return tl.where(is_overwritten, FAULT_HANDLE, word_of(lines)), is_lost  # pyright: ignore[reportReturnType]


@triton.jit
def _lowest_group(
    parts: tl.tensor, groups_ptr: tl.tensor, token: tl.tensor, c: constexprs.Layout
) -> tl.tensor:
    """Return the parts of the lowest group: of parts 7 with the groups 3 1 1 these are 6."""
    part = tl.arange(0, c.PART_LANES)
    is_part = ((parts >> part) & 1) != 0
    groups = tl.load(groups_ptr + token * c.PARTS + part, mask=is_part, other=0x7FFFFFFF)
    return tl.sum(tl.where(is_part & (groups == tl.min(groups)), 1 << part, 0))


@triton.jit
def _sum_of_parts(
    parts: tl.tensor,
    weights_ptr: tl.tensor | None,
    buffer_address: tl.tensor,
    token: tl.tensor,
    column: tl.tensor,
    is_element: tl.tensor,
    block: tl.tensor,
    is_block: tl.tensor,
    dtype: tl.constexpr,
    c: constexprs.Layout,
) -> tl.tensor:
    """Return some columns of the sum of the parts of a token, in float32.

    block, is_block: of quantised sums, whose columns are [blocks, SUM_BLOCK].
    """
    total = tl.zeros(column.shape, tl.float32)
    for index in tl.static_range(c.PARTS):  # pyright: ignore[reportGeneralTypeIssues]
        is_there = (parts >> index) & 1 != 0
        place = index * c.M + tl.cast(token, tl.int64)
        if weights_ptr is not None:
            place = tl.cast(token, tl.int64) * c.PARTS + index
        if c.SUM_ROW_SCALE:
            row_ptr = row_at(buffer_address + c.RETURNED_AT, place, tl.int32, c)
            part = sum_codes.load_row(row_ptr, block, is_there, c)
        elif c.SUM_BLOCK > 0:
            row_ptr = row_at(buffer_address + c.RETURNED_AT, place, tl.uint8, c)
            scales_ptr = sum_codes.scales_of_sum(row_ptr, c) + block
            codes = tl.load(row_ptr + column, mask=both(is_element, is_there), other=0)
            scales = tl.load(scales_ptr, mask=both(is_block, is_there), other=0)
            part = sum_codes.restore_sums(codes, scales[:, None], c)
        else:
            part_ptr = row_at(buffer_address + c.RETURNED_AT, place, dtype, c) + column
            part = tl.load(part_ptr, mask=both(is_element, is_there), other=0.0).to(tl.float32)
        if weights_ptr is not None:
            part *= tl.load(weights_ptr + token * c.PARTS + index, mask=is_there, other=0.0)
        total += part
    return total


@triton.jit(do_not_specialize=VARYING)
def _receive_combine_kernel(
    out_ptr: tl.tensor,
    weights_ptr: tl.tensor | None,
    groups_ptr: tl.tensor | None,
    is_sent_ptr: tl.tensor,
    memory: Memory,
    own_address: tl.tensor,
    buffer_address: tl.tensor,
    rank: tl.tensor,
    max_polls: tl.tensor,
    num_tokens: tl.tensor,
    wanted_tokens: tl.tensor,
    batch: tl.tensor,
    c: constexprs.Layout,
    HIDDEN: tl.constexpr,
    COLUMNS: tl.constexpr,
    OVERLAPS: tl.constexpr,
) -> None:
    """Add up pieces p, p + P, ... of rows in program p of P, when the chunk of the token is there.

    Token 1 was sent to ranks 0 and 2: the sum of rows 1 and 2 * M + 1 of `returned`. With weights,
    and two slots a token: that of rows 2 and 3, times the weights of token 1.
    """
    program = tl.program_id(0)
    peers = Peers(*memory, own_address, buffer_address, rank, max_polls)
    PIECES: tl.constexpr = (HIDDEN + COLUMNS - 1) // COLUMNS  # pyright: ignore[reportAssignmentType]
    # The load bypasses the L1 cache, which only the end of the previous kernel surely empties.
    epoch = tl.load(peers.state + 1, volatile=True)
    has_no_rows = tl.load(peers.state + 2, volatile=True)
    following = _sent_parts_of(is_sent_ptr, program // PIECES, num_tokens, c)
    is_overwritten = tl.load(peers.state + HELD_BATCH, volatile=True) != batch
    codes, is_lost = _await_codes(peers, epoch, is_overwritten, c)  # pyright: ignore[reportGeneralTypeIssues]
    is_source = living_ranks(peers, c)
    if program == 0:
        note_faults(peers.faults, codes & FAULT_MASK, is_source, c.W_LANES, codes >> FLAGS_SHIFT)
    has_failed = (tl.max(tl.where(is_source, codes, 0)) != 0) | (has_no_rows != 0)
    # A rank that refuses sends no sums, and none does if the dispatch itself was refused.
    is_awaited = both(is_source & (codes == 0), (has_no_rows != 1) & (is_lost == 0))

    dtype = out_ptr.dtype.element_ty
    awaited = -1
    for item in tl.range(program, wanted_tokens * PIECES, tl.num_programs(0), num_stages=1):
        token, piece = item // PIECES, item % PIECES
        parts = following
        next_token = (item + tl.num_programs(0)) // PIECES
        following = _sent_parts_of(is_sent_ptr, next_token, num_tokens, c)
        chunk = token // c.CHUNK_TOKENS
        if (chunk != awaited) & (is_lost == 0):
            signals_ptr = int32_at(buffer_address + c.ARRIVED_SUMS_AT)
            signals_ptr = signals_ptr + tl.arange(0, c.W_LANES) * c.NUM_CHUNKS + chunk
            is_lost |= await_signals(peers, signals_ptr, is_awaited, WAIT_COMBINE, epoch, c)
            awaited = chunk
        column = sum_codes.columns_of_sum(piece, COLUMNS, c)
        block = sum_codes.blocks_of_sum(piece, COLUMNS, c)
        is_element, is_block = column < HIDDEN, block * c.SUM_BLOCK < HIDDEN
        # Loads start before it is known whether the call has failed.
        if groups_ptr is None:
            total = _sum_of_parts(
                *(parts, weights_ptr, buffer_address, token, column, is_element, block, is_block),
                *(dtype, c),
            )
        else:
            total, left = tl.zeros([COLUMNS], tl.float32), parts
            while left != 0:
                group = _lowest_group(left, groups_ptr, token, c)
                partial = _sum_of_parts(
                    *(group, weights_ptr, buffer_address, token, column, is_element),
                    *(block, is_block, dtype, c),
                )
                total += cast(partial, dtype).to(tl.float32)
                left &= ~group
        total = tl.where(has_failed | is_lost, float("nan"), total)
        out_row_ptr = out_ptr + tl.cast(token, tl.int64) * HIDDEN
        is_stored = both(is_element, token < num_tokens)
        tl.store(out_row_ptr + column, cast(total, dtype), mask=is_stored)
    if OVERLAPS:
        await_previous()


def receive_combine(
    exchange: LowLatencyExchange,
    out: Tensor,
    is_sent: Tensor,
    topk_weights: Tensor | None = None,
    topk_groups: Tensor | None = None,
    *,
    wanted_tokens: int,
    in_lines: bool,
    batch: int,
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
        topk_groups: [T, K], int32, contiguous: the groups of these slots, from 0, or None. The sum
            of each group is cast, and they are added in ascending order; not with in_lines.
        wanted_tokens: T of the dispatch. If this rank refuses, it still waits for their sums,
            because until then ranks may read the rows that it sent.
        in_lines: as passed to send_dispatch(), with `batch`.

    Collective: yes, after send_combine().   Allocates nothing.   Host sync: none.
    """
    num_tokens, hidden_size = out.shape
    peers = exchange.peers
    terms = (topk_weights, is_sent) if in_lines else (topk_weights, topk_groups, is_sent)
    key = ("receive sums", in_lines, out.dtype, hidden_size, *(each is None for each in terms))
    launch = exchange.launches.get(key)
    if launch is None:
        kernel: object = receive_combine_lines_kernel
        constants = {"num_warps": LINES_WARPS}
        if not in_lines:
            columns = max(peers.layout.sum_block, min(_COLUMNS, next_power_of_two(hidden_size)))
            kernel, constants = _receive_combine_kernel, {"num_warps": _WARPS, "COLUMNS": columns}
        launch = exchange.launches[key] = prepare(
            *(exchange, kernel, [CHANGES] * (1 + len(terms)), 3),
            HIDDEN=hidden_size,
            **constants,
            **EXACT,
            **overlapping(out.device),
        )
    # Without tokens, one program still receives the faults.
    if in_lines:
        grid = max(1, wanted_tokens) * peers.layout.sum_parts
    else:
        pieces = wanted_tokens * -(-hidden_size // _COLUMNS)
        grid = max(1, min(pieces, _GRIDS * peers.num_programs))
    launch(grid, out, *terms, num_tokens, wanted_tokens, batch)
