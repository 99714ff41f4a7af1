"""The reference against a brute-force oracle, rules of its docstring by examples, properties."""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from epcomm.errors import ConfigError, EPError, ShapeError
from epcomm.records import TopKOutput
from epcomm.routing import RoutingSpec, route
from tests.routing.cases import bias_for, every_spec, pick_spec, spread_logits
from tests.routing.oracle import route_row, route_rows

NAN, INF = math.nan, math.inf
# float32 softmax, sum and division: a few units in the last place, each 1.2e-7.
FLOAT32_RTOL = 1e-6


@every_spec
@pytest.mark.parametrize("with_nan", [False, True], ids=["finite", "nan"])
def test_route_equals_the_oracle_in_ids_and_weights(spec: RoutingSpec, with_nan: bool) -> None:
    """Experts whose logit is NaN rank last, and do not touch the others."""
    logits = spread_logits(64, 16)
    bias = bias_for(spec, 16)
    if with_nan:
        # Each group of four keeps at least two experts; in every third row only one group has any.
        logits[:, [1, 6, 7, 12]] = NAN
        logits[::3, 3:] = NAN
    rows = route_rows(logits, spec, bias)
    assert with_nan or min(row.gap for row in rows) > 1e-6, "the data must decide every order"
    topk = route(logits, spec, correction_bias=bias)
    assert topk.topk_ids.is_contiguous()
    assert topk.topk_ids.tolist() == [row.ids for row in rows]
    expected = torch.tensor([row.weights for row in rows])
    torch.testing.assert_close(topk.topk_weights, expected, rtol=FLOAT32_RTOL, atol=0.0)


@every_spec
def test_route_never_reads_the_device(spec: RoutingSpec) -> None:
    bias = bias_for(spec, 16)
    with FakeTensorMode(allow_non_fake_inputs=True):
        logits = torch.empty(5, 16, dtype=torch.bfloat16, requires_grad=True)
        topk = route(logits, spec, correction_bias=bias)
        topk.topk_weights.sum().backward()
    assert topk.topk_ids.shape == (5, 4)
    assert logits.grad is not None


@every_spec
def test_equal_experts_tie_and_the_lowest_id_wins(spec: RoutingSpec) -> None:
    bias = None if spec.correction_bias == "none" else torch.full((256,), 0.375)
    # 256: sorts of more than 128 elements take another path on some devices.
    topk = route(torch.full((3, 256), 0.7), spec, correction_bias=bias)
    assert torch.equal(topk.topk_ids, torch.arange(4).expand(3, 4))


@pytest.mark.parametrize("function", ["softmax", "sigmoid", "sqrt_softplus"])
def test_rounding_in_the_tail_of_a_vectorised_loop_breaks_no_tie(function: str) -> None:
    spec = RoutingSpec(top_k=4, score_function=function, softcap=8.0)
    values = torch.randn(200, generator=torch.Generator().manual_seed(3)) * 4
    for value in values.tolist():
        # One row of 61, an odd size: a batch would hide most rows from the tail.
        topk = route(torch.full((1, 61), value), spec)
        assert topk.topk_ids.tolist() == [[0, 1, 2, 3]]


def test_nan_of_either_sign_ranks_behind_minus_infinity() -> None:
    negative_nan = torch.tensor(-1, dtype=torch.int32).view(torch.float32).item()
    logits = torch.tensor([[negative_nan, NAN, -INF, 1.0, -INF]])
    topk = route(logits, RoutingSpec(top_k=5))
    assert topk.topk_ids.tolist() == [[3, 2, 4, 0, 1]]
    assert topk.topk_weights.tolist() == [[1.0, 0.0, 0.0, 0.0, 0.0]]


@pytest.mark.parametrize("order", ["before_topk", "after_topk"])
@pytest.mark.parametrize("fill", ["neg_inf", "zero"])
def test_dropped_expert_that_stands_in_for_nan_weighs_zero(order: str, fill: str) -> None:
    grouped = RoutingSpec(top_k=2, num_groups=2, topk_groups=1, renormalize=True)
    spec = replace(grouped, softmax_order=order, dropped_groups=fill)
    topk = route(torch.tensor([[3.0, NAN, 1.0, 0.0]]), spec)
    assert topk.topk_ids.tolist() == [[0, 2]]
    assert topk.topk_weights.tolist() == [[1.0, 0.0]]


@pytest.mark.parametrize("order", ["before_topk", "after_topk"])
@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize("value", [NAN, -INF])
def test_row_without_finite_logits_weighs_zero(order: str, renormalize: bool, value: float) -> None:
    spec = RoutingSpec(top_k=4, softmax_order=order, renormalize=renormalize)
    topk = route(torch.full((1, 6), value), spec)
    assert topk.topk_ids.tolist() == [[0, 1, 2, 3]]
    assert topk.topk_weights.tolist() == [[0.0] * 4]


@pytest.mark.parametrize("function", ["sigmoid", "sqrt_softplus"])
@pytest.mark.parametrize("mode", ["none", "added", "clamp"])
def test_zero_sum_under_renormalisation_gives_zeros(function: str, mode: str) -> None:
    epsilon = 0.0 if mode == "none" else 1e-20
    spec = RoutingSpec(
        top_k=4, score_function=function, renormalize=True, epsilon_mode=mode, epsilon=epsilon
    )
    topk = route(torch.full((2, 5), -INF), spec)
    assert topk.topk_weights.tolist() == [[0.0] * 4] * 2


def test_infinite_logit_takes_all_the_weight() -> None:
    logits = torch.tensor([[0.0, INF, 1.0], [INF, 1.0, INF]])
    topk = route(logits, RoutingSpec(top_k=2))
    # The other probabilities underflow to 0, and a tie goes to the lowest id.
    assert topk.topk_ids.tolist() == [[1, 0], [0, 2]]
    assert topk.topk_weights.tolist() == [[1.0, 0.0], [0.5, 0.5]]


def test_sqrt_softplus_is_smooth_where_softplus_underflows() -> None:
    values = [-300.0, -100.0, -20.5, -20.0, -19.5, 0.0, 19.5, 20.0, 20.5, 1e30]
    spec = RoutingSpec(top_k=1, score_function="sqrt_softplus")
    logits = torch.tensor(values).unsqueeze(1).requires_grad_()
    weights = route(logits, spec).topk_weights
    (gradient,) = torch.autograd.grad(weights.sum(), logits)
    for z, weight, slope in zip(values, weights.flatten(), gradient.flatten(), strict=True):
        softplus = max(z, 0.0) + math.log1p(math.exp(-abs(z)))
        sigmoid = math.exp(min(z, 0.0)) / (1 + math.exp(-abs(z)))
        assert weight.item() == pytest.approx(math.sqrt(softplus), rel=FLOAT32_RTOL)
        assert slope.item() == pytest.approx(sigmoid / (2 * math.sqrt(softplus)), rel=1e-5)


def reverse_routing(
    logits: Tensor,
    *,
    top_k: int,
    correction_bias: Tensor | None,
    hidden_states: Tensor | None,
    wrong: Tensor | None = None,
) -> TopKOutput:
    """Route to the last experts in falling order; weights are hidden states, or `wrong`."""
    assert correction_bias is None
    ids = torch.arange(logits.shape[1] - 1, logits.shape[1] - 1 - top_k, -1)
    weights = hidden_states[:, :top_k] if wrong is None else wrong
    return TopKOutput(topk_ids=ids.expand(logits.shape[0], -1), topk_weights=weights)


def test_custom_function_replaces_the_arithmetic() -> None:
    spec = RoutingSpec(top_k=2, custom_function=reverse_routing)
    hidden_states = torch.arange(12.0).view(3, 4)
    topk = route(torch.zeros(3, 5), spec, hidden_states=hidden_states)
    assert topk.topk_ids.tolist() == [[4, 3]] * 3
    assert topk.topk_weights.tolist() == [[0.0, 1.0], [4.0, 5.0], [8.0, 9.0]]


@pytest.mark.parametrize(
    ("custom_function", "message"),
    [
        (partial(reverse_routing, wrong=torch.zeros(3, 1)), r"weights \[3, 1\] torch.float32, exp"),
        (partial(reverse_routing, wrong=torch.zeros(3, 2).half()), r"\[3, 2\] torch.float16, exp"),
        (lambda logits, **_: (logits, logits), "returned tuple, expected a TopKOutput"),
    ],
    ids=["shape", "dtype", "tuple"],
)
def test_custom_function_is_held_to_the_record(
    custom_function: Callable[..., TopKOutput], message: str
) -> None:
    spec = RoutingSpec(top_k=2, custom_function=custom_function)
    with pytest.raises(ShapeError, match=message):
        route(torch.zeros(3, 5), spec, hidden_states=torch.zeros(3, 4))


@pytest.mark.parametrize(
    ("logits", "bias", "error", "message"),
    [
        (torch.zeros(2, 3, 4), None, ShapeError, "logits is"),
        (torch.zeros(2, 4).long(), None, ShapeError, "int64"),
        (torch.zeros(2, 1), None, ConfigError, "top_k is 2"),
        (torch.zeros(2, 4), torch.zeros(1, 4), ShapeError, r"bias is \[1, 4\], expected \[4\]"),
    ],
    ids=["rank", "dtype", "few experts", "bias shape"],
)
def test_bad_arguments_are_named(
    logits: Tensor, bias: Tensor | None, error: type[EPError], message: str
) -> None:
    has_bias = "none" if bias is None else "selection"
    spec = RoutingSpec(top_k=2, correction_bias=has_bias)
    with pytest.raises(error, match=message):
        route(logits, spec, correction_bias=bias)


# Central differences in float64: the truncation error is of the order STEP**2.
STEP = 1e-4


def weighted_sum(logits: list[float], spec: RoutingSpec, bias: Tensor | None) -> float:
    """Compute the loss sum_k (k + 1) w_k of one token, by the oracle."""
    row = route_row(logits, spec, None if bias is None else bias.double().tolist())
    return sum((k + 1) * weight for k, weight in enumerate(row.weights))


def differences(logits: list[float], spec: RoutingSpec, bias: Tensor | None) -> list[float]:
    """Return the slope of `weighted_sum` in each logit; a NaN logit gets 0."""
    slopes = []
    for expert, value in enumerate(logits):
        above, below = list(logits), list(logits)
        above[expert], below[expert] = value + STEP, value - STEP
        rise = weighted_sum(above, spec, bias) - weighted_sum(below, spec, bias)
        slopes.append(0.0 if math.isnan(value) else rise / (2 * STEP))
    return slopes


def gradient(logits: Tensor, spec: RoutingSpec, bias: Tensor | None) -> Tensor:
    logits = logits.clone().requires_grad_()
    weights = route(logits, spec, correction_bias=bias).topk_weights
    (result,) = torch.autograd.grad((weights * torch.arange(1, spec.top_k + 1)).sum(), logits)
    return result


@every_spec
@pytest.mark.parametrize("with_nan", [False, True], ids=["finite", "nan"])
def test_gradient_equals_the_slope_of_the_oracle(spec: RoutingSpec, with_nan: bool) -> None:
    logits = spread_logits(3, 16)
    if with_nan:
        logits[:, [2, 5, 8]] = math.nan
    bias = bias_for(spec, 16)
    result = gradient(logits, spec, bias)
    slopes = torch.tensor([differences(row, spec, bias) for row in logits.double().tolist()])
    # 1e-6: float32 rounding of slopes that are of order 1.
    torch.testing.assert_close(result, slopes, rtol=1e-5, atol=1e-6)


@every_spec
def test_gradient_is_finite_at_extreme_logits(spec: RoutingSpec) -> None:
    logits = spread_logits(4, 16)
    logits[0, ::2] = -math.inf
    logits[1, ::3] = math.inf
    logits[2, ::2], logits[2, 1::2] = 300.0, -300.0
    logits[3] = -math.inf
    assert torch.isfinite(gradient(logits, spec, bias_for(spec, 16))).all()


def test_bias_learns_inside_the_score_only() -> None:
    bias = torch.zeros(6, requires_grad=True)
    logits = spread_logits(2, 6)
    inside = RoutingSpec(top_k=2, correction_bias="score")
    selecting = RoutingSpec(top_k=2, correction_bias="selection")
    assert route(logits, inside, correction_bias=bias).topk_weights.requires_grad
    assert not route(logits, selecting, correction_bias=bias).topk_weights.requires_grad


# Properties of every spec and batch; hypothesis searches for counterexamples.

NUM_EXPERTS = 12
# Two float32 scores closer than this may trade places under rounding.
DECISIVE_GAP = 1e-5
PROPERTY_RTOL = 2e-6

quick = settings(max_examples=25, deadline=None, derandomize=True)
# Multiples of 1/4, so that ties are common and a shift is exact.
logit_values = st.integers(-16, 16).map(lambda quarter: quarter / 4)


@st.composite
def specs(draw: st.DrawFn) -> RoutingSpec:
    return pick_spec(lambda options: draw(st.sampled_from(options)), NUM_EXPERTS, NUM_EXPERTS)


def batches(values: st.SearchStrategy[float] = logit_values) -> st.SearchStrategy[Tensor]:
    row = st.lists(values, min_size=NUM_EXPERTS, max_size=NUM_EXPERTS)
    return st.lists(row, max_size=3).map(lambda rows: torch.tensor(rows).view(-1, NUM_EXPERTS))


biases = st.lists(
    st.integers(-8, 8).map(lambda part: part / 13), min_size=NUM_EXPERTS, max_size=NUM_EXPERTS
).map(torch.tensor)


def route_with(spec: RoutingSpec, logits: Tensor, bias: Tensor) -> TopKOutput:
    return route(logits, spec, correction_bias=None if spec.correction_bias == "none" else bias)


@quick
@given(specs(), batches(), biases)
def test_route_equals_the_oracle(spec: RoutingSpec, logits: Tensor, bias: Tensor) -> None:
    rows = route_rows(logits, spec, bias)
    assume(all(row.gap > DECISIVE_GAP for row in rows))
    topk = route_with(spec, logits, bias)
    assert topk.topk_ids.tolist() == [row.ids for row in rows]
    expected = torch.tensor([row.weights for row in rows]).view(-1, spec.top_k)
    torch.testing.assert_close(topk.topk_weights, expected, rtol=PROPERTY_RTOL, atol=1e-30)


@quick
@given(specs(), batches(st.floats(width=32)), biases)
def test_any_float_gives_distinct_ids_and_finite_weights(
    spec: RoutingSpec, logits: Tensor, bias: Tensor
) -> None:
    topk = route_with(spec, logits, bias)
    ordered = topk.topk_ids.sort(dim=-1).values
    assert (ordered[:, 1:] > ordered[:, :-1]).all()
    assert ((topk.topk_ids >= 0) & (topk.topk_ids < NUM_EXPERTS)).all()
    assert torch.isfinite(topk.topk_weights).all()
    assert (topk.topk_weights >= 0).all()


@quick
@given(specs(), batches(), biases)
def test_a_token_is_routed_alike_alone_and_in_a_batch(
    spec: RoutingSpec, logits: Tensor, bias: Tensor
) -> None:
    whole = route_with(spec, logits, bias)
    for token in range(logits.shape[0]):
        alone = route_with(spec, logits[token : token + 1], bias)
        assert torch.equal(alone.topk_ids[0], whole.topk_ids[token])
        assert torch.equal(alone.topk_weights[0], whole.topk_weights[token])
