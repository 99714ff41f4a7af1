"""Lets a plain model follow the ranks where two experts tie.

Its hidden states differ from those of the ranks by rounding. That is harmless until two experts tie
for the last place of a token: then each side may choose another one, and one token that goes
elsewhere moves the gradient norm by up to 1e-4. Either choice is right. So the plain model takes
the experts that the ranks chose, and how much worse they are than its own choice is measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn


class RouterTies:
    """Watches the routers of a model; `chosen` must be set before each forward.

    chosen: [T, layers, K], int64, the experts that a rank chose for these tokens; None: the
        routers choose for themselves.
    num_ties: tokens of a layer for which the ranks chose other experts; since reset().
    worst_choice: probability of the least probable expert that the ranks chose, over that of the
        least probable one of the own choice; the smallest such ratio since reset(). Without ties
        it is 1, and with ties it misses 1 by rounding.
    """

    def __init__(self, routers: Sequence[nn.Module]) -> None:
        """Hook into the routers, one a layer, that return (logits, weights, experts)."""
        self.reset()
        for layer, router in enumerate(routers):
            router.register_forward_hook(partial(self._follow, layer))

    def reset(self) -> None:
        """Begin a new step."""
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
        # Rows that agree keep every bit of what the router of transformers computed.
        return (
            logits,
            torch.where(differs, weights, own_weights),
            torch.where(differs, chosen, own),
        )
