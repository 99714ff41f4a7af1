"""Interleave gate and up columns in blocks of 64, for the first product of FusedDeepMoE on A3.

A tile of 128 columns has 64 gate columns and the 64 corresponding up columns, so that one core can
apply SwiGLU to its own tile. With I = 192, in blocks of 64 columns:

    checkpoint   g0 g1 g2 u0 u1 u2
    interleaved  g0 u0 g1 u1 g2 u2

With 2I = 128 this changes nothing, and with 2I = 256 it is its own inverse; tests use 384 or more.
Source: sgl-kernel-npu, fused_deep_moe; the tile is GMM1_L1N of its kernel.
"""

from __future__ import annotations

import torch
from torch import Tensor

from epcomm.errors import ConfigError

# Columns of a tile: one half gate, one half up.
TILE = 128
_HALF = TILE // 2


def permutation(num_columns: int) -> Tensor:
    """Return the column in the checkpoint of each interleaved column, [2I], int64, on the CPU.

    Raises:
        ConfigError: 2I is not a multiple of 128.
    """
    if num_columns < TILE or num_columns % TILE:
        raise ConfigError(
            f"permutation: gate and up have {num_columns} columns, expected a multiple of {TILE}; "
            "take experts whose intermediate_size is a multiple of 64, or dispatch_ffn_combine"
        )
    position = torch.arange(num_columns, device="cpu")
    tile, inside = position // TILE, position % TILE
    is_up, column = inside // _HALF, inside % _HALF
    return is_up * (num_columns // 2) + _HALF * tile + column


def interleave(tensor: Tensor, dim: int) -> Tensor:
    """Return the 2I columns along `dim` in the order of the kernel, contiguous, in new memory.

    Raises:
        ConfigError: as permutation().
    """
    return tensor.index_select(dim, permutation(tensor.shape[dim]).to(tensor.device))
