import math

import pytest
import torch
from torch import Tensor

from epcomm.routing import RoutingSpec, route
from tests.routing.cases import bias_for, every_spec, spread_logits
from tests.routing.oracle import route_row

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
