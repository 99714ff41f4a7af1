"""FRACTAL_NZ, the tiled layout that the matrix units of an NPU read fastest.

A cast changes the order of elements in memory, but not shape, dtype or strides of the tensor. A
tile has 16 rows of 32 bytes. If the operator has no kernel, as on a CPU, matrices stay row-major.
Source: torch_npu's npu_format_cast; not run on an NPU.
"""

import torch
from torch import Tensor

from epcomm.errors import ConfigError
from epcomm.platforms.ascend.operators import has_kernel

# The value of aclFormat that means fractal.
ACL_FORMAT_NZ = 29
TILE_ROWS = 16
_TILE_ROW_BYTES = 32

_CAST = "npu_format_cast"
_FORMAT = "get_npu_format"


def alignment_reasons(name: str, matrices: Tensor) -> list[str]:
    """List why matrices [..., K, N] do not have whole tiles, which GEMMs require."""
    rows, columns = matrices.shape[-2:]
    width = _TILE_ROW_BYTES // matrices.element_size()
    reasons = []
    if rows % TILE_ROWS:
        reasons.append(f"{name} has K = {rows}, expected a multiple of {TILE_ROWS} in NZ")
    if columns % width:
        reasons.append(
            f"{name} has N = {columns}, expected a multiple of {width} for {matrices.dtype} in NZ"
        )
    return reasons


def to_nz(matrices: Tensor) -> Tensor:
    """Return matrices [..., K, N], of any strides, in NZ: new memory, without gradients.

    Returns `matrices` if they are unaligned or the operator has no kernel.

    Local.   Host sync: none.   Needs memory for two copies while it runs, one of which remains.
    """
    if alignment_reasons(_CAST, matrices) or not has_kernel(_CAST, matrices.device):
        return matrices
    cast = torch.ops.npu.npu_format_cast(matrices.detach().contiguous(), ACL_FORMAT_NZ)
    # The setting cannot be read and the device only warns, so the result is checked.
    is_known = has_kernel(_FORMAT, cast.device)
    found = torch.ops.npu.get_npu_format(cast) if is_known else ACL_FORMAT_NZ
    if found != ACL_FORMAT_NZ:
        raise ConfigError(
            f"to_nz: weights on {cast.device} have format {found}, expected {ACL_FORMAT_NZ} (NZ); "
            "set torch.npu.config.allow_internal_format = True before weights are packed"
        )
    return cast


def nz_reasons(device: torch.device) -> list[str]:
    """List why to_nz() would raise on this device; empty if it would not."""
    try:
        to_nz(torch.zeros(TILE_ROWS, _TILE_ROW_BYTES, dtype=torch.int8, device=device))
    except ConfigError as error:
        return [str(error)]
    return []
