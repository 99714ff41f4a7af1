from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from operator import attrgetter

import pytest
import torch
from torch import Tensor, nn

from epcomm.routing import RoutingSpec, presets, route
from tests.cases.blocks import GROUPED, KINDS, SIZES
from tests.routing.oracle import route_rows

NUM_TOKENS, HIDDEN, NUM_EXPERTS = 96, 32, 16
# Both sides compute in float32: softmax, sum and division round in another order.
FLOAT32_RTOL = 2e-6
# One rounding to bfloat16, which keeps 8 significant bits.
BF16_ROUNDING = 2**-8
# Lfm2 computes in the dtype of its input; half a unit in the last place of a score below 1.
LFM2_SCORE_ERROR = 2**-9


@dataclass(frozen=True)
class Family:
    """A block of tests/cases/blocks.py, its configuration, and the preset of its router.

    bias: where the block keeps its correction bias.
    bf16_roundings: roundings between logits and weights when the block is in bfloat16.
    bf16_gap: selection scores closer than this may change places there.
    """

    model_type: str
    values: Mapping[str, object]
    spec: RoutingSpec
    _: KW_ONLY
    router: str = "gate"
    bias: str | None = None
    bf16_roundings: int = 0
    bf16_gap: float = 1e-6
    id: str = ""


SHAPE = {"hidden_size": HIDDEN, "num_experts_per_tok": 4}
EXPERTS = {"num_experts": NUM_EXPERTS}
LOCAL_EXPERTS = {"num_local_experts": NUM_EXPERTS}
ROUTED_EXPERTS = {"n_routed_experts": NUM_EXPERTS}

FAMILIES = [
    Family("mixtral", LOCAL_EXPERTS, presets.mixtral(top_k=4)),
    Family(
        "qwen2_moe",
        {**EXPERTS, "norm_topk_prob": False},
        presets.qwen2_moe(top_k=4, renormalize=False),
        bf16_roundings=1,
    ),
    Family(
        "qwen2_moe",
        {**EXPERTS, "norm_topk_prob": True},
        presets.qwen2_moe(top_k=4, renormalize=True),
        bf16_roundings=1,
        id="qwen2_moe-renormalised",
    ),
    Family(
        "qwen3_moe",
        {**EXPERTS, "norm_topk_prob": True},
        presets.qwen3_moe(top_k=4, renormalize=True),
        bf16_roundings=1,
    ),
    Family("qwen3_5_moe", EXPERTS, presets.qwen3_5_moe(top_k=4), bf16_roundings=1),
    Family(
        "deepseek_v2",
        {**ROUTED_EXPERTS, **GROUPED, "topk_method": "group_limited_greedy"},
        presets.deepseek_v2(top_k=4, num_groups=4, topk_groups=2, routed_scaling_factor=2.5),
    ),
    Family(
        "deepseek_v2",
        {**ROUTED_EXPERTS, "topk_method": "greedy", "routed_scaling_factor": 1.0},
        presets.deepseek_v2(top_k=4, routed_scaling_factor=1.0),
        id="deepseek_v2-greedy",
    ),
    Family(
        "deepseek_v3",
        {**ROUTED_EXPERTS, **GROUPED},
        presets.deepseek_v3(top_k=4, num_groups=4, topk_groups=2, routed_scaling_factor=2.5),
        bias="gate.e_score_correction_bias",
    ),
    Family(
        "deepseek_v3",
        {**ROUTED_EXPERTS, **GROUPED, "norm_topk_prob": False},
        presets.deepseek_v3(
            top_k=4, num_groups=4, topk_groups=2, routed_scaling_factor=2.5, renormalize=False
        ),
        bias="gate.e_score_correction_bias",
        id="deepseek_v3-not-renormalised",
    ),
    Family(
        "afmoe",
        {**EXPERTS, "route_scale": 1.5},
        presets.afmoe(top_k=4, routed_scaling_factor=1.5),
        router="router",
        bias="expert_bias",
    ),
    Family(
        "minimax_m2", LOCAL_EXPERTS, presets.minimax_m2(top_k=4), bias="e_score_correction_bias"
    ),
    Family("gpt_oss", LOCAL_EXPERTS, presets.gpt_oss(top_k=4), router="router", bf16_roundings=1),
    Family(
        "ernie4_5_moe",
        {"moe_num_experts": NUM_EXPERTS, "moe_norm_min": 0.5},
        presets.ernie4_5_moe(top_k=4, epsilon=0.5),
        bias="gate.moe_statics.e_score_correction_bias",
        bf16_roundings=1,
    ),
    Family(
        "lfm2_moe",
        {**EXPERTS, "routed_scaling_factor": 1.5},
        presets.lfm2_moe(
            top_k=4, use_correction_bias=True, renormalize=True, routed_scaling_factor=1.5
        ),
        bias="expert_bias",
        # Score, the sum of such scores, its rounding, + epsilon, quotient, scaled weight.
        bf16_roundings=6,
        bf16_gap=2 * LFM2_SCORE_ERROR,
    ),
    Family(
        "lfm2_moe",
        {**EXPERTS, "use_expert_bias": False, "norm_topk_prob": False},
        presets.lfm2_moe(
            top_k=4, use_correction_bias=False, renormalize=False, routed_scaling_factor=1.0
        ),
        bf16_roundings=2,
        bf16_gap=2 * LFM2_SCORE_ERROR,
        id="lfm2_moe-plain",
    ),
    Family(
        "nemotron_h",
        {**ROUTED_EXPERTS, **GROUPED},
        presets.nemotron_h(top_k=4, num_groups=4, topk_groups=2, routed_scaling_factor=2.5),
        bias="gate.e_score_correction_bias",
    ),
]


def name_of(family: Family) -> str:
    return family.id or family.model_type


every_family = pytest.mark.parametrize("family", FAMILIES, ids=name_of)


class RecordedExperts(nn.Module):
    """Replaces the experts of a block and records the routing of their calls."""

    def forward(self, hidden_states: Tensor, topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
        self.topk_ids, self.topk_weights = topk_ids, topk_weights
        return torch.zeros_like(hidden_states)


@dataclass(frozen=True, kw_only=True)
class Routed:
    """The routing of a block: logits [T, E], its bias [E] and the weights on [T, E]."""

    logits: Tensor
    bias: Tensor | None
    dense: Tensor


def run_block(family: Family, dtype: torch.dtype) -> Routed:
    torch.manual_seed(0)
    kind = next(kind for kind in KINDS if kind.model_type == family.model_type)
    block = kind.build({**SIZES, **SHAPE, **family.values}).to(dtype)
    block.experts = experts = RecordedExperts()
    for parameter in block.parameters():
        # 1/4: logits of a few units, so that no score saturates.
        nn.init.normal_(parameter, std=0.25)
    bias = attrgetter(family.bias)(block) if family.bias else None
    if bias is not None:
        bias.data = torch.randn(bias.shape) / 4
    found: list[Tensor] = []
    router: nn.Module = getattr(block, family.router)
    router.register_forward_hook(lambda module, args, output: found.append(output[0]))
    with torch.no_grad():
        block(torch.randn(1, NUM_TOKENS, HIDDEN, dtype=dtype))
    return Routed(
        logits=found[0],
        bias=None if bias is None else bias.squeeze(0),
        dense=scatter(experts.topk_ids, experts.topk_weights),
    )


def scatter(topk_ids: Tensor, topk_weights: Tensor) -> Tensor:
    return torch.zeros(NUM_TOKENS, NUM_EXPERTS).scatter(1, topk_ids, topk_weights.float())


@every_family
def test_preset_equals_the_router_of_the_block(family: Family) -> None:
    routed = run_block(family, torch.float32)
    topk = route(routed.logits, family.spec, correction_bias=routed.bias)
    dense = scatter(topk.topk_ids, topk.topk_weights)
    torch.testing.assert_close(dense, routed.dense, rtol=FLOAT32_RTOL, atol=0.0)


@pytest.mark.parametrize("family", [f for f in FAMILIES if f.bias], ids=name_of)
def test_bias_decides_in_the_comparison(family: Family) -> None:
    """Without this check a preset that ignores the bias would pass."""
    routed = run_block(family, torch.float32)
    topk = route(routed.logits, family.spec, correction_bias=torch.zeros(NUM_EXPERTS))
    assert (scatter(topk.topk_ids, topk.topk_weights) > 0).ne(routed.dense > 0).any()


@every_family
def test_preset_equals_the_router_of_the_bfloat16_block(family: Family) -> None:
    routed = run_block(family, torch.bfloat16)
    rows = route_rows(routed.logits, family.spec, routed.bias)
    # bfloat16 logits may tie, and which of two equal experts it takes transformers leaves open.
    decided = torch.tensor([row.gap > family.bf16_gap and not row.tied for row in rows])
    assert decided.float().mean() > 0.5
    topk = route(routed.logits, family.spec, correction_bias=routed.bias)
    dense = scatter(topk.topk_ids, topk.topk_weights)
    rtol = FLOAT32_RTOL + family.bf16_roundings * BF16_ROUNDING
    torch.testing.assert_close(dense[decided], routed.dense[decided], rtol=rtol, atol=0.0)
