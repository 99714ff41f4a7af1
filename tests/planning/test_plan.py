from dataclasses import dataclass, replace
from functools import partial

import pytest
import torch

from epcomm import (
    BackendUnavailable,
    ConfigError,
    EPConfig,
    EPError,
    ExpertWeights,
    Int8Profile,
    Mode,
    MoESpec,
    plan,
)
from epcomm.quantization import FP8_FLOAT32_SCALES
from epcomm.registry import (
    BUFFERS,
    RUNNERS,
    backend_class,
    backend_names,
    buffer_class,
    class_names,
    runner_class,
)
from epcomm.runners import quantized_reference
from epcomm.runners.grouped_mm import GroupedMMRunner
from epcomm.runners.quantized_reference import QuantizedReferenceRunner
from epcomm.runners.reference import ReferenceRunner
from epcomm.spec import Availability
from epcomm.types import (
    Layout,
    RowReading,
    ScaleDtype,
    ScaleLayout,
    WeightsAppliedBy,
    WireDtype,
    WireFormat,
    align_up,
)
from epcomm.weights.quantized import Fp8BlockWeights, Int8ChannelWeights
from epcomm.weights.unquantized import ExpertTensors

SPEC = MoESpec(hidden_size=64, num_experts=8, top_k=2)


# The mode and buffer of prefill, and those of decode, which has prefill's where they are None.
LIMITED = EPConfig(max_tokens_per_rank=16)
BY_NAME = EPConfig(mode="normal", backend="collective", deterministic=True)
CHOICES = {
    "normal": (EPConfig(mode="normal"), (Mode.NORMAL, "CollectiveBuffer"), None),
    "normal by name": (BY_NAME, (Mode.NORMAL, "CollectiveBuffer"), None),
    "standard": (EPConfig(mode="standard"), (Mode.STANDARD, "AllGatherBuffer"), None),
    "low latency": (
        replace(LIMITED, mode="low_latency"),
        (Mode.LOW_LATENCY, "StaticCollectiveBuffer"),
        None,
    ),
    "auto is normal, and low latency of exact sizes in decode on a CPU": (
        LIMITED,
        (Mode.NORMAL, "CollectiveBuffer"),
        (Mode.LOW_LATENCY, "CollectiveBuffer"),
    ),
}


@pytest.mark.parametrize(("config", "prefill", "decode"), CHOICES.values(), ids=[*CHOICES])
def test_choice_needs_no_group(
    config: EPConfig, prefill: tuple[Mode, str], decode: tuple[Mode, str] | None
) -> None:
    chosen = plan(config, SPEC, world_size=4)
    assert (chosen.decode is chosen.prefill) == (decode is None)
    for phase, wanted in ((chosen.prefill, prefill), (chosen.decode, decode)):
        if phase is None or wanted is None:
            continue
        assert (phase.mode, phase.buffer, phase.world_size) == (*wanted, 4)
        assert phase.backend == "collective"
        is_trained = phase.buffer != "StaticCollectiveBuffer"
        assert phase.caps.trainable == is_trained
        by_runner = phase.weights_applied_by is WeightsAppliedBy.RUNNER
        assert by_runner == is_trained, "combine saves no rows for backward"
        spec = phase.buffer_spec
        assert (spec.hidden_size, spec.top_k, spec.num_local_experts) == (64, 2, 2)
        serving = {
            backend
            for backend in BUFFERS
            if any(phase.mode in buffer_class(name).modes for name in class_names(backend))
        }
        # A backend of exact sizes is a candidate for decode on CPU ranks.
        is_exact_decode = phase is chosen.decode and phase is not chosen.prefill
        serving |= {"hierarchical"} if is_exact_decode else set()
        # No backend is rejected because of another mode.
        assert {rejection.name for rejection in phase.rejected} == serving - {phase.backend}
        assert all(rejection.reasons for rejection in phase.rejected)


def test_auto_without_a_limit_has_no_decode_and_says_what_is_missing() -> None:
    chosen = plan(EPConfig(), SPEC)
    assert chosen.prefill.world_size == 1
    assert chosen.decode is None
    assert "no decode: set EPConfig.max_tokens_per_rank" in chosen.explain()


def test_slots_of_experts_are_aligned_as_the_runner_named_needs() -> None:
    config = EPConfig(mode="normal", runner="deep_gemm")
    assert plan(config, SPEC, world_size=4).prefill.buffer_spec.expert_alignment == 128


@pytest.mark.parametrize("backend", ["collective", "nvlink", "deep_ep", "ascend"])
def test_a_backend_named_in_mode_auto_is_asked_for_both_phases(
    backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in (name for each in backend_names(backend, Mode.AUTO) for name in class_names(each)):
        kind = backend_class(name)
        monkeypatch.setattr(kind, "probe", lambda machine: Availability(ok=True))
        monkeypatch.setattr(kind, "lacks", lambda mode, spec, world_size: ())
        monkeypatch.setattr(kind, "needs_one_host", False)
    monkeypatch.setenv("HCCL_BUFFSIZE", "1024")
    spec = replace(SPEC, hidden_size=2048)
    chosen = plan(EPConfig(backend=backend, max_tokens_per_rank=16), spec, world_size=4)
    assert chosen.prefill.backend == chosen.decode.backend
    assert chosen.decode.mode is Mode.LOW_LATENCY


def test_explain_says_what_was_chosen_and_rejected_and_why() -> None:
    limited = EPConfig(mode="normal", backend="collective", max_tokens_per_rank=128)
    lines = plan(limited, SPEC, world_size=4).explain().splitlines()
    # Headers of 139 words, 8 B each, to 3 other ranks.
    assert lines[:5] == [
        "mode normal on backend collective (CollectiveBuffer), 4 ranks with 2 experts each",
        "wire: dispatch bf16, combine bf16 (backward bf16)",
        "router weights applied by runner; trainable: True; is capturable: False; "
        "host syncs a dispatch: 1",
        "at most 288 B a token in dispatch, 256 B in combine, and 3336 B of headers a dispatch",
        "tokens a rank: at most 128",
    ]
    assert "rejected nvlink: there is no CUDA device" in " ".join(lines)
    assert not any("not standard" in line or "not low_latency" in line for line in lines)
    unlimited = plan(EPConfig(mode="standard"), SPEC, world_size=4).explain().splitlines()
    assert "tokens a rank: no limit" in unlimited
    rejected = [line for line in unlimited if line.startswith("rejected ")]
    assert len(rejected) == 1, "nothing is rejected because it serves other modes"
    assert rejected[0].startswith("rejected ascend: ")


def weights(intermediate_size: int, hidden_size: int = 64) -> ExpertWeights:
    made = partial(torch.empty, dtype=torch.bfloat16, device="meta")
    return ExpertWeights(
        gate_up_proj=made(8, 2 * intermediate_size, hidden_size),
        down_proj=made(8, intermediate_size, hidden_size).transpose(1, 2),
    )


UNALIGNED = "rejected runner grouped_mm: intermediate_size is 12, expected a multiple of 8"


@pytest.mark.parametrize(
    ("intermediate_size", "runner", "rejected"),
    [(32, "grouped_mm", []), (12, "reference", [UNALIGNED])],
)
def test_weights_choose_a_runner(intermediate_size: int, runner: str, rejected: list[str]) -> None:
    chosen = plan(EPConfig(mode="normal"), SPEC, weights=weights(intermediate_size))
    assert chosen.runner == runner
    lines = chosen.explain().splitlines()
    assert f"runner {runner}" in lines
    assert [line for line in lines if line.startswith("rejected runner")] == rejected


def kind_of(experts: ExpertTensors) -> str:
    return type(experts).__name__


def fp8_weights(scales: ScaleDtype = ScaleDtype.FLOAT32) -> Fp8BlockWeights:
    return Fp8BlockWeights.from_unquantized(weights(32), scales=scales)


def int8_weights() -> Int8ChannelWeights:
    return Int8ChannelWeights.from_unquantized(weights(32))


POWERS = ScaleDtype.POWER_OF_TWO
FP8_POWERS = EPConfig(dispatch_dtype=WireDtype.FP8_E4M3, dispatch_scales="power_of_two")


@pytest.mark.parametrize(
    ("experts", "config", "wire"),
    [
        (weights(32), EPConfig(), "bf16"),
        (fp8_weights(), EPConfig(), "fp8_e4m3/128"),
        (fp8_weights(POWERS), EPConfig(), "fp8_e4m3/128/ue8m0"),
        (int8_weights(), EPConfig(), "int8/0"),
        (int8_weights(), EPConfig(dispatch_dtype="bf16"), "bf16"),
        (fp8_weights(POWERS), EPConfig(dispatch_scales="float32"), "fp8_e4m3/128"),
        (fp8_weights(), EPConfig(dispatch_scales="power_of_two"), "fp8_e4m3/128/ue8m0"),
        (weights(32), FP8_POWERS, "fp8_e4m3/128/ue8m0"),
    ],
)
def test_wire_format_follows_from_the_experts_or_the_configuration(
    experts: ExpertTensors, config: EPConfig, wire: str
) -> None:
    text = plan(replace(config, mode="normal"), SPEC, world_size=4, weights=experts).explain()
    assert f"wire: dispatch {wire}, combine bf16 (backward bf16)" in text
    assert "scales on arrival" not in text, "row-major is as usual"
    trains = isinstance(experts, ExpertWeights)
    assert f"trainable: {'True;' if trains else 'False (runner '}" in text


# Bytes of 7168 elements and their scales: a float32 for 128 or for the row, a byte for 32 or 16.
BYTES_OF_7168 = {
    "bf16": 14336,
    "fp8_e4m3": 7168 + 4 * 56,
    "int8": 7168 + 4,
    "mxfp8": 7168 + 224,
    "mxfp4": 3584 + 224,
    "nvfp4": 3584 + 4 + 448,
}


@pytest.mark.parametrize("dispatched", BYTES_OF_7168)
@pytest.mark.parametrize("combined", ["bf16", "fp8_e4m3", "mxfp8", "nvfp4"])
def test_bytes_a_token_are_those_of_the_formats(dispatched: str, combined: str) -> None:
    config = replace(
        BY_NAME,
        dispatch_dtype=WireDtype(dispatched),
        combine_dtype=None if combined == "bf16" else WireDtype(combined),
    )
    spec = MoESpec(hidden_size=7168, num_experts=256, top_k=8)
    # Rows go to 7 other ranks, with 8 ids and 8 weights, in multiples of 16 B, and return as sums.
    sent = 7 * align_up(BYTES_OF_7168[dispatched] + 64, 16)
    returned = 7 * align_up(BYTES_OF_7168[combined], 16)
    text = f"at most {sent} B a token in dispatch, {returned} B in combine"
    assert text in plan(config, spec, world_size=8).explain()


@pytest.mark.parametrize("config", [EPConfig(), EPConfig(max_tokens_per_rank=16)])
def test_int8_arithmetic_of_the_configuration_is_the_plans(config: EPConfig) -> None:
    usual = plan(config, SPEC, weights=int8_weights())
    other = plan(replace(config, int8_profile="triton"), SPEC, weights=int8_weights())
    assert "int8 profile" not in usual.explain()
    for phase in other.phases().values():
        assert phase.int8_profile is Int8Profile.TRITON
        assert "int8 profile: triton" in phase.explain().splitlines()


class OneArithmetic(QuantizedReferenceRunner):
    int8_profiles = frozenset({Int8Profile.RINT127})


class Columns(QuantizedReferenceRunner):
    """A runner that reads only FP8 rows, in another layout."""

    @classmethod
    def readings(cls, weights: ExpertTensors, layout: Layout) -> tuple[RowReading, ...]:
        columns = ScaleLayout(column_major=True, alignment=4)
        return (RowReading(format=FP8_FLOAT32_SCALES, scale_layout=columns),)


@dataclass(frozen=True)
class Impossible:
    """A combination of experts, configuration and runner that no layer can be made of."""

    id: str
    experts: ExpertTensors
    config: EPConfig
    message: str
    error: type[EPError] = ConfigError
    runner: type[QuantizedReferenceRunner] = QuantizedReferenceRunner


CARRIED = "of bf16, fp16, fp32, fp64, fp8_e4m3, int8, mxfp4, mxfp8, nvfp4"
IMPOSSIBLE = [
    Impossible(
        "powers of two for INT8 experts",
        int8_weights(),
        EPConfig(dispatch_scales="power_of_two"),
        "plan: dispatch_scales is power_of_two, but rows are sent as int8/0 "
        "(dispatch_dtype is None, the experts need int8/0); expected fp8_e4m3 rows",
    ),
    Impossible(
        "scales for rows that have none",
        weights(32),
        EPConfig(dispatch_dtype=WireDtype.BF16, dispatch_scales="float32"),
        "plan: dispatch_scales is float32, but rows are sent as bf16 (dispatch_dtype is "
        "bf16, the experts need bf16); expected fp8_e4m3 rows",
    ),
    Impossible(
        "arithmetic of INT8 for FP8",
        fp8_weights(),
        EPConfig(int8_profile="rint127"),
        "plan: int8_profile is rint127, but rows are sent as fp8_e4m3/128 and the experts "
        "need fp8_e4m3/128; expected int8 in one of them",
    ),
    Impossible(
        "experts of another hidden size",
        weights(32, hidden_size=72),
        EPConfig(),
        "plan: hidden_size of the experts is 72, expected 64 as in MoESpec",
    ),
    Impossible(
        "another dispatch dtype than quantised experts return",
        int8_weights(),
        EPConfig(dispatch_dtype=WireDtype.FP32),
        "plan: dispatch_dtype is fp32, but the hidden states are bf16; expected that, "
        "a quantised format, or None",
    ),
    Impossible(
        "sums of groups whose slots return unsummed",
        weights(32),
        EPConfig(combine_dtype=WireDtype.MXFP8, sum_groups=4, redundant_experts=0),
        "plan: combine_dtype is mxfp8 with sum_groups and redundant_experts, where results",
    ),
    Impossible(
        "INT8 rows for FP8 experts",
        fp8_weights(),
        EPConfig(dispatch_dtype=WireDtype.INT8),
        "quantized_reference: reads bf16, fp16, fp32, fp8_e4m3/128, fp8_e4m3/128/ue8m0, "
        f"but collective was asked to carry int8/0, {CARRIED}",
    ),
    Impossible(
        "FP8 rows for INT8 experts",
        int8_weights(),
        EPConfig(dispatch_dtype=WireDtype.FP8_E4M3),
        "quantized_reference: reads bf16, fp16, fp32, int8/0, but collective was asked to "
        f"carry fp8_e4m3/128, {CARRIED}",
    ),
    Impossible(
        "scales that the runner does not read",
        fp8_weights(POWERS),
        EPConfig(runner="quantized_reference"),
        "reads fp8_e4m3/128, but collective was asked to carry fp8_e4m3/128/ue8m0, of",
        BackendUnavailable,
        Columns,
    ),
    Impossible(
        "arithmetic that the runner does not have",
        int8_weights(),
        EPConfig(int8_profile="div"),
        "rounds INT8 by rint127, but EPConfig.int8_profile is div",
        runner=OneArithmetic,
    ),
    Impossible(
        "a runner that cannot compute the experts",
        weights(12),
        EPConfig(runner="grouped_mm"),
        "runner grouped_mm cannot compute these experts",
        BackendUnavailable,
    ),
    Impossible(
        "a runner of quantised experts for others",
        weights(32),
        EPConfig(runner="quantized_reference"),
        "Fp8BlockWeights, Int8ChannelWeights, BlockFormatWeights, not ExpertWeights",
        BackendUnavailable,
    ),
]


@pytest.mark.parametrize("case", IMPOSSIBLE, ids=lambda case: case.id)
def test_impossible_combination_is_refused_with_all_sides(
    case: Impossible, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(quantized_reference, "QuantizedReferenceRunner", case.runner)
    config = replace(case.config, mode="normal", backend="collective")
    with pytest.raises(case.error) as caught:
        plan(config, SPEC, world_size=4, weights=case.experts)
    assert case.message in str(caught.value)


@pytest.mark.parametrize("experts", [weights(32), fp8_weights(), int8_weights()], ids=kind_of)
@pytest.mark.parametrize("name", RUNNERS)
def test_readings_are_of_the_dtypes_that_a_runner_names(name: str, experts: ExpertTensors) -> None:
    runner = runner_class(name)
    if not isinstance(experts, runner.kinds):
        assert not runner.supports(experts).ok
        return
    dtypes = runner.wire_dtypes | {experts.wire_format.dtype}
    for layout in runner.layouts:
        readings = runner.readings(experts, layout)
        assert {each.format.dtype for each in readings} == dtypes
        assert len({each.format for each in readings}) == len(readings)
        if runner.supports(experts).ok:
            assert experts.wire_format in {each.format for each in readings}


def test_no_runner_is_an_error_with_the_reasons(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ReferenceRunner, "layouts", frozenset({Layout.MASKED}))
    with pytest.raises(ConfigError) as caught:
        plan(EPConfig(mode="normal", backend="collective"), SPEC, weights=weights(12))
    assert (
        "plan: no runner computes these experts: grouped_mm: intermediate_size is 12, "
        "expected a multiple of 8; reference: reads masked, but collective returns rows"
    ) in str(caught.value)


def test_runner_that_does_not_read_the_wire_format_is_rejected_with_all_three(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    only = (RowReading(format=WireFormat.of(torch.float32)),)
    monkeypatch.setattr(GroupedMMRunner, "readings", lambda _weights, _layout: only)
    chosen = plan(EPConfig(mode="normal", backend="collective"), SPEC, weights=weights(32))
    assert chosen.runner == "reference"
    assert [str(rejection) for rejection in chosen.rejected_runners] == [
        f"grouped_mm: reads fp32, but collective was asked to carry bf16, {CARRIED}"
    ]


def test_backend_whose_layout_no_runner_reads_is_rejected(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ReferenceRunner, "layouts", frozenset({Layout.MASKED}))
    with pytest.raises(ConfigError, match="returns rows, which runner reference does not read"):
        plan(EPConfig(mode="normal", runner="reference"), SPEC)


def test_explain_lists_both_phases_and_the_memory_of_each() -> None:
    config = EPConfig(backend="auto", max_tokens_per_rank=16)
    text = plan(config, SPEC, world_size=4, weights=weights(32)).explain()
    prefill, decode = text.split("mode low_latency on backend ")
    assert prefill.startswith("mode normal on backend ")
    assert ", 4 ranks with 2 experts each, for prefill and training\n" in prefill
    assert "memory of received rows: 288 B a token\n" in prefill
    assert ", 4 ranks with 2 experts each, for decode\n" in decode
    # At most 16 rows of 144 B from each of the 4 ranks.
    assert "memory of received rows: 288 B a token, at most 9216 B\n" in decode
    assert "that serves; sizes are exact, because CPU ranks wait in every exchange: " in decode
    assert "tokens a rank: at most 16\n" in decode
    assert decode.endswith("runner grouped_mm")


@pytest.mark.parametrize(
    ("config", "world_size", "message"),
    [
        (EPConfig(), 3, "plan: num_experts is 8, expected a multiple of the 3 ranks"),
        (EPConfig(mode="standard", backend="shared_memory"), 4, "has no mode standard; change"),
        (EPConfig(mode="low_latency"), 4, "collective: has static sizes; set max_tokens_per_rank"),
        (
            EPConfig(mode="normal", replicated=True),
            4,
            "collective: StaticCollectiveBuffer has static sizes; set max_tokens_per_rank; "
            "collective: StaticCollectiveBuffer has static sizes; set max_recv_slots",
        ),
        (
            EPConfig(mode="normal", backend="shared_memory", max_recv_slots=64),
            4,
            "leave max_recv_slots None",
        ),
    ],
    ids=["indivisible", "mode", "no limit", "every reason at once", "budget of exact sizes"],
)
def test_refusal_says_why(config: EPConfig, world_size: int, message: str) -> None:
    with pytest.raises(BackendUnavailable if config.backend != "auto" else ConfigError) as caught:
        plan(config, SPEC, world_size=world_size)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ((0, 8, 2), "MoESpec: hidden_size is 0, expected an int from 1 to 2147483647"),
        ((64, 0, 2), "MoESpec: num_experts is 0, expected an int from 1 to 2147483647"),
        ((64, 8, 0), "MoESpec: top_k is 0, expected an int from 1 to 2147483647"),
        ((64, 8, 9), "MoESpec: top_k is 9, expected at most num_experts = 8"),
    ],
)
def test_layer_that_cannot_be_is_named(sizes: tuple[int, int, int], message: str) -> None:
    spec = MoESpec(hidden_size=sizes[0], num_experts=sizes[1], top_k=sizes[2])
    with pytest.raises(ConfigError, match=message):
        plan(EPConfig(mode="normal"), spec, world_size=1)


def test_slot_budget_is_that_of_prefill_alone() -> None:
    config = EPConfig(max_tokens_per_rank=16, max_recv_slots=64)
    chosen = plan(config, SPEC, world_size=4)
    budgets = [phase.buffer_spec.max_recv_slots for phase in (chosen.prefill, chosen.decode)]
    assert budgets == [64, None]


def test_more_batches_in_flight_than_a_backend_keeps_are_refused() -> None:
    config = EPConfig(mode="low_latency", max_tokens_per_rank=4, batches_in_flight=3)
    rejected = {each.name: each.reasons for each in plan(config, SPEC).prefill.rejected}
    assert "keeps 2 batches in flight, not 3" in rejected["deep_ep_v1"]
    # The number of slots may be larger.
    assert not any("in flight" in reason for reason in rejected["nvlink"])
