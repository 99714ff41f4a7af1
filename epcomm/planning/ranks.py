"""The ranks of a plan: number, machine, transport, hosts, and the links of their GPUs.

A group finds these facts, and a plan for other machines assumes them; the same rules decide.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from epcomm.buffers.base import Backend
from epcomm.group import EPGroup
from epcomm.platforms.assumed import AssumedMachine
from epcomm.platforms.machine import Machine, this_machine
from epcomm.platforms.nvlink import PeerReach, reach_reasons
from epcomm.spec import BufferCaps, BufferSpec, HostLayout


@dataclass(frozen=True, kw_only=True)
class PlannedRanks:
    """The ranks of a plan.

    world_size: W.   machine: the one that runs each rank.
    device_type: of their tensors; None for ranks that form no group yet.
    host_waits: the host waits in collectives, as over gloo and MPI.
    has_process_group: the ranks form a group of torch.distributed.
    where: the ranks, in messages, such as `this one`.
    hosts: for each rank the text that is equal for ranks that can share memory, empty where that
        is not known; no texts where ranks are taken to be on one host.
    reaches: what the GPU of each rank reaches; empty where ranks have none.
    given: the hosts that the user of a group names. Where these are several, ranks exchange as over
        several, even if they could share memory. Where it is one, the texts still count.
    """

    world_size: int
    machine: Machine
    device_type: str | None = None
    host_waits: bool = False
    has_process_group: bool = False
    where: str = "this one"
    hosts: Sequence[str] = ()
    reaches: Sequence[PeerReach] = ()
    given: HostLayout | None = None

    @classmethod
    def of(cls, group: EPGroup) -> Self:
        """Return the ranks of a group, without hosts and reaches, which they exchange. Local."""
        return cls(
            world_size=group.world_size,
            machine=this_machine(),
            device_type=group.device.type,
            host_waits=group.collectives.bounded is not None,
            has_process_group=group.collectives.process_group is not None,
            given=group.hosts,
        )

    @classmethod
    def here(cls, world_size: int, hosts: HostLayout | None) -> Self:
        """Return ranks on machines like this one; hosts: None for one host."""
        names = () if hosts is None else tuple(map(str, hosts.host_of_rank))
        return cls(world_size=world_size, machine=this_machine(), hosts=names)

    @classmethod
    def assumed(cls, world_size: int, machine: AssumedMachine) -> Self:
        return cls(
            world_size=world_size,
            machine=machine.machine(),
            device_type=machine.device_type,
            host_waits=machine.transport == "gloo",
            has_process_group=True,
            where=f"{machine.name} (assumed)",
            hosts=machine.hosts(world_size),
            reaches=machine.reaches(world_size),
        )

    @property
    def is_host_bound(self) -> bool:
        """Return whether tensors are on the CPU and its host waits in each exchange."""
        if self.device_type is None:
            return not self.machine.has_cuda()
        return self.device_type == "cpu" and self.host_waits

    @property
    def layout(self) -> HostLayout | None:
        """The host of each rank; None on one host, and where some rank's host is not known."""
        layout = self.given
        if layout is None and self.hosts and all(self.hosts):
            layout = HostLayout.of(self.hosts)
        return layout if layout is not None and layout.num_hosts > 1 else None

    def own_reasons(self, backend: type[Backend], caps: BufferCaps) -> list[str]:
        """Return the reasons why the device or the transport of this rank is not supported."""
        reasons = []
        if self.device_type is None:
            reason = "serves one host, which only a process group shows; run under torchrun"
            return [reason] if backend.needs_one_host else []
        if caps.device_types is not None and self.device_type not in caps.device_types:
            served = ", ".join(sorted(caps.device_types))
            reasons.append(f"serves groups on {served}, and {self.where} is on {self.device_type}")
        if backend.needs_process_group and not self.has_process_group:
            reasons.append("needs a group made of a torch.distributed process group")
        if backend.needs_host_waits and not self.host_waits:
            reasons.append("needs a transport in whose collectives the host waits, gloo or MPI")
        return reasons

    def joint_reasons(self, backend: type[Backend], spec: BufferSpec) -> list[str]:
        """Return why the hosts of the ranks, or the links of their GPUs, are not supported."""
        reasons = list(backend.lacks_between(spec))
        if not self.hosts:
            return reasons
        number, is_one_host = f"{len(set(self.hosts))} hosts", len(set(self.hosts)) == 1
        if self.given is not None and self.given.num_hosts > 1:
            number, is_one_host = f"{self.given.num_hosts} hosts by the mesh of EPGroup", False
        if backend.needs_one_host and not (is_one_host and self.hosts[0]):
            return [f"ranks are on {number}, expected one whose memory they share", *reasons]
        return [*(reach_reasons(self.reaches) if backend.needs_nvlink else ()), *reasons]
