"""The table of the benchmark between hosts, and its program on two simulated hosts."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.hosts.table import HostsResult, render_hosts
from tests.hosts import network

REPOSITORY = Path(__file__).parents[2]
SIZE = "--tokens 64 --hidden 256 --top-k 2 --experts 4 --iterations 2 --warm-up 1"
# Seconds: four ranks import torch on a loaded machine.
LIMIT_S = 240


def result() -> HostsResult:
    spans = ("dispatch_without_grouping", "combine", "total", "total_without_grouping")
    ms = {span: {"p50": 100.0, "p95": 120.0, "p99": 130.0} for span in spans}
    twice = {span: {name: 2 * value for name, value in each.items()} for span, each in ms.items()}
    sent = {"dispatch": 1, "combine": 2, "control": 3, "total": 6}
    host_bytes = {"dispatch": 4e6, "combine": 6e6, "total": 1e7}
    sizes = {"hosts": 2, "ranks": 8, "gbit_per_s": 1.0, "tokens": 512, "hidden": 1024}
    sizes |= {"top_k": 8, "experts": 64}
    return {
        "benchmark": "hosts",
        "configuration": {**sizes, "dtype": "fp32", "iterations": 30, "transport": "gloo"},
        "hardware": {"num_cores": 2, "processor": "A Processor"},
        "versions": {"torch": "2.13"},
        "command": "python -m tests.hosts.launch",
        "load_average": [0.0, 1.0],
        "contenders": {
            "hierarchical": {"ms": ms, "sent_bytes": sent, "host_bytes": host_bytes},
            "collective": {"ms": twice, "sent_bytes": sent, "host_bytes": host_bytes},
        },
    }


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
    assert render_hosts(written) in done.stdout
    found = written["contenders"]
    assert list(found) == ["hierarchical", "collective", "expert_rows"]
    for each in found.values():
        # Half of the rows are sent between hosts, in each direction.
        assert each["host_bytes"]["dispatch"] > 2 * 64 * 256 * 4 / 2
        assert each["ms"]["total"]["p50"] > 0
