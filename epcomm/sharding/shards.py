"""The experts that a rank holds: cut shares from whole tensors, and join them."""

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol, Self, TypeGuard, runtime_checkable

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor
else:
    # ExpertTensor adds the real base: importing DTensor takes seconds.
    DTensor = Tensor

# The arguments by which torch hands a function or an operator to a class or mode.
Args = tuple[Any, ...]
Kwargs = Mapping[str, Any] | None


@dataclass(frozen=True, kw_only=True)
class ExpertShard:
    """The experts of a whole tensor that a parameter holds, along dimension 0.

    first_expert: the first physical expert of this rank.   num_local_experts: L.
    num_experts: E, the experts of a whole tensor.
    physical_to_logical: the logical expert of each of the P physical ones, with a placement; None:
        they are the same, P = E.
    """

    first_expert: int
    num_local_experts: int
    num_experts: int
    physical_to_logical: tuple[int, ...] | None = None

    @cached_property
    def first_copies(self) -> tuple[int, ...]:
        """The first physical expert that is a copy of each logical one: one entry an expert."""
        if self.physical_to_logical is None:
            return tuple(range(self.num_experts))
        return tuple(map(self.physical_to_logical.index, range(self.num_experts)))

    @cached_property
    def first_places(self) -> tuple[int, ...]:
        """The local indices of experts whose first copy is on this rank."""
        return tuple(
            place
            for place, expert in enumerate(logical_experts(self))
            if self.first_copies[expert] == self.first_expert + place
        )


class ShardRanks(Protocol):
    """The part of an EPGroup that expert parameters use."""

    rank: int
    world_size: int

    @property
    def where(self) -> str:
        """The position of this rank for messages, such as `rank 3 of 8`."""
        ...

    def announce_operation(self, name: str) -> None:
        """Compare a call of this name with the calls of the other ranks."""
        ...


Owner = weakref.ref[ShardRanks]


class ShareTensor(DTensor):
    """A tensor of all experts, of which this rank holds its own in `_local_tensor` [L, ...].

    Every instance is an ExpertTensor. This base has what the modules below ExpertTensor use.
    """

    shard: ExpertShard | None = None
    owner: Owner | None = None

    @property
    def held(self) -> ExpertShard:
        """The experts that the piece holds, by a placement or in the order of the ranks."""
        if self.shard is not None:
            return self.shard
        mesh = self.device_mesh
        rank, world_size = mesh.get_local_rank(), mesh.size()
        return shard_of_rank(rank=rank, world_size=world_size, num_experts=self.shape[0])

    @property
    def position(self) -> str:
        """The position of this rank for messages, such as `rank 3 of 8`."""
        return f"rank {self.device_mesh.get_local_rank()} of {self.device_mesh.size()}"

    def like_self(self, share: Tensor) -> Self:
        """Wrap a piece [L, ...] of any shape and dtype for the mesh of this tensor. Local."""
        raise NotImplementedError


@runtime_checkable
class ExpertParameters(Protocol):
    """A module whose own parameters hold one rank's experts."""

    shard: ExpertShard

    @property
    def group(self) -> ShardRanks: ...

    def expert_parameters(self) -> Mapping[str, Tensor]:
        """Return the expert parameters by name below the module, as state_dict() names them."""
        ...

    def as_expert_tensor(self, share: Tensor, /) -> Tensor:
        """Return a share as an ExpertTensor, where the group has a DeviceMesh."""
        ...


def shard_of_rank(
    *,
    rank: int,
    world_size: int,
    num_experts: int,
    physical_to_logical: tuple[int, ...] | None = None,
) -> ExpertShard:
    """Return the share of a rank in E experts; W divides P, which is E without a placement. Local.

    physical_to_logical: see ExpertShard.
    """
    placed = physical_to_logical
    num_local = (num_experts if placed is None else len(placed)) // world_size
    return ExpertShard(
        first_expert=rank * num_local,
        num_local_experts=num_local,
        num_experts=num_experts,
        physical_to_logical=placed,
    )


def logical_experts(shard: ExpertShard) -> Sequence[int]:
    """Return the logical expert of each local expert, by local index.

    Checkpoints have their experts in logical order. All code that cuts shares out of whole tensors,
    or puts whole tensors together, uses this order.
    """
    end = shard.first_expert + shard.num_local_experts
    if shard.physical_to_logical is None:
        return range(shard.first_expert, end)
    return shard.physical_to_logical[shard.first_expert : end]


def cut_share(full: Tensor, shard: ExpertShard) -> Tensor:
    """Return one rank's experts [L, ...] of a whole tensor [E, ...]. Local.

    A view, or with a placement a copy.
    """
    experts = logical_experts(shard)
    if isinstance(experts, range):
        return full.narrow(0, experts.start, len(experts))
    return full.index_select(0, torch.tensor(experts, device=full.device))


def counted_once(tensor: Tensor) -> Tensor:
    """Return piece_of(), for ExpertTensors without the experts that a lower rank holds too."""
    piece, shard = piece_of(tensor), tensor.shard if is_expert_tensor(tensor) else None
    if shard is None or len(shard.first_places) == piece.shape[0]:
        return piece
    # The dtype is for an empty list, where lower ranks hold all experts.
    index = torch.tensor(shard.first_places, dtype=torch.int64, device=piece.device)
    return piece.index_select(0, index)


def put_together(parts: Tensor, shard: ExpertShard) -> Tensor:
    """Return [E, ...] in logical order from the pieces [W, L, ...] of all ranks. Local.

    shard: that of any rank. Of several copies of an expert the first is taken.
    """
    whole = parts.flatten(0, 1)
    if shard.physical_to_logical is None:
        return whole
    return whole[torch.tensor(shard.first_copies, device=whole.device)]


def is_expert_tensor(tensor: object) -> TypeGuard[ShareTensor]:
    """Return whether `tensor` is an ExpertTensor. Local."""
    return isinstance(tensor, ShareTensor)


def is_cut_by_fsdp(tensor: object) -> bool:
    """Return whether FSDP has cut a tensor: it is a DTensor, and no ExpertTensor. Local."""
    return hasattr(tensor, "device_mesh") and not is_expert_tensor(tensor)


def piece_of(tensor: Tensor) -> Tensor:
    """Return the local piece of a DTensor, without gradients, or any other tensor as is. Local."""
    return getattr(tensor, "_local_tensor", tensor)


def cut_as(whole: Tensor, parameter: Tensor) -> Tensor:
    """Distribute a whole tensor, which each rank has, as FSDP has cut `parameter`. Local."""
    from torch.distributed.tensor import distribute_tensor

    mesh, placements = parameter.device_mesh, parameter.placements  # type: ignore[attr-defined]
    return distribute_tensor(whole.detach(), mesh, placements, src_data_rank=None)


def expert_shards(module: nn.Module) -> dict[str, ExpertShard]:
    """Return the shares of a model's expert parameters, by all names of each parameter. Local."""
    found = {}
    for prefix, part in module.named_modules(remove_duplicate=False):
        if isinstance(part, ExpertParameters):
            dot = f"{prefix}." if prefix else ""
            found |= {f"{dot}{name}": part.shard for name in part.expert_parameters()}
    return found


def sharded_parameters(module: nn.Module) -> list[nn.Parameter]:
    """Return the expert-parallel parameters of a model, for optimizers and data parallelism."""
    sharded = _sharded_ids(module)
    return [parameter for parameter in module.parameters() if id(parameter) in sharded]


def replicated_parameters(module: nn.Module) -> list[nn.Parameter]:
    """Return the parameters that every rank holds whole."""
    sharded = _sharded_ids(module)
    return [parameter for parameter in module.parameters() if id(parameter) not in sharded]


def _sharded_ids(module: nn.Module) -> set[int]:
    own = [part for part in module.modules() if isinstance(part, ExpertParameters)]
    ids = {id(tensor) for part in own for tensor in part.expert_parameters().values()}
    return ids | {id(p) for p in module.parameters() if is_expert_tensor(p)}
