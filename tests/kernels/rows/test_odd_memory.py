"""Callers may pass tensors of any strides: every other weight, columns that are not adjacent."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from epcomm.ops.with_triton import TritonRowOps

OPS = TritonRowOps()


def test_weights_of_sums_may_be_a_column(device: torch.device) -> None:
    rows = torch.tensor([[5.0], [6.0], [7.0]], device=device)
    weights = torch.tensor([[1.0, -9.0], [3.0, -9.0], [2.0, -9.0]], device=device)[:, 0]
    table = torch.tensor([[2, 0], [-1, 1]], dtype=torch.int32, device=device)
    assert OPS.sum_members(rows, table, weights).tolist() == [[19.0], [18.0]]


@pytest.mark.parametrize("num_tokens", [1, 2])
def test_parts_may_lie_any_distance_apart(num_tokens: int, device: torch.device) -> None:
    flat = torch.full((40,), float("nan"), device=device)
    # Rows are 3 elements apart and parts 7, which is not a multiple of the row stride.
    parts = flat.as_strided((3, num_tokens, 2), (7, 3, 1))
    for part in range(3):
        parts[part] = 10.0**part
    assert OPS.sum_parts(parts, torch.float32).tolist() == [[111.0, 111.0]] * num_tokens


def test_ids_and_weights_may_be_transposed(device: torch.device) -> None:
    ids = torch.tensor([[0, 1], [1, 0]], dtype=torch.int32, device=device).t()
    weights = torch.tensor([[1.0, 2.0], [3.0, 4.0]], device=device).t()
    counts = torch.tensor([2, 2], device=device)
    index, slot_weights = OPS.index_slots(
        ids, weights, counts, [2, 2], first_expert=0, expert_alignment=1
    )
    assert index.row_of_slot is not None
    assert index.row_of_slot.tolist() == [0, 1, 0, 1]
    # Token 0 has expert 0 with 1 and expert 1 with 3; token 1 has expert 1 with 2, expert 0 with 4.
    assert slot_weights.tolist() == [1.0, 4.0, 3.0, 2.0]
