"""Quantise to INT8 with one scale a token, symmetrically, in plain torch.

The Ascend stack has five such arithmetics; Int8Profile names them. They differ by 1 in a few
codes, which is enough to fail a comparison of bits. All steps are in float32, each rounded to
nearest even.

What the sources leave undefined is defined here. A row of zeros, or one so small that its scale
underflows or 127 / amax overflows, has codes 0 and scale 0, except under rint127eps, where a row of
zeros has codes 0 and scale 1e-12 / 127. A row with a NaN or an infinity has codes 0 and a NaN
scale. Codes saturate where a subnormal scale is so imprecise that a quotient exceeds 127.

Source: documented arithmetic of the operators named below, not checked on an NPU.
"""

from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch
from torch import Tensor

from epcomm.quantization.floats import divide
from epcomm.types import Int8Profile, WireDtype, WireFormat, WireTensor

INT8_PER_TOKEN = WireFormat(dtype=WireDtype.INT8)

# The largest code.
INT8_MAX = 127.0
# All but the 13 fraction bits that float32 has beyond float16.
_FLOAT16_MASK = ~0x1FFF


def write_int8(hidden_states: Tensor, wire: WireTensor, profile: Int8Profile) -> None:
    """Write int8 codes and one float32 scale a row, with the profile's arithmetic.

    Args:
        hidden_states: [..., T, H], bfloat16, float16 or float32, any strides.
        wire: written; INT8_PER_TOKEN with rows of any stride.
        profile: the arithmetic.
    """
    assert wire.scales is not None, "quantised formats have scales"
    rows = hidden_states.float()
    amax = rows.abs().amax(dim=-1, keepdim=True)
    is_finite = amax.isfinite()
    if profile in _ROUNDINGS:
        # `tensor / number` is a product with the rounded reciprocal on some devices.
        scales = torch.div(amax, torch.full_like(amax, INT8_MAX))
        codes, is_usable = _ROUNDINGS[profile](torch.div(rows, scales)), scales > 0
    else:
        factors = divide(INT8_MAX, amax + _EPSILONS[profile])
        codes, is_usable = torch.round(rows * factors), factors.isfinite()
        scales = divide(1.0, factors)
    # The packages leave codes and scales undefined where the factor is not finite; here they are 0.
    usable_scales = scales.masked_fill(~is_usable, 0.0)
    wire.scales.copy_(usable_scales.masked_fill(~is_finite, float("nan")))
    # NaN is replaced before the cast, because it has no integer.
    wire.data.copy_(torch.where(is_finite & is_usable, codes, 0.0))


def _half_to_even(quotients: Tensor) -> Tensor:
    return torch.round(quotients).clamp(-INT8_MAX, INT8_MAX)


def _cut_and_half_away(quotients: Tensor) -> Tensor:
    # The cut is right for normal float16 numbers; smaller ones round to the code 0 either way.
    cut = (quotients.view(torch.int32) & _FLOAT16_MASK).view(torch.float32)
    return torch.copysign(torch.floor(cut.abs() + 0.5), cut).clamp(-INT8_MAX, INT8_MAX)


def _half_up(quotients: Tensor) -> Tensor:
    return torch.floor(quotients + 0.5).clamp(-128.0, INT8_MAX)


# The profiles that divide elements by the scale amax / 127, with their rounding to codes.
_ROUNDINGS: Mapping[Int8Profile, Callable[[Tensor], Tensor]] = MappingProxyType(
    {
        Int8Profile.DIV: _half_to_even,
        Int8Profile.DIVTRUNC16: _cut_and_half_away,
        Int8Profile.TRITON: _half_up,
    }
)
# The profiles that multiply elements by 127 / amax, with what they add to amax.
_EPSILONS = MappingProxyType({Int8Profile.RINT127: 0.0, Int8Profile.RINT127EPS: 1e-12})
