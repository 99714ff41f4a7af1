"""Propose presets that may describe a router, by the router's attributes.

Several presets can have the same attributes (softmax before or after top-k, sigmoid): these are
candidates, and probing.py tries each on the router itself. A router with an attribute that is in no
recipe has no candidate; then the router itself chooses, whatever it computes.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial

from torch import nn

from epcomm.blocks import chosen_by_router
from epcomm.errors import ConfigError
from epcomm.integrations.transformers.structure import router_settings
from epcomm.routing import RoutingSpec, ScoreFunction, presets


@dataclass(frozen=True)
class RouterRecipe:
    """A preset, and the attributes of routers that it may describe.

    preset: makes the RoutingSpec from top_k and the attributes that `settings` names.
    settings: keyword of the preset -> attribute of the router. The router has no other attributes
        than these and before_logits.
    before_logits: attributes that act before the logits that the router returns.
    has_bias: the router has a correction bias.
    """

    preset: Callable[..., RoutingSpec]
    settings: Mapping[str, str] = field(default_factory=dict)
    before_logits: frozenset[str] = frozenset()
    has_bias: bool = False


def routing_candidates(router: nn.Module, *, top_k: int, has_bias: bool) -> Iterator[RoutingSpec]:
    """Yield the routings to try, the router's own choice last."""
    settings = router_settings(router)
    for recipe in _RECIPES:
        names = {*recipe.settings.values(), *recipe.before_logits}
        if names != set(settings) or recipe.has_bias != has_bias:
            continue
        # A preset is no candidate if it cannot hold the values, such as a number of groups of None.
        with suppress(ConfigError):
            values = {keyword: settings[name] for keyword, name in recipe.settings.items()}
            yield recipe.preset(top_k=top_k, **values)
    yield RoutingSpec(top_k=top_k, custom_function=chosen_by_router)


def _deepseek_v2(
    *, top_k: int, routed_scaling_factor: float, method: str, num_groups: int, topk_groups: int
) -> RoutingSpec:
    """Return the preset of DeepSeek-V2, which uses groups only under group_limited_greedy.

    Under greedy, num_groups and topk_groups may be None.
    """
    of_method = {
        "greedy": {},
        "group_limited_greedy": {"num_groups": num_groups, "topk_groups": topk_groups},
    }
    return presets.deepseek_v2(
        top_k=top_k, routed_scaling_factor=routed_scaling_factor, **of_method.get(method, {})
    )


def _sigmoid(*, top_k: int, renormalize: bool) -> RoutingSpec:
    return RoutingSpec(top_k=top_k, score_function=ScoreFunction.SIGMOID, renormalize=renormalize)


def _cohere2(*, top_k: int, function: str, renormalize: bool) -> RoutingSpec:
    if function == "sigmoid":
        return _sigmoid(top_k=top_k, renormalize=renormalize)
    return presets.gpt_oss(top_k=top_k)


def _deepseek_v4(
    *, top_k: int, routed_scaling_factor: float, score_fn: object, function: ScoreFunction
) -> RoutingSpec:
    """Return the preset afmoe with score `function`; the probe finds out which score_fn is."""
    spec = presets.afmoe(top_k=top_k, routed_scaling_factor=routed_scaling_factor)
    return replace(spec, score_function=function)


_RENORM = {"renormalize": "norm_topk_prob"}
_SCALE = {"routed_scaling_factor": "routed_scaling_factor"}
_GROUPS = {"num_groups": "num_group", "topk_groups": "topk_group"}

_RECIPES = (
    RouterRecipe(presets.mixtral),
    RouterRecipe(partial(presets.qwen2_moe, renormalize=False)),
    RouterRecipe(presets.gpt_oss),
    RouterRecipe(presets.qwen2_moe, _RENORM),
    RouterRecipe(_sigmoid, _RENORM),
    RouterRecipe(_cohere2, _RENORM | {"function": "expert_selection_fn"}),
    RouterRecipe(_deepseek_v2, _GROUPS | _SCALE | {"method": "topk_method"}),
    RouterRecipe(presets.deepseek_v3, _GROUPS | _SCALE | _RENORM, has_bias=True),
    RouterRecipe(
        partial(presets.deepseek_v3, routed_scaling_factor=1.0), _GROUPS | _RENORM, has_bias=True
    ),
    RouterRecipe(presets.afmoe, {"routed_scaling_factor": "route_scale"}, has_bias=True),
    RouterRecipe(presets.afmoe, {"routed_scaling_factor": "router_scaling_factor"}, has_bias=True),
    *(
        RouterRecipe(
            partial(_deepseek_v4, function=function),
            _SCALE | {"score_fn": "score_fn"},
            has_bias=True,
        )
        for function in (ScoreFunction.SQRT_SOFTPLUS, ScoreFunction.SIGMOID)
    ),
    RouterRecipe(presets.minimax_m2, has_bias=True),
    RouterRecipe(
        presets.minimax_m2, before_logits=frozenset({"router_logit_softcapping"}), has_bias=True
    ),
    RouterRecipe(presets.ernie4_5_moe, {"epsilon": "norm_min"}, has_bias=True),
    *(
        RouterRecipe(
            partial(presets.lfm2_moe, use_correction_bias=has_bias),
            _RENORM | _SCALE,
            has_bias=has_bias,
        )
        for has_bias in (True, False)
    ),
)
