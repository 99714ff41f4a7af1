"""The training step of all ranks in one process, with the plain model of transformers."""

from collections.abc import Mapping, Sequence

from comparison import Comparison, StepResult, compare
from generation import Generated, difference_from_one_process
from plain_model import gradient_norms, next_byte_loss
from router_ties import RouterTies
from text_data import Batch
from torch import Tensor
from transformers import Qwen3MoeForCausalLM


class OneProcess:
    """Computes the expected results of the ranks."""

    def __init__(self, model: Qwen3MoeForCausalLM) -> None:
        """Use a model with all experts; each step loads its weights."""
        self._model = model
        self._ties = RouterTies([layer.get_submodule("mlp.gate") for layer in model.model.layers])

    def compare(
        self,
        over_ranks: StepResult,
        weights: Mapping[str, Tensor],
        batches: Sequence[Batch | None],
        routing: Sequence[Tensor],
    ) -> Comparison:
        """Repeat a step of the ranks and compare the results.

        Args:
            over_ranks: results of the ranks.
            weights: weights of the plain model, gathered from the ranks.
            batches: batches, rank by rank.
            routing: experts of each token of these batches, [T, layers, K].
        """
        self._model.load_state_dict(weights)
        self._model.zero_grad()
        self._ties.reset()
        loss = self._compute_gradients(batches, routing)
        return compare(
            over_ranks,
            StepResult(loss=loss, gradient_norms=gradient_norms(self._model)),
            worst_choice=self._ties.worst_choice,
            num_ties=self._ties.num_ties,
        )

    def difference(self, weights: Mapping[str, Tensor], written: Sequence[Generated]) -> float:
        """Return the largest relative difference of the logits of the generated text."""
        self._model.load_state_dict(weights)
        self._ties.chosen = None
        return difference_from_one_process(self._model, written)

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
