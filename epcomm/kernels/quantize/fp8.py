"""Quantise rows to FP8 e4m3 with one scale a block, to the bits of epcomm.quantization.quantize().

Each thread holds 16 neighbouring elements of a block, so rows are read and codes written 16 bytes
at a time, and the largest magnitude of a block needs three shuffles. Blocks of all rows are counted
through, so that no program is left with a part of a row. Not yet timed: it should win wherever
memory is the limit; one token is bound by the launch.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from epcomm.errors import ShapeError
from epcomm.kernels.launch import (
    ELEMENTS_PER_WARP,
    EXACT,
    IS_INTERPRETED,
    check_rows,
    next_power_of_two,
    warps_for,
)
from epcomm.kernels.prepared import CHANGES, PreparedLaunch
from epcomm.platforms.cuda import compute_capability
from epcomm.types import WireTensor

# Number of elements that a program of four warps holds, unless one block is larger.
_TILE_ELEMENTS = 4 * ELEMENTS_PER_WARP
# Ada is the first GPU that converts to e4m3 in hardware; older GPUs use integer arithmetic.
_FIRST_WITH_E4M3 = (8, 9)

# The constants are those of quantization/fp8.py; tests compare the bits of both.
_E4M3_MAX = tl.constexpr(448.0)
_RECIPROCAL_OF_MAX = tl.constexpr(0.0022321429569274187)
_FRACTION_OF_E4M3_MAX = tl.constexpr(0x600000)
_FRACTION_MASK = tl.constexpr(0x7FFFFF)
_AMAX_FLOOR_BITS = tl.constexpr(0x38D1B717)
_MAGNITUDE_MASK = tl.constexpr(0x7FFFFFFF)
_INFINITY_BITS = tl.constexpr(0x7F800000)
_NAN_BITS = tl.constexpr(0x7FC00000)
_E8M0_NAN = tl.constexpr(0xFF)
_E4M3_NAN = tl.constexpr(0x7F)
# 2**-6, the smallest normal e4m3 number.
_E4M3_NORMAL_BITS = tl.constexpr(0x3C800000)
# In float32, 2**14 has a unit in the last place of 2**-9, as subnormal e4m3 numbers have.
_SUBNORMAL_SHIFT = tl.constexpr(16384.0)
_SUBNORMAL_SHIFT_BITS = tl.constexpr(0x46800000)


@triton.jit
def _e4m3_code(value: tl.tensor) -> tl.tensor:
    """Return the nearest e4m3 code of float32 values up to 448, ties to even: 31.6 is 0x60, or 32.

    It serves hardware without the conversion, and the interpreter, whose conversion loses carries.
    """
    bits = value.to(tl.int32, bitcast=True)
    magnitude = bits & _MAGNITUDE_MASK
    # Keep 3 of 23 fraction bits; a carry moves the exponent as it should. The bias shrinks by 120.
    rounded = magnitude + 0x7FFFF + ((magnitude >> 20) & 1)
    normal = (rounded >> 20) - (120 << 3)
    shifted = magnitude.to(tl.float32, bitcast=True) + _SUBNORMAL_SHIFT
    subnormal = shifted.to(tl.int32, bitcast=True) - _SUBNORMAL_SHIFT_BITS
    code = tl.where(magnitude < _E4M3_NORMAL_BITS, subnormal, normal) | ((bits >> 24) & 0x80)
    return tl.where(magnitude > _INFINITY_BITS, _E4M3_NAN, code).to(tl.uint8)


@triton.jit
def quantize_blocks(
    x: tl.tensor, IS_POWER_OF_TWO: tl.constexpr, HAS_E4M3: tl.constexpr
) -> tuple[tl.tensor, tl.tensor]:
    """Return codes [blocks, columns], uint8, and scales [blocks] of the rows of x, one block a row.

    The block 896 448 1 0, with powers of two, has the codes of 448 224 0.5 0 and the scale 128.
    """
    # Magnitudes as integers have the order of the numbers, with NaN above infinity.
    amax_bits = tl.max(x.to(tl.int32, bitcast=True) & _MAGNITUDE_MASK, axis=1)
    is_finite = amax_bits < _INFINITY_BITS
    amax_bits = tl.maximum(tl.where(is_finite, amax_bits, 0), _AMAX_FLOOR_BITS)
    if IS_POWER_OF_TWO:
        exponent = (amax_bits >> 23) - 8
        exponent += ((amax_bits & _FRACTION_MASK) > _FRACTION_OF_E4M3_MAX).to(tl.int32)
        scale = tl.where(is_finite, exponent, _E8M0_NAN).to(tl.uint8)
        factor = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
    else:
        amax = amax_bits.to(tl.float32, bitcast=True)
        scale_bits = (amax * _RECIPROCAL_OF_MAX).to(tl.int32, bitcast=True)
        scale = tl.where(is_finite, scale_bits, _NAN_BITS).to(tl.float32, bitcast=True)
        # div_rn rounds correctly; `/` would be approximate.
        factor = tl.math.div_rn(tl.zeros_like(amax) + _E4M3_MAX, amax)

    # A factor of NaN makes all codes of the block NaN, at no cost an element.
    factor_bits = tl.where(is_finite, factor.to(tl.int32, bitcast=True), _NAN_BITS)
    scaled = x * factor_bits.to(tl.float32, bitcast=True)[:, None]
    if HAS_E4M3:  # noqa: SIM108
        codes = scaled.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
    else:
        codes = _e4m3_code(scaled)
    return codes, scale


@triton.jit(do_not_specialize=["num_blocks"])
def _quantize_fp8_kernel(
    x_ptr: tl.tensor,
    codes_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    num_blocks: tl.tensor,
    HIDDEN: tl.constexpr,
    BLOCK: tl.constexpr,
    X_STRIDE: tl.constexpr,
    CODES_STRIDE: tl.constexpr,
    SCALES_STRIDE: tl.constexpr,
    IS_POWER_OF_TWO: tl.constexpr,
    HAS_E4M3: tl.constexpr,
    TILE_BLOCKS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
) -> None:
    """Quantise TILE_BLOCKS blocks a program; one row has ceil(HIDDEN / BLOCK) blocks.

    HIDDEN = 5, BLOCK = 4, row 896 448 1 0 | 3.5: the magnitudes are 896 and 3.5, the power-of-two
    scales 2 and 2**-7 (stored as 128 and 120), the codes those of 448 224 0.5 0 | 448.
    """
    BLOCKS_PER_ROW: tl.constexpr = (HIDDEN + BLOCK - 1) // BLOCK
    block = tl.program_id(0) * TILE_BLOCKS + tl.arange(0, TILE_BLOCKS)
    # Rows become int64 before a stride multiplies them: they may begin beyond 2**31 elements.
    row = (block // BLOCKS_PER_ROW).to(tl.int64)
    block_of_row = block % BLOCKS_PER_ROW
    lane = tl.arange(0, TILE_COLUMNS)
    column = block_of_row[:, None] * BLOCK + lane[None, :]
    is_block = block < num_blocks
    is_element = is_block[:, None] & (lane < BLOCK)[None, :] & (column < HIDDEN)

    x = tl.load(x_ptr + row[:, None] * X_STRIDE + column, mask=is_element, other=0.0)
    codes, scale = quantize_blocks(x.to(tl.float32), IS_POWER_OF_TWO, HAS_E4M3)  # pyright: ignore[reportGeneralTypeIssues]
    tl.store(scales_ptr + row * SCALES_STRIDE + block_of_row, scale, mask=is_block)
    tl.store(codes_ptr + row[:, None] * CODES_STRIDE + column, codes, mask=is_element)


def quantize_fp8_triton(hidden_states: Tensor, wire: WireTensor) -> None:
    """Write codes and scales of rows, by the formula of quantization/fp8.py.

    Args:
        hidden_states: [T, H], bfloat16, float16 or float32, of any row stride.
        wire: written; codes [T, H] and row-major scales, of any row stride. Stores of codes have 16
            bytes if the row stride is a multiple of 16 bytes.

    Allocates nothing. Compiled for each dtype, H and strides.
    Host sync: none.   Graph capture: after one call.   Deterministic: yes.
    Raises:
        ShapeError: a tensor is not on a GPU or its columns are not adjacent, or 2**31 blocks.
    """
    codes, scales = wire.data, wire.scales
    assert scales is not None, "quantised formats have scales"
    check_rows("quantize_fp8_triton", hidden_states=hidden_states, codes=codes, scales=scales)
    num_rows, hidden_size = hidden_states.shape
    scale_block = wire.format.scale_block or hidden_size
    num_blocks = scales.numel()
    if num_blocks >= 2**31:
        raise ShapeError(
            f"quantize_fp8_triton: {num_rows} rows have {num_blocks} blocks, expected fewer than "
            "2**31; quantise in parts"
        )
    if num_rows == 0:
        return
    is_power_of_two = scales.dtype == torch.float8_e8m0fnu
    prepared = _prepared(
        hidden_states.dtype,
        hidden_states.device,
        hidden_size,
        (hidden_states.stride(0), codes.stride(0), scales.stride(0)),
        scale_block,
        is_power_of_two,
    )
    tile_blocks, _ = _tile_of(scale_block)
    prepared(
        -(-num_blocks // tile_blocks),
        hidden_states,
        codes.view(torch.uint8),
        scales.view(torch.uint8) if is_power_of_two else scales,
        num_blocks,
    )


# Decoding quantises rows of the same form in every call; making the constants takes host time.
@lru_cache(maxsize=256)
def _prepared(
    dtype: torch.dtype,
    device: torch.device,
    hidden_size: int,
    strides: tuple[int, int, int],
    scale_block: int,
    is_power_of_two: bool,
) -> PreparedLaunch:
    """Return the launch for rows of one form; strides: of hidden states, codes and scales."""
    tile_blocks, tile_columns = _tile_of(scale_block)
    x_stride, codes_stride, scales_stride = strides
    return PreparedLaunch(
        _quantize_fp8_kernel,
        (CHANGES, CHANGES, CHANGES, CHANGES),
        dict(
            HIDDEN=hidden_size,
            BLOCK=scale_block,
            X_STRIDE=x_stride,
            CODES_STRIDE=codes_stride,
            SCALES_STRIDE=scales_stride,
            IS_POWER_OF_TWO=is_power_of_two,
            HAS_E4M3=has_e4m3(device),
            TILE_BLOCKS=tile_blocks,
            TILE_COLUMNS=tile_columns,
            num_warps=warps_for(tile_blocks * tile_columns),
            **EXACT,
        ),
    )


def _tile_of(scale_block: int) -> tuple[int, int]:
    """Return the blocks of a program, and the columns that hold one block: both powers of two."""
    tile_columns = next_power_of_two(scale_block)
    return max(1, _TILE_ELEMENTS // tile_columns), tile_columns


def has_e4m3(device: torch.device) -> bool:
    """Return whether the device converts to e4m3 in hardware."""
    found = None if IS_INTERPRETED else compute_capability(device)
    return found is not None and found >= _FIRST_WITH_E4M3
