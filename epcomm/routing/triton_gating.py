"""Route by the gate kernel, with gradients too, and check which routings it computes.

Nothing here imports Triton before a gate is made.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from epcomm.ops.slots import WITH_DATA
from epcomm.platforms.cuda import triton_reasons
from epcomm.platforms.machine import this_machine
from epcomm.records import ReplicaTable, TopKOutput
from epcomm.routing.reference import check_arguments, weigh_chosen
from epcomm.routing.spec import CorrectionBias, DroppedGroups, RoutingSpec, SoftmaxOrder

# One warp holds all experts of a token in registers, 32 of them in each thread.
MAX_EXPERTS, MAX_TOP_K = 1024, 32
_NAME = "the triton gate"
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def triton_gate_lacks(device: torch.device) -> tuple[str, ...]:
    """Return the reasons why no gate kernel runs on this device; empty if one does. Local."""
    missing = tuple(triton_reasons(this_machine()))
    # torch for ROCm names its GPUs cuda too.
    if missing or device.type == "cuda":
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


class TritonGate:
    """A routing as one launch of a kernel, forward; backward follows the reference's formulas."""

    explanation = "routing by the triton gate; float64 and compiled calls by the reference"

    def __init__(self, spec: RoutingSpec, num_experts: int) -> None:
        """Keep a routing of E = num_experts experts that triton_gate_reasons() allows."""
        from epcomm.kernels.routing.gate import GateForm, route_tokens

        by_logit, drops = spec.softmax_order is SoftmaxOrder.AFTER_TOPK, spec.drops_groups
        self._spec, self._route = spec, route_tokens
        self._form = GateForm(
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

    def takes(self, logits: Tensor) -> bool:
        """Return whether the kernel can read these logits: not float64, and not in torch.compile.

        Local.   Host sync: none.
        """
        is_read = logits.dtype in _DTYPES and type(logits) in WITH_DATA
        return is_read and not torch.compiler.is_compiling()

    def __call__(
        self,
        logits: Tensor,
        *,
        correction_bias: Tensor | None,
        load: Tensor | None = None,
        replicas: ReplicaTable | None = None,
    ) -> TopKOutput:
        """Route as route() does, count the load, and choose replicas, all in one launch.

        Scores that differ by less than 4 units in the last place of float32 may change places,
        weights differ from the reference's by at most 8 units, and equal logits tie as there. Ids
        are physical; weights are float32, and differentiable once.

        load, replicas: see RouterChoice.route().

        Collective: none.   Host sync: none.   Deterministic: yes.
        Graph capture: after one call with about as many tokens.
        Lifetime: ordinary tensors, owned by the caller.
        """
        check_arguments(logits, self._spec, correction_bias)
        # Weights have no gradient with respect to a bias of the selection.
        in_score = self._spec.correction_bias is CorrectionBias.SCORE
        learns = in_score and correction_bias is not None and correction_bias.requires_grad
        needs_grad = (logits.requires_grad or learns) and torch.is_grad_enabled()

        def launch(logits: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
            logical_ids = None
            if needs_grad and replicas is not None:
                logical_ids = logits.new_empty(len(logits), self._spec.top_k, dtype=torch.int64)
            ids, weights = self._route(
                logits if logits.stride(1) == 1 else logits.contiguous(),
                bias if bias is None or bias.stride(0) == 1 else bias.contiguous(),
                self._form,
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
        spec, wants_logits, wants_bias = ctx.spec, *ctx.needs_input_grad[:2]
        in_score = spec.correction_bias is CorrectionBias.SCORE
        logits = logits.detach().requires_grad_(wants_logits)
        if bias is not None:
            bias = bias.detach().requires_grad_(wants_bias and in_score)
        with torch.enable_grad():
            # A weight of 0 belongs to a dropped expert, or its score underflows; the gradient of
            # each is 0.
            again = weigh_chosen(
                logits, spec, correction_bias=bias, topk_ids=logical_ids, is_weightless=weights == 0
            )
            again.backward(grad_weights)
        return logits.grad, None if bias is None else bias.grad, None, None
