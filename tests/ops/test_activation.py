"""Values and gradients of activations equal their float64 formulas, in either storage order."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

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


@dataclass(frozen=True, kw_only=True)
class Case:
    id: str
    format: ExpertFormat
    formula: Callable[[float, float], float]


def clamped(*, is_interleaved: bool) -> ExpertFormat:
    return ExpertFormat(
        activation=Activation.CLAMPED_SWIGLU,
        is_interleaved=is_interleaved,
        alpha=ALPHA,
        limit=LIMIT,
    )


CASES = [
    Case(id="swiglu", format=ExpertFormat(), formula=swiglu),
    Case(
        id="swiglu interleaved",
        format=ExpertFormat(is_interleaved=True),
        formula=swiglu,
    ),
    Case(id="clamped", format=clamped(is_interleaved=False), formula=clamped_swiglu),
    Case(id="clamped interleaved", format=clamped(is_interleaved=True), formula=clamped_swiglu),
    Case(
        id="limited",
        format=ExpertFormat(activation=Activation.LIMITED_SWIGLU, limit=LIMIT),
        formula=limited_swiglu,
    ),
    Case(id="relu2", format=ExpertFormat(activation=Activation.RELU2), formula=relu2),
]
# Values on both sides of zero and of both limits.
VALUES = [-4.0, -1.6, -1.0, -0.3, 0.2, 0.9, 1.4, 1.6, 5.0]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_values_and_gradients_equal_the_formula(case: Case) -> None:
    gates = torch.tensor(VALUES)
    ups = torch.tensor([VALUES[(3 * i + 1) % len(VALUES)] for i in range(len(VALUES))])
    # Two slots, the second with gate and up exchanged.
    gate, up = torch.stack([gates, ups]), torch.stack([ups, gates])
    if not case.format.activation.is_gated:
        stored = gate.clone()
    elif case.format.is_interleaved:
        stored = torch.stack([gate, up], dim=2).flatten(1)
    else:
        stored = torch.cat([gate, up], dim=1)
    stored.requires_grad_()
    activated = activate(stored, case.format)
    activated.sum().backward()
    assert stored.grad is not None
    assert activated.shape == gate.shape

    step = 1e-6
    for slot in range(2):
        for column in range(len(VALUES)):
            g, u = gate[slot, column].item(), up[slot, column].item()
            assert activated[slot, column].item() == pytest.approx(
                case.formula(g, u), abs=TOLERANCE
            )
            slopes = [(case.formula(g + step, u) - case.formula(g - step, u)) / (2 * step)]
            columns = [column]
            if case.format.activation.is_gated:
                slopes.append((case.formula(g, u + step) - case.formula(g, u - step)) / (2 * step))
                columns = [2 * column, 2 * column + 1]
                if not case.format.is_interleaved:
                    columns = [column, len(VALUES) + column]
            assert stored.grad[slot, columns].tolist() == pytest.approx(slopes, abs=TOLERANCE)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_dtype_is_kept(case: Case, dtype: torch.dtype) -> None:
    assert activate(torch.ones(3, 8, dtype=dtype), case.format).dtype is dtype
    assert activate(torch.ones(0, 8, dtype=dtype), case.format).shape[0] == 0
