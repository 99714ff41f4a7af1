"""FRACTAL_NZ: the matrices that may have it, and the check that a cast produced it."""

import pytest
import torch

from epcomm import ConfigError
from epcomm.platforms.ascend.formats import ACL_FORMAT_NZ, alignment_reasons, to_nz
from fakes.ascend import registry
from fakes.ascend.formats import as_nd, format_of, nz_pack
from tests.cases.fuseep_checkpoint import GOLDEN, assert_golden
from tests.cases.fuseep_formats import device_that_keeps


@pytest.mark.parametrize(
    ("shape", "dtype", "reasons"),
    [
        ((2, 16, 32), torch.int8, []),
        ((2, 48, 96), torch.int8, []),
        ((2, 16, 16), torch.bfloat16, []),
        ((2, 8, 32), torch.int8, ["w has K = 8, expected a multiple of 16 in NZ"]),
        ((2, 16, 16), torch.int8, ["w has N = 16, expected a multiple of 32 for torch.int8 in NZ"]),
        (
            (17, 24),
            torch.bfloat16,
            [
                "w has K = 17, expected a multiple of 16 in NZ",
                "w has N = 24, expected a multiple of 16 for torch.bfloat16 in NZ",
            ],
        ),
    ],
)
def test_matrix_fills_tiles(shape: tuple[int, ...], dtype: torch.dtype, reasons: list[str]) -> None:
    assert alignment_reasons("w", torch.zeros(shape, dtype=dtype)) == reasons


def test_a_view_becomes_a_tiled_copy_and_stays_as_it_is() -> None:
    registry.register()
    stored = torch.randn(2, 32, 48).bfloat16().requires_grad_()
    before = stored.detach().clone()
    tiled = to_nz(stored.transpose(1, 2))
    assert format_of(tiled) == ACL_FORMAT_NZ
    assert not tiled.requires_grad
    assert torch.equal(as_nd("test", tiled), before.transpose(1, 2))
    assert torch.equal(stored, before)


def test_overhanging_tiles_are_the_golden_ones() -> None:
    golden = GOLDEN["nz_unaligned"]
    row, column = torch.arange(50)[:, None], torch.arange(70)
    matrix = ((7 * row + 3 * column) % 255 - 127).to(torch.int8)
    assert_golden(matrix, golden["in"])
    assert_golden(nz_pack(matrix), golden["storage"])


def test_a_device_that_stays_row_major_is_an_error_that_names_the_setting() -> None:
    registry.register()
    matrices = torch.ones(16, 32, dtype=torch.int8)
    with device_that_keeps(allows_nz=True):
        assert format_of(to_nz(matrices)) == ACL_FORMAT_NZ
    message = (
        r"weights on cpu have format 2, expected 29 \(NZ\); "
        r"set torch.npu.config.allow_internal_format = True"
    )
    with device_that_keeps(allows_nz=False), pytest.raises(ConfigError, match=message):
        to_nz(matrices)
