"""Choose the part of a matrix of rows that one program copies or sums."""

from dataclasses import dataclass
from typing import TypeVar

import torch
from torch import Tensor

from epcomm.kernels.launch import next_power_of_two

RowsT = TypeVar("RowsT", Tensor, Tensor | None)
# 4 warps move 8 KiB: each thread has four accesses of 16 bytes in flight, and the 128 threads leave
# an SM space for as many programs as hide the latency of its memory.
WARPS = 4
_TILE_BYTES = 8192
# 2 KiB of one row are whole pages of DRAM, and a row of 7168 elements of 16 bits has seven of them.
_COLUMN_BYTES = 2048


@dataclass(frozen=True, kw_only=True)
class Tile:
    """The rows and columns of one program, both powers of two, and the tiles of a row."""

    rows: int
    columns: int
    per_row: int

    def programs(self, num_rows: int) -> int:
        return -(-num_rows // self.rows) * self.per_row


def tile_of(width: int, itemsize: int) -> Tile:
    """Return the tile for rows of `width` elements."""
    columns = min(next_power_of_two(max(1, width)), _COLUMN_BYTES // itemsize)
    rows = max(1, _TILE_BYTES // (columns * itemsize))
    return Tile(rows=rows, columns=columns, per_row=max(1, -(-width // columns)))


def movable(rows: RowsT) -> RowsT:
    """Return a view that Triton can load and store: elements of one byte as uint8."""
    return rows.view(torch.uint8) if rows is not None and rows.itemsize == 1 else rows


def row_stride(rows: Tensor) -> int:
    """Return the elements from one row to the next; of one row alone, its width."""
    return rows.stride(0) if rows.shape[0] > 1 else rows.shape[1]
