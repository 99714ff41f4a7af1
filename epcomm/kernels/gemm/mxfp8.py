"""Multiply mxfp8 rows by mxfp8 matrices, expert by expert, in BF16, in which both are exact.

Tensor cores of Hopper multiply e4m3 but know no scales, and to scale a product for each 32 elements
takes several times as long. So rows are restored before a product, and a part of a matrix in
registers: it is the left operand, and a tile has columns by rows. Both have K in an order that
gives a thread its elements of the operand in one load, see in_fragments(): rows are stored so, and
matrices, which stay as they are, read so. A tile finds its expert from the counts on the device;
rows past the counts are not written.
"""

from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from epcomm.kernels.gemm.fp8 import _find_tile, _num_turns, _slots_of_tile, launch_product
from epcomm.kernels.gemm.operands import Product
from epcomm.kernels.launch import IS_INTERPRETED
from epcomm.kernels.quantize.fp8 import (
    float_of,
    in_fragments,
    power_of,
    quantize_blocks,
    restore_triton,
)
from epcomm.kernels.rounding import cast
from epcomm.kernels.rows.tiles import movable
from epcomm.types import WireDtype, WireFormat, WireTensor

_MXFP8 = WireFormat(dtype=WireDtype.MXFP8)
# Mean number of slots of an expert up to which a tile has 32 rows.
_FEW_SLOTS = 48
# The interpreter neither converts e4m3 as GPUs do nor multiplies bfloat16.
_IS_COMPILED = tl.constexpr(not IS_INTERPRETED)
_OPERAND = tl.constexpr(tl.float32 if IS_INTERPRETED else tl.bfloat16)
_SCALED = tl.constexpr(32)


@triton.jit
def _multiply_mxfp8_kernel(
    x_ptr: tl.tensor,
    unused_ptr: tl.tensor,
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
    """Compute a tile of TILE_ROWS slots and TILE_COLUMNS columns; see launch_product()."""
    TILES: tl.constexpr = COLUMNS // TILE_COLUMNS
    MATRICES: tl.constexpr = matrix.block_shape[0]
    OPERAND_ROWS: tl.constexpr = MATRICES * TILE_COLUMNS
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
            x_at = x_ptr + rows[None, :] * X_STRIDE + tl.arange(0, BLOCK)[:, None]
            # Eight rows of gate and eight of up alternate, so that one thread has both sums of an
            # element.
            lanes = tl.arange(0, OPERAND_ROWS)
            matrix_rows = (expert * MATRICES + lanes // 8 % MATRICES) * COLUMNS
            matrix_rows += tile * TILE_COLUMNS + lanes // (8 * MATRICES) * 8 + lanes % 8
            scales_at = matrix_scales_ptr + matrix_rows.to(tl.int64)[:, None] * (DEPTH // _SCALED)
            scales_at += tl.arange(0, BLOCK // _SCALED)[None, :]
            total = tl.zeros([OPERAND_ROWS, TILE_ROWS], tl.float32)
            next_scales = tl.load(scales_at)
            for k in range(DEPTH // BLOCK):
                x = tl.load(x_at + k * BLOCK).to(_OPERAND)
                codes = matrix.load([expert * MATRICES, tile * TILE_COLUMNS, k * BLOCK])
                # Too few bytes for an asynchronous copy, so they are loaded one block ahead.
                scales = power_of(next_scales)
                next_block = tl.minimum(k + 1, DEPTH // BLOCK - 1)
                next_scales = tl.load(scales_at + next_block * (BLOCK // _SCALED))
                codes = tl.reshape(codes, [MATRICES, TILE_COLUMNS // 8, 8, BLOCK])
                part = float_of(tl.permute(codes, (1, 0, 2, 3)), 128, _IS_COMPILED)
                part = tl.reshape(part, [OPERAND_ROWS, BLOCK // _SCALED, _SCALED])
                part = tl.reshape(part * scales[:, :, None], [OPERAND_ROWS, BLOCK])
                total = tl.dot(in_fragments(cast(part, _OPERAND)), x, total)
                if _IS_COMPILED:
                    # A product reads registers after its instruction, and Triton 3.6 would let the
                    # next operand be written to them (issue 9433 of triton-lang/triton).
                    tl.inline_asm_elementwise(
                        "wgmma.wait_group.sync.aligned 0; mov.b32 $0, 0;",
                        "=r",
                        [],
                        dtype=tl.int32,
                        is_pure=False,
                        pack=1,
                    )
            columns = tile * TILE_COLUMNS + tl.arange(0, TILE_COLUMNS)
            out_at = out_ptr + slots[:, None] * COLUMNS + columns[None, :]
            if HAS_GATE:
                sums = tl.reshape(total, [TILE_COLUMNS // 8, 2, 8, TILE_ROWS])
                gate, up = tl.split(tl.permute(sums, (0, 2, 3, 1)))
                hidden = tl.reshape(gate / (1.0 + tl.exp(-gate)) * up, [TILE_COLUMNS, TILE_ROWS])
                hidden = tl.trans(hidden)
                BLOCKS: tl.constexpr = TILE_COLUMNS // _SCALED
                blocks = tl.reshape(hidden, [TILE_ROWS * BLOCKS, _SCALED])
                codes, scales = quantize_blocks(blocks, True, _IS_COMPILED, 0)  # pyright: ignore[reportGeneralTypeIssues]
                codes = tl.reshape(codes, [TILE_ROWS, TILE_COLUMNS])
                tl.store(out_at, codes, mask=is_row[:, None])
                block = tile * BLOCKS + tl.arange(0, BLOCKS)
                scales_at = out_scales_ptr + slots[:, None] * (COLUMNS // _SCALED) + block[None, :]
                tl.store(scales_at, tl.reshape(scales, [TILE_ROWS, BLOCKS]), mask=is_row[:, None])
            else:
                if of_slot_ptr is not None:
                    total *= tl.load(of_slot_ptr + slots)[None, :]
                result = cast(tl.trans(total), out_ptr.dtype.element_ty)
                tl.store(out_at, result, mask=is_row[:, None])


def gate_up_mxfp8(given: Product, *, out_codes: Tensor, out_scales: Tensor) -> None:
    """Compute quantised silu(x gate) * (x up) of every slot; padding slots are not written.

    Args:
        given: rows [R, H] and matrices [L, 2I, H], mxfp8.
        out_codes: [C, I], float8_e4m3fn.   out_scales: [C, I / 32], float8_e8m0fnu.

    Allocates the rows in BF16. Host sync: none. Compiled for each H, I and L.
    """
    _multiply(given, (movable(out_codes), movable(out_scales)), None)


def down_mxfp8(
    given: Product, *, slot_weights: Tensor | None, out: Tensor, after: None = None
) -> None:
    """Compute x down of every slot, times its router weight; padding slots are not written.

    Args:
        given: rows [C, I] and matrices [L, H, I], mxfp8.
        slot_weights: [C], float32, or None.
        out: [C, H], bfloat16, float16 or float32.
        after: what gate_up_mxfp8() returned, which is nothing here.

    Allocates the rows in BF16. Host sync: none. Compiled for each H, I and L.
    """
    _multiply(given, (out, None), slot_weights)


def _multiply(
    given: Product, outputs: tuple[Tensor, Tensor | None], slot_weights: Tensor | None
) -> None:
    num_slots, columns = outputs[0].shape
    is_small = num_slots <= _FEW_SLOTS * len(given.counts)
    has_gate = given.matrices.shape[1] == 2 * columns
    wire = WireTensor(data=given.codes, format=_MXFP8, scales=given.scales)
    scales = movable(given.matrix_scales)
    launch_product(
        _multiply_mxfp8_kernel,
        replace(
            given,
            codes=restore_triton(wire, torch.bfloat16, are_fragments=True),
            scales=scales,
            matrices=movable(given.matrices),
            matrix_scales=scales,
        ),
        outputs,
        slot_weights=slot_weights,
        tile_rows=32 if is_small else 128,
        tile_columns=64 if has_gate else 128,
        tile_inner=128 if is_small else 64,
        num_warps=4 if is_small else 8,
        is_joined=True,
    )
