"""Choose the router of one layer: the reference, or an operator that gives the same result.

The choice follows from the configuration, the routing and the device, so that all ranks make the
same choice. If one rank chose otherwise, its tokens would still go to the same experts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from epcomm.config import Router
from epcomm.errors import BackendUnavailable
from epcomm.records import TopKOutput
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


@dataclass(frozen=True, kw_only=True)
class RouterChoice:
    """The router of one layer.

    spec: the routing of the model.
    flags: arguments of the gating operator; None: the reference routes.
    reasons: why the reference routes, where a user may expect the operator.
    """

    spec: RoutingSpec
    flags: GatingFlags | None = None
    reasons: tuple[str, ...] = ()

    @property
    def name(self) -> Router:
        """Name the router that serves calls without gradients."""
        return Router.REFERENCE if self.flags is None else Router.ASCEND

    def explain(self) -> tuple[str, ...]:
        """Return lines for the text of a plan; none where users expect the reference."""
        if self.flags is not None:
            return (f"routing by {OPERATOR}, with gradients by the reference",)
        return (f"routing by the reference: {'; '.join(self.reasons)}",) if self.reasons else ()

    def route(
        self, logits: Tensor, *, correction_bias: Tensor | None, hidden_states: Tensor
    ) -> TopKOutput:
        """Route by the operator, if chosen and no gradients are needed, else by the reference."""
        if self.flags is None or _needs_grad(logits, correction_bias):
            return route(
                logits, self.spec, correction_bias=correction_bias, hidden_states=hidden_states
            )
        check_arguments(logits, self.spec, correction_bias)
        return call_gating(logits, self.flags, correction_bias)


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
        BackendUnavailable: the operator is asked for by name and is not on this device.
        ConfigError: this routing is impossible among E experts.
    """
    spec.check_num_experts(num_experts)
    is_candidate = is_gating_candidate(device)
    if router is Router.REFERENCE:
        reasons = ("EPConfig.router asks for it",) if is_candidate else ()
        return RouterChoice(spec=spec, reasons=reasons)
    if router is Router.AUTO and not is_candidate:
        return RouterChoice(spec=spec)
    lacks = gating_lacks(device)
    if router is Router.ASCEND and lacks:
        raise BackendUnavailable(
            f"choose_router: router is 'ascend', but {'; '.join(lacks)} first, or set "
            f"EPConfig.router to 'auto' ({where})"
        )
    verdict = gating_availability(spec, num_experts, device)
    if not verdict.ok:
        return RouterChoice(spec=spec, reasons=verdict.reasons)
    return RouterChoice(spec=spec, flags=gating_flags(spec))


def _needs_grad(logits: Tensor, bias: Tensor | None) -> bool:
    needed = logits.requires_grad or (bias is not None and bias.requires_grad)
    return needed and torch.is_grad_enabled()
