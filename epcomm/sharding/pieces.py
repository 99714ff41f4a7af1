"""Run operators on the local pieces of expert tensors: on lists and parts, and random numbers.

Operations that communicate are announced as calls of their group. `if rank == 0:
log(parameter.norm())` is a call of one rank. Its header meets that of the next call of the other
ranks, so that all ranks raise HandleError with the names of both calls, before rows or sums are
sent, and the group is usable.

Loaders and initialisers write to parts: one expert, neighbours, or all one by one. A part of this
rank's experts is a view of its piece, so a write persists; a part of another rank's experts is a
copy, and the write persists on that rank.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._ops import OpOverload
from torch.distributed._functional_collectives import all_gather_tensor, broadcast, wait_tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from epcomm.errors import ShapeError, grouped
from epcomm.sharding import shards
from epcomm.sharding.shards import Args, Kwargs

# Operators that draw a number for each element: in place, and into a new tensor.
_IN_PLACE = ("normal_", "uniform_", "bernoulli_", "random_", "exponential_", "geometric_")
_IN_PLACE += ("cauchy_", "log_normal_")
_INTO_NEW = ("rand_like", "randn_like", "randint_like", "bernoulli", "normal")
_DRAWS = frozenset(f"aten::{name}" for name in (*_IN_PLACE, *_INTO_NEW))
# Namespaces of the operators by which torch moves tensors between ranks.
_COLLECTIVES = ("c10d", "_c10d_functional", "_c10d_functional_autograd", "_dtensor")
_UNSCALE = "aten::_amp_foreach_non_finite_check_and_unscale_"
_NORM, _MAX = "aten::_foreach_norm", "aten::_foreach_max"
_SELECT, _SLICE, _UNBIND = "aten::select", "aten::slice", "aten::unbind"
_SPLITS = ("aten::split", "aten::split_with_sizes")
# The first ExpertTensor at each position of lists.
Places = Mapping[int, shards.ShareTensor]


@dataclass(frozen=True)
class Operation:
    """An operator that has an ExpertTensor among its arguments."""

    func: OpOverload
    args: Args
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
    def some(self) -> shards.ShareTensor:
        """The first ExpertTensor among the arguments."""
        return next(tensor for tensor in self.tensors if shards.is_expert_tensor(tensor))

    def run(self, change: Callable[[Any], object]) -> Any:  # noqa: ANN401
        """Call the operator with changed arguments, and return its result."""
        args, kwargs = tree_map(change, (self.args, dict(self.kwargs)))
        return self.func(*args, **kwargs)


def own_part(leaf: object, some: shards.ShareTensor) -> object:
    """Cut this rank's part out of a tensor that spans the experts of `some`; keep other leaves.

    Local.
    """
    if not isinstance(leaf, Tensor):
        return leaf
    # A parameter, its gradient and its state have the same object.
    if shards.is_expert_tensor(leaf) and leaf.shard is not some.shard and leaf.held != some.held:
        raise ShapeError(
            f"operator on expert parameters of {list(some.shape)} that are placed differently "
            f"on the ranks ({some.position}): experts of one have moved; call rebalance() with the "
            "same placement on copies and averages of a layer, and take state_dicts again"
        )
    if isinstance(leaf, DTensor):
        return leaf._local_tensor
    if leaf.dim() < some.dim() or leaf.shape[0] != some.shape[0]:
        return leaf
    return shards.cut_share(leaf, some.held)


def gather_experts(tensor: shards.ShareTensor) -> Tensor:
    """Return the experts of all ranks in logical order, [E, ...]. Collective."""
    piece, mesh = tensor._local_tensor.detach().contiguous(), tensor._spec.mesh
    gathered = piece.new_empty(mesh.size(), *piece.shape)
    dist.all_gather_into_tensor(gathered.flatten(0, 1), piece, group=mesh.get_group())
    return shards.put_together(gathered, tensor.held)


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
    places = {expert: place for place, expert in enumerate(shards.logical_experts(some.held))}
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


def announce(owner: shards.Owner | None, func: OpOverload | str) -> None:
    """Announce an operation before it communicates, if the group is still alive."""
    group = None if owner is None else owner()
    if group is not None:
        name = func if isinstance(func, str) else func._schema.name.rpartition("::")[2]
        group.announce_operation(name.removeprefix("linalg_").strip("_"))


class Announcing(TorchDispatchMode):
    """A mode that announces an operation before its first exchange, and no local operation."""

    def __init__(self, owner: shards.Owner | None, func: OpOverload) -> None:
        super().__init__()
        self._announce: Callable[[], None] | None = lambda: announce(owner, func)

    def __torch_dispatch__(  # type: ignore[override]
        self, func: OpOverload, types: tuple[type, ...], args: Args = (), kwargs: Kwargs = None
    ) -> object:
        if func.namespace in _COLLECTIVES and self._announce is not None:
            first, self._announce = self._announce, None
            first()
        if any(each is not torch.Tensor and hasattr(each, "to_local") for each in types):
            # torch calls this mode again for the operators that compute a DTensor.
            return NotImplemented
        return func(*args, **(kwargs or {}))


def run_on_lists(op: Operation) -> object:
    """Compute on local pieces, and reduce over all ranks where the result is a number.

    Collective: norms, maxima, and loss scaling, which looks for infinities; else local.
    """
    func, args, kwargs, name, is_mutable = op.func, op.args, op.kwargs, op.name, op.writes
    experts = _experts_by_place((*args, *kwargs.values()))
    written = 0 if is_mutable else -1
    local_args = [_pieces(arg, experts, is_written=i == written) for i, arg in enumerate(args)]
    local_kwargs = {key: _pieces(value, experts) for key, value in kwargs.items()}
    if name in (_NORM, _MAX, _UNSCALE):
        # Keyed by group: a weak reference to a freed group cannot be hashed.
        owners = [tensor.owner for tensor in experts.values() if tensor.owner is not None]
        living = {id(group): owner for owner in owners if (group := owner()) is not None}
        for owner in living.values():
            announce(owner, func)
    # Copies do not change a maximum, and a rank without own experts would have no maximum.
    if name == _NORM and _order_of(args, kwargs) != math.inf:
        local_args[0] = [shards.counted_once(leaf) for leaf in args[0]]
    result = func(*local_args, **local_kwargs)
    if is_mutable:
        for tensor in op.tensors:
            if shards.is_expert_tensor(tensor):
                # Caches of weights compare torch's counts of writes.
                torch.autograd.graph.increment_version(tensor._local_tensor)
        if name == _UNSCALE:
            # args[1] is found_inf: whether any gradient of any rank is not finite.
            for mesh in {tensor._spec.mesh for tensor in experts.values()}:
                args[1].copy_(_over_ranks(args[1].view(1), mesh).amax())
        return None
    if name == _NORM:
        order = _order_of(args, kwargs)
        return _reduced(result, experts, lambda parts: torch.linalg.vector_norm(parts, order, 0))
    if name == _MAX:
        return _reduced(result, experts, lambda parts: parts.amax(0))
    return [_wrapped(func, one, experts.get(place)) for place, one in enumerate(result)]


def _order_of(args: Sequence[Any], kwargs: Mapping[str, Any]) -> float:
    return float(args[1] if len(args) > 1 else kwargs.get("ord", 2))


def _experts_by_place(args: Sequence[Any]) -> dict[int, shards.ShareTensor]:
    """Map each position where one of the lists has an ExpertTensor to that ExpertTensor."""
    found = {}
    for arg in args:
        if isinstance(arg, list | tuple):
            for place, leaf in enumerate(arg):
                if shards.is_expert_tensor(leaf):
                    found.setdefault(place, leaf)
    return found


def _pieces(arg: object, experts: Places, *, is_written: bool = False) -> object:
    if not isinstance(arg, list | tuple):
        return shards.piece_of(arg) if isinstance(arg, Tensor) else arg
    return [
        own_part(leaf, experts[place])
        if place in experts and not is_written
        else (shards.piece_of(leaf) if isinstance(leaf, Tensor) else leaf)
        for place, leaf in enumerate(arg)
    ]


def _wrapped(func: OpOverload, piece: Tensor, expert: shards.ShareTensor | None) -> Tensor:
    if expert is None:
        return piece
    is_elementwise = piece.shape == expert._local_tensor.shape
    assert is_elementwise, f"{func} reduces, and has no case in run_on_lists()"
    return expert.like_self(piece)


def _reduced(
    results: Sequence[Tensor], experts: Places, reduce: Callable[[Tensor], Tensor]
) -> list[Tensor]:
    """Reduce one number of each local piece over the ranks, with one message for all numbers."""
    by_mesh = grouped(
        ((expert._spec.mesh, results[place].dtype), place) for place, expert in experts.items()
    )
    whole = list(results)
    for (mesh, _), places in by_mesh.items():
        parts = _over_ranks(torch.stack([results[place] for place in places]), mesh)
        for place, number in zip(places, reduce(parts).unbind(), strict=True):
            whole[place] = number
    return whole


def _over_ranks(numbers: Tensor, mesh: DeviceMesh) -> Tensor:
    """Gather the numbers [n] of each rank into [W, n]."""
    return all_gather_tensor(numbers, 0, mesh).view(-1, numbers.shape[0])


def takes_parts(op: Operation) -> bool:
    """Return whether an operator cuts its first argument along the experts."""
    if op.name not in (_SELECT, _SLICE, _UNBIND, *_SPLITS):
        return False
    place = 2 if op.name in _SPLITS else 1
    dim = op.args[place] if len(op.args) > place else 0
    return dim in (0, -op.args[0].dim())


def run_on_parts(op: Operation) -> object:
    """Cut whole experts out of an ExpertTensor.

    Collective: all ranks make the same cut, and receive the experts of the others.
    """
    some = op.some
    numbers = torch.arange(some.shape[0], device="cpu").view(-1, *(1 for _ in some.shape[1:]))
    cut = op.run(lambda leaf: numbers if leaf is some else leaf)
    if isinstance(cut, Tensor) and cut.numel() == some.shape[0]:
        return some
    wanted, shard = [cut] if isinstance(cut, Tensor) else list(cut), some.held
    for part in wanted:
        experts = part.flatten().tolist()
        owners = {shard.first_copies[expert] // shard.num_local_experts for expert in experts}
        # A placement may leave experts of one rank without even steps in between.
        if len(owners) > 1 or (shard.physical_to_logical is not None and len(experts) > 1):
            raise ShapeError(
                f"{op.func}: experts {experts} of an expert parameter of {list(some.shape)} "
                "are of several ranks, so that what is written to them would be lost "
                f"({some.position}); take experts one by one, to_local() for this rank's, or "
                "full_tensor() for a copy of all"
            )
    if not isinstance(cut, Tensor) or cut.numel():
        announce(some.owner, op.func)
    whole = None if isinstance(cut, Tensor) else gather_experts(some)
    parts = [_part(some, part, shard, whole) for part in wanted]
    return parts[0] if isinstance(cut, Tensor) else tuple(parts)


def _part(
    some: shards.ShareTensor, experts: Tensor, shard: shards.ExpertShard, whole: Tensor | None
) -> Tensor:
    """Return a view of this rank's experts, or a copy of the experts of another rank.

    experts: numbers of experts of one rank, [n, 1, ...] in even steps, or one number [1, ...] with
        a dimension less than `some`.
    whole: the whole tensor that experts are copied from; None: the first rank that holds them
        broadcasts them, collective.
    """
    piece, numbers = some._local_tensor, experts.flatten().tolist()
    if not numbers:
        return piece[:0]
    step = numbers[1] - numbers[0] if len(numbers) > 1 else 1
    length = numbers[-1] - numbers[0] + 1

    def rows(first: int) -> slice | int:
        return slice(first, first + length, step) if experts.dim() == some.dim() else first

    if whole is not None:
        sent = whole[rows(numbers[0])]
    else:
        owner, first = divmod(shard.first_copies[numbers[0]], shard.num_local_experts)
        own = piece[rows(first)].contiguous()
        sent = wait_tensor(broadcast(own, owner, (some._spec.mesh, 0)))
    held = shards.logical_experts(shard)
    return piece[rows(held.index(numbers[0]))] if numbers[0] in held else sent
