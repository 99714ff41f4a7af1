"""Return the local pieces of expert tensors, and of tensors beside them."""

from __future__ import annotations

from torch import Tensor
from torch.distributed.tensor import DTensor

from epcomm.errors import ShapeError
from epcomm.sharding.shards import ShareTensor, cut_share, is_expert_tensor, shard_of


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
    if is_expert_tensor(leaf) and leaf.shard is not some.shard and shard_of(leaf) != shard_of(some):
        raise ShapeError(
            f"an operator takes expert parameters of {list(some.shape)} that lie differently on "
            f"the ranks (rank {some.device_mesh.get_local_rank()} of {some.device_mesh.size()}): "
            "experts of one have moved; call rebalance() with the same placement on copies and "
            "averages of a layer, and take state_dicts again"
        )
    if isinstance(leaf, DTensor):
        return leaf._local_tensor
    if leaf.dim() < some.dim() or leaf.shape[0] != some.shape[0]:
        return leaf
    shard = shard_of(some)
    assert shard is not None, "an ExpertTensor is a share"
    return cut_share(leaf, shard)
