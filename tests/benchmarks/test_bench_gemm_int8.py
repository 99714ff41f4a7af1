"""What can be tested of bench_gemm_int8 without a GPU: what is checked, and what it says."""

from __future__ import annotations

import pytest
import torch

from benchmarks.bench_gemm import Size, counts_of, masked_record
from benchmarks.bench_gemm_int8 import Int8Experts, check, int8_record, main
from benchmarks.bench_quantize import CheckError
from epcomm.records import RowsDispatchOutput
from epcomm.runners.quantized_reference import QuantizedReferenceRunner
from epcomm.weights.quantized import Int8ChannelWeights

SIZE = Size(experts=8, hidden=256, inner=128)


@pytest.fixture
def weights() -> Int8ChannelWeights:
    return Int8Experts.make(SIZE, torch.device("cpu")).int8


@pytest.fixture
def dispatched() -> RowsDispatchOutput:
    generator = torch.Generator().manual_seed(7)
    return int8_record(counts_of(24, 8, 1), torch.randn(24, 256, generator=generator))


def test_check_passes_right_results_and_refuses_others(
    weights: Int8ChannelWeights, dispatched: RowsDispatchOutput
) -> None:
    results = QuantizedReferenceRunner().run(dispatched, weights).hidden_states
    check(results, dispatched, weights)
    last = results.clone()
    last[-3:] *= 1.01
    with pytest.raises(CheckError, match="expert 7 is off by 1"):
        check(last, dispatched, weights)
    with pytest.raises(CheckError, match="expert 0 is off by nan"):
        check(results * float("nan"), dispatched, weights)


def test_masked_rows_are_the_same_slots(
    weights: Int8ChannelWeights, dispatched: RowsDispatchOutput
) -> None:
    masked, runner = masked_record(dispatched), QuantizedReferenceRunner()
    expected = runner.run(dispatched, weights).hidden_states
    results = runner.run(masked, weights).hidden_states
    assert torch.equal(torch.cat([results[expert, :3] for expert in range(8)]), expected)


@pytest.mark.skipif(torch.cuda.is_available(), reason="would measure")
def test_without_a_gpu_it_says_so() -> None:
    with pytest.raises(SystemExit, match="bench_gemm_int8: no CUDA device"):
        main()
