"""Bring the rows of other hosts to this one: a token crosses once for each host that needs it."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from epcomm.buffers.base import Dispatched, RowTopkDispatched
from epcomm.buffers.collective.all_to_all import CollectiveBuffer
from epcomm.buffers.sizes import Region
from epcomm.calls.counts import Counts
from epcomm.ops.slots import localize
from epcomm.records import SlotIndex
from epcomm.spec import BufferSpec

# What a rank makes of received rows for experts of its own, and this buffer has none.
_OF_SLOTS = ("slot index", "packed slots", "expert results")


class HostRowsBuffer(CollectiveBuffer):
    """Sends tokens between ranks that have one place in their hosts; each stands for its host.

    Its experts are those of the whole host. It returns rows with their expert ids in the host and
    their weights (RowTopkDispatched). The ranks of the host exchange these next, so that an index
    over the rows would only be undone.
    """

    @classmethod
    def region_bytes(cls, spec: BufferSpec, world_size: int) -> tuple[Region, ...]:
        return tuple(
            replace(region, name=f"{region.name}, between hosts")
            for region in super().region_bytes(spec, world_size)
            if region.name not in _OF_SLOTS
        )

    def _index_rows(self, received: Tensor, counts: Counts) -> tuple[SlotIndex, Tensor | None]:
        """Return an index without slots: _with_topk() adds what is read here."""
        nothing = torch.empty(0, dtype=torch.int64, device=received.device)
        index = SlotIndex(
            row_of_slot=None,
            slots_of_row=None,
            num_tokens_per_expert=nothing,
            first_slot=nothing,
            host_num_tokens_per_expert=None,
        )
        return index, None

    def _with_topk(self, out: Dispatched, received: Tensor) -> RowTopkDispatched:
        """Add the ids in the host and the weights of each row, [R, K]."""
        layout, num_local = self._dispatch_layout, self._spec.num_local_experts
        ids = localize(layout.ids(received), self._first_expert, num_local).long()
        # A token that needs several hosts brings weights of the other hosts too.
        row_topk = ids, layout.scalars(received).masked_fill(ids < 0, 0)
        return RowTopkDispatched(**vars(out), row_topk=row_topk)
