"""The parts of bench_gemm that run without a GPU: the distribution of rows, and the checks."""

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


@pytest.mark.parametrize(("rows", "skew"), [(64, 1), (100, 1), (64, 8)])
def test_rows_add_up_and_one_expert_in_eight_gets_more(rows: int, skew: int) -> None:
    counts = counts_of(rows, 8, skew)
    assert sum(counts) == rows
    assert counts[0] >= skew * counts[1]
    assert len(set(counts[1:])) == 1


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
