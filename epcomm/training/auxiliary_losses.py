"""Compute auxiliary losses from the calls of a model's gates: balance of experts, size of logits.

    with watch_gates(model) as gates:
        loss = task_loss(model(batch))
    for gate in gates:
        scores = router_probabilities(gate.logits, gate.routing)
        loss = loss + 1e-2 * load_balancing_loss(scores, gate.topk_ids, group=group)

With a group, a loss is over the tokens of all ranks: each rank returns the part of its own tokens,
and the parts add up to the loss that one process computes. Ranks exchange only counts, which have
no gradient. So sum_replicated_gradients() adds up the gradients of the parts; with DDP, which takes
the mean over its ranks, multiply the loss by their number.
"""

from dataclasses import replace

import torch
from torch import Tensor

from epcomm.errors import ConfigError, ShapeError
from epcomm.group import EPGroup
from epcomm.routing.gates import watch_gates as watch_gates
from epcomm.routing.reference import score_all
from epcomm.routing.spec import CorrectionBias, RoutingSpec, ScoreFunction, SoftmaxOrder
from epcomm.types import sum_dtype


def router_probabilities(logits: Tensor, routing: RoutingSpec) -> Tensor:
    """Return the scores of all experts as probabilities, whose sum is 1 for each token.

    They are the softmax of the logits, or for another score function its scores divided by their
    sum. A correction bias is not added.

    Args:
        logits: [..., E], floating point.
        routing: of the model; its score function and softcap are read.

    Returns: [..., E], float64 for float64 logits, else float32; differentiable.

    Local.   Host sync: none.
    Raises:
        ConfigError: the routing has a custom function, whose scores are unknown.
    Source: DeepSeek-V3 (arXiv 2412.19437), eq. 19, for sigmoid; as in Megatron-LM.
    """
    if routing.custom_function is not None:
        raise ConfigError(
            "router_probabilities: routing has a custom function, expected a score function; pass "
            "probabilities of your own to the losses"
        )
    unbiased = replace(
        routing,
        correction_bias=CorrectionBias.NONE,
        # Weights of experts that are chosen by their logits are their softmax.
        softmax_order=SoftmaxOrder.BEFORE_TOPK,
    )
    scores = score_all(logits, unbiased, None)
    if routing.score_function is ScoreFunction.SOFTMAX:
        return scores
    return scores / scores.sum(dim=-1, keepdim=True).clamp(min=torch.finfo(scores.dtype).tiny)


def load_balancing_loss(
    probabilities: Tensor,
    topk_ids: Tensor,
    *,
    group: EPGroup | None = None,
    mask: Tensor | None = None,
) -> Tensor:
    """Return E * sum over experts of (share of the entries) * (mean probability).

    An even routing gives 1. The loss of Switch and GShard for K experts a token, as Megatron-LM and
    DeepSeek have it; load_balancing_loss_func of transformers is K times as much, and treats
    several layers as one: for that, concatenate the probabilities and ids of the layers.

    Args:
        probabilities: [T, E], as router_probabilities() returns them; T = 0 is legal.
        topk_ids: [T, K], integer, logical experts; -1 is counted nowhere.
        group: the ranks whose tokens count; None: only this rank's tokens.
        mask: [T], bool, False for padding, which has no part in the loss; None: no padding.

    Returns:
        A scalar of the dtype of sums (float64, else float32): with a group this rank's part of the
        loss. 0 without tokens. Differentiable in the probabilities.

    Collective: with a group, one all-gather of E + 1 integers: all ranks make the same number of
        calls, also with T = 0, and none inside a checkpointed function.   Host sync: as the
        transport.
    Raises:
        ShapeError: shapes or dtypes that do not fit, on this rank, before the exchange.
    Source: "Switch Transformers" (arXiv 2101.03961), eq. 4 to 6.
    """
    _check("load_balancing_loss", probabilities, topk_ids, mask, num_dims=2)
    kept, num_tokens = _without_padding(probabilities, mask)
    counts = _counts(topk_ids, mask, num_experts=probabilities.shape[-1])
    totals = _over_ranks(torch.cat((counts, num_tokens.view(1))), group, "load_balancing_loss")
    weights = _weights(totals[:-1], totals[-1:], topk_ids.shape[-1])
    return (kept.sum(dim=0) * weights.to(kept)).sum()


def sequence_balancing_loss(
    probabilities: Tensor,
    topk_ids: Tensor,
    *,
    group: EPGroup | None = None,
    mask: Tensor | None = None,
) -> Tensor:
    """Return the mean of load_balancing_loss() over sequences, each balanced by itself.

    Args:
        probabilities: [B, S, E], of B whole sequences; B = 0 is legal.
        topk_ids: [B, S, K], integer, logical experts; -1 is counted nowhere.
        group: the ranks over whose sequences the mean is taken; None: only this rank.
        mask: [B, S], bool, False for padding; a sequence that is only padding does not count.

    Returns, Raises: see load_balancing_loss().
    Collective: with a group, as load_balancing_loss(), of one integer.
    Source: DeepSeek-V3 (arXiv 2412.19437), eq. 17 to 20.
    """
    _check("sequence_balancing_loss", probabilities, topk_ids, mask, num_dims=3)
    kept, num_tokens = _without_padding(probabilities, mask)
    counts = _counts(topk_ids, mask, num_experts=probabilities.shape[-1])
    own = (num_tokens > 0).sum().view(1)
    num_sequences = _over_ranks(own, group, "sequence_balancing_loss").clamp(min=1)
    weights = _weights(counts, num_tokens.unsqueeze(-1), topk_ids.shape[-1]) / num_sequences
    return (kept.sum(dim=1) * weights.to(kept)).sum()


def z_loss(logits: Tensor, *, group: EPGroup | None = None, mask: Tensor | None = None) -> Tensor:
    """Return the mean over tokens of logsumexp(logits) ** 2, which keeps logits small.

    Args:
        logits: [T, E], floating point; T = 0 is legal.
        group, mask: see load_balancing_loss().

    Returns, Raises: see load_balancing_loss().
    Collective: with a group, as load_balancing_loss(), of one integer.
    Source: "ST-MoE" (arXiv 2202.08906), eq. 5; as in Megatron-LM.
    """
    _check("z_loss", logits, None, mask, num_dims=2)
    kept, num_tokens = _without_padding(logits, mask)
    squares = torch.logsumexp(kept, dim=-1).square()
    if mask is not None:
        squares = squares.masked_fill(~mask, 0.0)
    return squares.sum() / _over_ranks(num_tokens.view(1), group, "z_loss").clamp(min=1).sum()


def _without_padding(values: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return values [..., T, E] with zeros in padding, in the dtype of sums, and tokens [...]."""
    values = values.to(sum_dtype(values.dtype))
    if mask is None:
        return values, torch.full(values.shape[:-2], values.shape[-2], device=values.device)
    return values.masked_fill(~mask.unsqueeze(-1), 0.0), mask.sum(dim=-1)


def _counts(topk_ids: Tensor, mask: Tensor | None, *, num_experts: int) -> Tensor:
    """Count the entries of each expert, [..., E] of [..., T, K]."""
    ids = topk_ids if mask is None else topk_ids.masked_fill(~mask.unsqueeze(-1), -1)
    # Entries without an expert are counted after the last expert, and cut off.
    places = torch.where(ids < 0, num_experts, ids).flatten(-2).long()
    counts = places.new_zeros(*ids.shape[:-2], num_experts + 1)
    return counts.scatter_add_(-1, places, torch.ones_like(places))[..., :num_experts]


def _weights(counts: Tensor, num_tokens: Tensor, top_k: int) -> Tensor:
    """Return the factors of sums of probabilities, [..., E]: E * count / (K * T * T)."""
    tokens = num_tokens.double().clamp(min=1)
    return counts.double() * counts.shape[-1] / (top_k * tokens * tokens)


def _over_ranks(counts: Tensor, group: EPGroup | None, phase: str) -> Tensor:
    if group is None:
        return counts
    total = group.collectives.all_gather(counts.to(group.device), phase=phase).sum(dim=0)
    return total.to(counts.device)


def _check(
    caller: str, values: Tensor, topk_ids: Tensor | None, mask: Tensor | None, *, num_dims: int
) -> None:
    if values.dim() != num_dims or not values.is_floating_point():
        names = "[B, S, E]" if num_dims == 3 else "[T, E]"
        raise ShapeError(
            f"{caller}: the scores are {values.dtype} {list(values.shape)}, expected floating "
            f"point {names}; reshape the output of the gate"
        )
    shape = list(values.shape[:-1])
    if topk_ids is not None:
        is_integer = not topk_ids.is_floating_point() and topk_ids.dtype is not torch.bool
        if list(topk_ids.shape[:-1]) != shape or topk_ids.dim() != values.dim() or not is_integer:
            raise ShapeError(
                f"{caller}: topk_ids is {topk_ids.dtype} {list(topk_ids.shape)}, expected integers "
                f"{[*shape, 'K']} as the scores are; pass the ids of the same tokens"
            )
    if mask is not None and (list(mask.shape) != shape or mask.dtype is not torch.bool):
        raise ShapeError(
            f"{caller}: mask is {mask.dtype} {list(mask.shape)}, expected bool {shape}, True for "
            "tokens and False for padding"
        )
