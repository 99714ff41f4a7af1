"""Save and load expert parameters: state_dicts, parts of checkpoints, and states of optimizers.

An ExpertTensor records which experts it holds; for other tensors, metadata of the state_dict do.
Loading takes this rank's experts out of whole tensors, and refuses what another rank has saved.
torch calls no hook of a parameter when an optimizer loads a state, so that is checked before the
next step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from epcomm.errors import ConfigError, ShapeError
from epcomm.sharding import shards
from epcomm.sharding.data_parallel import check_fsdp_of_placed

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex
    from torch.distributed.checkpoint.planner import WriteItem
    from torch.distributed.tensor import DTensor, Placement

_METADATA = "epcomm_share"
# See _part_of().
_Part: TypeAlias = "tuple[tuple[int, ...], int, tuple[Placement, ...]]"


def note_share(
    module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any]
) -> None:
    """Attach to the tensors of a state_dict the share that they hold. Local.

    Metadata mark ordinary tensors. Where the group has a DeviceMesh, tensors of parameters become
    ExpertTensors, which share their memory.

    Raises:
        ConfigError: FSDP has cut experts that a placement may move.
    """
    layer: shards.ExpertParameters = module  # type: ignore[assignment]
    check_fsdp_of_placed(layer)
    local_metadata[_METADATA] = _as_list(layer.shard)
    for name in layer.expert_parameters():
        value = state_dict.get(prefix + name)
        # With keep_vars the caller wants the parameters themselves.
        if isinstance(value, Tensor) and not value.requires_grad:
            state_dict[prefix + name] = layer.as_expert_tensor(value)


def cut_before_load(
    module: nn.Module,
    state_dict: dict[str, Any],
    prefix: str,
    local_metadata: dict[str, Any],
    *_: object,
) -> None:
    """Turn the tensors given to load_state_dict() into this rank's experts, or refuse them. Local.

    Raises:
        ShapeError: a share of another rank, of another number of ranks, or of unknown origin.
        ConfigError: codes, or scales of one byte, of another dtype.
    """
    layer: shards.ExpertParameters = module  # type: ignore[assignment]
    is_own = local_metadata.get(_METADATA) == _as_list(layer.shard)
    for name, parameter in layer.expert_parameters().items():
        value = state_dict.get(prefix + name)
        if isinstance(value, Tensor):
            _check_codes(value, parameter, f"load_state_dict: {prefix}{name}", layer.group.where)
            state_dict[prefix + name] = _read(value, parameter, layer, prefix + name, is_own)


def write_items(fqn: str, tensor: shards.ShareTensor) -> list[WriteItem]:
    """Return what this rank writes to a checkpoint: the experts that no lower rank holds."""
    from torch.distributed.checkpoint.metadata import MetadataIndex, TensorProperties
    from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

    chunks = chunks_of(tensor)
    properties = TensorProperties.create_from_tensor(tensor._local_tensor)
    return [
        WriteItem(
            index=MetadataIndex(fqn, chunks[place].offsets),
            type=WriteItemType.SHARD,
            tensor_data=TensorWriteData(
                chunk=chunks[place], properties=properties, size=tensor.size()
            ),
        )
        for place in tensor.held.first_places
    ]


def chunks_of(tensor: shards.ShareTensor) -> list[ChunkStorageMetadata]:
    """Return a chunk for each expert of this rank: its offset and size in the whole tensor."""
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

    rest = tensor._local_tensor.shape[1:]
    return [
        ChunkStorageMetadata(
            offsets=torch.Size((expert, *(0 for _ in rest))), sizes=torch.Size((1, *rest))
        )
        for expert in shards.logical_experts(tensor.held)
    ]


class CodesOfCheckpoint(Tensor):
    """The codes that a checkpoint writes or reads for a parameter; see checked_part()."""

    what: str
    position: str

    @classmethod
    def __torch_function__(  # type: ignore[override]
        cls,
        func: Callable[..., object],
        types: Any,  # noqa: ANN401
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> object:
        own = next(each for each in tree_leaves((args, kwargs)) if isinstance(each, cls))
        if func is Tensor.copy_ and own is args[0]:
            _check_codes(args[1], own, own.what, own.position)
        made = super().__torch_function__(func, types, args, kwargs or {})
        # split() returns several, and cat() takes several.
        for each in tree_leaves(made):
            if isinstance(each, cls):
                each.what, each.position = own.what, own.position
        return made

    def __reduce_ex__(self, protocol: object) -> object:  # type: ignore[override]
        return self.as_subclass(Tensor).__reduce_ex__(protocol)  # type: ignore[arg-type]


def checked_part(part: Tensor, tensor: shards.ShareTensor, index: MetadataIndex) -> Tensor:
    """Return a part of a parameter, in the same memory, for torch.distributed.checkpoint. Local.

    The checkpoint reads into it by copy_(), which would convert the numbers of another dtype, so a
    part of one-byte elements refuses them.
    """
    if part.itemsize > 1:
        return part
    codes = part.as_subclass(CodesOfCheckpoint)
    codes.what, codes.position = f"checkpoint: {index.fqn}", tensor.position
    return codes


def part_at(tensor: shards.ShareTensor, index: MetadataIndex) -> Tensor:
    """Return the expert of this rank, [1, ...], whose chunk is at `index`."""
    assert index.offset is not None, "chunks_of() gave each chunk one"
    place = shards.logical_experts(tensor.held).index(index.offset[0])
    return tensor._local_tensor.detach().narrow(0, place, 1)


@cache
def watch_optimizers() -> RemovableHandle:
    """Check the state of every optimizer of this process before each step from now on. Local."""
    return register_optimizer_step_pre_hook(_before_step)


def _check_codes(value: Tensor, parameter: Tensor, what: str, where: str) -> None:
    # torch would convert the numbers: a byte of 120 would become 2**7 as an exponent.
    if parameter.dtype.itemsize == 1 and value.dtype is not parameter.dtype:
        raise ConfigError(
            f"{what} is {value.dtype}, expected {parameter.dtype} ({where}); view bytes as this "
            "dtype, or quantise the experts before"
        )


def _read(
    value: Tensor, parameter: Tensor, layer: shards.ExpertParameters, name: str, is_own: bool
) -> Tensor:
    """Return a tensor that can be copied into `parameter`, of what a state_dict has for it.

    is_own: the metadata name this rank and placement.
    """
    shard, group = layer.shard, layer.group
    if hasattr(value, "device_mesh"):
        return _read_dtensor(value, parameter, layer, name, is_own)  # type: ignore[arg-type]
    num_experts = value.shape[0] if value.dim() else 0
    # One rank holds as many experts as there are, in the order of its placement.
    is_share = num_experts == shard.num_local_experts and is_own
    if num_experts == shard.num_experts and not is_share:
        if shards.is_cut_by_fsdp(parameter):
            return shards.cut_as(value, parameter)
        return _wrapped(parameter, shards.cut_share(value, shard))
    if is_share:
        return _wrapped(parameter, value)
    raise ShapeError(
        f"load_state_dict: {name} holds {num_experts} experts as an ordinary tensor, and nothing "
        f"says which ({group.where}); expected all {shard.num_experts}, from gather_state_dict(), "
        "or what state_dict() gave on this rank"
    )


def _read_dtensor(
    value: DTensor, parameter: Tensor, layer: shards.ExpertParameters, name: str, is_own: bool
) -> Tensor:
    if all(placement.is_replicate() for placement in value.placements):
        return _read(value.to_local(), parameter, layer, name, is_own)
    shard, group, what = layer.shard, layer.group, f"load_state_dict: {name}"
    is_plain = not hasattr(parameter, "device_mesh")
    own = ((group.rank,), group.world_size, value.placements)
    own = own if is_plain else _part_of(parameter)
    _check_part(what, value, own, shard.num_experts, group.where)
    placed = value.shard if shards.is_expert_tensor(value) else None
    if shard.physical_to_logical is not None and not (is_own or placed == shard):
        raise ShapeError(
            f"{what} is a rank's part of {list(value.shape)}, and nothing says that it is of the "
            f"placement of the layer ({group.where}); load it by torch.distributed.checkpoint, or "
            "pass what gather_state_dict() returned"
        )
    # The mesh of the value may be an unpickled one, and not the mesh of the parameter.
    return _wrapped(parameter, value.to_local())


def _wrapped(parameter: Tensor, share: Tensor) -> Tensor:
    if not hasattr(parameter, "device_mesh"):
        return share
    share = share.detach()
    if not parameter.is_meta:
        share = share.to(parameter.device)
    if shards.is_expert_tensor(parameter):
        return parameter.like_self(share)
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        share,
        parameter.device_mesh,  # type: ignore[attr-defined]
        parameter.placements,  # type: ignore[attr-defined]
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def _as_list(shard: shards.ExpertShard) -> list[int]:
    share = [shard.first_expert, shard.num_local_experts, shard.num_experts]
    return (
        share if shard.physical_to_logical is None else share + list(shards.logical_experts(shard))
    )


def _check_part(what: str, value: DTensor, own: _Part, num_experts: int, where: str) -> None:
    """Raise ShapeError if a DTensor is the part of another rank, or of another number of ranks."""
    saved = _part_of(value)
    if saved != own or value.shape[0] != num_experts:
        raise ShapeError(
            f"{what} is the part of {list(value.shape)} that rank {saved[0]} of {saved[1]} saved "
            f"as {list(saved[2])}, expected that of rank {own[0]} of {own[1]} as {list(own[2])} "
            f"({where}); load it by torch.distributed.checkpoint, which puts the parts together, "
            "or load what this rank saved"
        )


def _part_of(tensor: Any) -> _Part:  # noqa: ANN401
    """Return the part of a whole that a DTensor is: rank in the mesh, number of ranks, placements.

    For an unpickled DTensor, the rank is the rank that saved it.
    """
    mesh = tensor.device_mesh
    return tuple(mesh.get_coordinate() or ()), mesh.size(), tuple(tensor.placements)


def _before_step(optimizer: Optimizer, args: object, kwargs: object) -> None:
    for group in optimizer.param_groups:
        experts = [p for p in group["params"] if shards.is_expert_tensor(p)]
        num_others = len(group["params"]) - len(experts)
        if experts and num_others and isinstance(optimizer, LBFGS):
            raise ConfigError(
                f"{type(optimizer).__name__}.step: its parameters are {len(experts)} expert "
                f"parameters and {num_others} others ({experts[0].position}), which it joins into "
                "one vector, but no rank holds all experts; give it "
                "epcomm.sharding.shards.replicated_parameters(model), and "
                "sharded_parameters(model) to another optimizer"
            )
        for parameter in experts:
            _take_own(optimizer, parameter)


def _take_own(optimizer: Optimizer, parameter: shards.ShareTensor) -> None:
    """Replace the DTensors of a loaded state by ExpertTensors that share their memory."""
    state = optimizer.state.get(parameter, {})
    for name, value in state.items():
        if not hasattr(value, "device_mesh"):
            continue
        if shards.is_expert_tensor(value):
            if value.shard is not parameter.shard and value.shard != parameter.shard:
                raise ConfigError(
                    f"{_named(optimizer, name, parameter)} has a different placement from the "
                    f"parameter ({parameter.position}); call rebalance(placement, optimizer) with "
                    "this optimizer"
                )
            continue
        what, own = _named(optimizer, name, parameter), _part_of(parameter)
        _check_part(what, value, own, parameter.shape[0], parameter.position)
        state[name] = parameter.like_self(value.to_local())


def _named(optimizer: Optimizer, name: str, parameter: shards.ShareTensor) -> str:
    shape = list(parameter.shape)
    return f"{type(optimizer).__name__}.step: {name} of an expert parameter of {shape}"
