"""ThreadSanitizer finds no race in the kernels of normal mode, and finds one that is planted.

ThreadSanitizer sees each thread of a block as a thread, and shuffles order nothing, as in CUDA. It
does not model fences: kernels have one, of the system in peers.cu, which orders words that only the
host reads. Stores of the copy engine end where they begin; test_normal_protocol.py delays them.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

from tests.kernels.nvlink.host_cuda import compiler
from tests.kernels.nvlink.test_normal_protocol import FAULTS

REPOSITORY = Path(__file__).parents[3]
# The exit status of ThreadSanitizer if it has reported a race.
HAS_RACE = 66
UNORDERED_RELEASE = FAULTS["helpers do not meet before counts are signalled"]


def sanitizer() -> Path | None:
    """Return the library of ThreadSanitizer that the compiler of the host has, or None."""
    if (found := compiler()) is None:
        return None
    command = [found, "-print-file-name=libtsan.so"]
    # If the library is not found, the compiler returns its name without a folder.
    path = Path(subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip())
    return path.resolve() if path.is_absolute() else None


pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(torch.cuda.is_available(), reason="they run on the GPU"),
    pytest.mark.skipif(sanitizer() is None, reason="no ThreadSanitizer"),
]


def run_watched(*fault: str) -> subprocess.CompletedProcess[str]:
    """Run watch_races.py in a new process, which loads the library before it starts threads."""
    return subprocess.run(
        [sys.executable, "-m", "tests.kernels.nvlink.watch_races", *fault],
        env={
            **os.environ,
            "LD_PRELOAD": str(sanitizer()),
            "TSAN_OPTIONS": f"ignore_noninstrumented_modules=1 exitcode={HAS_RACE}",
        },
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        check=False,
        timeout=600,
    )


def test_kernels_have_no_races() -> None:
    found = run_watched()
    assert found.returncode == 0, found.stderr


def test_helpers_meet_before_one_warp_releases_what_all_have_stored() -> None:
    found = run_watched(UNORDERED_RELEASE.old, UNORDERED_RELEASE.new)
    assert found.returncode == HAS_RACE, found.stderr
    assert "data race" in found.stderr
