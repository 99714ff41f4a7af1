"""Low-latency combine over NVLink, its receiver of few tokens: sums are sent in lines.

The sender is that of ll_combine.py, which learned from each source's header how its tokens came.
Memory order: common/lines.py.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from epcomm.kernels.launch import EXACT, next_power_of_two
from epcomm.kernels.masks import both
from epcomm.kernels.nvlink.common import constexprs
from epcomm.kernels.nvlink.common.dependent_launch import await_previous, overlapping
from epcomm.kernels.nvlink.common.exchange import (
    HELD_BATCH,
    VARYING,
    LowLatencyExchange,
    Memory,
    Peers,
)
from epcomm.kernels.nvlink.common.launches import prepare
from epcomm.kernels.nvlink.common.layout import LINE_BYTES, LowLatencyLayout
from epcomm.kernels.nvlink.common.lines import (
    abort_if_late,
    begin_wait,
    elements_of,
    end_look,
    flag_of,
    int64_at,
    is_waiting,
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
from epcomm.kernels.prepared import CHANGES, PreparedLaunch
from epcomm.kernels.rounding import cast

# Words of a sum that a program adds up: 16 bytes of lines of each rank for each thread.
_WORDS = 256
_WARPS = 4

_THREADS = tl.constexpr(32 * _WARPS)
_HELD_BATCH = tl.constexpr(HELD_BATCH)
_LINE_BYTES = tl.constexpr(LINE_BYTES)


@triton.jit(do_not_specialize=VARYING)
def _receive_combine_lines_kernel(
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
    PARTS: tl.constexpr,
    WORDS: tl.constexpr,
    OVERLAPS: tl.constexpr,
) -> None:
    """Add up a part of a token's sums in each program.

    Token 1 was sent to ranks 0 and 2: with two parts, program 3 adds the second halves of the lines
    of token 1 from ranks 0 and 2. With weights, its slots have separate lines.
    """
    token, part = tl.program_id(0) // PARTS, tl.program_id(0) % PARTS
    peers = Peers(*memory, own_address, buffer_address, rank, max_polls)
    # The load bypasses the L1 cache, which only the end of the previous kernel surely empties.
    epoch = tl.load(peers.state + 1, volatile=True)
    # The dispatch itself was refused, by whichever rank: no rank sends sums. If only this rank has
    # no rows, it also sends a fault code to itself.
    has_failed = tl.load(peers.state + 2, volatile=True) == 1
    # The buffer then holds lines of another batch, with another epoch.
    is_overwritten = tl.load(peers.state + _HELD_BATCH, volatile=True) != batch
    is_awaited = (token < wanted_tokens) & (has_failed == 0)
    combined_ptr = int64_at(buffer_address + c.COMBINED_LINES_AT)
    word = part * WORDS + tl.arange(0, WORDS)
    is_word = both(word < c.RETURN_WORDS, is_awaited)
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    ELEMENTS: tl.constexpr = WORDS * 32 // dtype.primitive_bitwidth
    column = part * ELEMENTS + tl.arange(0, ELEMENTS)
    is_element = both(column < HIDDEN, token < num_tokens)
    out_row_ptr = out_ptr + tl.cast(token, tl.int64) * HIDDEN
    living, sent, weights = (), (), ()
    for source in tl.static_range(c.W):
        living += (tl.load(peers.excluded + source) == 0,)
    # Nothing is acquired here, which would empty the L1 cache.
    if weights_ptr is None:
        for source in tl.static_range(c.W):
            sent_ptr = is_sent_ptr + token * c.W + source
            sent += (tl.load(sent_ptr, mask=is_awaited, other=0, volatile=True) != 0,)
    else:
        for k in tl.static_range(c.K):
            # 1 + the rank that has the slot.
            noted = tl.load(is_sent_ptr + token * c.K + k, mask=is_awaited, other=0, volatile=True)
            is_there = (token < num_tokens) & (noted != 0)
            sent += (noted.to(tl.int32),)
            weights += (tl.load(weights_ptr + token * c.K + k, mask=is_there, other=0.0),)

    late, polls_left, num_looks, end_ns = begin_wait(max_polls)  # pyright: ignore[reportGeneralTypeIssues]
    while is_waiting(late, polls_left):
        aborted = tl.load(int32_at(own_address), volatile=True)
        late, any_code = epoch * 0, epoch * 0
        total = tl.zeros([ELEMENTS], tl.float32)
        absent = tl.zeros([WORDS], tl.int32)
        for source in tl.static_range(c.W):
            combined = tl.load(combined_ptr + source, mask=living[source], other=0, volatile=True)
            # The epochs are compared by order: a rank may already have ended the next batch.
            is_late = living[source] & (flag_of(combined) - epoch < 0)
            late |= tl.where(is_late, 1 << source, 0)
            any_code |= word_of(combined)
            if weights_ptr is None:
                lines_ptr = int64_at(buffer_address + c.SUM_LINES_AT) + word
                lines_ptr += (source * c.LINE_TOKENS + token) * c.SUM_LINES
                is_part = both(is_word, sent[source])
                lines = tl.load(lines_ptr, mask=is_part, other=0, volatile=True)
                # A rank that refuses sends no sums.
                is_absent = is_part & (word_of(combined) == 0) & (flag_of(lines) != epoch)
                absent |= tl.where(is_absent, 1 << source, 0)
                total += elements_of(word_of(lines), dtype).to(tl.float32)
        if weights_ptr is not None:
            for k in tl.static_range(c.K):
                owner = sent[k] - 1
                lines_ptr = int64_at(buffer_address + c.SUM_LINES_AT) + word
                lines_ptr += (token * c.K + k) * c.SUM_LINES
                is_part = both(is_word, owner >= 0)
                lines = tl.load(lines_ptr, mask=is_part, other=0, volatile=True)
                # A rank that refuses sends no slots. Those of all others are awaited: the next
                # batch may write another rank's to the same position.
                code = tl.load(combined_ptr + owner, mask=owner >= 0, other=0, volatile=True)
                is_absent = is_part & (word_of(code) == 0) & (flag_of(lines) != epoch)
                absent |= tl.where(is_absent, 1 << tl.maximum(owner, 0), 0)
                total += elements_of(word_of(lines), dtype).to(tl.float32) * weights[k]
        late = tl.where(is_overwritten, 0, late | tl.max(absent))
        any_code = tl.where(is_overwritten, FAULT_HANDLE, any_code)
        late, polls_left, num_looks, end_ns = end_look(  # pyright: ignore[reportGeneralTypeIssues]
            late,
            aborted,
            polls_left,
            num_looks,
            end_ns,
            _THREADS,
        )
        if late == 0:
            # Use the codes that the look found, because loading them again would take as long as
            # the look.
            if (tl.program_id(0) == 0) & (any_code != 0):
                is_source = living_ranks(peers, c)
                codes_ptr = combined_ptr + tl.arange(0, c.W_LANES)
                codes = word_of(tl.load(codes_ptr, mask=is_source, other=0, volatile=True))
                codes = tl.where(is_overwritten, FAULT_HANDLE, codes)
                note_faults(
                    peers.faults, codes & FAULT_MASK, is_source, c.W_LANES, codes >> FLAGS_SHIFT
                )
            total = tl.where(has_failed | (any_code != 0), float("nan"), total)
            tl.store(out_row_ptr + column, cast(total, dtype), mask=is_element)
    if abort_if_late(peers, late, WAIT_COMBINE, epoch, c):
        nothing = tl.full([ELEMENTS], float("nan"), tl.float32)
        tl.store(out_row_ptr + column, cast(nothing, dtype), mask=is_element)
    if OVERLAPS:
        await_previous()


def _words_of_part(layout: LowLatencyLayout) -> int:
    # No fewer than threads: the compiler may load a smaller block twice, for flags and for words.
    return min(_WORDS, max(32 * _WARPS, next_power_of_two(layout.return_words)))


def num_parts(layout: LowLatencyLayout) -> int:
    """Return the programs that share a token."""
    return -(-layout.return_words // _words_of_part(layout))


def prepare_lines(exchange: LowLatencyExchange, out: Tensor) -> PreparedLaunch:
    """Return the launch that receives sums in lines, num_parts() programs for each token.

    Tokens are those of the dispatch. If this rank refuses to combine, `out` has none, and it still
    waits for them, because until then ranks may read the rows that it sent.
    """
    layout = exchange.peers.layout
    return prepare(
        exchange,
        _receive_combine_lines_kernel,
        [CHANGES] * 3,
        3,
        HIDDEN=out.shape[1],
        PARTS=num_parts(layout),
        WORDS=_words_of_part(layout),
        num_warps=_WARPS,
        **EXACT,
        **overlapping(out.device),
    )
