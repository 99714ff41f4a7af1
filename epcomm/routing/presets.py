"""Give the RoutingSpec of named model families, or read one from a transformers configuration.

Each function states what is fixed in its family and asks for what differs between checkpoints; the
parameters are the fields of RoutingSpec with that name.
Source: the router of the same name in transformers 5.23; the tests compare against it.
"""

from __future__ import annotations

from collections.abc import Callable

from epcomm.errors import ConfigError
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


def qwen3_moe(*, top_k: int, renormalize: bool) -> RoutingSpec:
    """Return the routing of qwen2_moe()."""
    return qwen2_moe(top_k=top_k, renormalize=renormalize)


def qwen3_5_moe(*, top_k: int) -> RoutingSpec:
    """Return the routing of mixtral()."""
    return mixtral(top_k=top_k)


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
    return RoutingSpec(
        top_k=top_k,
        score_function=ScoreFunction.SIGMOID,
        correction_bias=CorrectionBias.SELECTION,
        renormalize=True,
        epsilon_mode=EpsilonMode.ADDED,
        epsilon=1e-20,
        routed_scaling_factor=routed_scaling_factor,
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


def nemotron_h(
    *,
    top_k: int,
    num_groups: int,
    topk_groups: int,
    routed_scaling_factor: float,
    renormalize: bool = True,
) -> RoutingSpec:
    """Return the routing of deepseek_v3()."""
    return deepseek_v3(
        top_k=top_k,
        num_groups=num_groups,
        topk_groups=topk_groups,
        routed_scaling_factor=routed_scaling_factor,
        renormalize=renormalize,
    )


def from_transformers_config(config: object, *, model_type: str | None = None) -> RoutingSpec:
    """Read the routing of a model from its transformers configuration.

    Args:
        config: any object with the attributes of the family; a multimodal one holds a text_config.
        model_type: a family of this file, for a configuration whose own model_type is unknown
            here while its router is the same; None: config.model_type.

    Raises:
        ConfigError: an unknown model_type (the message lists the known ones), a missing attribute,
            or a value that no RoutingSpec can hold.
    """
    config = getattr(config, "text_config", config)
    if model_type is None:
        model_type = str(_read(config, "model_type")).removesuffix("_text")
    if model_type not in _FAMILIES:
        raise ConfigError(
            f"from_transformers_config: model_type is {model_type!r}, expected one of "
            f"{sorted(_FAMILIES)}; pass model_type= of a family with the same router, or build a "
            "RoutingSpec"
        )
    preset, attributes = _FAMILIES[model_type]
    if model_type == "deepseek_v2":
        attributes = attributes | _deepseek_v2_groups(config)
    values = {keyword: _read(config, attribute) for keyword, attribute in attributes.items()}
    return preset(top_k=_read(config, "num_experts_per_tok"), **values)


# Keyword of the preset -> attribute of the configuration.
_RENORMALIZE = {"renormalize": "norm_topk_prob"}
_SCALE = {"routed_scaling_factor": "routed_scaling_factor"}
_GROUPS = {"num_groups": "n_group", "topk_groups": "topk_group"}

_FAMILIES: dict[str, tuple[Callable[..., RoutingSpec], dict[str, str]]] = {
    "mixtral": (mixtral, {}),
    "qwen2_moe": (qwen2_moe, _RENORMALIZE),
    "qwen3_moe": (qwen3_moe, _RENORMALIZE),
    "qwen3_5_moe": (qwen3_5_moe, {}),
    "deepseek_v2": (deepseek_v2, _SCALE),
    "deepseek_v3": (deepseek_v3, _GROUPS | _SCALE | _RENORMALIZE),
    "afmoe": (afmoe, {"routed_scaling_factor": "route_scale"}),
    "minimax_m2": (minimax_m2, {}),
    "gpt_oss": (gpt_oss, {}),
    "ernie4_5_moe": (ernie4_5_moe, {"epsilon": "moe_norm_min"}),
    "lfm2_moe": (lfm2_moe, {"use_correction_bias": "use_expert_bias"} | _RENORMALIZE | _SCALE),
    "nemotron_h": (nemotron_h, _GROUPS | _SCALE | _RENORMALIZE),
}


def _deepseek_v2_groups(config: object) -> dict[str, str]:
    method = _read(config, "topk_method")
    if method == "greedy":
        return {}
    if method == "group_limited_greedy":
        return _GROUPS
    raise ConfigError(
        f"from_transformers_config: topk_method is {method!r}, expected 'greedy' or "
        "'group_limited_greedy'; build a RoutingSpec"
    )


def _read(config: object, attribute: str) -> object:
    try:
        return getattr(config, attribute)
    except AttributeError:
        raise ConfigError(
            f"from_transformers_config: {type(config).__name__} has no {attribute}, expected a "
            "configuration of the family; build a RoutingSpec"
        ) from None
