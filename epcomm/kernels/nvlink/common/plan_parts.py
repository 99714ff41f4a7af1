"""The parts of an exchange plan of normal mode: memory that hosts allocate and kernels write.

It imports no Triton: plans are also made on machines without it.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class Sends:
    """The rows to which the tokens of this rank go, [T, W] and [T, K] in one dimension or two.

    places: [T * W], int32: token t is row places[t * W + d] of this rank on rank d, or -1.
    positions: [T * K], int32: earlier entries of this rank with the same expert.
    topk_ids: [T, K], int64; None unless ranks have several sum groups.
    """

    places: Tensor
    positions: Tensor
    topk_ids: Tensor | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class Arrivals:
    """The rows that arrived from each rank, on the device.

    rows_from: [W], int32.
    row_base: [W], int32: where the rows of a rank begin in the index.
    has_failed: [2], int32: not 0 if the dispatch was refused, and mark_of() of its number.
    """

    rows_from: Tensor
    row_base: Tensor
    has_failed: Tensor


# What a plan and its index consist of, in the order of the arguments of dispatch_cuda.
PLAN_PARTS = (
    *("places", "positions", "row_of_slot", "slots_of_row", "slot_weights"),
    *("num_tokens_per_expert", "first_slot", "rows_from", "row_base", "has_failed"),
)


@dataclass(frozen=True, kw_only=True, eq=False)
class Received:
    """The memory in which one kernel writes a plan and the index over received rows.

    addresses: of PLAN_PARTS, which are those of Sends, of a SlotIndex with the weights of its
        slots, and of Arrivals, for as many rows as may arrive.
    num_slots: C.   expert_alignment: of the index.
    has_budget: C may be too small, which is a fault on all ranks; else it is not.
    has_row_budget: M rows may be fewer than those that arrive, which is the fault then; R is M.
    is_compact: rows are numbered without gaps; else index q of source s is row s * M + q.
    row_topk: [R, K], int64 and float32, for the experts of this rank and the weights that each row
        has, or None.
    """

    addresses: tuple[int, ...]
    num_slots: int
    expert_alignment: int
    has_budget: bool
    has_row_budget: bool
    is_compact: bool
    row_topk: tuple[Tensor, Tensor] | None = None
