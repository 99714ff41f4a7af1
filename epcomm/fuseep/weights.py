"""Pack W8A8 experts for the fused operators, into one record for each mode.

The records have different types, so that weights cannot be packed twice, or passed to the operator
of another mode.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import ClassVar, Self

import torch
from torch import Tensor

from epcomm.errors import ConfigError, ShapeError
from epcomm.fuseep.interleave import TILE, interleave
from epcomm.fuseep.scale_bits import bits_of_scales
from epcomm.platforms.ascend.chip import Soc
from epcomm.platforms.ascend.formats import to_nz
from epcomm.weights.quantized import Int8ChannelWeights

# The dtype and shape of each field of a record.
Layout = Mapping[str, tuple[torch.dtype, list[int]]]


@dataclass(frozen=True, kw_only=True, eq=False)
class PackedWeights(ABC):
    """The experts of one rank, packed for a fused operator.

    gate_up_proj: int8 [E, H, 2I], E experts of this rank.   Other tensors: see the subclasses.
    All tensors are contiguous and on one device; matrices are in NZ if the device has it.
    soc: the chip whose kernel reads this layout.
    """

    gate_up_proj: Tensor
    gate_up_scale: Tensor
    down_proj: Tensor
    down_scale: Tensor

    soc: ClassVar[Soc] = Soc.A3
    # 2I must be a multiple of it.
    _column_unit: ClassVar[int]

    def __post_init__(self) -> None:
        shape = list(self.gate_up_proj.shape)
        if len(shape) != 3 or 0 in shape[1:] or shape[2] % self._column_unit:
            raise ShapeError(
                f"{type(self).__name__}: gate_up_proj is {shape}, expected [E, H, 2I] with 2I a "
                f"multiple of {self._column_unit}; make the record by pack()"
            )
        device = self.gate_up_proj.device
        for name, (dtype, wanted) in self._layout(*shape).items():
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
        """Return a copy of `weights` in the layout of the operator. Local.

        Raises:
            ConfigError: weights of another kind, packed ones included, hidden states that are not
                bfloat16, or a device that refuses NZ.
        """

    @property
    def num_experts(self) -> int:
        """The number of experts of this rank, E."""
        return self.gate_up_proj.shape[0]

    @property
    def hidden_size(self) -> int:
        """The hidden size, H."""
        return self.gate_up_proj.shape[1]

    @property
    def intermediate_size(self) -> int:
        """The intermediate size of an expert, I."""
        return self.gate_up_proj.shape[2] // 2

    @classmethod
    def num_bytes(cls, num_experts: int, hidden_size: int, intermediate_size: int) -> int:
        """Return the bytes of a record of experts of these sizes."""
        layout = cls._layout(num_experts, hidden_size, 2 * intermediate_size)
        return sum(prod(shape) * dtype.itemsize for dtype, shape in layout.values())

    @staticmethod
    @abstractmethod
    def _layout(experts: int, hidden: int, columns: int) -> Layout:
        """Return the dtype and shape of each field, for 2I columns of gate and up."""


class FusedDeepMoEWeights(PackedWeights):
    """The weights of mode 1: gate and up interleaved in tiles, scales in float32.

    gate_up_proj: int8 [E, H, 2I], interleaved.   gate_up_scale: float32 [E, 2I], interleaved too.
    down_proj: int8 [E, H, I], as in the checkpoint.   down_scale: float32 [E, H].
    2I is a multiple of 128. These are the tiles of A3; A5 has tiles of half the size, and no INT8.
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

    @staticmethod
    def _layout(experts: int, hidden: int, columns: int) -> Layout:
        return {
            "gate_up_proj": (torch.int8, [experts, hidden, columns]),
            "gate_up_scale": (torch.float32, [experts, columns]),
            "down_proj": (torch.int8, [experts, hidden, columns // 2]),
            "down_scale": (torch.float32, [experts, hidden]),
        }


class MegaMoEWeights(PackedWeights):
    """The weights of mode 3: gate columns, then up, row-major; scales in float32.

    gate_up_proj: int8 [E, H, 2I].   gate_up_scale: float32 [E, 2I].
    down_proj: int8 [E, I, H].   down_scale: float32 [E, H].
    The operator takes a list with one tensor for each expert; views into NZ are not allowed.
    """

    _column_unit: ClassVar[int] = 2

    @classmethod
    def pack(cls, weights: Int8ChannelWeights) -> Self:
        _check_source(cls, weights)
        return cls(
            gate_up_proj=_copy(weights.gate_up_proj.transpose(1, 2)),
            gate_up_scale=_copy(weights.gate_up_scale),
            down_proj=_copy(weights.down_proj.transpose(1, 2)),
            down_scale=_copy(weights.down_scale),
        )

    @staticmethod
    def _layout(experts: int, hidden: int, columns: int) -> Layout:
        return {
            "gate_up_proj": (torch.int8, [experts, hidden, columns]),
            "gate_up_scale": (torch.float32, [experts, columns]),
            "down_proj": (torch.int8, [experts, columns // 2, hidden]),
            "down_scale": (torch.float32, [experts, hidden]),
        }


class DispatchFFNCombineWeights(PackedWeights):
    """The weights of mode 2: gate columns, then up; scales as the bits of float32 in int64.

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

    @staticmethod
    def _layout(experts: int, hidden: int, columns: int) -> Layout:
        return {
            "gate_up_proj": (torch.int8, [experts, hidden, columns]),
            "gate_up_scale": (torch.int64, [experts * columns]),
            "down_proj": (torch.int8, [experts, columns // 2, hidden]),
            "down_scale": (torch.int64, [experts * hidden]),
        }


def _check_source(cls: type[PackedWeights], weights: object) -> None:
    """Raise ConfigError for weights of another kind or dtype."""
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
    """Return a contiguous copy, which later writes to the original do not change."""
    return tensor.clone(memory_format=torch.contiguous_format)
