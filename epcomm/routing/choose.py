"""Choose the router of one layer: the reference, or a kernel that gives the same result.

The choice depends on the configuration, the routing and the device, so all ranks choose alike. Even
a rank that chose differently would send its tokens to the same experts.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from epcomm.config import Router
from epcomm.errors import BackendUnavailable
from epcomm.records import ReplicaTable, TopKOutput
from epcomm.routing.ascend_gating import (
    OPERATOR,
    GatingFlags,
    call_gating,
    gating_availability,
    gating_flags,
    gating_lacks,
    is_gating_candidate,
)
from epcomm.routing.reference import check_arguments, route
from epcomm.routing.spec import RoutingSpec
from epcomm.routing.triton_gating import (
    TritonGate,
    is_triton_candidate,
    triton_gate_lacks,
    triton_gate_reasons,
)


@dataclass(frozen=True, kw_only=True)
class RouterChoice:
    """The router of one layer.

    spec: the routing of the model.
    flags: arguments of the gating operator, if it routes.
    gate: the gate kernel, if it routes; without both the reference routes.
    reasons: why the reference routes, where a user may expect another router.
    """

    spec: RoutingSpec
    flags: GatingFlags | None = None
    gate: TritonGate | None = None
    reasons: tuple[str, ...] = ()

    @property
    def name(self) -> Router:
        """Return the router of calls without gradients."""
        if self.gate is not None:
            return Router.TRITON
        return Router.REFERENCE if self.flags is None else Router.ASCEND

    def explain(self) -> tuple[str, ...]:
        """Return lines for the text of a plan; none where users expect the reference."""
        if self.gate is not None:
            return ("routing by the triton gate; float64 and compiled calls by the reference",)
        if self.flags is not None:
            return (f"routing by {OPERATOR}, with gradients by the reference",)
        return (f"routing by the reference: {'; '.join(self.reasons)}",) if self.reasons else ()

    def route(
        self,
        logits: Tensor,
        *,
        correction_bias: Tensor | None,
        hidden_states: Tensor,
        load: Tensor | None = None,
        replicas: ReplicaTable | None = None,
    ) -> TopKOutput:
        """Route by the chosen router if it takes these logits, else by the reference.

        Args:
            logits, correction_bias, hidden_states: as route() takes them.
            load: [N, E], int64, on the device; each token adds 1 to each logical expert it chose,
                in any of the N rows.
            replicas: the physical experts of each logical one; None: returned ids are logical.

        Host sync: none.   Graph capture: after one call.
        """
        if self.gate is not None and self.gate.takes(logits):
            return self.gate(logits, correction_bias=correction_bias, load=load, replicas=replicas)
        if self.flags is None or _needs_grad(logits, correction_bias):
            topk = route(
                logits, self.spec, correction_bias=correction_bias, hidden_states=hidden_states
            )
        else:
            check_arguments(logits, self.spec, correction_bias)
            topk = call_gating(logits, self.flags, correction_bias)
        if load is not None:
            count_load(topk.topk_ids, load)
        if replicas is not None:
            topk = replace(topk, topk_ids=replicas.choose(topk.topk_ids), is_physical=True)
        return topk


def choose_router(
    router: Router, spec: RoutingSpec, *, num_experts: int, device: torch.device, where: str
) -> RouterChoice:
    """Choose the router of a layer, once, when the layer is made.

    Args:
        router: EPConfig.router.
        spec: the routing of the model.
        num_experts: E, logical experts.
        device: where the logits are.
        where: `rank 3 of 8`, for messages.

    Local.   Host sync: none.
    Raises:
        BackendUnavailable: what is asked for by name is not on this device.
        ConfigError: this routing is impossible among E experts.
    """
    spec.check_num_experts(num_experts)
    on_npu, on_gpu = is_gating_candidate(device), is_triton_candidate(device)
    if router is Router.REFERENCE:
        reasons = ("EPConfig.router asks for it",) if on_npu or on_gpu else ()
        return RouterChoice(spec=spec, reasons=reasons)
    if router is Router.ASCEND or (router is Router.AUTO and on_npu):
        if router is Router.ASCEND:
            _check_lacks(router, gating_lacks(device), where)
        verdict = gating_availability(spec, num_experts, device)
        if not verdict.ok:
            return RouterChoice(spec=spec, reasons=verdict.reasons)
        return RouterChoice(spec=spec, flags=gating_flags(spec))
    if router is Router.TRITON or on_gpu:
        lacks = triton_gate_lacks(device)
        if router is Router.TRITON:
            _check_lacks(router, lacks, where)
        reasons = lacks + triton_gate_reasons(spec, num_experts)
        if reasons:
            return RouterChoice(spec=spec, reasons=reasons)
        return RouterChoice(spec=spec, gate=TritonGate(spec, num_experts))
    return RouterChoice(spec=spec)


def _check_lacks(router: Router, lacks: tuple[str, ...], where: str) -> None:
    if lacks:
        raise BackendUnavailable(
            f"choose_router: router is {router.value!r}, but {'; '.join(lacks)} first, or set "
            f"EPConfig.router to 'auto' ({where})"
        )


def count_load(topk_ids: Tensor, load: Tensor) -> None:
    """Add 1 to the load of each expert for each entry that names it; -1 names none.

    Args:
        topk_ids: [T, K], int64, logical experts.
        load: [N, E], int64, on the same device; its first row is written.

    Local.   Host sync: none.   Graph capture: yes.
    """
    ids = topk_ids.flatten()
    load[0].scatter_add_(0, ids.clamp(min=0), (ids >= 0).to(load.dtype))


def _needs_grad(logits: Tensor, bias: Tensor | None) -> bool:
    needed = logits.requires_grad or (bias is not None and bias.requires_grad)
    return needed and torch.is_grad_enabled()
