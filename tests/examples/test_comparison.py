import math

import pytest

from examples.comparison import (
    CheckError,
    Comparison,
    StepResult,
    check_loss_fall,
    check_resumed,
    compare,
)

TOLERANCE = 1e-5
# Few large gradients, and small ones, as in training.
NORMS = {"head": 0.8, "experts": 0.6, "router": 0.01, "bias": 1e-6}


def comparison(*, loss: float = 2.5, worst_choice: float = 1.0, **norms: float) -> Comparison:
    """Compare the ranks with one process with a loss of 2.5 and NORMS."""
    return compare(
        StepResult(loss=loss, gradient_norms=NORMS | norms),
        StepResult(loss=2.5, gradient_norms=NORMS),
        worst_choice=worst_choice,
        num_ties=0,
    )


def test_differences_below_the_tolerance_pass() -> None:
    assert comparison().failure(TOLERANCE) is None
    near = comparison(loss=2.5 * (1 + 9e-6), head=0.8 * (1 - 9e-6), worst_choice=1 - 9e-6)
    assert near.failure(TOLERANCE) is None


def test_rounding_of_a_vanishing_gradient_passes() -> None:
    assert comparison(bias=1.001e-6).failure(TOLERANCE) is None


@pytest.mark.parametrize(
    ("difference", "message"),
    [
        pytest.param(
            comparison(loss=2.5 * (1 + 2e-5)),
            "loss is 2.50005, in one process 2.5: relative difference 2.0e-05, "
            "expected less than 1.0e-05",
            id="loss",
        ),
        pytest.param(
            comparison(head=0.8 * (1 - 1e-3)),
            "gradient norm is 0.999410146, in one process 1.00005: relative difference 6.4e-04, "
            "expected less than 1.0e-05; gradient norm of head is 0.7992, in one process 0.8: "
            "relative difference 1.0e-03, expected less than 1.0e-05",
            id="gradient norm",
        ),
        pytest.param(
            comparison(router=0.0101),
            "gradient norm of router is 0.0101, in one process 0.01: relative difference 1.0e-02, "
            "expected less than 1.0e-05",
            id="small gradient",
        ),
        pytest.param(
            comparison(worst_choice=0.75),
            "probability of a chosen expert over the best is 0.75, in one process 1: "
            "relative difference 2.5e-01, expected less than 1.0e-05",
            id="experts that do not tie",
        ),
        pytest.param(
            comparison(loss=math.nan),
            "loss is nan, in one process 2.5: relative difference nan, expected less than 1.0e-05",
            id="nan",
        ),
    ],
)
def test_a_difference_is_named(difference: Comparison, message: str) -> None:
    assert difference.failure(TOLERANCE) == message


def test_a_gradient_that_is_nan_fails() -> None:
    failure = comparison(router=math.nan).failure(TOLERANCE)
    assert failure is not None
    assert failure.startswith("gradient norm is nan")


def test_a_gradient_that_should_vanish_and_does_not_fails() -> None:
    vanished = StepResult(loss=2.5, gradient_norms={"head": 0.0})
    ours = StepResult(loss=2.5, gradient_norms={"head": 1e-3})
    assert compare(ours, vanished, worst_choice=1.0, num_ties=0).failure(TOLERANCE)
    assert compare(vanished, vanished, worst_choice=1.0, num_ties=0).failure(TOLERANCE) is None


def test_a_tolerance_of_0_is_never_met() -> None:
    assert comparison().failure(0.0)


def test_a_loss_that_falls_too_little_fails() -> None:
    check_loss_fall([5.5, 6.0, 3.9], min_fall=1.5)
    with pytest.raises(CheckError, match=r"the loss fell by 1\.40, expected at least 1\.5"):
        check_loss_fall([5.5, 3.0, 4.1], min_fall=1.5)
    with pytest.raises(CheckError, match="fell by nan"):
        check_loss_fall([5.5, math.nan], min_fall=1.5)


def test_every_loss_of_a_resumed_run_is_that_of_the_uninterrupted_one() -> None:
    assert check_resumed([3.0, 2.0 * (1 + 9e-6)], [3.0, 2.0], TOLERANCE) == pytest.approx(9e-6)
    for losses in ([3.0 * (1 + 2e-5), 2.0], [3.0, math.nan]):
        with pytest.raises(CheckError, match="losses after the checkpoint are"):
            check_resumed(losses, [3.0, 2.0], TOLERANCE)
