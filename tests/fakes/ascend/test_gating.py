"""Gating: golden cases and undefined rows; tests/routing compares it with the reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from fakes.ascend.undefined import UNDEFINED_INT
from tests.fakes.ascend.recorded import assert_equals, golden, optional_tensor, tensor_of

GOLDEN = golden("ascend_gating_top_k")
# Header of the golden file: the order of a float32 softmax sum is free.
RTOL = 1e-6


@pytest.mark.parametrize("case", GOLDEN["gating_top_k"], ids=lambda case: case["id"])
def test_golden_gating(case: dict[str, Any]) -> None:
    x = tensor_of(case["x"])
    y, ids, norm = torch.ops.npu.npu_moe_gating_top_k(
        x, bias=optional_tensor(case["bias"]), **case["call"]
    )
    expected = case["expected"]
    assert_equals(ids, expected["expert_ids"])
    assert_equals(y, expected["y"], rtol=0.0 if case["y_exact"] else RTOL)
    assert norm.shape == x.shape
    assert norm.dtype == torch.float32
    if case["call"]["out_flag"]:
        assert_equals(norm, expected["norm"], rtol=RTOL)
    else:
        assert norm.isnan().all()


def test_rows_with_nan_are_undefined_and_others_are_not() -> None:
    logits = torch.zeros(3, 8)
    logits[1, 5] = float("nan")
    for norm_type, group_count in [(0, 1), (1, 1), (1, 2)]:
        y, ids, _ = torch.ops.npu.npu_moe_gating_top_k(
            logits, 2, norm_type=norm_type, group_count=group_count
        )
        assert y.isnan().any(1).tolist() == [False, True, False]
        assert (ids == UNDEFINED_INT).all(1).tolist() == [False, True, False]
        assert ids[0].tolist() == [0, 1]
