"""MXFP8, MXFP4 and NVFP4: errors, zeros and what is no number."""

from __future__ import annotations

import pytest
import torch

from epcomm import WireDtype, WireFormat
from epcomm.quantization import dequantize, quantize, split_scales
from tests.quantization.rows import INF, NAN, as_bytes

MXFP8, MXFP4, NVFP4 = (
    WireFormat(dtype=dtype) for dtype in (WireDtype.MXFP8, WireDtype.MXFP4, WireDtype.NVFP4)
)
FORMATS = [MXFP8, MXFP4, NVFP4]
# The largest code, and half the step between the two largest.
MOST = {MXFP8: (448.0, 16.0), MXFP4: (6.0, 1.0), NVFP4: (6.0, 1.0)}


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
