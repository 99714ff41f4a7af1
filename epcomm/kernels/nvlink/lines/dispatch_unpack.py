"""Store rows in lines where rows in bulk are stored, so that only receivers of dispatch know lines.

A part of the receiver of low-latency dispatch over NVLink. Memory order: common/lines.py.
"""

from __future__ import annotations

import triton
import triton.language as tl

from epcomm.kernels.masks import both
from epcomm.kernels.nvlink.common import constexprs
from epcomm.kernels.nvlink.common.exchange import Peers, SlabMemory
from epcomm.kernels.nvlink.common.layout import LowLatencyLayout
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
def _unpack_part(
    peers: Peers,
    slabs: SlabMemory,
    source: tl.tensor,
    token: tl.tensor,
    part: tl.tensor,
    epoch: tl.tensor,
    c: constexprs.Layout,
    index: constexprs.Index,
    THREADS: tl.constexpr,
) -> tl.tuple:
    """Wait for a part of the row of a token in lines, if it comes, and unpack it.

    The header of the source and the metadata of the token, which are looked at beside the lines of
    the row, decide whether it comes. With slabs, it is stored at the slots of its experts, which
    depend on the counts of the sources before.

    Returns: the bits of ranks whose lines did not come, as end_look() leaves them; T of the source
        if it sent in lines, else 0.
    """
    FIRST_SCALE: tl.constexpr = c.SCALE_LINES - c.DATA_LINES
    k = tl.arange(0, c.K_LANES)
    source_lane = tl.arange(0, c.W_LANES)
    is_source = living_ranks(peers, c)
    header_ptr = int64_at(peers.buffer_address + c.HEADER_LINES_AT) + source * 2
    row_lines_ptr = int64_at(peers.buffer_address + c.ROW_LINES_AT)
    row_lines_ptr += (source * c.LINE_TOKENS + token) * c.ROW_LINES
    word = part * index.WORDS + tl.arange(0, index.WORDS)
    is_datum = word < c.DATA_WORDS
    is_scale = (word >= FIRST_SCALE) & (word < FIRST_SCALE + c.SCALE_WORDS)
    is_word = is_datum | is_scale

    num_tokens = 0
    late, polls_left, num_looks, end_ns = begin_wait(peers.max_polls)  # pyright: ignore[reportGeneralTypeIssues]
    while is_waiting(late, polls_left):
        aborted = tl.load(int32_at(peers.own_address), volatile=True)
        header = tl.load(header_ptr, volatile=True)
        experts = tl.load(row_lines_ptr + k, volatile=True)
        lines_ptr = row_lines_ptr + c.DATA_LINES + word
        lines = tl.load(lines_ptr, mask=is_word, other=0, volatile=True)
        is_token = ((word_of(header) & 1) != 0) & (token < (word_of(header) >> 1))
        # Reduce one value per line, because the compiler repeats a load that has two uses, in two
        # layouts, and the line may arrive in between. 2: not arrived; 1: a slot; 0: no slot.
        entries = tl.where((k < c.K) & (word_of(experts) >= 0), 1, 0)
        told = tl.max(tl.where(flag_of(experts) != epoch, 2, entries))
        is_absent = tl.max((is_word & (flag_of(lines) != epoch)).to(tl.int32)) > 0
        # A header of another epoch is ignored.
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
            in_lines = (word_of(header) & 1) != 0
            num_tokens = tl.where(in_lines, tl.minimum(word_of(header) >> 1, c.LINE_TOKENS), 0)
            # These values are from the look that found the lines; loading them again would take as
            # long as the look.
            is_part = is_token & (told == 1)
            if slabs.data is not None:
                # From here on the lines do not change, so they may be loaded again.
                local_ids = word_of(tl.load(row_lines_ptr + k, volatile=True))
                places = word_of(tl.load(row_lines_ptr + c.K_LANES + k, volatile=True))
                is_slot = both((k < c.K) & (local_ids >= 0) & (local_ids < c.L), is_part)
                counts_ptr = int64_at(peers.buffer_address + c.COUNT_LINES_AT)
                counts_ptr += source_lane[:, None] * c.L + local_ids[None, :]
                is_count = (is_source & (source_lane < source))[:, None] & is_slot[None, :]
                late = _await_lines(counts_ptr, is_count, source_lane, peers, epoch, THREADS)
                # The wait has already reached its limit, so it is not started again.
                polls_left = tl.where(late != 0, 0, polls_left)
                counts = word_of(tl.load(counts_ptr, mask=is_count, other=0, volatile=True))
                before = tl.sum(tl.where(is_count, counts, 0), axis=0)
                slots = local_ids * index.CAPACITY + before + places
                # No expert has more rows than its slab, whatever a rank has sent.
                is_slot = both(is_slot & (before + places < index.CAPACITY), late == 0)
                slots = tl.where(is_slot, slots, -1)
                # The lines are loaded one after another, because a block of them would not fit into
                # registers.
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
                    scales_ptr = int32_at(peers.buffer_address + c.SCALES_AT + row * c.SCALE_BYTES)
                    scales_ptr += word - FIRST_SCALE
                    tl.store(scales_ptr, word_of(lines), mask=both(is_scale, is_part))
    return late, num_tokens  # pyright: ignore[reportReturnType]


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
    """Unpack the parts of rows in lines that belong to `worker` of num_workers.

    A row of 300 words has two parts: with two sources and four workers, worker 2 unpacks the first
    parts of the rows of rank 1 until the T of its header; with eight workers, those of its tokens
    0, 2, ...

    num_workers: of num_unpackers().   Returns: whether this rank cannot continue.
    """
    PARTS: tl.constexpr = (c.ROW_LINES - c.DATA_LINES + index.WORDS - 1) // index.WORDS
    any_late = epoch * 0
    for pair in tl.range(worker % (c.W * PARTS), c.W * PARTS, num_workers, num_stages=1):  # pyright: ignore[reportGeneralTypeIssues]
        source, part = pair // PARTS, pair % PARTS
        token = worker // (c.W * PARTS)
        num_tokens = tl.where(tl.load(peers.excluded + source) != 0, 0, c.LINE_TOKENS)
        while token < num_tokens:
            late, num_tokens = _unpack_part(  # pyright: ignore[reportGeneralTypeIssues]
                peers, slabs, source, token, part, epoch, c, index, THREADS
            )
            abort_if_late(peers, late, WAIT_DISPATCH, epoch, c)
            any_late |= late
            token += tl.maximum(num_workers // (c.W * PARTS), 1)
    return any_late != 0


def num_unpackers(layout: LowLatencyLayout, most: int) -> int:
    """Return the programs that unpack rows: the same number for each part of each source.

    With 16 parts and at most 40 programs these are 32, with 64 parts 40; 0 without lines.
    """
    parts = -(-(layout.row_lines - layout.data_lines_at) // UNPACKED_WORDS)
    pairs = layout.world_size * parts
    return min(most, pairs * min(layout.line_tokens, max(1, most // pairs)))
