"""A batch whose sums are exact in bfloat16, and a mixture of linear experts over it; marks."""

from dataclasses import dataclass
from importlib.metadata import distributions
from typing import Self

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.integrations.deep_ep.devices import here

NUM_EXPERTS, TOP_K, HIDDEN = 4, 2, 128


@dataclass(frozen=True, kw_only=True, eq=False)
class Batch:
    """The tokens of this rank, x [T, H], bfloat16, and their routing, [T, K]; both need gradients.

    Expert e multiplies its tokens by 1 + e: y = sum over k of weight[k] * (1 + ids[k]) * x.
    """

    x: Tensor
    ids: Tensor
    weights: Tensor

    @classmethod
    def of_rank(cls, num_tokens: int) -> Self:
        """Draw a batch that differs on each rank."""
        seed = torch.Generator().manual_seed(dist.get_rank())
        # At most 60 of them are not 0, for sums of squares that bfloat16 holds times 4 experts.
        x = torch.randint(0, 2, (num_tokens, HIDDEN), generator=seed).bfloat16() * 2 - 1
        places = torch.rand(num_tokens, HIDDEN, generator=seed).argsort(1)
        x = x.masked_fill(places >= 60, 0)
        ids = torch.rand(num_tokens, NUM_EXPERTS, generator=seed).topk(TOP_K).indices
        weights = torch.tensor([0.25, 0.5]).repeat(num_tokens, 1)
        x, ids, weights = x.to(here()), ids.to(here()), weights.to(here())
        return cls(x=x.requires_grad_(), ids=ids, weights=weights.requires_grad_())

    def factors(self) -> Tensor:
        return 1.0 + self.ids

    def check(self, y: Tensor) -> None:
        """Compare y with sums over the tokens of this rank."""
        total = (self.weights.detach() * self.factors()).sum(1, keepdim=True)
        assert torch.equal(y.float(), total * self.x.detach().float())

    def check_backward(self, y: Tensor) -> None:
        """Compare y, and the gradients that y.backward(x) leaves, with their formulas."""
        self.check(y)
        x = self.x.detach().float()
        y.backward(self.x.detach())
        assert torch.equal(self.x.grad.float(), y.float())
        expected = self.factors() * (x * x).sum(1, keepdim=True)
        assert torch.equal(self.weights.grad, expected)


def needs(distribution: str) -> pytest.MarkDecorator:
    is_missing = not any(distributions(name=distribution))
    reason = f"{distribution} is not installed; pip install --no-deps -r tests/clients.txt"
    return pytest.mark.skipif(is_missing, reason=reason)
