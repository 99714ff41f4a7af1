"""MXFP8, MXFP4 and NVFP4: bits over all bfloat16 values, errors, zeros and what is no number."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from epcomm import WireDtype, WireFormat, WireTensor
from epcomm.quantization import dequantize, quantize, split_scales
from tests.quantization import oracle
from tests.quantization.rows import INF, NAN, all_bfloat16, as_bytes

MXFP8, MXFP4, NVFP4 = (
    WireFormat(dtype=dtype) for dtype in (WireDtype.MXFP8, WireDtype.MXFP4, WireDtype.NVFP4)
)
FORMATS = [MXFP8, MXFP4, NVFP4]
# The largest code, and half the step between the two largest.
MOST = {MXFP8: (448.0, 16.0), MXFP4: (6.0, 1.0), NVFP4: (6.0, 1.0)}


def codes_of(wire: WireTensor) -> torch.Tensor:
    """Return one code an element."""
    data = as_bytes(wire.data)
    if wire.format.dtype.per_item == 1:
        return data
    return torch.stack([data & 15, data >> 4], dim=-1).flatten(-2)


@pytest.mark.parametrize("wire_format", FORMATS, ids=str)
@pytest.mark.parametrize("is_shuffled", [False, True], ids=["sorted", "shuffled"])
def test_all_bfloat16_values_have_the_bits_of_the_oracle(
    wire_format: WireFormat, is_shuffled: bool
) -> None:
    x = all_bfloat16(is_shuffled=is_shuffled)
    wire = quantize(x, wire_format)
    rows, blocks = split_scales(wire)
    expected = oracle.micro_rows(x.float().numpy(), wire_format.dtype.value)
    assert as_bytes(blocks).numpy().tolist() == expected.scales.tolist()
    assert codes_of(wire).numpy().tolist() == expected.codes.tolist()
    if rows is not None:
        assert rows.numpy().tolist() == expected.row_scales.tolist()
    found = dequantize(wire, torch.float32).numpy()
    assert np.array_equal(found, expected.values, equal_nan=True)


@pytest.mark.parametrize("wire_format", FORMATS, ids=str)
def test_error_is_half_a_step_of_the_largest_code(wire_format: WireFormat) -> None:
    x = torch.randn(64, 200, generator=torch.Generator().manual_seed(1)) * 10
    wire = quantize(x, wire_format)
    rows, blocks = split_scales(wire)
    scales = blocks.double() * (1.0 if rows is None else rows.double())
    block = wire_format.scale_block
    assert block is not None
    scales = scales.repeat_interleave(block, dim=1)[:, :200]
    error = (dequantize(wire, torch.float32).double() - x.double()).abs()
    most, half_step = MOST[wire_format]
    # The scale of nvfp4 is up to a sixteenth too small, and products have a rounding or two.
    assert (error <= half_step * scales * (1 + 2.0**-20)).all()
    assert (x.abs() <= most * scales * (1 + (1 / 16 if rows is not None else 0))).all()


@pytest.mark.parametrize("wire_format", FORMATS, ids=str)
@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_a_block_that_is_no_number_is_nan_and_its_neighbours_are_not(
    value: float, wire_format: WireFormat
) -> None:
    x = torch.ones(2, 96)
    x[1, 40] = value
    block = wire_format.scale_block
    assert block is not None
    first = 40 // block * block
    restored = dequantize(quantize(x, wire_format), torch.float32)
    assert restored[1, first : first + block].isnan().all()
    restored[1, first : first + block] = 1.0
    # Of nvfp4, 1 is the largest of its row, so that its scale is exact but for a rounding.
    assert torch.allclose(restored, torch.ones(2, 96), rtol=2.0**-20)


@pytest.mark.parametrize("wire_format", FORMATS, ids=str)
def test_zeros_have_codes_of_zero_and_keep_their_sign(wire_format: WireFormat) -> None:
    x = torch.zeros(1, 64)
    x[0, 1::2] = -0.0
    restored = dequantize(quantize(x, wire_format), torch.float32)
    assert torch.equal(as_bytes(restored), as_bytes(x))


def torchao() -> dict[str, Callable[[torch.Tensor], tuple[torch.Tensor, torch.Tensor]]]:
    """Return functions that give the scales of blocks and the data of torchao."""
    mx = pytest.importorskip("torchao.prototype.mx_formats.mx_tensor")
    nv = pytest.importorskip("torchao.prototype.mx_formats.nvfp4_tensor")

    def of_rows(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scales = [nv.per_tensor_amax_to_scale(row.abs().max()) for row in x]
        parts = [nv.nvfp4_quantize(x[row : row + 1], 16, scale) for row, scale in enumerate(scales)]
        return torch.cat([p[0].view(torch.uint8) for p in parts]), torch.cat([p[1] for p in parts])

    rounding_up = mx.ScaleCalculationMode.RCEIL
    return {
        "mxfp8": lambda x: mx.to_mx(x, torch.float8_e4m3fn, 32, rounding_up),
        "mxfp4": lambda x: mx.to_mx(x, torch.float4_e2m1fn_x2, 32, rounding_up),
        "nvfp4": of_rows,
    }


@pytest.mark.parametrize("wire_format", FORMATS, ids=str)
@pytest.mark.parametrize("is_shuffled", [False, True], ids=["sorted", "shuffled"])
def test_bits_are_those_of_torchao(wire_format: WireFormat, is_shuffled: bool) -> None:
    x = all_bfloat16(is_shuffled=is_shuffled)
    # torchao has other rules for blocks that are no numbers, and for the least scales.
    is_usual = x.isfinite() & ((x.abs() > 2.0**-100) | (x == 0))
    x = x[is_usual][: int(is_usual.sum()) // 256 * 256].view(-1, 256)
    wire = quantize(x, wire_format)
    scales, data = torchao()[str(wire_format)](x)
    assert torch.equal(as_bytes(split_scales(wire)[1]), as_bytes(scales))
    assert torch.equal(as_bytes(wire.data), as_bytes(data))
