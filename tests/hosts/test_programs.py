import json
import re

import pytest
import torch.distributed as dist

from benchmarks.tables import render
from tests.cases.shared_folder import shared_folder
from tests.examples.programs import REPO, run_program

pytestmark = [pytest.mark.slow, pytest.mark.host_ranks(4)]

BENCH = "--tokens 64 --hidden 256 --top-k 2 --experts 4 --iterations 2 --warm-up 1 --combine nvfp4"
TRAINING = "--steps 3 --layers 2 --experts 8 --min-loss-fall 0.1 --tolerance 1e-5"


def test_benchmark_writes_what_it_measures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NNODES", "2")
    with shared_folder() as folder:
        output = folder / "result.json"
        program = REPO / "benchmarks/hosts/bench_hosts.py"
        printed = run_program(program, *BENCH.split(), "--output", str(output))
        if dist.get_rank() != 0:
            return
        written = json.loads(output.read_text())
    assert render(written) in printed
    found = written["contenders"]
    backends = [
        f"{name}{sums}" for name in ("hierarchical", "collective") for sums in ("", ", nvfp4")
    ]
    assert list(found) == [*backends, "expert_rows", "all_gather"]
    sent = {name: each["host_bytes"]["total"] for name, each in found.items()}
    # A sum of 256 elements has 160 B instead of 1024.
    assert sent["collective, nvfp4"] < 0.65 * sent["collective"]
    for name, each in found.items():
        # Half of the rows cross, and their sums.
        assert sent[name] > (1 + ("nvfp4" not in name)) * (2 * 64 * 256 * 4 / 2)
        assert each["ms"]["total_without_grouping"]["p50"] > 0


def test_exposed_shares_are_written() -> None:
    sizes = "--tokens 64 --hidden 64 --intermediate 64 --shared 64 --iterations 2 --warm-up 1"
    sizes += " --heads 2 --layer-intermediate 64"
    with shared_folder() as folder:
        output = folder / "result.json"
        program = REPO / "benchmarks/hosts/bench_exposed.py"
        printed = run_program(program, *sizes.split(), "--output", str(output))
        if dist.get_rank() != 0:
            return
        written = json.loads(output.read_text())
    assert render(written) in printed
    assert list(written["exposed"]) == ["none", "chunks", "micro_batches"]
    assert list(written["balance"]) == ["none", "one by one"]
    assert written["gloo_cpu"] > 0
    # Four decoder layers send two micro-batches of half a batch.
    ms = written["ms"]
    assert ms["one by one, exchange"] > ms["none, exchange"] > 0


def test_every_step_of_training_agrees_with_one_process() -> None:
    printed = run_program(REPO / "examples/train_qwen3_moe.py", *TRAINING.split())
    if dist.get_rank() == 0:
        assert "mode normal on backend hierarchical" in printed
        # The program fails if a step differs by more; this is its summary line.
        largest = re.search(r"limit 1e-05: loss (\S+), gradient norm (\S+),", printed)
        assert largest is not None, printed
        assert max(map(float, largest.groups())) < 1e-5
