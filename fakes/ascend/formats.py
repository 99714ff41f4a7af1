"""Imitate npu_format_cast and the fractal layout NZ of weights on the device.

A tensor in NZ keeps its shape and dtype, but its memory is tiled, so code that reads it as
row-major gets wrong values. Operators that support NZ call as_nd(). All bits are inverted, so that
values are also wrong if the tiles happen to be row-major (N = 32 in INT8).

The device converts NZ back for most operators of torch, and a clone there stays NZ; here a clone
has wrong values. Views and parameters that share the whole memory keep the format.
"""

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from fakes.ascend.limits import require
from fakes.ascend.registry import implements
from fakes.ascend.sizes import require_size

_NAME = "npu_format_cast"
# aclFormat: row-major, and fractal.
ACL_FORMAT_ND = 2
ACL_FORMAT_NZ = 29
# Rows of a tile.
TILE_ROWS = 16
# Bytes of a row of a tile: 32 int8 or 16 bfloat16.
_TILE_ROW_BYTES = 32


@dataclass(frozen=True, kw_only=True)
class _Tiled:
    """Memory in NZ, and the shape of its tensor."""

    storage: StorageWeakRef
    shape: torch.Size


# The tiled memory at each storage address. A weak reference detects that an address is reused.
_TILED: dict[int, _Tiled] = {}


def tile_columns(dtype: torch.dtype) -> int:
    """Return the columns of a tile."""
    return _TILE_ROW_BYTES // dtype.itemsize


def nz_pack(matrix: Tensor) -> Tensor:
    """Pack [..., K, N] into tiles [..., ceil(N / n), ceil(K / 16), 16, n], padded with zeros.

    n is 32 for int8 and 16 for 16-bit dtypes.
    """
    rows, columns = matrix.shape[-2:]
    width = tile_columns(matrix.dtype)
    num_down, num_across = -(-rows // TILE_ROWS), -(-columns // width)
    padded = matrix.new_zeros((*matrix.shape[:-2], num_down * TILE_ROWS, num_across * width))
    padded[..., :rows, :columns] = matrix
    tiles = padded.unflatten(-1, (num_across, width)).unflatten(-3, (num_down, TILE_ROWS))
    return tiles.movedim(-2, -4).contiguous()


def nz_unpack(tiles: Tensor, rows: int, columns: int) -> Tensor:
    """Unpack tiles that nz_pack() made into [..., rows, columns]."""
    padded = tiles.movedim(-4, -2).flatten(-2).flatten(-3, -2)
    return padded[..., :rows, :columns].contiguous()


def format_of(tensor: Tensor) -> int:
    """Return ACL_FORMAT_NZ if the memory of `tensor` is tiled, else ACL_FORMAT_ND."""
    return ACL_FORMAT_ND if _tiled(tensor) is None else ACL_FORMAT_NZ


@implements(_NAME)
def format_cast(
    input: Tensor,
    acl_format: int,
    *,
    customize_dtype: int | None = None,
    input_dtype: int | None = None,
) -> Tensor:
    """Return the same values in another layout; new memory unless it has that layout.

    Args:
        input: [..., K, N], at least 2-D for NZ, int8 or 16-bit.
        acl_format: 2 (ND) or 29 (NZ).
        customize_dtype, input_dtype: for formats that only Ascend 950 has; not simulated.

    Source: facts of torch_npu 2.13; tiles as documented for FRACTAL_NZ.
    """
    if customize_dtype is not None or input_dtype is not None:
        raise NotImplementedError("npu_format_cast: customize_dtype and input_dtype")
    known = (ACL_FORMAT_ND, ACL_FORMAT_NZ)
    require(_NAME, acl_format in known, f"acl_format in {known} (the stand-in knows no other)")
    if acl_format == format_of(input):
        return input
    if acl_format == ACL_FORMAT_ND:
        return as_nd(_NAME, input)
    require(_NAME, input.dim() >= 2, "NZ is for matrices")
    require(_NAME, input.dtype.itemsize in (1, 2), "the stand-in has NZ for 8 and 16 bits")
    tiles = _inverted(nz_pack(input))
    cast = tiles.flatten()[: input.numel()].view(input.shape)
    _remember(cast)
    return cast


def as_nd(operator: str, tensor: Tensor) -> Tensor:
    """Return the values that an operator reads: those of `tensor` in row-major order."""
    tiled = _tiled(tensor)
    if tiled is None:
        return tensor
    require_whole(operator, tensor)
    rows, columns = tensor.shape[-2:]
    width = tile_columns(tensor.dtype)
    shape = (*tensor.shape[:-2], -(-columns // width), -(-rows // TILE_ROWS), TILE_ROWS, width)
    memory = torch.empty(0, dtype=tensor.dtype).set_(tensor.untyped_storage())
    return nz_unpack(_inverted(memory.view(shape)), rows, columns)


def require_whole(operator: str, tensor: Tensor) -> None:
    """Refuse a part or another shape of memory in NZ."""
    tiled = _tiled(tensor)
    if tiled is not None:
        is_whole = tensor.shape == tiled.shape and tensor.storage_offset() == 0
        is_whole = is_whole and tensor.is_contiguous()
        require(operator, is_whole, "a tensor in NZ is used whole, not as a view")


def require_aligned(operator: str, tensor: Tensor) -> None:
    """Refuse weights in NZ unless K % 16 == 0 and N % 32 == 0 (int8) or N % 16 == 0 (16-bit)."""
    if format_of(tensor) == ACL_FORMAT_NZ:
        rows, columns = tensor.shape[-2:]
        width = tile_columns(tensor.dtype)
        is_aligned = rows % TILE_ROWS == 0 and columns % width == 0
        rule = f"NZ weights have K % {TILE_ROWS} == 0 and N % {width} == 0"
        require_size(operator, is_aligned, rule)


def _inverted(tensor: Tensor) -> Tensor:
    return tensor.view(torch.uint8).bitwise_not().view(tensor.dtype)


def _tiled(tensor: Tensor) -> _Tiled | None:
    return _TILED.get(tensor.untyped_storage()._cdata)


def _remember(tensor: Tensor) -> None:
    for address in [key for key, tiled in _TILED.items() if tiled.storage.expired()]:
        del _TILED[address]
    storage = tensor.untyped_storage()
    _TILED[storage._cdata] = _Tiled(storage=StorageWeakRef(storage), shape=tensor.shape)
