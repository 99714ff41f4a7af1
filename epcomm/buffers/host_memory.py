"""Shared memory of the ranks of one host: a block each, attached by all.

Names are random, of the owner alone, and gone as soon as every rank has attached, so that a process
that dies leaves nothing behind. Memory lasts as long as somebody holds a view of it.

Each rank keeps a lock on its own file, which the system releases when its processes have ended: so
others can tell a rank that is gone from one that is busy.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import secrets
from contextlib import suppress
from pathlib import Path

import torch
from torch import Tensor

from epcomm.collectives.base import Collectives
from epcomm.errors import BackendUnavailable

_FOLDER = Path("/dev/shm")
_PREFIX = "epcomm-"
_OWNER_ONLY = 0o600
# Random bytes of a name: nobody else finds it.
_NAME_BYTES = 16


def host_of_this_process() -> str:
    """Equal for processes that can share memory: one kernel, one folder of shared memory.

    And one network, for processes in several are taken for several hosts. Empty where that cannot
    be known. Local.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text("ascii").strip()
        network = os.stat("/proc/self/ns/net").st_ino
        return f"{boot}/{os.stat(_FOLDER).st_dev}/{network}"
    except OSError:
        return ""


class HostMemory:
    """blocks: [W], uint8 [num_bytes] of each rank, page-aligned, zero at first."""

    def __init__(self, collectives: Collectives, num_bytes: int, *, phase: str) -> None:
        """Allocate this rank's block and attach all others.

        Collective: yes; num_bytes is equal on all ranks.   Host sync: yes.
        Raises:
            BackendUnavailable: some rank has not enough shared memory, or cannot attach; on every
                rank.
        """
        self.num_bytes = max(num_bytes, mmap.PAGESIZE)
        self._rank = collectives.rank
        # Of this rank's file, locked, and of the files of all ranks.
        self._own_file: int | None = None
        self._files: list[int] = []
        path = _FOLDER / f"{_PREFIX}{secrets.token_hex(_NAME_BYTES)}"
        try:
            error = self._create(path)
            paths = self._agree(collectives, str(path), error, phase)
            maps, error = self._attach(paths)
            # Nobody unlinks before all have attached.
            self._agree(collectives, "", error, phase)
        finally:
            with suppress(FileNotFoundError):
                path.unlink()
        self.maps: tuple[mmap.mmap, ...] = tuple(maps)
        self.blocks: tuple[Tensor, ...] = tuple(
            torch.frombuffer(each, dtype=torch.uint8) for each in maps
        )

    def ended_ranks(self) -> list[int]:
        """Ranks whose processes have ended, or have let go of their memory. Local."""
        return [
            rank for rank, file in enumerate(self._files) if rank != self._rank and _is_free(file)
        ]

    def close(self) -> None:
        """Let go of the files; views stay. Local, idempotent."""
        if self._own_file is not None:
            os.close(self._own_file)
            self._own_file = None
        while self._files:
            os.close(self._files.pop())

    def _create(self, path: Path) -> str:
        """Why the block cannot be had; empty if it can."""
        try:
            self._own_file = os.open(path, os.O_CREAT | os.O_EXCL | os.O_RDWR, _OWNER_ONLY)
            fcntl.flock(self._own_file, fcntl.LOCK_EX)
            # Now, and not by a signal at the first touch of a page that is not there.
            os.posix_fallocate(self._own_file, 0, self.num_bytes)
        except OSError as error:
            return f"{self.num_bytes} B in {_FOLDER}: {error.strerror}"
        return ""

    def _attach(self, paths: list[str]) -> tuple[list[mmap.mmap], str]:
        maps = []
        for path in paths:
            try:
                # Opened anew also by its owner, for a lock belongs to one opening.
                self._files.append(os.open(path, os.O_RDWR))
                maps.append(mmap.mmap(self._files[-1], self.num_bytes))
            except OSError as error:
                return [], f"{path}: {error.strerror}"
        return maps, ""

    def _agree(self, collectives: Collectives, text: str, error: str, phase: str) -> list[str]:
        """The texts of all ranks, or one error on all of them."""
        records = collectives.gather_records({"text": text, "error": error}, phase=phase)
        faults = [
            f"rank {rank}: {record['error']}"
            for rank, record in enumerate(records)
            if record["error"]
        ]
        if faults:
            self.close()
            raise BackendUnavailable(
                f"{phase}: {'; '.join(faults)} (this is rank {collectives.rank} of "
                f"{collectives.world_size}); enlarge {_FOLDER} or use backend='collective'"
            )
        return [str(record["text"]) for record in records]


def _is_free(file: int) -> bool:
    """Whether nobody holds the lock of a file."""
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    fcntl.flock(file, fcntl.LOCK_UN)
    return True
