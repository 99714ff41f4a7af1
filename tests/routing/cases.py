"""One spec for each step of routing, and data without close scores."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from epcomm.routing import RoutingSpec, presets

SIGMOID = {"score_function": "sigmoid", "renormalize": True}
GROUPS = {"num_groups": 4, "topk_groups": 2, "group_score_top_n": 2}


SPECS = {
    name: RoutingSpec(**{"top_k": 4, **values})
    for name, values in {
        "softmax": {},
        "softmax-renormalised": {"renormalize": True},
        "softmax-after-topk": {"softmax_order": "after_topk"},
        "softmax-after-topk-bias": {"softmax_order": "after_topk", "correction_bias": "selection"},
        "softmax-after-topk-groups": {"softmax_order": "after_topk", **GROUPS},
        "softmax-bias-selection": {"correction_bias": "selection"},
        "softmax-bias-score": {"correction_bias": "score"},
        "softmax-softcap": {"softcap": 2.0},
        "softmax-softcap-bias-score": {"softcap": 1.0, "correction_bias": "score"},
        "softmax-groups-zero": {**GROUPS, "group_score_top_n": 1, "dropped_groups": "zero"},
        "sigmoid": SIGMOID,
        "sigmoid-bias-selection": {**SIGMOID, "correction_bias": "selection"},
        "sigmoid-bias-score": {**SIGMOID, "correction_bias": "score"},
        "sigmoid-groups-bias": {**SIGMOID, **GROUPS, "correction_bias": "selection"},
        "sigmoid-groups-bias-zero": {
            **SIGMOID,
            **GROUPS,
            "correction_bias": "selection",
            "dropped_groups": "zero",
        },
        "sqrt_softplus": {"score_function": "sqrt_softplus"},
        "sqrt_softplus-bias-scaled": {
            "score_function": "sqrt_softplus",
            "correction_bias": "selection",
            "renormalize": True,
            "routed_scaling_factor": 1.5,
        },
        "epsilon-added": {**SIGMOID, "epsilon_mode": "added", "epsilon": 0.25},
        "epsilon-clamp": {**SIGMOID, "epsilon_mode": "clamp", "epsilon": 2.5},
    }.items()
}
every_spec = pytest.mark.parametrize("spec", SPECS.values(), ids=[*SPECS])


deepseek_v3 = partial(presets.deepseek_v3, top_k=8, routed_scaling_factor=2.5)
lfm2_moe = partial(
    presets.lfm2_moe, top_k=4, use_correction_bias=True, renormalize=True, routed_scaling_factor=1.0
)
# Every preset, for 32 experts, and settings of checkpoints that routers treat otherwise.
PRESETS = {
    "mixtral": presets.mixtral(top_k=2),
    "qwen2_moe": presets.qwen2_moe(top_k=4, renormalize=False),
    "qwen3_moe": presets.qwen3_moe(top_k=8, renormalize=True),
    "qwen3_5_moe": presets.qwen3_5_moe(top_k=8),
    "deepseek_v2": presets.deepseek_v2(
        top_k=6, routed_scaling_factor=16.0, num_groups=8, topk_groups=3
    ),
    "gpt_oss": presets.gpt_oss(top_k=4),
    "minimax_m2": presets.minimax_m2(top_k=8),
    "afmoe": presets.afmoe(top_k=8, routed_scaling_factor=2.5),
    "deepseek_v3": deepseek_v3(num_groups=8, topk_groups=4),
    "ernie4_5_moe": presets.ernie4_5_moe(top_k=6),
    "lfm2_moe": lfm2_moe(routed_scaling_factor=1.5),
    "nemotron_h": presets.nemotron_h(
        top_k=6, num_groups=4, topk_groups=2, routed_scaling_factor=2.5
    ),
    "qwen2_moe renormalised": presets.qwen2_moe(top_k=4, renormalize=True),
    "deepseek_v2 greedy": presets.deepseek_v2(top_k=6, routed_scaling_factor=1.0),
    "deepseek_v3 without groups": deepseek_v3(num_groups=1, topk_groups=1),
    "deepseek_v3 not renormalised": deepseek_v3(num_groups=8, topk_groups=4, renormalize=False),
    "lfm2_moe without bias": lfm2_moe(use_correction_bias=False),
    "lfm2_moe not renormalised": lfm2_moe(renormalize=False),
}


def pick_spec(pick: Callable[[Sequence[Any]], Any], num_experts: int, most: int) -> RoutingSpec:
    """Return any spec for these experts, of at most `most` a token; pick: chooses an element."""
    num_groups = pick([groups for groups in (1, 2, 3, 4, 6, 8) if num_experts % groups == 0])
    topk_groups, group_size = pick(range(1, num_groups + 1)), num_experts // num_groups
    function, renormalize = pick(["softmax", "sigmoid", "sqrt_softplus"]), pick([False, True])
    epsilon_mode = pick(["none", "added", "clamp"]) if renormalize else "none"
    return RoutingSpec(
        top_k=pick(range(1, min(most, topk_groups * group_size) + 1)),
        score_function=function,
        softmax_order=pick(["before_topk", "after_topk"][: 2 if function == "softmax" else 1]),
        softcap=pick([None, None, 0.5, 3.0, 30.0]),
        correction_bias=pick(["none", "selection", "score"]),
        num_groups=num_groups,
        topk_groups=topk_groups,
        group_score_top_n=pick(range(1, min(5, group_size) + 1)),
        dropped_groups=pick(["neg_inf", "zero"]),
        renormalize=renormalize,
        epsilon_mode=epsilon_mode,
        epsilon=0.0 if epsilon_mode == "none" else pick([1e-20, 1e-12, 1e-6, 0.25]),
        routed_scaling_factor=pick([1.0, 2.5]),
    )


def spread_logits(num_tokens: int, num_experts: int) -> Tensor:
    """Make logits [T, E], float32: each row shuffles the same E values, about 1/4 apart."""
    steps = torch.arange(num_experts)
    values = (steps - num_experts // 2) / 4 + torch.sin(steps) / 16
    generator = torch.Generator().manual_seed(1)
    shuffles = [torch.randperm(num_experts, generator=generator) for _ in range(num_tokens)]
    return values[torch.stack(shuffles)]


def random_bias(num_experts: int) -> Tensor:
    return torch.randn(num_experts, generator=torch.Generator().manual_seed(2)) / 4


def bias_for(spec: RoutingSpec, num_experts: int) -> Tensor | None:
    return None if spec.correction_bias == "none" else random_bias(num_experts)
