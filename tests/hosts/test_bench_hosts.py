"""The table of the benchmark between hosts, and its program on two simulated hosts."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.tables import render
from tests.hosts import network

REPOSITORY = Path(__file__).parents[2]
SIZE = "--tokens 64 --hidden 256 --top-k 2 --experts 4 --iterations 2 --warm-up 1"
# Seconds: four ranks import torch on a loaded machine.
LIMIT_S = 240


@pytest.mark.slow
def test_program_writes_what_it_measures(tmp_path: Path) -> None:
    if reason := network.missing():
        pytest.skip(f"no hosts of our own: {reason}")
    output = tmp_path / "result.json"
    launch = (
        "-m tests.hosts.launch --hosts 2 --ranks 2 --rate 1gbit benchmarks/hosts/bench_hosts.py"
    )
    done = subprocess.run(
        [sys.executable, *launch.split(), *SIZE.split(), "--output", str(output)],
        cwd=REPOSITORY,
        env=os.environ,
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    written = json.loads(output.read_text())
    assert render(written) in done.stdout
    found = written["contenders"]
    assert list(found) == ["hierarchical", "collective", "expert_rows", "all_gather"]
    for each in found.values():
        # Half of the rows cross, each way.
        assert each["host_bytes"]["total"] > 2 * (2 * 64 * 256 * 4 / 2)
        assert each["ms"]["total"]["p50"] > 0
