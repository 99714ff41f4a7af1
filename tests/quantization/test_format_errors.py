"""The errors of y in docs/formats.md are those that follow from the formats alone.

A code is off by half a step at most, and a step follows from the scale of the block. The bound adds
these errors up: those of rows grow at most by the largest singular value of the experts. Expected
is less: errors with an even distribution and random signs, in mean squares.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from epcomm import WireDtype, WireFormat
from epcomm.quantization import dequantize, quantize
from scripts.format_errors import COMBINED, DISPATCHED, ROWS, error_of, layer


def error_of_rounding(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return most and expected error, as norms, of float64 in bfloat16: 8 significant bits."""
    most = torch.exp2(x.abs().log2().floor() - 8).norm()
    return most, most / 3**0.5


def error_of_codes(x: Tensor, wire_format: WireFormat) -> tuple[Tensor, Tensor]:
    """Return most and expected error, as norms, of bfloat16 rows [T, H] in a format."""
    kind, block = wire_format.dtype, wire_format.scale_block or x.shape[1]
    if not kind.is_quantized:
        return torch.zeros(()), torch.zeros(())
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
    return (scales * steps / 2).norm(), (scales * expected).norm()


@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize("combined", COMBINED, ids=str)
@pytest.mark.parametrize("dispatched", DISPATCHED, ids=str)
def test_formats_explain_the_errors(
    dispatched: WireFormat, combined: WireFormat, rows: str
) -> None:
    x, experts = layer(rows)
    of_all, sent = experts.sum(0), dequantize(quantize(x, dispatched), torch.float64)
    exact, (most, expected) = x.double() @ of_all, error_of_codes(x, dispatched)
    growth = torch.linalg.matrix_norm(of_all, 2), of_all.norm() / len(of_all) ** 0.5
    errors = [(most * growth[0], expected * growth[1]), error_of_rounding(exact)]
    for of_rank in experts:
        sums = sent @ of_rank
        errors += [error_of_rounding(sums), error_of_codes(sums.bfloat16(), combined)]
    found = error_of(dispatched, combined, rows) * exact.norm()
    assert found < sum(most for most, _ in errors)
    # Where blocks have few codes other than 0 (mxfp4 with outliers) errors are not even.
    assert 0.92 < found / torch.stack([expected for _, expected in errors]).norm() < 1.03
