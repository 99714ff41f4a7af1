"""Small layers of the fused operators on two ranks, and their batches."""

import math
from typing import Any

import torch
from torch import Tensor

from epcomm import EPConfig, EPGroup, ExpertParallelExperts, Int8ChannelWeights, TopKOutput

E, H, I, K, M = 4, 64, 192, 2, 8  # noqa: E741 (the letter of the intermediate size)
OPERATORS = ("fused_deep_moe", "dispatch_ffn_combine")


def experts(seed: int = 0) -> Int8ChannelWeights:
    made = torch.Generator().manual_seed(seed)
    w13 = torch.randint(-127, 128, (E, 2 * I, H), generator=made, dtype=torch.int8)
    w2 = torch.randint(-127, 128, (E, H, I), generator=made, dtype=torch.int8)
    return Int8ChannelWeights(
        gate_up_proj=w13,
        gate_up_scale=torch.rand(E, 2 * I, generator=made) / 74 / math.sqrt(H),
        down_proj=w2,
        down_scale=torch.rand(E, H, generator=made) / 74 / math.sqrt(I),
    )


def batch(rank: int, num_tokens: int = 5) -> tuple[Tensor, TopKOutput]:
    """Make x and topk; ids are distinct in a row."""
    made = torch.Generator().manual_seed(10 + rank)
    x = torch.randn(num_tokens, H, generator=made).bfloat16()
    ids = torch.rand(num_tokens, E, generator=made).argsort(dim=1)[:, :K].contiguous()
    return x, TopKOutput(topk_ids=ids, topk_weights=torch.rand(num_tokens, K, generator=made))


def make_layer(
    group: EPGroup,
    operator: str,
    weights: Int8ChannelWeights | None = None,
    **changes: Any,  # noqa: ANN401 (fields of EPConfig)
) -> ExpertParallelExperts:
    """Make a layer in mode fuseep. Collective."""
    config = EPConfig(mode="fuseep", backend=operator, max_tokens_per_rank=M, **changes)
    return ExpertParallelExperts(weights or experts(), group, config, top_k=K)
