"""The checks of bench_gemm, which run without a GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from benchmarks.bench_gemm import (
    Experts,
    Format,
    Size,
    check,
    counts_of,
    rows_record,
)
from epcomm.bench.check import CheckError
from epcomm.runners.quantized_reference import QuantizedReferenceRunner

SIZE = Size(experts=8, hidden=256, inner=128)


@pytest.mark.parametrize("format", Format)
def test_check_passes_right_results_and_refuses_others(format: Format) -> None:
    experts = Experts.make(replace(SIZE, format=format), torch.device("cpu"))
    weights, runner = experts.codes, QuantizedReferenceRunner()
    x = torch.randn(24, 256, generator=torch.Generator().manual_seed(7))
    dispatched = rows_record(counts_of(24, 8, 1), x, format.wire)
    results = runner.run(dispatched, weights).hidden_states
    check(results, dispatched, experts)
    wrong = results.clone()
    wrong[-3:] *= 1.05
    with pytest.raises(CheckError, match="expert 7 has an error of"):
        check(wrong, dispatched, experts)
    with pytest.raises(CheckError, match="expert 0 has an error of nan"):
        check(results * float("nan"), dispatched, experts)
