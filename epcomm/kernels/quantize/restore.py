"""Multiply codes by their scales, to the bits of epcomm.quantization.dequantize().

Each element is read and written once, and there is no other arithmetic than one product, so that
memory is the limit. Not yet timed.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from epcomm.kernels.launch import EXACT, check_rows, next_power_of_two, warps_for
from epcomm.kernels.prepared import launch
from epcomm.quantization.scale_layout import row_major
from epcomm.types import ROW_SCALE_BYTES, WireTensor

# Elements of a program of four warps, unless one block is larger.
_TILE_ELEMENTS = 4096

_NAN_BITS = tl.constexpr(0x7FC00000)
_E4M3_NAN = tl.constexpr(0x7F)
_E8M0_NAN = tl.constexpr(0xFF)
# 2**-127, which e8m0 stores as 0, is a subnormal float32.
_LEAST_POWER_BITS = tl.constexpr(0x400000)
_ROW_SCALE_BYTES = tl.constexpr(ROW_SCALE_BYTES)


@triton.jit
def _float_of(code: tl.tensor, SIGN: tl.constexpr, SHIFT: tl.constexpr) -> tl.tensor:
    """Return the floats of e4m3 codes (SIGN 128, SHIFT 7) or of e2m1 codes (8, 9): 0x7E is 448.

    The bits of a magnitude are those of a float16, whose exponent has a larger bias.
    """
    magnitude = code.to(tl.int16) & (SIGN - 1)
    value = (magnitude << SHIFT).to(tl.float16, bitcast=True).to(tl.float32)
    value *= 256.0 if SIGN == 128 else 16384.0
    bits = value.to(tl.int32, bitcast=True)
    if SIGN == 128:
        bits = tl.where(magnitude == _E4M3_NAN, _NAN_BITS, bits)
    # `-value` would be 0 - value, which loses the sign of zero.
    sign = tl.where((code.to(tl.int16) & SIGN) != 0, -0x80000000, 0).to(tl.int32)
    return (bits | sign).to(tl.float32, bitcast=True)


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
    PER_ITEM: tl.constexpr,
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
        scale = _float_of(scale, 128, 7) * bits.to(tl.float32, bitcast=True)
    else:
        scale = tl.load(of_row_ptr + block_of_row, mask=is_block, other=0)
        if HAS_EXPONENTS:
            power = scale.to(tl.int32)
            bits = tl.where(power == 0, _LEAST_POWER_BITS, power << 23)
            bits = tl.where(power == _E8M0_NAN, _NAN_BITS, bits)
            scale = bits.to(tl.float32, bitcast=True)

    lane = tl.arange(0, TILE_COLUMNS)
    column = block_of_row[:, None] * BLOCK + lane[None, :]
    is_element = is_block[:, None] & (lane < BLOCK)[None, :] & (column < HIDDEN)
    code_ptr = codes_ptr + row[:, None] * CODES_STRIDE + column // PER_ITEM
    code = tl.load(code_ptr, mask=is_element, other=0)
    if IS_INTEGER:
        value = code.to(tl.int8, bitcast=True).to(tl.float32)
    elif PER_ITEM == 2:
        value = _float_of(code >> (column % 2 * 4).to(tl.uint8), 8, 9)
    else:
        value = _float_of(code, 128, 7)
    tl.store(out_ptr + row[:, None] * HIDDEN + column, value * scale[:, None], mask=is_element)


def restore_triton(wire: WireTensor) -> Tensor:
    """Multiply codes [R, H] by their scales, [R, H], float32, by the formulas of quantization.

    Compiled for each format, H and strides.
    Host sync: none.   Graph capture: after one call.   Deterministic: yes.
    Raises:
        ShapeError: a tensor is not on a GPU, or has not two dimensions.
    """
    wire, wire_format = row_major(wire), wire.format
    codes, scales, hidden_size = wire.data, wire.scales, wire.hidden_size
    assert scales is not None, "quantised formats have scales"
    check_rows("restore_triton", codes=codes, scales=scales)
    out = codes.new_empty(codes.shape[0], hidden_size, dtype=torch.float32)
    num_blocks = codes.shape[0] * wire_format.num_blocks(hidden_size)
    if num_blocks == 0:
        return out
    scale_block = wire_format.scale_block or hidden_size
    tile_columns = next_power_of_two(scale_block)
    tile_blocks = max(1, _TILE_ELEMENTS // tile_columns)
    launch(
        _restore_kernel,
        -(-num_blocks // tile_blocks),
        (
            codes.view(torch.uint8),
            scales.view(torch.uint8) if scales.itemsize == 1 else scales,
            out,
            num_blocks,
        ),
        HIDDEN=hidden_size,
        BLOCK=scale_block,
        CODES_STRIDE=codes.stride(0),
        SCALES_STRIDE=scales.stride(0),
        HAS_EXPONENTS=wire_format.has_exponents,
        HAS_ROW_SCALE=wire_format.dtype.has_row_scale,
        IS_INTEGER=codes.dtype is torch.int8,
        PER_ITEM=wire_format.dtype.per_item,
        TILE_BLOCKS=tile_blocks,
        TILE_COLUMNS=tile_columns,
        num_warps=warps_for(tile_blocks * tile_columns),
        **EXACT,
    )
    return out
