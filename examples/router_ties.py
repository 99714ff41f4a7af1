"""Make a plain model choose the same experts as the ranks.

Its hidden states differ from those of the ranks by rounding. If two experts tie for the last of the
K experts of a token, the two sides may choose different ones. Both choices are correct, but one
token with another expert changes the gradient norm by up to 1e-4. So the plain model uses the
experts that the ranks chose, and measures how much less probable they are than its own choice.
"""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn


class RouterTies:
    """Replaces the choice of the routers of a model; set `chosen` before each forward.

    chosen: [T, layers, K], int64, the experts that a rank chose for these tokens; None: the
        routers choose.
    num_ties: number of (token, layer) for which the ranks chose other experts, since reset().
    worst_choice: probability of the least probable expert that the ranks chose, divided by that of
        the least probable expert of the router's choice; the smallest ratio since reset(). It is 1
        without ties, and differs from 1 by rounding with ties.
    """

    def __init__(self, routers: Sequence[nn.Module]) -> None:
        """Register hooks on the routers of all layers, which return (logits, weights, experts)."""
        self.reset()
        for layer, router in enumerate(routers):
            router.register_forward_hook(partial(self._follow, layer))

    def reset(self) -> None:
        """Reset the counts for a new step."""
        self.chosen: Tensor | None = None
        self.num_ties = 0
        self.worst_choice = 1.0

    def _follow(
        self, layer: int, router: nn.Module, args: tuple[Tensor], output: tuple[Tensor, ...]
    ) -> tuple[Tensor, ...]:
        if self.chosen is None:
            return output
        logits, own_weights, own = output
        chosen = self.chosen[:, layer]
        differs = (chosen.sort().values != own.sort().values).any(dim=-1, keepdim=True)

        probabilities = logits.softmax(dim=-1)
        weights = probabilities.gather(-1, chosen)
        ratio = weights.amin(dim=-1) / probabilities.gather(-1, own).amin(dim=-1)
        self.num_ties += int(differs.sum())
        self.worst_choice = min(self.worst_choice, ratio.min().item())

        weights = weights / weights.sum(dim=-1, keepdim=True)
        # Rows with equal choices keep the bits that the router of transformers computed.
        return (
            logits,
            torch.where(differs, weights, own_weights),
            torch.where(differs, chosen, own),
        )
