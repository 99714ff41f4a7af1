"""Replace -1 entries of topk_ids by unused experts with weight 0, for kernels without -1."""

import torch
from torch import Tensor


def has_no_expert(topk_ids: Tensor) -> Tensor:
    """Return which tokens of topk_ids [T, K] have no expert, [T, 1], bool: y is zero there.

    Weights of 0 cannot make y zero, because a padding token may hold NaN or infinity.

    Host sync: none.
    """
    return (topk_ids < 0).all(dim=1, keepdim=True)


def fill_masked_entries(
    topk_ids: Tensor, topk_weights: Tensor, num_experts: int
) -> tuple[Tensor, Tensor]:
    """Replace each -1 by an expert that its row does not use, and its weight by 0.

    Args:
        topk_ids: [T, K], int64, distinct within a row but for -1; K <= P.
        topk_weights: [T, K], float32.
        num_experts: P, the physical experts.

    The rows that the substitutes cause cost bytes and are multiplied by 0. The search for unused
    experts begins at another expert for each token, so that no expert gets all of these rows.

    Returns: the same shapes, ids distinct within a row.
    Host sync: none.   Deterministic: yes.
    """
    num_tokens, top_k = topk_ids.shape
    is_masked = topk_ids < 0
    experts = torch.arange(num_experts, device=topk_ids.device)
    tokens = torch.arange(num_tokens, device=topk_ids.device).unsqueeze(1)
    is_used = is_masked.new_zeros(num_tokens, num_experts + 1)
    is_used.scatter_(1, torch.where(is_masked, num_experts, topk_ids), True)
    # Unused experts come first, in the order of their distance from the token's first candidate.
    distance = (experts - tokens * top_k) % num_experts + is_used[:, :num_experts] * num_experts
    unused = distance.argsort(dim=1)
    place = (is_masked.cumsum(1) - 1).clamp(min=0)
    ids = torch.where(is_masked, unused.gather(1, place), topk_ids)
    return ids, topk_weights.masked_fill(is_masked, 0.0)
