"""The tiled layout: where an element lies, who is cast, and what a refused cast says."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from epcomm import ConfigError
from epcomm.platforms.ascend.formats import (
    ACL_FORMAT_ND,
    ACL_FORMAT_NZ,
    is_nz_aligned,
    to_nd,
    to_nz,
)
from fakes.ascend.formats import format_of, nz_pack, nz_unpack
from tests.cases.fuseep_checkpoint import GOLDEN, assert_golden
from tests.cases.fuseep_formats import device_that_keeps

quick = settings(max_examples=40, deadline=None, derandomize=True)
# Bits of an element: what rows and columns are a multiple of.
ALIGNMENT = {16: (16, 16), 8: (16, 32), 4: (16, 64)}


@quick
@given(st.sampled_from([torch.int8, torch.bfloat16]), st.integers(1, 40), st.integers(1, 70))
def test_elements_lie_where_the_formula_says(
    dtype: torch.dtype, num_rows: int, num_columns: int
) -> None:
    width = 32 if dtype == torch.int8 else 16
    matrices = (torch.arange(2 * num_rows * num_columns) % 100 + 1).to(dtype)
    matrices = matrices.view(2, num_rows, num_columns)
    tiles = nz_pack(matrices)
    assert tiles.shape == (2, -(-num_columns // width), -(-num_rows // 16), 16, width)
    row, column = torch.arange(num_rows)[:, None], torch.arange(num_columns)
    found = tiles[:, column // width, row // 16, row % 16, column % width]
    assert torch.equal(found, matrices)
    # All else is padding.
    assert int((tiles != 0).sum()) == matrices.numel()
    assert torch.equal(nz_unpack(tiles, num_rows, num_columns), matrices)


def test_overhanging_tiles_are_the_golden_ones() -> None:
    golden = GOLDEN["nz_unaligned"]
    row, column = torch.arange(50)[:, None], torch.arange(70)
    matrix = ((7 * row + 3 * column) % 255 - 127).to(torch.int8)
    assert_golden(matrix, golden["in"])
    assert_golden(nz_pack(matrix), golden["storage"])


@pytest.mark.parametrize("bits", ALIGNMENT)
def test_alignment_is_that_of_the_table(bits: int) -> None:
    row_unit, column_unit = ALIGNMENT[bits]
    for rows in (1, 8, 16, 48, 50):
        for columns in (1, 16, 32, 48, 64, 70, 96, 128):
            expected = rows % row_unit == 0 and columns % column_unit == 0
            assert is_nz_aligned(rows, columns, bits) == expected, (rows, columns)


@pytest.mark.parametrize("dtype", [torch.int8, torch.bfloat16])
def test_aligned_matrices_are_cast_and_come_back(dtype: torch.dtype) -> None:
    matrices = torch.randint(1, 100, (2, 16, 64)).to(dtype)
    before = matrices.clone()
    cast = to_nz(matrices)
    assert format_of(cast) == ACL_FORMAT_NZ
    assert (cast.shape, cast.dtype) == (matrices.shape, matrices.dtype)
    assert format_of(to_nd(cast)) == ACL_FORMAT_ND
    assert torch.equal(to_nd(cast), before)
    assert torch.equal(matrices, before)


def test_others_are_left_as_they_are() -> None:
    for columns, dtype in ((48, torch.int8), (24, torch.bfloat16)):
        unaligned = torch.ones(16, columns, dtype=dtype)
        assert to_nz(unaligned) is unaligned
        assert to_nd(unaligned) is unaligned
    without_operators = torch.ones(16, 32, dtype=torch.int8, device="meta")
    assert to_nz(without_operators) is without_operators
    assert to_nd(without_operators) is without_operators


def test_a_device_that_stays_row_major_is_an_error_that_names_the_setting() -> None:
    matrices = torch.ones(16, 32, dtype=torch.int8)
    with device_that_keeps(allows_nz=True):
        assert format_of(to_nz(matrices)) == ACL_FORMAT_NZ
    message = (
        r"weights on cpu have format 2, expected 29 \(NZ\); "
        r"set torch.npu.config.allow_internal_format = True"
    )
    with device_that_keeps(allows_nz=False), pytest.raises(ConfigError, match=message):
        to_nz(matrices)
