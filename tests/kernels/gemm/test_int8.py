"""The INT8 kernels and runner of GPUs, interpreted without a GPU, give the bits of plain torch."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from epcomm.quantization import INT8_PER_TOKEN, quantize
from epcomm.runners.int8_triton import Int8TritonRunner
from epcomm.types import Int8Profile, WeightsAppliedBy
from epcomm.weights.quantized import Int8ChannelWeights
from epcomm.weights.unquantized import ExpertWeights
from tests.cases.quantized_model import Bounded, assert_within, expert_model
from tests.kernels.gemm import slot_records
from tests.kernels.gemm.slot_records import (
    CASES,
    Case,
    check_no_slots,
    check_poison_stays_in_its_rows,
    make_index,
    make_rows,
    record,
)
from tests.quantization.rows import varied_rows
from tests.runners.records import results_of_experts

pytest.importorskip("triton")
from epcomm.kernels.gemm.int8 import multiply_int8, quantize_hidden_int8
from epcomm.kernels.gemm.operands import Product
from epcomm.kernels.launch import IS_INTERPRETED
from epcomm.kernels.prepared import _prepared

# The interpreter divides by zero where the kernel then discards the quotient.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")

# Sizes that are multiples of 16, but not of the blocks of 128.
HIDDEN, INNER = 208, 144
# Relative error of a stored result: the interpreter truncates to bfloat16 instead of rounding.
STORED = {torch.float32: 0.0, torch.bfloat16: 2.0**-7 if IS_INTERPRETED else 2.0**-8}
ALL_CASES = CASES + [Case(dtype=dtype, expert_alignment=8) for dtype in STORED]


def make_weights(dtype: torch.dtype, device: torch.device) -> Int8ChannelWeights:
    weights = slot_records.make_weights(HIDDEN, INNER, device)
    return replace(Int8ChannelWeights.from_unquantized(weights), hidden_dtype=dtype)


@pytest.mark.parametrize("case", ALL_CASES, ids=lambda case: case.id)
def test_runner_equals_a_float64_model(case: Case, device: torch.device) -> None:
    weights = make_weights(case.dtype, device)
    dispatched = record(case, HIDDEN, INT8_PER_TOKEN, device)
    results = Int8TritonRunner().run(dispatched, weights).hidden_states
    assert (results.dtype, results.shape[-1]) == (case.dtype, HIDDEN)
    index = make_index(device, case.expert_alignment)
    plain = replace(case, is_quantized=False, is_strided=False)
    x = make_rows(plain, index, HIDDEN, INT8_PER_TOKEN, device).data.double().cpu()
    slot_weights = torch.rand(slot_records.NUM_SLOTS, generator=torch.Generator().manual_seed(4))
    starts = index.first_slot.tolist()
    for expert, mine in enumerate(results_of_experts(dispatched, results)):
        slots = slice(starts[expert], starts[expert] + len(mine))
        rows = index.row_of_slot[slots].long().cpu()
        expected = expert_model(x[rows], weights, expert, "int8")
        if case.who is WeightsAppliedBy.RUNNER:
            factors = slot_weights[slots].double().unsqueeze(1)
            expected = Bounded(values=expected.values * factors, error=expected.error * factors)
        assert_within(mine, expected, extra=STORED[case.dtype])


@dataclass(frozen=True, kw_only=True)
class StepCase:
    """first_slot: [L + 1]; with an index, rows are in another order than slots."""

    id: str
    counts: tuple[int, ...]
    first_slot: tuple[int, ...]
    has_index: bool

    @property
    def num_slots(self) -> int:
        # Three slots after those of the last expert are unused.
        return self.first_slot[-1] + 3

    def is_used(self, device: torch.device) -> Tensor:
        """Return which slots belong to an expert, [C]."""
        used = torch.zeros(self.num_slots, dtype=torch.bool)
        for start, count in zip(self.first_slot, self.counts, strict=False):
            used[start : start + count] = True
        return used.to(device)

    def on(self, device: torch.device) -> dict[str, Tensor]:
        """Return the counts and starts as kernels take them."""
        numbers = {"counts": self.counts, "first_slot": self.first_slot}
        return {
            name: torch.tensor(values, dtype=torch.int32, device=device)
            for name, values in numbers.items()
        }


STEP_CASES = [
    StepCase(
        id="few slots, aligned to 8, an expert without any",
        counts=(9, 0, 8),
        first_slot=(0, 16, 16, 24),
        has_index=True,
    ),
    StepCase(id="masked", counts=(0, 65, 3), first_slot=(0, 70, 140, 210), has_index=False),
    StepCase(
        id="many slots", counts=(0, 130, 128, 520), first_slot=(0, 0, 130, 258, 778), has_index=True
    ),
    StepCase(id="no expert has any", counts=(0, 0), first_slot=(0, 0, 0), has_index=True),
]
by_step_case = pytest.mark.parametrize("case", STEP_CASES, ids=lambda case: case.id)


@dataclass(frozen=True, kw_only=True, eq=False)
class Operands:
    """Codes of all values with one scale each; unused entries are NaN or invalid indices.

    row_of_slot: [C], or None.   rows: [C], the row of each used slot, 0 for others.
    """

    codes: Tensor
    scales: Tensor
    row_of_slot: Tensor | None
    rows: Tensor
    matrices: Tensor
    matrix_scales: Tensor

    @classmethod
    def make(cls, case: StepCase, columns: int, out_columns: int, device: torch.device) -> Operands:
        generator = torch.Generator().manual_seed(5)
        experts = len(case.counts)

        def codes(*shape: int) -> Tensor:
            values = torch.randint(-128, 128, shape, generator=generator, dtype=torch.int8)
            return values.to(device)

        def scales(*shape: int) -> Tensor:
            return (torch.rand(shape, generator=generator) * 1e-2 + 1e-3).to(device)

        is_used = case.is_used(device)
        rows = torch.arange(case.num_slots, device=device)
        if case.has_index:
            rows = torch.randperm(case.num_slots, generator=generator).to(device)
        row_scales = scales(case.num_slots, 1)
        row_scales[rows[~is_used]] = float("nan")
        # Reading through the index of an unused slot would leave the memory.
        index = torch.where(is_used, rows, 2**31 - 1).to(torch.int32)
        return cls(
            codes=codes(case.num_slots, columns),
            scales=row_scales,
            row_of_slot=index if case.has_index else None,
            rows=torch.where(is_used, rows, 0),
            matrices=codes(experts, out_columns, columns),
            matrix_scales=scales(experts, out_columns),
        )

    def on(self, case: StepCase) -> Product:
        return Product(
            codes=self.codes,
            scales=self.scales,
            row_of_slot=self.row_of_slot,
            **case.on(self.codes.device),
            matrices=self.matrices,
            matrix_scales=self.matrix_scales,
        )

    def products(self, case: StepCase) -> Tensor:
        """Compute exact products [C, *], float32, scaled by row, then channel; 0 for padding."""
        shape = (case.num_slots, self.matrices.shape[1])
        products = torch.zeros(shape, device=self.codes.device)
        for expert, (start, count) in enumerate(zip(case.first_slot, case.counts, strict=False)):
            rows = self.rows[start : start + count]
            exact = self.codes[rows].double() @ self.matrices[expert].double().T
            products[start : start + count] = (
                exact.float() * self.scales[rows] * self.matrix_scales[expert]
            )
        return products


@by_step_case
def test_first_product_is_exact_but_for_activation(case: StepCase, device: torch.device) -> None:
    given = Operands.make(case, HIDDEN, 2 * INNER, device)
    hidden = torch.full((case.num_slots, INNER), float("nan"), device=device)
    multiply_int8(given.on(case), is_packed=case.has_index, out=hidden)
    is_used = case.is_used(device)
    assert hidden[~is_used].isnan().all()
    gate, up = given.products(case)[is_used].double().chunk(2, dim=1)
    expected = F.silu(gate) * up
    # The error of exp is a few units in the last place, and two more for each unit of its argument,
    # which is rounded when it is scaled to a power of two. A sum, a quotient and a product follow.
    bound = (2 * gate.abs() + 16) * 2.0**-24 * expected.abs()
    assert ((hidden[is_used].double() - expected).abs() <= bound).all()


@pytest.mark.parametrize(
    ("case", "profile"),
    # Every profile on the usual slots, and one on others.
    [(STEP_CASES[0], profile) for profile in Int8Profile]
    + [(case, Int8Profile.RINT127) for case in STEP_CASES[1:]],
    ids=lambda value: value.id if isinstance(value, StepCase) else None,
)
def test_hidden_rows_get_the_bits_of_quantize(
    case: StepCase, profile: Int8Profile, device: torch.device
) -> None:
    is_used = case.is_used(device)
    varied = varied_rows(INNER, torch.float32).to(device)
    hidden = varied.repeat(-(-case.num_slots // len(varied)), 1)[: case.num_slots].clone()
    codes = torch.full(hidden.shape, 55, dtype=torch.int8, device=device)
    scales = torch.full((case.num_slots, 1), -7.0, device=device)
    quantize_hidden_int8(
        hidden, **case.on(device), profile=profile, out_codes=codes, out_scales=scales
    )
    assert (codes[~is_used] == 55).all()
    assert (scales[~is_used] == -7).all()
    expected = quantize(hidden[is_used], INT8_PER_TOKEN, profile=profile)
    assert torch.equal(codes[is_used], expected.data)
    assert torch.equal(scales[is_used].view(torch.int32), expected.scales.view(torch.int32))


def stored(values: Tensor, dtype: torch.dtype) -> Tensor:
    """Return float32 values as the kernel stores them; the interpreter truncates to bfloat16."""
    if dtype is torch.bfloat16 and IS_INTERPRETED:
        values = (values.view(torch.int32) & ~0xFFFF).view(torch.float32)
    return values.to(dtype)


@pytest.mark.parametrize(
    ("case", "has_weights", "dtype"),
    [
        (case, has_weights, dtype)
        for case, dtypes in zip(
            STEP_CASES,
            [
                [torch.float32, torch.bfloat16, torch.float16],
                [torch.float32],
                [torch.bfloat16],
                [torch.bfloat16],
            ],
            strict=True,
        )
        for has_weights in (False, True)
        for dtype in dtypes
    ],
    ids=lambda value: value.id if isinstance(value, StepCase) else str(value),
)
def test_second_product_has_the_bits_of_plain_torch(
    case: StepCase, has_weights: bool, dtype: torch.dtype, device: torch.device
) -> None:
    case = replace(case, has_index=False)
    given = Operands.make(case, INNER, HIDDEN, device)
    is_used = case.is_used(device)
    slot_weights = torch.rand(case.num_slots, generator=torch.Generator().manual_seed(6)).to(device)
    slot_weights[~is_used] = float("nan")
    out = torch.full((case.num_slots, HIDDEN), float("nan"), dtype=dtype, device=device)
    weights = slot_weights if has_weights else None
    multiply_int8(given.on(case), slot_weights=weights, is_packed=True, out=out)
    assert out[~is_used].isnan().all()
    expected = given.products(case)[is_used]
    if has_weights:
        expected = expected * slot_weights[is_used].unsqueeze(1)
    assert torch.equal(out[is_used], stored(expected, dtype))


ONE_SLOT = StepCase(id="one", counts=(1,), first_slot=(0, 1), has_index=False)


def test_sums_beyond_what_float32_can_count_are_exact(device: torch.device) -> None:
    """Sum 4096 products of -128 and 127 with one other: float32 would lose the difference."""
    codes = torch.full((1, 4096), -128, dtype=torch.int8, device=device)
    codes[0, 100] = -127
    out = torch.full((1, 16), float("nan"), device=device)
    given = Product(
        codes=codes,
        scales=torch.ones(1, 1, device=device),
        **ONE_SLOT.on(device),
        matrices=torch.full((1, 16, 4096), 127, dtype=torch.int8, device=device),
        matrix_scales=torch.ones(1, 16, device=device),
    )
    multiply_int8(given, slot_weights=None, is_packed=False, out=out)
    exact = torch.tensor(-4096 * 128 * 127 + 127).float()
    assert torch.equal(out.cpu(), exact.expand(1, 16))


def test_rows_beyond_2_to_the_31_elements(device: torch.device) -> None:
    """Use three rows that are 2**30 + 16 elements apart, in mostly untouched memory."""
    stride = 2**30 + 16
    try:
        memory = torch.empty(2 * stride + HIDDEN, dtype=torch.int8, device=device)
    except RuntimeError:
        pytest.skip("not enough memory for 2**31 bytes")
    case = StepCase(id="far", counts=(3,), first_slot=(0, 3), has_index=True)
    near = Operands.make(case, HIDDEN, 2 * INNER, device)
    rows = memory.as_strided((3, HIDDEN), (stride, 1)).copy_(near.codes[:3])
    index = torch.tensor([2, 0, 1, -1, -1, -1], dtype=torch.int32, device=device)
    scales = torch.full((3, 1), 1e-3, device=device)
    results = []
    for codes in (rows, near.codes):
        hidden = torch.zeros(6, INNER, device=device)
        far = replace(near.on(case), codes=codes, scales=scales, row_of_slot=index)
        multiply_int8(far, is_packed=True, out=hidden)
        results.append(hidden)
    assert results[0][:3].any(dim=1).all()
    assert torch.equal(*results)


def test_no_slots_are_no_results(device: torch.device) -> None:
    check_no_slots(Int8TritonRunner(), make_weights(torch.float32, device), device)


def test_poison_stays_in_its_rows(device: torch.device) -> None:
    check_poison_stays_in_its_rows(Int8TritonRunner(), make_weights(torch.float32, device), device)


def test_kernels_are_launched_on_the_device_of_their_rows(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Triton launches on the current device, which may be another."""
    dispatched = record(CASES[0], HIDDEN, INT8_PER_TOKEN, device)
    entered, real = [], torch.cuda.device_of

    def device_of(tensor: Tensor) -> torch.cuda.device_of:
        entered.append(torch.device(tensor.device.type))
        return real(tensor)

    monkeypatch.setattr(torch.cuda, "device_of", device_of)
    # On a GPU, a kernel that was launched before is not launched by Triton again.
    _prepared.cache_clear()
    Int8TritonRunner().run(dispatched, make_weights(CASES[0].dtype, device))
    assert entered == [device] * 3


def refusals(hidden_size: int, inner_size: int) -> tuple[str, ...]:
    weights = ExpertWeights(
        gate_up_proj=torch.zeros(1, 2 * inner_size, hidden_size),
        down_proj=torch.zeros(1, hidden_size, inner_size),
    )
    return Int8TritonRunner.supports(Int8ChannelWeights.from_unquantized(weights)).reasons


def test_experts_that_the_kernels_cannot_read_are_refused_with_reasons() -> None:
    assert refusals(200, 24) == (
        "hidden_size is 200, expected a multiple of 16",
        "intermediate_size is 24, expected a multiple of 16",
        "the experts are on cpu, expected cuda",
    )
    assert refusals(2**17, 16) == (
        "hidden_size is 131072, expected at most 131071, beyond which sums overflow int32",
        "the experts are on cpu, expected cuda",
    )
