"""The errors of y in docs/formats.md are those that follow from the formats alone.

A code is off by half a step at most, and a step follows from the scale of the block. The bound adds
these errors up: those of rows grow at most by the largest singular value of the experts. Expected
is less: errors with an even distribution and random signs, in mean squares.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from epcomm import WireDtype, WireFormat
from epcomm.quantization import dequantize, quantize
from scripts.format_errors import COMBINED, DISPATCHED, ROWS, error_of, layer

BF16 = WireFormat.of(torch.bfloat16)


@dataclass(frozen=True, kw_only=True)
class Error:
    """The norm of the largest errors of all elements, and that of the expected ones."""

    most: Tensor
    expected: Tensor


def error_of_rounding(x: Tensor) -> Error:
    """Return the error of float64 [T, H] in bfloat16, which has 8 significant bits."""
    half_steps = torch.exp2(x.abs().log2().floor() - 8)
    return Error(most=half_steps.norm(), expected=half_steps.norm() / 3**0.5)


def error_of_codes(x: Tensor, wire_format: WireFormat) -> Error:
    """Return the error of bfloat16 rows [T, H] in a format."""
    kind, block = wire_format.dtype, wire_format.scale_block or x.shape[1]
    if not kind.is_quantized:
        return Error(most=torch.zeros(()), expected=torch.zeros(()))
    blocks = x.double().unflatten(1, (-1, block))
    amax = blocks.abs().amax(2, keepdim=True)
    largest = 127 if kind is WireDtype.INT8 else 448 if kind.per_item == 1 else 6
    scales = amax / largest
    if wire_format.has_exponents:
        scales = scales.log2().ceil().exp2()
    if kind.has_row_scale:
        of_rows = amax.amax(1, keepdim=True) / 2688
        of_blocks = (scales / of_rows).float().clamp(min=2.0**-6).to(torch.float8_e4m3fn)
        scales = of_blocks.double() * of_rows
    quotients = blocks.abs() / scales
    steps = torch.ones_like(quotients)
    if kind is not WireDtype.INT8:
        # Number of fraction bits, and the exponent below which steps are equal.
        fraction, least = (3, -6) if kind.per_item == 1 else (1, 0)
        steps = (quotients.log2().floor().clamp(min=least) - fraction).exp2()
    # What becomes 0 or the largest code is off by what it is; other codes by up to half a step.
    expected = torch.where(quotients < steps / 2, quotients, steps / 12**0.5)
    is_largest = quotients > largest - steps / 2
    expected = torch.where(is_largest, (quotients - largest).abs(), expected)
    return Error(most=(scales * steps / 2).norm(), expected=(scales * expected).norm())


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("combined", COMBINED, ids=str)
@pytest.mark.parametrize("dispatched", DISPATCHED, ids=str)
def test_errors_follow_from_the_formats(
    dispatched: WireFormat, combined: WireFormat, rows: str
) -> None:
    x, experts = layer(rows)
    of_all, sent = experts.sum(0), dequantize(quantize(x, dispatched), torch.float64)
    exact, of_rows = x.double() @ of_all, error_of_codes(x, dispatched)
    errors = [
        Error(
            most=of_rows.most * torch.linalg.matrix_norm(of_all, 2),
            expected=of_rows.expected * of_all.norm() / len(of_all) ** 0.5,
        ),
        error_of_rounding(exact),
    ]
    for of_rank in experts:
        sums = sent @ of_rank
        errors += [error_of_rounding(sums), error_of_codes(sums.bfloat16(), combined)]
    found = error_of(dispatched, combined, rows) * exact.norm()
    assert found < sum(each.most for each in errors)
    expected = torch.stack([each.expected for each in errors]).norm()
    # Where blocks have few codes other than 0 (mxfp4 with outliers) errors are not even.
    assert 0.92 < found / expected < 1.03
