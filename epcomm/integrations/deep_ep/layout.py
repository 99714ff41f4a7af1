"""Which rank gets which token, from expert ids alone: what deep_ep calls the dispatch layout."""

import torch
from torch import Tensor

from epcomm.ops.slots import count_experts, mark_pairs, row_ops_for


def layout_of(topk_ids: Tensor, num_experts: int, num_ranks: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return the tokens by rank [W] and by expert [E], int32, and who gets which [T, W], bool.

    topk_ids: [T, K], -1 for none.

    Worked example, 4 experts on 2 ranks: token 0 chooses 0 and 1, token 1 chooses 1 and 2. Rank 0
    gets both tokens, once each: 2 1 tokens by rank, 1 2 1 0 by expert.

    Local.   Host sync: none.   Graph capture: yes; on a GPU after one call.
    """
    num_tokens, ops = topk_ids.shape[0], row_ops_for(topk_ids)
    if ops is not None:
        per_rank = topk_ids.new_empty(num_ranks, dtype=torch.int32)
        per_expert = topk_ids.new_empty(num_experts, dtype=torch.int32)
        is_in_rank = topk_ids.new_empty(num_tokens, num_ranks, dtype=torch.bool)
        ops.write_token_layout(topk_ids, per_rank, per_expert, is_in_rank)
        return per_rank, per_expert, is_in_rank
    experts = torch.where((topk_ids >= 0) & (topk_ids < num_experts), topk_ids, -1)
    ranks = experts.div(max(num_experts // num_ranks, 1), rounding_mode="floor")
    is_in_rank = mark_pairs(torch.where(ranks < num_ranks, ranks, -1), num_ranks)
    per_rank = is_in_rank.sum(0, dtype=torch.int32)
    per_expert = count_experts(experts, num_experts).int()
    return per_rank, per_expert, is_in_rank.clone(memory_format=torch.contiguous_format)
