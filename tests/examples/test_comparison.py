import math
from dataclasses import replace

import pytest

from examples.comparison import CheckError, Comparison, check_loss_fall

TOLERANCE = 1e-5
EQUAL = Comparison(
    loss=2.5,
    gradient_norm=0.8,
    expected_loss=2.5,
    expected_gradient_norm=0.8,
    num_ties=0,
    routing_difference=0.0,
)


def test_differences_below_the_tolerance_pass() -> None:
    near = replace(EQUAL, loss=2.5 * (1 + 9e-6), gradient_norm=0.8 * (1 - 9e-6))
    assert EQUAL.failure(TOLERANCE) is None
    assert near.failure(TOLERANCE) is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        pytest.param(
            {"loss": 2.5 * (1 + 2e-5)},
            "loss 2.50005, expected 2.5: differs from one process by 2.0e-05; "
            "expected less than 1.0e-05, relative",
            id="loss",
        ),
        pytest.param(
            {"gradient_norm": 0.8 * (1 - 1e-3)},
            "gradient norm 0.7992, expected 0.8: differs from one process by 1.0e-03; "
            "expected less than 1.0e-05, relative",
            id="gradient norm",
        ),
        pytest.param(
            {"num_ties": 1, "routing_difference": 0.25},
            "choice of experts: differs from one process by 2.5e-01; "
            "expected less than 1.0e-05, relative",
            id="experts that do not tie",
        ),
        pytest.param(
            {"loss": math.nan},
            "loss nan, expected 2.5: differs from one process by nan; "
            "expected less than 1.0e-05, relative",
            id="nan",
        ),
    ],
)
def test_a_difference_is_named(changes: dict[str, float], message: str) -> None:
    assert replace(EQUAL, **changes).failure(TOLERANCE) == message


def test_a_vanished_gradient_fails() -> None:
    assert replace(EQUAL, gradient_norm=0.0).failure(TOLERANCE)
    assert replace(EQUAL, expected_gradient_norm=0.0).failure(TOLERANCE)


def test_a_tolerance_of_0_is_never_met() -> None:
    assert EQUAL.failure(0.0)


def test_a_comparison_survives_being_sent() -> None:
    sent = replace(EQUAL, num_ties=3, routing_difference=1e-7)
    assert Comparison.from_tensor(sent.as_tensor()) == sent


def test_a_loss_that_falls_too_little_fails() -> None:
    check_loss_fall([5.5, 6.0, 3.9], min_fall=1.5)
    with pytest.raises(CheckError, match=r"the loss fell by 1\.40, expected at least 1\.5"):
        check_loss_fall([5.5, 3.0, 4.1], min_fall=1.5)
    with pytest.raises(CheckError, match="fell by nan"):
        check_loss_fall([5.5, math.nan], min_fall=1.5)
