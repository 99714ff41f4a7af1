"""The imitated gating operator of Ascend chooses and weighs like the reference."""

import inspect
import math

import pytest
import torch
from torch import Tensor

from epcomm.records import TopKOutput
from epcomm.routing import RoutingSpec, presets, route
from epcomm.routing.ascend_gating import AscendGate, gating_reasons
from epcomm.routing.choose import RouterChoice
from tests.routing.cases import PRESETS, SPECS, bias_for

pytestmark = pytest.mark.usefixtures("npu_operators")

# float32 arithmetic in another order of steps.
TOLERANCE = 1e-6
NUM_EXPERTS = 32
# Cases that the operator cannot express, with the first words of the reason.
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
REFUSED_PRESETS = {
    "ernie4_5_moe": "adds epsilon to a sum, and has no lower bound",
    "deepseek_v3 not renormalised": "always renormalises sigmoid weights",
    "lfm2_moe not renormalised": "always renormalises sigmoid weights",
}
EXPRESSIBLE_SPECS = [name for name in SPECS if name not in INEXPRESSIBLE]
EXPRESSIBLE_PRESETS = [name for name in PRESETS if name not in REFUSED_PRESETS]


def random_logits() -> Tensor:
    return torch.randn(50, NUM_EXPERTS, generator=torch.Generator().manual_seed(5))


def tied_logits() -> Tensor:
    """Make logits of five values for 32 experts, so that experts and groups always tie."""
    generator = torch.Generator().manual_seed(6)
    return torch.randint(-2, 3, (50, NUM_EXPERTS), generator=generator).float()


def tied_bias(spec: RoutingSpec) -> Tensor | None:
    """Make a bias of two values, whose sums with a score are exact in float32 and still tie."""
    return None if bias_for(spec, 1) is None else torch.tensor([0.0, 0.125]).repeat(16)


def route_on_npu(
    logits: Tensor, spec: RoutingSpec, *, correction_bias: Tensor | None = None
) -> TopKOutput:
    choice = RouterChoice(spec=spec, gate=AscendGate(spec))
    return choice.route(logits, correction_bias=correction_bias, hidden_states=logits)


def assert_equals_reference(spec: RoutingSpec, logits: Tensor, bias: Tensor | None) -> None:
    expected = route(logits, spec, correction_bias=bias)
    actual = route_on_npu(logits, spec, correction_bias=bias)
    assert (actual.topk_ids.dtype, actual.topk_weights.dtype) == (torch.int64, torch.float32)
    assert torch.equal(actual.topk_ids, expected.topk_ids)
    error = (actual.topk_weights - expected.topk_weights).abs()
    assert (error <= TOLERANCE * expected.topk_weights.abs().amax()).all()


def test_every_preset_is_here() -> None:
    functions = dict(inspect.getmembers(presets, inspect.isfunction))
    made_here = {name for name, f in functions.items() if f.__module__ == presets.__name__}
    named = {name for name in made_here if not name.startswith("_")}
    assert named == {name.split()[0] for name in PRESETS}


@pytest.mark.parametrize("name", [*EXPRESSIBLE_PRESETS, *EXPRESSIBLE_SPECS])
def test_what_the_operator_says_equals_the_reference(name: str) -> None:
    spec = (PRESETS | SPECS)[name]
    assert gating_reasons(spec, NUM_EXPERTS) == ()
    logits, bias = random_logits(), bias_for(spec, NUM_EXPERTS)
    assert_equals_reference(spec, logits, bias)
    assert_equals_reference(spec, logits.bfloat16(), None if bias is None else bias.bfloat16())
    assert_equals_reference(spec, tied_logits(), tied_bias(spec))
    empty = route_on_npu(logits[:0], spec, correction_bias=bias)
    assert empty.topk_ids.shape == empty.topk_weights.shape == (0, spec.top_k)
    assert (empty.topk_ids.dtype, empty.topk_weights.dtype) == (torch.int64, torch.float32)


@pytest.mark.parametrize("name", EXPRESSIBLE_PRESETS)
def test_logits_that_are_no_numbers_give_valid_experts(name: str) -> None:
    spec, logits = PRESETS[name], random_logits()
    logits[0, 3], logits[1], logits[2, 5], logits[3], logits[4] = (
        math.nan, math.nan, math.inf, -math.inf, math.inf,
    )  # fmt: skip
    bias = bias_for(spec, NUM_EXPERTS)
    topk = route_on_npu(logits, spec, correction_bias=bias)
    ids = topk.topk_ids.sort(dim=1).values
    assert ids.min() >= 0
    assert ids.max() < NUM_EXPERTS
    assert (ids.diff(dim=1) > 0).all()
    assert topk.topk_weights.isfinite().all()
    expected = route(logits[5:], spec, correction_bias=bias)
    assert torch.equal(topk.topk_ids[5:], expected.topk_ids)
    # An infinite logit is the largest, as in the reference; softmax leaves only ties among the
    # others.
    largest = route(logits[2:3], spec, correction_bias=bias)
    assert torch.equal(topk.topk_ids[2:3, 0], largest.topk_ids[:, 0])
    torch.testing.assert_close(topk.topk_weights[2:3], largest.topk_weights)


@pytest.mark.parametrize(
    ("spec", "num_experts", "wanted"),
    [
        *((SPECS[name], NUM_EXPERTS, wanted) for name, wanted in INEXPRESSIBLE.items()),
        (RoutingSpec(top_k=2), 2049, "takes at most 2048 experts"),
        (RoutingSpec(top_k=2, score_function="sigmoid"), 8, "always renormalises sigmoid weights"),
        (RoutingSpec(top_k=2, num_groups=4, topk_groups=2), 8, "takes groups of at least 3"),
        (RoutingSpec(top_k=2, num_groups=128, topk_groups=2), 512, "rounds groups up to 32"),
        (
            RoutingSpec(top_k=2, num_groups=4, topk_groups=2, group_score_top_n=3),
            32,
            "scores groups by their best one or two",
        ),
    ],
)
def test_what_it_cannot_say_is_refused_with_the_reason(
    spec: RoutingSpec, num_experts: int, wanted: str
) -> None:
    wanted = f"npu_moe_gating_top_k {wanted}"
    assert any(reason.startswith(wanted) for reason in gating_reasons(spec, num_experts))


@pytest.mark.parametrize("name", REFUSED_PRESETS)
def test_a_preset_that_it_cannot_say_has_one_reason(name: str) -> None:
    reason = f"npu_moe_gating_top_k {REFUSED_PRESETS[name]}"
    assert gating_reasons(PRESETS[name], NUM_EXPERTS) == (reason,)
