"""Launch the products of fp8.py on Hopper's wgmma instructions, from fp8_hopper.cu."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from ctypes import c_int, c_int64, c_void_p
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path

import torch
from torch import Tensor

from epcomm.errors import ShapeError
from epcomm.kernels.cuda_jit import CudaKernel, CudaModule, byte_matrix_map, compile_to_cubin
from epcomm.kernels.gemm.operands import Product
from epcomm.platforms.cuda import num_sms_of, on_device

BLOCK = 128
TILE_ROWS = 128
ARCH = "sm_90a"
SOURCE = Path(__file__).with_name("fp8_hopper.cu")

_THREADS = 384
# Threads of a block of pack_rows; each warp copies a slot.
_PACK_THREADS = 256
# Four stages of three tiles of 16 KB with the scales of 128 rows and two barriers, and up to 1024
# bytes that align the start of dynamic shared memory.
_SHARED_BYTES = 4 * (3 * TILE_ROWS * BLOCK + 4 * TILE_ROWS + 2 * 8) + 1024
# Bytes that one thread copies at a time.
_COPY_BYTES = 16
# With more experts, the list of their first tiles does not fit into shared memory after the stages.
MAX_EXPERTS = 4096
# Number of slots an expert from which copying rows into the order of slots is faster. On an H200
# with 1024 slots an expert, gate and up took 1899 us through the index and 1622 us from copied
# rows, plus 132 us for the copy; with 32, reading the matrices is the limit, and both took 240 us.
# The value is an estimate: with two tiles of rows to a matrix, tensor cores are the limit.
PACKED_SLOTS_PER_EXPERT = 2 * TILE_ROWS
# The dtypes of results that down_fp8() writes.
HIDDEN_DTYPES = (torch.bfloat16, torch.float16)

_CODES, _FLOAT32, _INT32 = (torch.float8_e4m3fn,), (torch.float32,), (torch.int32,)


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


class _Packed(ctypes.Structure):
    _fields_ = [
        ("codes", c_void_p),
        ("num_slots", c_int64),
    ]


class _Down(ctypes.Structure):
    _fields_ = [
        ("matrix_scales", c_void_p),
        ("slot_weights", c_void_p),
        ("out", c_void_p),
        ("hidden_blocks", c_int),
    ]


# All that a kernel assumes of a tensor, except for its address; None for an optional one.
_Form = tuple[torch.dtype, torch.device, tuple[int, ...], tuple[int, ...]] | None


def _form(tensor: Tensor | None) -> _Form:
    if tensor is None:
        return None
    return tensor.dtype, tensor.device, tensor.shape, tensor.stride()


# The forms of the tensors of a Product, in the order of its fields.
_Forms = tuple[_Form, ...]


def _forms(given: Product) -> _Forms:
    return (
        _form(given.codes),
        _form(given.scales),
        _form(given.row_of_slot),
        _form(given.counts),
        _form(given.first_slot),
        _form(given.matrices),
        _form(given.matrix_scales),
    )


@dataclass(frozen=True)
class _Operand:
    """The form of a tensor that a kernel gets as a pointer, and what the kernel assumes.

    shape: None for any size.
    is_spaced: the row stride may exceed the row; other tensors are contiguous.
    """

    form: _Form
    dtypes: tuple[torch.dtype, ...]
    shape: tuple[int | None, ...]
    is_spaced: bool = False


def _check_operands(
    given: _Forms, num_slots: int, outputs: Mapping[str, _Operand], *, is_spaced: bool
) -> None:
    """Refuse tensors that a kernel would misread, because a kernel gets addresses alone.

    outputs: the operands that are not in the product.   is_spaced: for its rows and their scales.
    """
    codes, scales, row_of_slot, counts, first_slot, matrices, matrix_scales = given
    assert codes is not None, "rows have codes"
    assert matrices is not None, "experts have matrices"
    num_experts, num_columns, k = matrices[2]
    num_rows = num_slots if row_of_slot is None else None
    operands = {
        "codes": _Operand(codes, _CODES, (num_rows, k), is_spaced),
        "scales": _Operand(scales, _FLOAT32, (num_rows, k // BLOCK), is_spaced),
        "row_of_slot": _Operand(row_of_slot, _INT32, (num_slots,)),
        "counts": _Operand(counts, _INT32, (num_experts,)),
        "first_slot": _Operand(first_slot, _INT32, (num_experts + 1,)),
        "matrices": _Operand(matrices, _CODES, (num_experts, num_columns, k)),
        "matrix_scales": _Operand(
            matrix_scales, _FLOAT32, (num_experts, num_columns // BLOCK, k // BLOCK)
        ),
        **outputs,
    }
    device = codes[1]
    if device.type != "cuda":
        raise ShapeError(f"fp8_wgmma: codes are on {device}, expected cuda; move them")
    for name, wanted in operands.items():
        if wanted.form is None:
            continue
        dtype, found, shape, strides = wanted.form
        if found != device or dtype not in wanted.dtypes:
            dtypes = " or ".join(map(str, wanted.dtypes))
            raise ShapeError(
                f"fp8_wgmma: {name} is {dtype} on {found}, expected {dtypes} on "
                f"{device} as codes; convert it with .to()"
            )
        is_in_order = _is_in_order(shape, strides, wanted.is_spaced)
        if not (_has_shape(shape, wanted.shape) and is_in_order):
            order = "adjacent columns" if wanted.is_spaced else "contiguous"
            sizes = ", ".join("any" if size is None else str(size) for size in wanted.shape)
            raise ShapeError(
                f"fp8_wgmma: {name} is {list(shape)} with strides {list(strides)}, "
                f"expected [{sizes}], {order}; pass what belongs together, .contiguous()"
            )


def _has_shape(shape: tuple[int, ...], wanted: tuple[int | None, ...]) -> bool:
    if len(shape) != len(wanted):
        return False
    return all(size in (None, found) for found, size in zip(shape, wanted, strict=True))


def _is_in_order(shape: tuple[int, ...], strides: tuple[int, ...], is_spaced: bool) -> bool:
    if is_spaced:
        return shape[1] <= 1 or strides[1] == 1
    expected = 1
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size != 1 and stride != expected and 0 not in shape:
            return False
        expected *= size
    return True


@dataclass(frozen=True, kw_only=True)
class _Kernels:
    """The kernels, loaded on one device."""

    pack: CudaKernel
    gate_up: CudaKernel
    gate_up_packed: CudaKernel
    down: dict[torch.dtype, CudaKernel]
    num_sms: int


@cache
def _kernels(device_index: int) -> _Kernels:
    with torch.cuda.device(device_index):
        module = CudaModule(_cubin())
        shared_bytes = _SHARED_BYTES + 4 * (MAX_EXPERTS + 1)

        def kernel(name: str) -> CudaKernel:
            return module.kernel(name, threads=_THREADS, shared_bytes=shared_bytes)

        return _Kernels(
            pack=module.kernel("pack_rows", threads=_PACK_THREADS, shared_bytes=0),
            gate_up=kernel("gate_up_fp8"),
            gate_up_packed=kernel("gate_up_fp8_packed"),
            down={
                torch.bfloat16: kernel("down_fp8_bfloat16"),
                torch.float16: kernel("down_fp8_float16"),
            },
            num_sms=num_sms_of(device_index),
        )


@cache
def _cubin() -> bytes:
    return compile_to_cubin(SOURCE.read_text(encoding="utf-8"), arch=ARCH, name=SOURCE.name)


def gate_up_fp8(given: Product, *, out_codes: Tensor, out_scales: Tensor) -> None:
    """Compute what its namesake in fp8.py does, for at most MAX_EXPERTS experts.

    From PACKED_SLOTS_PER_EXPERT slots an expert on, rows are copied into the order of slots first,
    which allocates [C, H] bytes until the call ends; C counts padding too. Host sync: none.

    Raises:
        ShapeError: rows that do not begin at multiples of 16 bytes, or a tensor of another shape,
            dtype, device or order.
        CudaError: the compiler or the driver refuses.
    """
    _check_gate_up(_forms(given), _form(out_codes), _form(out_scales))
    codes, matrices = given.codes, given.matrices
    num_experts, num_columns, hidden_size = matrices.shape
    num_slots, inner_size = out_codes.shape
    if num_slots == 0:
        return
    rows = _rows(given)
    epilogue = _GateUp(
        matrix_scales=given.matrix_scales.data_ptr(),
        codes=out_codes.data_ptr(),
        scales=out_scales.data_ptr(),
        inner_blocks=inner_size // BLOCK,
    )
    kernels = _kernels(codes.device.index)
    matrix_map = byte_matrix_map(
        matrices.data_ptr(), num_experts * num_columns, hidden_size, BLOCK, BLOCK
    )
    with on_device(codes.device):
        blocks = _num_blocks(num_slots, num_experts, inner_size // BLOCK, kernels)
        packed = _packed_codes(codes, given.row_of_slot, num_slots, rows, kernels)
        if packed is None:
            kernels.gate_up.launch(blocks, matrix_map, rows, epilogue)
            return
        rows_map = byte_matrix_map(
            packed.data_ptr(), num_slots, hidden_size, TILE_ROWS, BLOCK, packed.stride(0)
        )
        kernels.gate_up_packed.launch(blocks, rows_map, matrix_map, rows, epilogue)


def _packed_codes(
    codes: Tensor, row_of_slot: Tensor | None, num_slots: int, rows: _Rows, kernels: _Kernels
) -> Tensor | None:
    """Return codes in the order of slots, [C, H], or None: read them through the index.

    Rows of padding are undefined.
    """
    hidden_size = codes.shape[1]
    if row_of_slot is None:
        # The copy engine takes no rows that overlap.
        return codes if codes.stride(0) >= hidden_size else None
    if num_slots < PACKED_SLOTS_PER_EXPERT * rows.num_experts:
        return None
    packed = codes.new_empty(num_slots, hidden_size)
    target = _Packed(codes=packed.data_ptr(), num_slots=num_slots)
    slots_per_block = _PACK_THREADS // 32
    kernels.pack.launch(-(-num_slots // slots_per_block), rows, target)
    return packed


# Cached by forms, which are the same in every call of decoding, because checks take 20 us of host
# time.
@lru_cache(maxsize=1024)
def _check_gate_up(given: _Forms, out_codes: _Form, out_scales: _Form) -> None:
    matrices = given[5]
    assert matrices is not None, "experts have matrices"
    assert out_codes is not None, "there is memory for results"
    num_slots, inner_size = out_codes[2][0], matrices[2][1] // 2
    outputs = {
        "out_codes": _Operand(out_codes, _CODES, (num_slots, inner_size)),
        "out_scales": _Operand(out_scales, _FLOAT32, (num_slots, inner_size // BLOCK)),
    }
    _check_operands(given, num_slots, outputs, is_spaced=True)


def down_fp8(given: Product, *, slot_weights: Tensor | None, out: Tensor) -> None:
    """Compute what its namesake in fp8.py does, for bfloat16 or float16 and at most MAX_EXPERTS.

    Raises:
        ShapeError: a tensor of another shape, dtype, device or order.
        CudaError: the compiler or the driver refuses.
    """
    _check_down(_forms(given), _form(slot_weights), _form(out))
    codes, matrices = given.codes, given.matrices
    num_experts, hidden_size, inner_size = matrices.shape
    num_slots = codes.shape[0]
    # The copy engine refuses a matrix of zero rows.
    if num_slots == 0:
        return
    rows = _rows(given)
    epilogue = _Down(
        matrix_scales=given.matrix_scales.data_ptr(),
        slot_weights=None if slot_weights is None else slot_weights.data_ptr(),
        out=out.data_ptr(),
        hidden_blocks=hidden_size // BLOCK,
    )
    kernels = _kernels(codes.device.index)
    rows_map = byte_matrix_map(codes.data_ptr(), num_slots, inner_size, TILE_ROWS, BLOCK)
    matrix_map = byte_matrix_map(
        matrices.data_ptr(), num_experts * hidden_size, inner_size, BLOCK, BLOCK
    )
    with on_device(codes.device):
        column_tiles = -(-hidden_size // (2 * BLOCK))
        blocks = _num_blocks(num_slots, num_experts, column_tiles, kernels)
        kernels.down[out.dtype].launch(blocks, rows_map, matrix_map, rows, epilogue)


@lru_cache(maxsize=1024)
def _check_down(given: _Forms, slot_weights: _Form, out: _Form) -> None:
    codes, matrices = given[0], given[5]
    assert codes is not None, "rows have codes"
    assert matrices is not None, "experts have matrices"
    num_slots, hidden_size = codes[2][0], matrices[2][1]
    outputs = {
        "slot_weights": _Operand(slot_weights, _FLOAT32, (num_slots,)),
        "out": _Operand(out, HIDDEN_DTYPES, (num_slots, hidden_size)),
    }
    _check_operands(given, num_slots, outputs, is_spaced=False)


def _rows(given: Product) -> _Rows:
    codes, scales, row_of_slot = given.codes, given.scales, given.row_of_slot
    num_experts, num_columns, k = given.matrices.shape
    if codes.data_ptr() % _COPY_BYTES or codes.stride(0) % _COPY_BYTES:
        raise ShapeError(
            f"fp8_wgmma: rows begin at {codes.data_ptr():#x} and are {codes.stride(0)} bytes "
            f"apart, expected multiples of {_COPY_BYTES}; align the rows"
        )
    return _Rows(
        codes=codes.data_ptr(),
        scales=scales.data_ptr(),
        row_of_slot=None if row_of_slot is None else row_of_slot.data_ptr(),
        counts=given.counts.data_ptr(),
        first_slot=given.first_slot.data_ptr(),
        codes_stride=codes.stride(0),
        scales_stride=scales.stride(0),
        num_experts=num_experts,
        k_blocks=k // BLOCK,
        num_columns=num_columns,
    )


def _num_blocks(num_slots: int, num_experts: int, column_tiles: int, kernels: _Kernels) -> int:
    """Return one block for each SM, but no more blocks than any counts can need."""
    # Each expert has at most one incomplete row of tiles.
    row_tiles = -(-num_slots // TILE_ROWS) + num_experts
    return min(row_tiles * column_tiles, kernels.num_sms)
