"""The training step of all ranks in one process, with the plain model of transformers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from comparison import Comparison, StepResult
from plain_model import next_byte_loss, squared_gradient_norm
from router_ties import RouterTies
from text_data import Batch
from torch import Tensor
from transformers import Qwen3MoeForCausalLM


class OneProcess:
    """Says what the ranks should have computed."""

    def __init__(self, model: Qwen3MoeForCausalLM) -> None:
        """Take a model with all experts; its weights come with each step."""
        self._model = model
        self._ties = RouterTies([layer.get_submodule("mlp.gate") for layer in model.model.layers])

    def compare(
        self,
        over_ranks: StepResult,
        weights: Mapping[str, Tensor],
        batches: Sequence[Batch | None],
        routing: Sequence[Tensor],
    ) -> Comparison:
        """Repeat a step.

        Args:
            over_ranks: what the ranks computed.
            weights: of the plain model, gathered from the ranks.
            batches: by rank.
            routing: by rank, [T, layers, K], the experts of each token.
        """
        self._model.load_state_dict(weights)
        self._model.zero_grad()
        self._ties.reset()
        loss = self._compute_gradients(batches, routing)
        return Comparison(
            loss=over_ranks.loss,
            gradient_norm=over_ranks.gradient_norm,
            expected_loss=loss,
            expected_gradient_norm=math.sqrt(squared_gradient_norm(self._model.parameters())),
            num_ties=self._ties.num_ties,
            routing_difference=self._ties.largest_gap,
        )

    def _compute_gradients(
        self, batches: Sequence[Batch | None], routing: Sequence[Tensor]
    ) -> float:
        num_tokens = sum(batch.num_tokens for batch in batches if batch is not None)
        loss = 0.0
        for batch, self._ties.chosen in zip(batches, routing, strict=True):
            if batch is not None:
                share = next_byte_loss(self._model, batch, num_tokens)
                share.backward()
                loss += share.item()
        return loss
