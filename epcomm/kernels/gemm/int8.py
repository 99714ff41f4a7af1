"""Multiply INT8 rows by INT8 matrices, expert by expert: the two products of a rank's experts.

gate_up_int8() reads rows through the index, multiplies them by [2I, H] and computes
silu(gate) * up in float32. quantize_hidden_int8() turns these hidden rows into codes. down_int8()
multiplies the codes by [H, I] and by router weights, and stores the dtype of the hidden states. A
tile finds its expert from the counts on the device, so the host reads no count; rows past the
counts are neither read nor written. Integer sums are exact, and scaled once.

A row has one scale, so no code exists before all I elements of the row are known, and a tile has
only 128 of them. The hidden rows therefore pass through memory in float32 (bfloat16 would give
other codes): 4 I bytes written, 4 I bytes read and I bytes written for each used slot. Finding the
largest magnitude by atomics would save none of these bytes, because the quantising program holds a
whole row; quantising in the second product would read 4 I bytes again for each column tile. Times:
benchmarks/results/h100_gemm_int8.json.
"""

import triton
import triton.language as tl
from torch import Tensor

from epcomm.kernels.gemm.fp8 import BLOCK, _find_tile, _num_turns, launch_product
from epcomm.kernels.gemm.operands import Product
from epcomm.kernels.launch import EXACT, next_power_of_two, warps_for
from epcomm.kernels.prepared import launch
from epcomm.kernels.quantize.int8 import _MAGNITUDE_MASK, quantize_part
from epcomm.types import Int8Profile

# Mean number of slots of an expert up to which a tile has 32 and 64 rows; larger tiles would
# compute many rows that do not exist.
_FEW_SLOTS, _MANY_SLOTS = 48, 192
_LARGE_TILE = 128
# Number of elements of hidden rows in the registers of one program: 32 for each thread of 8 warps.
_QUANTIZED_ELEMENTS = 8192


@triton.jit
def _gate_up_int8_kernel(
    x_ptr: tl.tensor,
    x_scales_ptr: tl.tensor,
    counts_ptr: tl.tensor,
    first_slot_ptr: tl.tensor,
    matrix: tl.tensor_descriptor,
    matrix_scales_ptr: tl.tensor,
    row_of_slot_ptr: tl.tensor | None,
    out_ptr: tl.tensor,
    HIDDEN: tl.constexpr,
    INNER: tl.constexpr,
    X_STRIDE: tl.constexpr,
    X_SCALES_STRIDE: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
    IS_LIMITED: tl.constexpr,
) -> None:
    """Compute a tile of TILE_ROWS slots and one block of I, gate and up side by side.

    Codes 2 -3 and scale 0.5, gate 4 1 with scale 2 and up 1 1 with scale 3: gate 5 * 0.5 * 2 = 5,
    up -1 * 0.5 * 3 = -1.5, so hidden is silu(5) * -1.5.
    """
    INNER_BLOCKS: tl.constexpr = (INNER + BLOCK - 1) // BLOCK
    HIDDEN_BLOCKS: tl.constexpr = (HIDDEN + BLOCK - 1) // BLOCK
    for turn in range(_num_turns(counts_ptr, NUM_EXPERTS, INNER_BLOCKS, TILE_ROWS, IS_LIMITED)):
        number = tl.program_id(0) + turn * tl.num_programs(0)
        expert, first_row, count, block = _find_tile(  # pyright: ignore[reportGeneralTypeIssues]
            counts_ptr, number, NUM_EXPERTS, INNER_BLOCKS, TILE_ROWS
        )
        if expert < NUM_EXPERTS:
            row_in_expert = first_row + tl.arange(0, TILE_ROWS)
            is_row = row_in_expert < count
            # The row is widened before a stride multiplies it: rows may begin beyond 2**31
            # elements.
            start = tl.load(first_slot_ptr + expert).to(tl.int64)
            # A tile that is not full reads the last row again, the only row that is sure to exist.
            slots = start + tl.minimum(row_in_expert, count - 1)
            rows = slots
            if row_of_slot_ptr is not None:
                rows = tl.load(row_of_slot_ptr + slots).to(tl.int64)
            lanes = tl.arange(0, BLOCK)
            x_at = x_ptr + rows[:, None] * X_STRIDE + lanes[None, :]
            gate_row = expert * (2 * INNER) + block * BLOCK
            gate_sum = tl.zeros([TILE_ROWS, BLOCK], tl.int32)
            up_sum = tl.zeros([TILE_ROWS, BLOCK], tl.int32)
            for k in range(HIDDEN_BLOCKS):
                if HIDDEN % BLOCK == 0:
                    x = tl.load(x_at + k * BLOCK)
                else:
                    x = tl.load(x_at + k * BLOCK, mask=lanes[None, :] < HIDDEN - k * BLOCK, other=0)
                # Beyond the last column and the last matrix TMA gives zeros; rows beyond the end of
                # gate or up belong to the next matrix, and their sums are not stored.
                gate_matrix = tl.trans(matrix.load([gate_row, k * BLOCK]))
                up_matrix = tl.trans(matrix.load([gate_row + INNER, k * BLOCK]))
                gate_sum = tl.dot(x, gate_matrix, gate_sum, out_dtype=tl.int32)
                up_sum = tl.dot(x, up_matrix, up_sum, out_dtype=tl.int32)
            columns = block * BLOCK + lanes
            is_column = columns < INNER
            x_scales = tl.load(x_scales_ptr + rows * X_SCALES_STRIDE)[:, None]
            gate_scales_at = matrix_scales_ptr + expert * (2 * INNER) + columns
            gate_scales = tl.load(gate_scales_at, mask=is_column, other=0.0)
            up_scales = tl.load(gate_scales_at + INNER, mask=is_column, other=0.0)
            gate = gate_sum.to(tl.float32) * x_scales * gate_scales[None, :]
            up = up_sum.to(tl.float32) * x_scales * up_scales[None, :]
            hidden = gate / (1.0 + tl.exp(-gate)) * up
            out_at = out_ptr + slots[:, None] * INNER + columns[None, :]
            tl.store(out_at, hidden, mask=is_row[:, None] & is_column[None, :])


@triton.jit
def _quantize_hidden_int8_kernel(
    hidden_ptr: tl.tensor,
    counts_ptr: tl.tensor,
    first_slot_ptr: tl.tensor,
    codes_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    INNER: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
    PROFILE: tl.constexpr,
) -> None:
    """Quantise TILE_ROWS slots of one expert.

    With rint127 the row 254 1 -3 9 has the scale 2 and codes 127 0 -2 4.
    """
    expert, first_row, count, _ = _find_tile(  # pyright: ignore[reportGeneralTypeIssues]
        counts_ptr, tl.program_id(0), NUM_EXPERTS, 1, TILE_ROWS
    )
    if expert < NUM_EXPERTS:
        row_in_expert = first_row + tl.arange(0, TILE_ROWS)
        is_row = row_in_expert < count
        slots = tl.load(first_slot_ptr + expert).to(tl.int64) + row_in_expert
        columns = tl.arange(0, TILE_COLUMNS)
        is_element = is_row[:, None] & (columns < INNER)[None, :]
        elements = slots[:, None] * INNER + columns[None, :]
        hidden = tl.load(hidden_ptr + elements, mask=is_element, other=0.0)
        amax_bits = tl.max(hidden.to(tl.int32, bitcast=True) & _MAGNITUDE_MASK, axis=1)[:, None]
        codes, scales = quantize_part(hidden, amax_bits, PROFILE)  # pyright: ignore[reportGeneralTypeIssues]
        tl.store(codes_ptr + elements, codes, mask=is_element)
        tl.store(scales_ptr + slots[:, None], scales, mask=is_row[:, None])


@triton.jit
def _down_int8_kernel(
    x_ptr: tl.tensor,
    x_scales_ptr: tl.tensor,
    counts_ptr: tl.tensor,
    first_slot_ptr: tl.tensor,
    matrix: tl.tensor_descriptor,
    matrix_scales_ptr: tl.tensor,
    slot_weights_ptr: tl.tensor | None,
    out_ptr: tl.tensor,
    HIDDEN: tl.constexpr,
    INNER: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    TILE_COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
    IS_LIMITED: tl.constexpr,
) -> None:
    """Compute a tile of TILE_ROWS slots and TILE_COLUMNS columns of H.

    Codes 2 -3 and scale 0.5, channel 4 1 with scale 2, weight 3: 5 * 0.5 * 2 * 3 = 15.
    """
    COLUMN_TILES: tl.constexpr = (HIDDEN + TILE_COLUMNS - 1) // TILE_COLUMNS
    INNER_BLOCKS: tl.constexpr = (INNER + BLOCK - 1) // BLOCK
    for turn in range(_num_turns(counts_ptr, NUM_EXPERTS, COLUMN_TILES, TILE_ROWS, IS_LIMITED)):
        number = tl.program_id(0) + turn * tl.num_programs(0)
        expert, first_row, count, tile = _find_tile(  # pyright: ignore[reportGeneralTypeIssues]
            counts_ptr, number, NUM_EXPERTS, COLUMN_TILES, TILE_ROWS
        )
        if expert < NUM_EXPERTS:
            row_in_expert = first_row + tl.arange(0, TILE_ROWS)
            is_row = row_in_expert < count
            start = tl.load(first_slot_ptr + expert).to(tl.int64)
            slots = start + tl.minimum(row_in_expert, count - 1)
            lanes = tl.arange(0, BLOCK)
            x_at = x_ptr + slots[:, None] * INNER + lanes[None, :]
            matrix_row = expert * HIDDEN + tile * TILE_COLUMNS
            total = tl.zeros([TILE_ROWS, TILE_COLUMNS], tl.int32)
            for k in range(INNER_BLOCKS):
                if INNER % BLOCK == 0:
                    x = tl.load(x_at + k * BLOCK)
                else:
                    x = tl.load(x_at + k * BLOCK, mask=lanes[None, :] < INNER - k * BLOCK, other=0)
                channels = tl.trans(matrix.load([matrix_row, k * BLOCK]))
                total = tl.dot(x, channels, total, out_dtype=tl.int32)
            columns = tile * TILE_COLUMNS + tl.arange(0, TILE_COLUMNS)
            is_column = columns < HIDDEN
            scales_at = matrix_scales_ptr + expert * HIDDEN + columns
            scales = tl.load(scales_at, mask=is_column, other=0.0)
            result = total.to(tl.float32) * tl.load(x_scales_ptr + slots)[:, None] * scales[None, :]
            if slot_weights_ptr is not None:
                result *= tl.load(slot_weights_ptr + slots)[:, None]
            out_at = out_ptr + slots[:, None] * HIDDEN + columns[None, :]
            is_result = is_row[:, None] & is_column[None, :]
            tl.store(out_at, result.to(out_ptr.dtype.element_ty), mask=is_result)


def gate_up_int8(given: Product, *, out: Tensor) -> None:
    """Compute silu(x gate) * (x up) of every slot in float32; padding slots are not written.

    Args:
        given: rows [R, H] and matrices [L, 2I, H], int8.
        out: [C, I], float32, contiguous.

    Allocates nothing. Host sync: none. Compiled for each H, I, L and strides.
    """
    is_packed = given.row_of_slot is not None
    tile_rows = tile_rows_for(len(out), len(given.counts), is_packed=is_packed)
    launch_product(
        _gate_up_int8_kernel,
        given,
        given.row_of_slot,
        (out,),
        tile_rows=tile_rows,
        stage_matrix_rows=2 * BLOCK,
        **_options(tile_rows),
        HIDDEN=given.matrices.shape[2],
        INNER=out.shape[1],
        X_STRIDE=given.codes.stride(0),
        X_SCALES_STRIDE=given.scales.stride(0),
    )


def quantize_hidden_int8(
    hidden: Tensor,
    counts: Tensor,
    first_slot: Tensor,
    *,
    profile: Int8Profile,
    out_codes: Tensor,
    out_scales: Tensor,
) -> None:
    """Quantise hidden rows to the codes of quantize(); padding slots are not written.

    Args:
        hidden: [C, I], float32, contiguous.
        counts: [L], int32.   first_slot: [L + 1], int32.
        out_codes: [C, I], int8, contiguous.   out_scales: [C, 1], float32, contiguous.

    Allocates nothing. Host sync: none. Compiled for each I, L and profile.
    """
    num_slots, inner_size = hidden.shape
    num_experts = counts.shape[0]
    tile_columns = next_power_of_two(inner_size)
    tile_rows = max(1, _QUANTIZED_ELEMENTS // tile_columns)
    launch(
        _quantize_hidden_int8_kernel,
        -(-num_slots // tile_rows) + num_experts,
        (hidden, counts, first_slot, out_codes, out_scales),
        INNER=inner_size,
        NUM_EXPERTS=num_experts,
        TILE_ROWS=tile_rows,
        TILE_COLUMNS=tile_columns,
        PROFILE=profile.value,
        num_warps=warps_for(tile_rows * tile_columns),
        **EXACT,
    )


def down_int8(given: Product, *, slot_weights: Tensor | None, is_packed: bool, out: Tensor) -> None:
    """Compute x down of every slot, times its router weight; padding slots are not written.

    Args:
        given: rows [C, I], contiguous as their scales are, and matrices [L, H, I]; int8.
        slot_weights: [C], float32, or None.
        is_packed: most of the C slots are used; a wrong value costs only time.
        out: [C, H], bfloat16, float16 or float32, contiguous.

    Allocates nothing. Host sync: none. Compiled for each H, I and L.
    """
    num_experts, hidden_size, inner_size = given.matrices.shape
    tile_rows = tile_rows_for(len(out), num_experts, is_packed=is_packed)
    # With 256 columns a large tile has as many sums as gate and up together.
    columns = 256 if tile_rows == _LARGE_TILE else BLOCK
    launch_product(
        _down_int8_kernel,
        given,
        slot_weights,
        (out,),
        tile_rows=tile_rows,
        tile_columns=columns,
        **_options(tile_rows),
        HIDDEN=hidden_size,
        INNER=inner_size,
        TILE_COLUMNS=columns,
    )


def tile_rows_for(num_slots: int, num_experts: int, *, is_packed: bool) -> int:
    """Return the rows of a tile, fewer than 128 where most slots may be unused."""
    if num_slots <= _FEW_SLOTS * num_experts:
        return 32
    return _LARGE_TILE if is_packed and num_slots > _MANY_SLOTS * num_experts else 64


def _options(tile_rows: int) -> dict[str, int]:
    """Return warps and stages, chosen by the size of shared memory, not by measurement."""
    # A thread has at most 128 sums. An SM of an H200 holds one large tile, whose stages have 48 KB,
    # or up to three smaller tiles of 3 stages with 20 to 40 KB each.
    is_large = tile_rows == _LARGE_TILE
    return {"num_warps": 8, "max_stages": 4} if is_large else {"num_warps": 4, "max_stages": 3}
