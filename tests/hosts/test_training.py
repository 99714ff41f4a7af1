"""Training over two and four hosts equals training in one process."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.hosts import network

pytestmark = pytest.mark.slow

REPO = Path(__file__).parents[2]
# It takes 15 s on an idle machine with two cores.
LIMIT_S = 240


def test_every_step_agrees_with_one_process() -> None:
    if reason := network.missing():
        pytest.skip(f"no hosts of our own: {reason}")
    launch = [sys.executable, "-m", "tests.hosts.launch", "--hosts", "2", "--ranks", "2"]
    options = "--steps 3 --layers 2 --experts 8 --min-loss-fall 0.1 --tolerance 1e-5"
    done = subprocess.run(
        [*launch, "examples/train_qwen3_moe.py", *options.split()],
        cwd=REPO,
        env=os.environ | {"COLUMNS": "80"},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "mode normal on backend hierarchical" in done.stdout
    # The program fails if a step differs by more than this, and prints what it compared.
    largest = re.search(r"limit 1e-05: loss (\S+), gradient norm (\S+),", done.stdout)
    assert largest is not None, done.stdout
    assert max(map(float, largest.groups())) < 1e-5
