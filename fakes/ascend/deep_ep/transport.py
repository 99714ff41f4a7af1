"""Send rows of several tensors to other ranks as bytes, through gloo."""

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor


def pack(columns: Sequence[Tensor]) -> Tensor:
    """Pack tensors [N, ...] side by side into [N, bytes], uint8."""
    return torch.cat([column.contiguous().view(torch.uint8) for column in columns], dim=1)


def unpack(rows: Tensor, columns: Sequence[Tensor]) -> list[Tensor]:
    """Undo pack(): return tensors [N, width] with the dtypes and widths of `columns`."""
    parts, first = [], 0
    for column in columns:
        last = first + column.shape[1] * column.element_size()
        # A clone, because the bytes of a row may be unaligned for the dtype.
        part = rows[:, first:last].clone(memory_format=torch.contiguous_format)
        parts.append(part.view(column.dtype))
        first = last
    return parts


def exchange(
    group: dist.ProcessGroup, rows: Tensor, send_splits: list[int], recv_splits: list[int]
) -> Tensor:
    """Exchange rows [N, bytes], ordered by destination; return them ordered by source."""
    received = rows.new_empty((sum(recv_splits), rows.shape[1]))
    dist.all_to_all_single(received, rows.contiguous(), recv_splits, send_splits, group=group)
    return received


def gather(group: dist.ProcessGroup, tensor: Tensor) -> Tensor:
    """Gather the tensors of all ranks, [W, ...]."""
    parts = [torch.empty_like(tensor) for _ in range(group.size())]
    dist.all_gather(parts, tensor.contiguous(), group=group)
    return torch.stack(parts)
