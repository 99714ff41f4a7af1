"""Quantised experts on one process: equal to a float64 model that quantises where they do."""

from dataclasses import dataclass, replace
from itertools import product

import pytest
import torch
from torch import Tensor

from epcomm import (
    ConfigError,
    MaskedDispatchOutput,
    RowsDispatchOutput,
    ScaleDtype,
    ShapeError,
    WireTensor,
)
from epcomm.ops.slots import spread_to_slots
from epcomm.quantization import FP8_FLOAT32_SCALES, INT8_PER_TOKEN, arrange_scales, quantize
from epcomm.records import SlotIndex
from epcomm.runners.base import ExpertRunner
from epcomm.runners.deep_gemm import DeepGemmRunner
from epcomm.runners.fp8_triton import Fp8TritonRunner
from epcomm.runners.fp8_wgmma import Fp8WgmmaRunner
from epcomm.runners.grouped_mm import GroupedMMRunner
from epcomm.runners.int8_triton import Int8TritonRunner
from epcomm.runners.quantized_reference import QuantizedReferenceRunner
from epcomm.runners.reference import ReferenceRunner
from epcomm.testing.data import BatchSpec, RankBatch, holed_ids, make_batch, make_weights
from epcomm.types import Layout, ScaleLayout, WeightsAppliedBy, WireFormat
from epcomm.weights.quantized import QUANTIZED_KINDS, Fp8BlockWeights, QuantizedWeights
from epcomm.weights.unquantized import ExpertTensors
from tests.cases.quantized_model import Bounded, assert_within, model, rounded
from tests.ops.indices import index_of
from tests.runners.records import as_masked, handle, rows_record

# Neither size is a multiple of the blocks of 128.
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
    for kind, layout, who, is_quantized in product(
        QUANTIZED_KINDS, Layout, WeightsAppliedBy, [True, False]
    )
]


def wire_rows(batch: RankBatch, case: Case, wire: WireFormat) -> WireTensor:
    if case.is_quantized:
        return quantize(batch.x, wire)
    return WireTensor(data=batch.x, format=WireFormat.of(torch.float32))


def slot_results(
    case: Case, batch: RankBatch, index: SlotIndex, weights: QuantizedWeights
) -> Tensor:
    """Return the runner's results [C, H], weighted by the runner or here, depending on the case."""
    slot_weights = spread_to_slots(batch.topk_weights, index)
    rows = wire_rows(batch, case, weights.wire_format)
    runner = QuantizedReferenceRunner()
    record = rows_record(rows, index, slot_weights, case.who)
    if case.layout is Layout.ROWS:
        return runner.run(record, weights).hidden_states
    results = runner.run(as_masked(record), weights).hidden_states
    counts = index.num_tokens_per_expert.tolist()
    assert not any(results[e, count:].any() for e, count in enumerate(counts))
    return torch.cat([results[expert, :count] for expert, count in enumerate(counts)])


def kind_weights(kind: str) -> QuantizedWeights:
    return QUANTIZED_KINDS[kind].from_unquantized(make_weights(SPEC, 1, intermediate_size=INNER))


def layer_results(case: Case, batch: RankBatch, weights: QuantizedWeights) -> Tensor:
    """Return y [T, H] of the runner and a plain combine, float64."""
    index = index_of(batch.topk_ids.tolist(), NUM_EXPERTS)
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


@pytest.mark.parametrize("name", ["gate_up_scale", "down_scale"])
@pytest.mark.parametrize("kind", QUANTIZED_KINDS)
def test_the_model_finds_scales_of_one_expert_that_are_off(kind: str, name: str) -> None:
    case = next(case for case in CASES if case.kind == kind)
    batch, weights = make_batch(SPEC, 0, 1), kind_weights(kind)
    expected = model(batch, weights, kind)
    scales = weights.tensors()[name][NUM_EXPERTS - 1]
    if scales.dtype is torch.float32:
        scales *= 1.02
    else:
        # The second bit, because all others of 448 + 1 are NaN.
        scales.view(torch.uint8).bitwise_xor_(2)
    with pytest.raises(AssertionError, match="beyond their bounds"):
        assert_within(layer_results(case, batch, weights), expected)


@pytest.mark.parametrize("kind", QUANTIZED_KINDS)
def test_quantised_weights_are_within_half_a_code_of_the_originals(kind: str) -> None:
    plain, quantized = make_weights(SPEC, 1, intermediate_size=INNER), kind_weights(kind)
    for name, values in quantized.dequantized().items():
        original = getattr(plain, name).detach().double()
        if kind not in ("fp8", "int8"):
            rows = original.flatten(0, 1)
            exact = Bounded(values=rows, error=torch.zeros_like(rows))
            assert_within(values.flatten(0, 1), rounded(exact, kind))
            continue
        scale = quantized.tensors()[name.replace("proj", "scale")].double()
        if kind == "int8":
            bound = scale.unsqueeze(2) * 0.5 * (1 + 1e-6)
        else:
            rows = scale.repeat_interleave(128, 1)[:, : original.shape[1]]
            spread = rows.repeat_interleave(128, 2)[:, :, : original.shape[2]]
            # Half a unit in the last of 3 fraction bits, or half the least number.
            bound = torch.maximum(original.abs() * 2**-4, spread * 2**-10) * (1 + 1e-6)
        assert ((values.double() - original).abs() <= bound).all()


def holed_topk() -> list[list[int]]:
    return make_batch(SPEC, 0, 1).topk_ids.tolist()


def in_columns(rows: WireTensor) -> WireTensor:
    return replace(rows, scales=arrange_scales(rows.scales, ScaleLayout(column_major=True)))


# Changes of rows that FP8 experts would misread, what came, and what was expected.
MISREAD = {
    "format": (
        lambda rows: quantize(rows.data.float(), INT8_PER_TOKEN),
        "int8/0 (torch.int8, scales torch.float32)",
        "fp8_e4m3/128 (torch.float8_e4m3fn, scales torch.float32)",
    ),
    "order": (in_columns, "1, 9], row-major", "torch.float32, row-major"),
}


@pytest.mark.parametrize("runner", [QuantizedReferenceRunner, Fp8TritonRunner])
@pytest.mark.parametrize("layout", Layout)
@pytest.mark.parametrize("case", MISREAD)
def test_rows_that_would_be_misread_are_refused_with_both_sides(
    case: str, layout: Layout, runner: type[ExpertRunner]
) -> None:
    change, what_came, what_was_expected = MISREAD[case]
    rows = change(quantize(make_batch(SPEC, 0, 1).x, FP8_FLOAT32_SCALES))
    index = index_of(holed_topk(), NUM_EXPERTS)
    slot_weights = torch.ones(index.row_of_slot.shape[0])  # type: ignore[union-attr]
    record = rows_record(rows, index, slot_weights, WeightsAppliedBy.RUNNER)
    if layout is Layout.MASKED:
        data = rows.data.unsqueeze(0)
        scales = None if rows.scales is None else rows.scales.unsqueeze(0)
        record = MaskedDispatchOutput(
            hidden_states=replace(rows, data=data, scales=scales),
            num_tokens_per_expert=torch.tensor([9], dtype=torch.int32),
            slot_weights=None,
            weights_applied_by=WeightsAppliedBy.COMBINE,
            handle=handle(),
        )
    with pytest.raises(ShapeError) as caught:
        runner().run(record, kind_weights("fp8"))
    came, _, expected = str(caught.value).partition("expected")
    assert came.startswith(f"{runner.name}: ")
    assert what_came in came
    assert what_was_expected in expected


# All runners of quantised experts, with a kind of experts each computes.
RUNNERS = [
    (QuantizedReferenceRunner, "fp8"),
    (QuantizedReferenceRunner, "int8"),
    (QuantizedReferenceRunner, "nvfp4"),
    (Fp8TritonRunner, "fp8"),
    (Fp8WgmmaRunner, "fp8"),
    (DeepGemmRunner, "fp8"),
    (Int8TritonRunner, "int8"),
]
every_runner = pytest.mark.parametrize(
    ("runner", "kind"), RUNNERS, ids=[f"{runner.name}, {kind}" for runner, kind in RUNNERS]
)


@dataclass(frozen=True, kw_only=True)
class Misfit:
    """A record that does not fit the experts, 3 with H = 200; rows are [9, H].

    num_experts: number of experts that are counted.
    spare_weights: number of slot_weights without a slot.
    """

    id: str
    hidden_size: int = HIDDEN
    num_experts: int = NUM_EXPERTS
    has_slot_weights: bool = True
    spare_weights: int = 0
    message: str


MISFITS = [
    Misfit(id="wider rows", hidden_size=384, message="so H is 384, expected 200 of the experts"),
    Misfit(id="narrower rows", hidden_size=8, message="so H is 8, expected 200 of the experts"),
    Misfit(id="more experts", num_experts=4, message="is [4] for rows {}, expected [3]"),
    Misfit(id="fewer experts", num_experts=2, message="is [2] for rows {}, expected [3]"),
    Misfit(
        id="no router weights",
        has_slot_weights=False,
        message="slot_weights is None, expected {}, because weights_applied_by is runner",
    ),
    Misfit(id="other router weights", spare_weights=1, message="slot_weights is {}, expected {}"),
]


def misfit_record(case: Misfit, layout: Layout) -> RowsDispatchOutput | MaskedDispatchOutput:
    """Nine unquantised rows, or nine an expert, all in use."""
    is_masked = layout is Layout.MASKED
    shape = (case.num_experts, 9) if is_masked else (9,)
    counts = torch.zeros(case.num_experts, dtype=torch.int32)
    counts[0] = 9
    x = torch.zeros(*shape, case.hidden_size)
    rows = WireTensor(data=x, format=WireFormat.of(torch.float32))
    slot_weights = torch.ones(*shape[:-1], 9 + case.spare_weights)
    if is_masked:
        return MaskedDispatchOutput(
            hidden_states=rows,
            num_tokens_per_expert=counts,
            slot_weights=slot_weights if case.has_slot_weights else None,
            weights_applied_by=WeightsAppliedBy.RUNNER,
            handle=handle(),
        )
    index = index_of([[0]] * 9, case.num_experts)
    record = rows_record(rows, index, slot_weights, WeightsAppliedBy.RUNNER)
    return record if case.has_slot_weights else replace(record, slot_weights=None)


@every_runner
@pytest.mark.parametrize("layout", Layout)
@pytest.mark.parametrize("case", MISFITS, ids=lambda case: case.id)
def test_records_that_do_not_fit_the_experts_are_refused(
    case: Misfit, layout: Layout, runner: type[ExpertRunner], kind: str
) -> None:
    record = misfit_record(case, layout)
    with pytest.raises(ShapeError) as caught:
        runner().run(record, kind_weights(kind))
    for part in f"{runner.name}: |{case.message}".replace("{}", "|").split("|"):
        assert part in str(caught.value)


@every_runner
@pytest.mark.parametrize("layout", Layout)
def test_gradients_are_refused(layout: Layout, runner: type[ExpertRunner], kind: str) -> None:
    record = misfit_record(Misfit(id="fits", message=""), layout)
    record.hidden_states.data.requires_grad_()
    message = rf"{runner.name}: rows need gradients, .* \(rank 1 of 2\)"
    with pytest.raises(ConfigError, match=message):
        runner().run(record, kind_weights(kind))


def test_rows_are_checked_once_for_each_record_of_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[object] = []
    check = QuantizedReferenceRunner._check_rows

    def count(rows: WireTensor, weights: ExpertTensors, layout: Layout) -> None:
        checked.append(rows)
        check(rows, weights, layout)

    monkeypatch.setattr(QuantizedReferenceRunner, "_check_rows", staticmethod(count))
    runner, weights = QuantizedReferenceRunner(), kind_weights("fp8")
    index = index_of(holed_topk(), NUM_EXPERTS)
    slot_weights = torch.ones(index.row_of_slot.shape[0])  # type: ignore[union-attr]
    batches = [quantize(make_batch(SPEC, 0, 1).x, FP8_FLOAT32_SCALES) for _ in range(2)]
    records = [rows_record(each, index, slot_weights, WeightsAppliedBy.RUNNER) for each in batches]
    for record, experts in (
        (records[0], weights),
        (records[0], weights),
        (records[1], weights),
        (records[0], kind_weights("fp8")),
    ):
        runner.run(record, experts)
    assert [batches.index(each) for each in checked] == [0, 1, 0]
    # Sizes are checked in every call, for an index is of one batch.
    short = replace(index, num_tokens_per_expert=index.num_tokens_per_expert[:-1])
    with pytest.raises(ShapeError, match="num_tokens_per_expert"):
        runner.run(replace(records[1], index=short), weights)


@pytest.mark.parametrize("runner", [ReferenceRunner, GroupedMMRunner])
def test_unquantised_experts_need_router_weights_too(runner: type[ExpertRunner]) -> None:
    plain = make_weights(SPEC, 1, intermediate_size=INNER)
    case = Misfit(id="none", has_slot_weights=False, message="")
    for layout in sorted(runner.layouts):
        with pytest.raises(ShapeError, match=f"{runner.name}: slot_weights is None, expected "):
            runner().run(misfit_record(case, layout), plain)


def test_kernels_that_scale_by_float32_refuse_powers_of_two() -> None:
    plain = make_weights(replace(SPEC, hidden_size=128), 1, intermediate_size=128)
    verdicts = [
        Fp8TritonRunner.supports(Fp8BlockWeights.from_unquantized(plain, scales=scales))
        for scales in ScaleDtype
    ]
    assert verdicts[1].reasons[1:] == (
        "the experts need fp8_e4m3/128/ue8m0 rows, expected fp8_e4m3/128",
        *verdicts[0].reasons[1:],
    )
