"""Permute, unpermute, finalize: golden cases, round trips, refusals."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

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


@pytest.mark.parametrize("case", GOLDEN["token_permute"], ids=lambda case: case["id"])
def test_golden_permute(case: dict[str, Any]) -> None:
    rows, positions = torch.ops.npu.npu_moe_token_permute(
        tensor_of(case["tokens"]), tensor_of(case["indices"])
    )
    assert_equals(rows, case["expected"]["permuted_tokens"])
    assert_equals(positions, case["expected"]["sorted_indices"])


@pytest.mark.parametrize("case", GOLDEN["token_unpermute"], ids=lambda case: case["id"])
def test_golden_unpermute(case: dict[str, Any]) -> None:
    tokens = torch.ops.npu.npu_moe_token_unpermute(
        tensor_of(case["permuted_tokens"]),
        tensor_of(case["sorted_indices"]),
        optional_tensor(case["probs"]),
    )
    assert_equals(tokens, case["expected"]["unpermuted"])


@pytest.mark.parametrize("case", GOLDEN["finalize_routing"], ids=lambda case: case["id"])
def test_golden_finalize(case: dict[str, Any]) -> None:
    out = torch.ops.npu.npu_moe_finalize_routing(
        *[optional_tensor(case[name]) for name in TENSORS], **case["call"]
    )
    assert_equals(out, case["expected"]["out"])


def test_golden_finalize_refuses() -> None:
    (case,) = GOLDEN["must_raise"]
    positions = tensor_of(case["expanded_src_to_dst_row"])
    with pytest.raises(RuntimeError, match=r"mode=2.* holds \[-1\], expected 0 to 9"):
        finalize(
            torch.zeros(10, 2), positions, torch.ones(5, 2), drop_pad_mode=case["drop_pad_mode"]
        )


def finalize(rows: Tensor, positions: Tensor, scales: Tensor | None, **options: Any) -> Tensor:  # noqa: ANN401
    tensors: dict[str, Tensor | None] = {
        **dict.fromkeys(TENSORS),
        "expanded_permuted_rows": rows,
        "expanded_src_to_dst_row": positions,
        "scales": scales,
    }
    return torch.ops.npu.npu_moe_finalize_routing(**{**tensors, **options})


@pytest.mark.parametrize("num_choices", [1, 3])
@pytest.mark.parametrize("num_tokens", [0, 1, 6])
def test_unpermute_reverses_permute(num_tokens: int, num_choices: int) -> None:
    generator = torch.Generator().manual_seed(num_tokens)
    tokens = torch.randn(num_tokens, 4, generator=generator)
    experts = torch.randint(5, (num_tokens, num_choices), generator=generator)
    rows, positions = torch.ops.npu.npu_moe_token_permute(tokens, experts)
    assert experts.flatten()[positions.argsort()].tolist() == sorted(experts.flatten().tolist())
    first_only = torch.zeros(num_tokens, num_choices)
    first_only[:, 0] = 1.0
    back = torch.ops.npu.npu_moe_token_unpermute(rows, positions, first_only)
    assert torch.equal(back, tokens)


def unpermute(**options: Any) -> None:  # noqa: ANN401
    tensors = {
        "permuted_tokens": torch.zeros(6, 2),
        "sorted_indices": torch.arange(6, dtype=torch.int32),
    }
    torch.ops.npu.npu_moe_token_unpermute(**{**tensors, **options})
