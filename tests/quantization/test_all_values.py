"""All values of 16 bits in blocks: floats of 8 and 4 bits by an oracle, all formats by torchao."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

from epcomm import WireDtype, WireFormat, WireTensor
from epcomm.quantization import (
    FP8_FLOAT32_SCALES,
    INT8_PER_TOKEN,
    KNOWN_FORMATS,
    dequantize,
    quantize,
    split_scales,
)
from tests.quantization import oracle
from tests.quantization.rows import all_values, as_bytes, largest_of_blocks

FORMATS = [each for each in KNOWN_FORMATS if each != INT8_PER_TOKEN]
# The last blocks of rows of 200 are short.
ARRANGEMENTS = ("in order", "largest of blocks", "rows of 200")


def arranged(arrangement: str, dtype: torch.dtype, wire_format: WireFormat) -> Tensor:
    if arrangement == "largest of blocks":
        return largest_of_blocks(dtype, wire_format.scale_block or 128)
    return all_values(dtype)[:, : 200 if arrangement == "rows of 200" else None]


def codes_of(wire: WireTensor) -> Tensor:
    """Return one code an element."""
    data = as_bytes(wire.data)
    if wire.format.dtype.per_item == 1:
        return data
    return torch.stack([data & 15, data >> 4], dim=-1).flatten(-2)


@pytest.mark.parametrize("arrangement", ARRANGEMENTS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("wire_format", FORMATS, ids=str)
def test_all_values_have_the_bits_of_the_oracle(
    wire_format: WireFormat, dtype: torch.dtype, arrangement: str
) -> None:
    x = arranged(arrangement, dtype, wire_format)
    wire = quantize(x, wire_format)
    rows, blocks = split_scales(wire)
    expected = oracle.float_rows(
        x.float().numpy(),
        wire_format.dtype.value,
        wire_format.scale_block or 128,
        has_exponents=wire_format.has_exponents,
    )
    scales = blocks if blocks.dtype is torch.float32 else as_bytes(blocks)
    assert np.array_equal(scales.numpy(), expected.scales, equal_nan=scales is blocks)
    assert np.array_equal(codes_of(wire).numpy(), expected.codes)
    if rows is not None:
        assert np.array_equal(rows.numpy(), expected.row_scales)
    found = dequantize(wire, torch.float32).numpy()
    assert np.array_equal(np.isnan(found), np.isnan(expected.values))
    # As bits, in which -0 differs from 0.
    bits = [np.nan_to_num(each).view(np.int32) for each in (found, expected.values)]
    assert np.array_equal(*bits)


def torchao() -> dict[str, Callable[[Tensor], tuple[Tensor, Tensor]]]:
    """Return functions that give the scales of blocks and the data of torchao."""
    mx = pytest.importorskip("torchao.prototype.mx_formats.mx_tensor")
    nv = pytest.importorskip("torchao.prototype.mx_formats.nvfp4_tensor")
    fp8 = pytest.importorskip("torchao.prototype.blockwise_fp8_training.kernels")

    def of_rows(x: Tensor) -> tuple[Tensor, Tensor]:
        scales = [nv.per_tensor_amax_to_scale(row.abs().max()) for row in x]
        parts = [nv.nvfp4_quantize(x[row : row + 1], 16, scale) for row, scale in enumerate(scales)]
        return torch.cat([p[0].view(torch.uint8) for p in parts]), torch.cat([p[1] for p in parts])

    rounding_up = mx.ScaleCalculationMode.RCEIL
    return {
        "fp8_e4m3/128": lambda x: fp8.torch_blockwise_scale_act_quant_lhs(x)[::-1],
        "fp8_e4m3/128/ue8m0": lambda x: mx.to_mx(x, torch.float8_e4m3fn, 128, rounding_up),
        "mxfp8": lambda x: mx.to_mx(x, torch.float8_e4m3fn, 32, rounding_up),
        "mxfp4": lambda x: mx.to_mx(x, torch.float4_e2m1fn_x2, 32, rounding_up),
        "nvfp4": of_rows,
    }


@pytest.mark.parametrize("arrangement", ARRANGEMENTS[:2])
@pytest.mark.parametrize("wire_format", FORMATS, ids=str)
def test_bits_are_those_of_torchao(wire_format: WireFormat, arrangement: str) -> None:
    x = arranged(arrangement, torch.bfloat16, wire_format)
    # torchao has other rules for blocks that are no numbers, and for the least scales.
    blocks = x.view(-1, wire_format.scale_block or 128)
    amax, is_fp8 = blocks.abs().amax(1), wire_format.dtype is WireDtype.FP8_E4M3
    is_usual = blocks.isfinite().all(1) & (amax > (2e-4 if is_fp8 else 2.0**-100))
    if not is_fp8:
        is_usual |= amax == 0
    x = blocks[is_usual][: int(is_usual.sum()) // 16 * 16].view(-1, 16 * blocks.shape[1])
    wire = quantize(x, wire_format)
    scales, data = torchao()[str(wire_format)](x)
    assert torch.equal(as_bytes(wire.data), as_bytes(data))
    found = split_scales(wire)[1]
    if wire_format == FP8_FLOAT32_SCALES:
        # torchao inverts the factor, which is a second rounding; DeepEP does not.
        torch.testing.assert_close(found, scales, rtol=4 * 2.0**-24, atol=0.0)
    else:
        assert torch.equal(as_bytes(found), as_bytes(scales))
