"""Say what the program checks: every step is that of one process, and the loss falls."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

# The norm of one gradient is compared relative to itself, but at least to this part of the whole
# norm: where large terms cancel, little but rounding is left. One of 1e-5 of it was 2e-5 off.
MIN_PART_OF_NORM = 1e-3


class CheckError(Exception):
    """The program has shown that something is wrong; the message says what."""


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """Hold what a step computes, over the tokens and the experts of all ranks.

    loss: mean over the tokens.
    gradient_norms: of the gradient of that mean, by name of the parameter.
    """

    loss: float
    gradient_norms: Mapping[str, float]

    @property
    def gradient_norm(self) -> float:
        """Of all parameters together."""
        return math.hypot(*self.gradient_norms.values())


@dataclass(frozen=True, kw_only=True)
class Difference:
    """A number that the ranks computed, and what it is in one process.

    min_scale: the least that the difference is taken relative to.
    """

    name: str
    value: float
    expected: float
    min_scale: float = 0.0

    @property
    def relative(self) -> float:
        """To what is expected."""
        scale = max(abs(self.expected), self.min_scale, sys.float_info.min)
        return abs(self.value - self.expected) / scale


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """One step computed twice, from the same weights and the same tokens.

    gradient_norm: of all parameters together.
    parameter: norm of the parameter that differs most. The whole norm is that of few large
        gradients, and would not show a wrong gradient of a router.
    choice: see RouterTies.worst_choice.   num_ties: see RouterTies.
    """

    loss: Difference
    gradient_norm: Difference
    parameter: Difference
    choice: Difference
    num_ties: int

    def failure(self, tolerance: float) -> str | None:
        """Return what differs and by how much, or None; a tolerance of 0 is never met."""
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
    """Put the numbers of both sides next to each other."""
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
    """Raise CheckError if the model has not learned."""
    fall = losses[0] - losses[-1]
    # Not `<`: NaN must fail too.
    if not fall >= min_fall:
        raise CheckError(f"the loss fell by {fall:.2f}, expected at least {min_fall:g}")


def check_resumed(losses: Sequence[float], uninterrupted: Sequence[float], limit: float) -> float:
    """Return the largest relative difference of a resumed run's losses from those without a break.

    Raises:
        CheckError: one of them differs by the limit or more.
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
