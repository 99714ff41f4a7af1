"""Tiny MoE blocks of transformers; importing it takes seconds, so only tests that need it do."""

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module

import torch
from torch import nn

# transformers must not access the network.
os.environ["HF_HUB_OFFLINE"] = "1"

HIDDEN, NUM_EXPERTS, TOP_K = 16, 8, 2


@dataclass(frozen=True)
class BlockKind:
    """A kind of block and its tiny configuration; all kinds have the same sizes."""

    model_type: str
    block: str
    config: str
    values: Mapping[str, object] = field(default_factory=dict)

    def make(self, **changes: object) -> nn.Module:
        return seeded(self.build({**SIZES, **self.values, **changes}))

    def build(self, values: Mapping[str, object]) -> nn.Module:
        package = f"transformers.models.{self.model_type}"
        configuration = import_module(f"{package}.configuration_{self.model_type}")
        modeling = import_module(f"{package}.modeling_{self.model_type}")
        return getattr(modeling, self.block)(getattr(configuration, self.config)(**values))


SIZES = {
    "hidden_size": HIDDEN,
    "intermediate_size": 8,
    "moe_intermediate_size": 8,
    "num_experts_per_tok": TOP_K,
}
# A whole model with such blocks.
MODEL_SIZES = {
    "vocab_size": 32,
    "hidden_size": HIDDEN,
    "intermediate_size": 8,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "num_experts_per_tok": TOP_K,
    "pad_token_id": 0,
}
EXPERTS = {"num_experts": NUM_EXPERTS}
LOCAL_EXPERTS = {"num_local_experts": NUM_EXPERTS}
ROUTED_EXPERTS = {"n_routed_experts": NUM_EXPERTS}
GROUPED = {"n_group": 4, "topk_group": 2, "routed_scaling_factor": 2.5}

KINDS = [
    BlockKind("mixtral", "MixtralSparseMoeBlock", "MixtralConfig", LOCAL_EXPERTS),
    BlockKind(
        "qwen2_moe",
        "Qwen2MoeSparseMoeBlock",
        "Qwen2MoeConfig",
        {**EXPERTS, "shared_expert_intermediate_size": 12, "norm_topk_prob": False},
    ),
    BlockKind(
        "qwen3_moe", "Qwen3MoeSparseMoeBlock", "Qwen3MoeConfig", {**EXPERTS, "norm_topk_prob": True}
    ),
    BlockKind(
        "qwen3_5_moe",
        "Qwen3_5MoeSparseMoeBlock",
        "Qwen3_5MoeTextConfig",
        {**EXPERTS, "shared_expert_intermediate_size": 12},
    ),
    BlockKind(
        "deepseek_v2",
        "DeepseekV2Moe",
        "DeepseekV2Config",
        {
            **ROUTED_EXPERTS,
            **GROUPED,
            "topk_method": "group_limited_greedy",
            # More than the number of groups; otherwise the best experts are always in the selected
            # groups.
            "num_experts_per_tok": 3,
            "num_attention_heads": 2,  # The number of heads must divide the hidden size.
        },
    ),
    BlockKind("deepseek_v3", "DeepseekV3MoE", "DeepseekV3Config", {**ROUTED_EXPERTS, **GROUPED}),
    BlockKind(
        "afmoe",
        "AfmoeSparseMoeBlock",
        "AfmoeConfig",
        {**EXPERTS, "num_shared_experts": 2, "route_scale": 1.5},
    ),
    BlockKind("minimax_m2", "MiniMaxM2SparseMoeBlock", "MiniMaxM2Config", LOCAL_EXPERTS),
    BlockKind(
        "gpt_oss",
        "GptOssMLP",
        "GptOssConfig",
        # A limit that a few of the gates and ups exceed.
        {**LOCAL_EXPERTS, "swiglu_limit": 1.5},
    ),
    BlockKind(
        "ernie4_5_moe",
        "Ernie4_5_MoeSparseMoeBlock",
        "Ernie4_5_MoeConfig",
        # Half of the probability: some sums are below, and some above.
        {"moe_num_experts": NUM_EXPERTS, "moe_norm_min": 0.5},
    ),
    BlockKind(
        "lfm2_moe",
        "Lfm2MoeSparseMoeBlock",
        "Lfm2MoeConfig",
        {**EXPERTS, "routed_scaling_factor": 1.5},
    ),
    BlockKind(
        "nemotron_h",
        "NemotronHMoE",
        "NemotronHConfig",
        {
            **ROUTED_EXPERTS,
            **GROUPED,
            "moe_latent_size": 12,
            "moe_shared_expert_intermediate_size": 20,
        },
    ),
]

BLOCKS: Mapping[str, Callable[..., nn.Module]] = {kind.model_type: kind.make for kind in KINDS}
qwen3_moe, mixtral = BLOCKS["qwen3_moe"], BLOCKS["mixtral"]

# All kinds, and their settings that change the computation.
VARIANTS: Mapping[str, Callable[..., nn.Module]] = {
    **BLOCKS,
    "qwen2_moe-renormalised": partial(BLOCKS["qwen2_moe"], norm_topk_prob=True),
    "qwen3_moe-not_renormalised": partial(qwen3_moe, norm_topk_prob=False),
    "deepseek_v2-greedy": partial(
        BLOCKS["deepseek_v2"], topk_method="greedy", n_group=None, topk_group=None
    ),
    "deepseek_v3-not_renormalised": partial(BLOCKS["deepseek_v3"], norm_topk_prob=False),
    "ernie4_5_moe-no_shared": partial(BLOCKS["ernie4_5_moe"], moe_num_shared_experts=0),
    "ernie4_5_moe-biases": partial(BLOCKS["ernie4_5_moe"], use_bias=True),
    "lfm2_moe-plain": partial(BLOCKS["lfm2_moe"], use_expert_bias=False, norm_topk_prob=False),
    "nemotron_h-no_latent": partial(BLOCKS["nemotron_h"], moe_latent_size=None, mlp_bias=True),
    "nemotron_h-biases": partial(BLOCKS["nemotron_h"], mlp_bias=True),
}


def seeded(block: nn.Module) -> nn.Module:
    """Fill all parameters and buffers; equal on every rank."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        # Buffers are correction biases; zeros would hide routing that ignores them.
        for tensor in [*block.parameters(), *block.buffers()]:
            values = torch.randn(tensor.shape, generator=generator) / 2
            if not tensor.is_floating_point():
                # Distinct experts for each token id.
                values = torch.rand(len(tensor), NUM_EXPERTS, generator=generator).argsort(dim=1)
                values = values[:, : tensor.shape[1]]
            tensor.copy_(values)
    return block
