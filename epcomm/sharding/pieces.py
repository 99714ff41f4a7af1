"""Run operators on the local pieces of expert tensors and of the tensors used with them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch.distributed as dist
from torch import Tensor
from torch._ops import OpOverload
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_leaves, tree_map

from epcomm.errors import ShapeError
from epcomm.sharding.shards import ShareTensor, cut_share, is_expert_tensor, put_together


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
        """Whether the operator writes to an argument."""
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
        """Return what the operator returns for changed arguments."""
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
            f"an operator takes expert parameters of {list(some.shape)} that are stored "
            f"differently on the ranks ({some.position}): experts of one have moved; call "
            "rebalance() with the same placement on copies and averages of a layer, and take "
            "state_dicts again"
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
