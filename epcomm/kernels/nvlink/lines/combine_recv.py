"""Low-latency combine over NVLink, its receiver of few tokens: sums are sent in lines.

The sender is that of ll_combine_send.py, which knows from each source's header how its tokens came.
Memory order: common/lines.py.
"""

from __future__ import annotations

import triton
import triton.language as tl

from epcomm.kernels.masks import both
from epcomm.kernels.nvlink.common import constexprs, sum_codes
from epcomm.kernels.nvlink.common.constexprs import HELD_BATCH, LINE_BYTES, LINE_WORDS, PART_LINES
from epcomm.kernels.nvlink.common.dependent_launch import await_previous
from epcomm.kernels.nvlink.common.exchange import VARYING, Memory, Peers
from epcomm.kernels.nvlink.common.lines import (
    abort_if_late,
    begin_wait,
    elements_of,
    end_look,
    flag_of,
    int64_at,
    is_waiting,
    load_lines,
    word_of,
)
from epcomm.kernels.nvlink.common.signals import int32_at, living_ranks
from epcomm.kernels.nvlink.common.status import (
    FAULT_HANDLE,
    FAULT_MASK,
    FLAGS_SHIFT,
    WAIT_COMBINE,
    note_faults,
)
from epcomm.kernels.rounding import cast

# A line of a part of each sum for each thread.
WARPS = 4

_THREADS = tl.constexpr(32 * WARPS)


@triton.jit
def _added(
    totals: tl.tuple, words: tl.tuple, weight: tl.tensor | None, dtype: tl.constexpr
) -> tl.tuple:
    """Add the words of each plane to totals, float32, times a weight if there is one."""
    sums = ()
    for plane in tl.static_range(LINE_WORDS):  # pyright: ignore[reportArgumentType, reportGeneralTypeIssues]
        elements = elements_of(words[plane], dtype).to(tl.float32)
        if weight is not None:
            elements *= weight
        sums += (totals[plane] + elements,)
    return sums  # pyright: ignore[reportReturnType]


@triton.jit
def _store_sums(
    out_row_ptr: tl.tensor,
    totals: tl.tuple,
    has_failed: tl.tensor,
    part: tl.tensor,
    is_token: tl.tensor,
    HIDDEN: tl.constexpr,
    EACH: tl.constexpr,
    c: constexprs.Layout,
) -> None:
    """Store each plane of a part of a sum, rounded once; NaN if the call has failed.

    EACH: elements of a word.
    """
    for plane in tl.static_range(LINE_WORDS):  # pyright: ignore[reportArgumentType, reportGeneralTypeIssues]
        lane = tl.arange(0, PART_LINES * EACH)  # pyright: ignore[reportOperatorIssue]
        column = (part * LINE_WORDS + plane) * (c.RETURN_PLANE * EACH) + lane
        is_element = (lane < c.RETURN_PLANE * EACH) & (column < HIDDEN)
        total = tl.where(has_failed, float("nan"), totals[plane])
        total = cast(total, out_row_ptr.dtype.element_ty)  # pyright: ignore[reportAttributeAccessIssue]
        tl.store(out_row_ptr + column, total, mask=both(is_element, is_token))


@triton.jit(do_not_specialize=VARYING)
def receive_combine_lines_kernel(
    out_ptr: tl.tensor,
    weights_ptr: tl.tensor | None,
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
    OVERLAPS: tl.constexpr,
) -> None:
    """Add up a part of a token's sums in each program.

    Token 1 was sent to ranks 0 and 2: with two parts, program 3 adds the second halves of the lines
    of token 1 from ranks 0 and 2. With weights, its slots have separate lines.

    If this rank refuses to combine, it has no tokens and still waits for the sums of
    wanted_tokens, because until then ranks may read the rows that it sent.
    """
    token, part = tl.program_id(0) // c.SUM_PARTS, tl.program_id(0) % c.SUM_PARTS
    peers = Peers(*memory, own_address, buffer_address, rank, max_polls)
    # The load bypasses the L1 cache, which only the end of the previous kernel surely empties.
    epoch = tl.load(peers.state + 1, volatile=True)
    # The dispatch itself was refused, by whichever rank: no rank sends sums. If only this rank has
    # no rows, it also sends a fault code to itself.
    has_failed = tl.load(peers.state + 2, volatile=True) == 1
    # The buffer then holds lines of another batch, with another epoch.
    is_overwritten = tl.load(peers.state + HELD_BATCH, volatile=True) != batch
    is_awaited = (token < wanted_tokens) & (has_failed == 0)
    combined_ptr = int64_at(buffer_address + c.COMBINED_LINES_AT)
    lane = tl.arange(0, PART_LINES)
    line = part * c.RETURN_PLANE + lane
    is_line = both((lane < c.RETURN_PLANE) & (line < c.SUM_SCALE_LINES), is_awaited)
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    words_dtype: tl.constexpr = tl.float32 if c.SUM_BLOCK > 0 else dtype
    EACH: tl.constexpr = c.SUM_COLUMNS if c.SUM_BLOCK > 0 else 32 // dtype.primitive_bitwidth
    is_token = token < num_tokens
    out_row_ptr = out_ptr + tl.cast(token, tl.int64) * HIDDEN
    living, sent, weights = (), (), ()
    for source in tl.static_range(c.W):
        living += (tl.load(peers.excluded + source) == 0,)
    # Nothing is acquired here, which would empty the L1 cache. Of slots 1 + the rank.
    for each in tl.static_range(c.PARTS):
        noted = tl.load(
            is_sent_ptr + token * c.PARTS + each, mask=is_awaited, other=0, volatile=True
        )
        sent += (noted.to(tl.int32),)
        if weights_ptr is not None:
            weight_ptr = weights_ptr + token * c.K + each
            weights += (tl.load(weight_ptr, mask=is_token & (noted != 0), other=0.0),)

    looks = begin_wait(max_polls)
    while is_waiting(looks):
        aborted = tl.load(int32_at(own_address), volatile=True)
        missing, any_code = epoch * 0, epoch * 0
        zeros = tl.zeros([PART_LINES * EACH], tl.float32)  # pyright: ignore[reportOperatorIssue]
        totals = (zeros, zeros, zeros)
        absent = tl.zeros([PART_LINES], tl.int32)
        codes = ()
        for source in tl.static_range(c.W):
            combined = tl.load(combined_ptr + source, mask=living[source], other=0, volatile=True)
            # The epochs are compared by order: a rank may already have ended the next batch.
            is_late = living[source] & (flag_of(combined) - epoch < 0)
            missing |= tl.where(is_late, 1 << source, 0)
            any_code |= word_of(combined)
            codes += (word_of(combined),)
        for each in tl.static_range(c.PARTS):
            if c.RETURNS_SLOTS:
                first = token * c.K + each
                owner = tl.maximum(sent[each] - 1, 0)
                code = word_of(tl.load(combined_ptr + owner, volatile=True))
            else:
                first = each * c.LINE_TOKENS + token
                owner = each // c.GROUPS
                code = codes[each // c.GROUPS]
            sums = buffer_address + c.SUM_LINES_AT + first * (c.SUM_LINES * LINE_BYTES)
            is_part = both(is_line, sent[each] != 0)
            word0, word1, word2, flags = load_lines(sums, line, is_part)  # pyright: ignore[reportGeneralTypeIssues]
            is_late = flags != epoch
            if c.SUM_BLOCK > 0:
                scale_line = c.SUM_SCALE_LINES + line // c.SCALED_WORDS
                scale0, scale1, scale2, flags = load_lines(sums, scale_line, is_part)  # pyright: ignore[reportGeneralTypeIssues]
                is_late |= flags != epoch
                row_scale = None
                if c.SUM_ROW_SCALE:
                    last = line * 0 + (c.SUM_LINES - 1)
                    row_scale, _scale, _scale, flags = load_lines(sums, last, is_part)  # pyright: ignore[reportGeneralTypeIssues]
                    is_late |= flags != epoch
                word0 = sum_codes.restore_words(word0, scale0, row_scale, c)
                word1 = sum_codes.restore_words(word1, scale1, row_scale, c)
                word2 = sum_codes.restore_words(word2, scale2, row_scale, c)
            # A rank that refuses sends nothing. Of all others each row is awaited: the next batch
            # may write another rank's to the same position.
            is_absent = is_part & (code == 0) & is_late
            absent |= tl.where(is_absent, 1 << owner, 0)
            words = (word0, word1, word2)
            if weights_ptr is None:
                totals = _added(totals, words, None, words_dtype)  # pyright: ignore[reportArgumentType]
            else:
                totals = _added(totals, words, weights[each], words_dtype)  # pyright: ignore[reportArgumentType]
        missing = tl.where(is_overwritten, 0, missing | absent)
        any_code = tl.where(is_overwritten, FAULT_HANDLE, any_code)
        looks = end_look(looks, missing, aborted, _THREADS)
        if looks.late == 0:
            # Use the codes that the look found, because loading them again would take as long as
            # the look.
            if (tl.program_id(0) == 0) & (any_code != 0):
                is_source = living_ranks(peers, c)
                codes_ptr = combined_ptr + tl.arange(0, c.W_LANES)
                found = word_of(tl.load(codes_ptr, mask=is_source, other=0, volatile=True))
                found = tl.where(is_overwritten, FAULT_HANDLE, found)
                note_faults(
                    peers.faults, found & FAULT_MASK, is_source, c.W_LANES, found >> FLAGS_SHIFT
                )
            has_failed |= any_code != 0
            _store_sums(out_row_ptr, totals, has_failed, part, is_token, HIDDEN, EACH, c)  # pyright: ignore[reportArgumentType]
    if abort_if_late(peers, looks.late, WAIT_COMBINE, epoch, c):
        zeros = tl.zeros([PART_LINES * EACH], tl.float32)  # pyright: ignore[reportOperatorIssue]
        zeros = (zeros, zeros, zeros)
        _store_sums(out_row_ptr, zeros, looks.late != 0, part, is_token, HIDDEN, EACH, c)  # pyright: ignore[reportArgumentType]
    if OVERLAPS:
        await_previous()
