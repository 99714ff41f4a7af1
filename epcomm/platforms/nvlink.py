"""Find which GPUs can write one another's memory over NVLink, with NVML of the driver.

torch knows only the devices that are visible to a process, often only one; NVML knows all of the
container. Peer access over PCIe does not suffice, because in general it has no atomics in the
memory of the peer.

Each rank reports the peers of its own GPU; the reports of all ranks are then compared.
"""

import ctypes
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Self

import torch

from epcomm.config import environment

_LIBRARY = "libnvidia-ml.so.1"
# From nvml.h: NVML_SUCCESS, NVML_P2P_CAPS_INDEX_NVLINK, NVML_P2P_STATUS_OK, and
# NVML_DEVICE_UUID_V2_BUFFER_SIZE.
_SUCCESS, _NVLINK, _STATUS_OK, _UUID_BYTES = 0, 2, 0, 96


class NvmlError(Exception):
    """NVML is missing, or a call of it failed."""


@dataclass(frozen=True, kw_only=True)
class PeerReach:
    """The NVLink peers of the GPU of one rank.

    device: the UUID of its GPU.   reached: UUIDs of GPUs whose memory it can write over NVLink.
    lacks: why this is unknown; the other fields are then empty.
    """

    device: str = ""
    reached: tuple[str, ...] = ()
    lacks: str = ""

    def as_text(self) -> str:
        """Return the record as text, for Collectives.agree()."""
        return json.dumps(asdict(self))

    @classmethod
    def parse(cls, text: str) -> Self:
        values = json.loads(text)
        return cls(**values | {"reached": tuple(values["reached"])})


def reach_of(device: torch.device) -> PeerReach:
    """Find the NVLink peers of a CUDA device of this process. Local; allocates nothing on it."""
    try:
        return reach_in(nvlink_peers(), str(torch.cuda.get_device_properties(device).uuid))
    except NvmlError as error:
        return PeerReach(lacks=str(error))


def reach_in(peers: dict[str, list[str]], uuid: str) -> PeerReach:
    """Return the PeerReach of one GPU, from the NVLink peers of all GPUs."""
    if uuid not in peers:
        return PeerReach(lacks=f"NVML has no GPU {uuid}, which may be a part of one (MIG)")
    return PeerReach(device=uuid, reached=tuple(peers[uuid]))


def reach_reasons(reaches: Sequence[PeerReach]) -> list[str]:
    """List why ranks cannot write one another's memory; empty if they can. reaches: by rank."""
    unknown = [f"rank {rank}: {each.lacks}" for rank, each in enumerate(reaches) if each.lacks]
    if unknown:
        return unknown
    reasons = []
    for rank, mine in enumerate(reaches):
        same, far = list[int](), list[int]()
        for other, theirs in enumerate(reaches[rank + 1 :], rank + 1):
            if theirs.device == mine.device:
                same.append(other)
            elif not (theirs.device in mine.reached and mine.device in theirs.reached):
                far.append(other)
        if same:
            reasons.append(f"rank {rank} shares its GPU with {same}, and kernels wait for peers")
        if far:
            reasons.append(f"rank {rank} is not connected to {far} by NVLink")
    return reasons


def nvlink_peers() -> dict[str, list[str]]:
    """Return the NVLink peers of each GPU that NVML knows, by UUID in the format of torch."""
    try:
        library = ctypes.CDLL(_LIBRARY)
    except OSError as error:
        raise NvmlError(
            f"{_LIBRARY} of the driver, which reports NVLink connections, cannot be loaded; in a "
            "container, add utility to NVIDIA_DRIVER_CAPABILITIES"
        ) from error
    _call(library, "nvmlInit_v2")
    try:
        return _peers_in(library)
    finally:
        _call(library, "nvmlShutdown")


def _peers_in(library: ctypes.CDLL) -> dict[str, list[str]]:
    count = ctypes.c_uint()
    _call(library, "nvmlDeviceGetCount_v2", ctypes.byref(count))
    handles: dict[str, ctypes.c_void_p] = {}
    for index in range(count.value):
        handle, uuid = ctypes.c_void_p(), ctypes.create_string_buffer(_UUID_BYTES)
        _call(library, "nvmlDeviceGetHandleByIndex_v2", ctypes.c_uint(index), ctypes.byref(handle))
        _call(library, "nvmlDeviceGetUUID", handle, uuid, ctypes.c_uint(_UUID_BYTES))
        # UUIDs of torch do not have this prefix.
        handles[uuid.value.decode("ascii").removeprefix("GPU-")] = handle

    def is_joined(mine: str, other: str) -> bool:
        status, name = ctypes.c_int(), "nvmlDeviceGetP2PStatus"
        _call(library, name, handles[mine], handles[other], _NVLINK, ctypes.byref(status))
        return status.value == _STATUS_OK

    return {
        mine: [other for other in handles if other != mine and is_joined(mine, other)]
        for mine in handles
    }


def _call(library: ctypes.CDLL, name: str, *arguments: object) -> None:
    try:
        result = getattr(library, name)(*arguments)
    except AttributeError as error:
        raise NvmlError(f"{_LIBRARY} has no {name}; install a newer driver") from error
    if result != _SUCCESS:
        raise NvmlError(f"{name} of {_LIBRARY} returned {result}; see nvmlReturn_t of nvml.h")


def is_triton_interpreted() -> bool:
    """Return whether Triton's kernels run in its interpreter, without importing Triton. Local."""
    return environment().get("TRITON_INTERPRET", "").lower() in ("1", "true", "on")
