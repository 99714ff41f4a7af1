"""Sums in 8 bits in combine of low latency: e4m3 codes, and a scale for each block of columns.

In bulk the codes of a row are followed by its scales. In lines, SCALED_WORDS words of codes have
one word of scales: a float32, or four powers of two of a byte.
"""

from __future__ import annotations

import triton
import triton.language as tl

from epcomm.kernels.nvlink.common import constexprs, layout
from epcomm.kernels.quantize.fp8 import AMAX_FLOOR_BITS, float_of, power_of, quantize_blocks

SCALED_WORDS = tl.constexpr(layout.SCALED_WORDS)


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
def quantize_sums(sums: tl.tensor, c: constexprs.Layout) -> tuple[tl.tensor, tl.tensor]:
    """Return codes [blocks, SUM_BLOCK], uint8, and scales [blocks] of whole blocks of a sum."""
    x = tl.reshape(sums.to(tl.float32), [sums.numel // c.SUM_BLOCK, c.SUM_BLOCK])
    floor_bits: tl.constexpr = 0 if c.SUM_EXPONENTS else AMAX_FLOOR_BITS  # pyright: ignore[reportAssignmentType]
    return quantize_blocks(x, c.SUM_EXPONENTS, c.HAS_E4M3, floor_bits)


@triton.jit
def scales_of_sum(row_ptr: tl.tensor, c: constexprs.Layout) -> tl.tensor:
    """Return a pointer to the scales of a returned row of codes, uint8."""
    dtype: tl.constexpr = tl.uint8 if c.SUM_EXPONENTS else tl.float32  # pyright: ignore[reportAssignmentType]
    return (row_ptr + 4 * c.RETURN_WORDS).to(tl.pointer_type(dtype), bitcast=True)  # pyright: ignore[reportArgumentType]


@triton.jit
def restore_sums(codes: tl.tensor, scales: tl.tensor, c: constexprs.Layout) -> tl.tensor:
    """Return codes times their scales in float32: of 0x30, 0.5, and the power 128, 1."""
    return float_of(codes, 128, c.HAS_E4M3) * (power_of(scales) if c.SUM_EXPONENTS else scales)


@triton.jit
def restore_words(words: tl.tensor, scales: tl.tensor, c: constexprs.Layout) -> tl.tensor:
    """Return words [n] of codes, of 4 columns each, times their scales, [4 * n].

    scales: [n], the word of scales for each word of codes, of SCALED_WORDS neighbours the same.
    """
    SIZE: tl.constexpr = words.shape[0]  # pyright: ignore[reportArgumentType, reportGeneralTypeIssues]
    halves = tl.reshape(tl.join(words & 0xFFFF, (words >> 16) & 0xFFFF), [2 * SIZE])
    codes = tl.reshape(tl.join(halves & 0xFF, halves >> 8), [4 * SIZE]).to(tl.uint8)
    if c.SUM_EXPONENTS:
        block = tl.arange(0, SIZE) // (c.SUM_BLOCK // 4)
        scales = (scales >> (block % 4 * 8)) & 0xFF
    else:
        scales = scales.to(tl.float32, bitcast=True)
    # Joined as codes are, so that each thread loads one line of scales.
    scales = tl.reshape(tl.join(scales, scales), [2 * SIZE])
    return restore_sums(codes, tl.reshape(tl.join(scales, scales), [4 * SIZE]), c)
