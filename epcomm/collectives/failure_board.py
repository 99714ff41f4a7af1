"""A failure board in the key-value store of a torch process group and in a store on another host.

Under torchrun the agent of the first host serves the store; otherwise rank 0 does, which may be the
lost rank. If a whole host is lost, its store is lost too, and then no rank can find out which other
ranks ran there. So if the ranks run on several hosts, a rank on another host than the store serves
a second store, and reports go to both: the loss of one host leaves one of them.

    store on host 0     ranks 0 1 on host 0     ranks 2 3 on host 1     rank 2 serves the second
    host 0 dies         ranks 2 3 report there; 0 and 1 have not reported

A call to a store on a stopped host never returns, so every call runs in a thread that may be
abandoned.
"""

from __future__ import annotations

import atexit
import os
import socket
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from datetime import timedelta
from ipaddress import ip_address

# Documented in this module, but torch does not export them for type checkers.
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from epcomm.collectives.bounded import LOOK_LIMIT_S, FailureBoard

_PREFIX = "epcomm/lost_ranks"
_HOST_RANK = "host_rank"
_NUM_REPORTS = "num_reports"
# Keys of the second store: the rank that serves it, and its address and port.
_SECOND_RANK = "second_rank"
_SECOND = "second"
# Limit for connecting to the second store, which is already running then.
_CONNECT_LIMIT = timedelta(seconds=5)


class StoreFailureBoard(FailureBoard):
    """The reports of the ranks of one process group.

    Reports are never removed: a process group that lost a rank stays broken, and gloo cannot make
    another one of the same name over the same store.

    A call takes LOOK_LIMIT_S for each of the two stores that stops answering; later calls skip it.
    """

    def __init__(self, store: Store, *, rank: int, world_size: int) -> None:
        self._rank = rank
        self._world_size = world_size
        # Do not call store.clone(): a new connection looks up host names, which takes seconds if no
        # name server answers.
        first, port = PrefixStore(_PREFIX, store), port_of(store)
        self._first = self._reports_in(lambda: first, port)
        self._second: StoreReports | None = None
        # Serves the second store as long as this board exists.
        self._server: TCPStore | None = None
        if port is None:
            return
        if listens_on(port):
            self.host_rank = rank
            self._first.run(lambda store: store.set(_HOST_RANK, str(rank)))
        elif (address := address_beside(port)) is not None:
            self._first.run(lambda store: self._serve_second(store, address))

    def post(self, text: str) -> None:
        for reports in (self._first, self._second):
            if reports is not None:
                reports.post(text)

    def read(self) -> Mapping[int, str] | None:
        is_known = self._second is not None
        found = self._first.read(self._look_up)
        # Without failures the second store is read only once, to connect to it.
        if self._second is None or (is_known and found is not None and not found):
            return found
        beside = self._second.read()
        return beside if found is None else {**found, **(beside or {})}

    def last_known(self) -> Mapping[int, str]:
        second = {} if self._second is None else self._second.last_known()
        return {**self._first.last_known(), **second}

    def _reports_in(self, connect: Callable[[], Store], port: int | None) -> StoreReports:
        return StoreReports(connect, port=port, rank=self._rank, world_size=self._world_size)

    def _serve_second(self, store: Store, address: str) -> None:
        """Serve the second store, if no other rank does.

        A later board of this process group uses a new second store of the same rank.
        """
        if int(store.compare_set(_SECOND_RANK, "", str(self._rank))) == self._rank:
            self._server = TCPStore(address, 0, is_master=True, wait_for_workers=False)
            store.set(_SECOND, f"{address} {self._server.port}")

    def _look_up(self, store: Store) -> None:
        """Find the rank that serves the first store, and connect to the second."""
        if self.host_rank is None and store.check([_HOST_RANK]):
            self.host_rank = int(store.get(_HOST_RANK))
        if self._second is None and store.check([_SECOND]):
            address, port = store.get(_SECOND).decode().split()

            def connect() -> Store:
                return self._server or TCPStore(
                    address, int(port), wait_for_workers=False, timeout=_CONNECT_LIMIT
                )

            self._second = self._reports_in(connect, int(port))


class StoreReports:
    """The reports of the ranks of a group in one store; no call takes more than LOOK_LIMIT_S."""

    def __init__(
        self, connect: Callable[[], Store], *, port: int | None, rank: int, world_size: int
    ) -> None:
        """Use the store that `connect` returns; the first call invokes it. Local.

        port: the port of the store; None: it is in this process.
        """
        self._connect, self._port = connect, port
        self._rank, self._world_size = rank, world_size
        self._store: Store | None = None
        self._is_lost = False
        # The last report that is not in the store yet; a call that ends late posts it.
        self._unposted: deque[str] = deque(maxlen=1)
        self._reports: dict[int, str] = {}
        self._thread: threading.Thread | None = None

    def post(self, text: str) -> None:
        """Publish this rank's report, as soon as the store answers."""
        self._unposted.append(text)
        # Each run() posts the pending report.
        self.run(lambda _store: None)

    def read(self, look: Callable[[Store], None] | None = None) -> dict[int, str] | None:
        """Return the reports so far, by rank; None if the store does not answer.

        look: another request to the store in the same call.
        """

        def read(store: Store) -> None:
            if look is not None:
                look(store)
            self._read(store)

        return self.last_known() if self.run(read) else None

    def last_known(self) -> dict[int, str]:
        """Return the reports that have been read, also by an interrupted call. Local."""
        return dict(self._reports)

    def _read(self, store: Store) -> None:
        # Fast path: add(0) is one round trip, and usually there are no reports.
        if store.add(_NUM_REPORTS, 0):
            for rank in range(self._world_size):
                if store.check([str(rank)]):
                    # Keep each report, because the store may end before the last one is read.
                    self._reports = {**self._reports, rank: store.get(str(rank)).decode()}

    def run(self, call: Callable[[Store], None]) -> bool:
        """Run `call` on the store; return whether the store answered.

        Return False if an earlier call still waits for the store.
        """
        if self._is_lost or (self._thread is not None and self._thread.is_alive()):
            return False

        def ask() -> None:
            try:
                if self._store is None:
                    self._store = self._connect()
                self._post(self._store)
                call(self._store)
                self._post(self._store)
            except RuntimeError:
                self._is_lost = True  # the store has ended; it is not connected again

        # A daemon thread, so that the interpreter does not wait for it.
        self._thread = threading.Thread(target=ask, name="epcomm-failure board", daemon=True)
        self._thread.start()
        self._thread.join(LOOK_LIMIT_S)
        if self._thread.is_alive():
            atexit.unregister(self._hang_up)
            atexit.register(self._hang_up)
            return False
        return not self._is_lost

    def _post(self, store: Store) -> None:
        while self._unposted:
            store.set(str(self._rank), self._unposted.pop())
            store.add(_NUM_REPORTS, 1)

    def _hang_up(self) -> None:
        """End a call that still waits when the process exits.

        A thread that returns from torch during interpreter shutdown aborts the process.
        """
        if self._thread is not None and self._thread.is_alive():
            for own in _open_sockets():
                if _peer_of(own)[1] == self._port:
                    own.shutdown(socket.SHUT_RDWR)
            self._thread.join(LOOK_LIMIT_S)


def port_of(store: Store) -> int | None:
    """Return the port of a TCPStore, or None for another store."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return store.port if isinstance(store, TCPStore) else None


# A store reports its server and its connection only in repr(), which asks a name server first. The
# sockets of the process show both.


def listens_on(port: int) -> bool:
    """Return whether this process serves the store at `port`. Local."""
    return any(
        own.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) and own.getsockname()[1] == port
        for own in _open_sockets()
    )


def address_beside(port: int) -> str | None:
    """Return this host's address on its connection to the store at `port` on another host. Local.

    None if the store is on this host: the address is loopback, or both ends have the same one.
    """
    for own in _open_sockets():
        address, there = _peer_of(own)
        if there == port:
            mine = ip_address(str(own.getsockname()[0]).removeprefix("::ffff:"))
            is_here = mine.is_loopback or str(mine) == address.removeprefix("::ffff:")
            return None if is_here else str(mine)
    return None


def _open_sockets() -> Iterator[socket.socket]:
    """Yield a duplicate of each TCP socket of this process, closed after use; needs /proc."""
    with suppress(FileNotFoundError):
        for descriptor in os.listdir("/proc/self/fd"):
            with suppress(OSError), _duplicate(int(descriptor)) as own:
                if own.family in (socket.AF_INET, socket.AF_INET6):
                    yield own


def _duplicate(descriptor: int) -> socket.socket:
    duplicate = os.dup(descriptor)
    try:
        return socket.socket(fileno=duplicate)
    except OSError:  # not a socket
        os.close(duplicate)
        raise


def _peer_of(own: socket.socket) -> tuple[str, int]:
    """Return address and port of the other end, or "" and 0 if the socket is not connected."""
    try:
        address, port = own.getpeername()[:2]
    except OSError:
        return "", 0
    return address, port
