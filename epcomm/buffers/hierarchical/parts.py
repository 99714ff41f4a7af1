"""The parts of a hierarchical buffer: one buffer between hosts, and one inside each host."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from epcomm.buffers.base import Buffer, Dispatched, RowTopkDispatched
from epcomm.buffers.collective.all_to_all import CollectiveBuffer
from epcomm.buffers.requirements import carrying_reasons
from epcomm.buffers.shared_memory.buffer import SharedMemoryBuffer
from epcomm.buffers.sizes import Region
from epcomm.calls.counts import Counts
from epcomm.calls.order import Calls
from epcomm.config import Mode
from epcomm.ops.slots import localize
from epcomm.platforms.host import host_of_this_process
from epcomm.platforms.nvlink import PeerReach, reach_of, reach_reasons
from epcomm.records import SlotIndex
from epcomm.spec import BufferSpec, HostLayout

# Regions for local experts, which this buffer does not have.
_OF_SLOTS = ("slot index", "packed slots", "expert results")
# Keys of a rank's record: its host, and the GPUs that its own GPU reaches.
_HOST, _REACH = "host", "reach"


def hosts_of(spec: BufferSpec) -> HostLayout:
    """Return the hosts of a specification that lacks_between() has checked."""
    assert spec.hosts is not None, "lacks_between() rejects unknown hosts"
    return spec.hosts


def num_places(hosts: HostLayout) -> int:
    """Return the number of ranks of each host."""
    return hosts.world_size // hosts.num_hosts


def outer_spec(spec: BufferSpec) -> BufferSpec:
    """Return the specification of the outer buffer: W is the number of hosts.

    A rank has the experts of its whole host, and each rank is on another host.
    """
    hosts = hosts_of(spec)
    return replace(
        spec,
        num_local_experts=spec.num_local_experts * num_places(hosts),
        expert_alignment=1,
        batches_in_flight=None,
        hosts=HostLayout.of(range(hosts.num_hosts)),
    )


def inner_spec(spec: BufferSpec) -> BufferSpec:
    """Return the specification of the inner buffer, whose tokens are rows from all hosts."""
    most, groups = spec.max_tokens_per_rank, spec.sum_groups
    return replace(
        spec,
        max_tokens_per_rank=None if most is None else most * hosts_of(spec).num_hosts,
        # The experts of one host have their part of the groups.
        sum_groups=None if groups is None else groups // hosts_of(spec).num_hosts,
        hosts=None,
    )


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


def inner_buffer_class(
    calls: Calls, inside: Calls, hosts: HostLayout, spec: BufferSpec
) -> type[Buffer]:
    """Return the fastest buffer class that serves every host, equal on all ranks.

    calls: the calls of all ranks.   inside: the calls of the ranks of this host.
    spec: the specification of the buffer inside a host.

    Collective: yes.   Host sync: yes.
    """
    collectives = calls.collectives
    mine = {_HOST: host_of_this_process(), _REACH: ""}
    if collectives.device.type == "cuda":
        mine[_REACH] = reach_of(collectives.device).as_text()
    found = calls.gather_records(mine, phase="open hierarchical")
    if collectives.device.type == "cuda" and spec.sum_groups is not None:
        # Rows of groups are relayed without a sum, which only a RowsBuffer returns.
        return CollectiveBuffer
    if collectives.device.type == "cuda":
        reaches = [PeerReach.parse(str(each[_REACH])) for each in found]
        joined = [[reaches[rank] for rank in ranks] for ranks in hosts.ranks_of_host]
        # Mapping the memory of peers needs a process group, which parts of gloo groups lack.
        is_mapped = inside.collectives.process_group is not None and not any(
            map(reach_reasons, joined)
        )
        return _over_nvlink(spec) if is_mapped else CollectiveBuffer
    # Ranks of one host may be unable to share memory, for example in two containers.
    shared = [{found[rank][_HOST] for rank in ranks} for ranks in hosts.ranks_of_host]
    shares = all(len(each) == 1 and "" not in each for each in shared)
    return SharedMemoryBuffer if shares and calls.waits else CollectiveBuffer


def _over_nvlink(spec: BufferSpec) -> type[Buffer]:
    """Return the NVLink buffer if it supports the rows, else CollectiveBuffer. Imports Triton."""
    from epcomm.buffers.nvlink.normal import NVLinkBuffer

    is_carried = not carrying_reasons(spec, NVLinkBuffer.caps(Mode.NORMAL))
    return NVLinkBuffer if is_carried else CollectiveBuffer
