"""A float64 model of eight-bit experts that shares nothing with the library but stored codes."""

from __future__ import annotations

import torch
from torch import Tensor

from epcomm.quantized_weights import Fp8BlockWeights, Int8ChannelWeights
from epcomm.testing.data import RankBatch

KINDS = {"fp8": Fp8BlockWeights, "int8": Int8ChannelWeights}
# Products are rounded to float32 before they are quantised, and the model's are not: of some
# thousand activations a few lie so close to the middle between two codes that they fall to the
# other side. One code is 2**-4 of an FP8 activation at most and 1/127 of the largest INT8 one; the
# sum over I of such a difference, times weights of order I**-0.5, stays below this part of y.
FLIP_TOLERANCE = {"fp8": 6e-3, "int8": 3e-3}


def nearest_fp8(values: Tensor) -> Tensor:
    """The nearest of all e4m3 numbers, ties to the even code, by looking through the list."""
    codes = torch.arange(127, dtype=torch.uint8)  # 127 is NaN
    numbers = codes.view(torch.float8_e4m3fn).double()
    distance = (values.abs().unsqueeze(-1) - numbers).abs()
    best = distance.min(dim=-1, keepdim=True).values
    # Of two equally near, the even one: look for it first.
    is_best = distance == best
    order = torch.cat([torch.arange(0, 127, 2), torch.arange(1, 127, 2)])
    place = order[is_best[..., order].int().argmax(dim=-1)]
    return numbers[place] * values.sign()


def rounded(values: Tensor, kind: str) -> Tensor:
    """float64 rows [N, H] as the wire carries them."""
    if kind == "int8":
        scale = values.abs().amax(dim=1, keepdim=True) / 127
        return torch.where(scale > 0, (values / scale).round() * scale, torch.zeros_like(values))
    blocks = []
    for block in values.split(128, dim=1):
        scale = block.abs().amax(dim=1, keepdim=True).clamp(min=1e-4) / 448
        blocks.append(nearest_fp8(block / scale) * scale)
    return torch.cat(blocks, dim=1)


def model(batch: RankBatch, weights: Fp8BlockWeights | Int8ChannelWeights, kind: str) -> Tensor:
    """y [T, H], float64, from the values that codes and scales mean."""
    matrices = {name: tensor.double().cpu() for name, tensor in weights.dequantized().items()}
    x = rounded(batch.x.double(), kind)
    y = torch.zeros_like(x)
    for token, (ids, factors) in enumerate(
        zip(batch.topk_ids.tolist(), batch.topk_weights.tolist(), strict=True)
    ):
        for expert, factor in zip(ids, factors, strict=True):
            if expert >= 0:
                gate, up = (matrices["gate_up_proj"][expert] @ x[token]).chunk(2)
                hidden = rounded((gate / (1 + torch.exp(-gate)) * up).unsqueeze(0), kind)[0]
                y[token] += factor * (matrices["down_proj"][expert] @ hidden)
    return y
