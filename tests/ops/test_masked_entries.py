import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from epcomm.ops.masked_entries import fill_masked_entries, has_no_expert


# On a busy machine a call may take any time.
@settings(deadline=None)
@given(
    num_tokens=st.integers(0, 9),
    num_experts=st.integers(1, 12),
    top_k=st.integers(1, 12),
    seed=st.integers(0, 1000),
)
def test_rows_are_distinct_and_what_was_there_stays(
    num_tokens: int, num_experts: int, top_k: int, seed: int
) -> None:
    top_k = min(top_k, num_experts)
    generator = torch.Generator().manual_seed(seed)
    ids = torch.rand(num_tokens, num_experts, generator=generator).argsort(dim=1)[:, :top_k]
    is_masked = torch.rand(ids.shape, generator=generator) < 0.5
    ids[is_masked] = -1
    weights = torch.rand(ids.shape, generator=generator) + 0.1
    filled, scaled = fill_masked_entries(ids, weights, num_experts)
    assert torch.equal(filled[~is_masked], ids[~is_masked])
    assert torch.equal(scaled[~is_masked], weights[~is_masked])
    assert (scaled[is_masked] == 0).all()
    for row in filled.tolist():
        assert len(set(row)) == top_k
        assert all(0 <= expert < num_experts for expert in row)


def test_holes_of_many_tokens_spread_over_the_experts() -> None:
    ids = torch.full((64, 2), -1)
    filled, _ = fill_masked_entries(ids, torch.ones(64, 2), 8)
    assert torch.bincount(filled.flatten(), minlength=8).tolist() == [16] * 8


def test_a_token_is_nowhere_if_it_has_no_expert_at_all() -> None:
    ids = torch.tensor([[0, 1], [-1, 3], [-1, -1]])
    assert has_no_expert(ids).tolist() == [[False], [False], [True]]
    assert has_no_expert(ids[:0]).shape == (0, 1)
