"""Gating: golden cases, epcomm's own definition of routing, ties, limits, undefined rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from epcomm.routing.reference import route
from epcomm.routing.spec import CorrectionBias, EpsilonMode, RoutingSpec, ScoreFunction
from fakes.ascend import limits
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


@given(
    seed=st.integers(0, 1 << 30),
    norm_type=st.sampled_from([0, 1]),
    renorm=st.booleans(),
    with_bias=st.booleans(),
    groups=st.sampled_from([(1, 1), (4, 2), (4, 4), (8, 3), (2, 1)]),
    mode=st.sampled_from([0, 1]),
    k=st.integers(1, 8),
    num_tokens=st.sampled_from([0, 1, 5]),
)
@settings(max_examples=60, deadline=None)
def test_gating_agrees_with_the_reference(
    seed: int,
    norm_type: int,
    renorm: bool,
    with_bias: bool,
    groups: tuple[int, int],
    mode: int,
    k: int,
    num_tokens: int,
) -> None:
    """Few distinct logits, so that ties are common."""
    num_experts, (group_count, k_group) = 32, groups
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randint(-6, 7, (num_tokens, num_experts), generator=generator) / 4
    bias = torch.randint(-3, 4, (num_experts,), generator=generator) / 8 if with_bias else None
    renormalises = renorm or norm_type == 1
    spec = RoutingSpec(
        top_k=k,
        score_function=ScoreFunction.SIGMOID if norm_type else ScoreFunction.SOFTMAX,
        correction_bias=CorrectionBias.SELECTION if with_bias else CorrectionBias.NONE,
        num_groups=group_count,
        topk_groups=k_group,
        group_score_top_n=mode + 1,
        renormalize=renormalises,
        epsilon_mode=EpsilonMode.ADDED if renormalises else EpsilonMode.NONE,
        epsilon=1e-20 if renormalises else 0.0,
        routed_scaling_factor=2.5,
    )
    expected = route(logits, spec, correction_bias=bias)
    with limits.soc("A3", size_limits=False):
        y, ids, _ = torch.ops.npu.npu_moe_gating_top_k(
            logits,
            k,
            bias=bias,
            k_group=k_group,
            group_count=group_count,
            group_select_mode=mode,
            renorm=renorm,
            norm_type=norm_type,
            routed_scaling_factor=2.5,
        )
    assert torch.equal(ids.long(), expected.topk_ids)
    torch.testing.assert_close(y, expected.topk_weights, rtol=RTOL, atol=0.0)


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
