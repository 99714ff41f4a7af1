"""Collectives over an mpi4py communicator: CPU tensors of any dtype.

Every exchange is a nonblocking MPI collective that this rank polls, so that a wait can end. MPI
cannot take such a collective back: after a timeout it may still read and write the tensors, which
are therefore kept until the process ends.

Leaving after a timeout: MPI_Finalize, which mpi4py calls at exit, waits for all ranks, those that
never come among them. A program that gives up ends them all with `MPI.COMM_WORLD.Abort(1)`, or
leaves by `os._exit(1)`, upon which mpirun ends the others; scripts/run_program.py does that.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cache
from itertools import accumulate

import torch
from mpi4py import MPI
from torch import Tensor

from epcomm.collectives.base import (
    DEFAULT_TIMEOUT_S,
    Collectives,
    check_sendable,
    receiving,
)
from epcomm.collectives.bounded import BoundedWait, FailureBoard, Step
from epcomm.errors import ConfigError, HandleError, ShapeError

# The most rows, and the most bytes in a row, that an MPI call takes: both are a C int.
_MAX_COUNT = 2**31 - 1
# Seconds of polling without a pause. Small exchanges on one host end within it; a longer spin
# would only keep the core from a rank that shares it and is waited for.
_SPIN_S = 100e-6
# After that a pause lasts this part of the time waited so far, which it prolongs by no more, and at
# most so many seconds.
_PAUSE_SHARE = 1 / 8
_LONGEST_PAUSE_S = 1e-3
# Reports travel under the highest tags that every MPI has, one for each duplicate.
_HIGHEST_TAG, _NUM_TAGS = 32767, 16384

# Exchanges that MPI may still work on. In the module, because they must outlive every group.
_UNFINISHED: list[object] = []


class MpiCollectives(Collectives):
    """The three operations on a duplicate of a communicator that the caller owns and frees.

    The duplicate keeps our messages apart from the caller's. The first collective makes it, so that
    the constructor waits for no rank, and close() frees it. An EPTimeout ends it, but not the
    caller's communicator: collectives made anew get another duplicate.

    Calls come from one thread at a time. Several of them over one communicator are first used in
    one order on all ranks.
    """

    def __init__(self, communicator: MPI.Comm, *, whole: MpiCollectives | None = None) -> None:
        """Use `communicator`, of which this rank is a member. Local.

        whole: that of which they are a part; then the communicator is ours, and has no duplicate.

        Raises:
            ConfigError: it is null, or connects two groups.
        """
        if communicator == MPI.COMM_NULL:
            raise ConfigError(
                "EPGroup: the communicator is MPI.COMM_NULL, this rank is no member; "
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
                self._failure_board,
                rank=self.rank,
                world_size=self.world_size,
                timeout_s=DEFAULT_TIMEOUT_S,
            )
        else:
            self._failure_board, self._wait = whole._failure_board, whole._wait
        self.bounded = self._wait
        self._duplicate: MPI.Intracomm | None = None if whole is None else communicator
        self._requests: list[MPI.Request] = []  # of the exchange under way
        self._is_broken = False
        self._is_closed = False

    def _make_part(self, ranks: Sequence[int]) -> MpiCollectives:
        phase = "splitting the communicator"
        duplicate = self._open(phase)
        # MPI's own call waits without end, so all ranks come first.
        self._finish(lambda: self._step_of(duplicate.Ibarrier()), phase)
        return MpiCollectives(duplicate.Split(min(ranks), self.rank), whole=self)

    def all_to_all(
        self,
        send: Tensor,
        *,
        send_splits: Sequence[int] | None = None,
        recv_splits: Sequence[int] | None = None,
        out: Tensor | None = None,
        phase: str = "all_to_all",
    ) -> Tensor:
        send_counts = self._counts(send_splits, send.shape[0])
        if sum(send_counts) != send.shape[0]:
            raise ShapeError(
                f"all_to_all: send_splits {send_counts} sum to {sum(send_counts)}, expected the "
                f"{send.shape[0]} rows of send ({self._where}); split all of them"
            )
        recv_counts = self._counts(recv_splits, send.shape[0])
        recv = receiving(out, send, sum(recv_counts), self.device)
        row = self._row_type(send, max(send.shape[0], recv.shape[0]))
        to_ranks, from_ranks = _message(send, send_counts, row), _message(recv, recv_counts, row)
        self._run(lambda duplicate: duplicate.Ialltoallv(to_ranks, from_ranks), row, phase)
        return recv

    def all_gather(self, tensor: Tensor, *, phase: str = "all_gather") -> Tensor:
        check_sendable(tensor, self.device)
        rows = tensor if tensor.dim() else tensor.unsqueeze(0)
        gathered = tensor.new_empty((self.world_size, *tensor.shape))
        counts = [rows.shape[0]] * self.world_size
        row = self._row_type(rows, sum(counts))
        mine, all_ranks = [_bytes_of(tensor), counts[0], row], _message(gathered, counts, row)
        self._run(lambda duplicate: duplicate.Iallgatherv(mine, all_ranks), row, phase)
        return gathered

    def close(self) -> None:
        """Free the duplicate, unless MPI may still use it after a timeout. Local, idempotent."""
        super().close()
        self._is_closed = True
        if self._duplicate is not None and not self._is_broken and not MPI.Is_finalized():
            self._duplicate.Free()
            self._duplicate = None

    @property
    def _where(self) -> str:
        return self.names.where

    def _counts(self, splits: Sequence[int] | None, num_rows: int) -> list[int]:
        if splits is None:
            splits = [num_rows // self.world_size] * self.world_size
        if len(splits) != self.world_size:
            raise ShapeError(
                f"all_to_all: {len(splits)} splits for {self.world_size} ranks ({self._where}); "
                "give one a rank"
            )
        return list(splits)

    def _row_type(self, tensor: Tensor, num_rows: int) -> MPI.Datatype:
        """Make the type of one row for MPI: counted in bytes, 2 GiB would be the end."""
        row_bytes = math.prod(tensor.shape[1:]) * tensor.itemsize
        if max(num_rows, row_bytes) > _MAX_COUNT:
            raise ShapeError(
                f"collective: {num_rows} rows of {row_bytes} bytes, MPI takes at most "
                f"{_MAX_COUNT} rows of as many bytes ({self._where}); send longer rows, or fewer"
            )
        return MPI.BYTE.Create_contiguous(row_bytes).Commit()

    def _run(
        self, post: Callable[[MPI.Intracomm], MPI.Request], row: MPI.Datatype, phase: str
    ) -> None:
        try:
            duplicate = self._open(phase)
            self._finish(lambda: self._step_of(post(duplicate)), phase + self.scope)
        finally:
            row.Free()  # an exchange that still needs it keeps it

    def _open(self, phase: str) -> MPI.Intracomm:
        """Return the duplicate of the communicator, which the first collective makes."""
        if self._is_closed:
            raise HandleError(f"{phase}: the EPGroup is closed ({self._where}); make a new one")
        if self._duplicate is None:
            self._finish(self._start_duplication, f"{phase}, making the communicator")
        assert self._duplicate is not None, "made by the first collective"
        return self._duplicate

    def _start_duplication(self) -> Step:
        # Open MPI's Idup goes wrong beside another one, or another collective, on the same
        # communicator (open-mpi/ompi, issue 2025). So it starts when all ranks are there and none
        # has given up: then it will not be left behind unfinished, in the way of the next one.
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
                # A request holds its tensors, but not the duplicate that MPI is to fill in.
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
    """The reports as small messages to every rank, on the caller's communicator.

    Not on the duplicate: a rank that never came is the reason why there is none. Messages so small
    leave at once, without help from a receiver.
    """

    def __init__(self, communicator: MPI.Intracomm) -> None:
        """Use `communicator`. Local."""
        self.tag = _HIGHEST_TAG  # set anew by the first exchange
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
    """Make the key under which a communicator remembers how many duplicates we made of it."""
    return MPI.Comm.Create_keyval()


def _next_tag(communicator: MPI.Comm) -> int:
    """Return a tag for reports: equal on all ranks, since they make duplicates in one order."""
    number = communicator.Get_attr(_tag_key()) or 0
    communicator.Set_attr(_tag_key(), number + 1)
    return _HIGHEST_TAG - number % _NUM_TAGS


def _message(tensor: Tensor, counts: list[int], row: MPI.Datatype) -> list[object]:
    """Describe consecutive rows of `tensor` to MPI, `counts` of them for each rank."""
    return [_bytes_of(tensor), counts, [0, *accumulate(counts[:-1])], row]


def _bytes_of(tensor: Tensor) -> object:
    # A view. MPI takes numpy arrays, and numpy knows neither bfloat16 nor float8.
    return tensor.detach().reshape(-1).view(torch.uint8).numpy()
