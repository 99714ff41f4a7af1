"""Copy the rows of an NVLink receive buffer to their experts, for the layout MASKED.

A part of the receiver of low-latency dispatch: each program copies the rows that it has indexed, as
soon as their source has sent all, so that no separate pass over them is needed. Rows in lines are
stored at their slots by lines/dispatch_unpack.py.

Memory order: after the acquire of the source's signal of rows.
"""

from __future__ import annotations

import triton
import triton.language as tl

from epcomm.kernels.masks import both
from epcomm.kernels.nvlink.common import constexprs
from epcomm.kernels.nvlink.common.exchange import Peers, SlabMemory
from epcomm.kernels.nvlink.common.signals import int32_at


@triton.jit
def scales_at(slot: tl.tensor, word: tl.tensor, index: constexprs.Index) -> tl.tensor:
    """Return the offset of a word of the scales of a slot, int64.

    For slot 5 in experts of 4 slots, by column with 2 words: the words of the second slot of the
    second expert, 8 + 1 and 8 + 1 + 4.
    """
    slot = slot.to(tl.int64)
    begin = slot // index.CAPACITY * index.EXPERT_STRIDE
    begin += slot % index.CAPACITY * index.SLOT_STRIDE
    return begin + word * index.WORD_STRIDE


@triton.jit
def pack_rows(
    peers: Peers,
    slabs: SlabMemory,
    slots_of_row_ptr: tl.tensor,
    first_row: tl.tensor,
    end_row: tl.tensor,
    c: constexprs.Layout,
    index: constexprs.Index,
) -> None:
    """Copy received rows to each of their slots, as words of 32 bits, the gaps between them too.

    Row 3 with the slots 5 -1 2 is copied to rows 5 and 2 of the slabs, its scales likewise.

    slots_of_row_ptr: [W * M, K], which this program has written.
    slabs: `data` is [C, words of a row]; of `scales` see scales_at().
    """
    # The data that other threads of this program have stored is loaded below.
    tl.debug_barrier()
    WORDS: tl.constexpr = c.DATA_BYTES // 4
    word = tl.arange(0, index.WORD_LANES)
    is_word = word < WORDS
    lane = tl.arange(0, index.SCALE_LANES)
    is_scale = lane < c.SCALE_WORDS
    for each in tl.range(first_row, end_row, num_stages=1):  # pyright: ignore[reportGeneralTypeIssues]
        # The index is widened before it is multiplied, because rows may be beyond 2**31 bytes.
        row = tl.cast(each, tl.int64)
        slots = ()
        last = row * 0 - 1
        for k in tl.static_range(c.K):  # pyright: ignore[reportGeneralTypeIssues]
            slots += (tl.load(slots_of_row_ptr + row * c.K + k).to(tl.int64),)
            last = tl.maximum(last, slots[k])
        # A row that has not arrived is not read.
        row_ptr = int32_at(peers.buffer_address + c.DATA_AT + row * c.DATA_BYTES) + word
        words = tl.load(row_ptr, mask=both(is_word, last >= 0), other=0)
        if slabs.scales is not None:
            scales_ptr = int32_at(peers.buffer_address + c.SCALES_AT + row * c.SCALE_BYTES) + lane
            scales = tl.load(scales_ptr, mask=both(is_scale, last >= 0), other=0)
        for k in tl.static_range(c.K):
            has_slot = slots[k] >= 0
            tl.store(slabs.data + slots[k] * WORDS + word, words, mask=both(is_word, has_slot))
            if slabs.scales is not None:
                place = scales_at(slots[k], lane, index)
                tl.store(slabs.scales + place, scales, mask=both(is_scale, has_slot))
