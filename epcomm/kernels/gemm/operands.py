"""Describe the operands of a product of quantised rows and the matrices of their experts."""

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class Product:
    """One product: the rows of the slots, times the matrix of the expert that has the slot.

    codes: [R, K], of any row stride.
    scales: [R, K / 128] for FP8, [R, 1] for INT8; float32, of any row stride.
    row_of_slot: [C], int32; None: slot s is row s.
    counts: [L], int32, slots of each expert.   first_slot: [L + 1], int32.
    matrices: [L, N, K], of the dtype of the codes.
    matrix_scales: [L, N / 128, K / 128] for FP8, [L, N] for INT8; float32.
    num_sms: most programs, which then compute one tile after another, so that they leave the other
        SMs of the GPU free; None: any number. Bits are the same. No operand, so it is the last.
    """

    codes: Tensor
    scales: Tensor
    row_of_slot: Tensor | None = None
    counts: Tensor
    first_slot: Tensor
    matrices: Tensor
    matrix_scales: Tensor
    num_sms: int | None = None

    def num_tiles(self, num_slots: int, tile_rows: int, tile_columns: int, columns: int) -> int:
        """Return the tiles of `columns` columns that any counts can need.

        An expert has at most one incomplete row of tiles.
        """
        row_tiles = -(-num_slots // tile_rows) + len(self.counts)
        return row_tiles * -(-columns // tile_columns)
