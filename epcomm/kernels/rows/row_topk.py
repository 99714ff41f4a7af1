"""Read the local experts and router weights of each received row from an expert-major index."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from epcomm.kernels.launch import next_power_of_two
from epcomm.kernels.rows.launch import launch

# Entries of rows that a program reads: with 256 experts a tile of 32768 comparisons.
_PAIRS, _WARPS = 128, 4


@triton.jit(do_not_specialize=["num_pairs"])
def _read_row_topk_kernel(
    slots_of_row_ptr: tl.tensor,
    first_slot_ptr: tl.tensor,
    slot_weights_ptr: tl.tensor,
    ids_ptr: tl.tensor,
    weights_ptr: tl.tensor,
    num_pairs: tl.tensor,
    L: tl.constexpr,
    L_LANES: tl.constexpr,
    PAIRS: tl.constexpr,
) -> None:
    """Read PAIRS entries a program.

    first_slot 0 2 4, slot weights 5 6 7 8 and slots 2 -1 | 0 3 make the experts 1 -1 | 0 1 and the
    weights 7 0 | 5 8.
    """
    pair = tl.program_id(0) * PAIRS + tl.arange(0, PAIRS)
    is_pair = pair < num_pairs
    slot = tl.load(slots_of_row_ptr + pair, mask=is_pair, other=-1)
    lane = tl.arange(0, L_LANES)
    end = tl.load(first_slot_ptr + 1 + lane, mask=lane < L, other=2147483647)
    # The expert of a slot is the number of experts whose slots end before it.
    expert = tl.sum((slot[:, None] >= end[None, :]).to(tl.int32), 1)
    has_slot = slot >= 0
    weight = tl.load(slot_weights_ptr + slot, mask=has_slot, other=0.0)
    tl.store(ids_ptr + pair, tl.where(has_slot, expert, -1).to(tl.int64), mask=is_pair)
    tl.store(weights_ptr + pair, weight, mask=is_pair)


def read_row_topk(
    slots_of_row: Tensor, first_slot: Tensor, slot_weights: Tensor, ids: Tensor, weights: Tensor
) -> None:
    """Write the local expert and the router weight of each entry of each row.

    Args:
        slots_of_row: [R, K], int32, contiguous, -1 for none.
        first_slot: [L + 1], int32.
        slot_weights: [C], of the dtype of weights.
        ids: [R, K], int64, written; -1 for none.
        weights: [R, K], written; 0 for none.

    Allocates nothing.   Compiled for each L.
    Host sync: none.   Graph capture: after one call.   Deterministic: yes.
    """
    num_pairs, num_local = slots_of_row.numel(), first_slot.shape[0] - 1
    if num_pairs == 0:
        return
    launch(
        _read_row_topk_kernel,
        -(-num_pairs // _PAIRS),
        (slots_of_row, first_slot, slot_weights, ids, weights, num_pairs),
        L=num_local,
        L_LANES=next_power_of_two(num_local),
        PAIRS=_PAIRS,
        num_warps=_WARPS,
    )
