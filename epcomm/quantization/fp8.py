"""Quantise to FP8 e4m3 with one scale for each block of elements of a token, in plain torch.

With a = max(|x| of the block, 1e-4), all steps in float32, each rounded to nearest even:

    float32 scales:      scale = a * float32(1 / 448)             code = e4m3(x * (448 / a))
    power-of-two scales: scale = smallest 2**e with a <= 448 * 2**e  code = e4m3(x / scale)

Source: the arithmetic that DeepEP's low-latency dispatch documents and shows. Scales recorded from
it settle what a description leaves open: its float32 scale is the product with the rounded
reciprocal of 448 and not the quotient a / 448 (18 / 448 differs), and the floor is 1e-4. Ours: a
last block that is short, powers of two from exponent bits in one step, and the next paragraph.

A block with a NaN or an infinity has a NaN scale (0xFF as a power of two) and NaN codes, so that
no reader of the block gets a finite number. No finite block saturates: |x * (448 / a)| exceeds 448
by rounding at most, and rounds back to 448. A block of zeros has zero codes and a positive scale.
Elements far below the floor round to zero.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from epcomm.types import WireDtype, WireFormat, WireTensor

# The formats that GEMMs of FP8 weights read: blocks of 128 elements.
FP8_FLOAT32_SCALES = WireFormat(
    dtype=WireDtype.FP8_E4M3, scale_block=128, scale_dtype=torch.float32
)
FP8_POWER_OF_TWO_SCALES = WireFormat(
    dtype=WireDtype.FP8_E4M3, scale_block=128, scale_dtype=torch.float8_e8m0fnu
)

# The largest finite e4m3 number, 1.75 * 2**8.
E4M3_MAX = 448.0
# float32(1 / 448): the product with the float64 1 / 448 would differ.
_RECIPROCAL_OF_MAX = 0.0022321429569274187
# A block whose largest magnitude is below this floor is quantised as if it were the floor.
AMAX_FLOOR = 1e-4
# Fraction bits of 1.75: a larger fraction needs the next power of two.
_FRACTION_OF_E4M3_MAX = 0x600000
_FRACTION_MASK = 0x7FFFFF
_NAN = float("nan")
# e8m0 has one NaN, and 2**e is stored as e + 127.
_E8M0_NAN = 0xFF


def write_fp8(hidden_states: Tensor, wire: WireTensor) -> None:
    """Write codes and scales of hidden states, with the arithmetic of the module docstring.

    Args:
        hidden_states: [..., T, H], bfloat16, float16 or float32, any strides.
        wire: written; FP8_E4M3 with rows of any stride. A block of 0 means all of H.
    """
    wire_format = wire.format
    assert wire.scales is not None, "quantised formats have scales"
    blocks = _in_blocks(hidden_states.float(), wire_format)
    amax = blocks.abs().amax(dim=-1)
    is_finite = amax.isfinite()
    amax = amax.clamp(min=AMAX_FLOOR)
    if wire_format.scale_dtype == torch.float32:
        # `448 / tensor` would be a rounded reciprocal times 448.
        factors = torch.div(torch.full_like(amax, E4M3_MAX), amax)
        wire.scales.copy_((amax * _RECIPROCAL_OF_MAX).masked_fill(~is_finite, _NAN))
    else:
        exponents, factors = _power_of_two_scales(amax)
        exponents = exponents.masked_fill(~is_finite, _E8M0_NAN)
        wire.scales.view(torch.uint8).copy_(exponents)
    scaled = torch.where(is_finite.unsqueeze(-1), blocks * factors.unsqueeze(-1), _NAN)
    wire.data.copy_(scaled.flatten(-2)[..., : hidden_states.shape[-1]])


def restore(wire: WireTensor) -> Tensor:
    """Multiply the codes of any quantised format by their scales, [..., R, H], float32.

    The scales have the shape of row-major scales and any strides; packed scales are unpacked first.
    """
    assert wire.scales is not None, "quantised formats have scales"
    blocks = _in_blocks(wire.data.float(), wire.format)
    elements = blocks * wire.scales.float().unsqueeze(-1)
    return elements.flatten(-2)[..., : wire.data.shape[-1]]


def _in_blocks(elements: Tensor, wire_format: WireFormat) -> Tensor:
    """View [..., H] as blocks [..., S, block], with the last block padded with zeros."""
    hidden_size = elements.shape[-1]
    block = wire_format.scale_block or hidden_size
    padded = F.pad(elements, (0, -hidden_size % block))
    return padded.unflatten(-1, (-1, block))


def _power_of_two_scales(amax: Tensor) -> tuple[Tensor, Tensor]:
    """Return the biased exponents of the scales, uint8, and the factors of the elements."""
    bits = amax.view(torch.int32)
    # amax = 1.f * 2**e is below 448 * 2**(e - 8), unless its fraction exceeds that of 448.
    exponents = (bits >> 23) - 8 + ((bits & _FRACTION_MASK) > _FRACTION_OF_E4M3_MAX).int()
    # The floor keeps exponents of finite blocks within 105 to 247, so the inverse is normal too.
    factors = ((254 - exponents) << 23).view(torch.float32)
    return exponents.to(torch.uint8), factors
