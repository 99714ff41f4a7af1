"""Sums in 8 or 4 bits in combine of low latency: codes, and a scale for each block of columns.

In bulk the codes of a row are followed by its scales. In lines, SCALED_WORDS words of codes have
one word of scales: a float32, or four bytes, which are powers of two or, with codes of 4 bits, e4m3
numbers. Rows in 4 bits have a float32 scale too: in bulk before the other scales, in lines in the
last line.
"""

from __future__ import annotations

import triton
import triton.language as tl

from epcomm.kernels.masks import both
from epcomm.kernels.nvlink.common import constexprs
from epcomm.kernels.quantize import fp8
from epcomm.kernels.quantize.fp8 import AMAX_FLOOR_BITS, float_of, power_of


@triton.jit
def blocks_of_sum(piece: tl.tensor, COLUMNS: tl.constexpr, c: constexprs.Layout) -> tl.tensor:
    """Return the blocks in a piece of COLUMNS columns; unused if sums are not quantised."""
    BLOCKS: tl.constexpr = COLUMNS // c.SUM_BLOCK if c.SUM_BLOCK > 0 else 1  # pyright: ignore[reportAssignmentType]
    return piece * BLOCKS + tl.arange(0, BLOCKS)


@triton.jit
def columns_of_sum(piece: tl.tensor, COLUMNS: tl.constexpr, c: constexprs.Layout) -> tl.tensor:
    """Return the columns in a piece, [COLUMNS], of quantised sums [blocks, SUM_BLOCK]."""
    if c.SUM_BLOCK > 0:
        first = blocks_of_sum(piece, COLUMNS, c)[:, None] * c.SUM_BLOCK
        columns = first + tl.arange(0, c.SUM_BLOCK)[None, :]
    else:
        columns = piece * COLUMNS + tl.arange(0, COLUMNS)
    return columns


@triton.jit
def scale_of_row(parts: tl.tuple, c: constexprs.Layout) -> tl.tensor:
    """Return the scale of a row whose columns are in some parts."""
    amax_bits = 0
    for each in tl.static_range(len(parts)):  # pyright: ignore[reportGeneralTypeIssues]
        x = tl.reshape(parts[each].to(tl.float32), [parts[each].numel // c.SUM_BLOCK, c.SUM_BLOCK])
        amax_bits = tl.maximum(amax_bits, fp8.finite_amax(x)[0])
    return fp8.row_scale_of(amax_bits)


@triton.jit
def quantize_sums(
    sums: tl.tensor, row_scale: tl.tensor | None, c: constexprs.Layout
) -> tuple[tl.tensor, tl.tensor]:
    """Return codes, uint8, and scales [blocks] of whole blocks of a sum.

    Codes are [blocks, SUM_BLOCK], or [blocks, SUM_BLOCK / 2] with the scale of a row, of 4 bits.
    """
    x = tl.reshape(sums.to(tl.float32), [sums.numel // c.SUM_BLOCK, c.SUM_BLOCK])
    floor_bits: tl.constexpr = 0 if c.SUM_EXPONENTS else AMAX_FLOOR_BITS  # pyright: ignore[reportAssignmentType]
    if row_scale is None:
        return fp8.quantize_blocks(x, c.SUM_EXPONENTS, c.HAS_E4M3, floor_bits)
    else:  # noqa: RET505 - what is not compiled must be the other branch
        return fp8.quantize_blocks_fp4(x, row_scale)


@triton.jit
def load_row(
    row_ptr: tl.tensor, block: tl.tensor, is_there: tl.tensor, c: constexprs.Layout
) -> tl.tensor:
    """Return blocks of a returned row with a scale: [blocks, SUM_BLOCK], float32."""
    # Two words of codes for each block.
    word = block[:, None] * 2 + tl.arange(0, 2)[None, :]
    is_word = both(word < c.RETURN_WORDS, is_there)
    scales_ptr = row_ptr + c.RETURN_WORDS
    words = tl.load(row_ptr + word, mask=is_word, other=0)
    scales = tl.load(scales_ptr + 1 + word // c.SCALED_WORDS, mask=is_word, other=0)
    row_scale = tl.load(scales_ptr, mask=is_there, other=0)
    sums = restore_words(tl.ravel(words), tl.ravel(scales), row_scale, c)
    return tl.reshape(sums, [block.shape[0], c.SUM_BLOCK])


@triton.jit
def scales_of_sum(row_ptr: tl.tensor, c: constexprs.Layout) -> tl.tensor:
    """Return a pointer to the scales of blocks of a returned row of codes, uint8."""
    dtype: tl.constexpr = tl.uint8 if c.SUM_EXPONENTS or c.SUM_ROW_SCALE else tl.float32  # pyright: ignore[reportAssignmentType]
    row_ptr += 4 * (c.RETURN_WORDS + c.SUM_ROW_SCALE)  # pyright: ignore[reportOperatorIssue]
    return row_ptr.to(tl.pointer_type(dtype), bitcast=True)  # pyright: ignore[reportArgumentType]


@triton.jit
def restore_sums(codes: tl.tensor, scales: tl.tensor, c: constexprs.Layout) -> tl.tensor:
    """Return codes times their scales in float32: of 0x30, 0.5, and the power 128, 1."""
    sign: tl.constexpr = 8 if c.SUM_ROW_SCALE else 128  # pyright: ignore[reportAssignmentType]
    return float_of(codes, sign, c.HAS_E4M3) * (power_of(scales) if c.SUM_EXPONENTS else scales)


@triton.jit
def restore_words(
    words: tl.tensor, scales: tl.tensor, row_scale: tl.tensor | None, c: constexprs.Layout
) -> tl.tensor:
    """Return words [n] of codes, of SUM_COLUMNS columns each, times their scales, in float32.

    scales: [n], the word of scales for each word of codes, of SCALED_WORDS neighbours the same.
    row_scale: the bits of that of the row, of each word or of all, or None.
    """
    SIZE: tl.constexpr = words.shape[0]  # pyright: ignore[reportArgumentType, reportGeneralTypeIssues]
    halves = tl.reshape(tl.join(words & 0xFFFF, (words >> 16) & 0xFFFF), [2 * SIZE])
    codes = tl.reshape(tl.join(halves & 0xFF, halves >> 8), [4 * SIZE]).to(tl.uint8)
    if c.SUM_EXPONENTS or c.SUM_ROW_SCALE:
        block = tl.arange(0, SIZE) // (c.SUM_BLOCK // c.SUM_COLUMNS)
        scales = (scales >> (block % 4 * 8)) & 0xFF
    else:
        scales = scales.to(tl.float32, bitcast=True)
    if row_scale is not None:
        scales = float_of(scales.to(tl.uint8), 128, c.HAS_E4M3)
        scales *= row_scale.to(tl.float32, bitcast=True)
    # Joined as codes are, so that each thread loads one line of scales.
    scales = tl.reshape(tl.join(scales, scales), [2 * SIZE])
    scales = tl.reshape(tl.join(scales, scales), [4 * SIZE])
    if row_scale is not None:
        codes = tl.reshape(tl.join(codes, codes >> 4), [8 * SIZE])
        scales = tl.reshape(tl.join(scales, scales), [8 * SIZE])
    return restore_sums(codes, scales, c)
