"""A region of shared memory that grows: two slots of rows in each rank's block."""

from __future__ import annotations

import logging

import torch
from torch import Tensor

from epcomm.buffers.host_memory import HostMemory
from epcomm.collectives.base import Collectives
from epcomm.types import align_up

_logger = logging.getLogger(__name__)

# Used in turns, so that a batch may still be read while the next one arrives.
NUM_SLOTS = 2
# Slots begin at cache lines.
LINE_BYTES = 64
# Room is at least this, in bytes, and then doubles, so that few calls wait for new memory.
_LEAST_ROOM = 2**20


class HostRegion:
    """Rows that other ranks write. Views keep old memory alive when it grows."""

    def __init__(self, collectives: Collectives, name: str) -> None:
        self._collectives, self._name = collectives, name
        self._memory: HostMemory | None = None
        self._room = 0

    def require(self, num_bytes: int) -> None:
        """Have room for so many bytes in each slot of each rank.

        Collective: yes, where it is not there yet; num_bytes is equal on all ranks.
        Raises:
            BackendUnavailable: not enough shared memory on some rank; on every rank.
        """
        if num_bytes <= self._room:
            return
        room = _LEAST_ROOM
        while room < num_bytes:
            room *= 2
        self._memory = None
        self._memory = HostMemory(self._collectives, NUM_SLOTS * room, phase=f"grow {self._name}")
        # The views are enough.
        self._memory.close()
        self._room = room
        _logger.debug("rank %d: %s has %d B a slot now", self._collectives.rank, self._name, room)

    def rows(self, rank: int, epoch: int, rows: slice, width: int, dtype: torch.dtype) -> Tensor:
        """[rows, width] of the slot that `epoch` uses in the block of `rank`.

        Lifetime: until the second next epoch.
        """
        num_rows, row_bytes = rows.stop - rows.start, width * dtype.itemsize
        if num_rows == 0:
            return torch.empty(0, width, dtype=dtype)
        assert self._memory is not None, "required before"
        start = (epoch % NUM_SLOTS) * self._room + rows.start * row_bytes
        block = self._memory.blocks[rank][start : start + num_rows * row_bytes]
        return block.view(dtype).view(num_rows, width)

    def free(self) -> None:
        """Hold nothing. Local, idempotent."""
        self._memory, self._room = None, 0


def line_aligned(num_bytes: int) -> int:
    """Up to the next cache line."""
    return align_up(num_bytes, LINE_BYTES)
