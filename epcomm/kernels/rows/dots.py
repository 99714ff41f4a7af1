"""Multiply each row by another one: the gradient of a slot's router weight.

The order of the additions depends on H alone, not on the number of rows, their addresses or the
threads that hold the columns.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from epcomm.kernels.launch import EXACT, check_rows, next_power_of_two
from epcomm.kernels.rows.launch import launch
from epcomm.kernels.rows.tiles import WARPS, row_stride

# 16 bytes of bfloat16 for each thread.
_COLUMNS = 1024


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
    columns = min(_COLUMNS, next_power_of_two(hidden_size))
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
