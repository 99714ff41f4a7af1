"""Tiny MoE blocks of transformers; importing it takes seconds, so only tests that need it do."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping

import torch
from torch import nn

# transformers must not look for a network.
os.environ["HF_HUB_OFFLINE"] = "1"

HIDDEN, NUM_EXPERTS, TOP_K = 16, 8, 2


def qwen3_moe(**changes: object) -> nn.Module:
    """A Qwen3MoeSparseMoeBlock with seeded weights."""
    from transformers.models.qwen3_moe.configuration_qwen3_moe import Qwen3MoeConfig
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

    values = {
        "hidden_size": HIDDEN,
        "moe_intermediate_size": 8,
        "num_experts": NUM_EXPERTS,
        "num_experts_per_tok": TOP_K,
        "norm_topk_prob": True,
    }
    return seeded(Qwen3MoeSparseMoeBlock(Qwen3MoeConfig(**{**values, **changes})))


def mixtral(**changes: object) -> nn.Module:
    """A MixtralSparseMoeBlock with seeded weights."""
    from transformers.models.mixtral.configuration_mixtral import MixtralConfig
    from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock

    values = {
        "hidden_size": HIDDEN,
        "intermediate_size": 8,
        "num_local_experts": NUM_EXPERTS,
        "num_experts_per_tok": TOP_K,
    }
    return seeded(MixtralSparseMoeBlock(MixtralConfig(**{**values, **changes})))


BLOCKS: Mapping[str, Callable[..., nn.Module]] = {"qwen3_moe": qwen3_moe, "mixtral": mixtral}


def seeded(block: nn.Module) -> nn.Module:
    """Fill all parameters; the same on every rank."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in block.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / 2)
    return block
