"""Pack W8A8 experts for the fused operators of A3, into one record for each mode.

The records have different types, so that weights cannot be packed twice, or passed to the operator
of another mode.
Source: sgl-kernel-npu, fused_deep_moe; the tile of mode 1 is GMM1_L1N of its kernel.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Tensor

from epcomm.platforms.ascend.formats import to_nz
from epcomm.weights.quantized import Int8ChannelWeights

# Columns of a tile: one half gate, one half up.
TILE = 128


@dataclass(frozen=True, kw_only=True, eq=False)
class PackedWeights(ABC):
    """The experts of one rank, packed for a fused operator.

    gate_up_proj: int8 [E, H, 2I], E experts of this rank.   Other tensors: see the subclasses.
    All tensors are contiguous and on one device.
    """

    gate_up_proj: Tensor
    gate_up_scale: Tensor
    down_proj: Tensor
    down_scale: Tensor

    scale_dtype: ClassVar[torch.dtype] = torch.float32

    @classmethod
    @abstractmethod
    def pack(cls, weights: Int8ChannelWeights) -> Self:
        """Return a copy of `weights` in the layout of the operator. Local.

        Raises:
            ConfigError: the device refuses NZ.
        """

    @classmethod
    def num_bytes(cls, num_experts: int, hidden_size: int, intermediate_size: int) -> int:
        """Return the bytes of a record of experts of these sizes."""
        codes = 3 * intermediate_size * hidden_size
        scales = 2 * intermediate_size + hidden_size
        return num_experts * (codes + cls.scale_dtype.itemsize * scales)


class FusedDeepMoEWeights(PackedWeights):
    """The weights of mode 1: gate and up interleaved in tiles, matrices in NZ, scales in float32.

    gate_up_proj: int8 [E, H, 2I], interleaved.   gate_up_scale: float32 [E, 2I], interleaved too.
    down_proj: int8 [E, H, I], as in the checkpoint.   down_scale: float32 [E, H].
    2I is a multiple of 128. These are the tiles of A3; A5 has tiles of half the size, and no INT8.
    """

    @classmethod
    def pack(cls, weights: Int8ChannelWeights) -> Self:
        return cls(
            gate_up_proj=to_nz(interleave(weights.gate_up_proj.transpose(1, 2), dim=2)),
            gate_up_scale=interleave(weights.gate_up_scale, dim=1),
            down_proj=to_nz(_copy(weights.down_proj)),
            down_scale=_copy(weights.down_scale),
        )


class MegaMoEWeights(PackedWeights):
    """The weights of mode 3: gate columns, then up, row-major; scales in float32.

    gate_up_proj: int8 [E, H, 2I].   gate_up_scale: float32 [E, 2I].
    down_proj: int8 [E, I, H].   down_scale: float32 [E, H].
    The operator takes a list with one tensor for each expert; views into NZ are not allowed.
    """

    @classmethod
    def pack(cls, weights: Int8ChannelWeights) -> Self:
        return cls(
            gate_up_proj=_copy(weights.gate_up_proj.transpose(1, 2)),
            gate_up_scale=_copy(weights.gate_up_scale),
            down_proj=_copy(weights.down_proj.transpose(1, 2)),
            down_scale=_copy(weights.down_scale),
        )


class DispatchFFNCombineWeights(PackedWeights):
    """The weights of mode 2: gate columns, then up, in NZ; scales as bits of float32 in int64.

    gate_up_proj: int8 [E, H, 2I].   gate_up_scale: int64 [E * 2I].
    down_proj: int8 [E, I, H].   down_scale: int64 [E * H].
    """

    scale_dtype: ClassVar[torch.dtype] = torch.int64

    @classmethod
    def pack(cls, weights: Int8ChannelWeights) -> Self:
        return cls(
            gate_up_proj=to_nz(_copy(weights.gate_up_proj.transpose(1, 2))),
            gate_up_scale=bits_of_scales(weights.gate_up_scale),
            down_proj=to_nz(_copy(weights.down_proj.transpose(1, 2))),
            down_scale=bits_of_scales(weights.down_scale),
        )


def interleave(tensor: Tensor, dim: int) -> Tensor:
    """Return gate and up columns along `dim` in blocks of 64, as the kernel of mode 1 reads them.

    A tile of 128 columns has 64 gate columns and the 64 corresponding up columns, so that one core
    can apply SwiGLU to its own tile. With I = 192, in blocks of 64 columns:

        checkpoint   g0 g1 g2 u0 u1 u2
        interleaved  g0 u0 g1 u1 g2 u2

    With 2I = 128 this changes nothing, and with 2I = 256 it is its own inverse; tests use 384 or
    more. The result is contiguous, in new memory. 2I is a multiple of 128, as the limits of the
    operator require.
    """
    blocks = tensor.unflatten(dim, (2, -1, TILE // 2)).transpose(dim, dim + 1)
    return _copy(blocks).flatten(dim, dim + 2)


def bits_of_scales(scales: Tensor) -> Tensor:
    """Convert float32 [...] to its bits in int64 [number of elements], row-major, in new memory.

    All 32 bits are kept. The device reads the upper 19 of them, with a relative error of at most
    2**-10, and not the upper half of an element, whose bits are set for a negative scale.
    """
    return scales.view(torch.int32).flatten().to(torch.int64)


def _copy(tensor: Tensor) -> Tensor:
    """Return a contiguous copy, which later writes to the original do not change."""
    return tensor.clone(memory_format=torch.contiguous_format)
