"""Number the slots of received rows: a stable counting sort of (row, k) pairs by expert.

A program numbers the pairs of a few experts in one segment of the rows. First it counts the pairs
of earlier segments, so that no program waits for another and one launch suffices: every id is read
a few times from the cache, which costs less than the launches of a sort.
"""

import triton
import triton.language as tl
from torch import Tensor

from epcomm.kernels.prepared import launch

# Pairs that a program numbers at a time, and those of a segment, which are counted in one step; a
# scan takes more registers than a count.
_PAIRS, _WARPS = 2048, 8
_SEGMENT_PAIRS = 8192
# Experts of a program: 16 bits of a word of 64 count the pairs of each, and a segment has fewer
# than 2**16.
_GROUP = 4
_BITS = 16

_GROUP_OF = tl.constexpr(_GROUP)
_BITS_OF = tl.constexpr(_BITS)
_COUNT_MASK = tl.constexpr((1 << _BITS) - 1)


@triton.jit
def _members_of(
    ids_ptr: tl.tensor,
    pair: tl.tensor,
    end: tl.tensor,
    first_expert: tl.tensor,
    group: tl.tensor,
    IDS_STRIDE: tl.constexpr,
    K: tl.constexpr,
    L: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Load the local experts of pairs before `end`, -1 for none here, and a 1 in its expert's bits.

    The second is 0 where the expert belongs to another group.
    """
    row = (pair // K).to(tl.int64)
    ids = tl.load(ids_ptr + row * IDS_STRIDE + pair % K, mask=pair < end, other=-1)
    local = (ids - first_expert).to(tl.int32)
    local = tl.where((ids >= 0) & (local >= 0) & (local < L), local, -1)
    place = local - group * _GROUP_OF
    is_mine = (local >= 0) & (place >= 0) & (place < _GROUP_OF)
    shift = tl.where(is_mine, place, 0) * _BITS_OF
    return local, is_mine.to(tl.int64) << shift


@triton.jit
def _counts_in(packed: tl.tensor, lane: tl.tensor) -> tl.tensor:
    """Unpack the count of each expert of a group, int32."""
    return ((packed >> (lane * _BITS_OF).to(tl.int64)) & _COUNT_MASK).to(tl.int32)


@triton.jit(do_not_specialize=["num_pairs", "num_slots", "first_expert"])
def _number_slots_kernel(
    ids_ptr: tl.tensor,
    weights_ptr: tl.tensor | None,
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
    GROUPS: tl.constexpr,
    PAIRS: tl.constexpr,
    SEGMENT: tl.constexpr,
) -> None:
    """Assign slots to the pairs of one group of experts in one segment.

    L = 2, K = 2, ids 1 -1 | -1 0 | 0 1: expert 0 has the pairs 3 and 4 (rows 1, 2), expert 1 the
    pairs 0 and 5 (rows 0, 2), so row_of_slot is 1 2 0 2 and slots_of_row 2 -1 | -1 0 | 1 3.
    """
    group, segment = tl.program_id(0) % GROUPS, tl.program_id(0) // GROUPS
    lane, member = tl.arange(0, triton.next_power_of_2(L)), tl.arange(0, _GROUP_OF)
    counts = tl.load(counts_ptr + lane, mask=lane < L, other=0).to(tl.int32)
    aligned = (counts + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT
    expert = group * _GROUP_OF + member
    is_before = lane[None, :] < expert[:, None]
    # The position of the next pair of each expert of the group.
    following = tl.sum(tl.where(is_before, aligned[None, :], 0), 1)
    if segment == 0:
        tl.store(first_slot_ptr + expert, following, mask=expert <= L)
        mine = tl.load(counts_ptr + expert, mask=expert < L, other=0).to(tl.int32)
        tl.store(num_tokens_ptr + expert, mine, mask=expert < L)
        if group == 0:
            tl.store(first_slot_ptr + L, tl.sum(aligned))

    begin = segment * SEGMENT
    for at in range(0, begin, SEGMENT):
        pair = at + tl.arange(0, SEGMENT)
        _, ones = _members_of(ids_ptr, pair, begin, first_expert, group, IDS_STRIDE, K, L)  # pyright: ignore[reportGeneralTypeIssues]
        following += _counts_in(tl.sum(ones), member)
    end = tl.minimum(begin + SEGMENT, num_pairs)
    for at in range(begin, end, PAIRS):
        pair = at + tl.arange(0, PAIRS)
        local, ones = _members_of(ids_ptr, pair, end, first_expert, group, IDS_STRIDE, K, L)  # pyright: ignore[reportGeneralTypeIssues]
        is_mine, place = ones > 0, local - group * _GROUP_OF
        slot = _counts_in(tl.cumsum(ones, 0), tl.where(is_mine, place, 0)) - 1
        for each in tl.static_range(_GROUP_OF):
            slot += tl.where(place == each, tl.sum(tl.where(member == each, following, 0)), 0)
        # This holds for counts and ids of one call; the check keeps wrong ones from writing out of
        # bounds.
        is_mine &= slot < num_slots
        row = pair // K
        tl.store(row_of_slot_ptr + slot, row, mask=is_mine)
        tl.store(slots_of_row_ptr + pair, slot, mask=is_mine)
        if weights_ptr is not None:
            weight_ptr = weights_ptr + row.to(tl.int64) * WEIGHTS_STRIDE + pair % K
            tl.store(slot_weights_ptr + slot, tl.load(weight_ptr, mask=is_mine), mask=is_mine)
        if group == 0:
            nowhere = (local < 0) & (pair < end)
            tl.store(slots_of_row_ptr + pair, tl.zeros_like(slot) - 1, mask=nowhere)
        following += _counts_in(tl.sum(ones), member)


def number_slots(
    ids: Tensor,
    weights: Tensor | None,
    counts: Tensor,
    tables: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
    *,
    first_expert: int,
    expert_alignment: int,
) -> None:
    """Sort (row, k) pairs by expert, by row within an expert, and bring weights into that order.

    Args:
        ids: [R, K], int32 or int64, physical experts, -1 for none, of any row stride.
        weights: [R, K], of any row stride, or None.
        counts: [L], the pairs of each expert of this rank, from first_expert on.
        tables: written; row_of_slot [C] and slots_of_row [R, K], slot weights [C], in the dtype of
            weights, num_tokens_per_expert [L] and first_slot [L + 1]; the others are int32. Slots
            without a pair are not written.
        expert_alignment: the slots of each expert begin at a multiple of this.

    Allocates nothing.   Compiled for each K, L, alignment and strides.
    Host sync: none.   Graph capture: after one call.   Deterministic: yes.
    """
    num_rows, top_k = ids.shape
    row_of_slot, _, _, num_tokens, _ = tables
    num_local, num_pairs = num_tokens.shape[0], num_rows * top_k
    num_groups = -(-num_local // _GROUP)
    num_segments = max(1, -(-num_pairs // _SEGMENT_PAIRS))
    launch(
        _number_slots_kernel,
        num_groups * num_segments,
        (ids, weights, counts, *tables, num_pairs, row_of_slot.shape[0], first_expert),
        IDS_STRIDE=ids.stride(0) if num_rows > 1 else top_k,
        WEIGHTS_STRIDE=top_k if weights is None or num_rows < 2 else weights.stride(0),
        ALIGNMENT=expert_alignment,
        K=top_k,
        L=num_local,
        GROUPS=num_groups,
        PAIRS=_PAIRS,
        SEGMENT=_SEGMENT_PAIRS,
        num_warps=_WARPS,
    )
