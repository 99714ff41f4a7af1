"""The benchmark between hosts, and training that equals one process, on two simulated hosts."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.tables import render
from tests.hosts import network

pytestmark = pytest.mark.slow

REPOSITORY = Path(__file__).parents[2]
BENCH = "--tokens 64 --hidden 256 --top-k 2 --experts 4 --iterations 2 --warm-up 1"
TRAINING = "--steps 3 --layers 2 --experts 8 --min-loss-fall 0.1 --tolerance 1e-5"
# Seconds: four ranks import torch on a loaded machine.
LIMIT_S = 240


def run_on_hosts(*arguments: str) -> str:
    """Run a program on two hosts with two ranks each, and return its output."""
    if reason := network.missing():
        pytest.skip(f"no simulated hosts: {reason}")
    launch = [sys.executable, "-m", "tests.hosts.launch", "--hosts", "2", "--ranks", "2"]
    done = subprocess.run(
        [*launch, *arguments],
        cwd=REPOSITORY,
        env=os.environ | {"COLUMNS": "80"},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_benchmark_writes_what_it_measures(tmp_path: Path) -> None:
    output = tmp_path / "result.json"
    program = ["--rate", "1gbit", "benchmarks/hosts/bench_hosts.py"]
    printed = run_on_hosts(*program, *BENCH.split(), "--output", str(output))
    written = json.loads(output.read_text())
    assert render(written) in printed
    found = written["contenders"]
    assert list(found) == ["hierarchical", "collective", "expert_rows", "all_gather"]
    for each in found.values():
        # Half of the rows cross, each way.
        assert each["host_bytes"]["total"] > 2 * (2 * 64 * 256 * 4 / 2)
        assert each["ms"]["total"]["p50"] > 0


def test_every_step_of_training_agrees_with_one_process() -> None:
    printed = run_on_hosts("examples/train_qwen3_moe.py", *TRAINING.split())
    assert "mode normal on backend hierarchical" in printed
    # The program fails if a step differs by more; this is its summary line.
    largest = re.search(r"limit 1e-05: loss (\S+), gradient norm (\S+),", printed)
    assert largest is not None, printed
    assert max(map(float, largest.groups())) < 1e-5
