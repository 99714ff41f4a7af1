"""The tiled layout: positions of elements, casts, and the message of a refused cast."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from epcomm import ConfigError
from epcomm.platforms.ascend.formats import (
    ACL_FORMAT_NZ,
    to_nz,
)
from fakes.ascend.formats import format_of, nz_pack, nz_unpack
from tests.cases.fuseep_checkpoint import GOLDEN, assert_golden
from tests.cases.fuseep_formats import device_that_keeps

quick = settings(max_examples=40, deadline=None, derandomize=True)


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
    # Everything else is padding.
    assert int((tiles != 0).sum()) == matrices.numel()
    assert torch.equal(nz_unpack(tiles, num_rows, num_columns), matrices)


def test_overhanging_tiles_are_the_golden_ones() -> None:
    golden = GOLDEN["nz_unaligned"]
    row, column = torch.arange(50)[:, None], torch.arange(70)
    matrix = ((7 * row + 3 * column) % 255 - 127).to(torch.int8)
    assert_golden(matrix, golden["in"])
    assert_golden(nz_pack(matrix), golden["storage"])


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
