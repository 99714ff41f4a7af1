"""Route with the Ascend gating operator, whose flags follow from the RoutingSpec.

npu_moe_gating_top_k scores by softmax or sigmoid, selects with a bias that weights do not see,
drops groups to -inf, and always divides sigmoid weights by their sum. Other routings go to the
reference, and gating_reasons() names the step that the operator lacks. Source: the operator's
documentation.

CANN up to November 2025 refuses to renormalise softmax weights, and older versions take only 256
experts. No code here asks for the version, so such a call fails: set EPConfig.router='reference'.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from epcomm.platforms.ascend.operators import has_kernel
from epcomm.records import TopKOutput, empty_topk
from epcomm.routing.spec import (
    CorrectionBias,
    DroppedGroups,
    EpsilonMode,
    RoutingSpec,
    ScoreFunction,
    SoftmaxOrder,
)
from epcomm.spec import Availability

OPERATOR = "npu_moe_gating_top_k"
MAX_EXPERTS = 2048
# The kernel pads a group to a multiple of _GROUP_BLOCK experts and takes no smaller group than
# _MIN_GROUP_SIZE experts.
_GROUP_BLOCK, _MIN_GROUP_SIZE = 32, 3
# RoutingSpec.group_score_top_n -> the operator's group_select_mode: a group scores its largest
# score, or the sum of its two largest.
_GROUP_MODES = {1: 0, 2: 1}
# The epsilon of a sum that may be 0; too small to change any other sum.
_TINY = 1e-20


def is_gating_candidate(device: torch.device) -> bool:
    """Return whether explain() gives reasons why the operator does not route: on NPUs only."""
    return device.type == "npu"


def gating_lacks(device: torch.device) -> tuple[str, ...]:
    """Return why the operator cannot be called on this device; empty if it can. Local."""
    if has_kernel(OPERATOR, device):
        return ()
    return (f"{OPERATOR} is not on {device.type}; import torch_npu",)


def gating_availability(spec: RoutingSpec, num_experts: int, device: torch.device) -> Availability:
    """Return whether this device has the operator, and the operator this routing. Local."""
    reasons = gating_lacks(device) + gating_reasons(spec, num_experts)
    return Availability(ok=not reasons, reasons=reasons)


@dataclass(frozen=True, kw_only=True)
class GatingFlags:
    """The keyword arguments of npu_moe_gating_top_k, except for the bias."""

    k: int
    k_group: int
    group_count: int
    group_select_mode: int
    renorm: int
    norm_type: int
    routed_scaling_factor: float
    eps: float


def gating_flags(spec: RoutingSpec) -> GatingFlags:
    """Return the operator flags of a routing that gating_reasons() accepts."""
    is_sigmoid = spec.score_function is ScoreFunction.SIGMOID
    # A softmax over the selected experts is the softmax over all, divided by the selected sum.
    after = spec.softmax_order is SoftmaxOrder.AFTER_TOPK
    groups = (spec.topk_groups, spec.num_groups) if spec.drops_groups else (1, 1)
    return GatingFlags(
        k=spec.top_k,
        k_group=groups[0],
        group_count=groups[1],
        group_select_mode=_GROUP_MODES[spec.group_score_top_n] if spec.drops_groups else 0,
        renorm=int(spec.renormalize or after),
        norm_type=int(is_sigmoid),
        routed_scaling_factor=spec.routed_scaling_factor,
        eps=spec.epsilon if spec.epsilon_mode is EpsilonMode.ADDED else _TINY,
    )


def gating_reasons(spec: RoutingSpec, num_experts: int) -> tuple[str, ...]:
    """Return why the operator cannot express this routing; empty if it can. Local; pure."""
    if spec.custom_function is not None:
        return ("custom_function is another function",)
    is_sigmoid = spec.score_function is ScoreFunction.SIGMOID
    fills_zero = spec.drops_groups and spec.dropped_groups is DroppedGroups.ZERO
    group_size = num_experts // spec.num_groups if spec.drops_groups else num_experts
    blocks = -(-group_size // _GROUP_BLOCK) * (num_experts // group_size)
    faults = (
        (spec.score_function is ScoreFunction.SQRT_SOFTPLUS, "scores by softmax or sigmoid"),
        (is_sigmoid and not spec.renormalize, "always renormalises sigmoid weights"),
        (spec.softcap is not None, "has no softcap"),
        (
            spec.correction_bias is CorrectionBias.SCORE,
            "has a bias for the selection, not for the score",
        ),
        (
            spec.correction_bias is CorrectionBias.SELECTION
            and spec.softmax_order is SoftmaxOrder.AFTER_TOPK,
            "adds the bias to softmax scores, not to logits",
        ),
        (
            spec.drops_groups
            and spec.group_score_top_n > 1
            and spec.softmax_order is SoftmaxOrder.AFTER_TOPK,
            "adds up softmax scores of a group, not logits",
        ),
        (spec.epsilon_mode is EpsilonMode.CLAMP, "adds epsilon to a sum, and has no lower bound"),
        (
            spec.drops_groups and spec.group_score_top_n not in _GROUP_MODES,
            "scores groups by their best expert or their best two",
        ),
        (
            fills_zero and spec.correction_bias is CorrectionBias.SELECTION,
            "drops groups to -inf, and with a bias 0 is another choice",
        ),
        (num_experts > MAX_EXPERTS, f"takes at most {MAX_EXPERTS} experts, not {num_experts}"),
        (
            spec.drops_groups and group_size < _MIN_GROUP_SIZE,
            f"takes groups of at least {_MIN_GROUP_SIZE} experts, not {group_size}",
        ),
        (
            blocks * _GROUP_BLOCK > MAX_EXPERTS,
            f"rounds groups up to {_GROUP_BLOCK} experts, {MAX_EXPERTS} in all",
        ),
    )
    return tuple(f"{OPERATOR} {reason}" for is_fault, reason in faults if is_fault)


def call_gating(logits: Tensor, flags: GatingFlags, bias: Tensor | None) -> TopKOutput:
    """Route by the operator with flags that gating_reasons() accepts, and without gradients.

    Args:
        logits: [T, E], floating point; T = 0 is legal.
        flags: of a routing that gating_reasons() does not object to.
        bias: [E], where that has a bias.

    Returns:
        topk_ids [T, K], int64, distinct; topk_weights [T, K], float32. They equal those of route()
        up to rounding, ties included, in rows without NaN that have a logit above -inf. Where
        softmax comes after top-k, logits that softmax rounds to 0 are a tie here.

    Collective: none.   Host sync: none.   Lifetime: ordinary tensors, owned by the caller.
    """
    if not logits.shape[0]:
        # The documentation does not say that zero tokens are legal.
        return empty_topk(flags.k, logits.device)
    # The weights have the dtype of the logits, and the reference computes in float32. The result
    # for NaN is not documented, and infinities would give NaN: they are replaced by the lowest and
    # the largest float32, so that ids are valid whatever the model computed.
    finite = logits.float().nan_to_num(nan=torch.finfo(torch.float32).min)
    weights, ids, _ = torch.ops.npu.npu_moe_gating_top_k(
        finite,
        flags.k,
        bias=None if bias is None else bias.float(),
        k_group=flags.k_group,
        group_count=flags.group_count,
        group_select_mode=flags.group_select_mode,
        renorm=flags.renorm,
        norm_type=flags.norm_type,
        routed_scaling_factor=flags.routed_scaling_factor,
        eps=flags.eps,
    )
    return TopKOutput(topk_ids=ids.long(), topk_weights=weights.float())
