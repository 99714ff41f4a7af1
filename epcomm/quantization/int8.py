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

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from epcomm.types import Int8Profile, WireDtype, WireFormat, WireTensor

INT8_PER_TOKEN = WireFormat(dtype=WireDtype.INT8, scale_block=0, scale_dtype=torch.float32)

# The largest code.
INT8_MAX = 127.0
# The profile rint127eps adds this to the largest magnitude of a row.
AMAX_EPSILON = 1e-12
# All but the 13 fraction bits that float32 has beyond float16.
_FLOAT16_MASK = ~0x1FFF


@dataclass(frozen=True, kw_only=True)
class _Quantized:
    """The result of one profile.

    codes: [..., H], integers in float32.
    scales: [..., 1], float32.
    is_usable: [..., 1], bool, False where the source leaves codes and scale undefined.
    """

    codes: Tensor
    scales: Tensor
    is_usable: Tensor


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
    found = _PROFILES[profile](rows, amax)
    usable_scales = found.scales.masked_fill(~found.is_usable, 0.0)
    wire.scales.copy_(usable_scales.masked_fill(~is_finite, float("nan")))
    # Before the cast: NaN has no integer.
    wire.data.copy_(torch.where(is_finite & found.is_usable, found.codes, 0.0))


def restore_int8(wire: WireTensor) -> Tensor:
    """Multiply codes by their row's scale, [..., R, H], float32."""
    assert wire.scales is not None, "quantised formats have scales"
    return wire.data.float() * wire.scales


def _divide(numerator: float, tensor: Tensor) -> Tensor:
    # `number / tensor` would be a rounded reciprocal times the number.
    return torch.div(torch.full_like(tensor, numerator), tensor)


def _rint127(rows: Tensor, amax: Tensor) -> _Quantized:
    factors = _divide(INT8_MAX, amax)
    return _Quantized(
        codes=torch.round(rows * factors),
        scales=_divide(1.0, factors),
        is_usable=factors.isfinite(),
    )


def _rint127eps(rows: Tensor, amax: Tensor) -> _Quantized:
    return _rint127(rows, amax + AMAX_EPSILON)


def _div(rows: Tensor, amax: Tensor) -> _Quantized:
    quotients = _quotients(rows, amax)
    return _with_codes(quotients, torch.round(quotients.codes).clamp(-INT8_MAX, INT8_MAX))


def _divtrunc16(rows: Tensor, amax: Tensor) -> _Quantized:
    quotients = _quotients(rows, amax)
    # The cut is right for normal float16 numbers; smaller ones round to the code 0 either way.
    cut = (quotients.codes.view(torch.int32) & _FLOAT16_MASK).view(torch.float32)
    away = torch.copysign(torch.floor(cut.abs() + 0.5), cut)
    return _with_codes(quotients, away.clamp(-INT8_MAX, INT8_MAX))


def _triton(rows: Tensor, amax: Tensor) -> _Quantized:
    quotients = _quotients(rows, amax)
    return _with_codes(quotients, torch.floor(quotients.codes + 0.5).clamp(-128.0, INT8_MAX))


def _quotients(rows: Tensor, amax: Tensor) -> _Quantized:
    """Divide elements by the scale amax / 127, without rounding to codes."""
    # `tensor / number` is a product with the rounded reciprocal on some devices.
    scales = torch.div(amax, torch.full_like(amax, INT8_MAX))
    return _Quantized(codes=torch.div(rows, scales), scales=scales, is_usable=scales > 0)


def _with_codes(quotients: _Quantized, codes: Tensor) -> _Quantized:
    return _Quantized(codes=codes, scales=quotients.scales, is_usable=quotients.is_usable)


_PROFILES: dict[Int8Profile, Callable[[Tensor, Tensor], _Quantized]] = {
    Int8Profile.RINT127: _rint127,
    Int8Profile.RINT127EPS: _rint127eps,
    Int8Profile.DIV: _div,
    Int8Profile.DIVTRUNC16: _divtrunc16,
    Int8Profile.TRITON: _triton,
}
