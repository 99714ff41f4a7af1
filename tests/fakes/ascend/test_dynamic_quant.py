"""INT8 rows: the golden profile that divides, smoothing, refusals, rows without a result."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from epcomm.types import Int8Profile
from fakes.ascend import limits
from fakes.ascend.int8 import quantize_rows
from fakes.ascend.undefined import UNDEFINED_INT8
from tests.fakes.ascend.recorded import golden, tensor_of

GOLDEN = golden("ascend_quant_profiles")
X = tensor_of(GOLDEN["x"])


def dynamic_quant(x: torch.Tensor, **options: Any) -> list[torch.Tensor]:  # noqa: ANN401
    return list(torch.ops.npu.npu_dynamic_quant(x, **options))


def assert_golden(codes: torch.Tensor, scales: torch.Tensor, profile: str) -> None:
    expected = GOLDEN["profiles"][profile]
    found_bits = [f"{bits & 0xFFFFFFFF:08x}" for bits in scales.view(torch.int32).tolist()]
    for row, bits in enumerate(expected["scale"]["bits"]):
        if bits is None:
            assert codes[row].tolist() == [UNDEFINED_INT8] * X.shape[1]
            assert scales[row] == 0
        else:
            assert codes[row].tolist() == expected["codes"]["values"][row], f"row {row}"
            assert found_bits[row] == bits, f"row {row}"


def test_golden_dynamic_quant() -> None:
    codes, scales = dynamic_quant(X)
    assert (codes.dtype, scales.dtype) == (torch.int8, torch.float32)
    assert_golden(codes, scales, "div")


@pytest.mark.parametrize("profile", list(Int8Profile))
def test_golden_profiles_with_undefined_rows_poisoned(profile: Int8Profile) -> None:
    assert_golden(*quantize_rows(X, profile), profile.value)


@pytest.mark.parametrize("dst_type", [None, 1, torch.int8])
def test_more_dimensions_and_dtype_numbers(dst_type: torch.dtype | int | None) -> None:
    x = X.view(3, 4, 16)
    codes, scales = dynamic_quant(x, dst_type=dst_type)
    assert codes.shape == x.shape
    assert scales.shape == x.shape[:-1]
    assert torch.equal(codes.view(12, 16), dynamic_quant(X)[0])


def test_smooth_scales_multiply_in_float32() -> None:
    generator = torch.Generator().manual_seed(0)
    smooth = (torch.rand(2, 16, generator=generator) + 0.5).bfloat16()
    wanted = [quantize_rows(X.float() * line.float(), Int8Profile.DIV) for line in smooth]
    codes, scales = dynamic_quant(X, smooth_scales=smooth[0])
    assert torch.equal(codes, wanted[0][0])
    assert torch.equal(scales, wanted[0][1])
    ends = torch.tensor([5, 12], dtype=torch.int32)
    codes, scales = dynamic_quant(X, smooth_scales=smooth, group_index=ends)
    assert torch.equal(codes, torch.cat([wanted[0][0][:5], wanted[1][0][5:]]))
    assert torch.equal(scales, torch.cat([wanted[0][1][:5], wanted[1][1][5:]]))


def test_rows_that_are_no_numbers() -> None:
    x = X.clone()
    x[4, 3] = float("nan")
    codes, scales = dynamic_quant(x)
    assert codes[4].tolist() == [UNDEFINED_INT8] * 16
    assert scales.isnan().nonzero().tolist() == [[4]]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"x": X[0]}, r"input is \[16\]"),
        ({"x": X.float()}, "input is .*float32, expected .* float16 or bfloat16"),
        ({"smooth_scales": torch.ones(16)}, "smooth_scales is .*float32, expected"),
        ({"smooth_scales": torch.ones(8).bfloat16()}, r"smooth_scales is \[8\]"),
        ({"group_index": torch.tensor([12])}, "group_index comes without smooth_scales"),
        ({"dst_type": torch.float8_e4m3fn}, "dst_type=torch.float8_e4m3fn runs on A5, this is A3"),
        ({"dst_type": 999}, "dtype number is 999, expected one of 0 .torch.uint8."),
    ],
    ids=str,
)
def test_dynamic_quant_refuses(options: dict[str, Any], message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        dynamic_quant(**{"x": X, **options})


@pytest.mark.parametrize("ends", [[5, 11], [7, 5], [13, 12]])
def test_groups_end_with_the_rows(ends: list[int]) -> None:
    smooth = torch.ones(2, 16).bfloat16()
    index = torch.tensor(ends, dtype=torch.int32)
    with pytest.raises(RuntimeError, match=r"group_index is .* the last 12, the rows"):
        dynamic_quant(X, smooth_scales=smooth, group_index=index)
    with limits.soc("A5"), pytest.raises(RuntimeError, match="group_index runs on A2 and A3"):
        dynamic_quant(X, smooth_scales=smooth, group_index=index)


@pytest.mark.parametrize(
    "options",
    [{"quant_mode": "pertensor"}, {"dst_type_max": 15.0}, {"dst_type": torch.int32}],
    ids=str,
)
def test_unmodelled_features_give_no_result(options: dict[str, Any]) -> None:
    with pytest.raises(NotImplementedError, match="is not modelled"):
        dynamic_quant(X, **options)
