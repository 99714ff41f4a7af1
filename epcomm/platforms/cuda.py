"""Say what the CUDA devices of this process have, and which packages their kernels need.

Without a device a question about one is an error of torch; cuda_reasons() asks whether there is
one. Nothing here imports a package.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

import torch
from torch import Tensor

from epcomm.platforms.machine import Machine

_NOTHING = nullcontext()


@dataclass(frozen=True, kw_only=True)
class Capabilities:
    """Compute capabilities of NVIDIA GPUs, major and minor; most: None for all newer ones."""

    least: tuple[int, int]
    most: tuple[int, int] | None = None

    def lacking(self, found: tuple[int, int]) -> list[str]:
        """Return the reason why a GPU of compute capability `found` does not serve, if any."""
        if self.least <= found and (self.most is None or found <= self.most):
            return []
        return [f"compute capability is {found}, expected {self._range}"]

    def __str__(self) -> str:
        return f"compute capability {self._range}"

    @property
    def _range(self) -> str:
        if self.most is None:
            return f"at least {self.least}"
        return f"{self.least}" if self.least == self.most else f"{self.least} to {self.most}"


# GPUs with an engine that copies between global and shared memory, from Hopper on.
COPY_ENGINE = Capabilities(least=(9, 0))


def cuda_reasons(machine: Machine) -> list[str]:
    """List why no kernel of CUDA runs on a machine; empty if there is a device. Local."""
    return [] if machine.has_cuda() else ["there is no CUDA device"]


def triton_reasons(machine: Machine) -> list[str]:
    """List why no kernel of Triton is compiled on a machine; empty if it can be. Local."""
    return [] if machine.has_module("triton") else ["triton is not installed; install it"]


def symmetric_memory_reasons(machine: Machine) -> list[str]:
    """List why a process cannot open memory of its peers; empty if it can. Local.

    Which peers a device reaches depends on the ranks, see platforms.nvlink.
    """
    if machine.has_module("torch.distributed._symmetric_memory"):
        return []
    return ["this torch has no symmetric memory; install 2.11 or newer"]


def compute_capability(device: torch.device | None = None) -> tuple[int, int] | None:
    """Return major and minor number of a CUDA device, by default the current; None of others."""
    if device is not None and device.type != "cuda":
        return None
    return torch.cuda.get_device_capability(device)


def has_dependent_launch(device: torch.device) -> bool:
    """Return whether a kernel may start beside the one before it: NVIDIA, from Hopper on."""
    capability = compute_capability(device)
    # ROCm numbers its architectures likewise, and has no such launch.
    return torch.version.hip is None and capability is not None and capability[0] >= 9


def name_of(device: torch.device) -> str:
    """Return what a CUDA device calls itself, such as NVIDIA H200."""
    return torch.cuda.get_device_name(device)


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Make a device the current one; on a CPU, or where it is, nothing is to be done. Local.

    torch.cuda.device() alone takes 3 us of host time.
    """
    if device.type != "cuda" or torch._C._cuda_getDevice() == device.index:
        return _NOTHING
    return torch.cuda.device(device)


def num_sms_of(device: torch.device | int) -> int:
    """Return how many SMs a CUDA device has."""
    return torch.cuda.get_device_properties(device).multi_processor_count


def shared_bytes_of(device: torch.device) -> int | None:
    """Return the most bytes of shared memory that a block may have; None if torch does not tell."""
    return getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", None)


def start_read(tensor: Tensor) -> Callable[[], list]:
    """Begin to copy a tensor to the host, and return what waits for it and gives its values.

    The wait is for what was launched before this call, and not for what comes later. A tensor on a
    CPU, where kernels are interpreted, is read when it is asked for.
    """
    if not tensor.is_cuda:
        return tensor.tolist
    host = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)
    host.copy_(tensor, non_blocking=True)
    copied = torch.cuda.Event()
    copied.record(torch.cuda.current_stream(tensor.device))

    def read() -> list:
        copied.synchronize()
        return host.tolist()

    return read


def nvidia_libraries(file_name: str) -> list[str]:
    """List the paths of a library in the installed wheels of NVIDIA, sorted within each folder."""
    spec = find_spec("nvidia")
    folders = list(spec.submodule_search_locations or ()) if spec is not None else []
    return [
        str(path) for folder in folders for path in sorted(Path(folder).glob(f"*/lib/{file_name}"))
    ]
