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

# Columns of a tile: one half gate, one half up.
TILE = 128
_HALF = TILE // 2


def permutation(num_columns: int) -> Tensor:
    """Return the column in the checkpoint of each interleaved column, [2I], int64, on the CPU.

    num_columns: 2I, a multiple of 128, as the limits of the operator require.
    """
    position = torch.arange(num_columns, device="cpu")
    tile, inside = position // TILE, position % TILE
    is_up, column = inside // _HALF, inside % _HALF
    return is_up * (num_columns // 2) + _HALF * tile + column


def interleave(tensor: Tensor, dim: int) -> Tensor:
    """Return the 2I columns along `dim` in the order of the kernel, contiguous, in new memory."""
    return tensor.index_select(dim, permutation(tensor.shape[dim]).to(tensor.device))
