"""Collectives over an mpi4py communicator: CPU tensors of any dtype.

Every exchange is a nonblocking MPI collective that this rank polls, so that a wait can time out.
MPI cannot cancel such a collective: after a timeout it may still read and write the tensors, so
they are kept until the process ends.

Exit after a timeout: MPI_Finalize, which mpi4py calls at exit, waits for all ranks, including lost
ones. So call `MPI.COMM_WORLD.Abort(1)`, which ends all ranks, or `os._exit(1)`, after which mpirun
ends the others; scripts/run_program.py does that.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from itertools import accumulate
from threading import Lock

import torch
from mpi4py import MPI
from torch import Tensor

from epcomm.collectives.base import Collectives, Splits
from epcomm.collectives.bounded import BoundedWait, FailureBoard, Step
from epcomm.errors import ConfigError, ShapeError, group_closed

# Most rows, and most bytes in a row, of an MPI call: both are a C int.
_MAX_COUNT = 2**31 - 1
# Seconds of polling without a pause. Small exchanges on one host end within it; a longer spin would
# take the core from another rank that shares it.
_SPIN_S = 100e-6
# Later pauses last this share of the time waited so far, so they add at most that share to a wait,
# and at most _LONGEST_PAUSE_S.
_PAUSE_SHARE = 1 / 8
_LONGEST_PAUSE_S = 1e-3
# Reports use the highest tags that every MPI supports, one for each duplicate.
_HIGHEST_TAG, _NUM_TAGS = 32767, 16384

# Exchanges that MPI may still work on. A module variable, because they must outlive every group.
_UNFINISHED: list[object] = []


class MpiCollectives(Collectives):
    """The collective operations on a duplicate of a communicator that the caller owns and frees.

    The duplicate separates our messages from the caller's. The first collective makes it, so the
    constructor waits for no rank, and close() frees it. After an EPTimeout the duplicate is
    unusable, but not the caller's communicator: new MpiCollectives make another duplicate.

    Call from one thread at a time, which need not be the same; without MPI_THREAD_MULTIPLE no other
    may use MPI. If several MpiCollectives share a communicator, all ranks must use them for the
    first time in the same order.
    """

    def __init__(self, communicator: MPI.Comm, *, whole: MpiCollectives | None = None) -> None:
        """Use `communicator`, of which this rank is a member. Local.

        whole: the collectives of the whole group, if these are a part; then the communicator is
            ours and is not duplicated.

        Raises:
            ConfigError: it is null, or connects two groups.
        """
        if communicator == MPI.COMM_NULL:
            raise ConfigError(
                "EPGroup: the communicator is MPI.COMM_NULL, this rank is not a member; "
                "construct the EPGroup on member ranks only"
            )
        if not isinstance(communicator, MPI.Intracomm):
            raise ConfigError(
                f"EPGroup: the communicator is of type {type(communicator).__name__}, expected "
                "Intracomm; call .Merge() on an Intercomm"
            )
        self.rank = communicator.Get_rank()
        self.world_size = communicator.Get_size()
        self.device = torch.device("cpu")
        self._communicator = communicator
        if whole is None:
            self._failure_board = MpiFailureBoard(communicator)
            self._wait = BoundedWait(
                self._failure_board, rank=self.rank, world_size=self.world_size
            )
        else:
            self._failure_board, self._wait = whole._failure_board, whole._wait
        self.bounded = self._wait
        self._duplicate: MPI.Intracomm | None = None if whole is None else communicator
        self._requests: list[MPI.Request] = []  # requests of the current exchange
        self._is_broken = False
        self._is_closed = False
        # Held during an exchange, in which another thread may call close().
        self._in_use = Lock()

    def separate(self) -> str:
        # The duplicate has no other users.
        record = {"level": MPI.Query_thread()}
        found = self.gather_records(record, phase="comparing the thread levels of MPI")
        lacking = [r for r, each in enumerate(found) if each["level"] != MPI.THREAD_MULTIPLE]
        if not lacking:
            return ""
        ranks = self.names.describe(lacking)
        return (
            f"MPI was initialised without MPI_THREAD_MULTIPLE on {ranks}; set "
            'mpi4py.rc.thread_level = "multiple" before mpi4py.MPI is imported'
        )

    def _make_part(self, ranks: Sequence[int]) -> MpiCollectives:
        phase = "splitting the communicator"
        duplicate = self._open(phase)
        # Split() has no timeout, so wait here until all ranks have arrived.
        self._finish(lambda: self._step_of(duplicate.Ibarrier()), phase)
        return MpiCollectives(duplicate.Split(min(ranks), self.rank), whole=self)

    def _all_to_all(
        self, recv: Tensor, send: Tensor, recv_splits: Splits, send_splits: Splits, phase: str
    ) -> None:
        send_counts = self._counts(send_splits, send.shape[0])
        if sum(send_counts) != send.shape[0]:
            raise ShapeError(
                f"all_to_all: send_splits {send_counts} sum to {sum(send_counts)}, expected the "
                f"{send.shape[0]} rows of send ({self.names.where}); pass splits that cover them"
            )
        recv_counts = self._counts(recv_splits, send.shape[0])
        row = self._row_type(send, max(send.shape[0], recv.shape[0]))
        to_ranks, from_ranks = _message(send, send_counts, row), _message(recv, recv_counts, row)
        self._run(lambda duplicate: duplicate.Ialltoallv(to_ranks, from_ranks), row, phase)

    def _all_gather(self, recv: Tensor, tensor: Tensor, phase: str) -> None:
        rows = tensor if tensor.dim() else tensor.unsqueeze(0)
        counts = [rows.shape[0]] * self.world_size
        row = self._row_type(rows, sum(counts))
        mine, all_ranks = [_bytes_of(tensor), counts[0], row], _message(recv, counts, row)
        self._run(lambda duplicate: duplicate.Iallgatherv(mine, all_ranks), row, phase)

    def close(self) -> None:
        """Free the duplicate, unless MPI may still use it after a timeout. Local, idempotent.

        If another thread is in an exchange, that thread frees it at the end.
        """
        super().close()
        self._is_closed = True
        self._free_if_idle()

    def _free_if_idle(self) -> None:
        if not self._in_use.acquire(blocking=False):
            return
        if self._duplicate is not None and not self._is_broken and not MPI.Is_finalized():
            self._duplicate.Free()
            self._duplicate = None
        self._in_use.release()

    def _counts(self, splits: Splits, num_rows: int) -> list[int]:
        if splits is None:
            splits = [num_rows // self.world_size] * self.world_size
        if len(splits) != self.world_size:
            raise ShapeError(
                f"all_to_all: {len(splits)} splits for {self.world_size} ranks "
                f"({self.names.where}); pass one split per rank"
            )
        return list(splits)

    def _row_type(self, tensor: Tensor, num_rows: int) -> MPI.Datatype:
        """Make the MPI type of one row; counts in bytes would be limited to 2 GiB."""
        row_bytes = math.prod(tensor.shape[1:]) * tensor.itemsize
        if max(num_rows, row_bytes) > _MAX_COUNT:
            raise ShapeError(
                f"collective: {num_rows} rows of {row_bytes} bytes, expected at most {_MAX_COUNT} "
                f"of both, the limit of MPI ({self.names.where}); send fewer or shorter rows"
            )
        return MPI.BYTE.Create_contiguous(row_bytes).Commit()

    def _run(
        self, post: Callable[[MPI.Intracomm], MPI.Request], row: MPI.Datatype, phase: str
    ) -> None:
        try:
            with self._in_use:
                duplicate = self._open(phase)
                self._finish(lambda: self._step_of(post(duplicate)), phase)
        finally:
            row.Free()  # MPI keeps the type while an exchange still uses it.
            if self._is_closed:
                self._free_if_idle()

    def _open(self, phase: str) -> MPI.Intracomm:
        """Return the duplicate of the communicator; the first collective makes it."""
        if self._is_closed:
            raise group_closed(phase, self.names.where)
        if self._duplicate is None:
            self._finish(self._start_duplication, f"{phase}, making the communicator")
        assert self._duplicate is not None, "made by the first collective"
        return self._duplicate

    def _start_duplication(self) -> Step:
        # Open MPI's Idup fails if it runs at the same time as another Idup or collective on the
        # same communicator (open-mpi/ompi, issue 2025). So it starts only when all ranks have
        # arrived and none has given up: then it is not left unfinished before the next Idup.
        self._failure_board.tag = _next_tag(self._communicator)
        arrival = self._step_of(self._communicator.Ibarrier())
        duplication: Step | None = None

        def step(seconds: float) -> bool:
            nonlocal duplication
            if duplication is None:
                if not arrival(seconds) or self._failure_board.read():
                    return False
                self._duplicate, request = self._communicator.Idup()
                duplication = self._step_of(request)
            return duplication(seconds)

        return step

    def _finish(self, start: Callable[[], Step], phase: str) -> None:
        self._requests = []
        try:
            self._wait.run(start, phase)
        except BaseException:
            if self._requests:
                self._is_broken = True
                # A request holds its tensors, but not the duplicate that MPI will fill in.
                _UNFINISHED.append((self._requests, self._duplicate))
            raise

    def _step_of(self, request: MPI.Request) -> Step:
        self._requests.append(request)

        def step(seconds: float) -> bool:
            start_s = time.perf_counter()
            while not request.Test():
                waited_s = time.perf_counter() - start_s
                if waited_s >= seconds:
                    return False
                if waited_s >= _SPIN_S:
                    time.sleep(min(waited_s * _PAUSE_SHARE, _LONGEST_PAUSE_S))
            return True

        return step


class MpiFailureBoard(FailureBoard):
    """A failure board that sends reports as small messages to every rank.

    It uses the caller's communicator, because the duplicate does not exist if a rank never arrived.
    Small messages are sent eagerly, without action of the receiver.
    """

    def __init__(self, communicator: MPI.Intracomm) -> None:
        self.tag = _HIGHEST_TAG  # The first exchange replaces it.
        self._communicator = communicator
        self._reports: dict[int, str] = {}

    def post(self, text: str) -> None:
        rank, message = self._communicator.Get_rank(), [text.encode(), MPI.BYTE]
        self._reports[rank] = text
        with suppress(MPI.Exception):
            for other in range(self._communicator.Get_size()):
                if other != rank:
                    _UNFINISHED.append(self._communicator.Isend(message, other, self.tag))

    def read(self) -> Mapping[int, str] | None:
        status = MPI.Status()
        try:
            while self._communicator.Iprobe(MPI.ANY_SOURCE, self.tag, status):
                text = bytearray(status.Get_count(MPI.BYTE))
                self._communicator.Recv([text, MPI.BYTE], status.Get_source(), self.tag)
                self._reports[status.Get_source()] = text.decode()
        except MPI.Exception:
            return None
        return self.last_known()

    def last_known(self) -> Mapping[int, str]:
        return dict(self._reports)


@cache
def _tag_key() -> int:
    """Return the attribute key of the number of duplicates that we made of a communicator."""
    return MPI.Comm.Create_keyval()


def _next_tag(communicator: MPI.Comm) -> int:
    """Return a tag for reports, equal on all ranks if they make duplicates in the same order."""
    number = communicator.Get_attr(_tag_key()) or 0
    communicator.Set_attr(_tag_key(), number + 1)
    return _HIGHEST_TAG - number % _NUM_TAGS


def _message(tensor: Tensor, counts: list[int], row: MPI.Datatype) -> list[object]:
    """Return the MPI buffer of consecutive rows of `tensor`; counts[r] rows are for rank r."""
    return [_bytes_of(tensor), counts, [0, *accumulate(counts[:-1])], row]


def _bytes_of(tensor: Tensor) -> object:
    # A view of bytes, because numpy arrays, which MPI needs, have neither bfloat16 nor float8.
    return tensor.detach().reshape(-1).view(torch.uint8).numpy()
