"""Eight-bit experts on one process: equal to a float64 model that quantises where they do."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

import pytest
import torch
from torch import Tensor

from epcomm import MaskedDispatchOutput, RowsDispatchOutput, WireTensor
from epcomm.ops.slots import spread_to_slots
from epcomm.quantization import quantize
from epcomm.quantized_weights import Fp8BlockWeights, Int8ChannelWeights
from epcomm.records import Handle, Route, SlotIndex
from epcomm.runners.quantized_reference import QuantizedReferenceRunner
from epcomm.testing.data import BatchSpec, RankBatch, holed_ids, make_batch, make_weights
from epcomm.types import Layout, WeightsAppliedBy, WireDtype, WireFormat
from tests.ops.indices import index_of
from tests.quantized_model import KINDS, Bounded, assert_within, model, rounded

# Neither is a multiple of the blocks of 128.
NUM_EXPERTS, HIDDEN, INNER = 3, 200, 144
SPEC = BatchSpec(
    hidden_size=HIDDEN,
    num_local_experts=NUM_EXPERTS,
    top_k=2,
    tokens_of_rank=lambda rank, world_size: 9,
    choose_ids=holed_ids,
)


@dataclass(frozen=True, kw_only=True)
class Case:
    kind: str
    layout: Layout
    who: WeightsAppliedBy
    is_quantized: bool

    @property
    def id(self) -> str:
        arriving = "quantised rows" if self.is_quantized else "plain rows"
        return f"{self.kind}, {self.layout.value}, weights by {self.who.value}, {arriving}"


CASES = [
    Case(kind=kind, layout=layout, who=who, is_quantized=is_quantized)
    for kind, layout, who, is_quantized in product(KINDS, Layout, WeightsAppliedBy, [True, False])
]


def wire_rows(batch: RankBatch, case: Case, wire: WireFormat) -> WireTensor:
    if case.is_quantized:
        return quantize(batch.x, wire)
    return WireTensor(data=batch.x, format=WireFormat.of(torch.float32))


def rows_record(
    rows: WireTensor, index: SlotIndex, slot_weights: Tensor, who: WeightsAppliedBy
) -> RowsDispatchOutput:
    return RowsDispatchOutput(
        hidden_states=rows,
        index=index,
        slot_weights=slot_weights,
        weights_applied_by=who,
        handle=handle(),
    )


def masked_record(
    rows: WireTensor, index: SlotIndex, slot_weights: Tensor, who: WeightsAppliedBy
) -> MaskedDispatchOutput:
    """Each expert's slots side by side, and behind them bytes that mean NaN, or 127."""
    assert index.row_of_slot is not None
    counts = index.num_slots_per_expert.tolist()
    room = max(counts) + 2

    def spread(values: Tensor) -> Tensor:
        raw = values.contiguous().view(torch.uint8)
        spread_out = raw.new_full((len(counts), room, *raw.shape[1:]), 0x7F)
        starts = index.first_slot.tolist()
        for expert, count in enumerate(counts):
            mine = index.row_of_slot[starts[expert] : starts[expert] + count].long()  # type: ignore[index]
            spread_out[expert, :count] = raw[mine]
        return spread_out.view(values.dtype)

    weights = slot_weights.new_full((len(counts), room), float("nan"))
    starts = index.first_slot.tolist()
    for expert, count in enumerate(counts):
        weights[expert, :count] = slot_weights[starts[expert] : starts[expert] + count]
    return MaskedDispatchOutput(
        hidden_states=WireTensor(
            data=spread(rows.data),
            format=rows.format,
            scales=None if rows.scales is None else spread(rows.scales),
        ),
        num_slots_per_expert=index.num_slots_per_expert,
        slot_weights=weights,
        weights_applied_by=who,
        handle=handle(),
    )


def handle() -> Handle:
    return Handle(owner=None, route=Route(), call=1, num_tokens=9, needs_backward=False)


def slot_results(
    case: Case, batch: RankBatch, index: SlotIndex, weights: Fp8BlockWeights | Int8ChannelWeights
) -> Tensor:
    """[C, H] of the runner, in slot order, weighted by whom the case says."""
    slot_weights = spread_to_slots(batch.topk_weights, index)
    rows = wire_rows(batch, case, weights.wire_format)
    runner = QuantizedReferenceRunner()
    if case.layout is Layout.ROWS:
        return runner.run(rows_record(rows, index, slot_weights, case.who), weights).hidden_states
    record = masked_record(rows, index, slot_weights, case.who)
    results = runner.run(record, weights).hidden_states
    counts = index.num_slots_per_expert.tolist()
    assert not any(results[e, count:].any() for e, count in enumerate(counts))
    return torch.cat([results[expert, :count] for expert, count in enumerate(counts)])


def kind_weights(kind: str) -> Fp8BlockWeights | Int8ChannelWeights:
    return KINDS[kind].from_unquantized(make_weights(SPEC, 1, intermediate_size=INNER))


def layer_results(
    case: Case, batch: RankBatch, weights: Fp8BlockWeights | Int8ChannelWeights
) -> Tensor:
    """[T, H] of the runner and a plain combine, float64."""
    index = index_of(batch.topk_ids.tolist(), NUM_EXPERTS)
    assert index.slots_of_row is not None
    results = slot_results(case, batch, index, weights).double()
    y = torch.zeros(len(batch.x), HIDDEN, dtype=torch.float64)
    for row, slots in enumerate(index.slots_of_row.tolist()):
        for k, slot in enumerate(slots):
            if slot >= 0:
                by_runner = case.who is WeightsAppliedBy.RUNNER
                y[row] += results[slot] * (1 if by_runner else batch.topk_weights[row, k].double())
    return y


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_runner_equals_a_model_that_quantises_where_it_does(case: Case) -> None:
    batch, weights = make_batch(SPEC, 0, 1), kind_weights(case.kind)
    assert_within(layer_results(case, batch, weights), model(batch, weights, case.kind))


@pytest.mark.parametrize("expert", range(NUM_EXPERTS))
@pytest.mark.parametrize("name", ["gate_up_scale", "down_scale"])
@pytest.mark.parametrize("kind", KINDS)
def test_the_model_finds_scales_of_one_expert_that_are_off_by_2_percent(
    kind: str, name: str, expert: int
) -> None:
    case = next(case for case in CASES if case.kind == kind)
    batch, weights = make_batch(SPEC, 0, 1), kind_weights(kind)
    expected = model(batch, weights, kind)
    weights.tensors()[name][expert] *= 1.02
    with pytest.raises(AssertionError, match="beyond their bounds"):
        assert_within(layer_results(case, batch, weights), expected)


@pytest.mark.parametrize("kind", KINDS)
def test_only_results_of_activations_near_a_middle_have_wide_bounds(kind: str) -> None:
    """The row 127 2.5 2.49 has the scale 1, the row 448 17 17.01 too: 2.5 and 17 are middles."""
    top, middle, beside = (127.0, 2.5, 2.49) if kind == "int8" else (448.0, 17.0, 17.01)
    x = torch.tensor([[top, middle, beside]], dtype=torch.float64)
    came = rounded(Bounded(values=x, error=torch.zeros_like(x)), kind)
    step = 1.0 if kind == "int8" else 2.0
    assert came.error[0, 1] == pytest.approx(step, rel=1e-5)
    assert came.error[0, 0] < 1e-3
    assert came.error[0, 2] < 1e-3


def test_nan_is_within_no_bound() -> None:
    zero = torch.zeros(1, 1, dtype=torch.float64)
    with pytest.raises(AssertionError, match="1 of 1 results"):
        assert_within(zero / 0, Bounded(values=zero, error=zero + 1e9))


@pytest.mark.parametrize("kind", KINDS)
def test_rows_quantised_before_or_after_they_travel_give_the_same_bits(kind: str) -> None:
    batch = make_batch(SPEC, 0, 1)
    index = index_of(batch.topk_ids.tolist(), NUM_EXPERTS)
    before, after = (
        slot_results(
            Case(
                kind=kind,
                layout=Layout.ROWS,
                who=WeightsAppliedBy.RUNNER,
                is_quantized=is_quantized,
            ),
            batch,
            index,
            kind_weights(kind),
        )
        for is_quantized in (True, False)
    )
    assert torch.equal(before, after)


@pytest.mark.parametrize("kind", KINDS)
def test_quantised_weights_are_within_half_a_code_of_the_originals(kind: str) -> None:
    plain, quantized = make_weights(SPEC, 1, intermediate_size=INNER), kind_weights(kind)
    for name, values in quantized.dequantized().items():
        original = getattr(plain, name).detach().double()
        scale = quantized.tensors()[name.replace("proj", "scale")].double()
        if kind == "int8":
            bound = scale.unsqueeze(2) * 0.5 * (1 + 1e-6)
        else:
            rows = scale.repeat_interleave(128, 1)[:, : original.shape[1]]
            spread = rows.repeat_interleave(128, 2)[:, :, : original.shape[2]]
            # Half a unit in the last of 3 fraction bits, or half the least number.
            bound = torch.maximum(original.abs() * 2**-4, spread * 2**-10) * (1 + 1e-6)
        assert ((values.double() - original).abs() <= bound).all()


def test_runner_reads_what_the_weights_want_and_what_is_not_quantised() -> None:
    plain = {WireDtype.BF16, WireDtype.FP16, WireDtype.FP32}
    for kind, dtype in (("fp8", WireDtype.FP8_E4M3), ("int8", WireDtype.INT8)):
        assert QuantizedReferenceRunner.wire_dtypes(kind_weights(kind)) == plain | {dtype}
