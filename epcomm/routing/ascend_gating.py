"""Route with the Ascend gating operator, whose flags follow from the RoutingSpec.

npu_moe_gating_top_k scores by softmax or sigmoid, selects with a bias that weights do not see,
drops groups to -inf, and always divides sigmoid weights by their sum. Other routings go to the
reference, and gating_reasons() names the step that the operator lacks. Source: the operator's
documentation.

CANN up to November 2025 refuses to renormalise softmax weights, and older versions take only 256
experts. No code here asks for the version, so such a call fails: set EPConfig.router='reference'.
"""

import torch
from torch import Tensor

from epcomm.platforms.ascend.operators import has_kernel
from epcomm.records import TopKOutput, empty_topk
from epcomm.routing.reference import check_arguments
from epcomm.routing.spec import (
    CorrectionBias,
    DroppedGroups,
    EpsilonMode,
    RoutingSpec,
    ScoreFunction,
    SoftmaxOrder,
)

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


def gating_lacks(device: torch.device) -> tuple[str, ...]:
    """Return why the operator cannot be called on this device; empty if it can. Local."""
    if has_kernel(OPERATOR, device):
        return ()
    return (f"{OPERATOR} is not on {device.type}; import torch_npu",)


def gating_reasons(spec: RoutingSpec, num_experts: int) -> tuple[str, ...]:
    """Return why the operator cannot express this routing; empty if it can. Local; pure."""
    if spec.custom_function is not None:
        return ("custom_function is another function",)
    is_sigmoid = spec.score_function is ScoreFunction.SIGMOID
    selects = spec.correction_bias is CorrectionBias.SELECTION
    ranks_logits = spec.softmax_order is SoftmaxOrder.AFTER_TOPK
    drops, top_n = spec.drops_groups, spec.group_score_top_n
    fills_zero = drops and spec.dropped_groups is DroppedGroups.ZERO
    group_size = num_experts // spec.num_groups if drops else num_experts
    blocks = -(-group_size // _GROUP_BLOCK) * (num_experts // group_size)
    in_score = spec.correction_bias is CorrectionBias.SCORE
    faults = (
        (spec.score_function is ScoreFunction.SQRT_SOFTPLUS, "scores by softmax or sigmoid"),
        (is_sigmoid and not spec.renormalize, "always renormalises sigmoid weights"),
        (spec.softcap is not None, "has no softcap"),
        (in_score, "has a bias for the selection, not for the score"),
        (selects and ranks_logits, "adds the bias to softmax scores, not to logits"),
        (drops and top_n > 1 and ranks_logits, "adds up softmax scores of a group, not logits"),
        (spec.epsilon_mode is EpsilonMode.CLAMP, "adds epsilon to a sum, and has no lower bound"),
        (drops and top_n not in _GROUP_MODES, "scores groups by their best one or two experts"),
        (fills_zero and selects, "drops groups to -inf, and with a bias 0 is another choice"),
        (num_experts > MAX_EXPERTS, f"takes at most {MAX_EXPERTS} experts, not {num_experts}"),
        (
            drops and group_size < _MIN_GROUP_SIZE,
            f"takes groups of at least {_MIN_GROUP_SIZE} experts, not {group_size}",
        ),
        (
            blocks * _GROUP_BLOCK > MAX_EXPERTS,
            f"rounds groups up to {_GROUP_BLOCK} experts, {MAX_EXPERTS} in all",
        ),
    )
    return tuple(f"{OPERATOR} {reason}" for is_fault, reason in faults if is_fault)


class AscendGate:
    """A routing as one call of the operator, without gradients."""

    explanation = f"routing by {OPERATOR}, with gradients by the reference"

    def __init__(self, spec: RoutingSpec) -> None:
        """Keep a routing that gating_reasons() allows."""
        self._spec = spec
        # A softmax over the selected experts is the softmax over all, divided by the selected sum.
        after, drops = spec.softmax_order is SoftmaxOrder.AFTER_TOPK, spec.drops_groups
        self._flags: dict[str, int | float] = {
            "k": spec.top_k,
            "k_group": spec.topk_groups if drops else 1,
            "group_count": spec.num_groups if drops else 1,
            "group_select_mode": _GROUP_MODES[spec.group_score_top_n] if drops else 0,
            "renorm": int(spec.renormalize or after),
            "norm_type": int(spec.score_function is ScoreFunction.SIGMOID),
            "routed_scaling_factor": spec.routed_scaling_factor,
            "eps": spec.epsilon if spec.epsilon_mode is EpsilonMode.ADDED else _TINY,
        }

    def takes(self, logits: Tensor, bias: Tensor | None) -> bool:
        """Return whether the weights need no gradients. Local."""
        needed = logits.requires_grad or (bias is not None and bias.requires_grad)
        return not (needed and torch.is_grad_enabled())

    def __call__(self, logits: Tensor, bias: Tensor | None) -> TopKOutput:
        """Route as route() does.

        Ids and weights equal those of route() up to rounding, ties included, in rows without NaN
        that have a logit above -inf. Where softmax comes after top-k, logits that softmax rounds to
        0 are a tie here.

        Collective: none.   Host sync: none.   Lifetime: ordinary tensors, owned by the caller.
        """
        check_arguments(logits, self._spec, bias)
        if not logits.shape[0]:
            # The documentation does not say that zero tokens are legal.
            return empty_topk(self._spec.top_k, logits.device)
        # The weights come in the dtype of the logits, and the reference computes in float32. The
        # result for NaN is not documented, and infinities would give NaN: they are replaced by the
        # lowest and the largest float32, so that ids are valid whatever the model computed.
        finite = logits.float().nan_to_num(nan=torch.finfo(torch.float32).min)
        weights, ids, _ = torch.ops.npu.npu_moe_gating_top_k(
            finite, bias=None if bias is None else bias.float(), **self._flags
        )
        return TopKOutput(topk_ids=ids.long(), topk_weights=weights.float())
