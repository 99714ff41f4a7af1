"""The exchange plan of normal mode: memory that hosts allocate and kernels write.

A plan and its index are parts of one block, which a kernel writes before the host has read sizes.
This module imports no Triton: plans are also made on machines without it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from epcomm.records import ExchangePlan, SlotIndex
from epcomm.spec import BufferSpec
from epcomm.types import align_up

# Kernels are compiled for parts that begin at multiples of 16 bytes.
_ALIGNED_WORDS = 4
_WORD_BYTES = 4


# What a block consists of, in the order of the arguments of dispatch.cu. `positions`, [T * K]: the
# earlier entries of this rank with the same expert.
PLAN_PARTS = (
    *("places", "positions", "row_of_slot", "slots_of_row", "slot_weights"),
    *("num_tokens_per_expert", "first_slot", "rows_from", "row_base", "has_failed"),
)


@dataclass(frozen=True, kw_only=True, eq=False)
class NVLinkNormalExchangePlan(ExchangePlan):
    """The plan of a dispatch: where this rank's tokens went, and what arrived.

    slot_weights: [C], float32.
    places: [T * W], int32: token t is row places[t * W + d] of this rank on rank d, or -1.
    topk_ids: [T, K], int64; None unless ranks have several sum groups.
    rows_from, row_base: [W], int32: the rows of each rank, and where they begin in the index.
    has_failed: [2], int32: not 0 if the dispatch was refused, and mark_of() of its number.
    owns_rows: rows are numbered without gaps, and copied; else index q of source s is row
        s * M + q, of capacity_tokens = M, of memory that peers write.
    batch: number of the dispatch, among all that took a receive buffer.
    num_sms: that of its call.
    """

    slot_weights: Tensor
    places: Tensor
    topk_ids: Tensor | None
    rows_from: Tensor
    row_base: Tensor
    has_failed: Tensor
    owns_rows: bool
    capacity_tokens: int
    batch: int
    num_sms: int | None

    def rows_from_ranks(self) -> Tensor:
        return self.rows_from


@dataclass(frozen=True, kw_only=True)
class IndexSizes:
    """The rows and slots of an index, and the slots of each expert where the host has read them."""

    num_rows: int
    num_slots: int
    per_expert: tuple[int, ...] | None
    is_dense: bool


@dataclass(frozen=True, kw_only=True, eq=False)
class PlanBlock:
    """The memory of one call, in which one kernel writes a plan and the index over received rows.

    num_tokens: T.   memory: int32.   offsets: the words before each of PLAN_PARTS, and those of the
        block. Unused memory stays allocated: at most 24 * K bytes for each of W * M rows.
    num_slots: C.   has_budget: C may be too small, which is a fault on all ranks; else it is not.
    has_row_budget: M rows may be fewer than those that arrive, which is the fault then; R is M.
    is_compact: rows are numbered without gaps; else index q of source s is row s * M + q.
    row_topk: [R, K], int64 and float32, for the experts of this rank and the weights that each row
        has, or None.
    """

    spec: BufferSpec
    world_size: int
    num_tokens: int
    memory: Tensor
    offsets: tuple[int, ...]
    num_slots: int
    has_budget: bool
    has_row_budget: bool
    is_compact: bool
    row_topk: tuple[Tensor, Tensor] | None

    @classmethod
    def of(
        cls,
        spec: BufferSpec,
        world_size: int,
        device: torch.device,
        num_tokens: int,
        most: IndexSizes,
        *,
        has_budget: bool,
        is_compact: bool,
        wants_row_topk: bool = False,
        has_row_budget: bool = False,
    ) -> PlanBlock:
        """Allocate the block of T tokens, and of as many rows and slots as may come."""
        row_topk = None
        offsets = _offsets(spec.top_k, spec.num_local_experts, world_size, num_tokens, most)
        memory = torch.empty(offsets[-1], dtype=torch.int32, device=device)
        if wants_row_topk:
            shape = (most.num_rows, spec.top_k)
            ids = memory.new_empty(shape, dtype=torch.int64)
            row_topk = ids, memory.new_empty(shape, dtype=torch.float32)
        return cls(
            spec=spec,
            world_size=world_size,
            num_tokens=num_tokens,
            memory=memory,
            offsets=offsets,
            num_slots=most.num_slots,
            has_budget=has_budget,
            has_row_budget=has_row_budget,
            is_compact=is_compact,
            row_topk=row_topk,
        )

    @property
    def addresses(self) -> list[int]:
        """The address of each of PLAN_PARTS."""
        begin = self.memory.data_ptr()
        return [begin + _WORD_BYTES * offset for offset in self.offsets[:-1]]

    def exchange_plan(
        self,
        sizes: IndexSizes,
        *,
        owns_rows: bool = False,
        capacity_tokens: int = 0,
        batch: int = 0,
        num_sms: int | None = None,
        topk_ids: Tensor | None = None,
    ) -> NVLinkNormalExchangePlan:
        """Return the plan in this block, once the host knows the sizes, or if there is a budget."""
        spec = self.spec
        lengths = _part_words(
            spec.top_k, spec.num_local_experts, self.world_size, self.num_tokens, sizes
        )
        # Each part is followed by words that are not used.
        words = [
            each
            for length, (begin, end) in zip(lengths, pairwise(self.offsets), strict=True)
            for each in (length, end - begin - length)
        ]
        parts = self.memory.split_with_sizes(words)[::2]
        places, _, *index, rows_from, row_base, has_failed = parts
        row_of_slot, slots_of_row, slot_weights, num_tokens, first_slot = index
        return NVLinkNormalExchangePlan(
            num_tokens=self.num_tokens,
            num_rows=sizes.num_rows,
            index=SlotIndex(
                row_of_slot=row_of_slot,
                slots_of_row=slots_of_row.view(sizes.num_rows, spec.top_k),
                num_tokens_per_expert=num_tokens,
                first_slot=first_slot,
                host_num_tokens_per_expert=sizes.per_expert,
                expert_alignment=spec.expert_alignment,
                is_dense=sizes.is_dense,
            ),
            slot_weights=slot_weights.view(torch.float32),
            places=places,
            topk_ids=topk_ids,
            rows_from=rows_from,
            row_base=row_base,
            has_failed=has_failed,
            owns_rows=owns_rows,
            capacity_tokens=capacity_tokens,
            batch=batch,
            num_sms=num_sms,
        )


def _part_words(
    top_k: int, num_local: int, world_size: int, num_tokens: int, sizes: IndexSizes
) -> tuple[int, ...]:
    """Return the words of each of PLAN_PARTS for T tokens."""
    sends = (num_tokens * world_size, num_tokens * top_k)
    index = (sizes.num_slots, sizes.num_rows * top_k, sizes.num_slots, num_local, num_local + 1)
    return (*sends, *index, world_size, world_size, 2)


@lru_cache(maxsize=256)
def _offsets(
    top_k: int, num_local: int, world_size: int, num_tokens: int, most: IndexSizes
) -> tuple[int, ...]:
    """Return the words before each of PLAN_PARTS, and of all, with capacity for `most`."""
    words = _part_words(top_k, num_local, world_size, num_tokens, most)
    return tuple(accumulate((align_up(each, _ALIGNED_WORDS) for each in words), initial=0))
