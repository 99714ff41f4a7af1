"""Headers of calls through shared memory, for all buffers of a group whose ranks share a host.

Every buffer has memory of its own, so ranks in different calls would wait for different signals.
The board is one for the group: whatever a rank calls, it first writes its header there, and waits
for those of the others.
"""

from __future__ import annotations

import torch
from torch import Tensor

from epcomm.buffers.shared_memory.growable import line_aligned
from epcomm.buffers.shared_memory.memory import HostMemory
from epcomm.buffers.shared_memory.signals import HostSignals, Signal, signal_bytes
from epcomm.collectives.base import Collectives
from epcomm.collectives.call_order import MESSAGE_WORDS

# Used in turns: who writes its header of call e has heard of everybody's call e - 1, which came
# after they had read those of e - 2.
_NUM_PLACES = 2


class HostBoard:
    """A HeaderBoard in shared memory."""

    def __init__(self, collectives: Collectives) -> None:
        """Attach the boards of all ranks.

        Collective: yes.   Host sync: yes.
        Raises:
            BackendUnavailable: not enough shared memory on some rank; on every rank.
        """
        bounded, size = collectives.bounded, collectives.world_size
        assert bounded is not None, "the host waits in the collectives of a CPU group"
        start, shape = line_aligned(signal_bytes(size)), (_NUM_PLACES, size, MESSAGE_WORDS)
        num_bytes = 8 * torch.Size(shape).numel()
        memory = HostMemory(collectives, start + num_bytes, phase="open call board")
        self._rank, self._bounded = collectives.rank, bounded
        # Of each rank: the headers of all ranks.
        self._headers = [
            block[start : start + num_bytes].view(torch.int64).view(shape)
            for block in memory.blocks
        ]
        self._signals = HostSignals(memory, self._rank, size, bounded)

    def exchange(self, message: Tensor, *, phase: str) -> Tensor:
        """See HeaderBoard; any number of words, up to those of a whole message."""
        # A late rank still reads what the others wrote before they gave up on it.
        self._bounded.check()
        num_words = message.shape[1]
        place = self._signals.next_epoch(Signal.HEADER_READY) % _NUM_PLACES
        for headers, words in zip(self._headers, message, strict=True):
            headers[place, self._rank, :num_words] = words
        self._signals.publish(Signal.HEADER_READY)
        self._signals.wait(Signal.HEADER_READY, phase)
        return self._headers[self._rank][place, :, :num_words].clone()

    def close(self) -> None:
        """Let go of the memory. Local, idempotent."""
        self._signals.release()
        self._headers = []
