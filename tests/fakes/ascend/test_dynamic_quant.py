"""INT8 rows: the golden profile that divides, smoothing, refusals, rows without a result."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from epcomm.types import Int8Profile
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
