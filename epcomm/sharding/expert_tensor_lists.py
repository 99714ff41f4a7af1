"""Run operators over lists of ExpertTensors and tensors, for optimizers, norms and loss scaling."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.distributed._functional_collectives import all_gather_tensor

from epcomm.sharding.announced import announce
from epcomm.sharding.pieces import Operation, own_part
from epcomm.sharding.shards import ShareTensor, counted_once, is_expert_tensor, piece_of

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


_UNSCALE = "aten::_amp_foreach_non_finite_check_and_unscale_"
_NORM, _MAX = "aten::_foreach_norm", "aten::_foreach_max"

Places: TypeAlias = "Mapping[int, ShareTensor]"


def run_on_lists(op: Operation) -> object:
    """Compute on local pieces, and reduce over all ranks where the result is a number.

    Collective: norms, maxima, and loss scaling, which looks for infinities; else local.
    """
    func, args, kwargs, name, is_mutable = op.func, op.args, op.kwargs, op.name, op.writes
    experts = _experts_by_place((*args, *kwargs.values()))
    local_args = [
        _pieces(arg, experts, is_written=is_mutable and place == 0)
        for place, arg in enumerate(args)
    ]
    local_kwargs = {key: _pieces(value, experts) for key, value in kwargs.items()}
    if name in (_NORM, _MAX, _UNSCALE):
        # Keyed by group: a weak reference to a freed group cannot be hashed.
        owners = [tensor.owner for tensor in experts.values() if tensor.owner is not None]
        living = {id(group): owner for owner in owners if (group := owner()) is not None}
        for owner in living.values():
            announce(owner, func)
    # Copies do not change a maximum, and a rank without own experts would have no maximum.
    if name == _NORM and _order_of(args, kwargs) != math.inf:
        local_args[0] = [counted_once(leaf) for leaf in args[0]]
    result = func(*local_args, **local_kwargs)
    if is_mutable:
        for tensor in op.tensors:
            if is_expert_tensor(tensor):
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


def _experts_by_place(args: Sequence[Any]) -> dict[int, ShareTensor]:
    """Map each position where one of the lists has an ExpertTensor to that ExpertTensor."""
    found = {}
    for arg in args:
        if isinstance(arg, list | tuple):
            for place, leaf in enumerate(arg):
                if is_expert_tensor(leaf):
                    found.setdefault(place, leaf)
    return found


def _pieces(arg: object, experts: Places, *, is_written: bool = False) -> object:
    if not isinstance(arg, list | tuple):
        return piece_of(arg) if isinstance(arg, Tensor) else arg
    return [
        own_part(leaf, experts[place])
        if place in experts and not is_written
        else (piece_of(leaf) if isinstance(leaf, Tensor) else leaf)
        for place, leaf in enumerate(arg)
    ]


def _wrapped(func: OpOverload, piece: Tensor, expert: ShareTensor | None) -> Tensor:
    if expert is None:
        return piece
    is_elementwise = piece.shape == expert._local_tensor.shape
    assert is_elementwise, f"{func} reduces, and has no case in run_on_lists()"
    return expert.like_self(piece)


def _reduced(
    results: Sequence[Tensor], experts: Places, reduce: Callable[[Tensor], Tensor]
) -> list[Tensor]:
    """Reduce one number of each local piece over the ranks, with one message for all numbers."""
    by_mesh: dict[tuple[DeviceMesh, torch.dtype], list[int]] = defaultdict(list)
    for place, expert in experts.items():
        by_mesh[expert._spec.mesh, results[place].dtype].append(place)
    whole = list(results)
    for (mesh, _), places in by_mesh.items():
        parts = _over_ranks(torch.stack([results[place] for place in places]), mesh)
        for place, number in zip(places, reduce(parts).unbind(), strict=True):
            whole[place] = number
    return whole


def _over_ranks(numbers: Tensor, mesh: DeviceMesh) -> Tensor:
    """Gather the numbers [n] of each rank into [W, n]."""
    return all_gather_tensor(numbers, 0, mesh).view(-1, numbers.shape[0])
