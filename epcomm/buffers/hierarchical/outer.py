"""The buffer between hosts: it sends a token once to each host that needs it."""

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

# Regions for local experts, which this buffer does not have.
_OF_SLOTS = ("slot index", "packed slots", "expert results")


class HostRowsBuffer(CollectiveBuffer):
    """Sends tokens between ranks with the same index in their hosts; each stands for its host.

    A rank has the experts of its whole host here. A dispatch returns rows with their expert ids in
    the host and their weights (RowTopkDispatched), as input of the inner buffer. It makes no index
    over the rows, because the inner buffer would not use it.
    """

    @classmethod
    def region_bytes(cls, spec: BufferSpec, world_size: int) -> tuple[Region, ...]:
        return tuple(
            replace(region, name=f"{region.name}, between hosts")
            for region in super().region_bytes(spec, world_size)
            if region.name not in _OF_SLOTS
        )

    def _index_rows(self, received: Tensor, counts: Counts) -> tuple[SlotIndex, Tensor | None]:
        """Return an index without slots; the inner buffer reads _with_topk() instead."""
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
        # A token for several hosts has the weights of all its experts; clear those of other hosts.
        row_topk = ids, layout.scalars(received).masked_fill(ids < 0, 0)
        return RowTopkDispatched(**vars(out), row_topk=row_topk)
