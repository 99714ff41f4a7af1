"""The gating operator of Ascend, by a stand-in, chooses and weighs as the reference does."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from epcomm import BackendUnavailable
from epcomm.routing import RoutingSpec, presets, route
from epcomm.routing.ascend import gating_reasons, route_on_npu
from epcomm.testing.ascend import limits, registry
from tests.routing.cases import CASES, Case

# float32 arithmetic in another order of steps.
TOLERANCE = 1e-6
NUM_EXPERTS = 32
# What of the cases the operator cannot say, by the first words of why.
INEXPRESSIBLE = {
    "softmax-after-topk-bias": "adds the bias to softmax scores",
    "softmax-after-topk-groups": "adds up softmax scores",
    "softmax-bias-score": "has a bias for the selection",
    "softmax-softcap": "has no softcap",
    "softmax-softcap-bias-score": "has no softcap",
    "sigmoid-bias-score": "has a bias for the selection",
    "sigmoid-groups-bias-zero": "drops groups to -inf",
    "sqrt_softplus": "scores by softmax or sigmoid",
    "sqrt_softplus-bias-scaled": "scores by softmax or sigmoid",
    "epsilon-clamp": "adds epsilon",
}
PRESETS = {
    "mixtral": presets.mixtral(top_k=2),
    "qwen2_moe": presets.qwen2_moe(top_k=4, renormalize=False),
    "qwen3_moe": presets.qwen3_moe(top_k=8, renormalize=True),
    "qwen3_5_moe": presets.qwen3_5_moe(top_k=8),
    "deepseek_v2": presets.deepseek_v2(
        top_k=6, routed_scaling_factor=16.0, num_groups=8, topk_groups=3
    ),
    "gpt_oss": presets.gpt_oss(top_k=4),
    "minimax_m2": presets.minimax_m2(top_k=8),
    "afmoe": presets.afmoe(top_k=8, routed_scaling_factor=2.5),
}


@pytest.fixture(autouse=True)
def npu_operators() -> Iterator[None]:
    registry.register()
    with limits.soc("A3"):
        yield


def assert_equals_reference(spec: RoutingSpec) -> None:
    generator = torch.Generator().manual_seed(5)
    logits = torch.randn(50, NUM_EXPERTS, generator=generator)
    bias = torch.randn(NUM_EXPERTS, generator=generator) / 4
    correction_bias = None if spec.correction_bias == "none" else bias
    expected = route(logits, spec, correction_bias=correction_bias)
    actual = route_on_npu(logits, spec, correction_bias=correction_bias)
    assert actual.topk_ids.dtype is torch.int64
    assert torch.equal(actual.topk_ids, expected.topk_ids)
    error = (actual.topk_weights - expected.topk_weights).abs().max()
    assert error <= TOLERANCE * expected.topk_weights.abs().max()


@pytest.mark.parametrize(
    "case", [case for case in CASES if case.id not in INEXPRESSIBLE], ids=lambda case: case.id
)
def test_what_the_operator_says_equals_the_reference(case: Case) -> None:
    spec = RoutingSpec(top_k=4, **case.values)  # type: ignore[arg-type]
    assert gating_reasons(spec, NUM_EXPERTS) == ()
    assert_equals_reference(spec)


@pytest.mark.parametrize(
    "case", [case for case in CASES if case.id in INEXPRESSIBLE], ids=lambda case: case.id
)
def test_what_it_cannot_say_is_refused_with_the_reason(case: Case) -> None:
    spec = RoutingSpec(top_k=4, **case.values)  # type: ignore[arg-type]
    wanted = f"npu_moe_gating_top_k {INEXPRESSIBLE[case.id]}"
    assert any(reason.startswith(wanted) for reason in gating_reasons(spec, NUM_EXPERTS))
    with pytest.raises(BackendUnavailable, match=INEXPRESSIBLE[case.id]):
        route_on_npu(torch.zeros(1, NUM_EXPERTS), spec, correction_bias=torch.zeros(NUM_EXPERTS))


@pytest.mark.parametrize("name", PRESETS)
def test_presets_are_said_or_refused(name: str) -> None:
    spec = PRESETS[name]
    if not gating_reasons(spec, NUM_EXPERTS):
        assert_equals_reference(spec)


def test_which_presets_the_operator_says() -> None:
    said = {name for name, spec in PRESETS.items() if not gating_reasons(spec, NUM_EXPERTS)}
    assert said == {
        "mixtral",
        "qwen2_moe",
        "qwen3_moe",
        "qwen3_5_moe",
        "deepseek_v2",
        "gpt_oss",
        "minimax_m2",
        "afmoe",
    }


@pytest.mark.parametrize(
    ("spec", "num_experts", "wanted"),
    [
        (RoutingSpec(top_k=2), 2049, "takes at most 2048 experts"),
        (
            RoutingSpec(top_k=2, score_function="sigmoid"),  # type: ignore[arg-type]
            8,
            "always renormalises sigmoid weights",
        ),
        (RoutingSpec(top_k=2, num_groups=4, topk_groups=2), 8, "takes groups of at least 3"),
        (RoutingSpec(top_k=2, num_groups=128, topk_groups=2), 512, "rounds groups up to 32"),
        (
            RoutingSpec(top_k=2, num_groups=4, topk_groups=2, group_score_top_n=3),
            32,
            "scores groups by their best expert",
        ),
    ],
)
def test_limits_are_named(spec: RoutingSpec, num_experts: int, wanted: str) -> None:
    assert any(wanted in reason for reason in gating_reasons(spec, num_experts))
