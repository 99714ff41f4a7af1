"""Exchange plans of normal mode over NVLink: where tokens went, and what arrived.

A plan and its index are parts of one block, which a kernel writes before the host has read sizes.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from epcomm.buffers.nvlink.normal_counts import IndexSizes
from epcomm.kernels.nvlink.common.plan_parts import Arrivals, Received, Sends
from epcomm.records import ExchangePlan, SlotIndex
from epcomm.spec import BufferSpec
from epcomm.types import align_up

# Kernels are compiled for parts that begin at multiples of 16 bytes.
_ALIGNED_WORDS = 4
_WORD_BYTES = 4


@dataclass(frozen=True, kw_only=True, eq=False)
class NVLinkNormalExchangePlan(ExchangePlan):
    """The plan of a dispatch: where this rank's tokens went, and what arrived.

    owns_rows: rows are numbered without gaps, and copied; else index q of source s is row
        s * M + q, of capacity_tokens = M, of memory that peers write.
    batch: number of the dispatch, among all that took a receive buffer.
    num_sms: that of its call.
    """

    sends: Sends
    arrivals: Arrivals
    owns_rows: bool
    capacity_tokens: int
    batch: int = 0
    num_sms: int | None = None

    def rows_from_ranks(self) -> Tensor:
        return self.arrivals.rows_from


@dataclass(frozen=True, kw_only=True, eq=False)
class PlanBlockParts:
    """The parts of a block; slot_weights: [C], float32."""

    sends: Sends
    arrivals: Arrivals
    index: SlotIndex
    slot_weights: Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class PlanBlock:
    """The memory of one call, int32, and the arguments of a kernel for it.

    offsets: the words before each of PLAN_PARTS, and those of the block. Unused memory stays
        allocated: at most 24 * K bytes for each of W * M rows.
    """

    spec: BufferSpec
    world_size: int
    num_tokens: int
    memory: Tensor
    offsets: tuple[int, ...]
    received: Received

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
        begin = memory.data_ptr()
        received = Received(
            addresses=tuple([begin + _WORD_BYTES * offset for offset in offsets[:-1]]),
            num_slots=most.num_slots,
            expert_alignment=spec.expert_alignment,
            has_budget=has_budget,
            has_row_budget=has_row_budget,
            is_compact=is_compact,
            row_topk=row_topk,
        )
        return cls(
            spec=spec,
            world_size=world_size,
            num_tokens=num_tokens,
            memory=memory,
            offsets=offsets,
            received=received,
        )

    def parts(self, sizes: IndexSizes) -> PlanBlockParts:
        """Return the parts, once the host knows the sizes, or if there is a budget."""
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
        places, positions, *index, rows_from, row_base, has_failed = parts
        row_of_slot, slots_of_row, slot_weights, num_tokens, first_slot = index
        return PlanBlockParts(
            sends=Sends(places=places, positions=positions),
            arrivals=Arrivals(rows_from=rows_from, row_base=row_base, has_failed=has_failed),
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
        )

    def row_topk(self, sizes: IndexSizes) -> tuple[Tensor, Tensor] | None:
        """Return the experts and the weights of the rows, if the kernel was asked to write them."""
        topk = self.received.row_topk
        return None if topk is None else (topk[0][: sizes.num_rows], topk[1][: sizes.num_rows])


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
