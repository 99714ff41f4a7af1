"""Imitate gating: router logits to experts and weights.

Source: the operator's documentation. The result of a row with a NaN score is undocumented, so it
    is poisoned.
"""

import math

import torch
from torch import Tensor

from fakes.ascend.limits import require, require_modelled, require_size
from fakes.ascend.registry import implements
from fakes.ascend.undefined import UNDEFINED_INT, undefined

GATING = "npu_moe_gating_top_k"
FLOATS = (torch.float16, torch.bfloat16, torch.float32)

# Limit of the scores of a row in the kernel's memory, with groups rounded up to blocks of 32.
MAX_EXPERTS = 2048
GROUP_BLOCK = 32
# The smallest group that the documentation allows.
MIN_GROUP_SIZE = 3


@implements(GATING, "CPU", "Meta")
def moe_gating_top_k(
    x: Tensor,
    k: int,
    *,
    bias: Tensor | None = None,
    input_ids: Tensor | None = None,
    tid2eid: Tensor | None = None,
    k_group: int = 1,
    group_count: int = 1,
    group_select_mode: int = 0,
    renorm: int = 0,
    norm_type: int = 0,
    out_flag: bool = False,
    routed_scaling_factor: float = 1.0,
    eps: float = 1e-20,
) -> tuple[Tensor, Tensor, Tensor]:
    """Normalise the logits, and return the best experts of the best groups, with their weights.

    The bias acts on the selection only. Of equal scores the lower id wins, for groups and experts.
    Sigmoid weights are renormalised for any `renorm`.

    Args:
        x: [n, E], float16, bfloat16 or float32.
        k: experts a token.
        bias: [E], dtype of x.
        input_ids: not modelled.
        tid2eid: not modelled.
        k_group: groups a token may use.
        group_count: equal groups of neighbouring experts.
        group_select_mode: a group scores 0: its largest, 1: the sum of its two largest.
        renorm: 1: softmax weights are divided by their sum + eps.
        norm_type: 0 softmax, 1 sigmoid.
        out_flag: whether the norm is returned.
        routed_scaling_factor: multiplies the weights at the end.
        eps: added to the sum.

    Returns:
        weights [n, k], dtype of x; ids [n, k], int32; norm [n, E], float32, unwritten without
        out_flag.
    """
    require_modelled(GATING, input_ids is None and tid2eid is None, "routing by token ids")
    rule = f"x is {list(x.shape)} {x.dtype}, expected [n, E] float16, bfloat16 or float32"
    require(GATING, x.dim() == 2 and x.dtype in FLOATS, rule)
    if bias is not None:
        rule = f"bias is {list(bias.shape)} {bias.dtype}, expected [{x.shape[1]}] {x.dtype}, as x"
        require(GATING, bias.dtype == x.dtype and bias.shape == x.shape[1:], rule)
    choices = {"group_select_mode": group_select_mode, "renorm": renorm, "norm_type": norm_type}
    for name, value in choices.items():
        require(GATING, value in (0, 1), f"{name} is {value}, expected 0 or 1")
    _check_groups(x.shape[1], k, k_group, group_count, group_select_mode)
    norm = x.float().sigmoid() if norm_type == 1 else x.float().softmax(dim=-1)
    scores = norm if bias is None else norm + bias.float()
    if k_group < group_count:
        scores = _without_other_groups(scores, k_group, group_count, group_select_mode)
    ids = _ranking(scores)[:, :k]
    weights = norm.gather(1, ids)
    if norm_type == 1 or renorm == 1:
        weights = weights / (weights.sum(dim=-1, keepdim=True) + eps)
    weights = weights * routed_scaling_factor
    is_undefined = scores.isnan().any(dim=-1, keepdim=True)
    return (
        weights.masked_fill(is_undefined, math.nan).to(x.dtype),
        ids.int().masked_fill(is_undefined, UNDEFINED_INT),
        norm if out_flag else undefined(x.shape, torch.float32, x.device),
    )


def _without_other_groups(scores: Tensor, k_group: int, group_count: int, mode: int) -> Tensor:
    """Return scores [n, E] with -inf outside of the k_group best groups of a row."""
    grouped = scores.unflatten(1, (group_count, -1))
    # Mode 0 sums one value: the largest.
    group_scores = grouped.topk(mode + 1, dim=-1).values.sum(dim=-1)
    kept = _ranking(group_scores)[:, :k_group]
    is_kept = torch.zeros_like(group_scores, dtype=torch.bool).scatter(1, kept, True)
    # A group with NaN ranks first, so that the row is still detected as undefined.
    return grouped.masked_fill(~is_kept.unsqueeze(2), -math.inf).flatten(1)


def _ranking(scores: Tensor) -> Tensor:
    """Return indices by falling score, equal ones by rising index."""
    return scores.sort(dim=-1, descending=True, stable=True).indices


def _check_groups(num_experts: int, k: int, k_group: int, group_count: int, mode: int) -> None:
    rule = f"group_count is {group_count}, expected a divisor of {num_experts}, the experts"
    require(GATING, group_count >= 1 and num_experts % group_count == 0, rule)
    group_size = num_experts // group_count
    rule = f"k_group is {k_group}, expected 1 to {group_count}, group_count"
    require(GATING, 1 <= k_group <= group_count, rule)
    rule = f"k is {k}, expected 1 to {k_group * group_size}, the experts of {k_group} groups"
    require(GATING, 1 <= k <= k_group * group_size, rule)
    rule = f"group_select_mode is {mode}, expected 0 for groups of {group_size} expert"
    require(GATING, group_size > mode, rule)
    rule = f"x has {num_experts} experts, expected {MAX_EXPERTS} at most"
    require_size(GATING, num_experts <= MAX_EXPERTS, rule)
    rule = f"groups have {group_size} experts, expected {MIN_GROUP_SIZE} at least"
    require_size(GATING, group_size >= MIN_GROUP_SIZE, rule)
    padded = math.ceil(group_size / GROUP_BLOCK) * GROUP_BLOCK * group_count
    require_size(
        GATING,
        padded <= MAX_EXPERTS,
        f"{group_count} groups of {group_size} take {padded} places in blocks of {GROUP_BLOCK}, "
        f"expected {MAX_EXPERTS} at most",
    )
