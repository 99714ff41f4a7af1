"""The program end to end, on two ranks through the launcher, and its parts on two ranks."""

import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks import bench_dispatch_combine
from benchmarks.bench_dispatch_combine import DtypeName, ModeName, Options
from epcomm import EPGroup
from epcomm.bench.check import CheckError
from epcomm.bench.contenders.backends import Epcomm
from epcomm.bench.contenders.base import Contender
from epcomm.bench.contenders.expert_rows import ExpertRows

REPOSITORY = Path(__file__).parents[2]
LAUNCHER = REPOSITORY / "scripts" / "launch_multi_rank.sh"
PROGRAM = REPOSITORY / "benchmarks" / "bench_dispatch_combine.py"
SIZE = {"tokens": 8, "hidden": 32, "top-k": 2, "experts": 4, "pairs": 3, "warm-up": 1}
TINY = [word for name, value in SIZE.items() for word in (f"--{name}", str(value))]
# Seconds: two ranks import torch on a loaded machine.
LIMIT_S = 180

OPTIONS = Options(
    tokens=8,
    hidden=32,
    top_k=2,
    experts=4,
    dtype=DtypeName.BF16,
    mode=ModeName.NORMAL,
    backend="auto",
    pairs=3,
    warm_up=1,
    seed=0,
    keep_freed_memory=False,
)

# The program with a contender that gets a single element wrong, on rank 1 alone.
BROKEN = """
import torch.distributed as dist
import typer
from benchmarks import bench_dispatch_combine
from epcomm.bench.contenders.backends import Epcomm

right = Epcomm.combine

def wrong(self, *arguments):
    y = right(self, *arguments)
    if dist.get_rank() == 1:
        y[0, 0] += 1
    return y

Epcomm.combine = wrong
typer.run(bench_dispatch_combine.main)
"""


def launch(program: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    variables = {
        name: value
        for name, value in os.environ.items()
        # Under the launcher itself these would name another run's ranks.
        if name not in {"RANK", "WORLD_SIZE", "LOCAL_RANK", "EPCOMM_MULTI_RANK"}
    }
    return subprocess.run(
        [LAUNCHER, "2", program, *TINY, *arguments],
        env={**variables, "PYTHON": sys.executable, "COLUMNS": "120"},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )


@pytest.mark.slow
def test_a_run_prints_a_table_and_writes_its_result(tmp_path: Path) -> None:
    """Every argument differs from what is taken without it."""
    output = tmp_path / "new folder" / "result.json"
    arguments = ["--mode", "standard", "--backend", "collective"]
    arguments += ["--dtype", "fp32", "--seed", "5", "--profile", "--copy-rate", "--keep-memory"]
    done = launch(PROGRAM, *arguments, "--output", str(output))
    assert done.returncode == 0, done.stdout + done.stderr
    # One rank prints.
    assert done.stdout.count("times as fast, by medians of dispatch + combine") == 1
    result = json.loads(output.read_text("utf-8"))
    assert result["benchmark"] == "dispatch_combine"
    assert result["command"].startswith(
        "scripts/launch_multi_rank.sh 2 benchmarks/bench_dispatch_combine.py --tokens 8"
    )
    chosen = {"mode": "standard", "backend": "collective"}
    sizes = {name.replace("-", "_"): value for name, value in SIZE.items()}
    expected = {**chosen, **sizes, "dtype": "fp32", "seed": 5, "ranks": 2}
    found = {name: result["configuration"][name] for name in expected}
    assert found == expected
    assert {"torch", "commit", "python"} <= set(result["versions"])
    assert {"processor", "num_cores", "threads_per_rank"} <= set(result["hardware"])
    check_findings(result)
    names = [section["name"] for section in result["profile"] if section["depth"] == 0]
    assert names == ["backends.dispatch", "backends.group", "backends.combine"]
    ours = result["contenders"]["epcomm"]["ms"]["total_without_grouping"]["p50"]
    assert result["copies"]["ms"] == ours
    assert result["copies"]["copy_gb_per_s"] > 0


def check_findings(result: dict[str, dict]) -> None:
    assert list(result["contenders"]) == ["epcomm", "expert_rows"]
    spans = {"dispatch", "dispatch_without_grouping", "combine", "total", "total_without_grouping"}
    for contender in result["contenders"].values():
        assert set(contender["ms"]) == spans
        for ms in contender["ms"].values():
            assert 0 <= ms["p50"] <= ms["p95"] <= ms["p99"]
        assert contender["sent_bytes"]["total"] == sum(
            contender["sent_bytes"][kind] for kind in ("dispatch", "combine", "control")
        )
    assert set(result["ratio_of_medians"]) == spans
    medians = [one["ms"]["total"]["p50"] for one in result["contenders"].values()]
    assert result["ratio_of_medians"]["total"] == pytest.approx(medians[1] / medians[0], rel=0.1)


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("mode", "backend"),
    [("normal", "shared_memory"), ("low_latency", "shared_memory")],
)
def test_each_mode_can_be_measured(mode: str, backend: str) -> None:
    options = replace(OPTIONS, mode=ModeName(mode))
    with EPGroup() as group, torch.no_grad():
        report = bench_dispatch_combine.run(options, group, options.make_contenders(group))
    result = json.loads(report.as_json())
    assert result["configuration"]["backend"] == backend
    assert result["profile"] == []
    assert "copies" not in result
    check_findings(result)


@pytest.mark.slow
def test_a_wrong_contender_ends_the_program_without_a_number(tmp_path: Path) -> None:
    program, output = tmp_path / "broken.py", tmp_path / "result.json"
    program.write_text(BROKEN, encoding="utf-8")
    done = launch(program, "--output", str(output))
    assert done.returncode != 0
    assert re.search(r"epcomm: rank 1: y is beyond", done.stderr), done.stderr
    assert "times as fast" not in done.stdout
    assert not output.exists()


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("kind", "step", "message"),
    [
        pytest.param(ExpertRows, "combine", r"expert_rows: rank 1: y is beyond", id="its sums"),
        pytest.param(Epcomm, "group", r"epcomm: .*rank 1: expert 2", id="our rows"),
        pytest.param(ExpertRows, "group", r"expert_rows: .*rank 1: expert 2", id="its rows"),
    ],
)
def test_a_wrong_contender_is_found_before_any_time(
    kind: type[Contender], step: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Check every contender and step on every rank; tests above check the program's next step."""
    with EPGroup() as group, torch.no_grad():
        right = getattr(kind, step)

        def wrong(self: Contender, *arguments: object) -> object:
            result = right(self, *arguments)
            if group.rank == 1:
                (result.rows if step == "group" else result)[0, 0] += 1
            return result

        def measured(*arguments: object, **options: object) -> None:
            raise AssertionError("a wrong contender is measured")

        monkeypatch.setattr(kind, step, wrong)
        monkeypatch.setattr(bench_dispatch_combine, "run_in_turn", measured)
        with pytest.raises(CheckError, match=message):
            bench_dispatch_combine.run(OPTIONS, group, OPTIONS.make_contenders(group))
