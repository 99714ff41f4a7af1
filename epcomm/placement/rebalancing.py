"""Collect what a rebalance moves, and compare it on all ranks before anything moves."""

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

from torch import Tensor
from torch.optim import Optimizer

from epcomm.calls.order import Calls
from epcomm.errors import ConfigError, EPTimeout, describe_ranks
from epcomm.placement.expert_placement import ExpertPlacement
from epcomm.sharding.shards import ExpertShard, is_cut_by_fsdp, is_expert_tensor, piece_of

# The phase of the second agreement of agree_to_write().
_ALL_WRITE = "rebalance, all ranks write"


@dataclass(frozen=True, kw_only=True, eq=False)
class ExpertState:
    """The tensors that move with the experts of one layer, by name: parameters, optimizer state."""

    tensors: Mapping[str, Tensor]

    @classmethod
    def of(
        cls, parameters: Mapping[str, Tensor], optimizer: Optimizer | None, num_local: int
    ) -> Self:
        """Collect the parameters, and what an optimizer keeps for each expert of them. Local."""
        found: dict[str, Tensor] = {}
        for name, parameter in parameters.items():
            if parameter.grad is not None:
                raise ConfigError(
                    f"rebalance: {name} has a gradient, which would not move with it; call "
                    "zero_grad(set_to_none=True) first"
                )
            if parameter.is_meta:
                raise ConfigError(
                    f"rebalance: {name} is on meta, where nothing can move; load the weights first"
                )
            found[name] = parameter
            state = {} if optimizer is None else optimizer.state.get(parameter, {})
            for key, value in state.items():
                # A count of steps is not by expert, and does not move.
                if isinstance(value, Tensor) and _is_by_expert(value, num_local):
                    found[f"{name}, {key}"] = value
        for name, tensor in found.items():
            is_by_expert = _is_by_expert(tensor, num_local) and not is_cut_by_fsdp(tensor)
            if not is_by_expert or not piece_of(tensor).is_contiguous():
                raise ConfigError(
                    f"rebalance: {name} is {type(tensor).__name__} {list(tensor.shape)}, expected "
                    f"the {num_local} experts of this rank, contiguous; move experts before FSDP "
                    "cuts them or a parametrisation replaces them, and after a first step with "
                    "state of an optimizer that torch.load has read"
                )
        return cls(tensors=found)

    def pieces(self) -> dict[str, Tensor]:
        """Return this rank's part of each tensor that has elements, [L, ...]."""
        pieces = {name: piece_of(each).detach() for name, each in self.tensors.items()}
        return {name: piece for name, piece in pieces.items() if piece.numel()}

    def belong_to(self, shard: ExpertShard) -> None:
        """Note in each ExpertTensor which experts it holds now. Local."""
        for tensor in self.tensors.values():
            if is_expert_tensor(tensor):
                tensor.shard = shard

    def describe(self) -> str:
        """Return names, shapes and dtypes, for comparison over the ranks."""
        return "; ".join(f"{n} {list(t.shape)} {t.dtype}" for n, t in self.pieces().items())


def check_placement(old: ExpertPlacement, new: object, where: str) -> None:
    """Check that `new` is a placement with the sizes of the layer's. Local."""
    if not isinstance(new, ExpertPlacement):
        raise ConfigError(
            f"rebalance: placement is {type(new).__name__}, expected an ExpertPlacement ({where}); "
            "make it by balance()"
        )
    for name in ("num_ranks", "num_experts", "num_physical_experts"):
        came, expected = getattr(new, name), getattr(old, name)
        if came != expected:
            raise ConfigError(
                f"rebalance: {name} of the placement is {came}, expected {expected} as the layer "
                f"has ({where}); make it by balance() for these ranks and experts"
            )


def agree_on_move(calls: Calls, *, problem: str, placement: str, state: str) -> None:
    """Compare what all ranks are about to move, before anything moves.

    problem: why this rank cannot move, or an empty text.   placement: as JSON.
    state: the tensors that move, see ExpertState.describe().

    Collective: yes.   Host sync: yes.
    Raises:
        ConfigError: some rank has a problem, or ranks disagree; on every rank.
    """
    texts = {"placement": placement, "tensors": state}
    found = {name: hashlib.sha256(text.encode()).hexdigest() for name, text in texts.items()}
    reports = calls.agree({}, what="rebalance", findings={"problem": problem, **found})
    for rank, finding in enumerate(reports):
        if finding["problem"]:
            raise ConfigError(
                str(finding["problem"])
                if rank == calls.names.own
                else f"{finding['problem']} (reported by rank {rank}; this is {calls.names.where})"
            )
    for name in texts:
        others = [rank for rank, each in enumerate(reports) if each[name] != reports[0][name]]
        if others:
            raise ConfigError(
                f"rebalance: {name} of {describe_ranks(others)} differ from those of rank 0 (this "
                f"is {calls.names.where}); pass the same placement on all ranks, with the "
                "optimizer of the layer or without"
            )


def agree_to_write(calls: Calls) -> EPTimeout | None:
    """Agree that all ranks write their rows or none does, even if a rank is lost meanwhile.

    A rank in the second agreement knows that all ranks completed the first, and so hold all their
    rows. It writes; and a rank that fails in the first agreement writes too, if another rank
    reports that it is in the second.

    Returns: the timeout for a lost rank where all survivors still write; None if no rank is lost.

    Collective: yes.   Host sync: yes.
    Raises:
        EPTimeout: some ranks did not arrive, and no survivor writes.
    """
    try:
        calls.agree({}, what="rebalance, all rows are there")
    except EPTimeout as lost:
        if any(phase.startswith(_ALL_WRITE) for phase in lost.phases):
            return lost
        raise
    try:
        calls.agree({}, what=_ALL_WRITE)
    except EPTimeout as lost:
        return lost
    return None


def _is_by_expert(tensor: Tensor, num_local: int) -> bool:
    shape = piece_of(tensor).shape
    return len(shape) > 0 and shape[0] == num_local
