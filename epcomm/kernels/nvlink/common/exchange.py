"""Arguments of the launchers of the NVLink kernels: the memory that all ranks write."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from epcomm.kernels.nvlink.common.layout import MOST_CHUNKS, LowLatencyLayout, MemoryLayout

LayoutT = TypeVar("LayoutT", bound=MemoryLayout)

# Looks of a GPU at a signal between two looks at its clock: some 50 to 200 us, so that most waits,
# of microseconds, never read it.
LOOKS_PER_TICK = 256
# One poll of a GPU takes 2**POLL_BITS nanoseconds: a late tick counts all polls that have passed.
POLL_BITS = 20

# Integers that change from call to call, by their names in kernels: one compiled variant serves
# all.
VARYING = (
    *("own_address", "buffer_address", "flags_address", "rank", "number", "num_tokens"),
    *("wanted_tokens", "batch", "is_captured", "status", "scales_stride", "scale_stride"),
    "max_polls",
)


# Indices in LowLatencyExchange.state: the epoch of the last dispatch that was not captured; the
# batch that the receive buffer holds; the epoch of the last dispatch whose counts are written; the
# programs that have finished sending, of sums those of each chunk.
EAGER_EPOCH, HELD_BATCH, COUNTED_EPOCH, ROW_ARRIVALS, SUM_ARRIVALS = range(3, 8)
# The index there from which the contents of each rank's header are stored.
SOURCES_AT = SUM_ARRIVALS + MOST_CHUNKS


@dataclass(frozen=True, kw_only=True, eq=False)
class PeerBlocks(Generic[LayoutT]):
    """The blocks of all ranks, as one rank sees them; arguments of both modes.

    rank: this one.   num_programs: P, of every kernel that sends; equal on all ranks.
    max_polls: of a wait before it gives up, see signals.py.
    own_address: of this rank's block.   table: [W], int64: addresses of all.
    excluded: [W], int32, not 0 for ranks that are not waited for, to which nothing is sent, and
        from which nothing is read.
    counters: int64: the amounts sent to other ranks, see NormalExchange and LowLatencyExchange.
    faults: [W, 2], int64: the first fault of each rank since the last check, and slots needed.
    report: [REPORT_MISSING + W], int32, in memory that the host reads while kernels run.

    No tensor here is in a block: an interpreter copies its arguments back.
    """

    rank: int
    num_programs: int
    max_polls: int
    own_address: int
    table: Tensor
    layout: LayoutT
    excluded: Tensor
    counters: Tensor
    faults: Tensor
    report: Tensor


class Memory(NamedTuple):
    """Memory of a rank and a receive buffer, to which kernels of low latency get pointers.

    See PeerBlocks and LowLatencyExchange.
    """

    table: Any
    bases: Any
    state: Any
    counters: Any
    faults: Any
    excluded: Any
    report: Any


class SlabMemory(NamedTuple):
    """Memory for the rows of each expert, in the layout MASKED; each expert has W * M slots.

    data: [C, words of a row], int32: rows as they were received, with the gap between them.
    scales: int32, the words of their scales; None where rows have none.
    token_of_slot: [L, C / L], int32, written with the token of each slot, as its rank numbers it.
    source_ranges: [L, W], int64, written with the slots of each expert from each rank,
        first << 32 | number, where the first is counted from the expert's first. Both or neither.

    Kernels have pointers in place of tensors.   Lifetime: that of the rows.
    """

    data: Any = None
    scales: Any = None
    token_of_slot: Any = None
    source_ranges: Any = None


NO_SLABS = SlabMemory()


class Peers(NamedTuple):
    """The arguments of the device functions of low latency: the fields of Memory, and numbers.

    own_address, rank, max_polls: as of PeerBlocks.   buffer_address: as of LowLatencyExchange.
    """

    table: Any
    bases: Any
    state: Any
    counters: Any
    faults: Any
    excluded: Any
    report: Any
    own_address: Any
    buffer_address: Any
    rank: Any
    max_polls: Any


@dataclass(frozen=True, kw_only=True, eq=False)
class LowLatencyExchange:
    """One receive buffer of low latency.

    peers: of at least W programs; counters: [4]: rows, metadata, headers and sums.
    buffer_address: of the receive buffer of this rank.   bases: [W], int64: of those of all ranks.
    state: [SOURCES_AT + W], int32: epoch of dispatch (1 at first) and of combine (0), 1 if all
        ranks know that the dispatch failed, or a fault code and slots needed as pack_status() packs
        them if this rank alone has no rows, from EAGER_EPOCH on as named above, and from SOURCES_AT
        on the first word of each rank's header, with T = 0 if the call failed.
    launches: prepared for this receive buffer, by kernel and by all that its constants depend on.
    """

    peers: PeerBlocks[LowLatencyLayout]
    buffer_address: int
    bases: Tensor
    state: Tensor
    launches: dict[Hashable, Callable[..., None]] = field(default_factory=dict)

    @classmethod
    def of(cls, peers: PeerBlocks[LowLatencyLayout], buffer_index: int) -> LowLatencyExchange:
        """Return a receive buffer by its index, in its first state."""
        buffer_at = peers.layout.buffer_offset(buffer_index)
        return cls(
            peers=peers,
            buffer_address=peers.own_address + buffer_at,
            bases=peers.table + buffer_at,
            state=first_state(peers.layout.world_size, peers.table.device),
        )


def first_state(world_size: int, device: torch.device) -> Tensor:
    """Return epochs of dispatch and combine, no failure, no arrivals; see LowLatencyExchange."""
    state = torch.zeros(SOURCES_AT + world_size, dtype=torch.int32, device=device)
    state[0] = 1
    return state
