"""Compute and save ExpertTensors whose ranks hold experts as a placement says, some on several.

Such a tensor is [E, ...] to torch's tools, and its piece [L, ...]. Checkpoints get each expert as a
chunk of its own, from the first rank that holds it, so that any other placement can load it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch._ops import OpOverload
from torch.distributed.tensor import DTensor, Shard
from torch.utils._pytree import tree_leaves, tree_map

from epcomm.errors import ShapeError
from epcomm.sharding.shards import (
    ExpertShard,
    ShareTensor,
    is_expert_tensor,
    logical_experts,
    put_together,
    shard_of,
)

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
    from torch.distributed.checkpoint.planner import WriteItem


def gather_experts(tensor: ShareTensor) -> Tensor:
    """Return the experts of all ranks in logical order, [E, ...]. Collective."""
    shard = shard_of(tensor)
    assert shard is not None, "an ExpertTensor is a share"
    piece = tensor._local_tensor.detach().contiguous()
    mesh = tensor._spec.mesh
    gathered = piece.new_empty(mesh.size(), *piece.shape)
    dist.all_gather_into_tensor(gathered.flatten(0, 1), piece, group=mesh.get_group())
    return put_together(gathered, shard)


def run_placed(func: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> object:
    """Run an operator expert by expert where torch can, and else on the experts of all ranks.

    Collective: where the result is no tensor of experts.
    Raises:
        ShapeError: an operator that writes to experts in another way than expert by expert.
    """
    leaves = tree_leaves((args, dict(kwargs)))
    some: ShareTensor = next(leaf for leaf in leaves if is_expert_tensor(leaf))
    result = func(*tree_map(_as_physical, args), **tree_map(_as_physical, dict(kwargs)))
    results = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]
    if all(isinstance(leaf, DTensor) and leaf.placements == (Shard(0),) for leaf in results):
        return tree_map(lambda leaf: _back(leaf, some), result)
    if func._schema.is_mutable:
        raise ShapeError(
            f"{func}: writes to an expert parameter of {list(some.shape)}, of which a placement "
            f"says who holds what, otherwise than expert by expert "
            f"(rank {some.device_mesh.get_local_rank()} of {some.device_mesh.size()}); call "
            "to_local() on it for this rank's experts"
        )
    whole_args, whole_kwargs = tree_map(_as_whole, (args, dict(kwargs)))
    return func(*whole_args, **whole_kwargs)


def write_items(fqn: str, tensor: ShareTensor) -> list[WriteItem]:
    """Say what this rank writes to a checkpoint: the experts that no rank before it holds."""
    from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
    from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

    chunks, shard = chunks_of(tensor), _shard(tensor)
    properties = TensorProperties.create_from_tensor(tensor._local_tensor)
    return [
        WriteItem(
            index=MetadataIndex(fqn, chunks[place].offsets),
            type=WriteItemType.SHARD,
            tensor_data=TensorWriteData(
                chunk=chunks[place], properties=properties, size=tensor.size()
            ),
        )
        for place in shard.first_places
    ]


def chunks_of(tensor: ShareTensor) -> list[ChunkStorageMetadata]:
    """Return where in the whole tensor each expert of this rank lies."""
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

    rest = tensor._local_tensor.shape[1:]
    return [
        ChunkStorageMetadata(
            offsets=torch.Size((expert, *(0 for _ in rest))), sizes=torch.Size((1, *rest))
        )
        for expert in logical_experts(_shard(tensor))
    ]


def part_at(tensor: ShareTensor, index: MetadataIndex) -> Tensor:
    """Return the expert of this rank, [1, ...], that lies at `index`."""
    assert index.offset is not None, "chunks_of() gave each chunk one"
    place = list(logical_experts(_shard(tensor))).index(index.offset[0])
    return tensor._local_tensor.detach().narrow(0, place, 1)


def _shard(tensor: ShareTensor) -> ExpertShard:
    assert tensor.shard is not None, "a placement says which experts it holds"
    return tensor.shard


def _as_physical(leaf: object) -> object:
    """Return an ExpertTensor as a DTensor of all physical experts, [P, ...]."""
    if not is_expert_tensor(leaf):
        return leaf
    return DTensor.from_local(leaf._local_tensor, leaf._spec.mesh, [Shard(0)], run_check=False)


def _as_whole(leaf: object) -> object:
    return gather_experts(leaf) if is_expert_tensor(leaf) else leaf


def _back(leaf: object, some: ShareTensor) -> object:
    if not isinstance(leaf, DTensor):
        return leaf
    if leaf._local_tensor is some._local_tensor:
        torch.autograd.graph.increment_version(some._local_tensor)
        return some
    return some.like_self(leaf._local_tensor)
