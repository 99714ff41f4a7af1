"""Convert a layer's parameters, or tensors that replaced them, to the tensors that kernels read."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import Tensor, nn

from epcomm.errors import ShapeError
from epcomm.sharding.shards import ExpertShard, cut_share, is_expert_tensor, piece_of
from epcomm.weights.unquantized import ExpertTensors


class LocalExperts:
    """Turns ExpertTensors, DTensors and ordinary tensors into this rank's experts [L, ...].

    shard: which experts these are; rebalance() changes it together with the tensors.
    gradient_factor: multiplies the gradients of parameters.

    While the parameters stay the same objects, their pieces are kept without checks.
    """

    def __init__(
        self, kind: ExpertTensors, roles: tuple[str, ...], shard: ExpertShard, where: str
    ) -> None:
        self._kind, self._roles, self._where = kind, roles, where
        self.shard = shard
        self._held: Sequence[Tensor] = ()
        self._pieces: Sequence[Tensor] = ()
        self._are_shares: Sequence[bool] = ()
        self._record = kind
        self.gradient_factor = 1.0

    def of(self, held: Sequence[Tensor], computed: Collection[int] = ()) -> ExpertTensors:
        """Return the experts, as views of the tensors that read() was given. Local.

        Args:
            held: tensors in the order of the roles.
            computed: the indices of tensors that are not parameters, which the factor leaves alone.
        """
        # An attribute of a subclass is a call into Python, unless that is switched off.
        with torch._C.DisableTorchFunctionSubclass():
            if not (torch.is_grad_enabled() and any(tensor.requires_grad for tensor in held)):
                return self._record
        factors = [1.0 if place in computed else self.gradient_factor for place in range(len(held))]
        views = self._differentiable(held, factors)
        return self._record.exchanged(dict(zip(self._roles, views, strict=True)))

    def __deepcopy__(self, memo: dict[int, object]) -> LocalExperts:
        other = LocalExperts(self._kind, self._roles, self.shard, self._where)
        other.gradient_factor = self.gradient_factor
        return other

    def knows(self, held: Sequence[Tensor]) -> bool:
        """Return whether read() was given these tensors, with the same pieces. Local."""
        if len(held) != len(self._held):
            return False
        for tensor, known, piece in zip(held, self._held, self._pieces, strict=True):
            # Module.to() replaces the piece of a parameter, and keeps the parameter. This runs in
            # every call, so the piece is read without calling piece_of().
            if tensor is not known or getattr(tensor, "_local_tensor", tensor) is not piece:
                return False
        return True

    def read(self, held: Sequence[Tensor]) -> None:
        """Read the tensors for the next calls of of(). Local."""
        pieces = [piece_of(tensor) for tensor in held]
        owned = list(map(self._own, pieces, self._roles))
        self._record = self._kind.with_tensors(dict(zip(self._roles, owned, strict=True)))
        # Tensors that are not parameters were computed for this call, and copies of placed experts
        # do not follow writes to the parameter: neither may be kept.
        are_kept = all(isinstance(tensor, nn.Parameter) for tensor in held) and all(
            own.untyped_storage().data_ptr() == piece.untyped_storage().data_ptr()
            for own, piece in zip(owned, pieces, strict=True)
        )
        self._held, self._pieces = (held, pieces) if are_kept else ((), ())
        # One flag for each piece that is kept.
        self._are_shares = list(map(is_expert_tensor, self._held))

    def _differentiable(self, held: Sequence[Tensor], factors: Sequence[float]) -> Sequence[Tensor]:
        are_shares = self._are_shares or list(map(is_expert_tensor, held))
        if set(factors) == {1.0} and not any(are_shares):
            views = [_local(tensor) for tensor in held]
        else:
            from epcomm.sharding.expert_tensor import local_views

            pairs = zip(held, are_shares, strict=True)
            views = local_views([t if is_share else _local(t) for t, is_share in pairs], factors)
        return [self._own(view, role) for view, role in zip(views, self._roles, strict=True)]

    def _own(self, tensor: Tensor, role: str) -> Tensor:
        shard, num_experts = self.shard, tensor.shape[0]
        if num_experts == shard.num_local_experts:
            return tensor
        if num_experts == shard.num_experts:
            return cut_share(tensor, shard)
        raise ShapeError(
            f"ExpertParallelExperts: {role} is {list(tensor.shape)}, expected the "
            f"{shard.num_local_experts} experts of this rank or all {shard.num_experts} "
            f"({self._where}); check what replaced the parameter"
        )


def _local(tensor: Tensor) -> Tensor:
    """Return the piece of a DTensor, differentiable; any other tensor as it is."""
    to_local = getattr(tensor, "to_local", None)
    return tensor if to_local is None else to_local()
