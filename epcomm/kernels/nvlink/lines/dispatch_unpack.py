"""Copy rows that arrive in lines to where rows are stored: code after dispatch sees no lines.

A part of the receiver of low-latency dispatch over NVLink. Memory order: common/lines.py.
"""

from __future__ import annotations

import triton
import triton.language as tl

from epcomm.kernels.masks import both
from epcomm.kernels.nvlink.common import constexprs
from epcomm.kernels.nvlink.common.exchange import Peers, SlabMemory
from epcomm.kernels.nvlink.common.lines import (
    abort_if_late,
    begin_wait,
    end_look,
    flag_of,
    int64_at,
    is_waiting,
    word_of,
)
from epcomm.kernels.nvlink.common.signals import int32_at, living_ranks
from epcomm.kernels.nvlink.common.status import WAIT_DISPATCH
from epcomm.kernels.nvlink.ll_dispatch_pack import scales_at

# Words that a program unpacks in one step: 16 bytes of lines for each thread.
UNPACKED_WORDS = 256


@triton.jit
def _await_lines(
    lines_ptr: tl.tensor,
    is_needed: tl.tensor,
    source_lane: tl.tensor,
    peers: Peers,
    epoch: tl.tensor,
    THREADS: tl.constexpr,
) -> tl.tensor:
    """Wait for lines [W_LANES, n] of all sources; return the bits of ranks whose lines are missing.

    Nothing that is loaded here is returned: code that needs the words loads them after the wait.
    """
    late, polls_left, num_looks, end_ns = begin_wait(peers.max_polls)  # pyright: ignore[reportGeneralTypeIssues]
    while is_waiting(late, polls_left):
        aborted = tl.load(int32_at(peers.own_address), volatile=True)
        lines = tl.load(lines_ptr, mask=is_needed, other=0, volatile=True)
        is_absent = is_needed & (flag_of(lines) != epoch)
        bits = tl.where(is_absent, 1 << source_lane[:, None], 0)
        late, polls_left, num_looks, end_ns = end_look(  # pyright: ignore[reportGeneralTypeIssues]
            tl.max(tl.max(bits, axis=1)), aborted, polls_left, num_looks, end_ns, THREADS
        )
    return late


@triton.jit
def unpack_rows(
    peers: Peers,
    slabs: SlabMemory,
    worker: tl.tensor,
    num_workers: tl.tensor,
    epoch: tl.tensor,
    c: constexprs.Layout,
    index: constexprs.Index,
    THREADS: tl.constexpr,
) -> tl.tensor:
    """Wait for the parts of rows in lines that belong to `worker` of num_workers, and unpack them.

    What comes, if anything, the header of the source and the metadata of the token tell, which are
    looked at beside the lines of the row. A row of 300 words has two parts: with two sources, the
    first four items are both parts of the first tokens of rank 0 and of rank 1. With slabs, rows
    are copied to the slots of their experts, which follow from the counts of earlier sources.

    Returns: whether this rank cannot go on.
    """
    PARTS: tl.constexpr = (c.ROW_LINES - c.DATA_LINES + index.WORDS - 1) // index.WORDS
    FIRST_SCALE: tl.constexpr = c.SCALE_LINES - c.DATA_LINES
    k = tl.arange(0, c.K_LANES)
    source_lane = tl.arange(0, c.W_LANES)
    is_source = living_ranks(peers, c)
    any_late = epoch * 0
    for item in tl.range(worker, c.W * c.LINE_TOKENS * PARTS, num_workers, num_stages=1):  # pyright: ignore[reportGeneralTypeIssues]
        source = (item // PARTS) % c.W
        token = item // (PARTS * c.W)
        header_ptr = int64_at(peers.buffer_address + c.HEADER_LINES_AT) + source * 2
        row_lines_ptr = int64_at(peers.buffer_address + c.ROW_LINES_AT)
        row_lines_ptr += (source * c.LINE_TOKENS + token) * c.ROW_LINES
        word = (item % PARTS) * index.WORDS + tl.arange(0, index.WORDS)
        is_datum = word < c.DATA_WORDS
        is_scale = (word >= FIRST_SCALE) & (word < FIRST_SCALE + c.SCALE_WORDS)
        is_word = is_datum | is_scale

        late, polls_left, num_looks, end_ns = begin_wait(peers.max_polls)  # pyright: ignore[reportGeneralTypeIssues]
        late = tl.where(tl.load(peers.excluded + source) != 0, 0, late)
        while is_waiting(late, polls_left):
            aborted = tl.load(int32_at(peers.own_address), volatile=True)
            header = tl.load(header_ptr, volatile=True)
            experts = tl.load(row_lines_ptr + k, volatile=True)
            lines_ptr = row_lines_ptr + c.DATA_LINES + word
            lines = tl.load(lines_ptr, mask=is_word, other=0, volatile=True)
            is_token = ((word_of(header) & 1) != 0) & (token < (word_of(header) >> 1))
            # One value of each line in one reduction: a load with two uses is done twice, in two
            # layouts, and the line may come between them. 2: not there; 1: a slot; 0: none.
            entries = tl.where((k < c.K) & (word_of(experts) >= 0), 1, 0)
            told = tl.max(tl.where(flag_of(experts) != epoch, 2, entries))
            is_absent = tl.max((is_word & (flag_of(lines) != epoch)).to(tl.int32)) > 0
            # A header of another epoch decides nothing.
            is_late = (told == 2) | ((told == 1) & is_absent)
            if slabs.data is not None:
                positions = tl.load(row_lines_ptr + c.K_LANES + k, volatile=True)
                is_late |= tl.max((flag_of(positions) != epoch).to(tl.int32)) > 0
            is_late = (flag_of(header) != epoch) | (is_token & is_late)
            late, polls_left, num_looks, end_ns = end_look(  # pyright: ignore[reportGeneralTypeIssues]
                tl.where(is_late, 1 << source, 0),
                aborted,
                polls_left,
                num_looks,
                end_ns,
                THREADS,
            )
            if late == 0:
                # The words that the look found are used: loading them again takes as long.
                is_part = is_token & (told == 1)
                if slabs.data is not None:
                    # The words do not change from here on, however often they are loaded.
                    local_ids = word_of(tl.load(row_lines_ptr + k, volatile=True))
                    places = word_of(tl.load(row_lines_ptr + c.K_LANES + k, volatile=True))
                    is_slot = both((k < c.K) & (local_ids >= 0) & (local_ids < c.L), is_part)
                    counts_ptr = int64_at(peers.buffer_address + c.COUNT_LINES_AT)
                    counts_ptr += source_lane[:, None] * c.L + local_ids[None, :]
                    is_count = (is_source & (source_lane < source))[:, None] & is_slot[None, :]
                    late = _await_lines(counts_ptr, is_count, source_lane, peers, epoch, THREADS)
                    # The wait has timed out, so it is not repeated.
                    polls_left = tl.where(late != 0, 0, polls_left)
                    counts = word_of(tl.load(counts_ptr, mask=is_count, other=0, volatile=True))
                    before = tl.sum(tl.where(is_count, counts, 0), axis=0)
                    slots = local_ids * index.CAPACITY + before + places
                    # No expert has more rows than its slab, whatever a rank has sent.
                    is_slot = both(is_slot & (before + places < index.CAPACITY), late == 0)
                    slots = tl.where(is_slot, slots, -1)
                    # The parts are loaded in turn: as a block they need too many registers.
                    for each in tl.static_range(c.K):  # pyright: ignore[reportGeneralTypeIssues]
                        slot = tl.max(tl.where(k == each, slots, -1)).to(tl.int64)
                        to_ptr = slabs.data + slot * (c.DATA_BYTES // 4) + word
                        tl.store(to_ptr, word_of(lines), mask=both(is_datum, slot >= 0))
                        if slabs.scales is not None:
                            place = scales_at(slot, word - FIRST_SCALE, index)
                            is_kept = both(is_scale, slot >= 0)
                            tl.store(slabs.scales + place, word_of(lines), mask=is_kept)
                else:
                    row = (source * c.M + token).to(tl.int64)
                    data_ptr = int32_at(peers.buffer_address + c.DATA_AT + row * c.DATA_BYTES)
                    tl.store(data_ptr + word, word_of(lines), mask=both(is_datum, is_part))
                    if c.SCALE_WORDS > 0:
                        scales_ptr = int32_at(
                            peers.buffer_address + c.SCALES_AT + row * c.SCALE_BYTES
                        )
                        scales_ptr += word - FIRST_SCALE
                        tl.store(scales_ptr, word_of(lines), mask=both(is_scale, is_part))
        abort_if_late(peers, late, WAIT_DISPATCH, epoch, c)
        any_late |= late
    return any_late != 0
