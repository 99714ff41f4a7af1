"""Exchange plans of normal mode over NVLink: where tokens went, and what came."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from epcomm.records import ExchangePlan, SlotIndex
from epcomm.spec import BufferSpec

if TYPE_CHECKING:
    from epcomm.kernels.nvlink.normal_exchange import Arrivals, Sends


@dataclass(frozen=True, kw_only=True, eq=False)
class NVLinkNormalExchangePlan(ExchangePlan):
    """The plan of a dispatch: where this rank's tokens went, and what came.

    owns_rows: rows are numbered without gaps, and copied; else place q of source s is row
        s * M + q, of capacity_tokens = M, of memory that peers write.
    batch: number of the dispatch, among all that took a receive buffer.
    """

    num_tokens: int
    num_rows: int
    index: SlotIndex
    sends: Sends
    arrivals: Arrivals
    owns_rows: bool
    capacity_tokens: int
    batch: int = 0


@dataclass(frozen=True, kw_only=True, eq=False)
class ExchangePlanMemory:
    """Allocates what kernels write an exchange plan to; nothing is written yet."""

    spec: BufferSpec
    world_size: int
    device: torch.device

    def sends(self, num_tokens: int) -> Sends:
        from epcomm.kernels.nvlink.normal_exchange import Sends

        top_k = self.spec.top_k
        return Sends(
            places=self._integers(num_tokens, self.world_size),
            positions=self._integers(num_tokens, top_k),
            owners=self._integers(num_tokens, top_k),
        )

    def arrivals(self) -> Arrivals:
        from epcomm.kernels.nvlink.normal_exchange import Arrivals

        return Arrivals(
            rows_from=self._integers(self.world_size),
            row_base=self._integers(self.world_size),
            has_failed=self._integers(1),
        )

    def index(
        self, num_rows: int, num_slots: int, counts: Sequence[int] | None, *, is_dense: bool
    ) -> SlotIndex:
        """Allocate an index over received rows, which a kernel then writes.

        counts: slots of each expert, where the host has read them.
        """
        num_local = self.spec.num_local_experts
        return SlotIndex(
            row_of_slot=self._integers(num_slots),
            slots_of_row=self._integers(num_rows, self.spec.top_k),
            num_tokens_per_expert=self._integers(num_local),
            first_slot=self._integers(num_local + 1),
            host_num_tokens_per_expert=None if counts is None else tuple(counts),
            expert_alignment=self.spec.expert_alignment,
            is_dense=is_dense,
        )

    def empty_exchange_plan(self) -> NVLinkNormalExchangePlan:
        """Return the plan of a dispatch in which nothing went anywhere, and nothing came."""
        arrivals = self.arrivals()
        for tensor in (arrivals.rows_from, arrivals.row_base, arrivals.has_failed):
            tensor.zero_()
        return NVLinkNormalExchangePlan(
            num_tokens=0,
            num_rows=0,
            index=self.index(0, 0, None, is_dense=True),
            sends=self.sends(0),
            arrivals=arrivals,
            owns_rows=True,
            capacity_tokens=0,
        )

    def _integers(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.int32, device=self.device)
