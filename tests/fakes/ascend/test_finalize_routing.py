"""The final routing: golden cases and a refusal."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.fakes.ascend.recorded import assert_equals, golden, optional_tensor, tensor_of

GOLDEN = golden("ascend_init_routing")
TENSORS = [
    "expanded_permuted_rows",
    "skip1",
    "skip2",
    "bias",
    "scales",
    "expanded_src_to_dst_row",
    "export_for_source_row",
]


@pytest.mark.parametrize("case", GOLDEN["finalize_routing"], ids=lambda case: case["id"])
def test_golden_finalize(case: dict[str, Any]) -> None:
    out = torch.ops.npu.npu_moe_finalize_routing(
        *[optional_tensor(case[name]) for name in TENSORS], **case["call"]
    )
    assert_equals(out, case["expected"]["out"])


def test_golden_finalize_refuses() -> None:
    (case,) = GOLDEN["must_raise"]
    tensors = {
        **dict.fromkeys(TENSORS),
        "expanded_permuted_rows": torch.zeros(10, 2),
        "expanded_src_to_dst_row": tensor_of(case["expanded_src_to_dst_row"]),
        "scales": torch.ones(5, 2),
    }
    with pytest.raises(RuntimeError, match=r"mode=2.* holds \[-1\], expected 0 to 9"):
        torch.ops.npu.npu_moe_finalize_routing(**tensors, drop_pad_mode=case["drop_pad_mode"])
