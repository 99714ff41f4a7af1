"""Quantise rows to floats with one scale a block and restore them, to the bits of plain torch.

Each thread holds 16 neighbouring elements of a block, so rows are read and codes written 16 bytes
at a time, and the largest magnitude of a block needs three shuffles. Blocks of all rows are counted
through, so that no program is left with a part of a row; only rows with a scale of the row have a
program each. 32768 rows of 7168 on one H100 (2026-11): 1.0 of the rate of a copy to FP8, 0.8 to
mxfp4, 0.6 to nvfp4; restored to bfloat16, 0.8 to 1.0. One token is bound by the launch.
"""

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
from epcomm.kernels.prepared import CHANGES, PreparedLaunch, launch
from epcomm.kernels.quantize.int8 import _INFINITY_BITS, _MAGNITUDE_MASK, _NAN_BITS, quotient_of
from epcomm.kernels.rounding import cast
from epcomm.kernels.rows.tiles import movable
from epcomm.platforms.cuda import compute_capability
from epcomm.types import ROW_SCALE_BYTES, WireDtype, WireFormat, WireTensor

# Number of elements that a program of four warps holds, unless one block is larger.
_TILE_ELEMENTS = 4 * ELEMENTS_PER_WARP
# Ada is the first GPU that converts to e4m3 in hardware; older GPUs use integer arithmetic.
_FIRST_WITH_E4M3 = (8, 9)

# The constants are those of quantization/floats.py; tests compare the bits of both.
_E4M3_MAX = tl.constexpr(448.0)
_E4M3_MAX_BITS = tl.constexpr(0x43E00000)
_E2M1_MAX = tl.constexpr(6.0)
_E2M1_MAX_BITS = tl.constexpr(0x40C00000)
_ONE_BITS = tl.constexpr(0x3F800000)
_RECIPROCAL_OF_MAX = tl.constexpr(0.0022321429569274187)
_FRACTION_MASK = tl.constexpr(0x7FFFFF)
AMAX_FLOOR_BITS = tl.constexpr(0x38D1B717)
_ROW_AMAX_FLOOR = tl.constexpr(2688 * 2.0**-120)
_E8M0_NAN = tl.constexpr(0xFF)
# 2**-127, which e8m0 stores as 0, is a subnormal float32.
_LEAST_POWER_BITS = tl.constexpr(0x400000)
_E4M3_NAN = tl.constexpr(0x7F)
# 2**-6, the smallest normal e4m3 number, and its bits.
_E4M3_NORMAL = tl.constexpr(2.0**-6)
_E4M3_NORMAL_BITS = tl.constexpr(0x3C800000)
# In float32, 2**14 has a unit in the last place of 2**-9, as subnormal e4m3 numbers have.
_SUBNORMAL_SHIFT = tl.constexpr(16384.0)
_SUBNORMAL_SHIFT_BITS = tl.constexpr(0x46800000)
_ROW_SCALE_BYTES = tl.constexpr(ROW_SCALE_BYTES)


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
def _e2m1_code(value: tl.tensor) -> tl.tensor:
    """Return the nearest e2m1 codes of float32 values, at most 7, ties to even: -5 is 0xE, or -4.

    Steps are half of a binade, which is at least 1: 2**22 binades plus a magnitude end in its
    steps. Bits above the fourth are undefined.
    """
    bits = value.to(tl.int32, bitcast=True)
    magnitude = tl.minimum(bits & _MAGNITUDE_MASK, _E2M1_MAX_BITS)
    # The exponent counts twice, 2 * 149 where the binade is 1, and six steps make that 8 * 38.
    binades = tl.maximum(magnitude & _INFINITY_BITS, _ONE_BITS) + ((22 << 23) + 6)
    steps = magnitude.to(tl.float32, bitcast=True) + binades.to(tl.float32, bitcast=True)
    code = steps.to(tl.int32, bitcast=True) + (binades >> 22)
    return code ^ ((code ^ (bits >> 28)) & 8)


@triton.jit
def _power_of_two(amax_bits: tl.tensor, MOST_BITS: tl.constexpr) -> tl.tensor:
    """Return the biased exponent of the least power of two with amax <= most * power, at least 0.

    With most = 448, amax = 448 has the exponent 127, and any larger amax the next.
    """
    # Bits of numbers have their order, so that a fraction beyond that of `most` carries.
    return tl.maximum(((amax_bits - MOST_BITS + _FRACTION_MASK) >> 23) + 127, 0)


@triton.jit
def quantize_blocks(
    x: tl.tensor,
    IS_POWER_OF_TWO: tl.constexpr,
    HAS_E4M3: tl.constexpr,
    FLOOR_BITS: tl.constexpr = AMAX_FLOOR_BITS,
) -> tuple[tl.tensor, tl.tensor]:
    """Return codes [blocks, columns], uint8, and scales [blocks] of the rows of x, one block a row.

    The block 896 448 1 0, with powers of two, has the codes of 448 224 0.5 0 and the scale 128.
    """
    # Magnitudes as integers have the order of the numbers, with NaN above infinity.
    amax_bits = tl.max(x.to(tl.int32, bitcast=True) & _MAGNITUDE_MASK, axis=1)
    is_finite = amax_bits < _INFINITY_BITS
    amax_bits = tl.maximum(tl.where(is_finite, amax_bits, 0), FLOOR_BITS)
    if IS_POWER_OF_TWO:
        exponent = _power_of_two(amax_bits, _E4M3_MAX_BITS)
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


@triton.jit
def finite_amax(x: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """Return the bits of the largest magnitudes of blocks, 0 if not finite, and which are."""
    amax_bits = tl.max(x.to(tl.int32, bitcast=True) & _MAGNITUDE_MASK, axis=1)
    is_finite = amax_bits < _INFINITY_BITS
    return tl.where(is_finite, amax_bits, 0), is_finite


@triton.jit
def row_scale_of(amax_bits: tl.tensor) -> tl.tensor:
    """Return the scale of a row, from the finite_amax() of its blocks: 2 of 0 and 5376."""
    row_amax = tl.maximum(tl.max(amax_bits.to(tl.float32, bitcast=True), axis=0), _ROW_AMAX_FLOOR)
    return tl.math.div_rn(row_amax, tl.zeros_like(row_amax) + _E4M3_MAX * _E2M1_MAX)


@triton.jit
def quantize_blocks_fp4(x: tl.tensor, row_scale: tl.tensor | None) -> tuple[tl.tensor, tl.tensor]:
    """Return bytes [blocks, columns / 2] and scales [blocks], uint8.

    row_scale: that of the row of all blocks, or None: scales of blocks are powers of two.
    The block 12 6 0.5 0, with powers of two, has the codes of 6 3 0 0 and the scale 128.
    """
    amax_bits, is_finite = finite_amax(x)  # pyright: ignore[reportGeneralTypeIssues]
    if row_scale is not None:
        amax = amax_bits.to(tl.float32, bitcast=True)
        row_factor = tl.math.div_rn(tl.zeros_like(row_scale) + 1.0, row_scale)
        # Quotients that are not rounded correctly are below 2**-6.
        quotient = quotient_of(amax, tl.zeros_like(row_scale) + _E2M1_MAX)
        quotient = quotient_of(quotient, row_scale)
        quotient = tl.minimum(tl.maximum(quotient, _E4M3_NORMAL), _E4M3_MAX)
        bits = quotient.to(tl.int32, bitcast=True)
        # Keep 3 of 23 fraction bits of a normal number; the bias shrinks by 120.
        code = (bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20
        rounded = (code << 20).to(tl.float32, bitcast=True)
        factor = tl.math.div_rn(tl.zeros_like(amax) + row_factor, rounded)
        scale = tl.where(is_finite, code - (120 << 3), _E4M3_NAN).to(tl.uint8)
    else:
        exponent = _power_of_two(amax_bits, _E2M1_MAX_BITS)
        scale = tl.where(is_finite, exponent, _E8M0_NAN).to(tl.uint8)
        factor = ((254 - exponent) << 23).to(tl.float32, bitcast=True)
    codes = tl.reshape(_e2m1_code(x * factor[:, None]), [x.shape[0], x.shape[1] // 2, 2])
    low, high = tl.split(codes)
    items = tl.where(is_finite[:, None], (low & 15) | (high << 4), 0)
    return items.to(tl.uint8), scale


@triton.jit(do_not_specialize=["num_blocks"])
def _quantize_floats_kernel(
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
    FLOOR_BITS: tl.constexpr,
    PER_ITEM: tl.constexpr,
    HAS_ROW_SCALE: tl.constexpr,
    TILE_BLOCKS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
) -> None:
    """Quantise TILE_BLOCKS blocks a program; one row has ceil(HIDDEN / BLOCK) blocks.

    HIDDEN = 5, BLOCK = 4, row 896 448 1 0 | 3.5: the magnitudes are 896 and 3.5, the power-of-two
    scales 2 and 2**-7 (stored as 128 and 120), the codes those of 448 224 0.5 0 | 448.
    HAS_ROW_SCALE: a program has one row, with at most TILE_BLOCKS blocks.
    """
    BLOCKS_PER_ROW: tl.constexpr = (HIDDEN + BLOCK - 1) // BLOCK
    block = tl.program_id(0) * TILE_BLOCKS + tl.arange(0, TILE_BLOCKS)
    is_block = block < num_blocks
    # Rows become int64 before a stride multiplies them: they may begin beyond 2**31 elements.
    if HAS_ROW_SCALE:
        row, block_of_row = (block // TILE_BLOCKS).to(tl.int64), block % TILE_BLOCKS
        is_block = block_of_row < BLOCKS_PER_ROW
    else:
        row, block_of_row = (block // BLOCKS_PER_ROW).to(tl.int64), block % BLOCKS_PER_ROW
    lane = tl.arange(0, TILE_COLUMNS)
    column = block_of_row[:, None] * BLOCK + lane[None, :]
    is_element = is_block[:, None] & (lane < BLOCK)[None, :] & (column < HIDDEN)

    x = tl.load(x_ptr + row[:, None] * X_STRIDE + column, mask=is_element, other=0.0)
    x, scale_ptr = x.to(tl.float32), scales_ptr + row * SCALES_STRIDE + block_of_row
    if PER_ITEM == 1:
        codes, scale = quantize_blocks(x, IS_POWER_OF_TWO, HAS_E4M3, FLOOR_BITS)  # pyright: ignore[reportGeneralTypeIssues]
        tl.store(scale_ptr, scale, mask=is_block)
        tl.store(codes_ptr + row[:, None] * CODES_STRIDE + column, codes, mask=is_element)
    else:
        row_scale = row_scale_of(finite_amax(x)[0]) if HAS_ROW_SCALE else None
        items, scale = quantize_blocks_fp4(x, row_scale)  # pyright: ignore[reportGeneralTypeIssues]
        if HAS_ROW_SCALE:
            row_bits = row_scale.to(tl.int32, bitcast=True)
            # The bytes of the row's scale, lowest first, then those of blocks, padded with zeros.
            PADDED: tl.constexpr = (BLOCKS_PER_ROW + 3) // 4 * 4
            is_byte = block_of_row < _ROW_SCALE_BYTES
            tl.store(scale_ptr, (row_bits >> (block_of_row % 4 * 8)).to(tl.uint8), mask=is_byte)
            scale_ptr += _ROW_SCALE_BYTES
            tl.store(scale_ptr, tl.where(is_block, scale, 0), mask=block_of_row < PADDED)
        else:
            tl.store(scale_ptr, scale, mask=is_block)
        item = tl.arange(0, TILE_COLUMNS // 2)
        place = block_of_row[:, None] * (BLOCK // 2) + item[None, :]
        is_item = is_block[:, None] & (item < BLOCK // 2)[None, :] & (place < HIDDEN // 2)
        tl.store(codes_ptr + row[:, None] * CODES_STRIDE + place, items, mask=is_item)


def quantize_floats_triton(hidden_states: Tensor, wire: WireTensor) -> None:
    """Write codes and scales of rows, by the formula of quantization/floats.py.

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
    check_rows("quantize_floats_triton", hidden_states=hidden_states, codes=codes, scales=scales)
    num_rows, hidden_size = hidden_states.shape
    num_blocks = num_rows * wire.format.num_blocks(hidden_size)
    if num_blocks >= 2**31:
        raise ShapeError(
            f"quantize_floats_triton: {num_rows} rows have {num_blocks} blocks, expected fewer "
            "than 2**31; quantise in parts"
        )
    if num_rows == 0:
        return
    strides = (hidden_states.stride(0), codes.stride(0), scales.stride(0))
    blocks_of_program, prepared = _prepared(
        hidden_states.dtype, hidden_states.device, hidden_size, strides, wire.format
    )
    num_programs = -(-num_blocks // blocks_of_program)
    prepared(num_programs, hidden_states, movable(codes), movable(scales), num_blocks)


# Decoding quantises rows of the same form in every call; making the constants takes host time.
@lru_cache(maxsize=256)
def _prepared(
    dtype: torch.dtype,
    device: torch.device,
    hidden_size: int,
    strides: tuple[int, int, int],
    wire_format: WireFormat,
) -> tuple[int, PreparedLaunch]:
    """Return the blocks of a program and the launch for rows of one form.

    strides: of hidden states, codes and scales.
    """
    kind, scale_block = wire_format.dtype, wire_format.scale_block or hidden_size
    tile_columns = next_power_of_two(scale_block)
    blocks = tile_blocks = max(1, _TILE_ELEMENTS // tile_columns)
    if kind.has_row_scale:
        blocks = wire_format.num_blocks(hidden_size)
        tile_blocks = max(ROW_SCALE_BYTES, next_power_of_two(blocks))
    x_stride, codes_stride, scales_stride = strides
    return blocks, PreparedLaunch(
        _quantize_floats_kernel,
        (CHANGES, CHANGES, CHANGES, CHANGES),
        dict(
            HIDDEN=hidden_size,
            BLOCK=scale_block,
            X_STRIDE=x_stride,
            CODES_STRIDE=codes_stride,
            SCALES_STRIDE=scales_stride,
            IS_POWER_OF_TWO=wire_format.has_exponents,
            HAS_E4M3=has_e4m3(device),
            FLOOR_BITS=AMAX_FLOOR_BITS.value if kind is WireDtype.FP8_E4M3 else 0,
            PER_ITEM=kind.per_item,
            HAS_ROW_SCALE=kind.has_row_scale,
            TILE_BLOCKS=tile_blocks,
            TILE_COLUMNS=tile_columns,
            num_warps=warps_for(tile_blocks * tile_columns),
            **EXACT,
        ),
    )


@triton.jit
def float_of(code: tl.tensor, SIGN: tl.constexpr, HAS_E4M3: tl.constexpr) -> tl.tensor:
    """Return the floats of e4m3 codes (SIGN 128) or of e2m1 codes (8), as 0x7E and 0x7 are 448, 6.

    The bits of a code, moved to those of float32, have an exponent that is too small by as much for
    every code.
    """
    bits, magnitude = code.to(tl.int32), code.to(tl.int32) & (SIGN - 1)
    if SIGN == 8:
        value = ((magnitude << 22) | ((bits & 8) << 28)).to(tl.float32, bitcast=True) * 2.0**126
    elif HAS_E4M3:
        value = code.to(tl.float8e4nv, bitcast=True).to(tl.float32)
    else:
        value = ((magnitude << 20) | ((bits & 128) << 24)).to(tl.float32, bitcast=True) * 2.0**120
        value = tl.where(magnitude == _E4M3_NAN, float("nan"), value)
    return value


@triton.jit
def power_of(exponent: tl.tensor) -> tl.tensor:
    """Return the powers of two of biased exponents: 128 is 2."""
    power = exponent.to(tl.int32)
    bits = tl.where(power == 0, _LEAST_POWER_BITS, power << 23)
    bits = tl.where(power == _E8M0_NAN, _NAN_BITS, bits)
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def in_fragments(values: tl.tensor) -> tl.tensor:
    """Order the elements of each 64 of a row so that one thread reads 16 neighbours as an operand.

    In 16 elements of a row, tensor cores want 2 i, 2 i + 1 and those 8 further of thread i. A
    product does not change if both operands have the same order.
    """
    parts = tl.reshape(values, [values.numel // 64, 4, 4, 2, 2])
    return tl.reshape(tl.permute(parts, (0, 2, 3, 1, 4)), values.shape)


@triton.jit(do_not_specialize=["num_blocks"])
def _restore_kernel(
    codes_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    out_ptr: tl.tensor,
    num_blocks: tl.tensor,
    HIDDEN: tl.constexpr,
    BLOCK: tl.constexpr,
    CODES_STRIDE: tl.constexpr,
    SCALES_STRIDE: tl.constexpr,
    HAS_EXPONENTS: tl.constexpr,
    HAS_ROW_SCALE: tl.constexpr,
    IS_INTEGER: tl.constexpr,
    HAS_E4M3: tl.constexpr,
    PER_ITEM: tl.constexpr,
    IN_FRAGMENTS: tl.constexpr,
    TILE_BLOCKS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
) -> None:
    """Restore TILE_BLOCKS blocks a program: codes 0x30 0x38 (0.5, 1) with scale 2 are 1 and 2."""
    BLOCKS_PER_ROW: tl.constexpr = (HIDDEN + BLOCK - 1) // BLOCK
    block = tl.program_id(0) * TILE_BLOCKS + tl.arange(0, TILE_BLOCKS)
    is_block = block < num_blocks
    # Rows become int64 before a stride multiplies them: they may begin beyond 2**31 elements.
    row, block_of_row = (block // BLOCKS_PER_ROW).to(tl.int64), block % BLOCKS_PER_ROW
    of_row_ptr = scales_ptr + row * SCALES_STRIDE
    if HAS_ROW_SCALE:
        bits = tl.zeros([TILE_BLOCKS], tl.int32)
        for byte in tl.static_range(_ROW_SCALE_BYTES):
            bits |= tl.load(of_row_ptr + byte, mask=is_block, other=0).to(tl.int32) << (8 * byte)
        scale = tl.load(of_row_ptr + _ROW_SCALE_BYTES + block_of_row, mask=is_block, other=0)
        scale = float_of(scale, 128, HAS_E4M3) * bits.to(tl.float32, bitcast=True)
    else:
        scale = tl.load(of_row_ptr + block_of_row, mask=is_block, other=0)
        if HAS_EXPONENTS:
            scale = power_of(scale)

    item = tl.arange(0, TILE_COLUMNS // PER_ITEM)
    place = block_of_row[:, None] * (BLOCK // PER_ITEM) + item[None, :]
    is_item = is_block[:, None] & (item < BLOCK // PER_ITEM)[None, :] & (place < HIDDEN // PER_ITEM)
    code = tl.load(codes_ptr + row[:, None] * CODES_STRIDE + place, mask=is_item, other=0)
    if IS_INTEGER:
        value = code.to(tl.int8, bitcast=True).to(tl.float32)
    elif PER_ITEM == 2:
        value = float_of(
            tl.reshape(tl.join(code, code >> 4), [TILE_BLOCKS, TILE_COLUMNS]), 8, False
        )
    else:
        value = float_of(code, 128, HAS_E4M3)
    lane = tl.arange(0, TILE_COLUMNS)
    column = block_of_row[:, None] * BLOCK + lane[None, :]
    is_element = is_block[:, None] & (lane < BLOCK)[None, :] & (column < HIDDEN)
    value = cast(value * scale[:, None], out_ptr.dtype.element_ty)  # pyright: ignore[reportAttributeAccessIssue]
    if IN_FRAGMENTS:
        value = in_fragments(value)
    tl.store(out_ptr + row[:, None] * HIDDEN + column, value, mask=is_element)


def restore_triton(wire: WireTensor, dtype: torch.dtype, *, are_fragments: bool = False) -> Tensor:
    """Multiply codes [R, H] by their row-major scales in float32: [R, H], rounded to `dtype`.

    are_fragments: in the order of in_fragments(), for mxfp8 with H a multiple of 64.

    Compiled for each format, H and strides.
    Host sync: none.   Graph capture: after one call.   Deterministic: yes.
    Raises:
        ShapeError: a tensor is not on a GPU, or has not two dimensions.
    """
    wire_format = wire.format
    codes, scales, hidden_size = wire.data, wire.scales, wire.hidden_size
    assert scales is not None, "quantised formats have scales"
    check_rows("restore_triton", codes=codes, scales=scales)
    out = codes.new_empty(codes.shape[0], hidden_size, dtype=dtype)
    num_blocks = codes.shape[0] * wire_format.num_blocks(hidden_size)
    if num_blocks == 0:
        return out
    scale_block = wire_format.scale_block or hidden_size
    tile_columns = next_power_of_two(scale_block)
    tile_blocks = max(1, _TILE_ELEMENTS // tile_columns)
    launch(
        _restore_kernel,
        -(-num_blocks // tile_blocks),
        (movable(codes), movable(scales), out, num_blocks),
        HIDDEN=hidden_size,
        BLOCK=scale_block,
        CODES_STRIDE=codes.stride(0),
        SCALES_STRIDE=scales.stride(0),
        HAS_EXPONENTS=wire_format.has_exponents,
        HAS_ROW_SCALE=wire_format.dtype.has_row_scale,
        IS_INTEGER=codes.dtype is torch.int8,
        HAS_E4M3=has_e4m3(codes.device),
        PER_ITEM=wire_format.dtype.per_item,
        IN_FRAGMENTS=are_fragments,
        TILE_BLOCKS=tile_blocks,
        TILE_COLUMNS=tile_columns,
        num_warps=warps_for(tile_blocks * tile_columns),
        **EXACT,
    )
    return out


def has_e4m3(device: torch.device) -> bool:
    """Return whether the device converts to e4m3 in hardware."""
    found = None if IS_INTERPRETED else compute_capability(device)
    return found is not None and found >= _FIRST_WITH_E4M3
