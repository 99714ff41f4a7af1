"""Choose the router of one layer: the reference, or a kernel that gives the same result.

The choice depends on the configuration, the routing and the device, so all ranks choose alike. Even
a rank that chose differently would send its tokens to the same experts.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from epcomm.config import Router
from epcomm.errors import BackendUnavailable
from epcomm.ops.slots import count_experts
from epcomm.records import ReplicaTable, TopKOutput
from epcomm.routing.ascend_gating import AscendGate, gating_lacks, gating_reasons
from epcomm.routing.reference import route
from epcomm.routing.spec import RoutingSpec
from epcomm.routing.triton_gating import TritonGate, triton_gate_lacks, triton_gate_reasons

# The router that users expect on each type of device.
_ROUTER_OF_DEVICE = {"npu": Router.ASCEND, "cuda": Router.TRITON}


@dataclass(frozen=True, kw_only=True)
class RouterChoice:
    """The router of one layer.

    spec: the routing of the model.
    gate: the kernel or operator that routes; None: the reference routes.
    reasons: why the reference routes, where a user may expect another router.
    """

    spec: RoutingSpec
    gate: TritonGate | AscendGate | None = None
    reasons: tuple[str, ...] = ()

    def explain(self) -> tuple[str, ...]:
        """Return lines for the text of a plan; none where users expect the reference."""
        if self.gate is not None:
            return (self.gate.explanation,)
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

        load: [N, E], int64, on the device; each token adds 1 to each logical expert it chose, in
            any of the N rows.
        replicas: the physical experts of each logical one; None: returned ids are logical.

        Host sync: none.   Graph capture: after one call.
        """
        gate = self.gate
        if isinstance(gate, TritonGate) and gate.takes(logits):
            return gate(logits, correction_bias=correction_bias, load=load, replicas=replicas)
        if isinstance(gate, AscendGate) and gate.takes(logits, correction_bias):
            topk = gate(logits, correction_bias)
        else:
            bias, hidden = correction_bias, hidden_states
            topk = route(logits, self.spec, correction_bias=bias, hidden_states=hidden)
        if load is not None:
            count_load(topk.topk_ids, load)
        if replicas is not None:
            topk = replace(topk, topk_ids=replicas.choose(topk.topk_ids), is_physical=True)
        return topk


def choose_router(
    router: Router, spec: RoutingSpec, *, num_experts: int, device: torch.device, where: str
) -> RouterChoice:
    """Choose the router of a layer among E = num_experts, once, when the layer is made.

    device: where the logits are.   where: `rank 3 of 8`, for messages.

    Local.   Host sync: none.
    Raises:
        BackendUnavailable: the router that is named is not available on this device.
        ConfigError: this routing is impossible among E experts.
    """
    spec.check_num_experts(num_experts)
    expected = _ROUTER_OF_DEVICE.get(device.type, Router.REFERENCE)
    wanted = expected if router is Router.AUTO else router
    if wanted is Router.REFERENCE:
        reasons = () if expected is wanted else ("EPConfig.router asks for it",)
        return RouterChoice(spec=spec, reasons=reasons)
    is_triton = wanted is Router.TRITON
    lacks = triton_gate_lacks(device) if is_triton else gating_lacks(device)
    if lacks and router is not Router.AUTO:
        raise BackendUnavailable(
            f"choose_router: router is {router.value!r}, but {'; '.join(lacks)} first, or set "
            f"EPConfig.router to 'auto' ({where})"
        )
    reasons_of = triton_gate_reasons if is_triton else gating_reasons
    reasons = lacks + reasons_of(spec, num_experts)
    if reasons:
        return RouterChoice(spec=spec, reasons=reasons)
    gate = TritonGate(spec, num_experts) if is_triton else AscendGate(spec)
    return RouterChoice(spec=spec, gate=gate)


def count_load(topk_ids: Tensor, load: Tensor) -> None:
    """Add 1 to the first row of load [N, E] for each entry of topk_ids that names an expert.

    Local.   Host sync: none.   Graph capture: yes.
    """
    # Dispatch reports ids out of range on all ranks; an index error here would not.
    load[0] += count_experts(topk_ids.where(topk_ids < load.shape[1], -1), load.shape[1])
