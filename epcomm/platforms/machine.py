"""How doctor() looks at a machine: it finds packages, and asks a process of its own the rest."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

from epcomm.config import environment

# 60 s: to import torch and look at the GPUs, on a loaded machine and from a cold disk.
PROBE_LIMIT_S = 60


@dataclass(frozen=True, kw_only=True)
class Answer:
    """The answer of a program: `values`, or why it said nothing."""

    values: Mapping[str, object] | None = None
    error: str = ""


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The ways by which doctor() looks at a machine; a test passes its own.

    find_version: distribution name to the version installed, or None.
    find_folder: package name to its folder, or None; imports nothing.
    run_program: a program that prints one line of JSON, to its answer.
    environment: the variables.
    """

    find_version: Callable[[str], str | None]
    find_folder: Callable[[str], Path | None]
    run_program: Callable[[str], Answer]
    environment: Mapping[str, str]


def this_machine() -> Machine:
    """Return the machine that runs this process."""
    return Machine(
        find_version=_find_version,
        find_folder=_find_folder,
        run_program=_run_program,
        environment=environment(),
    )


def _find_version(distribution: str) -> str | None:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def _find_folder(package: str) -> Path | None:
    spec = find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        return None
    return Path(next(iter(spec.submodule_search_locations)))


def _run_program(program: str) -> Answer:
    # The same packages as here, and no vendor backend that loads itself with torch.
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
    # A package may greet on stdout when it is imported, or say goodbye.
    lines = [line for line in done.stdout.splitlines() if line.startswith("{")]
    if done.returncode or not lines:
        said = done.stderr.strip().splitlines()
        return Answer(error=said[-1] if said else f"it ended with code {done.returncode}")
    return Answer(values=json.loads(lines[-1]))
