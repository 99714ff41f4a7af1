"""Number the slots of received rows: a stable counting sort of (row, k) pairs by expert.

A program numbers the pairs of one expert in one segment of the rows. It counts those of earlier
segments first, so that programs wait for nothing and one launch does it all: every id is read a few
times from the cache, which costs less than the launches of a sort.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from epcomm.kernels.launch import next_power_of_two

# Pairs that a program looks at together, 16 of each thread, and those that it numbers at most: a
# count of 4096 pairs costs a fraction of their scan.
_PAIRS, _WARPS = 4096, 8
_SEGMENT_PAIRS = 16384


@triton.jit
def _experts_of(
    ids_ptr: tl.tensor,
    pair: tl.tensor,
    end: tl.tensor,
    first_expert: tl.tensor,
    IDS_STRIDE: tl.constexpr,
    K: tl.constexpr,
    L: tl.constexpr,
) -> tl.tensor:
    """Load the local experts of pairs before `end`, -1 where a pair has none here."""
    row = (pair // K).to(tl.int64)
    ids = tl.load(ids_ptr + row * IDS_STRIDE + pair % K, mask=pair < end, other=-1)
    local = (ids - first_expert).to(tl.int32)
    return tl.where((ids >= 0) & (local >= 0) & (local < L), local, -1)


@triton.jit(do_not_specialize=["num_pairs", "num_slots", "first_expert"])
def _number_slots_kernel(
    ids_ptr: tl.tensor,
    weights_ptr: tl.tensor,
    counts_ptr: tl.tensor,
    row_of_slot_ptr: tl.tensor,
    slots_of_row_ptr: tl.tensor,
    slot_weights_ptr: tl.tensor,
    num_tokens_ptr: tl.tensor,
    first_slot_ptr: tl.tensor,
    num_pairs: tl.tensor,
    num_slots: tl.tensor,
    first_expert: tl.tensor,
    IDS_STRIDE: tl.constexpr,
    WEIGHTS_STRIDE: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    K: tl.constexpr,
    L: tl.constexpr,
    L_LANES: tl.constexpr,
    PAIRS: tl.constexpr,
    SEGMENT: tl.constexpr,
) -> None:
    """Give slots to the pairs of expert program_id(0) in segment program_id(1).

    L = 2, K = 2, ids 1 -1 | -1 0 | 0 1: expert 0 has the pairs 3 and 4 (rows 1, 2), expert 1 the
    pairs 0 and 5 (rows 0, 2), so row_of_slot is 1 2 0 2 and slots_of_row 2 -1 | -1 0 | 1 3.
    """
    expert, segment = tl.program_id(0), tl.program_id(1)
    lane = tl.arange(0, L_LANES)
    counts = tl.load(counts_ptr + lane, mask=lane < L, other=0).to(tl.int32)
    aligned = (counts + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT
    start = tl.sum(tl.where(lane < expert, aligned, 0))
    if segment == 0:
        tl.store(first_slot_ptr + expert, start)
        tl.store(num_tokens_ptr + expert, tl.sum(tl.where(lane == expert, counts, 0)))
        if expert == L - 1:
            tl.store(first_slot_ptr + L, tl.sum(aligned))

    place, offset = start, tl.arange(0, PAIRS)
    begin = segment * SEGMENT
    for at in range(0, begin, PAIRS):
        experts = _experts_of(ids_ptr, at + offset, begin, first_expert, IDS_STRIDE, K, L)
        place += tl.sum((experts == expert).to(tl.int32))
    end = tl.minimum(begin + SEGMENT, num_pairs)
    for at in range(begin, end, PAIRS):
        pair = at + offset
        experts = _experts_of(ids_ptr, pair, end, first_expert, IDS_STRIDE, K, L)
        is_mine = experts == expert
        slot = place + tl.cumsum(is_mine.to(tl.int32), 0) - 1
        # Counts and ids come of one call, so this holds; memory of others must not depend on it.
        is_mine &= slot < num_slots
        row = pair // K
        tl.store(row_of_slot_ptr + slot, row, mask=is_mine)
        tl.store(slots_of_row_ptr + pair, slot, mask=is_mine)
        weight_ptr = weights_ptr + row.to(tl.int64) * WEIGHTS_STRIDE + pair % K
        tl.store(slot_weights_ptr + slot, tl.load(weight_ptr, mask=is_mine), mask=is_mine)
        if expert == 0:
            nowhere = (experts < 0) & (pair < end)
            tl.store(slots_of_row_ptr + pair, tl.zeros_like(slot) - 1, mask=nowhere)
        place += tl.sum(is_mine.to(tl.int32))


def number_slots(
    ids: Tensor,
    weights: Tensor,
    counts: Tensor,
    tables: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
    *,
    first_expert: int,
    expert_alignment: int,
) -> None:
    """Sort (row, k) pairs by expert, by row within an expert, and bring weights into that order.

    Args:
        ids: [R, K], int32 or int64, physical experts, -1 for none, of any row stride.
        weights: [R, K], of any row stride.
        counts: [L], the pairs of each expert of this rank, which is first_expert and those behind.
        tables: written; row_of_slot [C] and slots_of_row [R, K], slot weights [C], in the dtype of
            weights, num_tokens_per_expert [L] and first_slot [L + 1]; the others are int32. Slots
            of no pair keep what they hold.
        first_expert: the first expert of this rank.
        expert_alignment: the slots of each expert begin at a multiple of this.

    Allocates nothing.   Compiled anew for each K, L, alignment and strides.
    Host sync: none.   Graph capture: after one call.   Deterministic: yes.
    """
    num_rows, top_k = ids.shape
    row_of_slot, slots_of_row, slot_weights, num_tokens, first_slot = tables
    num_local, num_pairs = num_tokens.shape[0], num_rows * top_k
    num_segments = max(1, -(-num_pairs // _SEGMENT_PAIRS))
    with torch.cuda.device_of(ids):
        _number_slots_kernel[(num_local, num_segments)](
            ids,
            weights,
            counts,
            row_of_slot,
            slots_of_row,
            slot_weights,
            num_tokens,
            first_slot,
            num_pairs,
            row_of_slot.shape[0],
            first_expert,
            IDS_STRIDE=ids.stride(0) if num_rows > 1 else top_k,
            WEIGHTS_STRIDE=weights.stride(0) if num_rows > 1 else top_k,
            ALIGNMENT=expert_alignment,
            K=top_k,
            L=num_local,
            L_LANES=next_power_of_two(num_local),
            PAIRS=_PAIRS,
            SEGMENT=_SEGMENT_PAIRS,
            num_warps=_WARPS,  # pyright: ignore[reportCallIssue]
        )
