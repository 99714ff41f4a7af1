"""Multiply bfloat16 or float16 rows by the matrices of their experts, in tiles of one size.

Every tile has 128 rows and 128 columns, whatever the counts are, and one program adds up all of its
inner dimension, 64 elements after 64, in float32. So the instructions that make a row, and their
order, do not depend on the number of rows, on the position of the row or on other rows. A tile
finds its expert from the counts on the device, so the host reads no count; rows past the counts are
neither read nor written.
"""

from typing import Any, cast

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from epcomm.kernels.gemm.fp8 import _find_tile, _num_turns, _slots_of_tile
from epcomm.kernels.launch import device_limits

TILE_ROWS = TILE_COLUMNS = 128
# Elements of the inner dimension in a stage: rows of 128 bytes, which the copy engine swizzles.
TILE_INNER = 64
# The stages of a loop over the inner dimension hold this many bytes each.
_STAGE_BYTES = 2 * (TILE_ROWS + TILE_COLUMNS) * TILE_INNER


@triton.jit
def _multiply_kernel(
    x_ptr: tl.tensor,
    counts_ptr: tl.tensor,
    first_slot_ptr: tl.tensor,
    matrix: tl.tensor_descriptor,
    out_ptr: tl.tensor,
    INNER: tl.constexpr,
    COLUMNS: tl.constexpr,
    X_STRIDE: tl.constexpr,
    IS_TRANSPOSED: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
    TILE_INNER: tl.constexpr,
    IS_LIMITED: tl.constexpr,
) -> None:
    """Compute a tile of TILE_ROWS slots and TILE_COLUMNS columns.

    Rows 1 2 and 3 4, columns 1 0 and 0 2: results 1 4 and 3 8.
    """
    COLUMN_TILES: tl.constexpr = (COLUMNS + TILE_COLUMNS - 1) // TILE_COLUMNS
    for turn in range(_num_turns(counts_ptr, NUM_EXPERTS, COLUMN_TILES, TILE_ROWS, IS_LIMITED)):
        number = tl.program_id(0) + turn * tl.num_programs(0)
        expert, first_row, count, tile = _find_tile(  # pyright: ignore[reportGeneralTypeIssues]
            counts_ptr, number, NUM_EXPERTS, COLUMN_TILES, TILE_ROWS
        )
        if expert < NUM_EXPERTS:
            slots, is_row = _slots_of_tile(first_slot_ptr, expert, first_row, count, TILE_ROWS)  # pyright: ignore[reportGeneralTypeIssues]
            x_at = x_ptr + slots[:, None] * X_STRIDE + tl.arange(0, TILE_INNER)[None, :]
            first_column = tile * TILE_COLUMNS
            total = tl.zeros([TILE_ROWS, TILE_COLUMNS], tl.float32)
            for k in range(INNER // TILE_INNER):
                x = tl.load(x_at + k * TILE_INNER)
                # Columns past the last are zeros or those of the next expert, and are not stored.
                if IS_TRANSPOSED:
                    part = matrix.load([expert * INNER + k * TILE_INNER, first_column])
                else:
                    part = tl.trans(matrix.load([expert * COLUMNS + first_column, k * TILE_INNER]))
                total = tl.dot(x, part, total)
            columns = first_column + tl.arange(0, TILE_COLUMNS)
            out_at = out_ptr + slots[:, None] * COLUMNS + columns[None, :]
            is_result = is_row[:, None] & (columns < COLUMNS)[None, :]
            tl.store(out_at, total.to(out_ptr.dtype.element_ty), mask=is_result)


def multiply_tiles(
    rows: Tensor,
    counts: Tensor,
    first_slot: Tensor,
    matrices: Tensor,
    out: Tensor,
    num_sms: int | None = None,
) -> None:
    """Compute the rows of every slot times the matrix of its expert; padding is not written.

    Args:
        rows: [C, K], bfloat16 or float16, adjacent columns; K is a multiple of TILE_INNER.
        counts: [L], int32.   first_slot: [L + 1], int32.
        matrices: [L, K, N], or a transposed view of contiguous [L, N, K].
        out: [C, N], contiguous.
        num_sms: most programs, which then compute one tile after another; None: one for each tile.

    Allocates nothing. Host sync: none. Compiled for each K, N, L and row stride.
    """
    num_experts, inner, columns = matrices.shape
    is_transposed = matrices.is_contiguous()
    stored = matrices if is_transposed else matrices.transpose(1, 2)
    assert stored.is_contiguous(), "the runner refuses other strides"
    assert inner % TILE_INNER == 0, "the runner refuses other sizes"
    block = [TILE_INNER, TILE_COLUMNS] if is_transposed else [TILE_COLUMNS, TILE_INNER]
    num_tiles = (-(-len(rows) // TILE_ROWS) + num_experts) * -(-columns // TILE_COLUMNS)
    kernel = cast(Any, _multiply_kernel)
    with torch.cuda.device_of(rows):
        kernel[(min(num_tiles, num_sms or num_tiles),)](
            rows,
            counts,
            first_slot,
            TensorDescriptor.from_tensor(stored.flatten(0, 1), block),
            out,
            INNER=inner,
            COLUMNS=columns,
            X_STRIDE=rows.stride(0),
            IS_TRANSPOSED=is_transposed,
            NUM_EXPERTS=num_experts,
            TILE_ROWS=TILE_ROWS,
            TILE_COLUMNS=TILE_COLUMNS,
            TILE_INNER=TILE_INNER,
            IS_LIMITED=num_sms is not None,
            num_warps=8,
            num_stages=device_limits(rows.device).stages(_STAGE_BYTES, most=4),
        )
