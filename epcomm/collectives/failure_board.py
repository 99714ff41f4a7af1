"""A failure board in the key-value store of a torch process group.

Under torchrun the agent of the first host answers for the store; started otherwise, rank 0 does,
and it may be the rank that is lost. A call to a store whose host is stopped never returns, so every
call runs in a thread that may be left waiting.
"""

from __future__ import annotations

import atexit
import os
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress

# Documented there, though torch does not list them for type checkers.
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from epcomm.collectives.bounded import LOOK_LIMIT_S, FailureBoard

_PREFIX = "epcomm/lost_ranks"
_NUM_REPORTS = "num_reports"
_HOST_RANK = "host_rank"


class StoreFailureBoard(FailureBoard):
    """The reports of the ranks of one process group.

    They stay there: a process group that lost a rank is broken for all that come to it later, and
    gloo cannot make another of the same name over the same store.
    """

    def __init__(self, store: Store, *, rank: int, world_size: int) -> None:
        """Use `store`, the one of the process group. Local."""
        # Not a connection of our own, as store.clone() makes: each looks up host names, for seconds
        # where no name server answers.
        self._store = PrefixStore(_PREFIX, store)
        self._rank = rank
        self._world_size = world_size
        self._unposted: str | None = None
        self._reports: dict[int, str] = {}
        self._thread: threading.Thread | None = None
        self._is_lost = False
        self._port = _port_of(store)
        if any(_listens_on(own, self._port) for own in _open_sockets()):
            self.host_rank = rank
            self._within_limit(lambda: self._store.set(_HOST_RANK, str(rank)))

    def post(self, text: str) -> None:
        self._unposted = text
        self._within_limit(self._post)

    def read(self) -> Mapping[int, str] | None:
        return dict(self._reports) if self._within_limit(self._read) else None

    def _post(self) -> None:
        text = self._unposted
        if text is not None:
            self._store.set(str(self._rank), text)
            self._store.add(_NUM_REPORTS, 1)
            self._unposted = None

    def _read(self) -> None:
        self._post()
        store = self._store
        if self.host_rank is None and store.check([_HOST_RANK]):
            self.host_rank = int(store.get(_HOST_RANK))
        # add(0) is one round trip and waits for nothing; most often there is no report at all.
        if store.add(_NUM_REPORTS, 0):
            posted = [rank for rank in range(self._world_size) if store.check([str(rank)])]
            self._reports = {rank: store.get(str(rank)).decode() for rank in posted}

    def _within_limit(self, call: Callable[[], None]) -> bool:
        """Tell whether the store answered; it does not while an earlier call still waits for it."""
        is_waiting = self._thread is not None and self._thread.is_alive()
        if self._is_lost or is_waiting:
            return False

        def run() -> None:
            try:
                call()
            except RuntimeError:
                self._is_lost = True  # the host has ended, and connections are not made anew

        # A daemon: the interpreter does not wait for it.
        self._thread = threading.Thread(target=run, name="epcomm-failure board", daemon=True)
        self._thread.start()
        self._thread.join(LOOK_LIMIT_S)
        if self._thread.is_alive():
            atexit.unregister(self._hang_up)
            atexit.register(self._hang_up)
            return False
        return not self._is_lost

    def _hang_up(self) -> None:
        """End a call that still waits when the process ends.

        A thread that comes back from torch while the interpreter is torn down aborts the process.
        """
        if self._thread is not None and self._thread.is_alive():
            for own in _open_sockets():
                if _is_connected_to(own, self._port):
                    own.shutdown(socket.SHUT_RDWR)
            self._thread.join(LOOK_LIMIT_S)


def _port_of(store: Store) -> int | None:
    """Return the port at which a TCPStore is served, or None for another store."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return store.port if isinstance(store, TCPStore) else None


# A store tells neither who serves it nor which connection it uses, except in its repr(), which asks
# a name server first. The sockets of the process tell both.


def _open_sockets() -> Iterator[socket.socket]:
    """Yield each TCP socket of this process as a duplicate closed after use; none without /proc."""
    with suppress(FileNotFoundError):
        for descriptor in os.listdir("/proc/self/fd"):
            with suppress(OSError), _duplicate(int(descriptor)) as own:
                if own.family in (socket.AF_INET, socket.AF_INET6):
                    yield own


def _duplicate(descriptor: int) -> socket.socket:
    duplicate = os.dup(descriptor)
    try:
        return socket.socket(fileno=duplicate)
    except OSError:  # no socket
        os.close(duplicate)
        raise


def _listens_on(own: socket.socket, port: int | None) -> bool:
    is_listening = own.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    return bool(is_listening) and own.getsockname()[1] == port


def _is_connected_to(own: socket.socket, port: int | None) -> bool:
    try:
        return own.getpeername()[1] == port
    except OSError:
        return False
