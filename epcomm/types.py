"""Vocabulary of records, buffers and runners: wire formats, layouts, who applies weights."""

from dataclasses import dataclass, replace
from enum import Enum, StrEnum
from functools import cache
from typing import Self, TypeGuard, TypeVar

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
    """The name of a wire format of hidden states, with the facts that all its variants share.

    torch_dtype: the torch dtype of the data.   per_item: elements in one item of the data.
    scale_block, scale_dtype: those of a WireFormat that names no others; None without scales.
    has_row_scale: a float32 scale of the row multiplies the scales of its blocks.
    is_quantized: rows have scales.
    """

    torch_dtype: torch.dtype
    scale_block: int | None
    scale_dtype: torch.dtype | None
    per_item: int
    has_row_scale: bool
    is_quantized: bool

    BF16 = "bf16", torch.bfloat16
    FP16 = "fp16", torch.float16
    FP32 = "fp32", torch.float32
    FP64 = "fp64", torch.float64
    FP8_E4M3 = "fp8_e4m3", torch.float8_e4m3fn, 128, torch.float32
    INT8 = "int8", torch.int8, 0, torch.float32
    MXFP8 = "mxfp8", torch.float8_e4m3fn, 32, torch.float8_e8m0fnu
    MXFP4 = "mxfp4", torch.float4_e2m1fn_x2, 32, torch.float8_e8m0fnu
    NVFP4 = "nvfp4", torch.float4_e2m1fn_x2, 16, torch.float8_e4m3fn
    # The kernels of deep_ep V1 make and read it, of rows in bfloat16; see docs/formats.md.
    LOGFMT10 = "logfmt10", torch.bfloat16

    def __new__(
        cls,
        value: str,
        torch_dtype: torch.dtype,
        scale_block: int | None = None,
        scale_dtype: torch.dtype | None = None,
    ) -> Self:
        member = str.__new__(cls, value)
        member._value_ = value
        member.torch_dtype, member.is_quantized = torch_dtype, scale_dtype is not None
        member.scale_block, member.scale_dtype = scale_block, scale_dtype
        member.per_item = 2 if torch_dtype is torch.float4_e2m1fn_x2 else 1
        member.has_row_scale = scale_dtype is torch.float8_e4m3fn
        return member

    @property
    def scalar_dtype(self) -> torch.dtype:
        """The torch dtype of sums over rows, and of the router weights that are sent with them."""
        return sum_dtype(self.torch_dtype)

    @classmethod
    def from_torch(cls, dtype: torch.dtype) -> Self:
        """Return the wire dtype of an unquantised tensor.

        Raises:
            ConfigError: the dtype is none of bfloat16, float16, float32, float64.
        """
        for wire_dtype in cls:
            if wire_dtype.torch_dtype == dtype and not wire_dtype.is_quantized:
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


# Dtypes of rows that epcomm reads and writes.
ROW_DTYPES = frozenset(WireDtype) - {WireDtype.LOGFMT10}
UNQUANTIZED_DTYPES = frozenset(dtype for dtype in ROW_DTYPES if not dtype.is_quantized)
# Dtypes that can be quantised, which eight-bit experts read too.
QUANTIZABLE_DTYPES = UNQUANTIZED_DTYPES - {WireDtype.FP64}
# Dtypes that buffers carry whose kernels sum in float32 and have codecs for eight bits.
FLOAT32_SUM_DTYPES = QUANTIZABLE_DTYPES | {WireDtype.FP8_E4M3, WireDtype.INT8}
# Dtypes to which combine quantises sums. 4 bits with one power of two a block are too coarse, and
# INT8 rows have one scale for all of H.
SUM_DTYPES = frozenset({WireDtype.FP8_E4M3, WireDtype.MXFP8, WireDtype.NVFP4})
# Dtypes to which backward quantises gradients, for which 4 bits are too coarse.
GRADIENT_DTYPES = frozenset({WireDtype.FP8_E4M3, WireDtype.MXFP8})

# Bytes of the scale of a row, before the scales of its blocks.
ROW_SCALE_BYTES = 4


@dataclass(frozen=True, kw_only=True)
class WireFormat:
    """The form of one row of hidden states on the wire; only codecs and runners interpret it.

    dtype: the name of the format.
    scale_block: elements that share a scale; None for unquantised rows, 0 for one scale a row.
        Of FP8_E4M3 and INT8 any; the other formats have one, which is the default.
    scale_dtype: dtype of the scales; None for unquantised rows. FP8_E4M3 has float32 (the default)
        or powers of two, float8_e8m0fnu; the other formats have one.

    Scales are sent row-major, in the order of the blocks. With WireDtype.has_row_scale they begin
    with the four bytes of the float32 scale of the row, and are padded to a multiple of four bytes:
    see epcomm.quantization.split_scales().
    """

    dtype: WireDtype
    scale_block: int | None = None
    scale_dtype: torch.dtype | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", enum_member("WireFormat: dtype", WireDtype, self.dtype))
        kind, is_fp8 = self.dtype, self.dtype is WireDtype.FP8_E4M3
        for name in ("scale_block", "scale_dtype"):
            if getattr(self, name) is None:
                object.__setattr__(self, name, getattr(kind, name))
        fits = self.scale_block == kind.scale_block
        if is_fp8 or kind is WireDtype.INT8:
            # Programs quantise these in blocks of any size.
            fits = self.scale_block is not None and self.scale_block >= 0
        scales_fit = self.scale_dtype is kind.scale_dtype or (is_fp8 and self.has_exponents)
        if not fits or not scales_fit:
            raise ConfigError(
                f"WireFormat: {kind.value} with scale_block={self.scale_block} and "
                f"scale_dtype={self.scale_dtype}, expected {kind.scale_block} and "
                f"{kind.scale_dtype}{' or torch.float8_e8m0fnu' if is_fp8 else ''}; leave them out"
            )

    @classmethod
    @cache
    def of(cls, dtype: torch.dtype) -> Self:
        """Return the format that sends rows of `dtype` as they are."""
        return cls(dtype=WireDtype.from_torch(dtype))

    @property
    def has_exponents(self) -> bool:
        """Return whether each scale is a power of two, in one byte."""
        return self.scale_dtype is torch.float8_e8m0fnu

    def num_blocks(self, hidden_size: int) -> int:
        """Return the number of blocks of one row that share a scale."""
        if self.scale_block is None:
            return 0
        return -(-hidden_size // self.scale_block) if self.scale_block else 1

    def num_scales(self, hidden_size: int) -> int:
        """Return the number of items of scale_dtype that hold the scales of one row."""
        blocks = self.num_blocks(hidden_size)
        if not self.dtype.has_row_scale:
            return blocks
        # Their dtype has one byte.
        return ROW_SCALE_BYTES + align_up(blocks, ROW_SCALE_BYTES)

    def num_items(self, hidden_size: int) -> int:
        """Return the number of items of dtype.torch_dtype that hold the elements of one row."""
        return -(-hidden_size // self.dtype.per_item)

    def data_bytes(self, hidden_size: int) -> int:
        """Return the bytes of the elements of one row."""
        return self.num_items(hidden_size) * self.dtype.torch_dtype.itemsize

    def scale_bytes(self, hidden_size: int) -> int:
        """Return the bytes of the scales of one row."""
        return self.num_scales(hidden_size) * (self.scale_dtype.itemsize if self.scale_dtype else 0)

    def __str__(self) -> str:
        if self.dtype not in (WireDtype.FP8_E4M3, WireDtype.INT8):
            return self.dtype.value
        return f"{self.dtype.value}/{self.scale_block}{'/ue8m0' if self.has_exponents else ''}"


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
    if layout.packed and not wire_format.has_exponents:
        raise ConfigError(
            f"{caller}: scales {layout} of {wire_format} with scale_dtype="
            f"{wire_format.scale_dtype}; only torch.float8_e8m0fnu fits four to an int32, so take "
            "power-of-two scales or a layout that is not packed"
        )


@dataclass(frozen=True, kw_only=True, eq=False)
class WireTensor:
    """The rows in a wire format: elements, and scales where the format has them.

    data: [R, H] (or [L, C, H]) in items of format.dtype, for 4 bits [R, H / 2]; the row stride may
        be larger.
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

    @property
    def hidden_size(self) -> int:
        """The elements of a row, H."""
        return self.data.shape[-1] * self.format.dtype.per_item

    def part(self, rows: slice) -> Self:
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
