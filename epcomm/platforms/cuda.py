"""Properties of the CUDA devices of this process, and the requirements of their kernels.

Except for cuda_reasons(), queries of a device raise in torch if there is none. No package is
imported.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from threading import Lock
from typing import Any

import torch
from torch import Tensor

from epcomm.errors import BackendUnavailable
from epcomm.platforms.machine import Machine

_NOTHING = nullcontext()
# Settings of packages are those of the process; autograd calls from other threads.
_SETTING = Lock()


@dataclass(frozen=True, kw_only=True)
class Capabilities:
    """A range of compute capabilities, (major, minor); most: None for no upper limit."""

    least: tuple[int, int]
    most: tuple[int, int] | None = None

    def lacking(self, found: tuple[int, int]) -> list[str]:
        """Return why a GPU of compute capability `found` does not serve; empty if it does."""
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
    """List why a machine cannot run CUDA kernels; empty if it can. Local."""
    return [] if machine.has_cuda() else ["there is no CUDA device"]


def triton_reasons(machine: Machine) -> list[str]:
    """List why a machine cannot compile Triton kernels; empty if it can. Local."""
    return [] if machine.has_module("triton") else ["triton is not installed; install it"]


@contextmanager
def importing_triton(caller: str) -> Iterator[None]:
    """Raise BackendUnavailable if an import in this context lacks Triton."""
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name is None or error.name.partition(".")[0] != "triton":
            raise
        raise BackendUnavailable(
            f"{caller}: triton is not installed, but tensors on cuda need it; install triton, "
            "which comes with torch for CUDA and ROCm"
        ) from error


def compute_capability(device: torch.device) -> tuple[int, int] | None:
    """Return (major, minor) of a CUDA device; None for other devices."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else None


def has_dependent_launch(device: torch.device) -> bool:
    """Return whether a kernel may start before the previous one ends: NVIDIA from Hopper on."""
    capability = compute_capability(device)
    # ROCm has similar version numbers and no such launch.
    return torch.version.hip is None and capability is not None and capability[0] >= 9


def name_of(device: torch.device) -> str:
    """Return the name of a CUDA device, such as NVIDIA H200."""
    return torch.cuda.get_device_name(device)


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Return a context in which a CUDA device is the current one. Local.

    torch.cuda.device() takes 3 us of host time, so it is used only if the device changes.
    """
    if device.type != "cuda" or torch._C._cuda_getDevice() == device.index:
        return _NOTHING
    return torch.cuda.device(device)


def num_sms_of(device: torch.device | int) -> int:
    """Return the number of SMs of a CUDA device."""
    return torch.cuda.get_device_properties(device).multi_processor_count


@contextmanager
def temporary(
    value: int | None, get: Callable[[], Any], change: Callable[[Any], object]
) -> Iterator[None]:
    """Change a setting of a package here, one thread at a time, and restore it; None: keep it."""
    if value is None:
        yield
        return
    with _SETTING:
        before = get()
        change(value)
        try:
            yield
        finally:
            change(before)


def shared_bytes_of(device: torch.device) -> int | None:
    """Return the limit of shared memory per block in bytes; None if torch does not report it."""
    return getattr(torch.cuda.get_device_properties(device), "shared_memory_per_block_optin", None)


def start_read(tensor: Tensor) -> Callable[[], list]:
    """Start to copy a tensor to the host, and return a function that waits and returns the values.

    It waits only for work that was launched before this call. A tensor on a CPU, where kernels are
    interpreted, is read by the returned function.
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


def nvidia_libraries(name: str) -> list[str]:
    """List the paths of a library in the installed wheels of NVIDIA."""
    spec = find_spec("nvidia")
    folders = list(spec.submodule_search_locations or ()) if spec is not None else []
    return [str(path) for folder in folders for path in sorted(Path(folder).glob(f"*/lib/{name}"))]
