"""One spec for each step of routing, and data without close scores."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from epcomm.routing import RoutingSpec, presets

SIGMOID = {"score_function": "sigmoid", "renormalize": True}
GROUPS = {"num_groups": 4, "topk_groups": 2, "group_score_top_n": 2}


@dataclass(frozen=True, kw_only=True)
class Case:
    id: str
    values: dict[str, object]


CASES = [
    Case(id="softmax", values={}),
    Case(id="softmax-renormalised", values={"renormalize": True}),
    Case(id="softmax-after-topk", values={"softmax_order": "after_topk"}),
    Case(
        id="softmax-after-topk-bias",
        values={"softmax_order": "after_topk", "correction_bias": "selection"},
    ),
    Case(id="softmax-after-topk-groups", values={"softmax_order": "after_topk", **GROUPS}),
    Case(id="softmax-bias-selection", values={"correction_bias": "selection"}),
    Case(id="softmax-bias-score", values={"correction_bias": "score"}),
    Case(id="softmax-softcap", values={"softcap": 2.0}),
    Case(id="softmax-softcap-bias-score", values={"softcap": 1.0, "correction_bias": "score"}),
    Case(
        id="softmax-groups-zero",
        values={**GROUPS, "group_score_top_n": 1, "dropped_groups": "zero"},
    ),
    Case(id="sigmoid", values=SIGMOID),
    Case(id="sigmoid-bias-selection", values={**SIGMOID, "correction_bias": "selection"}),
    Case(id="sigmoid-bias-score", values={**SIGMOID, "correction_bias": "score"}),
    Case(id="sigmoid-groups-bias", values={**SIGMOID, **GROUPS, "correction_bias": "selection"}),
    Case(
        id="sigmoid-groups-bias-zero",
        values={**SIGMOID, **GROUPS, "correction_bias": "selection", "dropped_groups": "zero"},
    ),
    Case(id="sqrt_softplus", values={"score_function": "sqrt_softplus"}),
    Case(
        id="sqrt_softplus-bias-scaled",
        values={
            "score_function": "sqrt_softplus",
            "correction_bias": "selection",
            "renormalize": True,
            "routed_scaling_factor": 1.5,
        },
    ),
    Case(id="epsilon-added", values={**SIGMOID, "epsilon_mode": "added", "epsilon": 0.25}),
    Case(id="epsilon-clamp", values={**SIGMOID, "epsilon_mode": "clamp", "epsilon": 2.5}),
]


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
    "deepseek_v3": presets.deepseek_v3(
        top_k=8, num_groups=8, topk_groups=4, routed_scaling_factor=2.5
    ),
    "ernie4_5_moe": presets.ernie4_5_moe(top_k=6),
    "lfm2_moe": presets.lfm2_moe(
        top_k=4, use_correction_bias=True, renormalize=True, routed_scaling_factor=1.5
    ),
    "nemotron_h": presets.nemotron_h(
        top_k=6, num_groups=4, topk_groups=2, routed_scaling_factor=2.5
    ),
    "qwen2_moe renormalised": presets.qwen2_moe(top_k=4, renormalize=True),
    "deepseek_v2 greedy": presets.deepseek_v2(top_k=6, routed_scaling_factor=1.0),
    "deepseek_v3 without groups": presets.deepseek_v3(
        top_k=8, num_groups=1, topk_groups=1, routed_scaling_factor=2.5
    ),
    "deepseek_v3 not renormalised": presets.deepseek_v3(
        top_k=8, num_groups=8, topk_groups=4, routed_scaling_factor=2.5, renormalize=False
    ),
    "lfm2_moe without bias": presets.lfm2_moe(
        top_k=4, use_correction_bias=False, renormalize=True, routed_scaling_factor=1.0
    ),
    "lfm2_moe not renormalised": presets.lfm2_moe(
        top_k=4, use_correction_bias=True, renormalize=False, routed_scaling_factor=1.0
    ),
}


def spec_of(values: dict[str, object]) -> RoutingSpec:
    return RoutingSpec(**{"top_k": 4, **values})


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
