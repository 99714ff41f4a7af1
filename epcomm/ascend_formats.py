"""FRACTAL_NZ, the tiled memory in which Ascend's matrix units read weights fastest.

A tensor in NZ shows the shape and dtype that it had. Tiles hold 16 rows of 32 bytes.
Source: torch_npu's npu_format_cast; not run on an NPU.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from epcomm.errors import ConfigError

# aclFormat.
ACL_FORMAT_NZ = 29
_TILE_ROWS = 16
_TILE_ROW_BYTES = 32


def nz_reasons(name: str, matrices: Tensor) -> list[str]:
    """Why [..., K, N] does not fill whole tiles, which grouped products want; empty if it does."""
    rows, columns = matrices.shape[-2:]
    width = _TILE_ROW_BYTES // matrices.element_size()
    reasons = []
    if rows % _TILE_ROWS:
        reasons.append(f"{name} has K = {rows}, expected a multiple of {_TILE_ROWS} in NZ")
    if columns % width:
        reasons.append(
            f"{name} has N = {columns}, expected a multiple of {width} for {matrices.dtype} in NZ"
        )
    return reasons


def to_nz(matrices: Tensor) -> Tensor:
    """A copy of [..., K, N], of any strides, in NZ; the input stays as it is.

    Local.   Host sync: none.   Needs room for two copies while it runs, one of which stays.
    Raises:
        ConfigError: torch_npu was not allowed to make such tensors.
    """
    if matrices.device.type == "npu":
        require_internal_formats(torch.get_device_module("npu"))
    return torch.ops.npu.npu_format_cast(matrices.detach().contiguous(), ACL_FORMAT_NZ)


def require_internal_formats(npu: Any) -> None:  # noqa: ANN401 (the module torch.npu)
    """Without the permission a cast gives back row-major memory, and says so in a warning at most.

    Raises:
        ConfigError: there is no permission.
    """
    allowed = npu.config.allow_internal_format
    if not allowed:
        raise ConfigError(
            f"to_nz: torch.npu.config.allow_internal_format is {allowed}, expected True; set it "
            "before the first run, or use runner='ascend'"
        )
