"""Say what lies between ranks: their device, their transport, their hosts, and NVLink.

A group finds it, and a plan for a machine that is not this one assumes it; the same rules decide.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from epcomm.buffers.base import Backend, Buffer
from epcomm.platforms.nvlink import PeerReach, reach_reasons
from epcomm.registry import BUFFERS, buffer_class, class_names
from epcomm.spec import Availability, BufferCaps, HostLayout

if TYPE_CHECKING:
    from epcomm.group import EPGroup

# The verdicts on candidates, by question and then by name.
Verdicts = Mapping[str, Mapping[str, Availability]]


@dataclass(frozen=True, kw_only=True)
class Transport:
    """Tell how the ranks of a plan are joined.

    device_type: of their tensors.   where: the ranks, in messages, such as `this one`.
    host_waits: the host waits in collectives, as over gloo and MPI.
    has_process_group: the ranks form a group of torch.distributed.
    """

    device_type: str
    host_waits: bool
    has_process_group: bool
    where: str = "this one"

    @classmethod
    def of(cls, group: EPGroup) -> Transport:
        """Return the transport of a group. Local."""
        return cls(
            device_type=group.device.type,
            host_waits=group.collectives.bounded is not None,
            has_process_group=group.collectives.process_group is not None,
        )

    @property
    def is_host_bound(self) -> bool:
        """Return whether tensors are on the CPU and its host waits in each exchange."""
        return self.device_type == "cpu" and self.host_waits

    def reasons(self, backend: type[Backend], caps: BufferCaps) -> list[str]:
        """Say why the device or the transport of the ranks does not serve."""
        reasons = []
        if caps.device_types is not None and self.device_type not in caps.device_types:
            served = ", ".join(sorted(caps.device_types))
            reasons.append(f"serves groups on {served}, and {self.where} is on {self.device_type}")
        if backend.needs_process_group and not self.has_process_group:
            reasons.append("needs a group made of a torch.distributed process group")
        if backend.needs_host_waits and not self.host_waits:
            reasons.append("needs a transport in whose collectives the host waits, gloo or MPI")
        return reasons


def layout_of(hosts: Sequence[str], given: HostLayout | None = None) -> HostLayout | None:
    """Return where ranks run, if on several hosts: as the user says, else as it was found.

    Args:
        hosts: the text that is equal for ranks that can share memory, of each rank; empty where
            that is not known.
        given: what the user says.

    Returns: None on one host, and where some rank's host is not known.
    """
    if given is None:
        if not (hosts and all(hosts)):
            return None
        given = HostLayout.of(hosts)
    return given if given.num_hosts > 1 else None


def judge_together(
    verdicts: Verdicts,
    hosts: Sequence[str],
    reaches: Sequence[PeerReach],
    given: HostLayout | None = None,
) -> Verdicts:
    """Reject what the hosts of the ranks, or the links between their GPUs, do not allow.

    Args:
        verdicts: those that hold on every rank.
        hosts: the text that is equal for ranks that can share memory, of each rank.
        reaches: what the GPU of each rank reaches; empty where ranks have none.
        given: the hosts as the user says. Who puts ranks on several has them exchange as over
            several, even where they could share memory; one host is believed to none that differ.
    """
    is_one_host, number = len(set(hosts)) == 1 and bool(hosts[0]), f"{len(set(hosts))} hosts"
    if given is not None and given.num_hosts > 1:
        is_one_host, number = False, f"{given.num_hosts} hosts by the mesh of EPGroup"
    if not is_one_host:
        reason = f"ranks are on {number}, expected one whose memory they share"
        verdicts = _with_reasons(verdicts, lambda backend: backend.needs_one_host, [reason])

    def needs_links(backend: type[Buffer]) -> bool:
        # Of GPUs on several hosts, that they are is reason enough.
        return backend.needs_nvlink and (is_one_host or not backend.needs_one_host)

    return _with_reasons(verdicts, needs_links, reach_reasons(reaches))


def _with_reasons(
    verdicts: Verdicts, needs: Callable[[type[Buffer]], bool], reasons: Sequence[str]
) -> Verdicts:
    """Reject buffers that need what is not there; other candidates stay as they are."""
    buffers = {name for backend in BUFFERS for name in class_names(backend)}

    def judge(name: str, verdict: Availability) -> Availability:
        if not reasons or name not in buffers or not needs(buffer_class(name)):
            return verdict
        return Availability(ok=False, reasons=(*verdict.reasons, *reasons))

    return {
        question: {name: judge(name, verdict) for name, verdict in found.items()}
        for question, found in verdicts.items()
    }
