"""Run operators on the local pieces of expert tensors, and draw random numbers into them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._ops import OpOverload
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves, tree_map

from epcomm.errors import ShapeError
from epcomm.sharding.shards import (
    ShareTensor,
    cut_share,
    is_expert_tensor,
    logical_experts,
    put_together,
)

# Operators that draw a number for each element: in place, and into a new tensor.
_IN_PLACE = ("normal_", "uniform_", "bernoulli_", "random_", "exponential_", "geometric_")
_IN_PLACE += ("cauchy_", "log_normal_")
_INTO_NEW = ("rand_like", "randn_like", "randint_like", "bernoulli", "normal")
_DRAWS = frozenset(f"aten::{name}" for name in (*_IN_PLACE, *_INTO_NEW))


@dataclass(frozen=True)
class Operation:
    """An operator that has an ExpertTensor among its arguments."""

    func: OpOverload
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]

    @property
    def name(self) -> str:
        """The name of the operator with its namespace, such as `aten::add_`."""
        return self.func._schema.name

    @property
    def writes(self) -> bool:
        """True if the operator writes to an argument."""
        return self.func._schema.is_mutable

    @cached_property
    def tensors(self) -> list[Tensor]:
        """The tensors among the arguments."""
        return [leaf for leaf in tree_leaves((self.args, self.kwargs)) if isinstance(leaf, Tensor)]

    @cached_property
    def some(self) -> ShareTensor:
        """The first ExpertTensor among the arguments."""
        return next(tensor for tensor in self.tensors if is_expert_tensor(tensor))

    def run(self, change: Callable[[Any], object]) -> Any:  # noqa: ANN401
        """Call the operator with changed arguments, and return its result."""
        args, kwargs = tree_map(change, (self.args, dict(self.kwargs)))
        return self.func(*args, **kwargs)


def own_part(leaf: object, some: ShareTensor) -> object:
    """Cut this rank's part out of a tensor that spans the experts of `some`; keep other leaves.

    Local.
    Raises:
        ShapeError: an ExpertTensor whose experts are placed differently from those of `some`.
    """
    if not isinstance(leaf, Tensor):
        return leaf
    # A parameter, its gradient and its state have the same object.
    if is_expert_tensor(leaf) and leaf.shard is not some.shard and leaf.held != some.held:
        raise ShapeError(
            f"operator on expert parameters of {list(some.shape)} that are placed differently "
            f"on the ranks ({some.position}): experts of one have moved; call rebalance() with the "
            "same placement on copies and averages of a layer, and take state_dicts again"
        )
    if isinstance(leaf, DTensor):
        return leaf._local_tensor
    if leaf.dim() < some.dim() or leaf.shape[0] != some.shape[0]:
        return leaf
    return cut_share(leaf, some.held)


def gather_experts(tensor: ShareTensor) -> Tensor:
    """Return the experts of all ranks in logical order, [E, ...]. Collective."""
    piece, mesh = tensor._local_tensor.detach().contiguous(), tensor._spec.mesh
    gathered = piece.new_empty(mesh.size(), *piece.shape)
    dist.all_gather_into_tensor(gathered.flatten(0, 1), piece, group=mesh.get_group())
    return put_together(gathered, tensor.held)


def draws_numbers(op: Operation) -> bool:
    """Return whether an operator draws a random number for each element."""
    return op.name in _DRAWS and "out" not in op.kwargs


def run_expert_by_expert(op: Operation) -> Tensor | None:
    """Draw once for each of the P experts in logical order, and keep this rank's numbers. Local.

    Ranks often share a seed, and each rank would draw the same experts for its own piece alone. So
    the numbers do not depend on how many ranks share the experts, and generators that began equal
    stay equal.

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
            # For another rank's expert, arguments of one of this rank's experts are used.
            return part[(place or 0) if part.shape[0] > 1 else 0]

        drawn = op.run(of_expert)
        if place is not None:
            kept.append(drawn)
    return None if op.writes else torch.stack(kept)
