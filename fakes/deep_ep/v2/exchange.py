"""Send rows of several tensors from rank to rank, as one message of bytes a row."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from fakes.deep_ep.v2.limits import require


def agree(group: dist.ProcessGroup, values: Sequence[int], names: str) -> None:
    """Refuse numbers that differ between the ranks.

    The package does not compare them, and corrupts memory where they differ.
    """
    mine = torch.tensor(list(values), dtype=torch.int64)
    theirs = [torch.empty_like(mine) for _ in range(dist.get_world_size(group))]
    dist.all_gather(theirs, mine, group=group)
    require(all(torch.equal(mine, other) for other in theirs), f"{names} are the same on all ranks")


def exchange_counts(group: dist.ProcessGroup, counts: Tensor) -> Tensor:
    """Exchange counts [R], int64, of rows for each rank; return those of rows from each rank."""
    received = torch.empty_like(counts)
    dist.all_to_all_single(received, counts, group=group)
    return received


def exchange_rows(
    group: dist.ProcessGroup, tensors: Sequence[Tensor], send_counts: Tensor, recv_counts: Tensor
) -> list[Tensor]:
    """Send rows [N, ...] that lie in order of their destination; returns those received.

    Args:
        tensors: [N, width] of any dtypes, one row each to a message.
        send_counts: [R], of rows for each rank.
        recv_counts: [R], of rows from each rank.
    """
    messages = torch.cat([_bytes_of(tensor) for tensor in tensors], dim=1)
    received = messages.new_empty(int(recv_counts.sum()), messages.shape[1])
    dist.all_to_all_single(
        received, messages, recv_counts.tolist(), send_counts.tolist(), group=group
    )
    widths = [tensor.shape[1] * tensor.element_size() for tensor in tensors]
    return [
        # A copy, so that every column begins where its dtype may.
        part.clone(memory_format=torch.contiguous_format).view(tensor.dtype)
        for part, tensor in zip(received.split(widths, dim=1), tensors, strict=True)
    ]


def _bytes_of(rows: Tensor) -> Tensor:
    return rows.contiguous().view(torch.uint8)
