"""The FP8 runner of GPUs, interpreted where there is none: equal to the plain one."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product

import pytest
import torch
from torch import Tensor

from epcomm import ConfigError, MaskedDispatchOutput, RowsDispatchOutput, WireTensor
from epcomm.ops.static_slots import build_static_slot_index
from epcomm.quantization import FP8_FLOAT32_SCALES, quantize
from epcomm.quantized_weights import Fp8BlockWeights
from epcomm.records import Handle, Route, SlotIndex
from epcomm.runners.fp8_triton import Fp8TritonRunner
from epcomm.runners.quantized_reference import QuantizedReferenceRunner
from epcomm.testing.oracle import relative_error
from epcomm.types import Layout, WeightsAppliedBy, WireFormat
from epcomm.weights import ExpertWeights

NUM_EXPERTS, HIDDEN, INNER, NUM_ROWS = 3, 256, 128, 90
# Expert 0 gets more rows than a tile has, expert 1 none, and 5 slots belong to nobody.
IDS = [0] * 70 + [2] * 15 + [-1] * 5
NUM_SLOTS = 90
# Tensor cores keep some 14 bits of a sum of FP8 products, so a few activations fall to the other
# side of a tie. A code next to the largest is 1/14 of it away; with the largest activation of 128
# at four standard deviations, and the largest of y at three, one such code moves y by
# 4/14 / (3 * 128**0.5), 0.8% of that. Two may meet; bfloat16 adds its own 2**-8.
TOLERANCE = {torch.float32: 0.02, torch.bfloat16: 0.024}


@dataclass(frozen=True, kw_only=True)
class Case:
    layout: Layout
    who: WeightsAppliedBy
    dtype: torch.dtype
    is_quantized: bool
    is_strided: bool

    @property
    def id(self) -> str:
        rows = "quantised" if self.is_quantized else "plain"
        return (
            f"{self.layout.value}, weights by {self.who.value}, {self.dtype}, {rows} rows"
            f"{' that lie apart' if self.is_strided else ''}"
        )


CASES = [
    Case(layout=layout, who=who, dtype=dtype, is_quantized=is_quantized, is_strided=is_strided)
    for layout, who, dtype, is_quantized, is_strided in product(
        Layout, WeightsAppliedBy, TOLERANCE, [True, False], [False, True]
    )
    if not is_strided or (is_quantized and layout is Layout.ROWS)
]


def make_weights(dtype: torch.dtype, device: torch.device) -> Fp8BlockWeights:
    generator = torch.Generator().manual_seed(1)
    gate_up = torch.randn(NUM_EXPERTS, 2 * INNER, HIDDEN, generator=generator) / HIDDEN**0.5
    down = torch.randn(NUM_EXPERTS, HIDDEN, INNER, generator=generator) / INNER**0.5
    weights = ExpertWeights(gate_up_proj=gate_up.to(device), down_proj=down.to(device))
    return replace(Fp8BlockWeights.from_unquantized(weights), hidden_dtype=dtype)


def make_index(device: torch.device) -> SlotIndex:
    order = torch.randperm(NUM_ROWS, generator=torch.Generator().manual_seed(2))
    ids = torch.tensor(IDS)[order].unsqueeze(1).to(device)
    return build_static_slot_index(ids, NUM_EXPERTS, NUM_SLOTS)


def apart(tensor: Tensor) -> Tensor:
    """The same rows with gaps of 16 bytes between them, full of NaN."""
    gap = 16 // tensor.itemsize
    wide = torch.full(
        (tensor.shape[0], (tensor.shape[1] + gap) * tensor.itemsize),
        0x7F,
        dtype=torch.uint8,
        device=tensor.device,
    ).view(tensor.dtype)
    rows = wide[:, : tensor.shape[1]]
    rows.view(torch.uint8).copy_(tensor.view(torch.uint8))
    return rows


def make_rows(case: Case, index: SlotIndex, device: torch.device) -> WireTensor:
    """Rows without a slot are NaN."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(NUM_ROWS, HIDDEN, generator=generator).to(device, case.dtype)
    assert index.slots_of_row is not None
    x[(index.slots_of_row < 0).all(dim=1)] = float("nan")
    wire = quantize(x, FP8_FLOAT32_SCALES if case.is_quantized else WireFormat.of(case.dtype))
    if not case.is_strided:
        return wire
    assert wire.scales is not None
    return replace(wire, data=apart(wire.data), scales=apart(wire.scales))


def record(case: Case, device: torch.device) -> RowsDispatchOutput | MaskedDispatchOutput:
    index = make_index(device)
    rows = make_rows(case, index, device)
    weights = torch.rand(NUM_SLOTS, generator=torch.Generator().manual_seed(4)).to(device)
    handle = Handle(owner=None, route=Route(), call=1, num_tokens=NUM_ROWS, needs_backward=False)
    if case.layout is Layout.ROWS:
        return RowsDispatchOutput(
            hidden_states=rows,
            index=index,
            slot_weights=weights,
            weights_applied_by=case.who,
            handle=handle,
        )
    counts, starts = index.num_slots_per_expert.tolist(), index.first_slot.tolist()
    room = max(counts) + 3

    def spread(values: Tensor) -> Tensor:
        raw = values.contiguous().view(torch.uint8)
        wide = raw.new_full((NUM_EXPERTS, room, raw.shape[1]), 0x7F)
        for expert, count in enumerate(counts):
            mine = index.row_of_slot[starts[expert] : starts[expert] + count]  # type: ignore[index]
            wide[expert, :count] = raw[mine.long()]
        return wide.view(values.dtype)

    masked_weights = weights.new_full((NUM_EXPERTS, room), float("nan"))
    for expert, count in enumerate(counts):
        masked_weights[expert, :count] = weights[starts[expert] : starts[expert] + count]
    return MaskedDispatchOutput(
        hidden_states=replace(
            rows,
            data=spread(rows.data),
            scales=None if rows.scales is None else spread(rows.scales),
        ),
        num_slots_per_expert=index.num_slots_per_expert,
        slot_weights=masked_weights,
        weights_applied_by=case.who,
        handle=handle,
    )


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_runner_equals_the_plain_one(case: Case, device: torch.device) -> None:
    weights, dispatched = make_weights(case.dtype, device), record(case, device)
    actual = Fp8TritonRunner().run(dispatched, weights).hidden_states
    expected = QuantizedReferenceRunner().run(dispatched, weights).hidden_states
    assert (actual.shape, actual.dtype) == (expected.shape, case.dtype)
    counts = dispatched.num_slots_per_expert.tolist()
    for expert, count in enumerate(counts):
        if isinstance(dispatched, MaskedDispatchOutput):
            mine = actual[expert, :count], expected[expert, :count]
        else:
            first = int(dispatched.index.first_slot[expert])
            mine = actual[first : first + count], expected[first : first + count]
        assert relative_error(*mine) <= TOLERANCE[case.dtype]


def test_gradients_are_refused(device: torch.device) -> None:
    case = Case(
        layout=Layout.ROWS,
        who=WeightsAppliedBy.RUNNER,
        dtype=torch.float32,
        is_quantized=False,
        is_strided=False,
    )
    dispatched = record(case, device)
    dispatched.hidden_states.data.requires_grad_()
    with pytest.raises(ConfigError, match="rows need gradients"):
        Fp8TritonRunner().run(dispatched, make_weights(torch.float32, device))  # type: ignore[arg-type]


def test_experts_that_the_kernels_cannot_read_are_refused_with_reasons() -> None:
    weights = ExpertWeights(gate_up_proj=torch.zeros(2, 64, 200), down_proj=torch.zeros(2, 200, 32))
    verdict = Fp8TritonRunner.supports(Fp8BlockWeights.from_unquantized(weights))
    assert verdict.reasons == (
        "hidden_size is 200, expected a multiple of 128",
        "intermediate_size is 32, expected a multiple of 128",
        "the experts are on cpu, expected cuda",
    )
