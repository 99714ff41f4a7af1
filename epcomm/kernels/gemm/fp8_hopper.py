"""Launch the products of fp8.py on Hopper's wgmma instructions, from fp8_hopper.cu."""

import ctypes
from collections.abc import Mapping
from ctypes import c_int, c_int64, c_void_p
from dataclasses import dataclass, fields
from functools import cache, lru_cache
from pathlib import Path
from typing import NamedTuple

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
# Four stages of three tiles of 16 KB with the scales of 128 rows, two scales and two barriers.
_NUM_STAGES = 4
_STAGES_BYTES = _NUM_STAGES * (3 * TILE_ROWS * BLOCK + 4 * TILE_ROWS + 2 * 4 + 2 * 8)
# Rows that a warp of down_fp8() stores at a time. Eight warps keep a block of H of 16 rows each.
_ROWS_PER_WARP = 16
_RESULTS_BYTES = 8 * _ROWS_PER_WARP * 2 * BLOCK
# Bytes of a row that the copy engine stores at a time.
_BOX_BYTES = 128
# Bytes that one thread copies at a time.
_COPY_BYTES = 16
# Number of slots of an expert from which copying rows into the order of slots can be faster: with
# fewer, matrices are read once or twice, and reading them is the limit.
PACKED_SLOTS_PER_EXPERT = 2 * TILE_ROWS
# Bytes of all rows from which it is. Through the index gate and up take 5% longer, but no rows are
# copied. Both products on an H100, copied and through the index: 713 and 665 us with 58 MB of rows,
# 315 and 288 with 67 MB, 2632 and 2729 with 235 MB.
PACKED_BYTES = 128 << 20
# Number of slots an expert from which gate and up compute the first product of a tile while results
# of the tile before are stored. On an H100 that takes 3% less time with 1024, but 20% more where
# each block computes one tile, which can be so with 512, because C counts padding too.
AHEAD_SLOTS_PER_EXPERT = 8 * TILE_ROWS
# The same for down: 5% less time from 256 on.
DOWN_AHEAD_SLOTS_PER_EXPERT = 2 * TILE_ROWS
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
        ("packed_from", c_int),
        ("ahead", c_void_p),
    ]


class _GateUp(ctypes.Structure):
    _fields_ = [
        ("matrix_scales", c_void_p),
        ("codes", c_void_p),
        ("scales", c_void_p),
        ("inner_blocks", c_int),
    ]


class _Packed(ctypes.Structure):
    _fields_ = [("codes", c_void_p), ("num_slots", c_int64)]


class _Down(ctypes.Structure):
    _fields_ = [
        ("matrix_scales", c_void_p),
        ("slot_weights", c_void_p),
        ("out", c_void_p),
        ("hidden_blocks", c_int),
    ]


class _Form(NamedTuple):
    """All that a kernel assumes of a tensor, except for its address."""

    dtype: torch.dtype
    device: torch.device
    shape: tuple[int, ...]
    strides: tuple[int, ...]


_PRODUCT = tuple(field.name for field in fields(Product))[:-1]
# The operands of each kernel, in the order of _forms_of().
_OPERANDS = {
    "gate_up": (*_PRODUCT, "out_codes", "out_scales"),
    "down": (*_PRODUCT, "slot_weights", "out"),
}


def _forms_of(given: Product, *others: Tensor | None) -> tuple[tuple | None, ...]:
    """Return the fields of a _Form of each operand, as tuples, which take less host time."""
    *operands, _ = vars(given).values()
    operands += others
    return tuple(
        [None if t is None else (t.dtype, t.device, t.shape, t.stride()) for t in operands]
    )


# Cached by forms, which are the same in every call of decoding, because checks take 20 us of host
# time.
@lru_cache(maxsize=1024)
def _check_operands(kernel: str, forms: tuple[tuple | None, ...], num_slots: int) -> None:
    """Refuse tensors that a kernel would misread, because a kernel gets addresses alone."""
    found = {
        name: _Form(*form)
        for name, form in zip(_OPERANDS[kernel], forms, strict=True)
        if form is not None
    }
    # Rows that gate_up_fp8() reads through the index may be apart, as in a message.
    spaced = ("codes", "scales") if kernel == "gate_up" else ()
    codes = found["codes"]
    num_experts, num_columns, k = found["matrices"].shape
    num_rows = codes.shape[0] if "row_of_slot" in found else num_slots
    num_blocks, inner_size = num_columns // BLOCK, num_columns // 2
    wanted: Mapping[str, tuple[tuple[torch.dtype, ...], tuple[int, ...]]] = {
        "codes": (_CODES, (num_rows, k)),
        "scales": (_FLOAT32, (num_rows, k // BLOCK)),
        "row_of_slot": (_INT32, (num_slots,)),
        "counts": (_INT32, (num_experts,)),
        "first_slot": (_INT32, (num_experts + 1,)),
        "matrices": (_CODES, (num_experts, num_columns, k)),
        "matrix_scales": (_FLOAT32, (num_experts, num_blocks, k // BLOCK)),
        # The operands of gate_up_fp8().
        "out_codes": (_CODES, (num_slots, inner_size)),
        "out_scales": (_FLOAT32, (num_slots, inner_size // BLOCK)),
        # The operands of down_fp8().
        "slot_weights": (_FLOAT32, (num_slots,)),
        "out": (HIDDEN_DTYPES, (num_slots, num_columns)),
    }
    if codes.device.type != "cuda":
        raise ShapeError(f"fp8_wgmma: codes are on {codes.device}, expected cuda; move them")
    for name, form in found.items():
        dtypes, shape = wanted[name]
        if form.device != codes.device or form.dtype not in dtypes:
            raise ShapeError(
                f"fp8_wgmma: {name} is {form.dtype} on {form.device}, expected "
                f"{' or '.join(map(str, dtypes))} on {codes.device} as codes; convert it with .to()"
            )
        if tuple(form.shape) != shape or not _is_in_order(form, name in spaced):
            order = "adjacent columns" if name in spaced else "contiguous"
            raise ShapeError(
                f"fp8_wgmma: {name} is {list(form.shape)} with strides {list(form.strides)}, "
                f"expected {list(shape)}, {order}; pass what belongs together, .contiguous()"
            )


def _is_in_order(form: _Form, is_spaced: bool) -> bool:
    if is_spaced:
        return form.shape[1] <= 1 or form.strides[1] == 1
    empty = torch.empty_strided(form.shape, form.strides, dtype=form.dtype, device="meta")
    return empty.is_contiguous()


@dataclass(frozen=True, kw_only=True)
class _Kernels:
    """The kernels, loaded on one device."""

    pack: CudaKernel
    # By whether products start ahead.
    gate_up: dict[bool, CudaKernel]
    down: dict[tuple[torch.dtype, bool], CudaKernel]
    num_sms: int


@cache
def _kernels(device_index: int) -> _Kernels:
    with torch.cuda.device(device_index):
        module = CudaModule(_cubin())

        def kernel(name: str, results_bytes: int = 0) -> CudaKernel:
            shared_bytes = _STAGES_BYTES + results_bytes
            return module.kernel(name, threads=_THREADS, shared_bytes=shared_bytes)

        return _Kernels(
            pack=module.kernel("pack_rows", threads=_PACK_THREADS, shared_bytes=0),
            gate_up={False: kernel("gate_up_fp8"), True: kernel("gate_up_fp8_ahead")},
            down={
                (dtype, is_ahead): kernel(f"down_fp8_{name}{suffix}", _RESULTS_BYTES)
                for dtype, name in ((torch.bfloat16, "bfloat16"), (torch.float16, "float16"))
                for is_ahead, suffix in ((False, ""), (True, "_ahead"))
            },
            num_sms=num_sms_of(device_index),
        )


@cache
def _cubin() -> bytes:
    return compile_to_cubin(SOURCE.read_text(encoding="utf-8"), arch=ARCH, name=SOURCE.name)


@dataclass(frozen=True, kw_only=True, eq=False)
class Begun:
    """What lets the second product begin before the first one has ended."""

    ahead: Tensor | None = None  # counts blocks that have stored all but their last results, [1]
    codes: Tensor | None = None  # packed rows, whose memory results must not reuse


def gate_up_fp8(given: Product, *, out_codes: Tensor, out_scales: Tensor) -> Begun:
    """Multiply rows by the gate and up matrices, then activate and quantise the products.

    From PACKED_BYTES on, rows of experts with PACKED_SLOTS_PER_EXPERT slots or more are copied into
    the order of slots first, if C has so many for each expert; this allocates [C, H] bytes, and may
    take more than num_sms SMs. Host sync: none.

    Returns: the argument `after` of down_fp8(), which keeps these bytes until it is dropped.

    Raises:
        ShapeError: rows that do not begin at multiples of 16 bytes, or a tensor of another shape,
            dtype, device or order.
        CudaError: the compiler or the driver refuses.
    """
    num_slots, inner_size = out_codes.shape
    _check_operands("gate_up", _forms_of(given, out_codes, out_scales), num_slots)
    codes, matrices = given.codes, given.matrices
    num_experts, num_columns, hidden_size = matrices.shape
    if num_slots == 0:
        return Begun()
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
        num_tiles = given.num_tiles(num_slots, TILE_ROWS, BLOCK, inner_size)
        # Each block computes one tile after another.
        blocks = min(num_tiles, given.num_sms or num_tiles, kernels.num_sms)
        packed = _packed_codes(codes, given.row_of_slot, num_slots, rows, kernels)
        rows_map = matrix_map
        if packed is not None:
            rows_map = byte_matrix_map(
                packed.data_ptr(), num_slots, hidden_size, TILE_ROWS, BLOCK, packed.stride(0)
            )
        has_many = num_slots >= AHEAD_SLOTS_PER_EXPERT * num_experts
        ahead = None
        # The kernels find early tiles among 32 experts, and count with blocks on all SMs.
        can_begin = num_experts <= 32 and rows.k_blocks > _NUM_STAGES and given.num_sms is None
        if has_many and can_begin and blocks == kernels.num_sms:
            ahead = given.counts.new_zeros(1)
            rows.ahead = ahead.data_ptr()
        # Rows through the index gain nothing by it.
        kernel = kernels.gate_up[has_many and packed is not None]
        kernel.launch(blocks, rows_map, matrix_map, rows, epilogue)
    return Begun(ahead=ahead, codes=packed)


def _packed_codes(
    codes: Tensor, row_of_slot: Tensor | None, num_slots: int, rows: _Rows, kernels: _Kernels
) -> Tensor | None:
    """Return codes in the order of slots, [C, H], or None, and set rows.packed_from.

    Rows of padding and of experts with fewer slots are undefined.
    """
    hidden_size = codes.shape[1]
    # The copy engine does not accept rows that overlap.
    if row_of_slot is None and codes.stride(0) >= hidden_size:
        rows.packed_from = 0
        return codes
    is_few = num_slots < PACKED_SLOTS_PER_EXPERT * rows.num_experts
    if row_of_slot is None or is_few or num_slots * hidden_size < PACKED_BYTES:
        rows.packed_from = num_slots + 1
        return None
    rows.packed_from = PACKED_SLOTS_PER_EXPERT
    packed = codes.new_empty(num_slots, hidden_size)
    target = _Packed(codes=packed.data_ptr(), num_slots=num_slots)
    slots_per_block = _PACK_THREADS // 32
    kernels.pack.launch(-(-num_slots // slots_per_block), rows, target)
    return packed


def down_fp8(
    given: Product, *, slot_weights: Tensor | None, out: Tensor, after: Begun | None = None
) -> None:
    """Compute what its namesake in fp8.py does, for results in bfloat16 or float16.

    after: the product that makes codes and scales, if nothing was enqueued since: the kernel may
        begin before that one has ended. All other operands must be older than that kernel. Ignored
        with num_sms, because the kernel would wait on the SMs that these leave free.

    Raises:
        ShapeError: a tensor of another shape, dtype, device or order.
        CudaError: the compiler or the driver refuses.
    """
    codes, matrices = given.codes, given.matrices
    num_experts, hidden_size, inner_size = matrices.shape
    num_slots = codes.shape[0]
    _check_operands("down", _forms_of(given, slot_weights, out), num_slots)
    # The copy engine does not accept a matrix of zero rows.
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
    # Of results the copy engine stores the bytes.
    out_map = byte_matrix_map(
        out.data_ptr(), num_slots, 2 * hidden_size, _ROWS_PER_WARP, _BOX_BYTES
    )
    with on_device(codes.device):
        num_tiles = given.num_tiles(num_slots, TILE_ROWS, 2 * BLOCK, hidden_size)
        blocks = min(num_tiles, given.num_sms or num_tiles, kernels.num_sms)
        is_early = after is not None and given.num_sms is None
        if after and after.ahead is not None and is_early and blocks == kernels.num_sms:
            rows.ahead = after.ahead.data_ptr()
        arguments = (rows_map, matrix_map, out_map, rows, epilogue)
        is_ahead = num_slots >= DOWN_AHEAD_SLOTS_PER_EXPERT * num_experts
        kernels.down[out.dtype, is_ahead].launch(blocks, *arguments, is_early=is_early)


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
