"""The memory of redundant experts and of moving experts, in `epcomm plan`."""

from __future__ import annotations

from dataclasses import dataclass

from epcomm.config import EPConfig
from epcomm.placement.moving import MoveMemory
from epcomm.spec import MoESpec
from epcomm.weights.unquantized import ExpertTensors


@dataclass(frozen=True, kw_only=True)
class Rebalance:
    """The bytes of one rank, without those of an optimizer; None where experts have no size.

    redundant_bytes: weights of redundant experts.
    device_bytes, host_bytes: see MoveMemory.
    """

    redundant_bytes: int | None = None
    device_bytes: int | None = None
    host_bytes: int | None = None

    @classmethod
    def of(
        cls, config: EPConfig, spec: MoESpec, num_ranks: int, weights: ExpertTensors | None
    ) -> Rebalance | None:
        """Compute it; None where experts are not placed. spec: of the physical experts."""
        if config.redundant_experts is None:
            return None
        if weights is None:
            return cls()
        tensors = weights.tensors()
        memory = MoveMemory.of(tensors, num_physical=spec.num_experts, num_ranks=num_ranks)
        expert = sum(each[0].numel() * each.element_size() for each in tensors.values())
        return cls(
            redundant_bytes=config.redundant_experts * expert // num_ranks,
            device_bytes=memory.device_bytes,
            host_bytes=memory.host_bytes,
        )
