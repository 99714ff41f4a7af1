"""Tokens copied and sorted: golden cases, a plain reference, refusals, undefined tails."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fakes.ascend import limits
from fakes.ascend.undefined import UNDEFINED_INT, UNDEFINED_INT8
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


@given(
    seed=st.integers(0, 1 << 30),
    num_tokens=st.integers(0, 7),
    num_choices=st.integers(1, 4),
    expert_range=st.sampled_from([None, (0, 6), (0, 1), (2, 5), (5, 6)]),
)
@settings(max_examples=40, deadline=None)
def test_rows_against_loops(
    seed: int, num_tokens: int, num_choices: int, expert_range: tuple[int, int] | None
) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(num_tokens, 5, generator=generator)
    ids = torch.randint(6, (num_tokens, num_choices), generator=generator, dtype=torch.int32)
    first, last = expert_range or (0, 6)
    wanted = [
        (expert, token, choice)
        for expert in range(first, last)
        for token in range(num_tokens)
        for choice in range(num_choices)
        if ids[token, choice] == expert
    ]
    counts = [sum(row[0] == expert for row in wanted) for expert in range(first, last)]
    options: dict[str, Any] = {"active_expert_range": expert_range} if expert_range else {}
    with limits.soc("A3", size_limits=False):
        gathered = init_routing(x, ids, expert_num=6, expert_tokens_num_type=1, **options)
        scattered = init_routing(x, ids, expert_num=6, row_idx_type=1, **options)
        pairs = init_routing(x, ids, expert_num=6, expert_tokens_num_type=2, **options)[2]
    assert gathered[2].tolist() == counts
    assert scattered[2].tolist() == torch.tensor(counts).cumsum(0).tolist()
    some = [[first + i, count] for i, count in enumerate(counts) if count]
    assert pairs[: len(some)].tolist() == some
    assert (pairs[len(some) :] == UNDEFINED_INT).all()
    rows = gathered[0]
    assert rows[: len(wanted)].tolist() == [x[token].tolist() for _, token, _ in wanted]
    assert rows[len(wanted) :].isnan().all()
    where = {(token, choice): i for i, (_, token, choice) in enumerate(wanted)}
    assert gathered[1].tolist() == [
        where.get((token, choice), -1)
        for token in range(num_tokens)
        for choice in range(num_choices)
    ]
    assert scattered[1][: len(wanted)].tolist() == [
        token * num_choices + choice for _, token, choice in wanted
    ]
    assert (scattered[1][len(wanted) :] == UNDEFINED_INT).all()


def test_int8_rows_without_a_defined_result() -> None:
    x = torch.tensor([[0.0, 0.0], [1.0, -127.0]])
    ids = torch.tensor([[0], [0]], dtype=torch.int32)
    rows, _, _, scales = init_routing(x, ids, quant_mode=1)
    assert rows.tolist() == [[UNDEFINED_INT8] * 2, [1, -127]]
    assert scales.tolist() == [0.0, 1.0]
