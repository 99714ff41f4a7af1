"""Which rank gets which token, from expert ids alone: what deep_ep calls the dispatch layout."""

from dataclasses import dataclass

import torch
from torch import Tensor

from epcomm.ops.slots import count_experts, mark_pairs, row_ops_for


@dataclass(frozen=True, kw_only=True, eq=False)
class TokenLayout:
    """The layout of the tokens of one rank.

    tokens_per_rank: [W], int32.   tokens_per_expert: [E], int32.   is_in_rank: [T, W], bool.
    """

    tokens_per_rank: Tensor
    tokens_per_expert: Tensor
    is_in_rank: Tensor


def layout_of(topk_ids: Tensor, num_experts: int, num_ranks: int) -> TokenLayout:
    """Return the layout of topk_ids [T, K], -1 for none.

    Worked example, 4 experts on 2 ranks: token 0 chooses 0 and 1, token 1 chooses 1 and 2. Rank 0
    gets both tokens, once each: tokens_per_rank [2, 1], tokens_per_expert [1, 2, 1, 0].

    Local.   Host sync: none.   Graph capture: yes; on a GPU after one call.
    """
    num_tokens, ops = topk_ids.shape[0], row_ops_for(topk_ids)
    if ops is not None:
        layout = TokenLayout(
            tokens_per_rank=topk_ids.new_empty(num_ranks, dtype=torch.int32),
            tokens_per_expert=topk_ids.new_empty(num_experts, dtype=torch.int32),
            is_in_rank=topk_ids.new_empty(num_tokens, num_ranks, dtype=torch.bool),
        )
        ops.write_token_layout(
            topk_ids, layout.tokens_per_rank, layout.tokens_per_expert, layout.is_in_rank
        )
        return layout
    experts = torch.where((topk_ids >= 0) & (topk_ids < num_experts), topk_ids, -1)
    ranks = experts.div(max(num_experts // num_ranks, 1), rounding_mode="floor")
    is_in_rank = mark_pairs(torch.where(ranks < num_ranks, ranks, -1), num_ranks)
    return TokenLayout(
        tokens_per_rank=is_in_rank.sum(0, dtype=torch.int32),
        tokens_per_expert=count_experts(experts, num_experts).int(),
        is_in_rank=is_in_rank.clone(memory_format=torch.contiguous_format),
    )
