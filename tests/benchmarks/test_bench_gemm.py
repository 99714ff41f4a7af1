from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from benchmarks import bench_gemm
from benchmarks.bench_gemm import (
    Experts,
    Format,
    Size,
    check,
    counts_of,
    measure,
    ratios_of,
    rows_record,
)
from epcomm.bench.check import CheckError
from epcomm.runners.quantized_reference import QuantizedReferenceRunner
from tests.runners import fake_deep_gemm

SIZE = Size(experts=8, hidden=256, inner=128)


@pytest.mark.parametrize("format", Format)
def test_check_passes_right_results_and_refuses_others(format: Format) -> None:
    experts = Experts.make(replace(SIZE, format=format), torch.device("cpu"))
    weights, runner = experts.codes, QuantizedReferenceRunner()
    x = torch.randn(24, 256, generator=torch.Generator().manual_seed(7))
    dispatched = rows_record(counts_of(24, 8, 1), x, weights.wire_format, runner)
    results = runner.run(dispatched, weights).hidden_states
    check(results, dispatched, experts, format.tolerance)
    wrong = results.clone()
    wrong[-3:] *= 1.05
    with pytest.raises(CheckError, match="expert 7 has an error of"):
        check(wrong, dispatched, experts, format.tolerance)
    with pytest.raises(CheckError, match="expert 0 has an error of nan"):
        check(results * float("nan"), dispatched, experts, format.tolerance)


class _Eager:
    """An imitation of a graph."""

    def __init__(self, call: Callable[[], object]) -> None:
        self.replay = call
        call()


@pytest.mark.parametrize("has_deep_gemm", [True, False])
def test_deep_gemm_or_cublas_is_timed_beside_fp8(
    has_deep_gemm: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernels are imitated: the reference computes in their place."""
    if has_deep_gemm:
        fake_deep_gemm.install(monkeypatch)
    for name in ("Fp8WgmmaRunner", "Fp8TritonRunner"):
        monkeypatch.setattr(bench_gemm, name, QuantizedReferenceRunner)
    for name in ("gate_up_fp8", "down_fp8"):
        monkeypatch.setattr(bench_gemm, name, lambda *given, **out: None)
    monkeypatch.setattr(bench_gemm, "captured", _Eager)
    monkeypatch.setattr(bench_gemm, "_CUBLAS", {"m": 16, "n": 16, "k": 16})
    monkeypatch.setattr(bench_gemm, "_READ_BYTES", 4096)
    monkeypatch.setattr(bench_gemm, "_DEEP_GEMM_OVER_CUBLAS", {(8, 256, 1024, 1): {"runner": 1.0}})
    experts = Experts.make(SIZE, torch.device("cpu"))
    finding = measure(experts, 1024, 1, 1.0, 2)
    ratios = {name for name in finding if name.startswith("ratio_")}
    parts = {"ratio_first", "ratio_second"} if has_deep_gemm else set()
    assert ratios == {"ratio_runner"} | parts
    assert {"fp8", "first", "second", "cublas", "bf16"} <= set(finding["ms"])


def test_mxfp8_is_timed_beside_grouped_products(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    monkeypatch.setattr(bench_gemm, "captured", _Eager)
    monkeypatch.setattr(bench_gemm, "_READ_BYTES", 4096)
    # The check is for many rows: few may move more codes than its tolerance allows.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        experts = Experts.make(replace(SIZE, format=Format.MXFP8), torch.device("cpu"))
        finding = measure(experts, 96, 8, 1.0, 2)
    assert set(finding["ms"]) == {"mxfp8", "reference", "restored", "restored in the call", "bf16"}


def test_rows_are_skewed_up_to_experts_without_any() -> None:
    assert counts_of(100, 16, 1) == [10, *[6] * 15]
    assert counts_of(91, 16, 8) == [25, 24, *[3] * 14]
    assert counts_of(91, 16, 0) == [46, 45, *[0] * 14]


def test_ratios_are_estimated_where_there_is_no_deep_gemm() -> None:
    ms = {"fp8": 3.0, "first": 2.0, "second": 1.0, "cublas": 2.0}
    over_cublas = {"runner": 1.5, "first": 0.8}
    assert ratios_of(ms, over_cublas) == pytest.approx({"ratio_runner": 1.0, "ratio_first": 1.25})
    beside = {**ms, "deep_gemm": 2.0, "deep_gemm first": 1.6, "deep_gemm second": 0.5}
    assert ratios_of(beside, over_cublas) == {
        "ratio_runner": 1.5,
        "ratio_first": 1.25,
        "ratio_second": 2.0,
    }
