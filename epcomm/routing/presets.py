"""Define the RoutingSpec of named model families.

A function sets what is the same in its family; its parameters, which are fields of RoutingSpec,
differ between checkpoints.
Source: the router of the same name in transformers 5.23; the tests compare against it.
"""

from epcomm.routing.spec import (
    CorrectionBias,
    DroppedGroups,
    EpsilonMode,
    RoutingSpec,
    ScoreFunction,
    SoftmaxOrder,
)


def mixtral(*, top_k: int) -> RoutingSpec:
    """Score by softmax, then take the top k and renormalise without epsilon."""
    return RoutingSpec(top_k=top_k, renormalize=True)


def qwen2_moe(*, top_k: int, renormalize: bool) -> RoutingSpec:
    """Score by softmax, then take the top k; checkpoints differ in renormalisation."""
    return RoutingSpec(top_k=top_k, renormalize=renormalize)


def deepseek_v2(
    *, top_k: int, routed_scaling_factor: float, num_groups: int = 1, topk_groups: int = 1
) -> RoutingSpec:
    """Score by softmax, rank groups by their maximum, fill dropped groups with 0.0, and scale."""
    return RoutingSpec(
        top_k=top_k,
        num_groups=num_groups,
        topk_groups=topk_groups,
        dropped_groups=DroppedGroups.ZERO,
        routed_scaling_factor=routed_scaling_factor,
    )


def deepseek_v3(
    *,
    top_k: int,
    num_groups: int,
    topk_groups: int,
    routed_scaling_factor: float,
    renormalize: bool = True,
) -> RoutingSpec:
    """Score by sigmoid, select with a bias, rank groups by their top 2, renormalise and scale.

    The epsilon of renormalisation is 1e-20.
    """
    return RoutingSpec(
        top_k=top_k,
        score_function=ScoreFunction.SIGMOID,
        correction_bias=CorrectionBias.SELECTION,
        num_groups=num_groups,
        topk_groups=topk_groups,
        group_score_top_n=2,
        renormalize=renormalize,
        epsilon_mode=EpsilonMode.ADDED if renormalize else EpsilonMode.NONE,
        epsilon=1e-20 if renormalize else 0.0,
        routed_scaling_factor=routed_scaling_factor,
    )


def afmoe(*, top_k: int, routed_scaling_factor: float) -> RoutingSpec:
    """Score by sigmoid, select with a bias, renormalise with epsilon 1e-20, and scale."""
    return deepseek_v3(
        top_k=top_k, num_groups=1, topk_groups=1, routed_scaling_factor=routed_scaling_factor
    )


def minimax_m2(*, top_k: int) -> RoutingSpec:
    """Score by sigmoid, select with a bias, and renormalise without epsilon."""
    return RoutingSpec(
        top_k=top_k,
        score_function=ScoreFunction.SIGMOID,
        correction_bias=CorrectionBias.SELECTION,
        renormalize=True,
    )


def gpt_oss(*, top_k: int) -> RoutingSpec:
    """Take the top k of the logits, then score the selected ones by softmax."""
    return RoutingSpec(top_k=top_k, softmax_order=SoftmaxOrder.AFTER_TOPK)


def ernie4_5_moe(*, top_k: int, epsilon: float = 1e-12) -> RoutingSpec:
    """Score by softmax, select with a bias, and renormalise by max(sum, epsilon)."""
    return RoutingSpec(
        top_k=top_k,
        correction_bias=CorrectionBias.SELECTION,
        renormalize=True,
        epsilon_mode=EpsilonMode.CLAMP,
        epsilon=epsilon,
    )


def lfm2_moe(
    *, top_k: int, use_correction_bias: bool, renormalize: bool, routed_scaling_factor: float
) -> RoutingSpec:
    """Score by sigmoid, select with a bias in some checkpoints, renormalise and scale.

    The epsilon of renormalisation is 1e-6.
    """
    return RoutingSpec(
        top_k=top_k,
        score_function=ScoreFunction.SIGMOID,
        correction_bias=CorrectionBias.SELECTION if use_correction_bias else CorrectionBias.NONE,
        renormalize=renormalize,
        epsilon_mode=EpsilonMode.ADDED if renormalize else EpsilonMode.NONE,
        epsilon=1e-6 if renormalize else 0.0,
        routed_scaling_factor=routed_scaling_factor,
    )


# Families that route in the same manner as another family.
qwen3_moe = qwen2_moe
qwen3_5_moe = mixtral
nemotron_h = deepseek_v3
