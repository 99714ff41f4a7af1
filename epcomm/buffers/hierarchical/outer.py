"""Bring the rows of other hosts to this one: a token crosses once for each host that needs it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from epcomm.buffers.collective.all_to_all import CollectiveBuffer, Indexed
from epcomm.buffers.collective.all_to_all_static import StaticCollectiveBuffer
from epcomm.buffers.sizes import Region
from epcomm.calls.counts import Counts
from epcomm.calls.order import Calls
from epcomm.ops.slots import localize
from epcomm.records import SlotIndex
from epcomm.spec import BufferSpec

# What a rank makes of received rows for experts of its own, and this buffer has none.
_OF_SLOTS = ("slot index", "packed slots", "expert results")


class HostRowsBuffer(CollectiveBuffer):
    """Sends tokens between ranks that have one place in their hosts; each stands for its host.

    Its experts are those of the whole host. What it hands out are rows with their expert ids in the
    host and weights, Dispatched.row_topk, which the ranks of the host exchange next: an index over
    the rows would only be undone.
    """

    @classmethod
    def region_bytes(cls, spec: BufferSpec, world_size: int) -> tuple[Region, ...]:
        return _without_slots(super().region_bytes(spec, world_size))

    def _index_rows(self, received: Tensor, counts: Counts) -> Indexed:
        layout, num_local = self._dispatch_layout, self._spec.num_local_experts
        local_ids = localize(layout.ids(received), self._first_expert, num_local)
        return _rows_alone(local_ids, layout.scalars(received))


class StaticHostRowsBuffer(StaticCollectiveBuffer):
    """Sends M rows to every host, whatever the routing, without host sync; as HostRowsBuffer."""

    def __init__(
        self,
        calls: Calls,
        spec: BufferSpec,
        *,
        origins: Sequence[Sequence[int]],
        num_slots: int,
        has_budget: bool,
    ) -> None:
        """Take the ranks and what they must carry, as StaticCollectiveBuffer does.

        num_slots, has_budget: of the buffer inside a host, whose overflows this one reports to
            other hosts.
        """
        super().__init__(calls, spec, origins)
        self._num_slots, self._has_budget = num_slots, has_budget

    @classmethod
    def region_bytes(cls, spec: BufferSpec, world_size: int) -> tuple[Region, ...]:
        return _without_slots(super().region_bytes(spec, world_size))

    def _index_rows(self, rows: Tensor, local_ids: Tensor) -> Indexed:
        return _rows_alone(local_ids, self._dispatch_layout.scalars(rows))

    def _slots_required(self, all_ids: Tensor) -> Tensor:
        # The ranks of the host count theirs.
        return torch.zeros(self._collectives.world_size, dtype=torch.int64, device=all_ids.device)


def _rows_alone(local_ids: Tensor, weights: Tensor) -> Indexed:
    """Hand out ids in the host and weights by row, [R, K] each, and no slots."""
    ids = local_ids.long()
    nothing = ids.new_empty(0)
    index = SlotIndex(
        row_of_slot=None,
        slots_of_row=None,
        num_tokens_per_expert=nothing,
        first_slot=nothing,
        host_num_tokens_per_expert=None,
    )
    # A token that needs several hosts brings weights of the other hosts too.
    row_topk = ids, weights.masked_fill(ids < 0, 0)
    return Indexed(index=index, slot_weights=None, slots_by_row=None, row_topk=row_topk)


def _without_slots(regions: tuple[Region, ...]) -> tuple[Region, ...]:
    return tuple(
        replace(region, name=f"{region.name}, between hosts")
        for region in regions
        if region.name not in _OF_SLOTS
    )
