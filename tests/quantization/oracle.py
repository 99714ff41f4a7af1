"""e4m3, e2m1, powers of two and INT8 by table, frexp and numpy, independent of the library."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

F32 = np.float32


def e4m3_value(code: int) -> float:
    """Return the value of one byte: S EEEE FFF, bias 7, no infinity."""
    sign = -1.0 if code & 0x80 else 1.0
    exponent, fraction = (code >> 3) & 0xF, code & 7
    if exponent == 15 and fraction == 7:
        return math.nan
    if exponent == 0:
        return sign * fraction * 2.0**-9
    return sign * (8 + fraction) * 2.0 ** (exponent - 10)


# The values are ascending, so that the index in the list is the code.
POSITIVE = [e4m3_value(code) for code in range(127)]


def smallest_exponent(amax: float) -> int:
    """Return the smallest e with amax <= 448 * 2**e, in exact arithmetic."""
    exponent = math.frexp(amax)[1] - 12
    while Fraction(amax) > 448 * Fraction(2) ** exponent:
        exponent += 1
    return exponent


def float16_toward_zero(values: NDArray[np.float32]) -> NDArray[np.float32]:
    """Truncate to float16: round as numpy does, and step back if that went away from zero."""
    nearest = values.astype(np.float16)
    is_beyond = np.abs(nearest.astype(np.float32)) > np.abs(values)
    return np.where(is_beyond, np.nextafter(nearest, np.float16(0)), nearest).astype(np.float32)


def int8_rows(x: NDArray[np.float32], profile: str) -> tuple[NDArray[np.int8], NDArray[np.float32]]:
    """Return codes [R, H] and scales [R, 1] of rows [R, H]."""
    with np.errstate(all="ignore"):
        amax = np.abs(x).max(1, keepdims=True)
        is_finite = np.isfinite(amax)
        if profile.startswith("rint127"):
            factor = F32(127) / (amax + F32(1e-12 if profile.endswith("eps") else 0))
            codes, scales, is_usable = np.rint(x * factor), F32(1) / factor, np.isfinite(factor)
        else:
            scales = amax / F32(127)
            quotients, is_usable = x / scales, scales > 0
            if profile == "div":
                codes = np.rint(quotients)
            elif profile == "triton":
                codes = np.floor(quotients + F32(0.5))
            else:
                cut = float16_toward_zero(quotients)
                codes = np.sign(cut) * np.floor(np.abs(cut) + F32(0.5))
    codes = np.where(is_finite & is_usable, codes, 0).clip(
        -128 if profile == "triton" else -127, 127
    )
    scales = np.where(is_finite, np.where(is_usable, scales, 0), math.nan)
    return codes.astype(np.int8), scales.astype(F32)


# The magnitudes of e2m1: S EE F, bias 1, neither infinity nor NaN.
E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6])
E4M3 = np.array(POSITIVE)


@dataclass(frozen=True, kw_only=True)
class FloatRows:
    """codes [R, H]; scales of blocks [R, S], bytes or float32; of rows [R, 1]; values [R, H]."""

    codes: NDArray[np.uint8]
    scales: NDArray[np.uint8] | NDArray[np.float32]
    row_scales: NDArray[np.float32]
    values: NDArray[np.float32]


def nearest(magnitudes: NDArray[np.float64], table: NDArray[np.float64]) -> NDArray[np.int64]:
    """Return the index of the nearest entry, the even one of two; the last of what is larger."""
    above = np.searchsorted(table, magnitudes).clip(1, len(table) - 1)
    low, high = magnitudes - table[above - 1], table[above] - magnitudes
    takes_high: NDArray[np.bool_] = (high < low) | ((high == low) & (above % 2 == 0))
    return np.where(takes_high, above, above - 1)


def float_rows(x: NDArray[np.float32], name: str, block: int, *, has_exponents: bool) -> FloatRows:
    """Return rows [R, H] in fp8_e4m3, mxfp8, mxfp4 or nvfp4, the last block padded with zeros."""
    table, hidden_size = E4M3 if "fp8" in name else E2M1, x.shape[1]
    with np.errstate(invalid="ignore"):
        padded = np.pad(x.astype(np.float64), ((0, 0), (0, -hidden_size % block)))
    blocks = padded.reshape(len(x), -1, block)
    is_finite: NDArray[np.bool_] = np.logical_and.reduce(np.isfinite(blocks), axis=2)
    amax = np.where(is_finite, np.abs(np.where(np.isfinite(blocks), blocks, 0)).max(2), 0)
    if name == "fp8_e4m3":
        amax = np.maximum(amax, F32(1e-4))
    rows: NDArray[np.float32] = np.ones((len(x), 1), F32)
    if name == "nvfp4":
        rows = np.maximum(amax.max(1, keepdims=True), 2688 * 2.0**-120).astype(F32) / F32(2688)
        wanted = np.clip(amax.astype(F32) / F32(6) / rows, F32(2.0**-6), F32(448))
        scales = nearest(wanted.astype(np.float64), E4M3)
        of_blocks = E4M3[scales].astype(F32)
        factors, values_of_scales = F32(1) / rows / of_blocks, rows * of_blocks
    elif has_exponents:
        # frexp: amax / most = f * 2**e with 0.5 <= f < 1, so that 2**e is as large or larger.
        fraction, exponent = np.frexp(amax / table[-1])
        exponent = np.maximum(np.where(amax > 0, exponent - (fraction == 0.5), -127), -127)
        scales, factors = exponent + 127, np.ldexp(1.0, -exponent).astype(F32)
        values_of_scales = np.ldexp(1.0, exponent).astype(F32)
    else:
        scales = values_of_scales = amax.astype(F32) * F32(1 / 448)
        factors = F32(448) / amax.astype(F32)
    with np.errstate(invalid="ignore", over="ignore"):
        scaled = blocks.astype(F32) * factors[:, :, None]
    scaled = np.where(is_finite[:, :, None], scaled, 0)
    codes = nearest(np.abs(scaled).astype(np.float64), table)
    signed = np.where(np.signbit(scaled), -table[codes], table[codes]).astype(F32)
    with np.errstate(over="ignore"):
        values = signed * values_of_scales[:, :, None]
    codes += np.signbit(scaled) * (8 if len(table) == 8 else 128)
    # NaN has a code in e4m3 alone.
    codes = np.where(is_finite[:, :, None], codes, 0x7F if len(table) > 8 else 0).astype(np.uint8)
    nan_of_scales = 0xFF if has_exponents else 0x7F if name == "nvfp4" else math.nan
    scales = np.where(is_finite, scales, nan_of_scales)
    values = np.where(is_finite[:, :, None], values, np.nan).astype(F32)
    return FloatRows(
        codes=codes.reshape(len(x), -1)[:, :hidden_size],
        scales=scales.astype(F32 if scales.dtype.kind == "f" else np.uint8),
        row_scales=rows,
        values=values.reshape(len(x), -1)[:, :hidden_size],
    )
