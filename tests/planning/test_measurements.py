import hashlib
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from epcomm import ConfigError, EPConfig, EPGroup, MoESpec, plan
from epcomm.buffers.collective.all_to_all import CollectiveBuffer
from epcomm.buffers.shared_memory.buffer import SharedMemoryBuffer
from epcomm.config import Mode
from epcomm.planning.measurements import read_measurements
from epcomm.spec import Availability

SPEC = MoESpec(hidden_size=16, num_experts=4, top_k=2)
# Microseconds of a pair by mode, T and backend. Without measurements, shared_memory would be chosen
# first.
TIMES = {
    ("normal", 8): {"collective": 50.0, "shared_memory": 40.0},
    ("normal", 1024): {"collective": 500.0, "shared_memory": 900.0},
    ("low_latency", 8): {"collective": 9.0, "shared_memory": 20.0, "nvlink": 1.0},
    ("low_latency", 1024): {"collective": 700.0, "shared_memory": 600.0},
}


def result(mode: str, backend: str, tokens: int, us: float) -> dict[str, Any]:
    return {"mode": mode, "backend": backend, "tokens": tokens, "us": {"pair": {"p50": us}}}


def write(path: Path, **changes: object) -> Path:
    results = [
        result(mode, backend, tokens, us)
        for (mode, tokens), times in TIMES.items()
        for backend, us in times.items()
    ]
    report = {
        "benchmark": "epcomm bench",
        "configuration": {"ranks": 2, "device": "cpu", "hidden": 64, "top_k": 2, "experts": 8},
        "results": [*results, result("", "all_gather", 8, 0.5)],
    }
    path.write_text(json.dumps(report | changes))
    return path


@pytest.mark.parametrize(
    ("mode", "limit", "expected"),
    [
        pytest.param(Mode.NORMAL, None, ["collective", "shared_memory"], id="largest"),
        pytest.param(Mode.NORMAL, 8, ["shared_memory", "collective"], id="measured"),
        pytest.param(Mode.LOW_LATENCY, 1, ["nvlink", "collective", "shared_memory"], id="below"),
        # 90 is 11 times 8, and 1024 is 11.4 times 90.
        pytest.param(Mode.LOW_LATENCY, 90, ["nvlink", "collective", "shared_memory"], id="nearer"),
        pytest.param(Mode.LOW_LATENCY, 91, ["shared_memory", "collective"], id="nearer above"),
        pytest.param(Mode.STANDARD, None, [], id="not measured"),
    ],
)
def test_nearest_tokens_by_ratio_decide(
    mode: Mode, limit: int | None, expected: list[str], tmp_path: Path
) -> None:
    measured = read_measurements(write(tmp_path / "bench.json"))
    assert [each.backend for each in measured.fastest(mode, limit)] == expected


@pytest.mark.ranks(2)
def test_each_phase_takes_the_fastest_that_serves(tmp_path: Path, group: EPGroup) -> None:
    """Every rank reads its own copy of the file, at a different path."""
    path = write(tmp_path / "bench.json")
    measured = EPConfig(max_tokens_per_rank=8, measurements=path)
    by_rules = plan(EPConfig(max_tokens_per_rank=8), SPEC, group)
    chosen = plan(measured, SPEC, group)
    many = plan(EPConfig(max_tokens_per_rank=900, measurements=str(path)), SPEC, group)
    named = plan(replace(measured, backend="shared_memory"), SPEC, group)
    unmeasured = plan(EPConfig(mode="standard", measurements=path), SPEC, group)
    assert by_rules.prefill.backend == named.prefill.backend == "shared_memory"
    # Prefill is decided at the largest T. nvlink was fastest in decode, but cannot be used here.
    # collective serves decode with exact sizes on CPU ranks, so its times of mode normal count.
    assert (chosen.prefill.backend, chosen.decode.backend) == ("collective", "shared_memory")
    assert (many.prefill.backend, many.decode.backend) == ("collective", "collective")
    digest = hashlib.sha256(path.read_bytes()).hexdigest()[:12]
    source = f"bench.json (sha256 {digest}, 2 ranks on cpu, H = 64, top-2 of 8)"
    assert (
        f"backend chosen by measurements {source}: the fastest that serves of nvlink 1 us, "
        "shared_memory 20 us, collective 50 us in mode normal, at T = 8 in mode low_latency"
    ) in chosen.explain().splitlines()
    names = "nvlink, deep_ep_v2, deep_ep_v1, ascend, shared_memory, hierarchical, collective"
    rules = f"the first of {names} that"
    assert f"backend chosen by rules, without measurements: {rules} serves" in by_rules.explain()
    assert (
        f"backend chosen by rules, because {source} has nothing of mode standard: {rules} serves"
    ) in unmeasured.explain()
    assert "backend chosen by configuration: EPConfig.backend is shared_memory" in named.explain()


@pytest.mark.ranks(2)
def test_where_nothing_measured_serves_rules_choose(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, group: EPGroup
) -> None:
    only = [result("normal", "shared_memory", 8, 4.0)]
    path = write(tmp_path / "bench.json", results=only)
    lacking = Availability(ok=False, reasons=("no memory",))
    monkeypatch.setattr(SharedMemoryBuffer, "probe", lambda machine: lacking)
    phase = plan(EPConfig(mode="normal", measurements=path), SPEC, group).prefill
    assert phase.backend == CollectiveBuffer.name
    assert "rules, because no backend that bench.json (" in phase.chosen_by


@pytest.mark.ranks(2)
def test_a_bad_file_on_one_rank_is_told_to_all(tmp_path: Path, group: EPGroup) -> None:
    paths = [write(tmp_path / "bench.json"), tmp_path / "nowhere.json"]
    other = write(tmp_path / "other.json", command="another run")
    for bad, message in (
        (paths[1], "nowhere.json', which cannot be read (No such file or directory), expected"),
        (other, "sha256 "),
    ):
        path = bad if group.rank == 1 else paths[0]
        with pytest.raises(ConfigError) as caught:
            plan(EPConfig(measurements=path), SPEC, group)
        assert "plan: ranks disagree on measurements: " in str(caught.value)
        assert message in str(caught.value)
    with pytest.raises(ConfigError, match=r"^EPConfig: measurements is .*; write one, or"):
        plan(EPConfig(measurements="/nowhere/bench.json"), SPEC, group)
    # The group remains usable.
    assert plan(EPConfig(measurements=paths[0]), SPEC, group).prefill.backend == "collective"


def test_the_field_is_a_path() -> None:
    with pytest.raises(ConfigError, match="measurements is 3, expected the path of a file, or"):
        EPConfig(measurements=3)
