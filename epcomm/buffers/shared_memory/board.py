"""Exchange headers of calls through shared memory, for all buffers of a group on one host.

Every buffer has its own memory, so ranks in calls of different buffers would wait for different
signals. A group has one board: in every call a rank first writes its header there, and waits for
the headers of the other ranks.
"""

from __future__ import annotations

import torch
from torch import Tensor

from epcomm.buffers.shared_memory.growable import line_aligned
from epcomm.buffers.shared_memory.memory import HostMemory
from epcomm.buffers.shared_memory.signals import HostSignals, Signal, signal_bytes
from epcomm.calls.header import MESSAGE_WORDS
from epcomm.calls.order import Calls

# Two places alternate. Writing the header of call e is safe because every rank has reached call
# e - 1, so nobody reads headers of call e - 2 any more.
_NUM_PLACES = 2


class HostBoard:
    """A HeaderBoard in shared memory."""

    def __init__(self, calls: Calls) -> None:
        """Attach the boards of all ranks.

        Collective: yes.   Host sync: yes.
        Raises:
            BackendUnavailable: not enough shared memory on some rank; on every rank.
        """
        bounded, size = calls.collectives.bounded, calls.world_size
        assert bounded is not None, "the host waits in the collectives of a CPU group"
        start, shape = line_aligned(signal_bytes(size)), (_NUM_PLACES, size, MESSAGE_WORDS)
        num_bytes = 8 * torch.Size(shape).numel()
        memory = HostMemory(calls, start + num_bytes, phase="open call board")
        self._rank, self._bounded = calls.collectives.rank, bounded
        # Each rank's block has the headers of all ranks.
        self._headers = [
            block[start : start + num_bytes].view(torch.int64).view(shape)
            for block in memory.blocks
        ]
        self._signals = HostSignals(memory, self._rank, size, bounded)

    def exchange(self, message: Tensor, *, phase: str) -> Tensor:
        """Exchange one row of words with each rank; see HeaderBoard.

        message: [W, MESSAGE_WORDS].
        """
        # check() comes first, because a late rank still finds headers of ranks that have given up.
        self._bounded.check()
        place = self._signals.next_epoch(Signal.HEADER_READY) % _NUM_PLACES
        for headers, words in zip(self._headers, message, strict=True):
            headers[place, self._rank] = words
        self._signals.publish(Signal.HEADER_READY)
        self._signals.wait(Signal.HEADER_READY, phase)
        return self._headers[self._rank][place].clone()

    def close(self) -> None:
        """Release the memory. Local, idempotent."""
        self._signals.release()
        self._headers = []
