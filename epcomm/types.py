"""Vocabulary of records, buffers and runners: wire formats, layouts, who applies weights."""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum, StrEnum
from functools import cache
from typing import TypeGuard, TypeVar

import torch
from torch import Tensor

from epcomm.errors import ConfigError, shown

# 16 B: the widest vector load and the row-stride rule of torch's grouped matmul.
ROW_ALIGNMENT_BYTES = 16
# The largest size and count of anything: kernels number tokens, slots and experts by int32.
MAX_SIZE = 2**31 - 1
# The most ranks: plans look at each pair, and no group has as many.
MAX_RANKS = 4096

E = TypeVar("E", bound=Enum)


def is_size(value: object, most: int = MAX_SIZE) -> TypeGuard[int]:
    """Return whether a value is an integer from 1 to `most`, and no bool."""
    return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= most


def enum_member(what: str, kind: type[E], value: object) -> E:
    """Return the member of an enum for a member or its value; `what` names it in the message.

    Raises:
        ConfigError: there is no such member.
    """
    try:
        return kind(value)
    except ValueError:
        allowed = [member.value for member in kind]
        raise ConfigError(f"{what} is {shown(value)}, expected one of {allowed}") from None


def align_up(value: int, multiple: int) -> int:
    """Return the smallest multiple of `multiple` that is at least `value`."""
    return -(-value // multiple) * multiple


class WireDtype(StrEnum):
    """The element type in which hidden states are sent.

    torch_dtype: the torch dtype that holds one element.
    is_quantized: rows have scales.
    """

    torch_dtype: torch.dtype
    is_quantized: bool

    BF16 = "bf16", torch.bfloat16
    FP16 = "fp16", torch.float16
    FP32 = "fp32", torch.float32
    FP64 = "fp64", torch.float64
    FP8_E4M3 = "fp8_e4m3", torch.float8_e4m3fn
    INT8 = "int8", torch.int8

    def __new__(cls, value: str, torch_dtype: torch.dtype) -> WireDtype:
        """Make the member `value`, whose elements are torch_dtype."""
        member = str.__new__(cls, value)
        member._value_ = value
        member.torch_dtype, member.is_quantized = torch_dtype, torch_dtype.itemsize == 1
        return member

    @property
    def scalar_dtype(self) -> torch.dtype:
        """The torch dtype of sums over rows, and of the router weights that are sent with them."""
        return sum_dtype(self.torch_dtype)

    @classmethod
    def from_torch(cls, dtype: torch.dtype) -> WireDtype:
        """Return the wire dtype of an unquantised tensor.

        Raises:
            ConfigError: the dtype is none of bfloat16, float16, float32, float64.
        """
        for wire_dtype in (cls.BF16, cls.FP16, cls.FP32, cls.FP64):
            if wire_dtype.torch_dtype == dtype:
                return wire_dtype
        raise ConfigError(
            f"WireDtype.from_torch: dtype is {dtype}, expected bfloat16, float16, float32 or "
            "float64; cast the hidden states"
        )


def sum_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which elements of `dtype` are summed: float64 or float32."""
    return torch.float64 if dtype is torch.float64 else torch.float32


class ScaleDtype(StrEnum):
    """The element type of the scales of FP8 rows and matrices.

    FLOAT32: as DeepSeek-V3.   POWER_OF_TWO: one byte, an exponent (UE8M0), as DeepSeek-V3.1.
    """

    FLOAT32 = "float32"
    POWER_OF_TWO = "power_of_two"

    @property
    def torch_dtype(self) -> torch.dtype:
        """The torch dtype that holds one scale."""
        return torch.float32 if self is ScaleDtype.FLOAT32 else torch.float8_e8m0fnu


class Int8Profile(StrEnum):
    """The arithmetic by which a row x of largest magnitude a becomes codes and a scale.

    RINT127: d = 127 / a, codes rint(x * d), scale 1 / d. Low-latency dispatch, fused mode 1.
    RINT127EPS: the same with a + 1e-12. Normal dispatch.
    DIV: scale a / 127, codes rint(x / scale). npu_dynamic_quant.
    DIVTRUNC16: scale a / 127, x / scale cut to float16, halves away from zero. init_routing_v2.
    TRITON: scale a / 127, codes floor(x / scale + 0.5), clamped. SGLang's swiglu_quant.
    """

    RINT127 = "rint127"
    RINT127EPS = "rint127eps"
    DIV = "div"
    DIVTRUNC16 = "divtrunc16"
    TRITON = "triton"


UNQUANTIZED_DTYPES = frozenset(dtype for dtype in WireDtype if not dtype.is_quantized)
# Dtypes that can be quantised to eight bits, which eight-bit experts read too.
QUANTIZABLE_DTYPES = UNQUANTIZED_DTYPES - {WireDtype.FP64}
# Dtypes that buffers carry whose kernels sum in float32.
FLOAT32_SUM_DTYPES = frozenset(WireDtype) - {WireDtype.FP64}


@dataclass(frozen=True, kw_only=True)
class WireFormat:
    """The form of one row of hidden states on the wire.

    dtype: element type.
    scale_block: elements that share a scale; None for unquantised rows, 0 for one scale a row.
    scale_dtype: dtype of the scales; None for unquantised rows. Powers of two are for FP8 only.
    """

    dtype: WireDtype
    scale_block: int | None = None
    scale_dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        remedy = ""
        has_block = self.scale_block is not None and self.scale_block >= 0
        if (has_block, self.scale_dtype is not None) != (self.dtype.is_quantized,) * 2:
            remedy = "quantised dtypes need both, others neither"
        elif self.dtype is WireDtype.INT8 and self.scale_dtype == torch.float8_e8m0fnu:
            remedy = (
                f"only {WireDtype.FP8_E4M3.value} has power-of-two scales, int8 takes torch.float32"
            )
        if remedy:
            raise ConfigError(
                f"WireFormat: {self.dtype.value} with scale_block={self.scale_block} and "
                f"scale_dtype={self.scale_dtype}; {remedy}"
            )

    @classmethod
    @cache
    def of(cls, dtype: torch.dtype) -> WireFormat:
        """Return the format that sends rows of `dtype` as they are."""
        return cls(dtype=WireDtype.from_torch(dtype))

    def num_scales(self, hidden_size: int) -> int:
        """Return the number of scales of one row."""
        if self.scale_block is None:
            return 0
        return -(-hidden_size // self.scale_block) if self.scale_block else 1

    def data_bytes(self, hidden_size: int) -> int:
        """Return the bytes of the elements of one row."""
        return hidden_size * self.dtype.torch_dtype.itemsize

    def scale_bytes(self, hidden_size: int) -> int:
        """Return the bytes of the scales of one row."""
        return self.num_scales(hidden_size) * (self.scale_dtype.itemsize if self.scale_dtype else 0)

    def __str__(self) -> str:
        if self.scale_block is None:
            return self.dtype.value
        suffix = "/ue8m0" if self.scale_dtype == torch.float8_e8m0fnu else ""
        return f"{self.dtype.value}/{self.scale_block}{suffix}"


@dataclass(frozen=True, kw_only=True)
class ScaleLayout:
    """The memory layout of received scales.

    column_major: consecutive rows are adjacent (what TMA reads) instead of consecutive blocks.
    alignment: rows are padded to this multiple in the column-major layout; 1 in row-major.
    packed: four power-of-two scales in one int32.
    """

    column_major: bool = False
    alignment: int = 1
    packed: bool = False

    def __post_init__(self) -> None:
        is_valid = self.alignment >= 1 if self.column_major else self.alignment == 1
        if not is_valid:
            raise ConfigError(
                f"ScaleLayout: alignment is {self.alignment} with "
                f"column_major={self.column_major}; expected at least 1 in column-major, and 1 in "
                "row-major, which has no columns to align"
            )

    def __str__(self) -> str:
        order = f"column-major in multiples of {self.alignment}" if self.column_major else ""
        return f"{order or 'row-major'}{', packed' if self.packed else ''}"


# The layout in which scales are sent.
ROW_MAJOR = ScaleLayout()


@dataclass(frozen=True, kw_only=True)
class RowReading:
    """The rows that a runner reads: their wire format, and the layout of received scales.

    scale_layout: ROW_MAJOR for unquantised rows, which have no scales.
    """

    format: WireFormat
    scale_layout: ScaleLayout = ROW_MAJOR

    def __post_init__(self) -> None:
        if not self.format.dtype.is_quantized and self.scale_layout != ROW_MAJOR:
            raise ConfigError(
                f"RowReading: {self.format} with scales {self.scale_layout}; unquantised rows have "
                "no scales, leave the layout out"
            )
        check_packing("RowReading", self.format, self.scale_layout)


def check_packing(caller: str, wire_format: WireFormat, layout: ScaleLayout) -> None:
    """Refuse to pack scales that do not fit into a byte.

    Raises:
        ConfigError: a packed layout of scales that are not powers of two.
    """
    if layout.packed and wire_format.scale_dtype != torch.float8_e8m0fnu:
        raise ConfigError(
            f"{caller}: scales {layout} of {wire_format} with scale_dtype="
            f"{wire_format.scale_dtype}; only torch.float8_e8m0fnu fits four to an int32, so take "
            "power-of-two scales or a layout that is not packed"
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class WireTensor:
    """The rows in a wire format: elements, and scales where the format has them.

    data: [R, H] (or [L, C, H]), format.dtype; the row stride may exceed H.
    scales: [R, num_scales] or None.
    scale_layout: the layout of the scales; None: row-major.
    """

    data: Tensor
    format: WireFormat
    scales: Tensor | None = None
    scale_layout: ScaleLayout | None = None

    def __post_init__(self) -> None:
        if self.scale_layout is not None:
            check_packing("WireTensor", self.format, self.scale_layout)

    def part(self, rows: slice) -> WireTensor:
        """Return a view of some rows with their scales."""
        scales = None if self.scales is None else self.scales[rows]
        return replace(self, data=self.data[rows], scales=scales)


def data_of(rows: Tensor | WireTensor) -> Tensor:
    """Return the elements of rows, whether they have scales or not."""
    return rows.data if isinstance(rows, WireTensor) else rows


class Layout(StrEnum):
    """The form in which received tokens are presented to the experts."""

    ROWS = "rows"
    MASKED = "masked"


class WeightsAppliedBy(StrEnum):
    """The side that multiplies expert outputs by topk_weights, exactly once."""

    RUNNER = "runner"
    COMBINE = "combine"


class RowsPer(StrEnum):
    """The meaning of one row of a CombineInput."""

    SLOT = "slot"
    ROW = "row"
