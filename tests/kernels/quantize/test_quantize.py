from dataclasses import dataclass

import pytest
import torch

from epcomm import ShapeError, WireDtype, WireFormat, WireTensor
from epcomm.buffers.row_layout import RowLayout
from epcomm.quantization import (
    FP8_FLOAT32_SCALES,
    FP8_POWER_OF_TWO_SCALES,
    INT8_PER_TOKEN,
    Int8Profile,
    dequantize,
    dequantizer_for,
    quantize,
    quantizer_for,
)
from epcomm.types import align_up
from tests.quantization.rows import (
    SUBNORMAL_ROW,
    all_values,
    as_bytes,
    assert_same_bits,
    half_neighbours,
    largest_of_blocks,
)
from tests.quantization.rows import varied_rows as all_varied_rows

triton = pytest.importorskip("triton")
from epcomm.kernels.launch import IS_INTERPRETED  # noqa: E402

# The interpreter divides by zero where the kernel then discards the quotient.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")

quantize_with_triton = quantizer_for(torch.device("cuda"))
dequantize_with_triton = dequantizer_for(torch.device("cuda"))
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def varied_rows(hidden_size: int, dtype: torch.dtype) -> torch.Tensor:
    """Make varied rows without subnormal bfloat16 numbers, which the interpreter misreads."""
    x = all_varied_rows(hidden_size, dtype)
    if IS_INTERPRETED and dtype == torch.bfloat16:
        x[SUBNORMAL_ROW] = 0.0
    return x


@dataclass(frozen=True, kw_only=True)
class Case:
    id: str
    format: WireFormat
    profile: Int8Profile = Int8Profile.RINT127


def fp8(scale_block: int, scale_dtype: torch.dtype) -> WireFormat:
    return WireFormat(dtype=WireDtype.FP8_E4M3, scale_block=scale_block, scale_dtype=scale_dtype)


MICROSCALED = (WireDtype.MXFP8, WireDtype.MXFP4, WireDtype.NVFP4)
CASES = [
    Case(id="fp8", format=FP8_FLOAT32_SCALES),
    Case(id="fp8 powers of two", format=FP8_POWER_OF_TWO_SCALES),
    Case(id="fp8 blocks of 32", format=fp8(32, torch.float8_e8m0fnu)),
    Case(id="fp8 blocks of 48", format=fp8(48, torch.float32)),
    Case(id="fp8 one scale a row", format=fp8(0, torch.float32)),
    *(Case(id=name.value, format=WireFormat(dtype=name)) for name in MICROSCALED),
    *(Case(id=f"int8 {p.value}", format=INT8_PER_TOKEN, profile=p) for p in Int8Profile),
]


@pytest.mark.parametrize(
    ("hidden_size", "dtype"),
    # The cases cover every size, and every dtype with a short last block.
    [*((size, torch.bfloat16) for size in (1, 37, 128, 1536)), *((515, one) for one in DTYPES)],
    ids=str,
)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_bits_are_those_of_plain_torch(
    case: Case, hidden_size: int, dtype: torch.dtype, device: torch.device
) -> None:
    hidden_size = align_up(hidden_size, case.format.dtype.per_item)
    x = varied_rows(hidden_size, dtype).to(device)
    came = quantize_with_triton(x, case.format, profile=case.profile)
    assert_same_bits(came, quantize(x, case.format, profile=case.profile))
    restored, expected = (each(came, dtype) for each in (dequantize_with_triton, dequantize))
    assert torch.equal(restored.nan_to_num(7.0), expected.nan_to_num(7.0))


@pytest.mark.parametrize("hidden_size", [37, 512])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_rows_of_a_message_are_written_and_nothing_else(
    case: Case, hidden_size: int, device: torch.device
) -> None:
    hidden_size = align_up(hidden_size, case.format.dtype.per_item)
    layout = RowLayout(hidden_size=hidden_size, top_k=3, format=case.format, has_ids=True)
    x = varied_rows(hidden_size, torch.bfloat16).to(device)
    apart = torch.full((12, hidden_size + 27), torch.nan, dtype=x.dtype, device=device)
    apart[:, :hidden_size] = x
    rows = torch.full((12, layout.row_bytes), 0xA5, dtype=torch.uint8, device=device)
    expected = rows.clone()
    quantize(x, case.format, profile=case.profile, out=layout.wire_tensor(expected))
    came = layout.wire_tensor(rows)
    quantize_with_triton(apart[:, :hidden_size], case.format, profile=case.profile, out=came)
    assert torch.equal(rows, expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_all_values(case: Case, dtype: torch.dtype, device: torch.device) -> None:
    check_bits(all_values(dtype), case, device)


# Blocks of fp8_e4m3 have one arithmetic; the smallest ones take the least time.
@pytest.mark.parametrize("case", [*CASES[2:4], *CASES[5:]], ids=lambda case: case.id)
def test_all_values_are_the_largest_of_a_block(case: Case, device: torch.device) -> None:
    # Few fraction bits make many ties; the interpreter misreads subnormal numbers of bfloat16.
    x = largest_of_blocks(torch.bfloat16, case.format.scale_block or 8).float()
    if case.format.dtype is WireDtype.INT8:
        x = x.view(-1, 8)
        if IS_INTERPRETED:
            # All rows would take 40 s. Exponents matter if a factor or scale has an extreme one;
            # otherwise only fractions do.
            bits = x.abs().amax(1).view(torch.int32)
            exponent, fraction = bits >> 23, (bits >> 16) & 0x7F
            x = x[(exponent < 3) | (exponent == 127) | (exponent > 250) | (fraction % 127 == 0)]
            assert len(x) >= 9 * 128 + 2 * 247
    check_bits(x, case, device)


def check_bits(x: torch.Tensor, case: Case, device: torch.device) -> None:
    if IS_INTERPRETED and x.dtype is torch.bfloat16:
        # The interpreter misreads subnormal numbers of bfloat16; as float32 they are normal.
        x = torch.where(x.abs() < torch.finfo(x.dtype).tiny, 0, x)
    x = x.to(device)
    came = quantize_with_triton(x, case.format, profile=case.profile)
    wire = quantize(x, case.format, profile=case.profile)
    assert_same_bits(came, wire)
    restored, expected = (
        each(wire, torch.float32) for each in (dequantize_with_triton, dequantize)
    )
    # NaN has many bits.
    is_nan = expected.isnan()
    assert torch.equal(restored.isnan(), is_nan)
    assert torch.equal(as_bytes(restored[~is_nan]), as_bytes(expected[~is_nan]))


def test_all_ties_and_neighbours_of_e4m3(device: torch.device) -> None:
    codes = torch.arange(0x7F, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    ties = (codes[1:] + codes[:-1]) / 2
    near = [torch.nextafter(ties, torch.tensor(end)) for end in (0.0, 500.0)]
    values = torch.cat([codes, ties, *near])
    # 448 in every block fixes the scale at 1.
    x = torch.stack([torch.full_like(values, 448.0), values, -values], dim=1).to(device)
    wire_format = fp8(0, torch.float8_e8m0fnu)
    assert_same_bits(quantize_with_triton(x, wire_format), quantize(x, wire_format))


@pytest.mark.parametrize("profile", list(Int8Profile))
def test_halves_and_their_neighbours(profile: Int8Profile, device: torch.device) -> None:
    x = half_neighbours().to(device)
    came = quantize_with_triton(x, INT8_PER_TOKEN, profile=profile)
    assert_same_bits(came, quantize(x, INT8_PER_TOKEN, profile=profile))


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_no_tokens(case: Case, device: torch.device) -> None:
    wire = quantize_with_triton(torch.zeros(0, 300, device=device), case.format)
    assert wire.data.shape == (0, 300 // case.format.dtype.per_item)


def test_unquantised_formats_cast(device: torch.device) -> None:
    x = torch.randn(3, 5, device=device)
    wire = quantize_with_triton(x, WireFormat.of(torch.bfloat16))
    assert torch.equal(wire.data, x.bfloat16())


@pytest.mark.parametrize("case", [CASES[0], CASES[1], CASES[8]], ids=lambda case: case.id)
def test_rows_beyond_2_to_the_31_elements(case: Case, device: torch.device) -> None:
    """Use three rows that are 2**30 + 16 elements apart, in mostly untouched memory."""
    stride = 2**30 + 16
    try:
        source = torch.empty(2 * stride + 64, dtype=torch.bfloat16, device=device)
        codes = torch.empty(2 * stride + 64, dtype=torch.uint8, device=device)
    except RuntimeError:
        pytest.skip("not enough memory for 3 * 2**31 bytes")
    x = source.as_strided((3, 64), (stride, 1)).copy_(varied_rows(64, torch.bfloat16)[:3])
    data = codes.as_strided((3, 64), (stride, 1)).view(case.format.dtype.torch_dtype)
    scales = torch.empty(3, 1, dtype=case.format.scale_dtype, device=device)
    out = WireTensor(data=data, format=case.format, scales=scales)
    quantize_with_triton(x, case.format, out=out)
    assert_same_bits(out, quantize(x.contiguous(), case.format))


def test_what_the_kernels_cannot_read_is_refused(device: torch.device) -> None:
    x = torch.zeros(4, 8, device=device)
    with pytest.raises(ShapeError, match=r"hidden_states has shape .*\[1, 8\], expected two"):
        quantize_with_triton(x.t(), INT8_PER_TOKEN)
    with pytest.raises(ShapeError, match=r"hidden_states has shape \[2, 2, 8\].*expected two"):
        quantize_with_triton(x.view(2, 2, 8), FP8_FLOAT32_SCALES)
    with pytest.raises(ShapeError, match=r"\[4, 1\], torch.float32, .*expected.*\[4, 8\]"):
        quantize_with_triton(x, INT8_PER_TOKEN, out=quantize(x[:, :1], INT8_PER_TOKEN))


def test_host_tensors_are_refused_without_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("epcomm.kernels.launch.IS_INTERPRETED", False)
    with pytest.raises(ShapeError, match="hidden_states is on cpu, expected cuda"):
        quantize_with_triton(torch.zeros(1, 8), INT8_PER_TOKEN)
