"""The runner over deep_gemm: what it hands to the package, and when it is not chosen."""

from __future__ import annotations

import sys
from dataclasses import dataclass, replace
from itertools import product

import pytest
import torch
from torch import Tensor

from epcomm import (
    BackendUnavailable,
    ConfigError,
    EPConfig,
    ExpertWeights,
    Fp8BlockWeights,
    MaskedDispatchOutput,
    MoESpec,
    RowsDispatchOutput,
    ShapeError,
    WireTensor,
    plan,
)
from epcomm.ops.static_slots import build_static_slot_index
from epcomm.quantization import arrange_scales, quantize
from epcomm.records import ExchangePlan, Handle, SlotIndex
from epcomm.registry import RUNNERS
from epcomm.runners.deep_gemm import COLUMNS, PACKED_COLUMNS, DeepGemmRunner
from epcomm.runners.quantized_reference import QuantizedReferenceRunner
from epcomm.testing.oracle import relative_error
from epcomm.types import ROW_MAJOR, Layout, ScaleDtype, WeightsAppliedBy, WireFormat
from tests.runners import fake_deep_gemm

NUM_EXPERTS, HIDDEN, INNER, NUM_ROWS = 3, 640, 128, 150
# Expert 0 gets more rows than a tile has, expert 1 none, and 5 slots belong to nobody.
IDS = [0] * 130 + [2] * 15 + [-1] * 5
# The budget of slots: two tiles, one tile, and a rest that is no tile.
NUM_SLOTS = 3 * 128 + 50
# The package rounds gate and up to bfloat16, so a few activations fall to the other side of a tie.
# Codes next to the largest are 1/14 of it apart. With the largest of some thousand activations at
# eight standard deviations, an element of the matrix at three and the largest of y at four, one
# such code moves y by 8/14 * 3 / (4 * 128**0.5), 3.8% of that; bfloat16 adds its own 2**-8.
TOLERANCE = 0.042


@dataclass(frozen=True, kw_only=True)
class Case:
    layout: Layout
    who: WeightsAppliedBy
    is_quantized: bool
    scales: ScaleDtype
    architecture: int

    @property
    def id(self) -> str:
        rows = "quantised" if self.is_quantized else "plain"
        return (
            f"{self.layout.value}, weights by {self.who.value}, {rows} rows, {self.scales.value}, "
            f"sm_{self.architecture}0"
        )


CASES = [
    Case(
        layout=layout, who=who, is_quantized=is_quantized, scales=scales, architecture=architecture
    )
    for layout, who, is_quantized, (scales, architecture) in product(
        Layout,
        WeightsAppliedBy,
        [True, False],
        [(ScaleDtype.FLOAT32, 9), (ScaleDtype.POWER_OF_TWO, 9), (ScaleDtype.POWER_OF_TWO, 10)],
    )
]


def make_weights(
    scales: ScaleDtype = ScaleDtype.FLOAT32, hidden: int = HIDDEN, inner: int = INNER
) -> Fp8BlockWeights:
    generator = torch.Generator().manual_seed(1)
    gate_up = torch.randn(NUM_EXPERTS, 2 * inner, hidden, generator=generator) / hidden**0.5
    down = torch.randn(NUM_EXPERTS, hidden, inner, generator=generator) / inner**0.5
    plain = ExpertWeights(gate_up_proj=gate_up.bfloat16(), down_proj=down.bfloat16())
    return Fp8BlockWeights.from_unquantized(plain, scales=scales)


def make_index(expert_alignment: int = 128) -> SlotIndex:
    order = torch.randperm(NUM_ROWS, generator=torch.Generator().manual_seed(2))
    ids = torch.tensor(IDS)[order].unsqueeze(1)
    return build_static_slot_index(ids, NUM_EXPERTS, NUM_SLOTS, expert_alignment=expert_alignment)


def handle() -> Handle:
    return Handle(
        owner=None, exchange_plan=ExchangePlan(), call=1, num_tokens=NUM_ROWS, needs_backward=False
    )


def rows_record(case: Case, index: SlotIndex) -> RowsDispatchOutput:
    """Row-major scales; rows without a slot are NaN."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(NUM_ROWS, HIDDEN, generator=generator).bfloat16()
    assert index.slots_of_row is not None
    x[(index.slots_of_row < 0).all(dim=1)] = float("nan")
    wire = make_weights(case.scales).wire_format
    return RowsDispatchOutput(
        hidden_states=quantize(x, wire if case.is_quantized else WireFormat.of(x.dtype)),
        index=index,
        slot_weights=torch.rand(NUM_SLOTS, generator=generator),
        weights_applied_by=case.who,
        handle=handle(),
    )


def masked_record(record: RowsDispatchOutput) -> MaskedDispatchOutput:
    """Return the slots of each expert side by side, and behind them bytes that mean NaN."""
    counts, starts = record.num_tokens_per_expert.tolist(), record.index.first_slot.tolist()
    capacity = max(counts) + 3
    rows, row_of_slot = record.hidden_states, record.index.row_of_slot
    assert row_of_slot is not None
    assert record.slot_weights is not None

    def spread(values: Tensor) -> Tensor:
        raw = values.contiguous().view(torch.uint8)
        wide = raw.new_full((NUM_EXPERTS, capacity, raw.shape[1]), 0x7F)
        for expert, count in enumerate(counts):
            wide[expert, :count] = raw[row_of_slot[starts[expert] : starts[expert] + count].long()]
        return wide.view(values.dtype)

    weights = torch.full((NUM_EXPERTS, capacity), float("nan"))
    for expert, count in enumerate(counts):
        weights[expert, :count] = record.slot_weights[starts[expert] : starts[expert] + count]
    return MaskedDispatchOutput(
        hidden_states=WireTensor(
            data=spread(rows.data),
            format=rows.format,
            scales=None if rows.scales is None else spread(rows.scales),
        ),
        num_tokens_per_expert=record.num_tokens_per_expert,
        slot_weights=weights,
        weights_applied_by=record.weights_applied_by,
        handle=record.handle,
    )


Record = RowsDispatchOutput | MaskedDispatchOutput


def with_columns(record: Record, weights: Fp8BlockWeights) -> Record:
    """Return the record as a dispatcher hands it out that was planned for the runner."""
    rows = record.hidden_states
    if rows.scales is None:
        return record
    readings = DeepGemmRunner.readings(weights, record.layout)
    layout = next(each.scale_layout for each in readings if each.format == rows.format)
    scales = arrange_scales(rows.scales, layout)
    return replace(record, hidden_states=replace(rows, scales=scales, scale_layout=layout))


def slots_of_expert(results: Tensor, record: Record, expert: int) -> Tensor:
    count = int(record.num_tokens_per_expert[expert])
    if isinstance(record, MaskedDispatchOutput):
        return results[expert, :count]
    first = int(record.index.first_slot[expert])
    return results[first : first + count]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_runner_equals_the_plain_one(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    fake_deep_gemm.install(monkeypatch, architecture=case.architecture)
    weights, record = make_weights(case.scales), rows_record(case, make_index())
    record = record if case.layout is Layout.ROWS else masked_record(record)
    expected = QuantizedReferenceRunner().run(record, weights).hidden_states  # type: ignore[arg-type]
    actual = DeepGemmRunner().run(with_columns(record, weights), weights).hidden_states  # type: ignore[arg-type]
    assert (actual.shape, actual.dtype) == (expected.shape, torch.bfloat16)
    for expert in (0, 2):
        pair = (slots_of_expert(each, record, expert) for each in (actual, expected))
        assert relative_error(*pair) <= TOLERANCE


PLAIN = Case(
    layout=Layout.ROWS,
    who=WeightsAppliedBy.RUNNER,
    is_quantized=True,
    scales=ScaleDtype.FLOAT32,
    architecture=9,
)


def test_index_that_says_slot_s_is_row_s(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_deep_gemm.install(monkeypatch)
    weights, index = make_weights(), make_index()
    record = rows_record(PLAIN, index)
    assert index.row_of_slot is not None
    scales, picked = record.hidden_states.scales, index.row_of_slot.clamp(min=0)
    assert scales is not None
    packed = WireTensor(
        data=record.hidden_states.data.view(torch.uint8)[picked].view(torch.float8_e4m3fn),
        format=record.hidden_states.format,
        scales=scales[picked],
    )
    direct = replace(
        record,
        hidden_states=packed,
        index=replace(index, row_of_slot=None, slots_of_row=None),
    )
    through_index, without = (
        DeepGemmRunner().run(with_columns(each, weights), weights).hidden_states  # type: ignore[arg-type]
        for each in (record, direct)
    )
    for expert in (0, 2):
        pair = [slots_of_expert(each, record, expert) for each in (through_index, without)]
        assert torch.equal(*pair)


def test_no_slots_call_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_deep_gemm.install(monkeypatch)
    weights = make_weights()
    ids = torch.empty(0, 1, dtype=torch.int32)
    index = build_static_slot_index(ids, NUM_EXPERTS, 0, expert_alignment=128)
    record = replace(
        rows_record(PLAIN, make_index()),
        hidden_states=quantize(torch.empty(0, HIDDEN), weights.wire_format),
        index=index,
        slot_weights=torch.empty(0),
    )
    results = DeepGemmRunner().run(with_columns(record, weights), weights).hidden_states  # type: ignore[arg-type]
    assert list(results.shape) == [0, HIDDEN]


def test_row_major_scales_are_refused_with_both_sides(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_deep_gemm.install(monkeypatch)
    with pytest.raises(
        ShapeError, match=r"deep_gemm: .*came .*row-major.* expected .*column-major"
    ):
        DeepGemmRunner().run(rows_record(PLAIN, make_index()), make_weights())


def test_slots_that_are_not_aligned_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_deep_gemm.install(monkeypatch, alignment=256)
    weights = make_weights()
    record = with_columns(rows_record(PLAIN, make_index()), weights)
    with pytest.raises(
        ConfigError, match="multiples of 128, expected multiples of 256; dispatch with a plan"
    ):
        DeepGemmRunner().run(record, weights)  # type: ignore[arg-type]


def test_gradients_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_deep_gemm.install(monkeypatch)
    record = rows_record(replace(PLAIN, is_quantized=False), make_index())
    record.hidden_states.data.requires_grad_()
    with pytest.raises(ConfigError, match="rows need gradients"):
        DeepGemmRunner().run(record, make_weights())


def test_package_without_the_functions_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    module = fake_deep_gemm.install(monkeypatch)
    monkeypatch.delattr(module, "m_grouped_fp8_gemm_nt_masked")
    weights = make_weights()
    record = with_columns(rows_record(PLAIN, make_index()), weights)
    with pytest.raises(BackendUnavailable, match="fp8_m_grouped_gemm_nt_masked; install version"):
        DeepGemmRunner().run(record, weights)  # type: ignore[arg-type]


def test_experts_that_it_does_not_compute_are_refused_with_reasons(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    weights = replace(make_weights(hidden=200, inner=32), hidden_dtype=torch.float16)
    assert DeepGemmRunner.supports(weights).reasons == (
        "hidden_size is 200, expected a multiple of 128",
        "intermediate_size is 32, expected a multiple of 128",
        "hidden states are torch.float16, expected torch.bfloat16",
        "the experts are on cpu, expected cuda",
        "deep_gemm is not installed",
    )
    fake_deep_gemm.install(monkeypatch, architecture=8)
    assert DeepGemmRunner.supports(make_weights()).reasons == (
        "cpu is sm_8x, expected sm_9x or sm_10x",
    )
    fake_deep_gemm.install(monkeypatch, architecture=10)
    assert DeepGemmRunner.supports(make_weights()).reasons == (
        "cpu is sm_10x, which takes power-of-two scales alone, but the experts have float32 ones",
    )
    assert DeepGemmRunner.supports(make_weights(ScaleDtype.POWER_OF_TWO)).ok


SPEC = MoESpec(hidden_size=HIDDEN, num_experts=NUM_EXPERTS, top_k=2)
ASKED = EPConfig(mode="normal", runner="deep_gemm")


def test_plan_never_takes_what_is_missing() -> None:
    chosen = plan(EPConfig(), SPEC, weights=make_weights())
    assert chosen.runner == "quantized_reference"
    assert "deep_gemm is not installed" in chosen.explain()
    assert "deep_gemm" not in sys.modules
    with pytest.raises(BackendUnavailable, match="deep_gemm is not installed"):
        plan(ASKED, SPEC, weights=make_weights())


@pytest.mark.parametrize(
    ("scales", "architecture", "layout"),
    [
        (ScaleDtype.FLOAT32, 9, COLUMNS),
        (ScaleDtype.POWER_OF_TWO, 9, COLUMNS),
        (ScaleDtype.POWER_OF_TWO, 10, PACKED_COLUMNS),
    ],
)
def test_plan_lays_scales_out_for_it(
    scales: ScaleDtype,
    architecture: int,
    layout: object,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fake_deep_gemm.install(monkeypatch, architecture=architecture)
    chosen = plan(ASKED, SPEC, weights=make_weights(scales))
    assert chosen.prefill.scale_layout == layout
    assert f"scales on arrival: {layout}" in chosen.explain().splitlines()
    plain = plan(replace(ASKED, runner="quantized_reference"), SPEC, weights=make_weights(scales))
    assert plain.prefill.scale_layout == ROW_MAJOR
    assert "scales on arrival" not in plain.explain()


def test_plan_aligns_slots_as_it_needs_them(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_deep_gemm.install(monkeypatch)
    assert plan(ASKED, SPEC, weights=make_weights()).prefill.buffer_spec.expert_alignment == 128
    plain = replace(ASKED, runner="quantized_reference")
    assert plan(plain, SPEC, weights=make_weights()).prefill.buffer_spec.expert_alignment == 1


def test_auto_prefers_the_kernels_of_this_library() -> None:
    names = list(RUNNERS)
    assert names.index("fp8_triton") < names.index("deep_gemm") < names.index("quantized_reference")


def test_auto_takes_it_for_powers_of_two(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_deep_gemm.install(monkeypatch, architecture=10)
    weights = make_weights(ScaleDtype.POWER_OF_TWO)
    assert plan(EPConfig(mode="normal"), SPEC, weights=weights).runner == "deep_gemm"
