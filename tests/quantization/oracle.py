"""e4m3, powers of two and INT8 by table, frexp and numpy, independent of the library."""

from __future__ import annotations

import math
from bisect import bisect_left
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


def e4m3_code(value: float) -> int:
    """Return the nearest code, ties to even; refuse values beyond the table."""
    magnitude = Fraction(abs(value))
    assert magnitude < Fraction(464), f"{value} would saturate"
    above = min(bisect_left(POSITIVE, abs(value)), len(POSITIVE) - 1)
    candidates = {max(above - 1, 0), above}
    code = min(candidates, key=lambda c: (abs(Fraction(POSITIVE[c]) - magnitude), c % 2))
    return code | (0x80 if math.copysign(1.0, value) < 0 else 0)


def half_ulp(magnitude: float) -> float:
    """Return half the distance between the two e4m3 numbers around a magnitude of at most 448."""
    exponent = max(math.frexp(magnitude)[1] - 1, -6) if magnitude else -6
    return 2.0 ** (exponent - 4)


def smallest_exponent(amax: float) -> int:
    """Return the smallest e with amax <= 448 * 2**e, in exact arithmetic."""
    exponent = math.frexp(amax)[1] - 12
    while Fraction(amax) > 448 * Fraction(2) ** exponent:
        exponent += 1
    return exponent


def fp8_block(elements: NDArray[np.float32], *, is_power_of_two: bool) -> tuple[list[int], float]:
    """Return codes and scale of one block; NaN for a block that is not finite."""
    if not np.isfinite(elements).all():
        return [0x7F] * len(elements), math.nan
    amax = max(F32(np.abs(elements).max()), F32(1e-4))
    if is_power_of_two:
        scale = F32(2.0) ** F32(smallest_exponent(float(amax)))
        scaled = elements / scale
    else:
        scale = amax * F32(1 / 448)
        scaled = elements * (F32(448) / amax)
    return [e4m3_code(float(value)) for value in scaled], float(scale)


def float16_toward_zero(values: NDArray[np.float32]) -> NDArray[np.float32]:
    """Truncate to float16: round as numpy does, and step back if that went away from zero."""
    nearest = values.astype(np.float16)
    is_beyond = np.abs(nearest.astype(np.float32)) > np.abs(values)
    return np.where(is_beyond, np.nextafter(nearest, np.float16(0)), nearest).astype(np.float32)


def int8_row(elements: NDArray[np.float32], profile: str) -> tuple[list[int], float]:
    """Return codes and scale of one row whose scale is a normal number."""
    amax = F32(np.abs(elements).max())
    if profile.startswith("rint127"):
        factor = F32(127) / (amax + F32(1e-12 if profile.endswith("eps") else 0))
        return np.rint(elements * factor).astype(int).tolist(), float(F32(1) / factor)
    scale = amax / F32(127)
    quotients = elements / scale
    if profile == "div":
        codes = np.rint(quotients)
    elif profile == "triton":
        codes = np.clip(np.floor(quotients + F32(0.5)), -128, 127)
    else:
        cut = float16_toward_zero(quotients)
        codes = np.sign(cut) * np.floor(np.abs(cut) + F32(0.5))
    return codes.astype(int).tolist(), float(scale)
