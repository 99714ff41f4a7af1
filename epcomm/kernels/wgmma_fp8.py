"""The products of grouped_gemm_fp8.py on Hopper's wgmma, from grouped_gemm_fp8.cu."""

from __future__ import annotations

import ctypes
from ctypes import c_int, c_int64, c_void_p
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from epcomm.errors import ShapeError
from epcomm.kernels.cuda_cpp import CudaKernel, CudaModule, byte_matrix_map, compile_to_cubin

BLOCK = 128
TILE_ROWS = 128
ARCH = "sm_90a"
SOURCE = Path(__file__).with_name("grouped_gemm_fp8.cu")

_THREADS = 384
# Four stages of three tiles of 16 KB with the scales of 128 rows, their barriers, and what the
# start of dynamic shared memory lacks to a multiple of 1024 bytes.
_SHARED_BYTES = 4 * (3 * TILE_ROWS * BLOCK + 4 * TILE_ROWS + 2 * 8) + 1024
# What one thread copies at a time.
_COPY_BYTES = 16
# With more experts the list of their first tiles no longer fits behind the stages.
MAX_EXPERTS = 4096


class _Rows(ctypes.Structure):
    _fields_ = [
        ("codes", c_void_p),
        ("scales", c_void_p),
        ("row_of_slot", c_void_p),
        ("counts", c_void_p),
        ("first_slot", c_void_p),
        ("codes_stride", c_int64),
        ("scales_stride", c_int64),
        ("num_experts", c_int),
        ("k_blocks", c_int),
        ("num_columns", c_int),
    ]


class _GateUp(ctypes.Structure):
    _fields_ = [
        ("matrix_scales", c_void_p),
        ("codes", c_void_p),
        ("scales", c_void_p),
        ("inner_blocks", c_int),
    ]


class _Down(ctypes.Structure):
    _fields_ = [
        ("matrix_scales", c_void_p),
        ("slot_weights", c_void_p),
        ("out", c_void_p),
        ("hidden_blocks", c_int),
    ]


@dataclass(frozen=True, kw_only=True)
class _Kernels:
    """Loaded on one device."""

    gate_up: CudaKernel
    down: dict[torch.dtype, CudaKernel]
    num_processors: int


@cache
def _kernels(device_index: int) -> _Kernels:
    with torch.cuda.device(device_index):
        module = CudaModule(_cubin())
        shared_bytes = _SHARED_BYTES + 4 * (MAX_EXPERTS + 1)

        def kernel(name: str) -> CudaKernel:
            return module.kernel(name, threads=_THREADS, shared_bytes=shared_bytes)

        return _Kernels(
            gate_up=kernel("gate_up_fp8"),
            down={
                torch.bfloat16: kernel("down_fp8_bfloat16"),
                torch.float16: kernel("down_fp8_float16"),
            },
            num_processors=torch.cuda.get_device_properties(device_index).multi_processor_count,
        )


@cache
def _cubin() -> bytes:
    return compile_to_cubin(SOURCE.read_text(encoding="utf-8"), arch=ARCH, name=SOURCE.name)


def gate_up_fp8(
    codes: Tensor,
    scales: Tensor,
    row_of_slot: Tensor | None,
    counts: Tensor,
    first_slot: Tensor,
    *,
    matrices: Tensor,
    matrix_scales: Tensor,
    out_codes: Tensor,
    out_scales: Tensor,
) -> None:
    """As grouped_gemm_fp8.gate_up_fp8(); L at most MAX_EXPERTS, rows at multiples of 16 bytes.

    Raises:
        ShapeError: rows that are not.
        CudaError: the compiler or the driver refuses.
    """
    num_experts, _, hidden_size = matrices.shape
    num_slots, inner_size = out_codes.shape
    rows = _rows(codes, scales, row_of_slot, counts, first_slot, matrices)
    epilogue = _GateUp(
        matrix_scales=matrix_scales.data_ptr(),
        codes=out_codes.data_ptr(),
        scales=out_scales.data_ptr(),
        inner_blocks=inner_size // BLOCK,
    )
    kernels = _kernels(codes.device.index)
    matrix_map = byte_matrix_map(matrices.view(-1, hidden_size), BLOCK, BLOCK)
    with torch.cuda.device(codes.device):
        blocks = _num_blocks(num_slots, num_experts, inner_size // BLOCK, kernels)
        kernels.gate_up.launch(blocks, matrix_map, rows, epilogue)


def down_fp8(
    codes: Tensor,
    scales: Tensor,
    counts: Tensor,
    first_slot: Tensor,
    *,
    matrices: Tensor,
    matrix_scales: Tensor,
    slot_weights: Tensor | None,
    out: Tensor,
) -> None:
    """As grouped_gemm_fp8.down_fp8(); out is bfloat16 or float16, L at most MAX_EXPERTS.

    Raises:
        CudaError: the compiler or the driver refuses.
    """
    num_experts, hidden_size, inner_size = matrices.shape
    rows = _rows(codes, scales, None, counts, first_slot, matrices)
    epilogue = _Down(
        matrix_scales=matrix_scales.data_ptr(),
        slot_weights=None if slot_weights is None else slot_weights.data_ptr(),
        out=out.data_ptr(),
        hidden_blocks=hidden_size // BLOCK,
    )
    kernels = _kernels(codes.device.index)
    rows_map = byte_matrix_map(codes, TILE_ROWS, BLOCK)
    matrix_map = byte_matrix_map(matrices.view(-1, inner_size), BLOCK, BLOCK)
    with torch.cuda.device(codes.device):
        column_tiles = -(-hidden_size // (2 * BLOCK))
        blocks = _num_blocks(codes.shape[0], num_experts, column_tiles, kernels)
        kernels.down[out.dtype].launch(blocks, rows_map, matrix_map, rows, epilogue)


def _rows(
    codes: Tensor,
    scales: Tensor,
    row_of_slot: Tensor | None,
    counts: Tensor,
    first_slot: Tensor,
    matrices: Tensor,
) -> _Rows:
    num_experts, num_columns, k = matrices.shape
    if codes.data_ptr() % _COPY_BYTES or codes.stride(0) % _COPY_BYTES:
        raise ShapeError(
            f"fp8_wgmma: rows begin at {codes.data_ptr():#x} and lie {codes.stride(0)} bytes "
            f"apart, expected multiples of {_COPY_BYTES}; align the rows"
        )
    return _Rows(
        codes=codes.data_ptr(),
        scales=scales.data_ptr(),
        row_of_slot=None if row_of_slot is None else row_of_slot.data_ptr(),
        counts=counts.data_ptr(),
        first_slot=first_slot.data_ptr(),
        codes_stride=codes.stride(0),
        scales_stride=scales.stride(0),
        num_experts=num_experts,
        k_blocks=k // BLOCK,
        num_columns=num_columns,
    )


def _num_blocks(num_slots: int, num_experts: int, column_tiles: int, kernels: _Kernels) -> int:
    """One a processor, and no more than any counts can need."""
    # An expert leaves at most one row of tiles incomplete.
    row_tiles = -(-num_slots // TILE_ROWS) + num_experts
    return min(row_tiles * column_tiles, kernels.num_processors)
