"""Quantise rows to INT8 with one scale a row, to the bits of epcomm.quantization.quantize().

One program holds a whole row in registers, so each element is read once although its code needs the
largest magnitude of the row; 16 neighbouring elements a thread make 16-byte loads and stores. Rows
of fewer than 1024 elements leave a program with little to do, and rows beyond about 65,000 elements
no longer fit into registers.
"""

import triton
import triton.language as tl
from torch import Tensor

from epcomm.kernels.launch import EXACT, IS_INTERPRETED, check_rows, next_power_of_two, warps_for
from epcomm.kernels.prepared import launch
from epcomm.types import Int8Profile, WireTensor

# The constants are those of quantization/int8.py; tests compare the bits of both.
_INT8_MAX = tl.constexpr(127.0)
_AMAX_EPSILON = tl.constexpr(1e-12)
_FLOAT16_MASK = tl.constexpr(~0x1FFF)
_MAGNITUDE_MASK = tl.constexpr(0x7FFFFFFF)
_INFINITY_BITS = tl.constexpr(0x7F800000)
_NAN_BITS = tl.constexpr(0x7FC00000)
_SMALL_SCALE = tl.constexpr(2.0**-60)
_GROWTH = tl.constexpr(2.0**64)
_IS_INTERPRETED = tl.constexpr(IS_INTERPRETED)
# 1.5 * 2**23: a float32 sum with it has no fraction bits left, rounded to nearest even.
_ROUNDING_SHIFT = tl.constexpr(12582912.0)


@triton.jit
def round_half_even(value: tl.tensor) -> tl.tensor:
    """Round values of a magnitude below 2**22 to nearest even: 0.5 is 0, 1.5 is 2."""
    return (value + _ROUNDING_SHIFT) - _ROUNDING_SHIFT


@triton.jit
def _round_quotient(quotient: tl.tensor, PROFILE: tl.constexpr) -> tl.tensor:
    """Round a quotient x / scale, so that truncation to an integer gives its code.

    0.5 has the code 0 with div and 1 with the two other profiles. Clamping the quotient before
    rounding changes no code, because halves are exact.
    """
    quotient = tl.minimum(tl.maximum(quotient, -_INT8_MAX - 1.0), _INT8_MAX)
    if PROFILE == "triton":
        return tl.floor(quotient + 0.5)
    quotient = tl.maximum(quotient, -_INT8_MAX)
    if PROFILE == "div":
        return round_half_even(quotient)
    # The cut is right for normal float16 numbers; smaller ones round to the code 0 either way.
    cut = (quotient.to(tl.int32, bitcast=True) & _FLOAT16_MASK).to(tl.float32, bitcast=True)
    # Adding half away from zero makes truncation round: -1.5 becomes -2.
    return cut + tl.where(cut < 0, -0.5, 0.5)


@triton.jit
def quotient_of(x: tl.tensor, scale: tl.tensor) -> tl.tensor:
    """Divide x by scale, correctly rounded above 2**-20; scale: [], or [rows, 1].

    There is one division a row, because a division for each element would take longer than the
    memory: a product with the rounded reciprocal is off by a unit at most, and its remainder, exact
    in one fused multiplication and addition, corrects it (Markstein, 1990).
    """
    if _IS_INTERPRETED:
        # The interpreter rounds the product of a fused multiplication and addition too.
        return tl.math.div_rn(x, tl.zeros_like(x) + scale)
    # The remainder of small numbers would lose bits; scaling by a power of two loses none.
    grown = tl.where(scale < _SMALL_SCALE, _GROWTH, 1.0)
    scale *= grown
    x *= grown
    reciprocal = tl.math.div_rn(tl.zeros_like(scale) + 1.0, scale)
    quotient = x * reciprocal
    remainder = tl.fma(tl.zeros_like(x) - quotient, tl.zeros_like(x) + scale, x)
    return tl.fma(remainder, tl.zeros_like(x) + reciprocal, quotient)


@triton.jit
def quantize_row(x: tl.tensor, PROFILE: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """Return codes [columns], int8, and the scale of one row of float32 values.

    With rint127 the row 254 1 -3 9 has the codes 127 0 -2 4 and the scale 2.
    """
    return quantize_part(x, largest_bits(x), PROFILE)  # pyright: ignore[reportReturnType]


@triton.jit
def largest_bits(x: tl.tensor) -> tl.tensor:
    """Return the largest magnitude of a row as bits: those of 254 for 254 1 -3 9."""
    # Magnitudes as integers have the order of the numbers, with NaN above infinity.
    return tl.max(x.to(tl.int32, bitcast=True) & _MAGNITUDE_MASK, axis=0)


@triton.jit
def quantize_part(
    x: tl.tensor, amax_bits: tl.tensor, PROFILE: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Return codes, int8, and the scale of a part of a row whose largest_bits() are known.

    amax_bits and the scale are [], or [rows, 1] for parts of several rows.
    """
    is_finite = amax_bits < _INFINITY_BITS
    amax = tl.where(is_finite, amax_bits, 0).to(tl.float32, bitcast=True)
    # div_rn rounds correctly; `/` would be approximate.
    if PROFILE == "rint127" or PROFILE == "rint127eps":
        if PROFILE == "rint127eps":
            amax += _AMAX_EPSILON
        factor = tl.math.div_rn(_INT8_MAX, amax)
        is_usable = factor.to(tl.int32, bitcast=True) < _INFINITY_BITS
        codes, scale = round_half_even(x * factor), tl.math.div_rn(1.0, factor)
    else:
        scale = tl.math.div_rn(amax, tl.zeros_like(amax) + _INT8_MAX)
        is_usable = scale > 0
        codes = _round_quotient(quotient_of(x, tl.where(is_usable, scale, 1.0)), PROFILE)
    # Codes and scale are 0 where the scale is not usable, and 0 and NaN where x is not finite. NaN
    # is replaced before the cast, because it has no integer.
    codes = tl.where(is_finite & is_usable, codes, 0.0).to(tl.int32).to(tl.int8)
    scale_bits = tl.where(is_usable, scale, 0.0).to(tl.int32, bitcast=True)
    return codes, tl.where(is_finite, scale_bits, _NAN_BITS).to(tl.float32, bitcast=True)


@triton.jit
def _quantize_int8_kernel(
    x_ptr: tl.tensor,
    codes_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    HIDDEN: tl.constexpr,
    X_STRIDE: tl.constexpr,
    CODES_STRIDE: tl.constexpr,
    SCALES_STRIDE: tl.constexpr,
    PROFILE: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
) -> None:
    """Quantise one row a program.

    With rint127 the row 254 1 -3 9 has the factor 127 / 254, the scale 2 and codes 127 0 -2 4.
    """
    # Rows become int64 before a stride multiplies them: they may begin beyond 2**31 elements.
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, TILE_COLUMNS)
    is_element = column < HIDDEN
    x = tl.load(x_ptr + row * X_STRIDE + column, mask=is_element, other=0.0).to(tl.float32)
    codes, scale = quantize_row(x, PROFILE)  # pyright: ignore[reportGeneralTypeIssues]
    tl.store(scales_ptr + row * SCALES_STRIDE, scale)
    tl.store(codes_ptr + row * CODES_STRIDE + column, codes, mask=is_element)


def quantize_int8_triton(hidden_states: Tensor, wire: WireTensor, profile: Int8Profile) -> None:
    """Write codes and scales of rows, by the formulas of quantization/int8.py.

    Args:
        hidden_states: [T, H], bfloat16, float16 or float32, of any row stride.
        wire: written; codes [T, H] and scales [T, 1], of any row stride. Stores of codes have 16
            bytes if the row stride is a multiple of 16 bytes.

    Allocates nothing. Compiled for each dtype, H, strides and profile.
    Host sync: none.   Graph capture: after one call.   Deterministic: yes.
    Raises:
        ShapeError: a tensor is not on a GPU, or its columns are not adjacent.
    """
    codes, scales = wire.data, wire.scales
    assert scales is not None, "quantised formats have scales"
    check_rows("quantize_int8_triton", hidden_states=hidden_states, codes=codes, scales=scales)
    num_rows, hidden_size = hidden_states.shape
    if num_rows == 0:
        return
    tile_columns = next_power_of_two(hidden_size)
    launch(
        _quantize_int8_kernel,
        num_rows,
        (hidden_states, codes, scales),
        HIDDEN=hidden_size,
        X_STRIDE=hidden_states.stride(0),
        CODES_STRIDE=codes.stride(0),
        SCALES_STRIDE=scales.stride(0),
        PROFILE=profile.value,
        TILE_COLUMNS=tile_columns,
        num_warps=warps_for(tile_columns),
        **EXACT,
    )
