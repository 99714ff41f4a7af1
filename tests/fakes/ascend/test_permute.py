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


@pytest.mark.parametrize("mode", [1, 3])
def test_a_copy_without_a_place_is_a_row_of_zeros(mode: int) -> None:
    """Two experts of one place each; token 0 goes to both, token 1 found no place."""
    rows = torch.tensor([[[1.0, 2.0]], [[10.0, 20.0]]])
    of_tokens = torch.tensor([[0, 1], [-1, -1]], dtype=torch.int32)
    positions = (of_tokens.T if mode == 1 else of_tokens).flatten()
    out = finalize(rows, positions, torch.ones(2, 2), drop_pad_mode=mode)
    assert out.tolist() == [[11.0, 22.0], [0.0, 0.0]]


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


@pytest.mark.parametrize("position", [-1, 4])
def test_rows_of_other_memory_are_not_read(position: int) -> None:
    positions = torch.tensor([0, 1, 2, position], dtype=torch.int32)
    with pytest.raises(RuntimeError, match=rf"sorted_indices holds \[{position}\]"):
        torch.ops.npu.npu_moe_token_unpermute(torch.zeros(4, 2), positions)
    with pytest.raises(RuntimeError, match=rf"holds \[{position}\], expected 0 to 3"):
        finalize(torch.zeros(4, 2), positions, torch.ones(2, 2))


def test_permute_sorts_as_init_routing_does() -> None:
    """Enough copies of few experts that an unstable sort would shuffle them."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randn(60, 4, generator=generator)
    experts = torch.randint(3, (60, 2), generator=generator, dtype=torch.int32)
    rows, positions = torch.ops.npu.npu_moe_token_permute(tokens, experts)
    wanted, wanted_positions, _, _ = torch.ops.npu.npu_moe_init_routing_v2(
        tokens, experts, expert_num=3, expert_tokens_num_flag=True
    )
    assert torch.equal(rows, wanted)
    assert torch.equal(positions, wanted_positions)


def permute(**options: Any) -> None:  # noqa: ANN401
    tensors = {"tokens": torch.zeros(3, 2), "indices": torch.zeros(3, 2, dtype=torch.int32)}
    torch.ops.npu.npu_moe_token_permute(**{**tensors, **options})


def unpermute(**options: Any) -> None:  # noqa: ANN401
    tensors = {
        "permuted_tokens": torch.zeros(6, 2),
        "sorted_indices": torch.arange(6, dtype=torch.int32),
    }
    torch.ops.npu.npu_moe_token_unpermute(**{**tensors, **options})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"padded_mode": True}, "padded_mode is True, expected False"),
        ({"tokens": torch.zeros(3)}, r"tokens is \[3\]"),
        ({"indices": torch.zeros(2, 2, dtype=torch.int32)}, r"indices is \[2, 2\]"),
        ({"indices": torch.zeros(3, 2)}, "indices is .*float32"),
        ({"num_out_tokens": 4}, "num_out_tokens=4 beside 6, all copies, is not modelled"),
    ],
    ids=str,
)
def test_permute_refuses(options: dict[str, Any], message: str) -> None:
    permute(num_out_tokens=6)
    with pytest.raises(RuntimeError, match=message):
        permute(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"padded_mode": True}, "padded_mode is True, expected False"),
        ({"restore_shape": [3, 2]}, "restore_shape is not modelled"),
        ({"sorted_indices": torch.arange(6)}, "sorted_indices is .*int64"),
        ({"probs": torch.zeros(2, 2)}, r"probs is \[2, 2\], expected \[n, K\] with 6 elements"),
    ],
    ids=str,
)
def test_unpermute_refuses(options: dict[str, Any], message: str) -> None:
    with pytest.raises(RuntimeError, match=message):
        unpermute(**options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"drop_pad_mode": 4}, "drop_pad_mode is 4"),
        ({"drop_pad_mode": 1}, "expected 3 dimensions in drop_pad_mode 1"),
        ({"skip2": torch.zeros(2, 2)}, "skip2 comes without skip1"),
        ({"bias": torch.zeros(3, 2)}, "bias without export_for_source_row"),
        ({"scales": torch.zeros(2, 3)}, r"expanded_src_to_dst_row is \[4\].*expected \[6\]"),
        ({"scales": None, "k": 2}, "k=2 without scales is not modelled"),
        ({"expanded_permuted_rows": torch.zeros(5, 2)}, "has 5 rows, expected 4"),
        (
            {"expanded_permuted_rows": torch.zeros(1, 4, 2), "drop_pad_mode": 3},
            "has 1 experts, expected 2 at least",
        ),
        ({"expanded_permuted_rows": torch.zeros(4, 2).half()}, "scales are .*float32 beside rows"),
        ({"scales": torch.ones(2, 2).bfloat16()}, "scales are .*bfloat16 beside rows of .*float32"),
    ],
    ids=str,
)
def test_finalize_refuses(options: dict[str, Any], message: str) -> None:
    positions = torch.arange(4, dtype=torch.int32)
    with pytest.raises(RuntimeError, match=message):
        finalize(torch.zeros(4, 2), positions, **{"scales": torch.ones(2, 2), **options})


def test_finalize_without_scales_adds_rows_as_they_are() -> None:
    rows = torch.arange(4.0).view(2, 2)
    out = finalize(rows, torch.tensor([1, 0], dtype=torch.int32), None, skip1=rows)
    assert out.tolist() == [[2.0, 4.0], [2.0, 4.0]]
