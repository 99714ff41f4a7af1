"""Multiply INT8 rows by INT8 matrices, expert by expert: the two products of a rank's experts.

multiply_int8() reads rows through the index, multiplies them by [2I, H] and computes
silu(gate) * up in float32. quantize_hidden_int8() turns these hidden rows into codes, which
multiply_int8() multiplies by [H, I] and by router weights, in the dtype of the hidden states. A
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

from epcomm.kernels.gemm.fp8 import BLOCK, _find_tile, _num_turns, _slots_of_tile, launch_product
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
def _multiply_int8_kernel(
    x_ptr: tl.tensor,
    x_scales_ptr: tl.tensor,
    counts_ptr: tl.tensor,
    first_slot_ptr: tl.tensor,
    matrix: tl.tensor_descriptor,
    matrix_scales_ptr: tl.tensor,
    of_slot_ptr: tl.tensor | None,
    out_ptr: tl.tensor,
    unused_ptr: None,
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
    """Compute a tile of TILE_ROWS slots and TILE_COLUMNS columns; see launch_product().

    Codes 2 -3 and scale 0.5, gate 4 1 with scale 2 and up 1 1 with scale 3: gate 5 * 0.5 * 2 = 5,
    up -1 * 0.5 * 3 = -1.5, so hidden is silu(5) * -1.5. Without up, and with the weight 3, 15.
    """
    TILES: tl.constexpr = (COLUMNS + TILE_COLUMNS - 1) // TILE_COLUMNS
    MATRIX_ROWS: tl.constexpr = COLUMNS * (2 if HAS_GATE else 1)
    for turn in range(_num_turns(counts_ptr, NUM_EXPERTS, TILES, TILE_ROWS, IS_LIMITED)):
        number = tl.program_id(0) + turn * tl.num_programs(0)
        expert, first_row, count, tile = _find_tile(  # pyright: ignore[reportGeneralTypeIssues]
            counts_ptr, number, NUM_EXPERTS, TILES, TILE_ROWS
        )
        if expert < NUM_EXPERTS:
            slots, is_row = _slots_of_tile(first_slot_ptr, expert, first_row, count, TILE_ROWS)  # pyright: ignore[reportGeneralTypeIssues]
            rows = slots
            if HAS_GATE and of_slot_ptr is not None:
                rows = tl.load(of_slot_ptr + slots).to(tl.int64)
            # Loaded before the sums take up the registers.
            x_scales = tl.load(x_scales_ptr + rows * X_SCALES_STRIDE)[:, None]
            lanes = tl.arange(0, BLOCK)
            x_at = x_ptr + rows[:, None] * X_STRIDE + lanes[None, :]
            matrix_row = expert * MATRIX_ROWS + tile * TILE_COLUMNS
            total = tl.zeros([TILE_ROWS, TILE_COLUMNS], tl.int32)
            up_total = tl.zeros([TILE_ROWS, TILE_COLUMNS], tl.int32)
            for k in range((DEPTH + BLOCK - 1) // BLOCK):
                if DEPTH % BLOCK == 0:
                    x = tl.load(x_at + k * BLOCK)
                else:
                    x = tl.load(x_at + k * BLOCK, mask=lanes[None, :] < DEPTH - k * BLOCK, other=0)
                # Beyond the last column and the last matrix TMA gives zeros; rows beyond the end of
                # gate or up belong to the next matrix, and their sums are not stored.
                part = tl.trans(matrix.load([matrix_row, k * BLOCK]))
                total = tl.dot(x, part, total, out_dtype=tl.int32)
                if HAS_GATE:
                    part = tl.trans(matrix.load([matrix_row + COLUMNS, k * BLOCK]))
                    up_total = tl.dot(x, part, up_total, out_dtype=tl.int32)
            columns = tile * TILE_COLUMNS + tl.arange(0, TILE_COLUMNS)
            is_column = columns < COLUMNS
            scales_at = matrix_scales_ptr + expert * MATRIX_ROWS + columns
            scales = tl.load(scales_at, mask=is_column, other=0.0)
            result = total.to(tl.float32) * x_scales * scales[None, :]
            if HAS_GATE:
                up_scales = tl.load(scales_at + COLUMNS, mask=is_column, other=0.0)
                up = up_total.to(tl.float32) * x_scales * up_scales[None, :]
                result = result / (1.0 + tl.exp(-result)) * up
            elif of_slot_ptr is not None:
                result *= tl.load(of_slot_ptr + slots)[:, None]
            out_at = out_ptr + slots[:, None] * COLUMNS + columns[None, :]
            is_result = is_row[:, None] & is_column[None, :]
            tl.store(out_at, result.to(out_ptr.dtype.element_ty), mask=is_result)


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
        slots, is_row = _slots_of_tile(first_slot_ptr, expert, first_row, count, TILE_ROWS)  # pyright: ignore[reportGeneralTypeIssues]
        columns = tl.arange(0, TILE_COLUMNS)
        is_element = is_row[:, None] & (columns < INNER)[None, :]
        elements = slots[:, None] * INNER + columns[None, :]
        hidden = tl.load(hidden_ptr + elements, mask=is_element, other=0.0)
        amax_bits = tl.max(hidden.to(tl.int32, bitcast=True) & _MAGNITUDE_MASK, axis=1)[:, None]
        codes, scales = quantize_part(hidden, amax_bits, PROFILE)  # pyright: ignore[reportGeneralTypeIssues]
        tl.store(codes_ptr + elements, codes, mask=is_element)
        tl.store(scales_ptr + slots[:, None], scales, mask=is_row[:, None])


def multiply_int8(
    given: Product, *, slot_weights: Tensor | None = None, is_packed: bool, out: Tensor
) -> None:
    """Compute silu(x gate) * (x up), or x down, of every slot; padding slots are not written.

    Args:
        given: int8; rows [R, H] and matrices [L, 2I, H] of gate and up, or rows [C, I] and
            matrices [L, H, I].
        slot_weights: [C], float32, router weights that multiply x down, or None.
        is_packed: most of the C slots are used; a wrong value costs only time.
        out: contiguous; [C, I], float32, or [C, H], bfloat16, float16 or float32.

    Allocates nothing. Host sync: none. Compiled for each H, I, L and strides.
    """
    tile_rows = tile_rows_for(len(out), len(given.counts), is_packed=is_packed)
    is_large, has_gate = tile_rows == _LARGE_TILE, given.matrices.shape[1] == 2 * out.shape[1]
    launch_product(
        _multiply_int8_kernel,
        given,
        (out, None),
        slot_weights=slot_weights,
        tile_rows=tile_rows,
        # With 256 columns a large tile has as many sums as gate and up together, 128 a thread.
        tile_columns=256 if is_large and not has_gate else BLOCK,
        # Chosen by the size of shared memory, not by measurement: an SM of an H200 holds one large
        # tile, whose stages have 48 KB, or up to three smaller tiles of 3 stages with 20 to 40 KB.
        num_warps=8 if is_large else 4,
        max_stages=4 if is_large else 3,
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


def tile_rows_for(num_slots: int, num_experts: int, *, is_packed: bool) -> int:
    """Return the rows of a tile, fewer than 128 where most slots may be unused."""
    if num_slots <= _FEW_SLOTS * num_experts:
        return 32
    return _LARGE_TILE if is_packed and num_slots > _MANY_SLOTS * num_experts else 64
