"""Count the rows that one rank sends and receives in a call, from the routing of all ranks.

Worked example: 2 hosts of 2 ranks (0 1 | 2 3) with one expert each. If rank 0 has one token, for
experts 1, 2 and 3, rank 0 sends 3 rows, 2 of them between hosts.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from epcomm.buffers.sizes import CallShape
from epcomm.spec import HostLayout


def call_shape(
    topk_ids_of_rank: Sequence[Tensor],
    rank: int,
    *,
    num_local_experts: int,
    hosts: HostLayout | None = None,
) -> CallShape:
    """Return the part of `rank` in the call that dispatches and combines these tokens.

    Args:
        topk_ids_of_rank: topk_ids of each of the W ranks, [T, K], int64, -1 for no expert.
        rank: the rank to count for.
        num_local_experts: L.
        hosts: the hosts of the ranks; None if there is one host or the hosts are unknown.

    Local.   Host sync: yes.
    """
    world_size = len(topk_ids_of_rank)
    counts = [_count(ids, num_local_experts, world_size) for ids in topk_ids_of_rank]
    # sent[r], received[r]: for each token, its slots sent to rank r, or received from it.
    sent = [counts[rank][:, other] for other in range(world_size)]
    received = [each[:, rank] for each in counts]
    others = [other for other in range(world_size) if other != rank]
    elsewhere = () if hosts is None else hosts.ranks_elsewhere(rank)
    return CallShape(
        rank=rank,
        tokens_of_rank=tuple(map(len, counts)),
        rows_sent=_num_rows(sent, others),
        rows_received=_num_rows(received, others),
        slots_sent=sum(int(sent[other].sum()) for other in others),
        slots_received=sum(int(received[other].sum()) for other in others),
        rows_sent_between=_num_rows(sent, elsewhere),
        rows_received_between=_num_rows(received, elsewhere),
    )


def _count(topk_ids: Tensor, num_local_experts: int, world_size: int) -> Tensor:
    """Return the number of experts of each token on each rank, [T, W]."""
    owners = topk_ids.cpu().div(num_local_experts, rounding_mode="floor")
    # Count masked entries in an extra column.
    owners = torch.where(owners < 0, world_size, owners)
    counts = owners.new_zeros(len(owners), world_size + 1)
    return counts.scatter_add_(1, owners, torch.ones_like(owners))[:, :world_size]


def _num_rows(slots_of_token: Sequence[Tensor], ranks: Sequence[int]) -> int:
    return sum(int((slots_of_token[rank] > 0).sum()) for rank in ranks)
