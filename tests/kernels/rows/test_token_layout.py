import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from epcomm.integrations.deep_ep.layout import layout_of
from epcomm.kernels.rows import token_layout
from epcomm.ops.with_triton import TritonRowOps


def by_kernel(ids: Tensor, num_experts: int, num_ranks: int) -> list[list]:
    """Run the kernel on poisoned memory."""
    device = ids.device
    per_rank = torch.full((num_ranks,), -77, dtype=torch.int32, device=device)
    per_expert = torch.full((num_experts,), -77, dtype=torch.int32, device=device)
    in_rank = torch.full((ids.shape[0], num_ranks), 9, dtype=torch.uint8, device=device)
    TritonRowOps().write_token_layout(ids, per_rank, per_expert, in_rank.view(torch.bool))
    return [per_rank.tolist(), per_expert.tolist(), in_rank.tolist()]


def by_torch(ids: Tensor, num_experts: int, num_ranks: int) -> list[list]:
    per_rank, per_expert, is_in_rank = layout_of(ids.cpu(), num_experts, num_ranks)
    return [each.tolist() for each in (per_rank, per_expert, is_in_rank.to(torch.uint8))]


def one_by_one(ids: Tensor, num_experts: int, num_ranks: int) -> list[list]:
    num_local = max(num_experts // num_ranks, 1)
    per_expert, in_rank = [0] * num_experts, []
    for chosen in ids.tolist():
        experts = [each for each in chosen if 0 <= each < num_experts]
        for expert in experts:
            per_expert[expert] += 1
        owners = {expert // num_local for expert in experts}
        in_rank.append([int(rank in owners) for rank in range(num_ranks)])
    per_rank = [sum(row[rank] for row in in_rank) for rank in range(num_ranks)]
    return [per_rank, per_expert, in_rank]


@pytest.mark.parametrize(
    ("num_tokens", "top_k", "num_experts", "num_ranks", "dtype"),
    [
        pytest.param(0, 8, 8, 2, torch.int64, id="no tokens"),
        pytest.param(70, 3, 6, 2, torch.int32, id="experts that fill no program, int32"),
        pytest.param(23, 1, 2, 4, torch.int64, id="fewer experts than ranks"),
        pytest.param(9, 2, 7, 3, torch.int64, id="an expert that no rank owns"),
        pytest.param(45, 5, 12, 3, torch.int64, id="several tiles"),
    ],
)
def test_equals_one_id_at_a_time(
    num_tokens: int,
    top_k: int,
    num_experts: int,
    num_ranks: int,
    dtype: torch.dtype,
    device: torch.device,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Small tiles, so that a loop has more than one turn.
    monkeypatch.setattr(token_layout, "_PAIRS", 64)
    generator = torch.Generator().manual_seed(num_tokens + num_ranks)
    # Entries without an expert, and ids past the last one.
    ids = torch.randint(-1, num_experts + 2, (num_tokens, top_k), generator=generator)
    ids = ids.to(device=device, dtype=dtype)
    expected = one_by_one(ids, num_experts, num_ranks)
    assert by_kernel(ids, num_experts, num_ranks) == expected
    assert by_torch(ids, num_experts, num_ranks) == expected


def test_reads_ids_that_lie_apart(device: torch.device) -> None:
    ids = torch.tensor([[0, 5, 1], [3, 5, -1]], device=device)[:, ::2]
    assert by_kernel(ids, 4, 2) == one_by_one(ids, 4, 2)
