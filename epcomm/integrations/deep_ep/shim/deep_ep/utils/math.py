"""The module deep_ep.utils.math: sizes, FP8 casts and comparisons of DeepEP's tests.

Source: deepseek-ai/DeepEP, deep_ep/utils/math.py, for names, arguments and results.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from epcomm.quantization import FP8_FLOAT32_SCALES, dequantize, quantize
from epcomm.quantization.scale_layout import unpack_scales
from epcomm.types import WireTensor

# Columns of a scale.
_BLOCK = 128


def ceil_div(x: int, y: int) -> int:
    """Return x / y, rounded up."""
    return -(-x // y)


def align(x: int, y: int) -> int:
    """Return the smallest multiple of y that is at least x."""
    return ceil_div(x, y) * y


def safe_div(a: float, b: float) -> float:
    """Return a / b, where 0 / 0 is 0."""
    return 0 if a == b == 0 else a / b


def calc_diff(x: Tensor, y: Tensor) -> float:
    """Return 1 - 2 <x + 1, y + 1> / (|x + 1|^2 + |y + 1|^2), which is 0 for equal tensors."""
    x, y = x.double() + 1, y.double() + 1
    return 1 - float(2 * (x * y).sum() / (x.square() + y.square()).sum())


def per_token_cast_to_fp8(x: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise x [T, H] to float8_e4m3fn, with a float32 scale for each 128 columns."""
    wire = quantize(x, FP8_FLOAT32_SCALES)
    assert wire.scales is not None, "FP8 has scales"
    return wire.data, wire.scales


def per_token_cast_back(x_fp8: Tensor, x_scales: Tensor) -> Tensor:
    """Return codes [T, H] times their scales, in bfloat16; an int32 scale holds four exponents."""
    if x_scales.dtype is torch.int32:
        x_scales = unpack_scales(x_scales, ceil_div(x_fp8.shape[1], _BLOCK)).float()
    wire = WireTensor(data=x_fp8, format=FP8_FLOAT32_SCALES, scales=x_scales)
    return dequantize(wire, torch.bfloat16)


def inplace_unique(x: Tensor, num_slots: int) -> None:
    """Write the distinct numbers of each row of x [T, K], descending, and -1 after them.

    Numbers are below num_slots; negative ones are none.
    """
    is_there = torch.zeros(x.shape[0], num_slots + 1, dtype=torch.bool, device=x.device)
    is_there.scatter_(1, torch.where(x < 0, num_slots, x).long(), True)
    numbers = torch.arange(num_slots, dtype=x.dtype, device=x.device)
    found = torch.where(is_there[:, :num_slots], numbers, -1).sort(1, descending=True).values
    width = min(num_slots, x.shape[1])
    x.fill_(-1)
    x[:, :width] = found[:, :width]


def create_grouped_scores(scores: Tensor, group_idx: Tensor, num_groups: int) -> Tensor:
    """Return scores [T, E] with 0 outside the chosen groups of consecutive experts."""
    is_chosen = torch.zeros(scores.shape[0], num_groups, dtype=torch.bool, device=scores.device)
    is_chosen.scatter_(1, group_idx, True)
    return scores * is_chosen.repeat_interleave(scores.shape[1] // num_groups, dim=1)


def hash_tensor(t: Tensor) -> int:
    """Return the sum of the bits of a tensor, as int32 where its elements have four bytes."""
    t = t.contiguous()
    return int(t.view(torch.int32 if t.itemsize == 4 else torch.uint8).sum())


def hash_tensors(*tensors: object) -> int:
    """Combine the hashes of all tensors, also of those in tuples and lists, by xor."""
    value = 0
    for tensor in _flat(tensors):
        value ^= hash_tensor(tensor)
    return value


def count_bytes(*tensors: object) -> int:
    """Return the bytes of all tensors, also of those in tuples and lists."""
    return sum(tensor.nbytes for tensor in _flat(tensors))


def _flat(tensors: object) -> Iterator[Tensor]:
    if isinstance(tensors, Tensor):
        yield tensors
    elif isinstance(tensors, tuple | list):
        for each in tensors:
            yield from _flat(each)
