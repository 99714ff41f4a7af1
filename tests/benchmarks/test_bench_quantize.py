"""The benchmark of quantisation: bytes, rates and the check, as far as they need no GPU."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from benchmarks import bench_quantize
from benchmarks.bench_quantize import CASES, Case, CheckError, check
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
