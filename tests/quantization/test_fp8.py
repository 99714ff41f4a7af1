"""FP8: bits of a recording and of a table, layouts of rows and outputs, refusals."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from epcomm import ConfigError, ShapeError, WireDtype, WireFormat, WireTensor
from epcomm.quantization import (
    FP8_FLOAT32_SCALES,
    FP8_POWER_OF_TWO_SCALES,
    INT8_PER_TOKEN,
    dequantize,
    quantize,
)
from tests.quantization import oracle
from tests.quantization.rows import INF, as_bytes, assert_same_bits, varied_rows

CONTRACT = Path(__file__).parents[1] / "contracts" / "deep_ep_fp8_rows.json"
RECORDED = json.loads(CONTRACT.read_text("utf-8"))["rows"]
FORMATS = [
    pytest.param(FP8_FLOAT32_SCALES, id="float32 scales"),
    pytest.param(FP8_POWER_OF_TWO_SCALES, id="power-of-two scales"),
]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def bits_of(number: float) -> str:
    return np.float32(number).tobytes()[::-1].hex()


@pytest.mark.parametrize("row", RECORDED, ids=lambda row: f"amax {row['x'][2]}")
def test_recorded_rows_are_bit_equal(row: dict) -> None:
    x = torch.full((1, 256), float(row["x"][2]), dtype=torch.bfloat16)
    x[0, :2] = torch.tensor(row["x"][:2])
    wire = quantize(x, FP8_FLOAT32_SCALES)
    assert [bits_of(scale) for scale in wire.scales[0, :1].tolist()] == [row["float32"]["bits"]]
    assert wire.data[0, :3].float().tolist() == row["float32"]["codes"]
    wire = quantize(x, FP8_POWER_OF_TWO_SCALES)
    assert as_bytes(wire.scales)[0, 0].item() == row["power_of_two"]["byte"]
    assert wire.data[0, :3].float().tolist() == row["power_of_two"]["codes"]


def test_power_of_two_scales_equal_frexp_at_every_boundary() -> None:
    # Each power of two times 448, and the next numbers on both sides, over the range of float32.
    boundary = torch.ldexp(torch.full((128,), 1.75), torch.arange(-4, 124))
    below = torch.nextafter(boundary, torch.zeros(()))
    above = torch.nextafter(boundary, torch.full((), INF))
    amax = torch.cat([boundary, below, above, torch.tensor([1e-4, 3.4028234663852886e38])])
    wire = quantize(amax.unsqueeze(1), FP8_POWER_OF_TWO_SCALES)
    expected = [
        oracle.smallest_exponent(max(a, float(np.float32(1e-4)))) + 127 for a in amax.tolist()
    ]
    assert as_bytes(wire.scales).flatten().tolist() == expected


@pytest.mark.parametrize("wire_format", [*FORMATS, INT8_PER_TOKEN])
def test_no_tokens(wire_format: WireFormat) -> None:
    wire = quantize(torch.zeros(0, 300), wire_format)
    assert wire.data.shape == (0, 300)
    assert wire.scales.shape == (0, 3 if wire_format.scale_block else 1)
    assert dequantize(wire, torch.bfloat16).shape == (0, 300)


@pytest.mark.parametrize("wire_format", [*FORMATS, INT8_PER_TOKEN])
def test_leading_dimensions_and_strides_change_nothing(wire_format: WireFormat) -> None:
    x = varied_rows(300, torch.bfloat16)
    strided = torch.empty(12, 400, dtype=torch.bfloat16)[:, :300].copy_(x)
    flat = quantize(x, wire_format)
    assert_same_bits(quantize(strided, wire_format), flat)
    masked = quantize(x.view(3, 4, 300), wire_format)
    assert masked.data.shape == (3, 4, 300)
    assert masked.scales.shape == (3, 4, flat.scales.shape[1])
    assert torch.equal(as_bytes(masked.data).flatten(0, 1), as_bytes(flat.data))
    restored = dequantize(masked, torch.float32).flatten(0, 1)
    assert torch.equal(restored.nan_to_num(), dequantize(flat, torch.float32).nan_to_num())


def test_one_scale_a_row() -> None:
    per_row = replace(FP8_FLOAT32_SCALES, scale_block=0)
    x = varied_rows(37, torch.float32)
    found, expected = quantize(x, per_row), quantize(x, replace(per_row, scale_block=37))
    assert_same_bits(found, replace(expected, format=per_row))
    restored, wanted = (dequantize(each, torch.float32)[:5] for each in (found, expected))
    assert torch.equal(restored, wanted)


@pytest.mark.parametrize("wire_format", [*FORMATS, INT8_PER_TOKEN])
def test_output_may_lie_in_rows_of_a_message(wire_format: WireFormat) -> None:
    x = varied_rows(300, torch.bfloat16)
    scale_bytes = wire_format.scale_bytes(300)
    assert wire_format.scale_dtype is not None
    rows = torch.full((12, 352), 0xA5, dtype=torch.uint8)
    out = WireTensor(
        data=rows[:, :300].view(wire_format.dtype.torch_dtype),
        format=wire_format,
        scales=rows[:, 304 : 304 + scale_bytes].view(wire_format.scale_dtype),
    )
    assert quantize(x, wire_format, out=out) is out
    assert_same_bits(out, quantize(x, wire_format))
    assert bool((rows[:, 300:304] == 0xA5).all())
    assert bool((rows[:, 304 + scale_bytes :] == 0xA5).all())


def test_wrong_output_is_refused_with_both_sides() -> None:
    out = quantize(torch.zeros(2, 256), FP8_FLOAT32_SCALES)
    with pytest.raises(ShapeError, match=r"\[2, 256\].*expected.*\[3, 256\]"):
        quantize(torch.zeros(3, 256), FP8_FLOAT32_SCALES, out=out)
    with pytest.raises(ShapeError, match=r"float32, .*, expected .*float8_e8m0fnu"):
        quantize(torch.zeros(2, 256), FP8_POWER_OF_TWO_SCALES, out=out)


@pytest.mark.parametrize("dtype", [each for each in WireDtype if each.is_quantized])
def test_rows_that_need_gradients_have_the_same_codes(dtype: WireDtype) -> None:
    x, wire_format = varied_rows(64, torch.float32), WireFormat(dtype=dtype)
    found = quantize(x.clone().requires_grad_(), wire_format)
    assert not found.scales.requires_grad
    assert_same_bits(found, quantize(x, wire_format))


def test_wrong_formats_and_inputs_are_refused() -> None:
    with pytest.raises(ShapeError, match=r"\[1, 7\], expected .* multiple of 2"):
        quantize(torch.zeros(1, 7), WireFormat(dtype=WireDtype.NVFP4))
    with pytest.raises(ShapeError, match=r"torch\.float64, expected bfloat16"):
        quantize(torch.zeros(1, 8, dtype=torch.float64), FP8_FLOAT32_SCALES)
    with pytest.raises(ShapeError, match=r"\[1, 0\], expected"):
        quantize(torch.zeros(1, 0), FP8_FLOAT32_SCALES)
    with pytest.raises(ShapeError, match=r"\[8\], expected"):
        quantize(torch.zeros(8), FP8_FLOAT32_SCALES)
    with pytest.raises(ConfigError, match="logfmt10, which only a package reads and writes"):
        quantize(torch.zeros(1, 8), WireFormat(dtype=WireDtype.LOGFMT10))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_unquantised_formats_cast(dtype: torch.dtype) -> None:
    x = torch.randn(3, 5)
    wire = quantize(x, WireFormat.of(dtype))
    assert wire.scales is None
    assert torch.equal(wire.data, x.to(dtype))
    assert torch.equal(dequantize(wire, torch.float32), x.to(dtype).float())
    out = WireTensor(data=torch.empty(3, 5, dtype=dtype), format=WireFormat.of(dtype))
    assert torch.equal(quantize(x, out.format, out=out).data, wire.data)
