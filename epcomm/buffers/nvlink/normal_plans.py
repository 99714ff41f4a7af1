"""Exchange plans of normal mode over NVLink: where tokens went, and what came."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from epcomm.buffers.nvlink.normal_counts import IndexSizes
from epcomm.buffers.nvlink.plan_blocks import WORDS_OF_16_BYTES, PlanBlock, PlanBlockLayout
from epcomm.kernels.nvlink.common.plan_parts import Arrivals, Received, Sends
from epcomm.records import ExchangePlan, SlotIndex
from epcomm.spec import BufferSpec


@dataclass(frozen=True, kw_only=True, eq=False)
class NVLinkNormalExchangePlan(ExchangePlan):
    """The plan of a dispatch: where this rank's tokens went, and what came.

    owns_rows: rows are numbered without gaps, and copied; else place q of source s is row
        s * M + q, of capacity_tokens = M, of memory that peers write.
    batch: number of the dispatch, among all that took a receive buffer.
    num_sms: as its call says.
    """

    num_tokens: int
    num_rows: int
    index: SlotIndex
    sends: Sends
    arrivals: Arrivals
    owns_rows: bool
    capacity_tokens: int
    batch: int = 0
    num_sms: int | None = None

    def rows_from_ranks(self) -> Tensor:
        return self.arrivals.rows_from


@dataclass(frozen=True, kw_only=True, eq=False)
class ExchangePlanMemory:
    """Allocates what kernels write an exchange plan to; nothing is written yet."""

    spec: BufferSpec
    world_size: int
    device: torch.device

    def sends(self, num_tokens: int) -> Sends:
        num_entries = num_tokens * self.spec.top_k
        places, positions = self._integers(num_tokens * self.world_size, num_entries)
        return Sends(places=places, positions=positions)

    def received(
        self, num_rows: int, num_slots: int, counts: Sequence[int] | None, *, is_dense: bool
    ) -> tuple[SlotIndex, Arrivals]:
        """Allocate an index over received rows, and what came from each rank, for a kernel.

        counts: slots of each expert, where the host has read them.
        """
        num_local, top_k, size = self.spec.num_local_experts, self.spec.top_k, self.world_size
        row_of_slot, slots_of_row, per_expert, first_slot, rows_from, row_base, has_failed = (
            self._integers(num_slots, num_rows * top_k, num_local, num_local + 1, size, size, 2)
        )
        index = SlotIndex(
            row_of_slot=row_of_slot,
            slots_of_row=slots_of_row.view(num_rows, top_k),
            num_tokens_per_expert=per_expert,
            first_slot=first_slot,
            host_num_tokens_per_expert=None if counts is None else tuple(counts),
            expert_alignment=self.spec.expert_alignment,
            is_dense=is_dense,
        )
        return index, Arrivals(rows_from=rows_from, row_base=row_base, has_failed=has_failed)

    def block(
        self,
        num_tokens: int,
        most: IndexSizes,
        *,
        has_budget: bool,
        is_compact: bool,
        wants_row_topk: bool,
        has_row_budget: bool = False,
    ) -> PlanBlock:
        """Allocate a plan and its index, for a kernel that runs before the host has read sizes."""
        spec, device, row_topk = self.spec, self.device, None
        layout = PlanBlockLayout.of(spec, self.world_size, num_tokens, most)
        memory = torch.empty(layout.num_words, dtype=torch.int32, device=device)
        if wants_row_topk:
            shape = (most.num_rows, spec.top_k)
            ids = memory.new_empty(shape, dtype=torch.int64)
            row_topk = ids, memory.new_empty(shape, dtype=torch.float32)
        begin = memory.data_ptr()
        received = Received(
            addresses=tuple([begin + offset for offset in layout.offsets]),
            num_slots=most.num_slots,
            expert_alignment=spec.expert_alignment,
            has_budget=has_budget,
            has_row_budget=has_row_budget,
            is_compact=is_compact,
            row_topk=row_topk,
        )
        return PlanBlock(spec=spec, memory=memory, layout=layout, received=received)

    def empty_exchange_plan(self) -> NVLinkNormalExchangePlan:
        """Return the plan of a dispatch in which nothing went anywhere, and nothing came."""
        index, arrivals = self.received(0, 0, None, is_dense=True)
        for tensor in (arrivals.rows_from, arrivals.row_base, arrivals.has_failed):
            tensor.zero_()
        return NVLinkNormalExchangePlan(
            num_tokens=0,
            num_rows=0,
            index=index,
            sends=self.sends(0),
            arrivals=arrivals,
            owns_rows=True,
            capacity_tokens=0,
        )

    def _integers(self, *lengths: int) -> tuple[Tensor, ...]:
        """Return int32 of these lengths, in one piece of memory: an allocation takes 2 us.

        Each begins at a multiple of 16 bytes, as kernels are compiled for.
        """
        parts, places = [], []
        for length in lengths:
            places.append(len(parts))
            parts.append(length)
            if gap := -length % WORDS_OF_16_BYTES:
                parts.append(gap)
        memory = torch.empty(sum(parts), dtype=torch.int32, device=self.device)
        pieces = memory.split_with_sizes(parts)
        return tuple([pieces[place] for place in places])
