"""Multiply FP8 rows by FP8 matrices, expert by expert: the two products of the experts of one rank.

gate_up_fp8() reads rows through the index, multiplies them by [2I, H], and computes silu(gate) * up
and the second quantisation in the same tile: 128 columns of I are one block, so the largest
magnitude of the block is known before anything is stored. down_fp8() multiplies the hidden rows by
[H, I] and by router weights, and stores the dtype of the hidden states. A tile finds its expert
from the counts on the device, so the host reads no count; rows past the counts are neither read nor
written. Sums over a block of 128 are scaled and added in float32.

One H200, 32 experts, H = 7168, I = 2048 (2026-11): 1024 rows read the matrices at 94% of the rate
of a copy.
"""

from typing import Any, cast

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from epcomm.kernels.gemm.operands import Product
from epcomm.kernels.launch import IS_INTERPRETED, device_limits
from epcomm.kernels.quantize.fp8 import _E4M3_MAX, _RECIPROCAL_OF_MAX, _e4m3_code

# Number of elements of a row, and of rows and of columns of a matrix, that share a scale.
BLOCK = 128
# Mean number of slots of an expert up to which a tile has 32 rows; larger tiles would compute more
# rows that do not exist.
_FEW_SLOTS = 48

_AMAX_FLOOR = tl.constexpr(1e-4)
_IS_INTERPRETED = tl.constexpr(IS_INTERPRETED)


@triton.jit
def _find_tile(
    counts_ptr: tl.tensor,
    tile: tl.tensor,
    NUM_EXPERTS: tl.constexpr,
    NUM_COLUMN_TILES: tl.constexpr,
    TILE_ROWS: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Return expert, first row, row count and column tile; NUM_EXPERTS after the last tile.

    Counts 3 0 5, tiles of 4 rows, 2 column tiles: expert 0 has tiles 0 1, expert 2 has 2 to 5; tile
    3 is the second row tile of expert 2 in column tile 0. Row tiles come first, so that neighbours
    share a matrix.
    """
    expert_ids = tl.arange(0, triton.next_power_of_2(NUM_EXPERTS))
    counts = tl.load(counts_ptr + expert_ids, mask=expert_ids < NUM_EXPERTS, other=0)
    row_tiles = (counts + TILE_ROWS - 1) // TILE_ROWS
    ends = tl.cumsum(row_tiles * NUM_COLUMN_TILES, 0)
    is_done = (ends <= tile) & (expert_ids < NUM_EXPERTS)
    expert = tl.sum(is_done.to(tl.int32), 0)
    is_mine = expert_ids == expert
    start = tl.sum(tl.where(is_mine, ends - row_tiles * NUM_COLUMN_TILES, 0), 0)
    my_row_tiles = tl.maximum(tl.sum(tl.where(is_mine, row_tiles, 0), 0), 1)
    count = tl.sum(tl.where(is_mine, counts, 0), 0)
    local = tile - start
    return expert, (local % my_row_tiles) * TILE_ROWS, count, local // my_row_tiles


@triton.jit
def _num_turns(
    counts_ptr: tl.tensor,
    NUM_EXPERTS: tl.constexpr,
    NUM_COLUMN_TILES: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    IS_LIMITED: tl.constexpr,
) -> tl.tensor | int:
    """Return the number of tiles of this program, 1 if there is a program for each tile.

    5 tiles, 2 programs: program 0 has tiles 0 2 4, program 1 has 1 3.
    """
    num_turns = 1
    if IS_LIMITED:
        expert_ids = tl.arange(0, triton.next_power_of_2(NUM_EXPERTS))
        counts = tl.load(counts_ptr + expert_ids, mask=expert_ids < NUM_EXPERTS, other=0)
        num_tiles = tl.sum((counts + TILE_ROWS - 1) // TILE_ROWS, 0) * NUM_COLUMN_TILES
        num_turns = tl.cdiv(num_tiles - tl.program_id(0), tl.num_programs(0))
    return num_turns


@triton.jit
def _slots_of_tile(
    first_slot_ptr: tl.tensor,
    expert: tl.tensor,
    first_row: tl.tensor,
    count: tl.tensor,
    TILE_ROWS: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """Return the slots of a tile, and which of them to write; the last slot of an expert repeats.

    Expert at slot 8, first row 4, count 6, tiles of 4 rows: slots 12 13 13 13, write 1 1 0 0.
    To be called where a tile is known to exist: slots computed before that take registers from the
    sums.
    """
    row_in_expert = first_row + tl.arange(0, TILE_ROWS)
    # Slots become int64 before a stride multiplies them: rows may begin beyond 2**31 elements.
    start = tl.load(first_slot_ptr + expert).to(tl.int64)
    return start + tl.minimum(row_in_expert, count - 1), row_in_expert < count


@triton.jit
def _multiply_fp8_kernel(
    x_ptr: tl.tensor,
    x_scales_ptr: tl.tensor,
    counts_ptr: tl.tensor,
    first_slot_ptr: tl.tensor,
    matrix: tl.tensor_descriptor,
    matrix_scales_ptr: tl.tensor,
    of_slot_ptr: tl.tensor | None,
    out_ptr: tl.tensor,
    out_scales_ptr: tl.tensor | None,
    DEPTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    X_STRIDE: tl.constexpr,
    X_SCALES_STRIDE: tl.constexpr,
    HAS_GATE: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
    IS_LIMITED: tl.constexpr,
) -> None:
    """Compute a tile of TILE_ROWS slots and one block of columns; see launch_product()."""
    DEPTH_BLOCKS: tl.constexpr = DEPTH // BLOCK
    BLOCKS: tl.constexpr = COLUMNS // BLOCK
    MATRIX_BLOCKS: tl.constexpr = BLOCKS * (2 if HAS_GATE else 1)
    for turn in range(_num_turns(counts_ptr, NUM_EXPERTS, BLOCKS, TILE_ROWS, IS_LIMITED)):
        number = tl.program_id(0) + turn * tl.num_programs(0)
        expert, first_row, count, block = _find_tile(  # pyright: ignore[reportGeneralTypeIssues]
            counts_ptr, number, NUM_EXPERTS, BLOCKS, TILE_ROWS
        )
        if expert < NUM_EXPERTS:
            slots, is_row = _slots_of_tile(first_slot_ptr, expert, first_row, count, TILE_ROWS)  # pyright: ignore[reportGeneralTypeIssues]
            rows = slots
            if HAS_GATE and of_slot_ptr is not None:
                rows = tl.load(of_slot_ptr + slots).to(tl.int64)
            lanes = tl.arange(0, BLOCK)
            x_at = x_ptr + rows[:, None] * X_STRIDE + lanes[None, :]
            x_scales_at = x_scales_ptr + rows * X_SCALES_STRIDE
            matrix_block = expert * MATRIX_BLOCKS + block
            matrix_row = matrix_block * BLOCK
            matrix_scales_at = matrix_scales_ptr + matrix_block * DEPTH_BLOCKS
            up_scales_at = matrix_scales_at + BLOCKS * DEPTH_BLOCKS
            total = tl.zeros([TILE_ROWS, BLOCK], tl.float32)
            up = tl.zeros([TILE_ROWS, BLOCK], tl.float32)
            for k in range(DEPTH_BLOCKS):
                x = tl.load(x_at + k * BLOCK)
                x_scale = tl.load(x_scales_at + k)
                part = tl.trans(matrix.load([matrix_row, k * BLOCK]))
                total += tl.dot(x, part) * (x_scale * tl.load(matrix_scales_at + k))[:, None]
                if HAS_GATE:
                    part = tl.trans(matrix.load([matrix_row + COLUMNS, k * BLOCK]))
                    up += tl.dot(x, part) * (x_scale * tl.load(up_scales_at + k))[:, None]
            out_at = out_ptr + slots[:, None] * COLUMNS + (block * BLOCK + lanes)[None, :]
            if HAS_GATE:
                hidden = total / (1.0 + tl.exp(-total)) * up
                amax = tl.maximum(tl.max(tl.abs(hidden), axis=1), _AMAX_FLOOR)
                factor = tl.math.div_rn(tl.full([TILE_ROWS], _E4M3_MAX, tl.float32), amax)
                scaled = hidden * factor[:, None]
                if _IS_INTERPRETED:
                    result = _e4m3_code(scaled)
                    # The interpreter multiplies the code of NaN as 480: the scale has to be NaN
                    # too.
                    amax += tl.sum(scaled - scaled, axis=1)
                else:
                    result = scaled.to(tl.float8e4nv).to(tl.uint8, bitcast=True)
                out_scales_at = out_scales_ptr + slots * BLOCKS + block
                tl.store(out_scales_at, amax * _RECIPROCAL_OF_MAX, mask=is_row)
            else:
                if of_slot_ptr is not None:
                    total *= tl.load(of_slot_ptr + slots)[:, None]
                result = total.to(out_ptr.dtype.element_ty)
            tl.store(out_at, result, mask=is_row[:, None])


def gate_up_fp8(given: Product, *, out_codes: Tensor, out_scales: Tensor) -> None:
    """Compute quantised silu(x gate) * (x up) of every slot; padding slots are not written.

    Args:
        given: rows [R, H] and matrices [L, 2I, H], float8_e4m3fn.
        out_codes: [C, I], float8_e4m3fn.   out_scales: [C, I / 128], float32.

    Allocates nothing. Host sync: none. Compiled for each H, I, L and strides.
    """
    is_small = len(out_codes) <= _FEW_SLOTS * len(given.counts)
    launch_product(
        _multiply_fp8_kernel,
        given,
        (out_codes.view(torch.uint8), out_scales),
        tile_rows=32 if is_small else 64,
        num_warps=4 if is_small else 8,
    )


def down_fp8(
    given: Product, *, slot_weights: Tensor | None, out: Tensor, after: None = None
) -> None:
    """Compute x down of every slot, times its router weight; padding slots are not written.

    Args:
        given: rows [C, I], contiguous as their scales are, and matrices [L, H, I]; float8_e4m3fn.
        slot_weights: [C], float32, or None.
        out: [C, H], bfloat16, float16 or float32.
        after: what gate_up_fp8() returned, which is nothing here.

    Allocates nothing. Host sync: none. Compiled for each H, I and L.
    """
    launch_product(
        _multiply_fp8_kernel,
        given,
        (out, None),
        slot_weights=slot_weights,
        tile_rows=32 if len(out) <= _FEW_SLOTS * len(given.counts) else 64,
        num_warps=4,
    )


def launch_product(
    kernel: object,
    given: Product,
    outputs: tuple[Tensor, Tensor | None],
    *,
    slot_weights: Tensor | None = None,
    tile_rows: int,
    tile_columns: int = BLOCK,
    tile_inner: int = BLOCK,
    num_warps: int,
    max_stages: int = 3,
    is_joined: bool = False,
) -> None:
    """Launch a kernel over the tiles of a product of rows [R, K] and matrices [L, N, K].

    Matrices [L, 2N, K] are gate and up, whose tiles are computed side by side (HAS_GATE). The
    kernel reads given.row_of_slot in of_slot_ptr then, and slot_weights otherwise.

    outputs: the result [C, N], and its scales if it has some.
    tile_inner: elements of K in a stage, which has 20 to 48 KB: with more than max_stages stages,
        fewer programs fit on an SM.
    is_joined: the descriptor loads tiles of gate and up together, [2, N, K], or [1, N, K].
    """
    matrices, num_experts, run = given.matrices, len(given.counts), cast(Any, kernel)
    assert matrices.is_contiguous(), "records of weights refuse other strides"
    num_slots, columns = outputs[0].shape
    has_gate = matrices.shape[1] == 2 * columns
    num_matrices = 2 if has_gate else 1
    stored, box = matrices.flatten(0, 1), [tile_columns, tile_inner]
    if is_joined:
        stored, box = stored.unflatten(0, (-1, columns)), [num_matrices, *box]
    row_bytes = tile_rows * given.codes.itemsize + tile_columns * num_matrices
    limits = device_limits(given.codes.device)
    num_tiles = given.num_tiles(num_slots, tile_rows, tile_columns, columns)
    with torch.cuda.device_of(given.codes):
        run[(min(num_tiles, given.num_sms or num_tiles),)](
            given.codes,
            given.scales,
            given.counts,
            given.first_slot,
            TensorDescriptor.from_tensor(stored, box),
            given.matrix_scales,
            given.row_of_slot if has_gate else slot_weights,
            *outputs,
            DEPTH=matrices.shape[2],
            COLUMNS=columns,
            X_STRIDE=given.codes.stride(0),
            X_SCALES_STRIDE=given.scales.stride(0),
            HAS_GATE=has_gate,
            NUM_EXPERTS=num_experts,
            TILE_ROWS=tile_rows,
            TILE_COLUMNS=tile_columns,
            BLOCK=tile_inner,
            IS_LIMITED=given.num_sms is not None,
            num_warps=num_warps,
            num_stages=limits.stages(row_bytes * tile_inner, most=max_stages),
        )
