"""Pack the rows of an NVLink receive buffer by expert, for the layout MASKED.

A pass over the received rows in this GPU's own memory, for experts that do not read through an
index. Memory order: launched behind the kernel of ll_dispatch_recv.py, in its stream, whose acquire
covers the rows.

Not yet timed.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from epcomm.kernels.launch import next_power_of_two
from epcomm.kernels.nvlink.common.exchange import VARYING, LowLatencyExchange, on_device
from epcomm.kernels.nvlink.common.signals import int32_at

# A row of 7168 bytes is then 7 words a thread.
_WARPS = 8
_WORD_BYTES = 4


@triton.jit(do_not_specialize=VARYING)
def _pack_rows_kernel(
    packed_ptr: tl.tensor,
    scales_ptr: tl.tensor | None,
    slots_of_row_ptr: tl.tensor,
    buffer_address: tl.tensor,
    K: tl.constexpr,
    WORDS: tl.constexpr,
    WORD_LANES: tl.constexpr,
    SCALE_WORDS: tl.constexpr,
    SCALE_LANES: tl.constexpr,
    DATA_AT: tl.constexpr,
    SCALES_AT: tl.constexpr,
) -> None:
    """Copy received row p to each of its slots in program p, as words of 32 bits.

    Row 3 with the slots 5 -1 2 is copied to rows 5 and 2 of `packed`, its scales likewise.
    """
    # Before it is multiplied: rows may lie beyond 2**31 bytes.
    row = tl.program_id(0).to(tl.int64)
    word = tl.arange(0, WORD_LANES)
    is_word = word < WORDS
    row_ptr = int32_at(buffer_address + DATA_AT + row * (WORDS * 4)) + word
    lane = tl.arange(0, SCALE_LANES)
    is_scale = lane < SCALE_WORDS
    row_scales_ptr = int32_at(buffer_address + SCALES_AT + row * (SCALE_WORDS * 4)) + lane
    for k in tl.static_range(K):
        slot = tl.load(slots_of_row_ptr + row * K + k).to(tl.int64)
        # A row that has not come is not read; of one that has, the second slot finds it in a cache.
        has_slot = slot >= 0
        words = tl.load(row_ptr, mask=is_word & has_slot, other=0)
        tl.store(packed_ptr + slot * WORDS + word, words, mask=is_word & has_slot)
        if scales_ptr is not None:
            scales = tl.load(row_scales_ptr, mask=is_scale & has_slot, other=0)
            to_ptr = scales_ptr + slot * SCALE_WORDS + lane
            tl.store(to_ptr, scales, mask=is_scale & has_slot)


def pack_rows(
    exchange: LowLatencyExchange, slots_of_row: Tensor, packed: Tensor, scales: Tensor | None
) -> None:
    """Copy each received row to its slots.

    Args:
        exchange: the receive buffer.
        slots_of_row: [W * M, K], int32, -1 for none, as receive_dispatch() wrote it.
        packed: [C, words of a row], int32, written where a slot is: rows as they came, with the gap
            between them.
        scales: [C, words of the scales of a row], int32, likewise; None where rows have none.

    Local.   Allocates nothing.   Host sync: none.   Graph capture: after one call.
    """
    num_rows, top_k = slots_of_row.shape
    layout = exchange.peers.layout
    words, scale_words = layout.data_bytes // _WORD_BYTES, layout.scale_bytes // _WORD_BYTES
    with on_device(packed):
        _pack_rows_kernel[(num_rows,)](
            packed,
            scales,
            slots_of_row,
            exchange.buffer_address,
            K=top_k,
            WORDS=words,
            WORD_LANES=next_power_of_two(words),
            SCALE_WORDS=scale_words,
            SCALE_LANES=next_power_of_two(max(1, scale_words)),
            DATA_AT=layout.offsets["data"],
            SCALES_AT=layout.offsets["scales"],
            num_warps=_WARPS,  # pyright: ignore[reportCallIssue]
        )
