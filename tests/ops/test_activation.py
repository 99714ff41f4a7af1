import math
from dataclasses import replace

import pytest
import torch

from epcomm import Activation, ExpertFormat
from epcomm.ops.activation import activate

# A handful of float32 operations on values of order ten.
TOLERANCE = 2e-5
ALPHA, LIMIT = 1.702, 1.5


def sigmoid(value: float) -> float:
    return 1 / (1 + math.exp(-value))


def swiglu(gate: float, up: float) -> float:
    return gate * sigmoid(gate) * up


def clamped_swiglu(gate: float, up: float) -> float:
    gate, up = min(gate, LIMIT), max(min(up, LIMIT), -LIMIT)
    return gate * sigmoid(ALPHA * gate) * (up + 1)


def limited_swiglu(gate: float, up: float) -> float:
    return swiglu(min(gate, LIMIT), max(min(up, LIMIT), -LIMIT))


def relu2(gate: float, up: float) -> float:
    return max(gate, 0.0) ** 2


CLAMPED = ExpertFormat(activation=Activation.CLAMPED_SWIGLU, alpha=ALPHA, limit=LIMIT)
CASES = {
    "swiglu": (ExpertFormat(), swiglu),
    "swiglu interleaved": (ExpertFormat(is_interleaved=True), swiglu),
    "clamped": (CLAMPED, clamped_swiglu),
    "clamped interleaved": (replace(CLAMPED, is_interleaved=True), clamped_swiglu),
    "limited": (ExpertFormat(activation=Activation.LIMITED_SWIGLU, limit=LIMIT), limited_swiglu),
    "relu2": (ExpertFormat(activation=Activation.RELU2), relu2),
}
# Both sides of zero and of both limits.
VALUES = [-4.0, -1.6, -1.0, -0.3, 0.2, 0.9, 1.4, 1.6, 5.0]


@pytest.mark.parametrize("case", CASES)
def test_values_and_gradients_equal_the_formula(case: str) -> None:
    expert_format, formula = CASES[case]
    gates = torch.tensor(VALUES)
    ups = torch.tensor([VALUES[(3 * i + 1) % len(VALUES)] for i in range(len(VALUES))])
    # Two slots, the second with gate and up exchanged.
    gate, up = torch.stack([gates, ups]), torch.stack([ups, gates])
    if not expert_format.activation.is_gated:
        stored = gate.clone()
    elif expert_format.is_interleaved:
        stored = torch.stack([gate, up], dim=2).flatten(1)
    else:
        stored = torch.cat([gate, up], dim=1)
    stored.requires_grad_()
    activated = activate(stored, expert_format)
    activated.sum().backward()
    assert activated.shape == gate.shape

    step = 1e-6
    for slot in range(2):
        for column in range(len(VALUES)):
            g, u = gate[slot, column].item(), up[slot, column].item()
            assert activated[slot, column].item() == pytest.approx(formula(g, u), abs=TOLERANCE)
            slopes = [(formula(g + step, u) - formula(g - step, u)) / (2 * step)]
            columns = [column]
            if expert_format.activation.is_gated:
                slopes.append((formula(g, u + step) - formula(g, u - step)) / (2 * step))
                columns = [2 * column, 2 * column + 1]
                if not expert_format.is_interleaved:
                    columns = [column, len(VALUES) + column]
            assert stored.grad[slot, columns].tolist() == pytest.approx(slopes, abs=TOLERANCE)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", CASES)
def test_dtype_is_kept(case: str, dtype: torch.dtype) -> None:
    expert_format, _ = CASES[case]
    assert activate(torch.ones(3, 8, dtype=dtype), expert_format).dtype is dtype
    assert activate(torch.ones(0, 8, dtype=dtype), expert_format).shape[0] == 0
