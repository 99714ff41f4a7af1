"""Choose the buffer inside a host: shared memory, NVLink, or plain collectives."""

from __future__ import annotations

from epcomm.buffers.base import Buffer
from epcomm.buffers.collective.all_to_all import CollectiveBuffer
from epcomm.buffers.requirements import carrying_reasons
from epcomm.buffers.shared_memory.buffer import SharedMemoryBuffer
from epcomm.calls.order import Calls
from epcomm.config import Mode
from epcomm.platforms.host import host_of_this_process
from epcomm.platforms.nvlink import PeerReach, reach_of, reach_reasons
from epcomm.spec import BufferSpec, HostLayout

# Keys of a rank's record: its host, and the GPUs that its own GPU reaches.
_HOST, _REACH = "host", "reach"


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
