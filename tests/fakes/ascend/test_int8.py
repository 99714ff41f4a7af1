"""INT8 rows of the imitations: the golden profiles, and rows without a result."""

from __future__ import annotations

import pytest
import torch

from epcomm.types import Int8Profile
from fakes.ascend.int8 import quantize_rows
from fakes.ascend.undefined import UNDEFINED_INT8
from tests.fakes.ascend.recorded import golden, tensor_of

GOLDEN = golden("ascend_quant_profiles")
X = tensor_of(GOLDEN["x"])


@pytest.mark.parametrize("profile", list(Int8Profile))
def test_golden_profiles_with_undefined_rows_poisoned(profile: Int8Profile) -> None:
    codes, scales = quantize_rows(X, profile)
    expected = GOLDEN["profiles"][profile.value]
    found_bits = [f"{bits & 0xFFFFFFFF:08x}" for bits in scales.view(torch.int32).tolist()]
    for row, bits in enumerate(expected["scale"]["bits"]):
        if bits is None:
            assert codes[row].tolist() == [UNDEFINED_INT8] * X.shape[1]
            assert scales[row] == 0
        else:
            assert codes[row].tolist() == expected["codes"]["values"][row], f"row {row}"
            assert found_bits[row] == bits, f"row {row}"
