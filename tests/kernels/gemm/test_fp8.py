"""The FP8 and mxfp8 runners of GPUs, interpreted without a GPU, equal the reference runner."""

from dataclasses import replace

import pytest
import torch

from epcomm.runners.fp8_triton import Fp8TritonRunner, Mxfp8TritonRunner
from epcomm.runners.quantized_reference import QuantizedReferenceRunner
from epcomm.weights.quantized import Fp8BlockWeights, Mxfp8Weights, QuantizedWeights
from tests.kernels.gemm import slot_records
from tests.kernels.gemm.fp8_products import check_unused_slots_are_left
from tests.kernels.gemm.slot_records import (
    CASES,
    NUM_EXPERTS,
    Case,
    check_no_slots,
    check_poison_stays_in_its_rows,
    record,
)
from tests.runners.records import largest_error

HIDDEN, INNER = 256, 128
# Tensor cores keep some 14 bits of a sum of FP8 products, so a few activations fall to the other
# side of a tie. A code next to the largest is 1/14 of it away; with the largest activation of 128
# at four standard deviations, and the largest of y at three, one such code moves y by
# 4/14 / (3 * 128**0.5), 0.8% of that. Two may meet; bfloat16 adds its own 2**-8, float16 2**-11.
# Products of mxfp8 in BF16 are exact, and only sums have another order.
TOLERANCE = {torch.float32: 0.02, torch.bfloat16: 0.024, torch.float16: 0.0205}


def make_weights(
    dtype: torch.dtype,
    device: torch.device,
    hidden: int = HIDDEN,
    inner: int = INNER,
    num_experts: int = NUM_EXPERTS,
) -> Fp8BlockWeights:
    weights = slot_records.make_weights(hidden, inner, device, num_experts)
    return replace(Fp8BlockWeights.from_unquantized(weights), hidden_dtype=dtype)


@pytest.fixture(params=[Fp8TritonRunner, Mxfp8TritonRunner])
def runner(request: pytest.FixtureRequest) -> Fp8TritonRunner:
    return request.param()


def experts_of(
    runner: Fp8TritonRunner, dtype: torch.dtype, device: torch.device
) -> QuantizedWeights:
    if isinstance(runner, Mxfp8TritonRunner):
        plain = slot_records.make_weights(HIDDEN, INNER, device)
        return replace(Mxfp8Weights.from_unquantized(plain), hidden_dtype=dtype)
    return make_weights(dtype, device)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_runner_equals_the_plain_one(
    case: Case, runner: Fp8TritonRunner, device: torch.device
) -> None:
    weights = experts_of(runner, case.dtype, device)
    dispatched = record(case, HIDDEN, weights.wire_format, device)
    actual = runner.run(dispatched, weights).hidden_states
    expected = QuantizedReferenceRunner().run(dispatched, weights).hidden_states
    assert (actual.shape, actual.dtype) == (expected.shape, case.dtype)
    assert largest_error(dispatched, actual, expected) <= TOLERANCE[case.dtype]


def test_slots_of_nobody_are_left_alone(runner: Fp8TritonRunner, device: torch.device) -> None:
    weights = experts_of(runner, torch.float32, device)
    check_unused_slots_are_left(runner._products, weights, device)


def test_no_slots_are_no_results(runner: Fp8TritonRunner, device: torch.device) -> None:
    check_no_slots(runner, experts_of(runner, torch.float32, device), device)


# The interpreter multiplies infinity by zero, as it should.
@pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")
def test_poison_stays_in_its_rows(runner: Fp8TritonRunner, device: torch.device) -> None:
    weights = experts_of(runner, torch.float32, device)
    check_poison_stays_in_its_rows(runner, weights, device)
