"""Lay scales out in memory: row-major as they are sent, or as a GEMM reads them.

Column-major with 3 rows of 2 scales and an alignment of 4: memory holds
s00 s10 s20 0 | s01 s11 s21 0, and the tensor is its [3, 2] view with strides (1, 4).
Packed: the four bytes of an int32, lowest first, are four neighbouring power-of-two scales of a
row; missing scales are 0. Both together: first packed, then column-major.
"""

from dataclasses import replace

import torch
from torch import Tensor

from epcomm.errors import ShapeError
from epcomm.types import ROW_MAJOR, ScaleLayout, WireTensor, align_up

# int32 holds four scales of one byte.
SCALES_PER_WORD = 4


def arrange_scales(scales: Tensor, layout: ScaleLayout) -> Tensor:
    """Lay row-major scales [..., R, S] out as asked; a new tensor unless `layout` is row-major.

    Raises:
        ShapeError: packing of scales that are not powers of two.
    """
    packed = pack_scales(scales) if layout.packed else scales
    return to_column_major(packed, layout.alignment) if layout.column_major else packed


def row_major(wire: WireTensor) -> WireTensor:
    """Return a wire tensor with adjacent elements and unpacked, row-major scales, as it is sent.

    Lifetime: shares the parts of `wire` that have this layout already.   Host sync: none.
    """
    data, scales, layout = wire.data, wire.scales, wire.scale_layout
    if data.stride(-1) != 1:
        data = data.clone(memory_format=torch.contiguous_format)
    if scales is None:
        return wire if data is wire.data else replace(wire, data=data)
    if layout is None and data is wire.data and scales.stride(-1) == 1:
        return wire
    if scales.stride(-1) != 1:
        scales = from_column_major(scales)
    if layout is not None and layout.packed:
        scales = scales.view(torch.float8_e8m0fnu)[..., : wire.format.num_scales(wire.hidden_size)]
    return replace(wire, data=data, scales=scales, scale_layout=None)


def to_column_major(scales: Tensor, alignment: int) -> Tensor:
    """Copy scales [..., R, S] into a view of [..., S, align_up(R, alignment)], padded with zeros.

    alignment: rows of a column are padded to a multiple of this. The tensor memory access unit of
        a GPU reads columns that begin at multiples of 16 bytes: 4 elements of float32 or int32.
    """
    *batch, num_rows, num_scales = scales.shape
    shape = (*batch, num_scales, align_up(num_rows, alignment))
    columns = torch.zeros(
        (*shape, scales.dtype.itemsize), dtype=torch.uint8, device=scales.device
    ).view(scales.dtype)
    view = columns.squeeze(-1).transpose(-1, -2)[..., :num_rows, :]
    view.copy_(scales)
    return view


def from_column_major(scales: Tensor) -> Tensor:
    """Copy scales [..., R, S] of any strides into new row-major memory."""
    # contiguous() keeps whatever strides a dimension of one element has, so it is not used.
    return scales.clone(memory_format=torch.contiguous_format)


def pack_scales(scales: Tensor) -> Tensor:
    """Pack scales [..., R, S], float8_e8m0fnu, by four into [..., R, ceil(S / 4)], int32.

    Raises:
        ShapeError: scales of another dtype.
    """
    if scales.dtype != torch.float8_e8m0fnu:
        raise ShapeError(
            f"pack_scales: scales are {scales.dtype}, expected torch.float8_e8m0fnu; only powers "
            "of two fit into a byte"
        )
    *rows, num_scales = scales.shape
    shape = (*rows, align_up(num_scales, SCALES_PER_WORD))
    padded = torch.zeros(shape, dtype=torch.uint8, device=scales.device)
    padded[..., :num_scales] = scales.contiguous().view(torch.uint8)
    # All hosts and devices that torch serves store the lowest byte first.
    return padded.view(torch.int32)


def check_scales(wire: WireTensor, expected: ScaleLayout, *, caller: str) -> None:
    """Refuse scales that a reader of the wire format would misread.

    Args:
        wire: the wire tensor to check; its scales may have any layout.
        expected: the layout of scales that the reader wants.
        caller: name of the calling function, which begins the message.

    Host sync: none.
    Raises:
        ShapeError: no scales, or scales of another dtype, layout, shape or order in memory.
    """
    scales, layout = wire.scales, wire.scale_layout or ROW_MAJOR
    rows, num_scales = wire.data.shape[:-1], wire.format.num_scales(wire.hidden_size)
    shape = [*rows, _num_words(num_scales) if expected.packed else num_scales]
    dtype = torch.int32 if expected.packed else wire.format.scale_dtype
    came = "no scales"
    if scales is not None:
        is_alike = (layout, scales.dtype, list(scales.shape)) == (expected, dtype, shape)
        if is_alike and _has_order(scales, expected):
            return
        came = f"{list(scales.shape)} {scales.dtype} with strides {list(scales.stride())}"
    raise ShapeError(
        f"{caller}: scales are {came}, {layout}, expected {shape} {dtype}, "
        f"{expected}; quantise to {wire.format} and lay the scales out with arrange_scales()"
    )


def _has_order(scales: Tensor, layout: ScaleLayout) -> bool:
    """Return whether strides fit the layout; a dimension of one element has no order."""
    if scales.numel() == 0:
        return True
    num_rows, num_scales = scales.shape[-2:]
    row_stride, scale_stride = scales.stride()[-2:]
    if not layout.column_major:
        return (num_scales == 1 or scale_stride == 1) and (
            num_rows == 1 or row_stride >= num_scales
        )
    is_aligned = scale_stride % layout.alignment == 0 and scale_stride >= num_rows
    starts_aligned = scales.storage_offset() % layout.alignment == 0
    return starts_aligned and (num_rows == 1 or row_stride == 1) and (num_scales == 1 or is_aligned)


def _num_words(num_scales: int) -> int:
    return -(-num_scales // SCALES_PER_WORD)
