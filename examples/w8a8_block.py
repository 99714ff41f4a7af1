"""An MoE layer in BF16, the same experts in W8A8, and a float64 reference in one process."""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from epcomm import ExpertWeights, Int8ChannelWeights, RoutingSpec, TopKOutput, route

# Stride of the seeds, so that every rank draws different tokens.
_SEED_STRIDE = 1009


@dataclass(frozen=True, kw_only=True)
class LayerSize:
    """The sizes of a layer: H, I, E of all ranks, and K."""

    hidden_size: int
    intermediate_size: int
    num_experts: int
    top_k: int


@dataclass(frozen=True, kw_only=True, eq=False)
class Batch:
    """The tokens of one rank, x [T, H], bfloat16, and their routing, on the CPU."""

    x: Tensor
    topk: TopKOutput


def make_experts(size: LayerSize, *, seed: int) -> ExpertWeights:
    """Return BF16 experts of all ranks, equal on each rank, with results of about the size of x."""
    generator = torch.Generator().manual_seed(seed)

    def matrix(rows: int, columns: int) -> Tensor:
        values = torch.randn(size.num_experts, rows, columns, generator=generator)
        return (values / columns**0.5).bfloat16()

    return ExpertWeights(
        gate_up_proj=matrix(2 * size.intermediate_size, size.hidden_size),
        down_proj=matrix(size.hidden_size, size.intermediate_size),
    )


def make_batch(size: LayerSize, num_tokens: int, *, rank: int, seed: int) -> Batch:
    """Return tokens of one rank, routed by a softmax over random logits."""
    generator = torch.Generator().manual_seed(seed + _SEED_STRIDE * (rank + 1))
    # Uniform values: an outlier channel would use up the range of INT8, as in every INT8 layer.
    x = 2 * torch.rand(num_tokens, size.hidden_size, generator=generator) - 1
    logits = torch.randn(num_tokens, size.num_experts, generator=generator)
    return Batch(
        x=x.bfloat16(), topk=route(logits, RoutingSpec(top_k=size.top_k, renormalize=True))
    )


def matrices_of(weights: ExpertWeights | Int8ChannelWeights) -> Mapping[str, Tensor]:
    """Return gate_up_proj [E, 2I, H] and down_proj [E, H, I] in float64, dequantised."""
    is_w8a8 = isinstance(weights, Int8ChannelWeights)
    named = weights.dequantized() if is_w8a8 else weights.tensors()
    return {name: tensor.double() for name, tensor in named.items()}


def dense(batch: Batch, matrices: Mapping[str, Tensor]) -> Tensor:
    """Return y [T, H] in float64; each expert computes the tokens that chose it."""
    x, ids, weights = batch.x.double(), batch.topk.topk_ids, batch.topk.topk_weights.double()
    y = torch.zeros_like(x)
    for expert in range(len(matrices["gate_up_proj"])):
        tokens, places = torch.where(ids == expert)
        gate, up = (x[tokens] @ matrices["gate_up_proj"][expert].T).chunk(2, dim=1)
        hidden = gate / (1 + torch.exp(-gate)) * up
        y[tokens] += weights[tokens, places, None] * (hidden @ matrices["down_proj"][expert].T)
    return y
