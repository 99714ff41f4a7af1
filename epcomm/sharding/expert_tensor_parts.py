"""Cut an ExpertTensor along its experts: one expert, neighbours, or all one by one.

Loaders and initialisers write to such parts. A part of this rank's experts is a view of its piece,
so a write persists; a part of another rank's experts is a copy, and the write persists on that
rank.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed._functional_collectives import broadcast, wait_tensor

from epcomm.errors import ShapeError
from epcomm.sharding.announced import announce
from epcomm.sharding.pieces import Operation, gather_experts
from epcomm.sharding.shards import ExpertShard, ShareTensor, logical_experts

_SELECT, _SLICE, _UNBIND = "aten::select", "aten::slice", "aten::unbind"
_SPLITS = ("aten::split", "aten::split_with_sizes")


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
    Raises:
        ShapeError: the part holds experts of several ranks and not all of them; on every rank.
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


def _part(some: ShareTensor, experts: Tensor, shard: ExpertShard, whole: Tensor | None) -> Tensor:
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
    held = logical_experts(shard)
    return piece[rows(held.index(numbers[0]))] if numbers[0] in held else sent
