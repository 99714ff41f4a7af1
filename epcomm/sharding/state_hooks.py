"""Hook into a layer's state_dict: mark whose experts a tensor holds, and check who loads it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Protocol

from torch import Tensor, nn

from epcomm.errors import ShapeError
from epcomm.sharding.data_parallel import check_fsdp_of_placed
from epcomm.sharding.shards import ExpertShard, cut_share, is_expert_tensor, logical_experts

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor, Placement

_METADATA = "epcomm_share"


class Ranks(Protocol):
    """The attributes of an EPGroup that messages of the hooks name."""

    rank: int
    world_size: int

    @property
    def where(self) -> str:
        """The place of this rank for messages, such as `rank 3 of 8`."""
        ...


class ShardedLayer(Protocol):
    """The parts of a layer that the hooks use."""

    shard: ExpertShard

    @property
    def group(self) -> Ranks:
        """Return the ranks that share the experts."""
        ...

    def expert_parameters(self) -> Mapping[str, Tensor]:
        """Return the expert parameters by name below the layer."""
        ...

    def as_expert_tensor(self, share: Tensor) -> Tensor:
        """Return a share as an ExpertTensor, where the group has a DeviceMesh."""
        ...


def note_share(
    module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any]
) -> None:
    """Mark the tensors of a state_dict with the share that they hold. Local.

    The metadata mark ordinary tensors. Where the group has a DeviceMesh, ordinary tensors in the
    place of parameters become ExpertTensors, which share their memory.

    Raises:
        ConfigError: FSDP has cut experts that a placement may move.
    """
    layer: ShardedLayer = module  # type: ignore[assignment]
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
    """
    layer: ShardedLayer = module  # type: ignore[assignment]
    is_own = local_metadata.get(_METADATA) == _as_list(layer.shard)
    for name, parameter in layer.expert_parameters().items():
        value = state_dict.get(prefix + name)
        if isinstance(value, Tensor):
            reader = _Reader(name=prefix + name, layer=layer, is_own=is_own)
            state_dict[prefix + name] = reader.read(value, parameter)


def part_of(tensor: DTensor) -> tuple[tuple[int, ...], int, tuple[Placement, ...]]:
    """Return the part of a whole that a DTensor is: rank in the mesh, number of ranks, placements.

    For an unpickled DTensor, the rank is the rank that saved it.
    """
    mesh = tensor.device_mesh
    return tuple(mesh.get_coordinate() or ()), mesh.size(), tuple(tensor.placements)


class _Reader:
    """Reads one tensor of a state_dict."""

    def __init__(self, *, name: str, layer: ShardedLayer, is_own: bool) -> None:
        self._name, self._layer, self._is_own = name, layer, is_own

    def read(self, value: Tensor, parameter: Tensor) -> Tensor:
        """Return a tensor that can be copied into `parameter`."""
        shard = self._layer.shard
        if hasattr(value, "device_mesh"):
            return self._read_dtensor(value, parameter)  # type: ignore[arg-type]
        num_experts = value.shape[0] if value.dim() else 0
        # One rank holds as many experts as there are, in the order of its placement.
        is_share = num_experts == shard.num_local_experts and self._is_own
        if num_experts == shard.num_experts and not is_share:
            return _as(parameter, value, cut_share(value, shard))
        if is_share:
            return value if not hasattr(parameter, "device_mesh") else _wrapped(parameter, value)
        raise ShapeError(
            f"load_state_dict: {self._name} holds {num_experts} experts as an ordinary tensor, and "
            f"nothing says which ({self._layer.group.where}); expected all {shard.num_experts}, "
            "from gather_state_dict(), or what state_dict() gave on this rank"
        )

    def _read_dtensor(self, value: DTensor, parameter: Tensor) -> Tensor:
        if all(placement.is_replicate() for placement in value.placements):
            return self.read(value.to_local(), parameter)
        saved, is_plain = part_of(value), not hasattr(parameter, "device_mesh")
        group = self._layer.group
        own = ((group.rank,), group.world_size, saved[2]) if is_plain else part_of(parameter)  # type: ignore[arg-type]
        if saved != own or value.shape[0] != self._layer.shard.num_experts:
            raise ShapeError(
                f"load_state_dict: {self._name} is the part of {list(value.shape)} that rank "
                f"{saved[0]} of {saved[1]} saved as {list(saved[2])}, expected that of rank "
                f"{own[0]} of {own[1]} as {list(own[2])} ({self._layer.group.where}); load it by "
                "torch.distributed.checkpoint, which puts the parts together"
            )
        placed = value.shard if is_expert_tensor(value) else None
        if self._layer.shard.physical_to_logical is not None and not (
            self._is_own or placed == self._layer.shard
        ):
            raise ShapeError(
                f"load_state_dict: {self._name} is a rank's part of {list(value.shape)}, and "
                f"nothing says that it is of the placement of the layer ({group.where}); load it "
                "by torch.distributed.checkpoint, or pass what gather_state_dict() returned"
            )
        if is_plain:
            return value.to_local()
        # The mesh of the value may be an unpickled one, and not the mesh of the parameter.
        return _wrapped(parameter, value.to_local())


def _as(parameter: Tensor, whole: Tensor, share: Tensor) -> Tensor:
    """Return this rank's share of `whole`, or the whole, distributed as `parameter` is."""
    if is_expert_tensor(parameter):
        return _wrapped(parameter, share)
    if not hasattr(parameter, "device_mesh"):
        return share
    from torch.distributed.tensor import distribute_tensor

    # FSDP has cut the experts further. No rank sends, because each has the whole tensor.
    mesh, placements = parameter.device_mesh, parameter.placements  # type: ignore[attr-defined]
    return distribute_tensor(whole.detach(), mesh, placements, src_data_rank=None)


def _wrapped(parameter: Tensor, share: Tensor) -> Tensor:
    share = share.detach()
    if not parameter.is_meta:
        share = share.to(parameter.device)
    if is_expert_tensor(parameter):
        return parameter.like_self(share)
    from torch.distributed.tensor import DTensor

    return DTensor.from_local(
        share,
        parameter.device_mesh,  # type: ignore[attr-defined]
        parameter.placements,  # type: ignore[attr-defined]
        shape=parameter.shape,
        stride=parameter.stride(),
    )


def _as_list(shard: ExpertShard) -> list[int]:
    share = [shard.first_expert, shard.num_local_experts, shard.num_experts]
    return share if shard.physical_to_logical is None else share + list(logical_experts(shard))
