"""The questions of plans and doctor() about a machine, and this machine; see also assumed.py."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from epcomm.config import environment
from epcomm.platforms.deep_ep import InstalledDeepEP, find_deep_ep
from epcomm.platforms.host import host_of_this_process, memory_left

# 60 s: to import torch and query the GPUs on a loaded machine, from a cold disk.
PROBE_LIMIT_S = 60


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The answer of a program: `values`, or an error."""

    values: Mapping[str, Any] | None = None
    error: str = ""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The questions that plans and doctor() ask about a machine.

    find_version: the installed version of a distribution, or None.
    run_program: the answer of a program that prints one line of JSON.
    environment: the environment variables.
    has_module: whether a package or module is installed; imports nothing.
    find_deep_ep: the installed deep_ep, or None.
    has_library: whether a library can be loaded; the argument is the function that loads it.
    has_cuda: whether there is a CUDA device.
    capability: compute capability of a CUDA device; None for the current one.
    device_of: the device of a tensor, or the assumed device.
    host: a text that is equal for processes that can share memory; empty if that is unknown.
    memory_left: the bytes that a process can still allocate, or None.
    """

    find_version: Callable[[str], str | None]
    run_program: Callable[[str], Answer]
    environment: Mapping[str, str]
    has_module: Callable[[str], bool]
    find_deep_ep: Callable[[], InstalledDeepEP | None]
    has_library: Callable[[Callable[[], bool]], bool]
    has_cuda: Callable[[], bool]
    capability: Callable[[torch.device | None], tuple[int, int]]
    device_of: Callable[[Tensor], torch.device]
    host: Callable[[], str]
    memory_left: Callable[[], int | None]


def this_machine() -> Machine:
    return Machine(
        find_version=find_version,
        run_program=_run_program,
        environment=environment(),
        has_module=lambda name: find_spec(name) is not None,
        # Cached, because each class that uses deep_ep asks.
        find_deep_ep=cache(find_deep_ep),
        has_library=lambda load: load(),
        has_cuda=torch.cuda.is_available,
        capability=torch.cuda.get_device_capability,
        device_of=lambda tensor: tensor.device,
        host=host_of_this_process,
        memory_left=memory_left,
    )


def find_version(distribution: str) -> str | None:
    """Return the version of an installed distribution, or None."""
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _run_program(program: str) -> Answer:
    # The program has the packages of this process, and no vendor backend that torch loads
    # automatically.
    variables = {
        **environment(),
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
    }
    try:
        done = subprocess.run(
            [sys.executable, "-P", "-c", program],
            capture_output=True,
            text=True,
            env=variables,
            timeout=PROBE_LIMIT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return Answer(error=f"no answer in {PROBE_LIMIT_S} s")
    # A package may print to stdout when it is imported or at exit.
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not lines:
        said = done.stderr.strip().splitlines()
        return Answer(error=said[-1] if said else f"it exited with code {done.returncode}")
    return Answer(values=json.loads(lines[-1]))
