import pytest
import torch

from epcomm import ConfigError, WireDtype, WireFormat, WireTensor
from epcomm.types import ROW_DTYPES, RowReading, ScaleLayout

FP8_BLOCKS = WireFormat(dtype=WireDtype.FP8_E4M3, scale_block=128, scale_dtype=torch.float32)
FP8_SMALL = WireFormat(dtype=WireDtype.FP8_E4M3, scale_block=32, scale_dtype=torch.float8_e8m0fnu)
FP8_EXPONENTS = WireFormat(
    dtype=WireDtype.FP8_E4M3, scale_block=128, scale_dtype=torch.float8_e8m0fnu
)
PACKED_COLUMNS = ScaleLayout(column_major=True, alignment=4, packed=True)
INT8_ROWS = WireFormat(dtype=WireDtype.INT8, scale_block=0, scale_dtype=torch.float32)


@pytest.mark.parametrize("dtype", sorted(ROW_DTYPES))
def test_wire_dtype_comes_back_from_torch_unless_quantised(dtype: WireDtype) -> None:
    if not dtype.is_quantized:
        assert WireDtype.from_torch(dtype.torch_dtype) is dtype
        return
    with pytest.raises(ConfigError, match=f"dtype is {dtype.torch_dtype}, expected bfloat16"):
        WireDtype.from_torch(dtype.torch_dtype)


@pytest.mark.parametrize(
    ("wire", "hidden_size", "num_scales", "data_bytes", "scale_bytes", "text"),
    [
        (WireFormat.of(torch.bfloat16), 37, 0, 74, 0, "bf16"),
        # The last block is short.
        (FP8_BLOCKS, 300, 3, 300, 12, "fp8_e4m3/128"),
        (FP8_SMALL, 128, 4, 128, 4, "fp8_e4m3/32/ue8m0"),
        (INT8_ROWS, 300, 1, 300, 4, "int8/0"),
        (WireFormat(dtype=WireDtype.MXFP8), 300, 10, 300, 10, "mxfp8"),
        (WireFormat(dtype=WireDtype.MXFP4), 300, 10, 150, 10, "mxfp4"),
        # Four bytes of the row's scale, and 19 of blocks, padded to 20.
        (WireFormat(dtype=WireDtype.NVFP4), 300, 24, 150, 24, "nvfp4"),
    ],
)
def test_bytes_of_one_row(
    wire: WireFormat,
    hidden_size: int,
    num_scales: int,
    data_bytes: int,
    scale_bytes: int,
    text: str,
) -> None:
    assert wire.num_scales(hidden_size) == num_scales
    assert wire.data_bytes(hidden_size) == data_bytes
    assert wire.scale_bytes(hidden_size) == scale_bytes
    assert str(wire) == text


@pytest.mark.parametrize(
    ("dtype", "scale_block", "scale_dtype"),
    [
        (WireDtype.BF16, 128, torch.float32),
        (WireDtype.INT8, -1, torch.float32),
        (WireDtype.INT8, 0, torch.float8_e8m0fnu),
        (WireDtype.FP8_E4M3, 32, torch.uint8),
        (WireDtype.MXFP8, 16, None),
        (WireDtype.NVFP4, 16, torch.float32),
    ],
)
def test_formats_that_their_name_does_not_have_are_refused(
    dtype: WireDtype, scale_block: int, scale_dtype: torch.dtype | None
) -> None:
    expected = f"expected {dtype.scale_block} and {dtype.scale_dtype}"
    with pytest.raises(ConfigError, match=f"WireFormat: {dtype.value} with .*{expected}"):
        WireFormat(dtype=dtype, scale_block=scale_block, scale_dtype=scale_dtype)


def test_a_name_alone_is_a_format() -> None:
    assert WireFormat(dtype=WireDtype.FP8_E4M3) == FP8_BLOCKS
    assert WireFormat(dtype="int8") == INT8_ROWS  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="WireFormat: dtype is 'mxfp9', expected one of"):
        WireFormat(dtype="mxfp9")  # type: ignore[arg-type]
    assert str(FP8_EXPONENTS) == "fp8_e4m3/128/ue8m0"


@pytest.mark.parametrize(
    ("column_major", "alignment"), [(True, 0), (True, -4), (False, 4), (False, 0)]
)
def test_alignment_that_cannot_be_is_refused(column_major: bool, alignment: int) -> None:
    message = f"alignment is {alignment} with column_major={column_major}; expected at least 1"
    with pytest.raises(ConfigError, match=message):
        ScaleLayout(column_major=column_major, alignment=alignment)


@pytest.mark.parametrize("wire", [FP8_BLOCKS, INT8_ROWS], ids=str)
def test_only_powers_of_two_are_packed(wire: WireFormat) -> None:
    data = torch.zeros(2, 128, dtype=wire.dtype.torch_dtype)
    message = f"packed of {wire} with scale_dtype=torch.float32; only torch.float8_e8m0fnu fits"
    with pytest.raises(ConfigError, match=f"RowReading: .*{message}"):
        RowReading(format=wire, scale_layout=PACKED_COLUMNS)
    with pytest.raises(ConfigError, match=f"WireTensor: .*{message}"):
        WireTensor(data=data, format=wire, scale_layout=ScaleLayout(packed=True))
    assert RowReading(format=FP8_EXPONENTS, scale_layout=PACKED_COLUMNS)


def test_unquantised_rows_have_no_layout_of_scales() -> None:
    with pytest.raises(ConfigError, match=r"RowReading: bf16 with scales .* have no"):
        RowReading(
            format=WireFormat.of(torch.bfloat16),
            scale_layout=ScaleLayout(column_major=True, alignment=4),
        )
