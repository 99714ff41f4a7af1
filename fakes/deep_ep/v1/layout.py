"""Imitate get_dispatch_layout(): which rank gets which token, from the expert ids alone."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from fakes.deep_ep.limits import require


@dataclass(frozen=True, kw_only=True)
class Layout:
    """A layout: tokens_per_rank int32 [W], tokens_per_expert int32 [E], is_in_rank bool [T, W]."""

    tokens_per_rank: Tensor
    tokens_per_expert: Tensor
    is_in_rank: Tensor


def layout_of(topk_idx: Tensor, num_experts: int, num_ranks: int) -> Layout:
    """Compute the layout of topk_idx [T, K], int64, -1 without an expert.

    Worked example, 4 experts on 2 ranks: token 0 chooses 0 and 1, token 1 chooses 1 and 2. Rank 0
    gets both tokens, once each: tokens_per_rank [2, 1], tokens_per_expert [1, 2, 1, 0].
    """
    require(topk_idx.dim() == 2, "topk_idx.dim() == 2")
    require(topk_idx.is_contiguous(), "topk_idx.is_contiguous()")
    require(num_experts > 0, "num_experts > 0")
    require_ids(topk_idx, num_experts)
    chosen = _one_hot(topk_idx, num_experts)
    ranks = torch.where(topk_idx < 0, -1, topk_idx // max(num_experts // num_ranks, 1))
    is_in_rank = _one_hot(ranks, num_ranks).any(dim=1)
    return Layout(
        tokens_per_rank=is_in_rank.sum(0, dtype=torch.int32),
        tokens_per_expert=chosen.sum((0, 1), dtype=torch.int32),
        is_in_rank=is_in_rank,
    )


def require_ids(topk_idx: Tensor, num_experts: int) -> None:
    """Expert ids as the kernels read them; a wrong one would make the real ones write anywhere."""
    require(topk_idx.dtype == torch.int64, "topk_idx.scalar_type() == topk_idx_t")
    require(bool((topk_idx < num_experts).all()), "topk_idx < num_experts")


def _one_hot(places: Tensor, num_places: int) -> Tensor:
    """Turn places [T, K] into bool [T, K, num_places]; a place of -1 gives False everywhere."""
    return F.one_hot(places.clamp(min=-1) + 1, num_places + 1)[..., 1:].bool()
