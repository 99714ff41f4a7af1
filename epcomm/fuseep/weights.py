"""W8A8 experts as the fused operators take them: a record for each mode, and the way back.

A record is a type of its own: what was packed is not packed again, and no mode takes the other's.
New weights of a checkpoint are packed into a new record, and no layer remembers whether it did.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Self

import torch
from torch import Tensor

from epcomm.errors import ConfigError, ShapeError
from epcomm.fuseep.interleave import TILE, deinterleave, interleave
from epcomm.fuseep.scale_bits import bits_of_scales, scales_of_bits
from epcomm.platforms.ascend.chip import Soc
from epcomm.platforms.ascend.formats import to_nd, to_nz
from epcomm.weights.quantized import Int8ChannelWeights


@dataclass(frozen=True, kw_only=True, eq=False)
class PackedWeights(ABC):
    """gate_up_proj: int8 [E, H, 2I].   The others: see the subclasses.

    E: experts of this rank. All contiguous, on one device; matrices in NZ where the device has it.
    soc: the processor whose kernel reads this layout.
    """

    gate_up_proj: Tensor
    gate_up_scale: Tensor
    down_proj: Tensor
    down_scale: Tensor

    soc: ClassVar[Soc] = Soc.A3
    # 2I is a multiple of it.
    _column_unit: ClassVar[int]

    def __post_init__(self) -> None:
        shape = list(self.gate_up_proj.shape)
        if len(shape) != 3 or 0 in shape[1:] or shape[2] % self._column_unit:
            raise ShapeError(
                f"{type(self).__name__}: gate_up_proj is {shape}, expected [E, H, 2I] with 2I a "
                f"multiple of {self._column_unit}; make the record by pack()"
            )
        device = self.gate_up_proj.device
        for name, (dtype, wanted) in self._layout().items():
            tensor: Tensor = getattr(self, name)
            found = (tensor.dtype, list(tensor.shape), tensor.device, tensor.is_contiguous())
            if found != (dtype, wanted, device, True):
                raise ShapeError(
                    f"{type(self).__name__}: {name} is {tensor.dtype} {list(tensor.shape)} with "
                    f"strides {list(tensor.stride())} on {tensor.device}, expected {dtype} "
                    f"{wanted} contiguous on {device}; make the record by pack()"
                )

    @classmethod
    @abstractmethod
    def pack(cls, weights: Int8ChannelWeights) -> Self:
        """What the operator takes, in memory of its own; `weights` stays as it is. Local.

        Raises:
            ConfigError: weights of another kind (packed ones among them), hidden states that are
                not bfloat16, or a device that refuses NZ.
        """

    @abstractmethod
    def unpack(self) -> Int8ChannelWeights:
        """The weights that were packed, to the bit, in memory of their own."""

    @property
    def num_experts(self) -> int:
        """E, of this rank."""
        return self.gate_up_proj.shape[0]

    @property
    def hidden_size(self) -> int:
        """H."""
        return self.gate_up_proj.shape[1]

    @property
    def intermediate_size(self) -> int:
        """I."""
        return self.gate_up_proj.shape[2] // 2

    @abstractmethod
    def _layout(self) -> dict[str, tuple[torch.dtype, list[int]]]:
        """Field name to dtype and shape, from the shape of gate_up_proj."""


class FusedDeepMoEWeights(PackedWeights):
    """Of mode 1: gate and up interleaved in tiles, scales in float32.

    gate_up_proj: int8 [E, H, 2I], interleaved.   gate_up_scale: float32 [E, 2I], interleaved alike.
    down_proj: int8 [E, H, I], as in the checkpoint.   down_scale: float32 [E, H].
    2I is a multiple of 128. The tile is that of A3; A5 reads halves, and no INT8.
    """

    _column_unit: ClassVar[int] = TILE

    @classmethod
    def pack(cls, weights: Int8ChannelWeights) -> Self:
        _check_source(cls, weights)
        return cls(
            gate_up_proj=to_nz(interleave(weights.gate_up_proj.transpose(1, 2), dim=2)),
            gate_up_scale=interleave(weights.gate_up_scale, dim=1),
            down_proj=to_nz(_copy(weights.down_proj)),
            down_scale=_copy(weights.down_scale),
        )

    def unpack(self) -> Int8ChannelWeights:
        gate_up = deinterleave(to_nd(self.gate_up_proj), dim=2)
        return Int8ChannelWeights(
            gate_up_proj=_copy(gate_up.transpose(1, 2)),
            gate_up_scale=deinterleave(self.gate_up_scale, dim=1),
            down_proj=_copy(to_nd(self.down_proj)),
            down_scale=_copy(self.down_scale),
        )

    def _layout(self) -> dict[str, tuple[torch.dtype, list[int]]]:
        experts, hidden, columns = self.gate_up_proj.shape
        return {
            "gate_up_proj": (torch.int8, [experts, hidden, columns]),
            "gate_up_scale": (torch.float32, [experts, columns]),
            "down_proj": (torch.int8, [experts, hidden, columns // 2]),
            "down_scale": (torch.float32, [experts, hidden]),
        }


class DispatchFFNCombineWeights(PackedWeights):
    """Of mode 2: gate columns, then up; scales as the bits of float32 in int64.

    gate_up_proj: int8 [E, H, 2I].   gate_up_scale: int64 [E * 2I].
    down_proj: int8 [E, I, H].   down_scale: int64 [E * H].
    """

    _column_unit: ClassVar[int] = 2

    @classmethod
    def pack(cls, weights: Int8ChannelWeights) -> Self:
        _check_source(cls, weights)
        return cls(
            gate_up_proj=to_nz(_copy(weights.gate_up_proj.transpose(1, 2))),
            gate_up_scale=bits_of_scales(weights.gate_up_scale),
            down_proj=to_nz(_copy(weights.down_proj.transpose(1, 2))),
            down_scale=bits_of_scales(weights.down_scale),
        )

    def unpack(self) -> Int8ChannelWeights:
        experts, hidden, columns = self.gate_up_proj.shape
        return Int8ChannelWeights(
            gate_up_proj=_copy(to_nd(self.gate_up_proj).transpose(1, 2)),
            gate_up_scale=scales_of_bits(self.gate_up_scale, (experts, columns)),
            down_proj=_copy(to_nd(self.down_proj).transpose(1, 2)),
            down_scale=scales_of_bits(self.down_scale, (experts, hidden)),
        )

    def _layout(self) -> dict[str, tuple[torch.dtype, list[int]]]:
        experts, hidden, columns = self.gate_up_proj.shape
        return {
            "gate_up_proj": (torch.int8, [experts, hidden, columns]),
            "gate_up_scale": (torch.int64, [experts * columns]),
            "down_proj": (torch.int8, [experts, columns // 2, hidden]),
            "down_scale": (torch.int64, [experts * hidden]),
        }


def _check_source(cls: type[PackedWeights], weights: object) -> None:
    """Python runs what a type checker would refuse."""
    if not isinstance(weights, Int8ChannelWeights):
        raise ConfigError(
            f"{cls.__name__}.pack: weights are {type(weights).__name__}, expected "
            "Int8ChannelWeights; pack the W8A8 experts of a checkpoint, once"
        )
    if weights.hidden_dtype is not torch.bfloat16:
        raise ConfigError(
            f"{cls.__name__}.pack: hidden_dtype is {weights.hidden_dtype}, expected "
            "torch.bfloat16, in which the fused operators take and return hidden states"
        )


def _copy(tensor: Tensor) -> Tensor:
    """Contiguous and new: what is loaded over the original later does not reach it."""
    return tensor.clone(memory_format=torch.contiguous_format)
