"""Signals between the ranks of one host in shared memory, and a board for the headers of calls.

A signal belongs to a kind and a source; each rank has the signals of all ranks in its own block.
The source writes its epoch there after its data, and the owner polls it. Epochs only increase and
are compared by `<`, because a fast rank may be one epoch ahead.

Every buffer has its own memory, so ranks in calls of different buffers would wait for different
signals. Therefore a group has one HostBoard: in every call a rank first writes its header there and
waits for the headers of the other ranks.
"""

import math
import os
import threading
import time
from collections.abc import Sequence
from enum import IntEnum

from torch import Tensor

from epcomm.buffers.shared_memory.memory import HostMemory, line_aligned
from epcomm.calls.header import MESSAGE_WORDS
from epcomm.calls.order import Calls
from epcomm.collectives.bounded import Step

# Each signal has its own cache line, because ranks that write to one line slow each other down.
SIGNAL_BYTES = 64
_INT64S_PER_SIGNAL = SIGNAL_BYTES // 8
# A wait polls this many times and yields to other processes in between; then it sleeps for 50 us to
# 1 ms. There may be more ranks than cores, and waiting ranks must not slow down a computing one.
_NUM_YIELDS = 10
_SHORTEST_NAP_S, _LONGEST_NAP_S = 50e-6, 1e-3

# Two sets of headers alternate. Writing the header of call e is safe because every rank has reached
# call e - 1, so no rank reads headers of call e - 2.
_NUM_PLACES = 2


class Signal(IntEnum):
    """The kind of a signal.

    HEADER_READY: the source has written the header of its call.
    ROWS_READY: the source has written its rows.   SUMS_READY: the source has written its sums.
    """

    HEADER_READY = 0
    ROWS_READY = 1
    SUMS_READY = 2


def signal_bytes(world_size: int) -> int:
    """Return the bytes of the signals at the start of each block."""
    return len(Signal) * world_size * SIGNAL_BYTES


class HostSignals:
    """The signals of one group, at the start of the blocks of `memory`.

    bounded: limits the waits.
    """

    def __init__(self, memory: HostMemory, calls: Calls) -> None:
        bounded = calls.collectives.bounded
        assert bounded is not None, "the host waits in the collectives of a CPU group"
        self._rank, self._world_size = calls.collectives.rank, calls.world_size
        self._memory, self.bounded = memory, bounded
        self._signals = [memoryview(each).cast("q") for each in memory.maps]
        self._epochs = dict.fromkeys(Signal, 0)
        self._fence = threading.Lock()

    def next_epoch(self, kind: Signal) -> int:
        """Start the next epoch of this kind; all ranks start the same epochs in the same order."""
        self._epochs[kind] += 1
        return self._epochs[kind]

    def coming_epoch(self, kind: Signal) -> int:
        """Return the epoch that next_epoch() will start."""
        return self._epochs[kind] + 1

    def publish(self, kind: Signal) -> None:
        """Signal all ranks that this rank has reached the current epoch. Local."""
        self._order()
        place = self._place(kind, self._rank)
        for signals in self._signals:
            signals[place] = self._epochs[kind]

    def wait(self, kind: Signal, phase: str) -> None:
        """Wait until all ranks have reached the current epoch.

        All data that ranks wrote before publish() is visible after the wait.
        Raises:
            EPTimeout: some rank does not arrive in time; see BoundedWait.
        """
        own, epoch = self._signals[self._rank], self._epochs[kind]
        places = [self._place(kind, source) for source in range(self._world_size)]
        self.bounded.run(lambda: _step(own, places, epoch, self._memory), phase)
        self._order()

    def release(self) -> None:
        """Release the memory. Local, idempotent."""
        self._signals = []
        self._memory.close()

    def _place(self, kind: Signal, source: int) -> int:
        return (kind * self._world_size + source) * _INT64S_PER_SIGNAL

    def _order(self) -> None:
        """Fence loads and stores of this process by acquiring and releasing a lock twice.

        With one round, accesses from before and after it could both move inside and be reordered.
        """
        for _ in range(2):
            with self._fence:
                pass


class HostBoard:
    """A HeaderBoard in shared memory."""

    def __init__(self, calls: Calls) -> None:
        """Map the boards of all ranks.

        Collective: yes.   Host sync: yes.
        Raises:
            BackendUnavailable: not enough shared memory on some rank; on every rank.
        """
        start = line_aligned(signal_bytes(calls.world_size))
        shape = (_NUM_PLACES, calls.world_size, MESSAGE_WORDS)
        memory = HostMemory(calls, start + 8 * math.prod(shape), phase="open call board")
        self._rank = calls.collectives.rank
        # Each rank's block has the headers of all ranks.
        self._headers = memory.words(start, shape)
        self._signals = HostSignals(memory, calls)

    def exchange(self, message: Tensor, *, phase: str) -> Tensor:
        """Exchange one row of words with each rank; see HeaderBoard.

        message: [W, MESSAGE_WORDS].
        """
        # Call check() first, because a late rank could still read headers of ranks that gave up.
        self._signals.bounded.check()
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


def _step(signals: memoryview, places: Sequence[int], epoch: int, memory: HostMemory) -> Step:
    def step(seconds: float) -> bool:
        deadline_s = time.monotonic() + seconds
        num_polls, nap_s = 0, _SHORTEST_NAP_S
        while any(signals[place] < epoch for place in places):
            num_polls += 1
            if num_polls < _NUM_YIELDS:
                os.sched_yield()
                continue
            if time.monotonic() >= deadline_s:
                ended = [rank for rank in memory.ended_ranks() if signals[places[rank]] < epoch]
                if ended:
                    raise RuntimeError(f"the process of {memory.names.describe(ended)} has ended")
                return False
            time.sleep(nap_s)
            nap_s = min(2 * nap_s, _LONGEST_NAP_S)
        return True

    return step
