"""INT8: five profiles bit-equal to golden rows and to numpy, rows without a defined result."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from epcomm import ConfigError, ShapeError, WireDtype, WireFormat, WireTensor
from epcomm.quantization import INT8_PER_TOKEN, Int8Profile, dequantize, quantize
from tests.quantization import oracle
from tests.quantization.rows import all_values, half_neighbours, largest_of_blocks

CONTRACT = Path(__file__).parents[1] / "contracts" / "ascend_quant_profiles.json"
GOLDEN = json.loads(CONTRACT.read_text("utf-8"))
X = torch.tensor(GOLDEN["x"]["values"], dtype=torch.bfloat16)
PROFILES = list(Int8Profile)


def bits_of(scales: torch.Tensor) -> list[str]:
    return [f"{bits & 0xFFFFFFFF:08x}" for bits in scales.flatten().view(torch.int32).tolist()]


@pytest.mark.parametrize("profile", PROFILES)
def test_golden_rows_are_bit_equal(profile: Int8Profile) -> None:
    expected = GOLDEN["profiles"][profile.value]
    wire = quantize(X, INT8_PER_TOKEN, profile=profile)
    num_defined = 0
    for row, (codes, bits) in enumerate(
        zip(expected["codes"]["values"], expected["scale"]["bits"], strict=True)
    ):
        if bits is not None:
            assert wire.data[row].tolist() == codes, f"row {row}"
            assert bits_of(wire.scales[row]) == [bits], f"row {row}"
            num_defined += 1
    assert num_defined >= len(X) - 1


def test_profiles_differ_where_it_is_recorded() -> None:
    wires = {each.value: quantize(X, INT8_PER_TOKEN, profile=each) for each in PROFILES}
    # Most profiles do not define a row of zeros.
    (zeros,) = [row for row in range(len(X)) if not X[row].any()]
    assert zeros == GOLDEN["zero_row"]["row"]
    rows = [row for row in range(len(X)) if row != zeros]
    for pair, recorded in GOLDEN["where_they_differ"].items():
        first, second = (wires[name] for name in pair.split("/"))
        codes = (first.data != second.data).any(1)
        scales = (first.scales.view(torch.int32) != second.scales.view(torch.int32)).any(1)
        for name, differs in (("codes", codes), ("scale", scales)):
            found = [row for row in rows if differs[row]]
            assert found == recorded[f"rows_with_other_{name}"], (pair, name)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("profile", PROFILES)
def test_all_values_have_the_bits_of_the_oracle(profile: Int8Profile, dtype: torch.dtype) -> None:
    check_bits(all_values(dtype), profile)
    check_bits(largest_of_blocks(dtype, 16).view(-1, 16), profile)


def check_bits(x: torch.Tensor, profile: Int8Profile) -> None:
    wire = quantize(x, INT8_PER_TOKEN, profile=profile)
    codes, scales = oracle.int8_rows(x.float().numpy(), profile.value)
    assert np.array_equal(wire.data.numpy(), codes)
    assert np.array_equal(wire.scales.numpy(), scales, equal_nan=True)


@pytest.mark.parametrize("profile", PROFILES)
def test_neighbours_of_halves(profile: Int8Profile) -> None:
    """The float32 below 0.5, plus 0.5, is 1: only a cut to float16 keeps it below."""
    x = half_neighbours()
    wire = quantize(x, INT8_PER_TOKEN, profile=profile)
    codes, scales = oracle.int8_rows(x.numpy(), profile.value)
    assert scales == 1.0
    assert wire.data.tolist() == codes.tolist()
    below_half = {Int8Profile.TRITON: 1}.get(profile, 0)
    assert wire.data[0, 1].item() == below_half


def test_wrong_formats_and_inputs_are_refused() -> None:
    in_blocks = WireFormat(dtype=WireDtype.INT8, scale_block=128, scale_dtype=torch.float32)
    with pytest.raises(ConfigError, match=r"int8/128, expected int8/0"):
        quantize(torch.zeros(1, 8), in_blocks)
    wire = WireTensor(data=torch.zeros(1, 8), format=in_blocks, scales=torch.zeros(1, 1))
    with pytest.raises(ConfigError, match=r"int8/128, expected int8/0"):
        dequantize(wire, torch.float32)
    with pytest.raises(ShapeError, match=r"torch\.int32, expected"):
        quantize(torch.zeros(1, 8, dtype=torch.int32), INT8_PER_TOKEN)
