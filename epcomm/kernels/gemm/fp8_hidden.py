"""Compute silu(gate) * up between two FP8 products without activation, quantised.

A program takes the gate and the up columns of one block of I, so each element is read once and the
scale of a block needs no second pass. Tiles are found from the counts on the device, and programs
compute one tile after another, so the work depends on the rows in use, not on the capacity.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from epcomm.kernels.gemm.fp8 import BLOCK, _find_tile
from epcomm.kernels.launch import EXACT, warps_for
from epcomm.kernels.prepared import launch
from epcomm.kernels.quantize.fp8 import _E8M0_NAN, has_e4m3, quantize_blocks
from epcomm.kernels.quantize.int8 import _NAN_BITS
from epcomm.kernels.rows.tiles import movable

_TILE_ROWS = 32
# Eight programs of four warps on each of the 132 SMs of an H200 hide the latency of its memory.
_MAX_PROGRAMS = 1056


@triton.jit(do_not_specialize=["scales_stride", "expert_stride"])
def _hidden_fp8_kernel(
    gate_up_ptr: tl.tensor,
    counts_ptr: tl.tensor,
    first_slot_ptr: tl.tensor | None,
    slot_weights_ptr: tl.tensor | None,
    codes_ptr: tl.tensor,
    scales_ptr: tl.tensor,
    scales_stride: tl.tensor,
    expert_stride: tl.tensor,
    INNER: tl.constexpr,
    CAPACITY: tl.constexpr,
    IS_POWER_OF_TWO: tl.constexpr,
    IS_PACKED: tl.constexpr,
    HAS_E4M3: tl.constexpr,
    NUM_EXPERTS: tl.constexpr,
    TILE_ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Compute tiles of TILE_ROWS slots of one expert and one block of I.

    With CAPACITY the slots of expert e begin at e * CAPACITY, else at first_slot[e].
    """
    INNER_BLOCKS: tl.constexpr = INNER // BLOCK
    expert_ids = tl.arange(0, triton.next_power_of_2(NUM_EXPERTS))
    counts = tl.load(counts_ptr + expert_ids, mask=expert_ids < NUM_EXPERTS, other=0)
    num_tiles = tl.sum((counts + TILE_ROWS - 1) // TILE_ROWS, 0) * INNER_BLOCKS
    lanes = tl.arange(0, BLOCK)
    tile = tl.program_id(0)
    while tile < num_tiles:
        expert, first_row, count, block = _find_tile(  # pyright: ignore[reportGeneralTypeIssues]
            counts_ptr, tile, NUM_EXPERTS, INNER_BLOCKS, TILE_ROWS
        )
        row_in_expert = first_row + tl.arange(0, TILE_ROWS)
        is_row = row_in_expert < count
        # Slots become int64 before a stride multiplies them: rows may begin beyond 2**31 elements.
        if first_slot_ptr is None:
            slots = expert.to(tl.int64) * CAPACITY + row_in_expert
            scale_rows = expert.to(tl.int64) * expert_stride + row_in_expert
        else:
            slots = tl.load(first_slot_ptr + expert).to(tl.int64) + row_in_expert
            scale_rows = slots
        columns = block * BLOCK + lanes
        gate_at = gate_up_ptr + slots[:, None] * (2 * INNER) + columns[None, :]
        gate = tl.load(gate_at, mask=is_row[:, None], other=0.0).to(tl.float32)
        up = tl.load(gate_at + INNER, mask=is_row[:, None], other=0.0).to(tl.float32)
        hidden = gate / (1.0 + tl.exp(-gate)) * up
        codes, scale = quantize_blocks(hidden, IS_POWER_OF_TWO, HAS_E4M3)  # pyright: ignore[reportGeneralTypeIssues]
        tl.store(codes_ptr + slots[:, None] * INNER + columns[None, :], codes, mask=is_row[:, None])
        if IS_PACKED:
            # Four blocks share a word, the first one its lowest byte.
            words_at = scales_ptr + (block // 4) * scales_stride + scale_rows
            scales_at = words_at.to(tl.pointer_type(tl.uint8), bitcast=True) + block % 4
        else:
            scales_at = scales_ptr + block * scales_stride + scale_rows
            if IS_POWER_OF_TWO:
                exponent = scale.to(tl.int32)
                bits = tl.where(exponent == _E8M0_NAN, _NAN_BITS, exponent << 23)
                scale = bits.to(tl.float32, bitcast=True)
            if slot_weights_ptr is not None:
                scale *= tl.load(slot_weights_ptr + slots, mask=is_row, other=0.0)
        tl.store(scales_at, scale, mask=is_row)
        tile += tl.num_programs(0)


def hidden_fp8(
    gate_up: Tensor,
    counts: Tensor,
    first_slot: Tensor | None,
    *,
    slot_weights: Tensor | None,
    out_codes: Tensor,
    out_scales: Tensor,
    is_power_of_two: bool,
) -> None:
    """Write silu(gate) * up of every slot, quantised by blocks of 128; padding is not written.

    Args:
        gate_up: [C, 2I], or [L, C, 2I] where each expert has capacity for C slots; contiguous.
        counts: [L], int32.
        first_slot: [L + 1], int32; None for gate_up [L, C, 2I].
        slot_weights: one for each slot, float32, contiguous; they multiply the scales, and with
            them the results of the product that follows. None: nothing multiplies.
        out_codes: [..., I], float8_e4m3fn, contiguous.
        out_scales: [..., I / 128], float32, or [..., ceil(I / 512)], int32, four exponents a word,
            zeroed where I is not a multiple of 512 and without slot_weights; either in columns.
        is_power_of_two: scales are rounded up to powers of two, as int32 ones always are.

    Allocates nothing.   Host sync: none.   Deterministic: yes.   Compiled for each I and L.
    """
    is_packed = out_scales.dtype == torch.int32
    assert not (is_packed and slot_weights is not None), "exponents have no fraction"
    num_experts, inner_size = counts.shape[0], out_codes.shape[-1]
    capacity = 0 if first_slot is not None else gate_up.shape[1]
    strides = (out_scales.stride(-1), out_scales.stride(0) if capacity else 0)
    num_slots = gate_up.shape[:-1].numel()
    num_tiles = (-(-num_slots // _TILE_ROWS) + num_experts) * (inner_size // BLOCK)
    launch(
        _hidden_fp8_kernel,
        min(num_tiles, _MAX_PROGRAMS),
        (gate_up, counts, first_slot, slot_weights, movable(out_codes), out_scales, *strides),
        INNER=inner_size,
        CAPACITY=capacity,
        IS_POWER_OF_TWO=is_power_of_two or is_packed,
        IS_PACKED=is_packed,
        HAS_E4M3=has_e4m3(gate_up.device),
        NUM_EXPERTS=num_experts,
        TILE_ROWS=_TILE_ROWS,
        BLOCK=BLOCK,
        num_warps=warps_for(_TILE_ROWS * BLOCK),
        **EXACT,
    )
