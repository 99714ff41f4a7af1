"""The exposed share of an exchange, and the trace of layers on CPU ranks."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from epcomm.bench.exposure import Exposure, as_json
from epcomm.bench.options import BenchOptions
from epcomm.bench.plot import check_writable
from epcomm.bench.timing import Percentiles
from epcomm.cli.bench import ReportOptions, RunOptions, bench_on_rank
from epcomm.config import Mode
from epcomm.errors import ConfigError

NUM_RANKS = 2
# The clocks of the host and of the profiler differ by less than this.
TOLERANCE_US = 50.0


def end(event: dict[str, Any]) -> float:
    return event["ts"] + event["dur"]


@pytest.mark.ranks(NUM_RANKS)
def test_a_trace_has_both_calls_of_all_ranks(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, report = tmp_path / "trace.json", tmp_path / "report.json"
    options = BenchOptions(
        tokens=(5,),
        hidden=64,
        intermediate=32,
        experts=4,
        top_k=2,
        dtype="fp32",
        modes=(Mode.NORMAL,),
        backends=("collective",),
        weights=("fp32",),
        iterations=2,
        warm_up=1,
        trace=str(path),
        chunks=(2,),
    )
    assert bench_on_rank(options, ReportOptions(output=report)) == 0
    if dist.get_rank() != 0:
        assert not path.exists()
        return
    assert "T = 5, normal on collective, fp32, grouped_mm: " in capsys.readouterr().out
    (exposed,) = json.loads(report.read_text("utf-8"))["exposures"]
    assert set(exposed["share"]) == {"in turn", "overlapped"}
    found = json.loads(path.read_text("utf-8"))["traceEvents"]
    named = [event for event in found if event["ph"] == "M"]
    timed = sorted((event for event in found if event["ph"] == "X"), key=lambda event: event["ts"])
    assert len(timed) + len(named) == len(found)
    for rank in range(NUM_RANKS):
        (pid,) = (each["pid"] for each in named if each["args"]["name"] == f"rank {rank}")
        tids = {each["args"]["name"]: each["tid"] for each in named if each["pid"] == pid}
        caller = [event for event in timed if event["tid"] == tids["caller"]]
        sent = [event for event in timed if event["tid"] == tids["transfers"]]
        assert [event["name"].partition(", T = 5, normal on")[0] for event in caller] == [
            *("in turn", "dispatch", "experts", "combine", "shared_experts"),
            *("overlapped", "dispatch_begin", "dispatch_begin", "shared_experts"),
            *("dispatch_wait", "experts", "combine_begin", "dispatch_wait", "experts"),
            *("combine_begin", "combine_wait", "combine_wait"),
        ]
        calls = [event for event in caller if ", T = 5" in event["name"]]
        parts = [event for event in caller if event not in calls]
        for track in (calls, parts, sent):
            assert all(end(one) <= other["ts"] for one, other in pairwise(track))
        for kind in ("dispatch", "combine"):
            begun = [event for event in caller if event["name"] == f"{kind}_begin"]
            made = [event for event in sent if event["name"].startswith(kind)]
            waited = [event for event in caller if event["name"] == f"{kind}_wait"]
            for begin, call, wait in zip(begun, made, waited, strict=True):
                assert begin["ts"] - TOLERANCE_US <= call["ts"]
                assert end(call) <= end(wait) + TOLERANCE_US


def test_a_trace_numbers_and_names_its_processes_and_threads() -> None:
    event = {"ph": "X", "pid": "rank 0", "tid": "caller", "name": "experts", "ts": 7e9, "dur": 2.0}
    other = {**event, "pid": "rank 1", "ts": 7e9 - 5.5}
    found = json.loads(as_json([event, {**event, "tid": "transfers"}, other]))["traceEvents"]
    assert found[:3] == [
        {**event, "pid": 1, "tid": 2, "ts": 5.5},
        {**event, "pid": 1, "tid": 3, "ts": 5.5},
        {**other, "pid": 4, "tid": 5, "ts": 0.0},
    ]
    named = {(each["name"], each["pid"], each["tid"]): each["args"]["name"] for each in found[3:]}
    assert all(each["ph"] == "M" for each in found[3:])
    assert named == {
        ("process_name", 1, 1): "rank 0",
        ("thread_name", 1, 2): "caller",
        ("thread_name", 1, 3): "transfers",
        ("process_name", 4, 4): "rank 1",
        ("thread_name", 4, 5): "caller",
    }


def test_the_exposed_share_is_that_of_the_worked_example() -> None:
    times = {"dispatch": 30.0, "combine": 50.0, "products": 100.0, "shared_experts": 20.0}
    times |= {"in turn": 200.0, "overlapped": 152.0}
    spans = {name: Percentiles(p50=us, p95=us, p99=us) for name, us in times.items()}
    exposure = Exposure.of("T = 8, normal on collective", spans)
    assert exposure.share == {"in turn": 1.0, "overlapped": 0.4}
    assert str(exposure) == (
        "exposed share of an exchange of 80 us, T = 8, normal on collective: "
        "1.00 in turn, 0.40 overlapped"
    )


@pytest.mark.parametrize(
    "given", [{"trace": Path("trace.json")}, {"backward": True}, {"micro_batches": 2}], ids=str
)
def test_options_of_layers_are_refused_without_them(given: dict[str, Any]) -> None:
    name = next(iter(given)).replace("_", "-")
    with pytest.raises(ConfigError, match=f"--{name} is given without --layer"):
        RunOptions(**given).read()


def test_a_trace_makes_no_folders(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="No such file or directory"):
        check_writable(tmp_path / "new" / "trace.json", command="epcomm bench")
    assert list(tmp_path.iterdir()) == []
