"""Quantised expert weights: FP8 in blocks (DeepSeek), INT8 per channel (W8A8), MX and NVFP4."""

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from types import MappingProxyType
from typing import Any, ClassVar, Self

import torch
from torch import Tensor

from epcomm.config import ScaleDtypeName
from epcomm.errors import ConfigError, ShapeError
from epcomm.quantization import (
    FP8_FLOAT32_SCALES,
    FP8_POWER_OF_TWO_SCALES,
    INT8_PER_TOKEN,
    dequantize,
    quantize,
)
from epcomm.quantization.floats import E4M3_MAX, power_of_two_exponents
from epcomm.types import (
    QUANTIZABLE_DTYPES,
    Int8Profile,
    ScaleDtype,
    WireDtype,
    WireFormat,
    WireTensor,
    enum_member,
)
from epcomm.weights.unquantized import ExpertFormat, ExpertTensors, ExpertWeights

# Rows and columns of a block of FP8 matrices, and elements of hidden states that share a scale.
BLOCK = 128

# Matrices are [E, out, in] with gate first, and the activation is SwiGLU.
_PLAIN = ExpertFormat()


@dataclass(frozen=True, kw_only=True, eq=False)
class QuantizedWeights(ExpertTensors):
    """The matrices of E experts in eight or four bits.

    gate_up_proj: [E, 2I, H].   down_proj: [E, H, I].   Scales: see the subclasses.
    In four bits uint8, two elements in a byte: [E, 2I, H / 2] and [E, H, I / 2].

    All tensors are contiguous and on one device, because kernels take pointers. H and I are at
    least 1.
    hidden_dtype: of the hidden states that the experts take and return.
    has_scale_dtypes: from_unquantized() makes scales of several dtypes.
    per_item: elements of a row in one item of a matrix.
    """

    gate_up_proj: Tensor
    gate_up_scale: Tensor
    down_proj: Tensor
    down_scale: Tensor
    hidden_dtype: torch.dtype = torch.bfloat16
    format: ExpertFormat = _PLAIN
    has_scale_dtypes: ClassVar[bool] = False
    per_item: ClassVar[int] = 1

    def __post_init__(self) -> None:
        kind = type(self).__name__
        if self.format != _PLAIN:
            raise ConfigError(
                f"{kind}: format is {self.format}, expected {_PLAIN}; convert the checkpoint"
            )
        if WireDtype.from_torch(self.hidden_dtype) not in QUANTIZABLE_DTYPES:
            raise ConfigError(
                f"{kind}: hidden_dtype is {self.hidden_dtype}, expected bfloat16, float16 or "
                "float32, in which quantised experts compute; cast the experts first"
            )
        wire = self.wire_format
        code_dtype = torch.uint8 if self.per_item > 1 else wire.dtype.torch_dtype
        scale_dtype = wire.scale_dtype
        shapes = self._expected_shapes()
        for name, tensor in self.tensors().items():
            dtype = scale_dtype if name.endswith("scale") else code_dtype
            if tensor.dtype != dtype or list(tensor.shape) != shapes[name]:
                raise ShapeError(
                    f"{kind}: {name} is {tensor.dtype} {list(tensor.shape)}, expected {dtype} "
                    f"{shapes[name]} for gate_up_proj in {self.gate_up_proj.dtype} and "
                    f"gate_up_scale in {self.gate_up_scale.dtype}; see the docstring for scales"
                )
            if tensor.device != self.gate_up_proj.device:
                raise ShapeError(
                    f"{kind}: {name} is on {tensor.device}, expected {self.gate_up_proj.device} as "
                    "gate_up_proj; move it"
                )
            if not tensor.is_contiguous():
                raise ShapeError(
                    f"{kind}: {name} is {list(tensor.shape)} with strides "
                    f"{list(tensor.stride())}, expected contiguous; call .contiguous()"
                )

    @property
    def dtype(self) -> torch.dtype:
        return self.hidden_dtype

    @cached_property
    def intermediate_size(self) -> int:
        return self.down_proj.shape[2] * self.per_item

    def _expected_shapes(self) -> dict[str, list[int]]:
        if self.gate_up_proj.dim() != 3 or self.down_proj.dim() != 3:
            raise ShapeError(
                f"{type(self).__name__}: gate_up_proj is {list(self.gate_up_proj.shape)} and "
                f"down_proj {list(self.down_proj.shape)}, expected [E, 2I, H] and [E, H, I]"
            )
        experts, hidden, inner = self.num_experts, self.hidden_size, self.intermediate_size
        per_item = self.per_item
        if hidden < 1 or inner < 1 or hidden % per_item:
            raise ShapeError(
                f"{type(self).__name__}: down_proj is {list(self.down_proj.shape)}, expected "
                f"[E, H, I] with H and I of at least 1, and H a multiple of {per_item}; leave such "
                "experts out"
            )
        matrices = {"gate_up": (experts, 2 * inner, hidden), "down": (experts, hidden, inner)}
        shapes = {f"{name}_proj": [e, n, k // per_item] for name, (e, n, k) in matrices.items()}
        return shapes | {f"{name}_scale": self._scale_shape(*s) for name, s in matrices.items()}

    @classmethod
    def from_unquantized(
        cls, weights: ExpertWeights, *, scales: ScaleDtype | ScaleDtypeName = ScaleDtype.FLOAT32
    ) -> Self:
        """Quantise experts so that the largest element that shares a scale gets the largest code.

        Infinity or NaN makes the scale NaN, and so all elements that share it. Local.

        Args:
            weights: the experts, with any strides.
            scales: of Fp8BlockWeights; leave them out for others. With powers of two, the largest
                code may be half as large.

        Raises:
            ConfigError: biases, another format than swiglu with [E, out, in] matrices, or scales
                that these experts do not have.
            ShapeError: in four bits, a matrix with rows of an odd number of elements.
        """
        has_bias = weights.gate_up_bias is not None or weights.down_bias is not None
        if has_bias or weights.format != _PLAIN:
            biases = " with biases" if has_bias else ""
            raise ConfigError(
                f"from_unquantized: experts are {weights.format}{biases}, expected {_PLAIN} "
                "without biases; leave such experts unquantised"
            )
        chosen = enum_member(f"{cls.__name__}.from_unquantized: scales", ScaleDtype, scales)
        if chosen is not ScaleDtype.FLOAT32 and not cls.has_scale_dtypes:
            raise ConfigError(
                f"{cls.__name__}.from_unquantized: scales is {chosen.value}, which only "
                "Fp8BlockWeights have; leave it out"
            )
        made: dict[str, Any] = {}
        for name in ("gate_up", "down"):
            matrices = weights.tensors()[f"{name}_proj"].detach()
            if matrices.shape[-1] % cls.per_item:
                raise ShapeError(
                    f"{cls.__name__}.from_unquantized: {name}_proj is {list(matrices.shape)}, "
                    f"expected rows of a multiple of {cls.per_item} elements; leave such experts "
                    "unquantised"
                )
            codes, found = cls._quantize(matrices, chosen)
            # Elementwise results have the strides of their input.
            made |= {f"{name}_proj": codes.contiguous(), f"{name}_scale": found.contiguous()}
        return cls(**made, hidden_dtype=weights.dtype)

    def dequantized(self) -> dict[str, Tensor]:
        """Return gate_up_proj and down_proj in float32."""
        return {
            "gate_up_proj": self._dequantize(self.gate_up_proj, self.gate_up_scale),
            "down_proj": self._dequantize(self.down_proj, self.down_scale),
        }

    @classmethod
    @abstractmethod
    def _scale_shape(cls, num_experts: int, num_rows: int, num_columns: int) -> list[int]:
        """Return the shape of the scales of [E, N, K]."""

    @classmethod
    @abstractmethod
    def _quantize(cls, matrices: Tensor, scales: ScaleDtype) -> tuple[Tensor, Tensor]:
        """Quantise [E, N, K] to codes and scales."""

    @classmethod
    @abstractmethod
    def _dequantize(cls, codes: Tensor, scales: Tensor) -> Tensor:
        """Return the dequantised matrices, in float32."""


class Fp8BlockWeights(QuantizedWeights):
    """The experts as float8_e4m3fn codes; a scale for each 128 x 128 block multiplies its codes.

    gate_up_scale: [E, ceil(2I / 128), ceil(H / 128)].   down_scale: [E, ceil(H / 128),
    ceil(I / 128)]. Checkpoints call them weight_scale_inv.
    Both float32, or both float8_e8m0fnu: then hidden states get power-of-two scales too. A
    checkpoint that keeps powers of two in float32 (`scale_fmt: ue8m0`) loses nothing by
    `scale.to(torch.float8_e8m0fnu)`.
    """

    has_scale_dtypes: ClassVar[bool] = True

    @property
    def wire_format(self) -> WireFormat:
        is_power_of_two = self.gate_up_scale.dtype == torch.float8_e8m0fnu
        return FP8_POWER_OF_TWO_SCALES if is_power_of_two else FP8_FLOAT32_SCALES

    @classmethod
    def _scale_shape(cls, num_experts: int, num_rows: int, num_columns: int) -> list[int]:
        return [num_experts, -(-num_rows // BLOCK), -(-num_columns // BLOCK)]

    @classmethod
    def _quantize(cls, matrices: Tensor, scales: ScaleDtype) -> tuple[Tensor, Tensor]:
        num_rows, num_columns = matrices.shape[1:]
        padding = (0, -num_columns % BLOCK, 0, -num_rows % BLOCK)
        padded = torch.nn.functional.pad(matrices.float(), padding)
        # quantize() has a floor, which small weights would fall below.
        amax = padded.unflatten(2, (-1, BLOCK)).unflatten(1, (-1, BLOCK)).abs().amax(dim=(2, 4))
        found = _scale_of(amax) if scales is ScaleDtype.FLOAT32 else _power_of_two_of(amax)
        scaled = matrices.float() / _spread(found, matrices)
        return scaled.to(torch.float8_e4m3fn), found.to(scales.torch_dtype)

    @classmethod
    def _dequantize(cls, codes: Tensor, scales: Tensor) -> Tensor:
        return codes.float() * _spread(scales, codes)


class Int8ChannelWeights(QuantizedWeights):
    """The experts as int8 codes, symmetric; a scale for each output channel multiplies its codes.

    gate_up_scale: [E, 2I].   down_scale: [E, H].   Both float32.
    """

    @property
    def wire_format(self) -> WireFormat:
        return INT8_PER_TOKEN

    @classmethod
    def _scale_shape(cls, num_experts: int, num_rows: int, num_columns: int) -> list[int]:
        return [num_experts, num_rows]

    @classmethod
    def _quantize(cls, matrices: Tensor, scales: ScaleDtype) -> tuple[Tensor, Tensor]:
        # This profile has no scale of 0.
        wire = quantize(matrices.float(), INT8_PER_TOKEN, profile=Int8Profile.RINT127EPS)
        assert wire.scales is not None, "quantised formats have scales"
        return wire.data, wire.scales.squeeze(-1)

    @classmethod
    def _dequantize(cls, codes: Tensor, scales: Tensor) -> Tensor:
        return codes.float() * scales.unsqueeze(2)


class BlockFormatWeights(QuantizedWeights):
    """The experts in a format of rows on the wire: each row of a matrix is a row in this format.

    gate_up_scale: [E, 2I, num_scales of H].   down_scale: [E, H, num_scales of I]. See WireFormat.

    block_format: the format.
    """

    block_format: ClassVar[WireFormat]

    @property
    def wire_format(self) -> WireFormat:
        return self.block_format

    @classmethod
    def _scale_shape(cls, num_experts: int, num_rows: int, num_columns: int) -> list[int]:
        return [num_experts, num_rows, cls.block_format.num_scales(num_columns)]

    @classmethod
    def _quantize(cls, matrices: Tensor, scales: ScaleDtype) -> tuple[Tensor, Tensor]:
        wire = quantize(matrices.float(), cls.block_format)
        assert wire.scales is not None, "quantised formats have scales"
        # torch neither indexes nor compares 4-bit floats.
        codes = wire.data.view(torch.uint8) if cls.per_item > 1 else wire.data
        return codes, wire.scales

    @classmethod
    def _dequantize(cls, codes: Tensor, scales: Tensor) -> Tensor:
        data = codes.view(cls.block_format.dtype.torch_dtype)
        wire = WireTensor(data=data, format=cls.block_format, scales=scales)
        return dequantize(wire, torch.float32)


class Mxfp8Weights(BlockFormatWeights):
    """The experts in mxfp8: float8_e4m3fn, one float8_e8m0fnu scale for 32 elements of a row."""

    block_format: ClassVar[WireFormat] = WireFormat(dtype=WireDtype.MXFP8)


class Mxfp4Weights(BlockFormatWeights):
    """The experts in mxfp4: E2M1 in uint8, one float8_e8m0fnu scale for 32 elements of a row."""

    block_format: ClassVar[WireFormat] = WireFormat(dtype=WireDtype.MXFP4)
    per_item: ClassVar[int] = 2


class Nvfp4Weights(BlockFormatWeights):
    """The experts in nvfp4: E2M1 in uint8, one float8_e4m3fn scale for 16 elements of a row.

    The scales of a row begin with its float32 scale: join_scales() of epcomm.quantization makes
    them of a checkpoint that has one such scale for a matrix.
    """

    block_format: ClassVar[WireFormat] = WireFormat(dtype=WireDtype.NVFP4)
    per_item: ClassVar[int] = 2


# By the names that commands give them.
QUANTIZED_KINDS: Mapping[str, type[QuantizedWeights]] = MappingProxyType(
    {
        "fp8": Fp8BlockWeights,
        "int8": Int8ChannelWeights,
        "mxfp8": Mxfp8Weights,
        "mxfp4": Mxfp4Weights,
        "nvfp4": Nvfp4Weights,
    }
)


def _scale_of(amax: Tensor) -> Tensor:
    """Return the scale that maps the largest magnitude to the largest code; not 0 for zeros.

    NaN where that magnitude is infinite or NaN: a scale of infinity would make NaN of zeros alone.
    """
    scale = amax.clamp(min=torch.finfo(torch.float32).tiny) / E4M3_MAX
    return torch.where(amax.isfinite(), scale, torch.nan)


def _power_of_two_of(amax: Tensor) -> Tensor:
    """Return the smallest power of two, float32, with amax / power <= 448.

    NaN where that magnitude is infinite or NaN, which have no exponent.
    """
    is_finite = amax.isfinite()
    # Zeros may have any scale. 2**-126 is the least normal float32.
    exponents = power_of_two_exponents(amax.masked_fill(~is_finite, 0.0)).clamp(min=1)
    return torch.where(is_finite, (exponents << 23).view(torch.float32), torch.nan)


def _spread(scales: Tensor, matrices: Tensor) -> Tensor:
    """Repeat block scales [E, n, k] for each element of `matrices` [E, N, K], float32."""
    # float8_e8m0fnu scales cannot be multiplied.
    rows = scales.float().repeat_interleave(BLOCK, dim=1)[:, : matrices.shape[1]]
    return rows.repeat_interleave(BLOCK, dim=2)[:, :, : matrices.shape[2]]
