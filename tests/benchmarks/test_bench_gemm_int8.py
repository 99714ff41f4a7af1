"""What can be tested of INT8 in bench_gemm without a GPU: what is checked, and what it says."""

from __future__ import annotations

import pytest
import torch

from benchmarks.bench_gemm import (
    Experts,
    Size,
    check_int8,
    counts_of,
    main,
    masked_record,
    rows_record,
)
from benchmarks.bench_quantize import CheckError
from epcomm.quantization import INT8_PER_TOKEN
from epcomm.records import RowsDispatchOutput
from epcomm.runners.quantized_reference import QuantizedReferenceRunner

SIZE = Size(experts=8, hidden=256, inner=128)


@pytest.fixture
def experts() -> Experts:
    return Experts.make(SIZE, torch.device("cpu"))


@pytest.fixture
def dispatched() -> RowsDispatchOutput:
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(24, 256, generator=generator)
    return rows_record(counts_of(24, 8, 1), x, INT8_PER_TOKEN)


def test_check_passes_right_results_and_refuses_others(
    experts: Experts, dispatched: RowsDispatchOutput
) -> None:
    results = QuantizedReferenceRunner().run(dispatched, experts.int8).hidden_states
    check_int8(results, dispatched, experts)
    last = results.clone()
    last[-3:] *= 1.01
    with pytest.raises(CheckError, match="expert 7 is off by 1"):
        check_int8(last, dispatched, experts)
    with pytest.raises(CheckError, match="expert 0 is off by nan"):
        check_int8(results * float("nan"), dispatched, experts)


def test_masked_rows_are_the_same_slots(experts: Experts, dispatched: RowsDispatchOutput) -> None:
    masked, runner = masked_record(dispatched), QuantizedReferenceRunner()
    expected = runner.run(dispatched, experts.int8).hidden_states
    results = runner.run(masked, experts.int8).hidden_states
    assert torch.equal(torch.cat([results[expert, :3] for expert in range(8)]), expected)


@pytest.mark.skipif(torch.cuda.is_available(), reason="would measure")
def test_without_a_gpu_it_says_so() -> None:
    with pytest.raises(SystemExit, match="bench_gemm: no CUDA device"):
        main()
