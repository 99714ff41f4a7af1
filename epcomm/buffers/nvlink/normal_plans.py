"""Exchange plans of normal mode over NVLink: where tokens went, and what arrived."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from epcomm.buffers.nvlink.normal_counts import IndexSizes
from epcomm.buffers.nvlink.plan_blocks import PlanBlock, PlanBlockLayout
from epcomm.kernels.nvlink.common.plan_parts import Arrivals, Received, Sends
from epcomm.records import ExchangePlan, SlotIndex
from epcomm.spec import BufferSpec


@dataclass(frozen=True, kw_only=True, eq=False)
class NVLinkNormalExchangePlan(ExchangePlan):
    """The plan of a dispatch: where this rank's tokens went, and what arrived.

    owns_rows: rows are numbered without gaps, and copied; else index q of source s is row
        s * M + q, of capacity_tokens = M, of memory that peers write.
    batch: number of the dispatch, among all that took a receive buffer.
    num_sms: that of its call.
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
    """Allocates the memory to which kernels write an exchange plan; nothing is written yet."""

    spec: BufferSpec
    world_size: int
    device: torch.device

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
        layout = PlanBlockLayout.of(
            spec.top_k, spec.num_local_experts, self.world_size, num_tokens, most
        )
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
        """Return the plan of a dispatch in which nothing was sent, and nothing arrived."""
        spec, size = self.spec, self.world_size

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=self.device)

        return NVLinkNormalExchangePlan(
            num_tokens=0,
            num_rows=0,
            index=SlotIndex(
                row_of_slot=zeros(0),
                slots_of_row=zeros(0, spec.top_k),
                num_tokens_per_expert=zeros(spec.num_local_experts),
                first_slot=zeros(spec.num_local_experts + 1),
                host_num_tokens_per_expert=None,
                expert_alignment=spec.expert_alignment,
                is_dense=True,
            ),
            sends=Sends(places=zeros(0), positions=zeros(0)),
            arrivals=Arrivals(rows_from=zeros(size), row_base=zeros(size), has_failed=zeros(2)),
            owns_rows=True,
            capacity_tokens=0,
        )
