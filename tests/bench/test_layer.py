import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from epcomm import EPGroup, ExpertWeights
from epcomm.bench import layer
from epcomm.bench.bounds import bound_layer
from epcomm.bench.contenders.all_gather import AllGather
from epcomm.bench.options import BenchOptions
from epcomm.bench.report import times_table
from epcomm.bench.run import run_bench
from epcomm.cli.bench import ReportOptions, RunOptions, bench_on_rank
from epcomm.config import Mode
from epcomm.experts import ExpertParallelExperts
from tests.bench.imitations import imitate_graphs, silent, spoil
from tests.runners import fake_deep_gemm

OPTIONS = BenchOptions(
    tokens=(3,),
    hidden=128,
    intermediate=128,
    experts=4,
    top_k=2,
    backends=("collective",),
    weights=("bf16", "fp8"),
    iterations=2,
    warm_up=1,
)
SPANS = {"dispatch", "products", "combine", "layer"}
RUNNERS = {"bf16": "grouped_mm", "fp8": "quantized_reference"}


@pytest.mark.ranks(1, 2, 4)
def test_layers_in_both_formats_are_timed_beside_an_all_gather(tmp_path: Path) -> None:
    options = replace(OPTIONS, modes=(Mode.NORMAL,), backends=("collective", "nvlink"))
    options = replace(options, chunks=(1, 4), micro_batches=2, backward=True)
    report = run_bench(replace(options, num_sms=8, product_sms=7), silent)
    assert report.wrong == []
    overlaps = ["", "chunks=1", "chunks=4", "2 micro-batches"]
    # One rank begins no transfers.
    overlaps = overlaps[: 1 if dist.get_world_size() == 1 else None]
    assert [(each.weights, each.backend, each.runner, each.overlap) for each in report.results] == [
        (weights, backend, RUNNERS[weights], overlap)
        for weights in ("bf16", "fp8")
        for backend, overlap in (*(("collective", each) for each in overlaps), ("all_gather", ""))
    ]
    for each in report.results:
        # FP8 experts have no gradients.
        trains = each.mode and each.weights == "bf16"
        assert set(each.us) == SPANS | ({"step"} if trains else set())
        assert all(0 < span.p50 <= span.p95 <= span.p99 for span in each.us.values())
    # Rows of graphs have no peak.
    report.results[0] = replace(report.results[0], peak_bytes={"layer": 5 * 10**6, "step": 10**6})
    assert sorted(filter(None, times_table(report).columns[-1].cells)) == ["5"]
    absent = {each.backend for each in report.absent}
    assert absent == ({"nvlink", "collective"} if len(overlaps) == 1 else {"nvlink"})
    assert ("link_gb_per_s" in report.rates) == (dist.get_world_size() > 1)
    assert [each.weights for each in report.bounds] == ["bf16", "fp8"]
    for bound in report.bounds:
        parts = bound.us["dispatch"] + bound.us["products"] + bound.us["combine"]
        assert bound.us["layer"] == pytest.approx(parts, abs=0.01)
        assert bound.us["products"] > 0


@pytest.mark.ranks(2)
def test_graphs_of_normal_mode_have_a_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    imitate_graphs(monkeypatch)
    report = run_bench(replace(OPTIONS, weights=("bf16",)), silent)
    assert report.wrong == []
    assert [(each.mode, each.in_graph) for each in report.results] == [
        ("normal", False),
        ("normal", True),
        ("low_latency", False),
        ("low_latency", True),
        ("", False),
        ("", True),
    ]


@pytest.mark.ranks(2)
def test_deep_gemm_is_timed_where_it_is_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_deep_gemm.install(monkeypatch)
    imitate_graphs(monkeypatch)
    options = replace(OPTIONS, weights=("fp8",), modes=(Mode.NORMAL,))
    report = run_bench(options, silent)
    assert report.wrong == []
    replayed = {(each.mode, each.runner) for each in report.results if each.in_graph}
    assert replayed == {("normal", "deep_gemm"), ("", "deep_gemm")}


@pytest.mark.ranks(2)
def test_layers_that_are_wrong_are_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    normal = Mode.NORMAL
    spoil(monkeypatch, ExpertParallelExperts, "forward", lambda e: e.plan.prefill.mode is normal)
    spoil(monkeypatch, AllGather, "combine", lambda each: True)
    report = run_bench(OPTIONS, silent)
    assert [each.name for each in report.wrong] == [
        f"layer in {where}, {weights}, {RUNNERS[weights]}"
        for weights in ("bf16", "fp8")
        for where in ("normal on collective", "torch on all-gather and reduce-scatter")
    ]
    assert all(each.fault.startswith("rank 1: y is off by") for each in report.wrong)
    assert {(each.mode, each.backend) for each in report.results} == {("low_latency", "collective")}


@pytest.mark.ranks(2)
def test_a_bound_is_that_of_the_worked_example() -> None:
    """Rows of 4 bfloat16; rank 0 computes 5 slots of two experts, and rank 1 only expert 3."""
    ids = [torch.tensor([[0, 1], [0, 3]]), torch.tensor([[0, 1]])]
    one = torch.zeros(2, 2 * 3, 4, dtype=torch.bfloat16)
    experts = ExpertWeights(gate_up_proj=one, down_proj=one.new_zeros(2, 4, 3))
    rates = {"link_gb_per_s": 1.0, "copy_gb_per_s": 2.0, "bf16_tflops": 1e-3}
    with EPGroup() as group:
        bound = bound_layer("bf16", experts, ids, group, rates)
    # One row crosses each way; both experts of rank 0 are read, 2 x 36 elements.
    assert bound.work == {
        "dispatch_bytes": 8,
        "combine_bytes": 8,
        "weight_bytes": 2 * 36 * 2,
        "flops": 6 * 5 * 4 * 3,
    }
    assert bound.us == pytest.approx(
        {"dispatch": 0.008, "products": 0.36, "combine": 0.008, "layer": 0.376}
    )


@pytest.mark.ranks(2)
def test_the_command_prints_parts_and_bounds(capsys: pytest.CaptureFixture[str]) -> None:
    options = replace(OPTIONS, modes=(Mode.NORMAL,), weights=("bf16",))
    assert bench_on_rank(options, ReportOptions()) == 0
    if dist.get_rank() == 0:
        printed = capsys.readouterr().out
        assert printed.index("products") < printed.index("bound") < printed.index("torch")
        assert "grouped_mm" in printed


@pytest.mark.ranks(2)
def test_a_run_that_ends_early_keeps_what_it_has_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, timed = tmp_path / "layers.json", iter([layer.time_all])
    monkeypatch.setattr(layer, "time_all", lambda *given, **named: next(timed)(*given, **named))
    options = replace(OPTIONS, tokens=(1, 3), modes=(Mode.LOW_LATENCY,), weights=("bf16",))
    with pytest.raises(StopIteration):
        bench_on_rank(options, ReportOptions(output=path))
    if dist.get_rank() == 0:
        report = json.loads(path.read_text("utf-8"))
        assert [each["tokens"] for each in report["results"]] == [1, 1]
        assert report["advice"].startswith("Take mode low_latency on backend collective at T = 1")


def test_options_change_the_sizes_of_a_shape() -> None:
    layers = {"layer": True, "weights": "fp8,bf16", "chunks": "1,2", "backward": True}
    read = RunOptions(shape="qwen3_30b", experts=16, product_sms=7, **layers).read()
    assert (read.chunks, read.backward, read.product_sms) == ((1, 2), True, 7)
    assert (read.hidden, read.intermediate, read.experts, read.top_k) == (2048, 768, 16, 8)
    assert read.weights == ("fp8", "bf16")
    pairs = RunOptions(shape="kimi_k2").read()
    assert (pairs.hidden, pairs.intermediate, pairs.experts) == (7168, None, 384)
