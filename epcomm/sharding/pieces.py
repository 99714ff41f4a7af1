"""Return the local pieces of expert tensors and of tensors beside them, and all pieces together."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from epcomm.errors import ShapeError
from epcomm.sharding.shards import ShareTensor, cut_share, is_expert_tensor, put_together


def piece_of(tensor: Tensor) -> Tensor:
    """Return the local piece of a DTensor, without gradients, or any other tensor as is. Local."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def own_part(leaf: object, some: ShareTensor) -> object:
    """Cut this rank's part out of a tensor that spans the experts of `some`; keep other leaves.

    Local.
    Raises:
        ShapeError: an ExpertTensor whose experts lie otherwise than those of `some`.
    """
    if not isinstance(leaf, Tensor):
        return leaf
    # A parameter, its gradient and its state have the same object.
    if is_expert_tensor(leaf) and leaf.shard is not some.shard and leaf.held != some.held:
        raise ShapeError(
            f"an operator takes expert parameters of {list(some.shape)} that lie differently on "
            f"the ranks ({some.position}): experts of one have moved; call rebalance() with the "
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
