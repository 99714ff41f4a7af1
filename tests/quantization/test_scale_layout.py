"""Scale layouts: worked memory, inverses, and a refusal that names both sides for every fault."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from epcomm import ShapeError, WireFormat, WireTensor
from epcomm.quantization import (
    FP8_FLOAT32_SCALES,
    FP8_POWER_OF_TWO_SCALES,
    INT8_PER_TOKEN,
    arrange_scales,
    check_scales,
    dequantize,
    quantize,
    row_major,
)
from epcomm.quantization.scale_layout import pack_scales
from epcomm.types import ScaleLayout
from tests.quantization.rows import as_bytes

ROW_MAJOR = ScaleLayout()
COLUMNS = ScaleLayout(column_major=True, alignment=4)
PACKED = ScaleLayout(packed=True)
PACKED_COLUMNS = ScaleLayout(column_major=True, alignment=4, packed=True)
every_layout = pytest.mark.parametrize(
    "layout", [ROW_MAJOR, COLUMNS, PACKED, PACKED_COLUMNS], ids=str
)


def e8m0(values: list[list[int]]) -> Tensor:
    return torch.tensor(values, dtype=torch.uint8).view(torch.float8_e8m0fnu)


def memory_of(view: Tensor) -> list:
    """Return all elements of the memory of a view, in order."""
    return torch.as_strided(
        view, (view.untyped_storage().nbytes() // view.itemsize,), (1,)
    ).tolist()


def test_worked_column_major() -> None:
    view = arrange_scales(torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]), COLUMNS)
    assert view.tolist() == [[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]
    assert view.stride() == (1, 4)
    assert memory_of(view) == [1.0, 3.0, 5.0, 0.0, 2.0, 4.0, 6.0, 0.0]


def test_worked_packing() -> None:
    packed = pack_scales(e8m0([[1, 2, 3, 4, 5], [0xFF, 0, 0, 0x7F, 0xFE]]))
    assert packed.dtype == torch.int32
    assert packed.tolist() == [[0x04030201, 5], [0x7F0000FF, 0xFE]]


def test_recorded_word_of_power_of_two_scales() -> None:
    """Four blocks with the scale 2**-4 are 0x7B7B7B7B in DeepEP's recording."""
    wire = quantize(torch.full((1, 512), 18.0), FP8_POWER_OF_TWO_SCALES)
    assert pack_scales(wire.scales).tolist() == [[0x7B7B7B7B]]


@pytest.mark.parametrize(
    ("num_rows", "num_scales"), [(0, 3), (1, 1), (1, 9), (4, 4), (4, 9), (5, 1), (5, 3), (5, 4)]
)
@pytest.mark.parametrize("batch", [[], [2]], ids=["rows", "masked"])
@every_layout
def test_inverse_restores_all_bits(
    layout: ScaleLayout, batch: list[int], num_rows: int, num_scales: int
) -> None:
    generator = torch.Generator().manual_seed(num_scales)
    shape = (*batch, num_rows, num_scales)

    def restored(arranged: Tensor, layout: ScaleLayout, wire_format: WireFormat) -> Tensor:
        data = torch.empty(*shape[:-1], 128 * num_scales, dtype=torch.float8_e4m3fn)
        scales = row_major(
            WireTensor(data=data, format=wire_format, scales=arranged, scale_layout=layout)
        ).scales
        assert scales is not None
        return scales

    codes = torch.randint(0, 256, shape, generator=generator).to(torch.uint8)
    scales = codes.view(torch.float8_e8m0fnu)
    arranged = arrange_scales(scales, layout)
    assert torch.equal(as_bytes(restored(arranged, layout, FP8_POWER_OF_TWO_SCALES)), codes)
    num_columns = -(-num_scales // 4) if layout.packed else num_scales
    assert arranged.shape == (*batch, num_rows, num_columns)
    if layout.column_major and num_rows:
        assert arranged.stride()[-2:] == (1, -(-num_rows // 4) * 4)
    if not layout.packed:
        floats = torch.randn(shape, generator=generator)
        there = arrange_scales(floats, layout)
        assert torch.equal(restored(there, layout, FP8_FLOAT32_SCALES), floats)


@every_layout
def test_dequantising_reads_every_layout(layout: ScaleLayout) -> None:
    x = torch.randn(5, 700)
    wire = quantize(x, FP8_POWER_OF_TWO_SCALES)
    arranged = replace(wire, scales=arrange_scales(wire.scales, layout), scale_layout=layout)
    assert torch.equal(dequantize(arranged, torch.float32), dequantize(wire, torch.float32))


def test_only_powers_of_two_are_packed() -> None:
    with pytest.raises(ShapeError, match=r"torch\.float32, expected torch\.float8_e8m0fnu"):
        arrange_scales(torch.ones(2, 4), PACKED)


def arranged_wire(wire_format: WireFormat, layout: ScaleLayout, num_rows: int = 5) -> WireTensor:
    wire = quantize(torch.ones(num_rows, 700), wire_format)
    return replace(wire, scales=arrange_scales(wire.scales, layout), scale_layout=layout)


@pytest.mark.parametrize("num_rows", [0, 1, 5])
@every_layout
def test_fitting_scales_pass(layout: ScaleLayout, num_rows: int) -> None:
    wire = arranged_wire(FP8_POWER_OF_TWO_SCALES, layout, num_rows)
    check_scales(wire, layout, caller="grouped_mm")
    if not layout.packed:
        wire = arranged_wire(FP8_FLOAT32_SCALES, layout, num_rows)
        check_scales(wire, layout, caller="grouped_mm")


def test_scales_inside_rows_of_a_message_and_of_masked_batches_pass() -> None:
    wire = arranged_wire(FP8_FLOAT32_SCALES, ROW_MAJOR)
    apart = torch.empty(5, 20)[:, :6].copy_(torch.ones(5, 6))
    apart_wire = replace(wire, scales=apart, scale_layout=None)
    check_scales(apart_wire, ROW_MAJOR, caller="grouped_mm")
    masked = quantize(torch.ones(2, 5, 700), FP8_FLOAT32_SCALES)
    arranged = arrange_scales(masked.scales, COLUMNS)
    in_columns = replace(masked, scales=arranged, scale_layout=COLUMNS)
    check_scales(in_columns, COLUMNS, caller="grouped_mm")
    check_scales(quantize(torch.ones(5, 700), INT8_PER_TOKEN), ROW_MAJOR, caller="grouped_mm")


FLOAT32 = arranged_wire(FP8_FLOAT32_SCALES, ROW_MAJOR)
FLOAT32_COLUMNS = arranged_wire(FP8_FLOAT32_SCALES, COLUMNS)
BYTES = arranged_wire(FP8_POWER_OF_TWO_SCALES, ROW_MAJOR)
UNALIGNED = replace(FLOAT32, scales=torch.ones(6, 5).t(), scale_layout=COLUMNS)


@pytest.mark.parametrize(
    ("wire", "layout", "came", "expected"),
    [
        (replace(FLOAT32, scales=None), ROW_MAJOR, "no scales", "[5, 6] torch.float32, row-major"),
        (replace(FLOAT32, scales=torch.ones(5, 5)), ROW_MAJOR, "[5, 5] torch.float32", "[5, 6]"),
        (
            replace(FLOAT32, scales=torch.ones(5, 6).bfloat16()),
            ROW_MAJOR,
            "[5, 6] torch.bfloat16",
            "[5, 6] torch.float32",
        ),
        (FLOAT32, COLUMNS, "strides [6, 1], row-major", "column-major in multiples of 4"),
        (replace(FLOAT32_COLUMNS, scale_layout=None), ROW_MAJOR, "strides [1, 8]", "row-major"),
        (UNALIGNED, COLUMNS, "strides [1, 5]", "column-major in multiples of 4"),
        (BYTES, PACKED, "[5, 6] torch.float8_e8m0fnu", "[5, 2] torch.int32, row-major, packed"),
    ],
    ids=["none", "columns", "dtype", "order", "says row-major", "not aligned", "not packed"],
)
def test_wrong_scales_are_refused_with_both_sides(
    wire: WireTensor, layout: ScaleLayout, came: str, expected: str
) -> None:
    pattern = f"grouped_mm: scales are .*{re.escape(came)}.* expected .*{re.escape(expected)}"
    with pytest.raises(ShapeError, match=pattern):
        check_scales(wire, layout, caller="grouped_mm")


@every_layout
def test_scales_travel_row_major_and_are_copied_only_where_they_must(layout: ScaleLayout) -> None:
    # Three blocks, which do not fill a word.
    x = torch.arange(5 * 384, dtype=torch.float32).view(5, 384)
    wire = quantize(x, FP8_POWER_OF_TWO_SCALES if layout.packed else FP8_FLOAT32_SCALES)
    given = replace(wire, scales=arrange_scales(wire.scales, layout), scale_layout=layout)
    found = row_major(given)
    assert found.scales.stride(-1) == 1
    assert torch.equal(as_bytes(found.scales), as_bytes(wire.scales))
    assert found.data is wire.data
    is_copy = found.scales.data_ptr() != given.scales.data_ptr()
    assert is_copy == layout.column_major
    apart = replace(wire, data=wire.data.T.contiguous().T)
    assert torch.equal(as_bytes(row_major(apart).data), as_bytes(wire.data))
