"""What can be tested of bench_gemm without a GPU: how rows are spread, and what is checked."""

from __future__ import annotations

import pytest
import torch

from benchmarks.bench_gemm import Experts, Size, check, counts_of, masked_record, rows_record
from benchmarks.bench_quantize import CheckError
from epcomm.runners.quantized_reference import QuantizedReferenceRunner

SIZE = Size(experts=8, hidden=256, inner=128)
CPU = torch.device("cpu")


@pytest.mark.parametrize(("rows", "skew"), [(64, 1), (100, 1), (64, 8)])
def test_rows_add_up_and_one_expert_in_eight_gets_more(rows: int, skew: int) -> None:
    counts = counts_of(rows, 8, skew)
    assert sum(counts) == rows
    assert counts[0] >= skew * counts[1]
    assert len(set(counts[1:])) == 1


def test_bytes_and_operations_are_those_of_two_products() -> None:
    assert SIZE.weight_bytes == 8 * (2 * 128 * 256 + 256 * 128)
    assert SIZE.operations(5) == 5 * 2 * (2 * 128 * 256 + 256 * 128)


def test_check_passes_right_results_and_refuses_others() -> None:
    experts = Experts.make(SIZE, CPU)
    dispatched = rows_record(counts_of(24, 8, 1), torch.randn(24, 256))
    results = QuantizedReferenceRunner().run(dispatched, experts.fp8).hidden_states
    check(results, dispatched, experts)
    with pytest.raises(CheckError, match="expert 0 is off by"):
        check(results * 1.05, dispatched, experts)


def test_masked_rows_are_the_same_slots() -> None:
    experts = Experts.make(SIZE, CPU)
    dispatched = rows_record(counts_of(24, 8, 1), torch.randn(24, 256))
    masked = masked_record(dispatched)
    runner = QuantizedReferenceRunner()
    expected = runner.run(dispatched, experts.fp8).hidden_states
    results = runner.run(masked, experts.fp8).hidden_states
    assert torch.equal(torch.cat([results[expert, :3] for expert in range(8)]), expected)
