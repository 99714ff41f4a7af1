"""Draw random numbers into an ExpertTensor as one process would, expert by expert.

Ranks often share a seed. If each drew for its own piece alone, all ranks would get the same
experts. So each rank draws for all P experts in logical order and keeps the numbers of its experts:
they do not depend on how many ranks share the experts, and generators that began equal stay equal.
"""

from __future__ import annotations

import torch
from torch import Tensor

from epcomm.sharding.pieces import Operation, own_part
from epcomm.sharding.shards import logical_experts

# Operators that draw a number for each element: in place, and into a new tensor.
_IN_PLACE = ("normal_", "uniform_", "bernoulli_", "random_", "exponential_", "geometric_")
_IN_PLACE += ("cauchy_", "log_normal_")
_INTO_NEW = ("rand_like", "randn_like", "randint_like", "bernoulli", "normal")
_DRAWS = frozenset(f"aten::{name}" for name in (*_IN_PLACE, *_INTO_NEW))


def draws_numbers(op: Operation) -> bool:
    """Return whether an operator draws a random number for each element."""
    return op.name in _DRAWS and "out" not in op.kwargs


def run_expert_by_expert(op: Operation) -> Tensor | None:
    """Draw once for each of the P experts, and keep what is drawn for this rank's. Local.

    In addition to the result it needs the memory of one expert. In-place operators write to the
    piece of their ExpertTensor and return None; others return this rank's piece [L, ...].
    """
    some, kept = op.some, []
    places = {expert: place for place, expert in enumerate(logical_experts(some.held))}
    scratch = torch.empty_like(some._local_tensor[0])
    for expert in range(some.shape[0]):
        place = places.get(expert)

        def of_expert(leaf: object, place: int | None = place) -> object:
            if place is None and op.writes and leaf is some:
                return scratch
            part = own_part(leaf, some)
            if not isinstance(part, Tensor) or part.dim() < some.dim():
                return part
            # The arguments of one of this rank's experts serve for another rank's expert.
            return part[(place or 0) if part.shape[0] > 1 else 0]

        drawn = op.run(of_expert)
        if place is not None:
            kept.append(drawn)
    return None if op.writes else torch.stack(kept)
