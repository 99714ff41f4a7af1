"""Describe what a result depends on in addition to the code: hardware and versions."""

import os
import platform
import subprocess
from pathlib import Path

import torch
from torch.cuda import nccl

from epcomm.platforms.cuda import name_of
from epcomm.platforms.machine import find_version

REPOSITORY = Path(__file__).resolve().parents[2]


def describe_hardware(device: torch.device) -> dict[str, str | int]:
    """Return the processor, and the accelerator if there is one."""
    facts: dict[str, str | int] = {
        "processor": _processor_name(),
        "num_cores": os.cpu_count() or 0,
        "system": f"{platform.system()} {platform.machine()}",
        "threads_per_rank": torch.get_num_threads(),
    }
    if device.type == "cuda":
        facts["accelerator"] = name_of(device)
        facts["num_accelerators"] = torch.cuda.device_count()
    return facts


def describe_versions(device: torch.device) -> dict[str, str]:
    """Return the versions of the measured code and of the software that it runs on."""
    versions = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "epcomm": version_of("epcomm"),
        "commit": _commit(),
    }
    if device.type == "cuda":
        versions["cuda"] = str(torch.version.cuda)
        versions["nccl"] = ".".join(map(str, nccl.version()))
    return versions


def _processor_name() -> str:
    lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines() if os.name == "posix" else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def version_of(distribution: str) -> str:
    """Return the version of a distribution; unknown where its sources run uninstalled."""
    return find_version(distribution) or "unknown"


def _commit() -> str:
    """Return the commit, with a + if tracked files differ; unknown outside our own repository."""
    if not (REPOSITORY / ".git").exists():
        return "unknown"
    describe = ["git", "describe", "--always", "--dirty=+", "--abbrev=12", "--exclude=*"]
    try:
        done = subprocess.run(
            describe, cwd=REPOSITORY, capture_output=True, text=True, check=True, timeout=10
        )
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return done.stdout.strip()
