"""One spec for each step of routing, and data without close scores."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from epcomm.routing import RoutingSpec

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


def spec_of(values: dict[str, object]) -> RoutingSpec:
    return RoutingSpec.from_mapping({"top_k": 4, **values})


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
