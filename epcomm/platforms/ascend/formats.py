"""FRACTAL_NZ, the tiled layout from which an NPU's matrix units read weights fastest.

A cast changes how memory is filled, not shape, dtype or strides of the tensor. Tiles hold 16 rows
of 32 bytes. Where the operator has no kernel, on a plain CPU, matrices stay row-major.
Source: torch_npu's npu_format_cast; not run on an NPU.
"""

from __future__ import annotations

import torch
from torch import Tensor

from epcomm.errors import ConfigError
from epcomm.platforms.ascend.operators import has_kernel

# aclFormat: row-major, and fractal.
ACL_FORMAT_ND = 2
ACL_FORMAT_NZ = 29
# Rows of a tile.
TILE_ROWS = 16
# Bits of a row of a tile: 32 bytes.
_TILE_ROW_BITS = 256

_CAST = "npu_format_cast"
_FORMAT = "get_npu_format"


def is_nz_aligned(num_rows: int, num_columns: int, element_bits: int) -> bool:
    """Return whether matrices [num_rows, num_columns] are whole tiles, as GEMMs ask of NZ weights.

    Args:
        num_rows, num_columns: K and N of the product.
        element_bits: 16, 8, or 4; of packed codes, num_columns counts codes.
    """
    return num_rows % TILE_ROWS == 0 and num_columns % (_TILE_ROW_BITS // element_bits) == 0


def alignment_reasons(name: str, matrices: Tensor) -> list[str]:
    """List why matrices [..., K, N] are not whole tiles; empty if they are."""
    rows, columns = matrices.shape[-2:]
    width = _TILE_ROW_BITS // (8 * matrices.element_size())
    reasons = []
    if rows % TILE_ROWS:
        reasons.append(f"{name} has K = {rows}, expected a multiple of {TILE_ROWS} in NZ")
    if columns % width:
        reasons.append(
            f"{name} has N = {columns}, expected a multiple of {width} for {matrices.dtype} in NZ"
        )
    return reasons


def to_nz(matrices: Tensor) -> Tensor:
    """Cast matrices [..., K, N], of any strides, to NZ: new memory, without gradients.

    `matrices` itself where unaligned or where nothing casts.

    Local.   Host sync: none.   Needs capacity for two copies while it runs, one of which stays.
    Raises:
        ConfigError: the device made a row-major copy, as it does unless
            `torch.npu.config.allow_internal_format = True` was set.
    """
    *_, num_rows, num_columns = matrices.shape
    is_aligned = is_nz_aligned(num_rows, num_columns, 8 * matrices.dtype.itemsize)
    if not is_aligned or not has_kernel(_CAST, matrices.device):
        return matrices
    cast = torch.ops.npu.npu_format_cast(matrices.detach().contiguous(), ACL_FORMAT_NZ)
    _check_format(cast)
    return cast


def nz_reasons(device: torch.device) -> list[str]:
    """List why to_nz() would refuse weights on this device; empty if it would not."""
    try:
        to_nz(torch.zeros(TILE_ROWS, _TILE_ROW_BITS // 8, dtype=torch.int8, device=device))
    except ConfigError as error:
        return [str(error)]
    return []


def _check_format(cast: Tensor) -> None:
    # The setting can be written and not read, and the device only warns: the result tells.
    if not has_kernel(_FORMAT, cast.device):
        return
    found = torch.ops.npu.get_npu_format(cast)
    if found != ACL_FORMAT_NZ:
        raise ConfigError(
            f"to_nz: weights on {cast.device} have format {found}, expected {ACL_FORMAT_NZ} (NZ); "
            "set torch.npu.config.allow_internal_format = True before weights are packed"
        )
