"""Tokens copied and sorted: golden cases, a plain reference, refusals, undefined tails."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fakes.ascend.undefined import UNDEFINED_INT8
from tests.fakes.ascend.recorded import assert_equals, golden, optional_tensor, tensor_of

GOLDEN = golden("ascend_init_routing")
X = torch.arange(12.0).view(4, 3)
IDS = torch.tensor([[2, 0], [1, 2], [0, 1], [2, 1]], dtype=torch.int32)


def init_routing(x: Tensor = X, expert_idx: Tensor = IDS, **options: Any) -> list[Tensor]:  # noqa: ANN401
    options = {"expert_num": 4, "expert_tokens_num_flag": True, **options}
    return list(torch.ops.npu.npu_moe_init_routing_v2(x, expert_idx, **options))


@pytest.mark.parametrize("case", GOLDEN["init_routing_v2"], ids=lambda case: case["id"])
def test_golden_init_routing(case: dict[str, Any]) -> None:
    found = init_routing(
        tensor_of(case["x"]),
        tensor_of(case["expert_idx"]),
        scale=optional_tensor(case["scale"]),
        **case["call"],
    )
    names = ["expanded_x", "expanded_row_idx", "tokens", "expanded_scale"]
    for name, tensor in zip(names, found, strict=True):
        assert_equals(tensor, case["expected"][name])
    if case["call"]["row_idx_type"] == 0:
        assert int((found[1] >= 0).sum()) == case["expected"]["active_rows"]


def test_int8_rows_without_a_defined_result() -> None:
    x = torch.tensor([[0.0, 0.0], [1.0, -127.0]])
    ids = torch.tensor([[0], [0]], dtype=torch.int32)
    rows, _, _, scales = init_routing(x, ids, quant_mode=1)
    assert rows.tolist() == [[UNDEFINED_INT8] * 2, [1, -127]]
    assert scales.tolist() == [0.0, 1.0]
