import pytest
import torch
from torch import Tensor, nn

from examples.router_ties import RouterTies


class Router(nn.Module):
    """Two of four experts; its input is its logits."""

    def forward(self, logits: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        weights, experts = logits.softmax(dim=-1).topk(2)
        return logits, weights / weights.sum(dim=-1, keepdim=True), experts


# Probabilities of four experts for two tokens; the first token takes experts 3 and 1.
PROBABILITIES = torch.tensor([[0.1, 0.3, 0.2, 0.4], [0.6, 0.1, 0.2, 0.1]])


def follow(chosen: list[list[int]]) -> tuple[RouterTies, Tensor, Tensor]:
    router = Router()
    ties = RouterTies([router])
    ties.chosen = torch.tensor(chosen).unsqueeze(1)
    _, weights, experts = router(PROBABILITIES.log())
    return ties, weights, experts


def test_equal_choices_in_any_order_change_no_bit() -> None:
    ties, weights, experts = follow([[1, 3], [0, 2]])
    _, own_weights, own_experts = Router()(PROBABILITIES.log())
    assert torch.equal(weights, own_weights)
    assert torch.equal(experts, own_experts)
    assert ties.num_ties == 0
    assert ties.worst_choice == 1.0


def test_another_choice_is_followed_and_measured() -> None:
    ties, weights, experts = follow([[2, 3], [0, 2]])
    assert experts.tolist() == [[2, 3], [0, 2]]
    torch.testing.assert_close(weights[0], torch.tensor([0.2, 0.4]) / 0.6)
    assert ties.num_ties == 1
    # Expert 2 has 0.2 where expert 1 would have had 0.3.
    assert ties.worst_choice == pytest.approx(2 / 3)
