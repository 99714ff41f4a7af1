"""Checks of the program: every step equals that of one process, and the loss decreases."""

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

# The difference of a gradient norm is relative to that norm, or to this part of the total norm if
# that is larger: where large terms cancel, mostly rounding errors remain. A norm of 1e-5 of the
# total differed by 2e-5.
MIN_PART_OF_NORM = 1e-3


class CheckError(Exception):
    """A check of the program failed."""


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """The results of a step over the tokens and experts of all ranks.

    loss: mean over the tokens.
    gradient_norms: norm of the gradient of that mean, by name of the parameter.
    """

    loss: float
    gradient_norms: Mapping[str, float]

    @property
    def gradient_norm(self) -> float:
        """The gradient norm of all parameters together."""
        return math.hypot(*self.gradient_norms.values())


@dataclass(frozen=True, kw_only=True)
class Difference:
    """A number computed by the ranks, and its value in one process.

    min_scale: lower bound of the value to which the difference is relative.
    """

    name: str
    value: float
    expected: float
    min_scale: float = 0.0

    @property
    def relative(self) -> float:
        """The difference relative to the expected value."""
        scale = max(abs(self.expected), self.min_scale, sys.float_info.min)
        return abs(self.value - self.expected) / scale


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """One step computed twice, from the same weights and the same tokens.

    gradient_norm: norm over all parameters.
    parameter: norm of the parameter that differs most. A few large gradients dominate the norm
        over all parameters, so it would not show a wrong gradient of a router.
    choice: see RouterTies.worst_choice.   num_ties: see RouterTies.
    """

    loss: Difference
    gradient_norm: Difference
    parameter: Difference
    choice: Difference
    num_ties: int

    def failure(self, tolerance: float) -> str | None:
        """Return the differences that are not below `tolerance`, as text, or None."""
        failures = [
            f"{number.name} is {number.value:.9g}, in one process {number.expected:.9g}: "
            f"relative difference {number.relative:.1e}, expected less than {tolerance:.1e}"
            for number in (self.loss, self.gradient_norm, self.parameter, self.choice)
            # Not `>=`: NaN must fail too.
            if not number.relative < tolerance
        ]
        return "; ".join(failures) or None


def compare(
    over_ranks: StepResult, one_process: StepResult, *, worst_choice: float, num_ties: int
) -> Comparison:
    """Compare a step over the ranks with the same step in one process."""
    norms = [
        Difference(
            name=f"gradient norm of {name}",
            value=over_ranks.gradient_norms[name],
            expected=expected,
            min_scale=MIN_PART_OF_NORM * one_process.gradient_norm,
        )
        for name, expected in one_process.gradient_norms.items()
    ]
    return Comparison(
        loss=Difference(name="loss", value=over_ranks.loss, expected=one_process.loss),
        gradient_norm=Difference(
            name="gradient norm",
            value=over_ranks.gradient_norm,
            expected=one_process.gradient_norm,
        ),
        parameter=max(norms, key=lambda norm: norm.relative),
        choice=Difference(
            name="probability of a chosen expert over the best", value=worst_choice, expected=1.0
        ),
        num_ties=num_ties,
    )


def check_loss_fall(losses: Sequence[float], min_fall: float) -> None:
    """Raise CheckError if the loss decreased by less than `min_fall`."""
    fall = losses[0] - losses[-1]
    # Not `<`: NaN must fail too.
    if not fall >= min_fall:
        raise CheckError(f"the loss fell by {fall:.2f}, expected at least {min_fall:g}")


def check_resumed(losses: Sequence[float], uninterrupted: Sequence[float], limit: float) -> float:
    """Return the largest relative difference of the losses of a resumed and an uninterrupted run.

    Raises:
        CheckError: a loss differs by `limit` or more.
    """
    pairs = zip(losses, uninterrupted, strict=True)
    differences = [abs(loss - expected) / abs(expected) for loss, expected in pairs]
    # Not `>=`: NaN must fail too.
    if not all(difference < limit for difference in differences):
        raise CheckError(
            f"losses after the checkpoint are {list(losses)}, without interruption "
            f"{list(uninterrupted)}: expected relative differences less than {limit:.1e}"
        )
    return max(differences)
