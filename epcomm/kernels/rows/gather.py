"""Copy rows through an index: slot s gets row row_of_slot[s], or zeros.

Every byte is read once and written once, 16 bytes at a time, so memory is the limit wherever rows
are multiples of 16 bytes; other rows are moved element by element.
"""

import triton
import triton.language as tl
from torch import Tensor

from epcomm.kernels.launch import check_rows
from epcomm.kernels.prepared import launch
from epcomm.kernels.rows.tiles import WARPS, movable, row_stride, tile_of


@triton.jit(do_not_specialize=["num_slots"])
def _gather_rows_kernel(
    rows_ptr: tl.tensor,
    row_of_slot_ptr: tl.tensor,
    out_ptr: tl.tensor,
    num_slots: tl.tensor,
    ROWS_STRIDE: tl.constexpr,
    OUT_STRIDE: tl.constexpr,
    HIDDEN: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    """Copy ROWS slots and COLUMNS columns a program.

    row_of_slot 1 2 -1 and rows 5 5 | 6 6 | 7 7 make the slots 6 6 | 7 7 | 0 0.
    """
    TILES: tl.constexpr = (HIDDEN + COLUMNS - 1) // COLUMNS
    program = tl.program_id(0)
    slot = program // TILES * ROWS + tl.arange(0, ROWS)
    column = (program % TILES * COLUMNS + tl.arange(0, COLUMNS))[None, :]
    is_slot = slot < num_slots
    row = tl.load(row_of_slot_ptr + slot, mask=is_slot, other=-1)
    is_in = column < HIDDEN
    # Rows become int64 before a stride multiplies them: they may begin beyond 2**31 elements.
    from_ptr = rows_ptr + row.to(tl.int64)[:, None] * ROWS_STRIDE + column
    values = tl.load(from_ptr, mask=(row >= 0)[:, None] & is_in, other=0)
    to_ptr = out_ptr + slot.to(tl.int64)[:, None] * OUT_STRIDE + column
    tl.store(to_ptr, values, mask=is_slot[:, None] & is_in)


def gather_rows(rows: Tensor, row_of_slot: Tensor, out: Tensor) -> None:
    """Write the row of each slot, or zeros where the slot has none.

    Args:
        rows: [R, H], of any row stride.
        row_of_slot: [C], int32, -1 for none.
        out: [C, H], written, of any row stride and the dtype of rows.

    Allocates nothing.   Compiled for each dtype, H and strides.
    Host sync: none.   Graph capture: after one call.   Deterministic: yes.
    Raises:
        ShapeError: a tensor is not on a GPU, or its columns are not adjacent.
    """
    check_rows("gather_rows", rows=rows, out=out)
    num_slots, hidden_size = out.shape
    if out.numel() == 0:
        return
    tile = tile_of(hidden_size, rows.itemsize)
    launch(
        _gather_rows_kernel,
        tile.programs(num_slots),
        (movable(rows), row_of_slot, movable(out), num_slots),
        ROWS_STRIDE=row_stride(rows),
        OUT_STRIDE=row_stride(out),
        HIDDEN=hidden_size,
        ROWS=tile.rows,
        COLUMNS=tile.columns,
        num_warps=WARPS,
    )
