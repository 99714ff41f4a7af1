"""The runner over deep_gemm: the arguments of the package, and when it is not chosen."""

import sys
from dataclasses import dataclass, fields, replace
from enum import Enum
from functools import wraps
from itertools import product
from types import ModuleType
from typing import TypeVar

import pytest
import torch
from torch import Tensor

from epcomm import (
    BackendUnavailable,
    ConfigError,
    EPConfig,
    ExpertWeights,
    Fp8BlockWeights,
    MoESpec,
    RowsDispatchOutput,
    ShapeError,
    WireTensor,
    plan,
)
from epcomm.ops.slots import build_slot_index, count_experts
from epcomm.planning import ranks
from epcomm.platforms.cuda import cuda_reasons
from epcomm.platforms.deep_gemm import deep_gemm_reasons, load_deep_gemm
from epcomm.platforms.machine import this_machine
from epcomm.quantization import arrange_scales, quantize
from epcomm.records import SlotIndex
from epcomm.runners import deep_gemm
from epcomm.runners.deep_gemm import COLUMNS, PACKED_COLUMNS, DeepGemmRunner
from epcomm.runners.quantized_reference import QuantizedReferenceRunner
from epcomm.types import ROW_MAJOR, Layout, ScaleDtype, WeightsAppliedBy, WireFormat
from tests.runners import fake_deep_gemm
from tests.runners.records import Record, as_masked, largest_error, rows_record

NUM_EXPERTS, HIDDEN, INNER, NUM_ROWS = 3, 640, 128, 150
# Expert 0 gets more rows than a tile has, expert 1 none, and 5 rows have no expert.
IDS = [0] * 130 + [2] * 15 + [-1] * 5
# The budget of slots: two tiles, one tile, and an incomplete tile.
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
    # Every two of the first three choices meet in each form of scales.
    if (layout is Layout.ROWS) ^ (who is WeightsAppliedBy.RUNNER) ^ is_quantized
]


class Package(Enum):
    """The replacement of deep_gemm."""

    STAND_IN = "stand-in"
    REAL = "real package"

    def prepare(self, monkeypatch: pytest.MonkeyPatch, architecture: int = 9) -> torch.device:
        """Install the imitation if requested, and return the device of the experts."""
        if self is Package.STAND_IN:
            fake_deep_gemm.install(monkeypatch, architecture=architecture)
            return torch.device("cpu")
        if torch.cuda.get_device_capability()[0] != architecture:
            pytest.skip(f"this GPU is not an sm_{architecture}0")
        return torch.device("cuda")


IS_INSTALLED = not (deep_gemm_reasons(this_machine()) or cuda_reasons(this_machine()))


@pytest.fixture(params=[Package.STAND_IN, *[Package.REAL] * IS_INSTALLED], ids=lambda it: it.value)
def package(request: pytest.FixtureRequest) -> Package:
    return request.param


def make_weights(
    scales: ScaleDtype = ScaleDtype.FLOAT32, hidden: int = HIDDEN, inner: int = INNER
) -> Fp8BlockWeights:
    generator = torch.Generator().manual_seed(1)
    gate_up = torch.randn(NUM_EXPERTS, 2 * inner, hidden, generator=generator) / hidden**0.5
    down = torch.randn(NUM_EXPERTS, hidden, inner, generator=generator) / inner**0.5
    plain = ExpertWeights(gate_up_proj=gate_up.bfloat16(), down_proj=down.bfloat16())
    return Fp8BlockWeights.from_unquantized(plain, scales=scales)


def make_index(expert_alignment: int = 128, ids: list[int] = IDS) -> SlotIndex:
    order = torch.randperm(NUM_ROWS, generator=torch.Generator().manual_seed(2))
    of_rows = torch.tensor(ids)[order].unsqueeze(1)
    counts = count_experts(of_rows, NUM_EXPERTS)
    return build_slot_index(of_rows, counts, NUM_SLOTS, expert_alignment=expert_alignment)


def record_of(case: Case, index: SlotIndex) -> RowsDispatchOutput:
    """Make a record with row-major scales; rows without a slot are NaN."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(NUM_ROWS, HIDDEN, generator=generator).bfloat16()
    x[index.slots_of_row.lt(0).all(dim=1)] = float("nan")
    wire = make_weights(case.scales).wire_format
    rows = quantize(x, wire if case.is_quantized else WireFormat.of(x.dtype))
    return rows_record(rows, index, torch.rand(NUM_SLOTS, generator=generator), case.who)


def with_columns(record: Record, weights: Fp8BlockWeights) -> Record:
    """Return the record in the form of a dispatcher that was planned for the runner."""
    rows = record.hidden_states
    if rows.scales is None:
        return record
    readings = DeepGemmRunner.readings(weights, record.layout)
    layout = next(each.scale_layout for each in readings if each.format == rows.format)
    scales = arrange_scales(rows.scales, layout)
    return replace(record, hidden_states=replace(rows, scales=scales, scale_layout=layout))


T = TypeVar("T")


def moved(record: T, device: torch.device) -> T:
    """Return a record of tensors on a device, with the strides of its scales."""
    changes: dict[str, object] = {}
    for field in fields(record):
        value = getattr(record, field.name)
        if isinstance(value, Tensor):
            # torch keeps the strides of dense tensors; columns of scales are aligned.
            changes[field.name] = value.to(device)
        elif isinstance(value, (SlotIndex, WireTensor)):
            changes[field.name] = moved(value, device)
    return replace(record, **changes)  # type: ignore[type-var]


def run_both(
    record: Record, weights: Fp8BlockWeights, device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return the results of the plain runner and of the runner, on the CPU."""
    expected = QuantizedReferenceRunner().run(record, weights).hidden_states
    theirs = moved(weights, device)
    ours = with_columns(moved(record, device), theirs)
    actual = DeepGemmRunner().run(ours, theirs).hidden_states.cpu()
    assert (actual.shape, actual.dtype) == (expected.shape, torch.bfloat16)
    return expected, actual


PLAIN = Case(
    layout=Layout.ROWS,
    who=WeightsAppliedBy.RUNNER,
    is_quantized=True,
    scales=ScaleDtype.FLOAT32,
    architecture=9,
)


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_runner_equals_the_plain_one(
    case: Case, package: Package, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = package.prepare(monkeypatch, case.architecture)
    weights, record = make_weights(case.scales), record_of(case, make_index())
    record = record if case.layout is Layout.ROWS else as_masked(record, 256)
    expected, actual = run_both(record, weights, device)
    assert largest_error(record, actual, expected) <= TOLERANCE


@pytest.mark.parametrize("capacity", [133, 192, 256])
def test_experts_do_not_overwrite_the_rows_of_the_next_one(
    capacity: int, package: Package, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole tiles are stored, so a capacity that is not a multiple of a tile is refused."""
    device, weights = package.prepare(monkeypatch), make_weights()
    index = make_index(ids=[0] * 130 + [1] * 7 + [2] * 13)
    record = as_masked(record_of(replace(PLAIN, layout=Layout.MASKED), index), capacity)
    if capacity % 128:
        with pytest.raises(ConfigError, match=f"capacity for {capacity} rows, expected a multiple"):
            run_both(record, weights, device)
        return
    expected, actual = run_both(record, weights, device)
    assert largest_error(record, actual, expected) <= TOLERANCE


BETWEEN = [
    (layout, scales, architecture, is_weighted)
    for layout, (scales, architecture), is_weighted in product(
        Layout,
        [(ScaleDtype.FLOAT32, 9), (ScaleDtype.POWER_OF_TWO, 9), (ScaleDtype.POWER_OF_TWO, 10)],
        [False, True],
    )
    # Exponents cannot represent a weight; of the others, each layout has one with weights.
    if is_weighted
    == (architecture == 9 and (layout is Layout.ROWS) ^ (scales is ScaleDtype.FLOAT32))
]


@pytest.mark.parametrize(("layout", "scales", "architecture", "is_weighted"), BETWEEN)
def test_kernel_between_the_products_equals_plain_torch(
    layout: Layout,
    scales: ScaleDtype,
    architecture: int,
    is_weighted: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What is unused is NaN."""
    fake_deep_gemm.install(monkeypatch, architecture=architecture)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    # Five blocks fill the first word of exponents and begin a second one.
    inner = (5 if architecture == 10 else 2) * 128
    weights = make_weights(scales, hidden=128, inner=inner)
    counts, capacity = torch.tensor([33, 0, 5], dtype=torch.int32), 40
    first_slot = torch.arange(4, dtype=torch.int32) * capacity
    generator = torch.Generator().manual_seed(6)
    gate_up = torch.randn(3, capacity, 2 * inner, generator=generator).bfloat16()
    slot_weights = torch.rand(3, capacity, generator=generator)
    for expert, count in enumerate(counts.tolist()):
        gate_up[expert, count:] = float("nan")
        slot_weights[expert, count:] = float("nan")
    is_masked = layout is Layout.MASKED
    arguments = [
        gate_up if is_masked else gate_up.flatten(0, 1),
        weights,
        counts,
        None if is_masked else first_slot,
        (slot_weights if is_masked else slot_weights.flatten()) if is_weighted else None,
    ]
    expected = deep_gemm._between(*arguments)
    on_device = [each.to(device) if isinstance(each, Tensor) else each for each in arguments]
    actual = moved(deep_gemm._between_on_gpu(*on_device), torch.device("cpu"))
    assert actual.scales.stride() == expected.scales.stride()
    for expert, count in enumerate(counts.tolist()):
        rows = (expert, slice(count)) if is_masked else slice(expert * 40, expert * 40 + count)
        # exp() differs by a unit in the last place, so that a tie may fall to the other side: codes
        # are neighbours, and scales differ by as much as their magnitudes.
        codes, wanted = (each.data[rows].view(torch.uint8).int() for each in (actual, expected))
        assert ((codes - wanted).abs() <= 1).all()
        assert (codes != wanted).sum() <= codes.numel() / 100
        if architecture == 10:
            assert torch.equal(actual.scales[rows], expected.scales[rows])
        else:
            torch.testing.assert_close(
                actual.scales[rows], expected.scales[rows], rtol=2**-21, atol=0.0
            )


def spy(monkeypatch: pytest.MonkeyPatch, module: ModuleType, name: str) -> list[tuple]:
    calls: list[tuple] = []
    function = getattr(module, name)

    @wraps(function)
    def recorded(*args: object, **kwargs: object) -> None:
        calls.append((*args, kwargs))
        function(*args, **kwargs)

    monkeypatch.setattr(module, name, recorded)
    return calls


@pytest.mark.parametrize("layout", Layout)
def test_products_have_the_limit_of_sms(layout: Layout, monkeypatch: pytest.MonkeyPatch) -> None:
    module, weights, runner = fake_deep_gemm.install(monkeypatch), make_weights(), DeepGemmRunner()
    record = record_of(replace(PLAIN, layout=layout), make_index())
    record = with_columns(record if layout is Layout.ROWS else as_masked(record, 256), weights)
    for runner.product_sms in (None, 100, 200):
        runner.run(record, weights)
    assert (module.of_products, module.num_sms) == ([132, 132, 100, 100, 132, 132], 132)


@pytest.mark.parametrize(("mean", "expected"), [(None, 256), (33, 33), (1000, 256)])
def test_the_mean_of_rows_chooses_tiles(
    mean: int | None, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = fake_deep_gemm.install(monkeypatch)
    calls = spy(monkeypatch, module, "m_grouped_fp8_gemm_nt_masked")
    weights, case = make_weights(), replace(PLAIN, layout=Layout.MASKED)
    record = as_masked(record_of(case, make_index()), 256)
    record = with_columns(replace(record, mean_tokens_per_expert=mean), weights)
    DeepGemmRunner().run(record, weights)
    assert [call[4] for call in calls] == [expected, expected]


@pytest.mark.parametrize("index_alignment", [128, 256])
def test_ends_of_experts_are_passed_where_the_package_takes_them(
    index_alignment: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With an alignment other than the package's, the expert of each row is passed instead.

    Results have the same bits either way.
    """
    weights, results, layouts = make_weights(), [], []
    for takes_ends in (True, False):
        module = fake_deep_gemm.install(monkeypatch, takes_ends=takes_ends)
        calls = spy(monkeypatch, module, "m_grouped_fp8_gemm_nt_contiguous")
        record = with_columns(record_of(PLAIN, make_index(index_alignment)), weights)
        results.append(DeepGemmRunner().run(record, weights).hidden_states)
        layouts.append({call[3].shape[0] for call in calls})
    num_rows = -(-NUM_SLOTS // 128) * 128
    assert layouts == [{NUM_EXPERTS if index_alignment == 128 else num_rows}, {num_rows}]
    assert largest_error(record, *results) == 0


def test_docstrings_of_compiled_functions_name_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    """inspect cannot read the signatures of pybind11 functions."""

    class Compiled:
        def __init__(self, text: str) -> None:
            self.__doc__ = text

        @property
        def __signature__(self) -> None:
            raise ValueError("no signature found for builtin")

        def __call__(self) -> None: ...

    module = fake_deep_gemm.install(monkeypatch)
    for text, takes_ends in (
        ("m_grouped(a: object, d: object, use_psum_layout: bool = False) -> None", True),
        ("m_grouped(a: object, d: object) -> None", False),
    ):
        monkeypatch.setattr(module, "m_grouped_fp8_gemm_nt_contiguous", Compiled(text))
        assert load_deep_gemm().takes_ends is takes_ends


def test_index_that_says_slot_s_is_row_s(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_deep_gemm.install(monkeypatch)
    weights, index = make_weights(), make_index()
    record = record_of(PLAIN, index)
    scales, picked = record.hidden_states.scales, index.row_of_slot.clamp(min=0)
    packed = WireTensor(
        data=record.hidden_states.data.view(torch.uint8)[picked].view(torch.float8_e4m3fn),
        format=record.hidden_states.format,
        scales=scales[picked],
    )
    direct = replace(
        record, hidden_states=packed, index=replace(index, row_of_slot=None, slots_of_row=None)
    )
    through_index, without = (
        DeepGemmRunner().run(with_columns(each, weights), weights).hidden_states
        for each in (record, direct)
    )
    assert largest_error(record, through_index, without) == 0


def test_row_major_scales_are_refused_with_both_sides(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_deep_gemm.install(monkeypatch)
    with pytest.raises(
        ShapeError, match=r"deep_gemm: scales are .*row-major.* expected .*column-major"
    ):
        DeepGemmRunner().run(record_of(PLAIN, make_index()), make_weights())


def run_plain() -> None:
    weights = make_weights()
    DeepGemmRunner().run(with_columns(record_of(PLAIN, make_index()), weights), weights)


def test_slots_that_are_not_aligned_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_deep_gemm.install(monkeypatch, alignment=256)
    with pytest.raises(ConfigError, match="of 128, expected multiples of 256; dispatch with a pl"):
        run_plain()


def test_package_without_the_functions_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    module = fake_deep_gemm.install(monkeypatch)
    monkeypatch.delattr(module, "m_grouped_fp8_gemm_nt_masked")
    with pytest.raises(BackendUnavailable, match="fp8_m_grouped_gemm_nt_masked; install version"):
        run_plain()


def test_experts_not_computed_are_refused_with_reasons(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = replace(make_weights(hidden=200, inner=32), hidden_dtype=torch.float16)
    without = replace(this_machine(), has_module=lambda name: name != "deep_gemm")
    assert DeepGemmRunner.supports(weights, without).reasons == (
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


def test_plan_never_takes_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    without = replace(this_machine(), has_module=lambda name: name != "deep_gemm")
    monkeypatch.setattr(ranks, "this_machine", lambda: without)
    monkeypatch.delitem(sys.modules, "deep_gemm", raising=False)
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
    scales: ScaleDtype, architecture: int, layout: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_deep_gemm.install(monkeypatch, architecture=architecture)
    weights = make_weights(scales)
    chosen = plan(ASKED, SPEC, weights=weights)
    assert chosen.prefill.scale_layout == layout
    assert f"scales on arrival: {layout}" in chosen.explain().splitlines()
    if scales is ScaleDtype.POWER_OF_TWO:
        assert plan(EPConfig(mode="normal"), SPEC, weights=weights).runner == "deep_gemm"
    plain = plan(replace(ASKED, runner="quantized_reference"), SPEC, weights=weights)
    assert plain.prefill.scale_layout == ROW_MAJOR
    assert "scales on arrival" not in plain.explain()


def test_package_without_nvcc_is_not_offered(monkeypatch: pytest.MonkeyPatch) -> None:
    """The package compiles at the first call, which would fail in an assertion without nvcc."""
    fake_deep_gemm.install(monkeypatch, has_nvcc=False)
    with pytest.raises(BackendUnavailable, match=r"nvcc is not installed.*set CUDA_HOME"):
        plan(ASKED, SPEC, weights=make_weights())
    assert "nvcc is not installed" in plan(EPConfig(), SPEC, weights=make_weights()).explain()
    with_gpu = replace(this_machine(), has_cuda=lambda: True)
    verdict = DeepGemmRunner.probe(with_gpu)
    assert ["nvcc" in reason for reason in verdict.reasons] == [True]
    assert verdict.command == ""
