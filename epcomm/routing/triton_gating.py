"""Say which routings the gate kernel computes, and make the gate of one routing.

Nothing here imports Triton before a gate is made.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from epcomm.platforms.cuda import triton_reasons
from epcomm.platforms.machine import this_machine
from epcomm.records import ReplicaTable, TopKOutput
from epcomm.routing.spec import RoutingSpec

# All experts of a token lie in the registers of one warp, 32 of them in each thread.
MAX_EXPERTS, MAX_TOP_K = 1024, 32
# Whose kernels Triton compiles; torch for ROCm names its GPUs cuda too.
_DEVICES = ("cuda",)
_NAME = "the triton gate"


class Gate(Protocol):
    """The routing of logits by one kernel; see TritonGate."""

    def takes(self, logits: Tensor) -> bool:
        """Return whether the kernel can read these logits. Local; no host sync."""
        ...

    def __call__(
        self,
        logits: Tensor,
        *,
        correction_bias: Tensor | None,
        num_valid_tokens: int | Tensor | None = None,
        load: Tensor | None = None,
        replicas: ReplicaTable | None = None,
    ) -> TopKOutput:
        """Route as route() does."""
        ...


def is_triton_candidate(device: torch.device) -> bool:
    """Return whether explain() should say why the gate does not route: on GPUs alone."""
    return device.type in _DEVICES


def triton_gate_lacks(device: torch.device) -> tuple[str, ...]:
    """Return why no gate runs on this device; empty if one does. Local."""
    missing = tuple(triton_reasons(this_machine()))
    if missing or device.type in _DEVICES:
        return missing
    from epcomm.kernels import launch

    if launch.IS_INTERPRETED:
        return ()
    return (f"{_NAME} is not for {device.type}; move the layer to a GPU",)


def triton_gate_reasons(spec: RoutingSpec, num_experts: int) -> tuple[str, ...]:
    """Return why the gate cannot compute this routing; empty if it can. Local; pure."""
    faults = (
        (spec.custom_function is not None, "has no custom functions"),
        (num_experts > MAX_EXPERTS, f"takes at most {MAX_EXPERTS} experts, not {num_experts}"),
        (spec.top_k > MAX_TOP_K, f"chooses at most {MAX_TOP_K} experts a token, not {spec.top_k}"),
    )
    return tuple(f"{_NAME} {reason}" for is_fault, reason in faults if is_fault)


def make_triton_gate(spec: RoutingSpec, num_experts: int) -> Gate:
    """Make the gate of a routing that triton_gate_reasons() has nothing against. Local."""
    from epcomm.routing.with_triton import TritonGate

    return TritonGate(spec, num_experts)
