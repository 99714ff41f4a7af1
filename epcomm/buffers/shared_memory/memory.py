"""Shared memory of the ranks of one host: each rank has a block that all ranks map.

The files have no name (memfd). Other ranks open them in /proc/PID/fd of the owner, which processes
of the same user may read. So no file remains, however a process ends. Memory lasts as long as a
process holds a view of it.

Each rank keeps a lock on its own file. The system releases the lock when the rank's processes have
ended, so other ranks can distinguish an ended rank from a busy one.
"""

import fcntl
import logging
import math
import mmap
import os
import weakref

import torch
from torch import Tensor

from epcomm.calls.order import Calls
from epcomm.errors import BackendUnavailable
from epcomm.platforms.host import memory_left
from epcomm.types import align_up

_logger = logging.getLogger(__name__)

# Receive buffers start at cache lines.
LINE_BYTES = 64
# Smallest capacity of a region in bytes. It doubles when it is exceeded, so few calls allocate
# memory.
MIN_CAPACITY_BYTES = 2**20
# Bytes to allocate between two checks of the available memory.
_PIECE_BYTES = 2**24
# MFD_NOEXEC_SEAL of linux/memfd.h: some systems require memory that cannot be executed.
# Python 3.11 does not know the flag, nor does Linux before 6.3.
_NEVER_EXECUTED = 8


class HostMemory:
    """The blocks of shared memory of all ranks.

    names: the names of the ranks, for messages.
    blocks: one uint8 tensor [num_bytes] for each rank, page-aligned, initially zero.
    """

    def __init__(self, calls: Calls, num_bytes: int, *, phase: str) -> None:
        """Allocate this rank's block and map all others.

        Collective: yes; num_bytes is equal on all ranks.   Host sync: yes.
        Raises:
            BackendUnavailable: some rank lacks memory or cannot map a block; on every rank.
        """
        self.num_bytes = max(num_bytes, mmap.PAGESIZE)
        self._rank, self._world_size = calls.collectives.rank, calls.world_size
        self.names = calls.names
        # Descriptors of the files of all ranks, and of this rank's locked file. Closed by a
        # finalizer too, because the caller may never call close() and descriptors are limited.
        self._files: list[int] = []
        self._own_files: list[int] = []
        weakref.finalize(self, _close_all, self._own_files, self._files).atexit = False
        place, error = self._create()
        maps, error = self._attach(self._agree(calls, place, error, phase))
        # No rank closes its file before all ranks have mapped it.
        self._agree(calls, "", error, phase)
        self.maps: tuple[mmap.mmap, ...] = tuple(maps)
        self.blocks: list[Tensor] = [torch.frombuffer(each, dtype=torch.uint8) for each in maps]

    def words(self, at: int, shape: tuple[int, ...]) -> list[Tensor]:
        """Return int64 words [shape] at byte `at` of the block of each rank."""
        end = at + 8 * math.prod(shape)
        return [block[at:end].view(torch.int64).view(shape) for block in self.blocks]

    def ended_ranks(self) -> list[int]:
        """Return the ranks whose processes have ended or have closed their memory. Local."""
        return [r for r, file in enumerate(self._files) if r != self._rank and _is_free(file)]

    def close(self) -> None:
        """Close the files; views stay valid. Local, idempotent."""
        _close_all(self._own_files, self._files)

    def _create(self) -> tuple[str, str]:
        """Allocate the block; return its path and inode, and an error; one of them is empty."""
        try:
            file = _unnamed_file()
            self._own_files.append(file)
            fcntl.flock(file, fcntl.LOCK_EX)
            # Allocate the pages now, because without memory a first access would kill the process.
            for begin in range(0, self.num_bytes, _PIECE_BYTES):
                piece, left = min(_PIECE_BYTES, self.num_bytes - begin), memory_left()
                # All ranks allocate a piece at the same time.
                if left is not None and left < piece * self._world_size:
                    return "", f"{self.num_bytes} B of shared memory: {left} B are left"
                os.posix_fallocate(file, begin, piece)
            return f"/proc/{os.getpid()}/fd/{file} {os.fstat(file).st_ino}", ""
        except OSError as error:
            return "", f"{self.num_bytes} B of shared memory: {error.strerror}"

    def _attach(self, places: list[str]) -> tuple[list[mmap.mmap], str]:
        maps = []
        for place in places:
            path, number = place.split()
            try:
                # The owner opens its own file again too, because a lock belongs to one open file.
                self._files.append(os.open(path, os.O_RDWR | os.O_CLOEXEC))
                if os.fstat(self._files[-1]).st_ino != int(number):
                    return [], f"{path}: not the file of its rank, which has another PID namespace"
                maps.append(mmap.mmap(self._files[-1], self.num_bytes))
            except OSError as error:
                return [], f"{path}: {error.strerror}"
        return maps, ""

    def _agree(self, calls: Calls, text: str, error: str, phase: str) -> list[str]:
        """Gather the texts of all ranks, or raise the errors of all ranks on every rank."""
        records = calls.gather_records({"text": text, "error": error}, phase=phase)
        faults = [
            f"{self.names.describe([rank])}: {record['error']}"
            for rank, record in enumerate(records)
            if record["error"]
        ]
        if faults:
            self.close()
            raise BackendUnavailable(
                f"{phase}: {'; '.join(faults)} (this is {self.names.where}); free memory of the "
                "host or of its container, or use backend='collective'"
            )
        return [str(record["text"]) for record in records]


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
        rank = self._calls.collectives.rank
        _logger.debug("rank %d: %s now has %d B per receive buffer", rank, self._name, capacity)

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


def _close_all(*files: list[int]) -> None:
    for descriptors in files:
        while descriptors:
            os.close(descriptors.pop())


def _unnamed_file() -> int:
    try:
        return os.memfd_create("epcomm", os.MFD_CLOEXEC | _NEVER_EXECUTED)
    except OSError:
        return os.memfd_create("epcomm", os.MFD_CLOEXEC)


def _is_free(file: int) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    fcntl.flock(file, fcntl.LOCK_UN)
    return True
