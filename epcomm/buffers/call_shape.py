"""Count what one rank sends and receives in a call from the routing of all ranks.

Worked example: 2 hosts of 2 ranks (0 1 | 2 3) with one expert each; one token, on rank 0, that
needs the experts 1, 2 and 3.

    flat           rank 0 sends 3 rows, 2 of them between hosts
    outer, rank 0  1 row, to rank 2, which has its place on the other host
    inner, rank 0  1 row, to rank 1                   rank 2  1 row, to rank 3
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from epcomm.buffers.sizes import CallByLink, CallShape
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
        topk_ids_of_rank: for each of W ranks [T, K], int64, -1 for no expert.
        rank: whose part.
        num_local_experts: L.
        hosts: where the ranks are, if on several hosts and known; then by_link is there.

    Local.   Host sync: yes.
    """
    world_size = len(topk_ids_of_rank)
    # counts[s][t, r]: the experts of rank r that token t of rank s needs.
    counts = [_count(ids, num_local_experts, world_size) for ids in topk_ids_of_rank]
    flat = _part(counts, rank)
    return flat if hosts is None else replace(flat, by_link=_by_link(counts, rank, hosts))


def _count(topk_ids: Tensor, num_local_experts: int, world_size: int) -> Tensor:
    """Count, for each token, its experts by rank: [T, W]."""
    owners = topk_ids.cpu().div(num_local_experts, rounding_mode="floor")
    # Masked entries go to a column of their own.
    owners = torch.where(owners < 0, world_size, owners)
    counts = owners.new_zeros(len(owners), world_size + 1)
    return counts.scatter_add_(1, owners, torch.ones_like(owners))[:, :world_size]


def _part(counts: Sequence[Tensor], rank: int) -> CallShape:
    """Return the part of `rank` where counts[s][t, r] experts of r are needed by token t of s."""
    others = [other for other in range(len(counts)) if other != rank]
    sent = counts[rank][:, others]
    received = torch.cat([counts[other][:, rank] for other in others] or [sent.flatten()])
    return CallShape(
        rank=rank,
        tokens_of_rank=tuple(len(each) for each in counts),
        rows_sent=int((sent > 0).sum()),
        rows_received=int((received > 0).sum()),
        slots_sent=int(sent.sum()),
        slots_received=int(received.sum()),
    )


def _by_link(counts: Sequence[Tensor], rank: int, hosts: HostLayout) -> CallByLink:
    elsewhere = hosts.ranks_elsewhere(rank)
    flat = CallByLink(
        rows_sent_between=int((counts[rank][:, elsewhere] > 0).sum()),
        rows_received_between=sum(int((counts[other][:, rank] > 0).sum()) for other in elsewhere),
    )
    if not hosts.is_even:
        return flat
    own, place = hosts.host_of_rank[rank], hosts.place(rank)
    # by_host[s][t, h]: the experts of host h that token t of rank s needs.
    by_host = [
        torch.stack([each[:, ranks].sum(1) for ranks in hosts.ranks_of_host], 1) for each in counts
    ]
    outer = _part([by_host[ranks[place]] for ranks in hosts.ranks_of_host], own)
    members = hosts.ranks_of_host[own]
    arrived = [
        torch.cat([counts[source][by_host[source][:, own] > 0][:, members] for source in of_place])
        for of_place in zip(*hosts.ranks_of_host, strict=True)
    ]
    return replace(flat, outer=outer, inner=_part(arrived, place))
