"""A growable region of shared memory: receive buffers in each rank's block."""

from __future__ import annotations

import logging

import torch
from torch import Tensor

from epcomm.buffers.shared_memory.memory import HostMemory
from epcomm.calls.order import Calls
from epcomm.types import align_up

_logger = logging.getLogger(__name__)

# Receive buffers start at cache lines.
LINE_BYTES = 64
# Smallest capacity in bytes. It doubles when it is exceeded, so few calls allocate memory.
MIN_CAPACITY_BYTES = 2**20


class HostRegion:
    """A region of rows that other ranks write; views keep old memory alive when it grows."""

    def __init__(
        self, calls: Calls, name: str, num_buffers: int, most_bytes: int | None = None
    ) -> None:
        """Make an empty region.

        num_buffers: number of receive buffers, used in turn; equal on all ranks.
        most_bytes: most bytes that a receive buffer can need, or None; equal on all ranks.
        """
        self._calls, self._name = calls, name
        self._num_buffers, self._most_bytes = num_buffers, most_bytes
        self._memory: HostMemory | None = None
        self._capacity = 0

    def require(self, num_bytes: int) -> None:
        """Grow every receive buffer of every rank to at least num_bytes.

        Collective: yes, if the capacity is smaller; num_bytes is equal on all ranks.
        Raises:
            BackendUnavailable: not enough shared memory on some rank; on every rank, and the
                region is unchanged.
        """
        if num_bytes <= self._capacity:
            return
        capacity = MIN_CAPACITY_BYTES
        while capacity < num_bytes:
            capacity *= 2
        if self._most_bytes is not None:
            capacity = max(num_bytes, min(capacity, self._most_bytes))
        capacity = line_aligned(capacity)
        memory = HostMemory(self._calls, self._num_buffers * capacity, phase=f"grow {self._name}")
        # The views keep the memory, so the files can be closed.
        memory.close()
        self._memory, self._capacity = memory, capacity
        _logger.debug(
            "rank %d: %s now has %d B per receive buffer",
            self._calls.collectives.rank,
            self._name,
            capacity,
        )

    def rows(self, rank: int, epoch: int, rows: slice, width: int, dtype: torch.dtype) -> Tensor:
        """Return [rows, width] of the receive buffer that `epoch` uses in the block of `rank`.

        Lifetime: until epoch + num_buffers, which uses the same receive buffer.
        """
        num_rows, row_bytes = rows.stop - rows.start, width * dtype.itemsize
        if num_rows == 0:
            return torch.empty(0, width, dtype=dtype, device="cpu")
        assert self._memory is not None, "call require() first"
        start = (epoch % self._num_buffers) * self._capacity + rows.start * row_bytes
        block = self._memory.blocks[rank][start : start + num_rows * row_bytes]
        return block.view(dtype).view(num_rows, width)

    def free(self) -> None:
        """Release the memory. Local, idempotent."""
        self._memory, self._capacity = None, 0


def line_aligned(num_bytes: int) -> int:
    """Round a number of bytes up to a whole cache line."""
    return align_up(num_bytes, LINE_BYTES)
