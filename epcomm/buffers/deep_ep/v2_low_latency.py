"""Low latency of deep_ep V2: a row for each (token, expert) pair, packed by expert, no index.

Rows come with a router weight each, those of one expert in any order. There is no backward, because
combine of expanded rows takes no gradients of weights. Padding follows the rows of each expert.
"""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import torch
import torch.nn.functional as F

from epcomm.buffers.base import Buffer, Dispatched
from epcomm.buffers.deep_ep.normal import DeepEPCalls
from epcomm.buffers.deep_ep.rows import row_bytes_of
from epcomm.buffers.deep_ep.v2 import ElasticPackage
from epcomm.buffers.sizes import Region, max_slots_of
from epcomm.calls.call import DispatchCall
from epcomm.config import Mode
from epcomm.ops.slots import aligned_counts
from epcomm.records import SlotIndex
from epcomm.spec import BufferCaps, BufferSpec


class ExpandingPackage(ElasticPackage):
    """An ElasticBuffer that returns a row for each (token, expert) pair."""

    is_trainable: ClassVar[bool] = False
    expands: ClassVar[bool] = True


class DeepEPV2LowLatencyBuffer(DeepEPCalls, Buffer):
    """Serves low latency, any routing of M tokens a rank; the host reads nothing."""

    name: ClassVar[str] = "deep_ep_v2"
    modes: ClassVar[frozenset[Mode]] = frozenset({Mode.LOW_LATENCY})
    package = ExpandingPackage
    is_static: ClassVar[bool] = True
    # Normal mode has the same requirement.
    needs_distinct_ids: ClassVar[bool] = True

    @classmethod
    def caps(cls, mode: Mode) -> BufferCaps:
        return replace(
            super().caps(mode),
            trainable=False,
            ordered=False,
            has_slot_budget=False,
        )

    @classmethod
    def region_bytes(cls, spec: BufferSpec, world_size: int) -> tuple[Region, ...]:
        row = row_bytes_of(spec)
        num_slots = max_slots_of(spec, (spec.max_tokens_per_rank or 0) * world_size)
        return (
            cls.package.own_region(spec, world_size),
            Region(name="received slots", max_bytes=num_slots * row.dispatch),
            Region(name="expert results", max_bytes=num_slots * row.combine),
        )

    def dispatch(self, call: DispatchCall) -> Dispatched:
        self._check_open()
        ids, fault, flags = self._guard_on_device(call)
        has_failed = self._record(call, fault, fault * 0, self._max_slots)
        received = self._send(call, ids)
        alignment = self._spec.expert_alignment
        # The real rows of each expert end here, and those of the next begin at the next multiple.
        ends = received.handle.psum_num_recv_tokens_per_expert
        starts = F.pad(aligned_counts(ends, alignment), (1, 0))
        index = SlotIndex(
            row_of_slot=None,
            slots_of_row=None,
            num_tokens_per_expert=(ends - starts[:-1]).to(torch.int32),
            first_slot=starts.to(torch.int32),
            host_num_tokens_per_expert=None,
            expert_alignment=alignment,
        )
        return self._dispatched(ids, received, index, flags, has_failed)
