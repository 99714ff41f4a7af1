"""Draw random numbers into an ExpertTensor as one process would, expert by expert.

Ranks often share a seed. If each drew for its own piece alone, all ranks would get the same
experts. So each rank draws for all P experts in logical order and keeps the numbers of its own:
they do not depend on how many ranks share the experts, and generators that began equal stay equal.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._pytree import tree_map

from epcomm.sharding.pieces import own_part
from epcomm.sharding.shards import ShareTensor, logical_experts

# Operators that draw a number for each element: in place, and into a new tensor.
_IN_PLACE = ("normal_", "uniform_", "bernoulli_", "random_", "exponential_", "geometric_")
_IN_PLACE += ("cauchy_", "log_normal_")
_INTO_NEW = ("rand_like", "randn_like", "randint_like", "bernoulli", "normal")
_DRAWS = frozenset(f"aten::{name}" for name in (*_IN_PLACE, *_INTO_NEW))


def draws_numbers(name: str, kwargs: Mapping[str, Any]) -> bool:
    """Return whether an operator draws a random number for each element."""
    return name in _DRAWS and "out" not in kwargs


def run_expert_by_expert(
    func: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any], some: ShareTensor
) -> Tensor | None:
    """Draw once for each of the P experts, and keep what is drawn for this rank's. Local.

    Beside the result, it needs the memory of one expert. In-place operators write to the piece of
    `some` and return None; others return this rank's piece [L, ...]. A `generator` is passed on.
    """
    places = {expert: place for place, expert in enumerate(logical_experts(some.held))}

    def of_expert(leaf: object, place: int) -> object:
        part = own_part(leaf, some)
        if not isinstance(part, Tensor) or part.dim() < some.dim():
            return part
        return part[place if part.shape[0] > 1 else 0]

    is_in_place, kept = func._schema.is_mutable, []
    scratch = torch.empty_like(some._local_tensor[0])
    for expert in range(some.shape[0]):
        place = places.get(expert)
        # Numbers for an expert of another rank are drawn by the arguments of one of this rank's.
        own_args, own_kwargs = tree_map(partial(of_expert, place=place or 0), (args, kwargs))
        if is_in_place and place is None:
            own_args = (scratch, *own_args[1:])
        drawn = func(*own_args, **own_kwargs)
        if place is not None:
            kept.append(drawn)
    return None if is_in_place else torch.stack(kept)
