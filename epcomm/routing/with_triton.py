"""Route by the gate kernel, with gradients too; import this only where triton is installed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from epcomm.kernels.routing.gate import GateForm, route_tokens
from epcomm.records import ReplicaTable, TopKOutput
from epcomm.routing.reference import check_arguments, weigh_chosen
from epcomm.routing.spec import CorrectionBias, DroppedGroups, RoutingSpec, SoftmaxOrder

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# A tensor without data (FakeTensor), or one that a transformation wraps, is none for a kernel.
_WITH_DATA = (Tensor, torch.nn.Parameter)


class TritonGate:
    """A routing as one launch of a kernel, forward; backward follows the reference's formulas."""

    def __init__(self, spec: RoutingSpec, num_experts: int) -> None:
        """Keep the routing of E = num_experts logical experts."""
        self._spec, self._form = spec, gate_form(spec, num_experts)

    def takes(self, logits: Tensor) -> bool:
        """Return whether the kernel can read these logits: not float64, and not in torch.compile.

        Local.   Host sync: none.
        """
        is_read = logits.dtype in _DTYPES and type(logits) in _WITH_DATA
        return is_read and not torch.compiler.is_compiling()

    def __call__(
        self,
        logits: Tensor,
        *,
        correction_bias: Tensor | None,
        num_valid_tokens: int | Tensor | None = None,
        load: Tensor | None = None,
        replicas: ReplicaTable | None = None,
    ) -> TopKOutput:
        """Route as route() does, count the load, and choose replicas, all in one launch.

        Scores that differ by less than 4 units in the last place of float32 may change places,
        weights differ from the reference's by at most 8 units, and equal logits tie as there.

        Args:
            logits: [T, E], float32, bfloat16 or float16; T = 0 is legal.
            correction_bias, num_valid_tokens: as route() takes them.
            load: [N, E], int64, on the device; each valid token adds 1 to each logical expert that
                it chose, in any of the N rows.
            replicas: where to find the experts; None: physical experts are the logical ones.

        Returns:
            topk_ids [T, K], int64, physical, best selection score first, -1 in padding rows;
            topk_weights [T, K], float32, differentiable as those of route(), once.

        Collective: none.   Host sync: none.   Deterministic: yes.
        Graph capture: after one call with about as many tokens.
        Lifetime: ordinary tensors, owned by the caller.
        Raises:
            ShapeError, ConfigError: as route().
        """
        check_arguments(logits, self._spec, correction_bias, num_valid_tokens)
        if isinstance(num_valid_tokens, Tensor) and num_valid_tokens.device != logits.device:
            # On the host, as route() allows.
            num_valid_tokens = int(num_valid_tokens)
        needs_grad = logits.requires_grad or self._learns(correction_bias)
        needs_grad &= torch.is_grad_enabled()

        def launch(logits: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
            logical_ids = None
            if needs_grad and replicas is not None:
                logical_ids = logits.new_empty(len(logits), self._spec.top_k, dtype=torch.int64)
            ids, weights = route_tokens(
                logits if logits.stride(1) == 1 else logits.contiguous(),
                bias if bias is None or bias.stride(0) == 1 else bias.contiguous(),
                self._form,
                num_valid=num_valid_tokens,
                load=load,
                replicas=replicas,
                logical_ids=logical_ids,
            )
            return ids, weights, ids if logical_ids is None else logical_ids

        if needs_grad:
            ids, weights = _Gating.apply(logits, correction_bias, self._spec, launch)  # type: ignore[misc]
        else:
            ids, weights, _ = launch(logits, correction_bias)
        return TopKOutput(topk_ids=ids, topk_weights=weights, is_physical=replicas is not None)

    def _learns(self, bias: Tensor | None) -> bool:
        """Return whether weights have a gradient with respect to the bias."""
        in_score = self._spec.correction_bias is CorrectionBias.SCORE
        return in_score and bias is not None and bias.requires_grad


class _Gating(torch.autograd.Function):
    """The gate as one node of the graph, which keeps logits and what was chosen."""

    @staticmethod
    def forward(
        ctx: Any,  # noqa: ANN401
        logits: Tensor,
        bias: Tensor | None,
        spec: RoutingSpec,
        launch: Callable[[Tensor, Tensor | None], tuple[Tensor, Tensor, Tensor]],
    ) -> tuple[Tensor, Tensor]:
        ids, weights, logical_ids = launch(logits, bias)
        ctx.spec = spec
        ctx.save_for_backward(logits, bias, logical_ids, weights)
        ctx.mark_non_differentiable(ids)
        return ids, weights

    @staticmethod
    @once_differentiable
    def backward(  # type: ignore[override]
        ctx: Any,  # noqa: ANN401
        _: Tensor,
        grad_weights: Tensor,
    ) -> tuple[Tensor | None, ...]:
        logits, bias, logical_ids, weights = ctx.saved_tensors
        wants_logits, wants_bias = ctx.needs_input_grad[:2]
        in_score = ctx.spec.correction_bias is CorrectionBias.SCORE
        logits = logits.detach().requires_grad_(wants_logits)
        if bias is not None:
            bias = bias.detach().requires_grad_(wants_bias and in_score)
        with torch.enable_grad():
            # A weight of 0 belongs to a dropped expert or to padding, or its score underflows; the
            # gradient of each is 0.
            again = weigh_chosen(
                logits,
                ctx.spec,
                correction_bias=bias,
                topk_ids=logical_ids.clamp(min=0),
                is_weightless=weights == 0,
            )
            again.backward(grad_weights)
        return logits.grad, None if bias is None else bias.grad, None, None


def gate_form(spec: RoutingSpec, num_experts: int) -> GateForm:
    """Translate a routing, to which triton_gate_reasons() has no objection. Local; pure."""
    by_logit = spec.softmax_order is SoftmaxOrder.AFTER_TOPK
    drops = spec.drops_groups
    return GateForm(
        num_experts=num_experts,
        top_k=spec.top_k,
        score="logit" if by_logit else spec.score_function.value,
        bias=spec.correction_bias.value,
        softcap=None if spec.softcap is None else float(spec.softcap),
        num_groups=spec.num_groups if drops else 1,
        topk_groups=spec.topk_groups if drops else 1,
        group_top_n=spec.group_score_top_n if drops else 1,
        fills_zero=drops and spec.dropped_groups is DroppedGroups.ZERO,
        renormalizes=spec.renormalize,
        epsilon_mode=spec.epsilon_mode.value,
        epsilon=float(spec.epsilon),
        scale=float(spec.routed_scaling_factor),
    )
