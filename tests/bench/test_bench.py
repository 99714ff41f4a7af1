import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch.distributed as dist

from epcomm.bench.contenders import backends
from epcomm.bench.contenders.backends import Epcomm
from epcomm.bench.contenders.expert_rows import ExpertRows
from epcomm.bench.options import BenchOptions
from epcomm.bench.report import as_json
from epcomm.bench.run import run_bench
from epcomm.cli.bench import NOT_TIMED, ReportOptions, bench_on_rank
from epcomm.config import EPConfig, Mode
from epcomm.group import EPGroup
from epcomm.planning.measurements import read_measurements
from epcomm.planning.plan import plan
from epcomm.types import WireDtype
from tests.bench.imitations import imitate_graphs, silent, spoil

pytestmark = pytest.mark.ranks(2)

OPTIONS = BenchOptions(
    tokens=(3, 8),
    hidden=32,
    experts=4,
    top_k=2,
    modes=(Mode.NORMAL, Mode.LOW_LATENCY, Mode.STANDARD),
    backends=("collective", "shared_memory", "nvlink"),
    iterations=2,
    warm_up=1,
)
SPANS = {"dispatch", "combine", "pair"}


def test_every_backend_that_serves_is_timed_beside_torch(tmp_path: Path) -> None:
    progress: list[int] = []
    report = run_bench(OPTIONS, progress.append)
    assert report.wrong == []
    served = {
        ("normal", "shared_memory"),
        ("normal", "collective"),
        ("low_latency", "shared_memory"),
        ("low_latency", "collective"),
        ("standard", "collective"),
    }
    alone = {("", "expert_rows"), ("", "all_gather")}
    for tokens in OPTIONS.tokens:
        timed = {(each.mode, each.backend) for each in report.results if each.tokens == tokens}
        assert timed == served | alone
    for each in report.results:
        assert set(each.us) == SPANS
        assert all(0 < span.p50 <= span.p95 <= span.p99 for span in each.us.values())
        assert each.sent_bytes is not None
    absent = {(each.mode.value, each.backend): each.reasons for each in report.absent}
    assert "there is no CUDA device" in absent["normal", "nvlink"][0]
    assert "shared_memory" in absent["standard", "shared_memory"][0]
    assert progress == [3, 3, 8, 8]

    path = tmp_path / "measured.json"
    path.write_text(as_json(report), encoding="utf-8")
    measured = read_measurements(path)
    assert {(each.mode, each.backend, each.tokens) for each in measured.values} == {
        (mode, backend, tokens) for mode, backend in served for tokens in OPTIONS.tokens
    }
    assert measured.where == "2 ranks on cpu, H = 32, top-2 of 4"
    with EPGroup() as group:
        config = EPConfig(max_tokens_per_rank=3, measurements=path)
        chosen = plan(config, OPTIONS.moe_spec(), group)
    # On a CPU, collective serves decode of mode auto with exact sizes, like mode normal.
    decode = {"collective": "normal", "shared_memory": "low_latency"}
    for phase, tokens, modes in ((chosen.prefill, 8, {}), (chosen.decode, 3, decode)):
        medians = {
            each.backend: each.us["pair"].p50
            for each in report.results
            if (each.mode, each.tokens) == (modes.get(each.backend, "normal"), tokens)
        }
        assert phase.backend == min(medians, key=lambda name: medians[name])


def test_scripts_learn_that_nothing_of_epcomm_serves(capsys: pytest.CaptureFixture[str]) -> None:
    options = replace(OPTIONS, tokens=(2,), modes=(Mode.NORMAL,), backends=("nvlink",))
    assert bench_on_rank(options, ReportOptions(json=True)) == NOT_TIMED
    printed = capsys.readouterr().out
    if dist.get_rank() == 0:
        report = json.loads(printed)
        assert report["advice"].startswith("Nothing of epcomm was measured here")
        assert [each["backend"] for each in report["absent"]] == ["nvlink"]
    else:
        assert printed == ""
    for is_verbose in (False, True):
        assert bench_on_rank(options, ReportOptions(verbose=is_verbose)) == NOT_TIMED
        printed = capsys.readouterr().out
        if dist.get_rank() == 0:
            assert ("there is no CUDA device" in printed) == is_verbose
            assert ("not timed (--verbose prints why): nvlink\n" in printed) != is_verbose


@pytest.mark.parametrize("wire", [WireDtype.FP8_E4M3, WireDtype.INT8, WireDtype.NVFP4])
def test_rows_are_held_to_their_roundings(wire: WireDtype, monkeypatch: pytest.MonkeyPatch) -> None:
    options = replace(
        OPTIONS, tokens=(4,), hidden=128, backends=("collective",), dtype="fp32", wire=wire
    )
    report = run_bench(replace(options, modes=(Mode.NORMAL, Mode.LOW_LATENCY)), silent)
    assert report.wrong == []
    assert [each.mode for each in report.results] == ["normal", "low_latency", "", ""]
    monkeypatch.setattr(backends, "ROW_ERRORS", {wire: 1e-4})
    report = run_bench(replace(options, modes=(Mode.NORMAL,)), silent)
    assert [each.name for each in report.wrong] == ["normal collective"]


def test_what_can_be_captured_is_replayed(monkeypatch: pytest.MonkeyPatch) -> None:
    imitate_graphs(monkeypatch)
    report = run_bench(replace(OPTIONS, tokens=(4,), backends=("collective",)), silent)
    assert report.wrong == []
    replayed = {(each.mode, each.in_graph) for each in report.results}
    assert replayed == {("normal", False), ("low_latency", True), ("standard", False), ("", False)}
    for each in report.results:
        assert set(each.us) == SPANS


def test_what_is_wrong_is_told_and_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Change one element on one rank, of one backend, and of plain torch."""
    spoil(monkeypatch, Epcomm, "combine", lambda each: each.name == "normal collective")
    spoil(monkeypatch, ExpertRows, "combine", lambda each: True)
    report = run_bench(replace(OPTIONS, tokens=(4,), modes=(Mode.NORMAL,)), silent)
    assert [each.name for each in report.wrong] == ["normal collective", "expert_rows"]
    assert all("rank 1: y is" in each.fault for each in report.wrong)
    timed = {(each.mode, each.backend) for each in report.results}
    assert timed == {("normal", "shared_memory"), ("", "all_gather")}
