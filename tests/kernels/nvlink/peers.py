"""Blocks of all ranks in the memory of one process."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from epcomm.kernels.nvlink.common.exchange import LayoutT, PeerBlocks


def peer_blocks(
    rank: int, blocks: Sequence[Tensor], layout: LayoutT, *, num_programs: int, max_polls: int
) -> PeerBlocks[LayoutT]:
    """Return the blocks as `rank` sees them, with nothing counted and no fault."""

    def zeros(*shape: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(shape, dtype=dtype, device=blocks[0].device)

    size, addresses = len(blocks), [block.data_ptr() for block in blocks]
    return PeerBlocks(
        rank=rank,
        num_programs=num_programs,
        max_polls=max_polls,
        own_address=addresses[rank],
        table=torch.tensor(addresses, dtype=torch.int64, device=blocks[0].device),
        layout=layout,
        excluded=zeros(size, dtype=torch.int32),
        counters=zeros(8, dtype=torch.int64),
        faults=zeros(size, 2, dtype=torch.int64),
        report=zeros(4 + size, dtype=torch.int32),
    )
