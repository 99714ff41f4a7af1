"""Sums in 8 or 4 bits in combine of low latency: codes, and a scale for each block of columns.

In bulk the codes of a row are followed by its scales. In lines, SCALED_WORDS words of codes have
one word of scales: a float32, or four powers of two or e4m3 numbers of a byte. Sums in 4 bits,
e2m1, also have a float32 scale of the row: before the other scales in bulk, in the last line.
"""

from __future__ import annotations

import triton
import triton.language as tl

from epcomm.kernels.nvlink.common import constexprs
from epcomm.kernels.quantize.fp8 import (
    AMAX_FLOOR_BITS,
    float_of,
    power_of,
    quantize_blocks,
    quantize_blocks_fp4,
    row_amax_of,
    row_scale_of,
)
from epcomm.types import ROW_SCALE_BYTES

_ROW_SCALE_BYTES = tl.constexpr(ROW_SCALE_BYTES)


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
def _in_blocks(sums: tl.tensor, c: constexprs.Layout) -> tl.tensor:
    return tl.reshape(sums.to(tl.float32), [sums.numel // c.SUM_BLOCK, c.SUM_BLOCK])


@triton.jit
def scale_of_row(parts: tl.tuple, c: constexprs.Layout) -> tl.tensor:
    """Return the scale of a row whose columns are in some parts."""
    amax = row_amax_of(_in_blocks(parts[0], c))
    for each in tl.static_range(1, len(parts)):  # pyright: ignore[reportGeneralTypeIssues]
        amax = tl.maximum(amax, row_amax_of(_in_blocks(parts[each], c)))
    return row_scale_of(amax)


@triton.jit
def quantize_sums(
    sums: tl.tensor, row_scale: tl.tensor | None, c: constexprs.Layout
) -> tuple[tl.tensor, tl.tensor]:
    """Return codes and scales [blocks] of whole blocks of a sum.

    row_scale: that of the row, or None.
    Codes: [blocks, SUM_BLOCK], or of 4 bits [blocks, SUM_BLOCK / 2], uint8.
    """
    x = _in_blocks(sums, c)
    floor_bits: tl.constexpr = 0 if c.SUM_EXPONENTS else AMAX_FLOOR_BITS  # pyright: ignore[reportAssignmentType]
    if row_scale is None:
        return quantize_blocks(x, c.SUM_EXPONENTS, c.HAS_E4M3, floor_bits)
    else:  # noqa: RET505 - what is not compiled must be the other branch
        return quantize_blocks_fp4(x, row_scale)


@triton.jit
def scales_of_sum(row_ptr: tl.tensor, c: constexprs.Layout) -> tl.tensor:
    """Return a pointer to the scales of blocks of a returned row of codes, uint8."""
    dtype: tl.constexpr = tl.uint8 if c.SUM_EXPONENTS or c.SUM_ROW_SCALE else tl.float32  # pyright: ignore[reportAssignmentType]
    if c.SUM_ROW_SCALE:
        row_ptr += _ROW_SCALE_BYTES
    return (row_ptr + 4 * c.RETURN_WORDS).to(tl.pointer_type(dtype), bitcast=True)  # pyright: ignore[reportArgumentType]


@triton.jit
def word_of_row(row_ptr: tl.tensor, word: tl.tensor, dtype: tl.constexpr) -> tl.tensor:
    """Return a pointer to words of a returned row of codes."""
    return row_ptr.to(tl.pointer_type(dtype), bitcast=True) + word  # pyright: ignore[reportArgumentType]


@triton.jit
def codes_of_words(words: tl.tensor, c: constexprs.Layout) -> tl.tensor:
    """Return the codes in words [n], [SUM_COLUMNS * n], uint8: 2 1 0 3 of 0x03000102."""
    SIZE: tl.constexpr = words.shape[0]  # pyright: ignore[reportArgumentType, reportGeneralTypeIssues]
    halves = tl.reshape(tl.join(words & 0xFFFF, (words >> 16) & 0xFFFF), [2 * SIZE])
    codes = tl.reshape(tl.join(halves & 0xFF, halves >> 8), [4 * SIZE]).to(tl.uint8)
    if c.SUM_ROW_SCALE:
        codes = tl.reshape(tl.join(codes, codes >> 4), [8 * SIZE])
    return codes


@triton.jit
def scales_in_row(scales: tl.tensor, row_scale: tl.tensor, c: constexprs.Layout) -> tl.tensor:
    """Return scales of blocks, bytes of e4m3, times that of their row."""
    return float_of(scales.to(tl.uint8), 128, c.HAS_E4M3) * row_scale


@triton.jit
def restore_sums(codes: tl.tensor, scales: tl.tensor, c: constexprs.Layout) -> tl.tensor:
    """Return codes times their scales in float32: of 0x30, 0.5, and the power 128, 1."""
    if c.SUM_ROW_SCALE:
        return float_of(codes, 8, False) * scales
    else:  # noqa: RET505 - what is not compiled must be the other branch
        return float_of(codes, 128, c.HAS_E4M3) * (power_of(scales) if c.SUM_EXPONENTS else scales)


@triton.jit
def restore_words(
    words: tl.tensor, scales: tl.tensor, row_scale: tl.tensor | None, c: constexprs.Layout
) -> tl.tensor:
    """Return words [n] of codes times their scales, [SUM_COLUMNS * n].

    scales: [n], the word of scales for each word of codes, of SCALED_WORDS neighbours the same.
    row_scale: that of the row, [n], or None.
    """
    SIZE: tl.constexpr = words.shape[0]  # pyright: ignore[reportArgumentType, reportGeneralTypeIssues]
    codes = codes_of_words(words, c)
    if c.SUM_EXPONENTS or c.SUM_ROW_SCALE:
        block = tl.arange(0, SIZE) // (c.SUM_BLOCK // c.SUM_COLUMNS)
        scales = (scales >> (block % 4 * 8)) & 0xFF
        if row_scale is not None:
            scales = scales_in_row(scales, row_scale, c)
    else:
        scales = scales.to(tl.float32, bitcast=True)
    # Joined as codes are, so that each thread loads one line of scales.
    scales = tl.reshape(tl.join(scales, scales), [2 * SIZE])
    scales = tl.reshape(tl.join(scales, scales), [4 * SIZE])
    if c.SUM_ROW_SCALE:
        scales = tl.reshape(tl.join(scales, scales), [8 * SIZE])
    return restore_sums(codes, scales, c)
