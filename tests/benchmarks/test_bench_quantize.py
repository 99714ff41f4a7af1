"""The benchmark of quantisation: bytes, rates and the check, as far as they need no GPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from benchmarks import bench_quantize
from benchmarks.bench_quantize import CASES, Case, CheckError, Finding, check, report_of, table_of
from epcomm import WireFormat, WireTensor
from epcomm.bench.timing import Percentiles
from epcomm.quantization import INT8_PER_TOKEN, Int8Profile, quantize

X = torch.randn(6, 300).bfloat16()
MS = Percentiles(p50=2.0, p95=3.0, p99=4.0)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_bytes_are_those_of_the_tensors(case: Case) -> None:
    wire = quantize(X, case.format, profile=case.profile)
    assert wire.scales is not None
    assert case.num_bytes(X) == X.nbytes + wire.data.nbytes + wire.scales.nbytes


def test_rates_are_by_the_median() -> None:
    finding = Finding(
        case="fp8",
        tokens=6,
        num_bytes=8_000_000,
        ms=MS,
        plain_ms=MS,
        copy_ms=MS,
        copy_gb_per_s=16.0,
    )
    assert finding.gb_per_s == pytest.approx(4.0)
    assert finding.share_of_copy == pytest.approx(0.25)
    report = report_of([finding], torch.device("cpu"), hidden=300, calls=1)
    [entry] = json.loads(json.dumps(report))["findings"]
    assert entry["gb_per_s"] == 4.0
    assert entry["ms"] == {"p50": 2.0, "p95": 3.0, "p99": 4.0}
    assert table_of([finding]).row_count == 1


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_equal_bits_pass(case: Case) -> None:
    check(X, case)


def test_one_wrong_code_stops_the_benchmark(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(
        hidden_states: Tensor,
        wire_format: WireFormat,
        *,
        profile: Int8Profile = Int8Profile.RINT127,
        out: WireTensor | None = None,
    ) -> WireTensor:
        wire = quantize(hidden_states, wire_format, profile=profile, out=out)
        wire.data[3, 5] += 1
        return wire

    monkeypatch.setattr(bench_quantize, "quantizer_for", lambda device: wrong)
    with pytest.raises(CheckError, match="int8: 1 bytes of codes and 0 bytes of scales differ"):
        check(X, Case(name="int8", format=INT8_PER_TOKEN))


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="it would measure")
def test_program_ends_without_a_gpu() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "benchmarks.bench_quantize"],
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).parents[2],
        timeout=120,
    )
    assert done.returncode == 1
    assert "no CUDA device" in done.stderr
