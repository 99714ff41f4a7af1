"""A region of shared memory that grows: some slots of rows in each rank's block."""

from __future__ import annotations

import logging

import torch
from torch import Tensor

from epcomm.buffers.shared_memory.memory import HostMemory
from epcomm.collectives.base import Collectives
from epcomm.types import align_up

_logger = logging.getLogger(__name__)

# Slots begin at cache lines.
LINE_BYTES = 64
# Room is at least this, in bytes, and then doubles, so that few calls wait for new memory.
LEAST_ROOM = 2**20


class HostRegion:
    """Rows that other ranks write. Views keep old memory alive when it grows."""

    def __init__(
        self, collectives: Collectives, name: str, num_slots: int, most_bytes: int | None = None
    ) -> None:
        """Have nothing yet.

        num_slots: used in turns; equal on all ranks.
        most_bytes: that a slot will ever need, if that is known; equal on all ranks.
        """
        self._collectives, self._name = collectives, name
        self._num_slots, self._most_bytes = num_slots, most_bytes
        self._memory: HostMemory | None = None
        self._room = 0

    def require(self, num_bytes: int) -> None:
        """Have room for so many bytes in each slot of each rank.

        Collective: yes, where it is not there yet; num_bytes is equal on all ranks.
        Raises:
            BackendUnavailable: not enough shared memory on some rank; on every rank, and the
                region is as before.
        """
        if num_bytes <= self._room:
            return
        room = LEAST_ROOM
        while room < num_bytes:
            room *= 2
        if self._most_bytes is not None:
            room = max(num_bytes, min(room, self._most_bytes))
        room = line_aligned(room)
        memory = HostMemory(self._collectives, self._num_slots * room, phase=f"grow {self._name}")
        # The views are enough.
        memory.close()
        self._memory, self._room = memory, room
        _logger.debug("rank %d: %s has %d B a slot now", self._collectives.rank, self._name, room)

    def rows(self, rank: int, epoch: int, rows: slice, width: int, dtype: torch.dtype) -> Tensor:
        """[rows, width] of the slot that `epoch` uses in the block of `rank`.

        Lifetime: until the epoch that comes so many later as there are slots.
        """
        num_rows, row_bytes = rows.stop - rows.start, width * dtype.itemsize
        if num_rows == 0:
            return torch.empty(0, width, dtype=dtype, device="cpu")
        assert self._memory is not None, "required before"
        start = (epoch % self._num_slots) * self._room + rows.start * row_bytes
        block = self._memory.blocks[rank][start : start + num_rows * row_bytes]
        return block.view(dtype).view(num_rows, width)

    def free(self) -> None:
        """Hold nothing. Local, idempotent."""
        self._memory, self._room = None, 0


def line_aligned(num_bytes: int) -> int:
    """Up to the next cache line."""
    return align_up(num_bytes, LINE_BYTES)
