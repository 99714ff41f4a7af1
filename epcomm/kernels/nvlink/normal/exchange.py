"""The memory of all ranks and the loaded kernels, which the launchers of normal mode share."""

from __future__ import annotations

import ctypes
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Self

import torch
from torch import Tensor

from epcomm.kernels.nvlink.common.exchange import PeerBlocks
from epcomm.kernels.nvlink.common.layout import MemoryLayout, NormalLayout
from epcomm.kernels.nvlink.normal.program import LoadedKernel

# Positions in the state of a rank: the number of the last dispatch and of the last combine, which
# kernels count themselves, so that a graph may be replayed; blocks that have left each; tokens that
# reducers have taken; whether a block of the dispatch timed out.
DISPATCH_EPOCH, COMBINE_EPOCH, DISPATCH_LEFT, COMBINE_LEFT, COMBINE_TOKENS, DISPATCH_LOST = range(6)
STATE_WORDS = 6
# From here on, the mark of the dispatch that each receive buffer holds, see mark_of() of peers.cu.
BUFFER_MARKS = STATE_WORDS


def scratch_words(layout: MemoryLayout) -> int:
    """Return the words that a block releases to later blocks: counts, and whether ids are bad."""
    return layout.world_size * layout.num_local_experts + layout.world_size + 1


@dataclass(frozen=True, kw_only=True, eq=False)
class PreparedKernel:
    """A loaded kernel, its blocks, and the arguments that are those of every call."""

    kernel: LoadedKernel
    num_blocks: int
    arguments: ctypes.Structure

    def blocks(self, num_sms: int | None) -> int:
        """Return the blocks of a call that may take num_sms SMs; None: no limit for this call."""
        return min(num_sms or self.num_blocks, self.num_blocks)


@dataclass(frozen=True, kw_only=True, eq=False)
class NormalExchange:
    """The memory of all ranks in normal mode.

    peers: with the counters [5]: headers, rows of dispatches and of cached dispatches, sums, sums
        with scalars.
    state: [STATE_WORDS + N], int32, whose positions are named above.
    scratch: [P, scratch_words()], int32, in which blocks report counts to later blocks.
    counted: [P], int32: the dispatch of which a block has reported.
    launches: prepared, by kernel and by all that its constants depend on.
    """

    peers: PeerBlocks[NormalLayout]
    state: Tensor
    scratch: Tensor
    counted: Tensor
    launches: dict[Hashable, PreparedKernel] = field(default_factory=dict)

    @classmethod
    def of(cls, peers: PeerBlocks[NormalLayout]) -> Self:
        """Return an exchange in its first state."""
        num_blocks = peers.num_programs

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=peers.table.device)

        return cls(
            peers=peers,
            state=zeros(STATE_WORDS + peers.layout.num_buffers),
            scratch=zeros(num_blocks, scratch_words(peers.layout)),
            counted=zeros(num_blocks),
        )
