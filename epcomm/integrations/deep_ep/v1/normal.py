"""What normal mode of V1 has beside normal.py: dispatch without ids, and rows that nobody sent."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from epcomm.errors import CapacityError
from epcomm.integrations.deep_ep.normal import Received, Rows, Sizes, dispatch_rows
from epcomm.integrations.deep_ep.ranks import Ranks


def dispatch_v1(
    ranks: Ranks,
    rows: Rows,
    topk: tuple[Tensor | None, Tensor | None],
    is_in_rank: Tensor,
    per_expert: Tensor,
    *,
    num_sms: int | None,
) -> Received:
    """Dispatch rows [T, H] by topk_idx, or by is_in_rank [T, W] where there are no ids.

    per_expert: [E], int32, tokens of this rank for each expert.   num_sms: see Sizes.
    """
    (ids, weights), sizes = topk, Sizes(num_sms=num_sms)
    if ids is not None and weights is not None:
        num_experts = per_expert.shape[0]
        return dispatch_rows(ranks, rows, ids.long(), weights, num_experts, sizes=sizes)
    # One expert a rank: a token goes to those of the ranks that get it.
    everyone = torch.arange(ranks.size, device=is_in_rank.device)
    ids = torch.where(is_in_rank, everyone, -1)
    weights = torch.ones_like(ids, dtype=torch.float32)
    received = dispatch_rows(ranks, rows, ids, weights, ranks.size, sizes=sizes)
    return replace(received, num_tokens_per_expert=ranks.sum_of_counts(per_expert))


def with_worst_rows(ranks: Ranks, received: Received, num_worst_tokens: int) -> Received:
    """Lengthen what came to num_worst_tokens rows, unless that is 0.

    Collective: with num_worst_tokens.
    Raises:
        CapacityError: some rank received more; on every rank.
    """
    if not num_worst_tokens:
        return received
    most = ranks.largest(received.rows.x.shape[0])
    if most > num_worst_tokens:
        raise CapacityError(
            f"dispatch: some rank received {most} rows, expected at most num_worst_tokens = "
            f"{num_worst_tokens} ({ranks.where}); pass as many as all ranks can send to one"
        )

    def longer(tensor: Tensor | None) -> Tensor | None:
        if tensor is None:
            return None
        out = tensor.new_empty(num_worst_tokens, tensor.shape[1])
        out[: tensor.shape[0]] = tensor
        return out

    x, ids, weights = (
        longer(each) for each in (received.rows.x, received.topk_ids, received.topk_weights)
    )
    assert x is not None, "rows are there"
    assert ids is not None, "ids are there"
    assert weights is not None, "weights are there"
    ids[received.topk_ids.shape[0] :] = -1
    rows = Rows(x=x, scales=longer(received.rows.scales))
    return replace(received, rows=rows, topk_ids=ids, topk_weights=weights)
