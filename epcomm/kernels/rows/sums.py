"""Sum rows that a table names, by weight or without: the local half of combine.

A program keeps its part of a sum in registers, so results are read once and sums written once, 16
bytes at a time; a float32 copy of the rows is never made. Dot products of rows are the gradients of
the weights: their order depends on H alone, not on the number of rows or their addresses.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from epcomm.kernels.launch import EXACT, check_rows, next_power_of_two
from epcomm.kernels.prepared import launch
from epcomm.kernels.rounding import cast
from epcomm.kernels.rows.tiles import WARPS, row_stride, tile_of

# Columns of a table up to which the loop is unrolled, so that all loads of a target are in flight.
_MOST_UNROLLED = 16
# Columns that a dot product adds apart: 16 bytes of bfloat16 for each thread.
_DOT_COLUMNS = 1024
# A tile has fewer rows than a copy's: sums take four bytes for two that are read, and several rows
# are in flight.
_TILE_SHARE = 2


class _Terms(NamedTuple):
    """Pointers to the rows that a sum reads, to their sources, and to weights or None."""

    rows: Any
    sources: Any
    weights: Any


@triton.jit
def _term(
    terms: _Terms,
    target: tl.tensor,
    column: tl.tensor,
    is_target: tl.tensor,
    k: tl.tensor,
    rows_per_part: tl.tensor,
    STRIDE: tl.constexpr,
    HIDDEN: tl.constexpr,
    K: tl.constexpr,
    DTYPE: tl.constexpr,
) -> tl.tensor:
    """Load the k-th term of each target, 0 where there is none: [rows, columns], in DTYPE."""
    if terms.sources is None:
        source = tl.where(is_target, k * tl.cast(rows_per_part, tl.int64) + target, -1)
    else:
        at = target.to(tl.int64) * K + k
        source = tl.load(terms.sources + at, mask=is_target, other=-1).to(tl.int64)
    is_there = source >= 0
    # Rows may begin beyond 2**31 elements, and source is an int64.
    row_ptr = terms.rows + source[:, None] * STRIDE + column
    term = tl.load(row_ptr, mask=is_there[:, None] & (column < HIDDEN), other=0.0).to(DTYPE)
    if terms.weights is not None:
        term *= tl.load(terms.weights + source, mask=is_there, other=0.0)[:, None]
    return term


@triton.jit(do_not_specialize=["num_targets", "rows_per_part"])
def _sum_rows_kernel(
    rows_ptr: tl.tensor,
    sources_ptr: tl.tensor | None,
    weights_ptr: tl.tensor | None,
    out_ptr: tl.tensor,
    num_targets: tl.tensor,
    rows_per_part: tl.tensor,
    STRIDE: tl.constexpr,
    OUT_STRIDE: tl.constexpr,
    HIDDEN: tl.constexpr,
    K: tl.constexpr,
    IS_UNROLLED: tl.constexpr,
    DTYPE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """Sum the terms of ROWS targets in COLUMNS columns, in the order of the table.

    The sources 2 0 | -1 1, weights 1 3 2 and rows 5 | 6 | 7 make the sums 2 * 7 + 5 and 3 * 6.
    """
    TILES: tl.constexpr = (HIDDEN + COLUMNS - 1) // COLUMNS
    program = tl.program_id(0)
    target = program // TILES * ROWS + tl.arange(0, ROWS)
    column = (program % TILES * COLUMNS + tl.arange(0, COLUMNS))[None, :]
    is_target = target < num_targets
    total = tl.zeros([ROWS, COLUMNS], DTYPE)
    terms = _Terms(rows_ptr, sources_ptr, weights_ptr)
    if IS_UNROLLED:
        for k in tl.static_range(K):
            total += _term(
                terms, target, column, is_target, k, rows_per_part, STRIDE, HIDDEN, K, DTYPE
            )
    else:
        for k in range(K):
            total += _term(
                terms, target, column, is_target, k, rows_per_part, STRIDE, HIDDEN, K, DTYPE
            )
    to_ptr = out_ptr + target.to(tl.int64)[:, None] * OUT_STRIDE + column
    value = cast(total, out_ptr.dtype.element_ty)
    tl.store(to_ptr, value, mask=is_target[:, None] & (column < HIDDEN))


def sum_rows(rows: Tensor, sources: Tensor, out: Tensor, weights: Tensor | None = None) -> None:
    """Write the sum of the rows that each line of a table names, in the order of the line.

    Sums are float32, and float64 of float64 rows; a product is rounded before it is added; the
    total is cast once. Rows that the table does not name are never read.

    Args:
        rows: [N, H], of any row stride.
        sources: [targets, K], int32, contiguous, -1 for none.
        out: [targets, H], written, of any row stride; 0 for a line without rows.
        weights: [N], float32 (float64 for float64 rows), multiplied into the rows, or None.

    Allocates nothing.   Compiled for each dtype, H, K and strides.
    Host sync: none.   Graph capture: after one call.   Deterministic: yes.
    Raises:
        ShapeError: a tensor is not on a GPU, or its columns are not adjacent.
    """
    check_rows("sum_rows", rows=rows, sources=sources, out=out)
    _launch(rows, sources, weights, out, num_terms=sources.shape[1], rows_per_part=0)


def sum_parts(parts: Tensor, out: Tensor) -> None:
    """Write the sum over the first dimension, in its order, as sum_rows() does.

    Args:
        parts: [W, T, H]; rows have any stride, of which that of the parts is a multiple.
        out: [T, H], written, of any row stride.

    Costs and errors are those of sum_rows().
    """
    first = parts[0]
    check_rows("sum_parts", parts=first, out=out)
    rows_per_part = parts.stride(0) // row_stride(first)
    _launch(first, None, None, out, num_terms=parts.shape[0], rows_per_part=rows_per_part)


def _launch(
    rows: Tensor,
    sources: Tensor | None,
    weights: Tensor | None,
    out: Tensor,
    *,
    num_terms: int,
    rows_per_part: int,
) -> None:
    num_targets, hidden_size = out.shape
    if out.numel() == 0:
        return
    tile = tile_of(hidden_size, _TILE_SHARE * rows.itemsize)
    launch(
        _sum_rows_kernel,
        tile.programs(num_targets),
        (rows, sources, weights, out, num_targets, rows_per_part),
        STRIDE=row_stride(rows),
        OUT_STRIDE=row_stride(out),
        HIDDEN=hidden_size,
        K=num_terms,
        IS_UNROLLED=num_terms <= _MOST_UNROLLED,
        DTYPE=tl.float64 if rows.dtype is torch.float64 else tl.float32,
        ROWS=tile.rows,
        COLUMNS=tile.columns,
        num_warps=WARPS,
        **EXACT,
    )


@triton.jit
def _dot_rows_kernel(
    left_ptr: tl.tensor,
    right_ptr: tl.tensor,
    out_ptr: tl.tensor,
    LEFT_STRIDE: tl.constexpr,
    RIGHT_STRIDE: tl.constexpr,
    HIDDEN: tl.constexpr,
    DTYPE: tl.constexpr,
    COLUMNS: tl.constexpr,
    HALVINGS: tl.constexpr,
) -> None:
    """Multiply one row a program: first add columns that are COLUMNS apart, then neighbours.

    With four COLUMNS, the products 1 2 3 4 5 make (6 + 2) + (3 + 4).
    """
    row = tl.program_id(0).to(tl.int64)
    total = tl.zeros([COLUMNS], DTYPE)
    for begin in tl.range(0, HIDDEN, COLUMNS):
        column = begin + tl.arange(0, COLUMNS)
        left_row_ptr, right_row_ptr = left_ptr + row * LEFT_STRIDE, right_ptr + row * RIGHT_STRIDE
        left = tl.load(left_row_ptr + column, mask=column < HIDDEN, other=0.0).to(DTYPE)
        right = tl.load(right_row_ptr + column, mask=column < HIDDEN, other=0.0).to(DTYPE)
        total += left * right
    # A sum of two numbers has one order.
    for _ in tl.static_range(HALVINGS):
        total = tl.sum(tl.reshape(total, [total.shape[0] // 2, 2]), 1)
    tl.store(out_ptr + row + tl.arange(0, 1), total)


def dot_rows(left: Tensor, right: Tensor, out: Tensor) -> None:
    """Write the sum over the columns of the products of two matrices.

    Products and sums are float32, and float64 of float64 rows; a product is rounded before it is
    added.

    Args:
        left, right: [N, H], of one dtype and any row strides.
        out: [N], contiguous, written.

    Allocates nothing.   Compiled for each dtype, H and strides.
    Host sync: none.   Graph capture: after one call.   Deterministic: yes.
    Raises:
        ShapeError: a tensor is not on a GPU, or its columns are not adjacent.
    """
    check_rows("dot_rows", left=left, right=right)
    num_rows, hidden_size = left.shape
    if num_rows == 0:
        return
    columns = min(_DOT_COLUMNS, next_power_of_two(hidden_size))
    launch(
        _dot_rows_kernel,
        num_rows,
        (left, right, out),
        LEFT_STRIDE=row_stride(left),
        RIGHT_STRIDE=row_stride(right),
        HIDDEN=hidden_size,
        DTYPE=tl.float64 if left.dtype is torch.float64 else tl.float32,
        COLUMNS=columns,
        HALVINGS=columns.bit_length() - 1,
        num_warps=WARPS,
        **EXACT,
    )
