"""The program end to end, on two ranks through the launcher."""

import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]
LAUNCHER = REPOSITORY / "scripts" / "launch_multi_rank.sh"
PROGRAM = REPOSITORY / "benchmarks" / "bench_dispatch_combine.py"
SIZE = {"tokens": 8, "hidden": 32, "top-k": 2, "experts": 4, "pairs": 3, "warm-up": 1}
TINY = [word for name, value in SIZE.items() for word in (f"--{name}", str(value))]
# Seconds: two ranks import torch on a loaded machine.
LIMIT_S = 180

# The program with one contender that gets a single element wrong, on rank 1 alone.
BROKEN = """
import torch.distributed as dist
import typer
from benchmarks import bench_dispatch_combine, contenders

kind = getattr(contenders, {kind!r})
right = kind.{step}

def wrong(self, *arguments):
    result = right(self, *arguments)
    if dist.get_rank() == 1:
        (result.rows if {step!r} == "group" else result)[0, 0] += 1
    return result

kind.{step} = wrong
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


@dataclass(frozen=True, kw_only=True)
class Case:
    """Arguments of a run, and the buffer and the alternative that they choose."""

    arguments: tuple[str, ...]
    backend: str
    alternative: str = "expert_rows"


CASES = [
    pytest.param(
        Case(arguments=("--profile", "--copy-rate"), backend="shared_memory"), id="normal"
    ),
    pytest.param(
        Case(
            arguments=("--mode", "standard", "--alternative", "all_gather", "--dtype", "fp32"),
            backend="all_gather",
            alternative="all_gather",
        ),
        id="standard against all_gather",
    ),
    pytest.param(
        Case(arguments=("--mode", "low_latency", "--no-keep-memory"), backend="collective_static"),
        id="low_latency",
    ),
]


@pytest.mark.parametrize("case", CASES)
def test_a_run_prints_a_table_and_writes_its_result(case: Case, tmp_path: Path) -> None:
    output = tmp_path / "new folder" / "result.json"
    done = launch(PROGRAM, *case.arguments, "--output", str(output))
    assert done.returncode == 0, done.stdout + done.stderr
    # One rank prints.
    assert done.stdout.count("times as fast, by medians of dispatch + combine") == 1
    result = json.loads(output.read_text("utf-8"))
    assert result["benchmark"] == "dispatch_combine"
    assert result["configuration"]["ranks"] == 2
    assert result["configuration"]["pairs"] == 3
    assert result["configuration"]["backend"] == case.backend
    assert result["command"].startswith(
        "scripts/launch_multi_rank.sh 2 benchmarks/bench_dispatch_combine.py --tokens 8"
    )
    assert list(result["contenders"]) == ["epcomm", case.alternative]
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
    assert {"torch", "commit", "python"} <= set(result["versions"])
    assert {"processor", "num_cores", "threads_per_rank"} <= set(result["hardware"])
    assert ("copies" in result) == ("--copy-rate" in case.arguments)
    if "copies" in result:
        ours = result["contenders"]["epcomm"]["ms"]["total_without_grouping"]["p50"]
        assert result["copies"]["ms"] == ours
        assert result["copies"]["copy_gb_per_s"] > 0
    is_profiled = "--profile" in case.arguments
    names = [section["name"] for section in result["profile"] if section["depth"] == 0]
    steps = ["contenders.dispatch", "contenders.group", "contenders.combine"]
    assert names == (steps if is_profiled else [])


@pytest.mark.parametrize(
    ("kind", "step", "message"),
    [
        pytest.param("Epcomm", "combine", r"epcomm: rank 1: y is beyond", id="our sums"),
        pytest.param("ExpertRows", "combine", r"expert_rows: rank 1: y is beyond", id="its sums"),
        pytest.param("Epcomm", "group", r"epcomm: .*rank 1: expert 2", id="our rows"),
        pytest.param("ExpertRows", "group", r"expert_rows: .*rank 1: expert 2", id="its rows"),
    ],
)
def test_a_wrong_contender_ends_the_program_before_any_time(
    kind: str, step: str, message: str, tmp_path: Path
) -> None:
    program, output = tmp_path / "broken.py", tmp_path / "result.json"
    program.write_text(BROKEN.format(kind=kind, step=step), encoding="utf-8")
    done = launch(program, "--output", str(output))
    assert done.returncode != 0
    assert re.search(message, done.stderr), done.stderr
    assert "times as fast" not in done.stdout
    assert not output.exists()
