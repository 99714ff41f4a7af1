"""Assumed machines, for plans of hardware that this machine does not have."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from epcomm.errors import grouped
from epcomm.platforms.deep_ep import DeepEPKind, InstalledDeepEP
from epcomm.platforms.machine import Answer, Machine
from epcomm.platforms.nvlink import PeerReach

# The deep_ep of each backend that needs one.
DEEP_EP_OF_BACKEND: Mapping[str, DeepEPKind] = {
    "deep_ep": DeepEPKind.V2,
    "deep_ep_v1": DeepEPKind.V1,
    "deep_ep_v2": DeepEPKind.V2,
}


@dataclass(frozen=True, kw_only=True)
class AssumedMachine:
    """An assumed host with one kind of device, which runs one rank per device.

    name: its name in --device.   device_type: that of tensors.   transport: of the process group.
    capability: compute capability of its NVIDIA GPUs, which NVLink connects; None for others.
    ranks_per_host: limit of the ranks of one host; None for no limit.
    deep_ep: the installed deep_ep, or None.
    """

    name: str
    device_type: str
    transport: str
    capability: tuple[int, int] | None = None
    ranks_per_host: int | None = None
    deep_ep: DeepEPKind | None = None

    def machine(self) -> Machine:
        """Return the Machine of each rank. Local."""
        capability, device = self.capability, torch.device(self.device_type)
        found, deep_ep = self.deep_ep, None
        if found is not None:
            deep_ep = InstalledDeepEP(kind=found, has_legacy_buffer=True, has_logfmt=True)
        return Machine(
            find_version=lambda distribution: None,
            run_program=lambda program: Answer(error=f"{self.name} is assumed and runs nothing"),
            environment={},
            has_module=lambda name: name == "triton" and capability is not None,
            find_deep_ep=lambda: deep_ep,
            has_library=lambda load: capability is not None,
            has_cuda=lambda: capability is not None,
            capability=lambda device: capability or (0, 0),
            device_of=lambda tensor: device,
            host=lambda: self.name,
            memory_left=lambda: None,
        )

    def hosts(self, world_size: int) -> list[str]:
        """Return the host of each rank; hosts are filled one after another."""
        most = self.ranks_per_host or world_size
        return [f"{self.name} {rank // most}" for rank in range(world_size)]

    def reaches(self, world_size: int) -> list[PeerReach]:
        """Return the NVLink peers of the GPU of each rank; empty without GPUs."""
        if self.capability is None:
            return []
        hosts = self.hosts(world_size)
        ranks = grouped((host, str(rank)) for rank, host in enumerate(hosts))
        return [PeerReach(device=str(r), reached=tuple(ranks[h])) for r, h in enumerate(hosts)]

    def describe(self, world_size: int) -> tuple[str, ...]:
        """List the assumptions about `world_size` ranks, one per line."""
        hosts = self.hosts(world_size)
        num_hosts, most = len(set(hosts)), hosts.count(hosts[0])
        place = "1 host" if num_hosts == 1 else f"{num_hosts} hosts"
        ranks = "1 rank" if world_size == 1 else f"{world_size} ranks"
        facts = [f"{ranks} on {place} of {self.name}, at most {most} a host"]
        if self.capability is not None:
            major, minor = self.capability
            deep_ep = self.deep_ep or "not, unless the configuration names its backend"
            facts += [
                f"compute capability {major}.{minor}, one GPU a rank, all GPUs of a host joined by "
                "NVLink",
                "torch built for CUDA, triton and NVRTC are installed; deep_gemm is not, and "
                f"deep_ep is {deep_ep}",
            ]
        facts += [
            f"a process group over {self.transport}",
            "no environment variable is set, and the memory is enough",
        ]
        return tuple(facts)


def _hgx(name: str, capability: tuple[int, int]) -> AssumedMachine:
    """Return HGX or DGX hosts, whose 8 GPUs NVLink connects."""
    return AssumedMachine(
        name=name, device_type="cuda", transport="nccl", capability=capability, ranks_per_host=8
    )


DEVICES: Mapping[str, AssumedMachine] = {
    "h100": _hgx("h100", (9, 0)),
    "h200": _hgx("h200", (9, 0)),
    "b200": _hgx("b200", (10, 0)),
    "cpu": AssumedMachine(name="cpu", device_type="cpu", transport="gloo"),
}
