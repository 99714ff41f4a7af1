"""A failure board in the key-value store of a torch process group and in a store on another host.

Under torchrun the agent of the first host serves the store; otherwise rank 0 does, which may be the
lost rank. If a whole host is lost, its store is lost too, and then no rank can find out which other
ranks ran there. So if the ranks run on several hosts, a rank on another host than the store serves
a second store, and reports go to both: the loss of one host leaves one of them.

    store on host 0     ranks 0 1 on host 0     ranks 2 3 on host 1     rank 2 serves the second
    host 0 dies         ranks 2 3 report there; 0 and 1 have not reported
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import timedelta

# Documented in this module, but torch does not export them for type checkers.
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from epcomm.collectives.bounded import FailureBoard
from epcomm.collectives.store_reports import (
    StoreReports,
    address_beside,
    listens_on,
    port_of,
)

_PREFIX = "epcomm/lost_ranks"
_HOST_RANK = "host_rank"
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
        """Use `store`, the store of the process group. Local."""
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
                    address,
                    int(port),
                    is_master=False,
                    wait_for_workers=False,
                    timeout=_CONNECT_LIMIT,
                )

            self._second = self._reports_in(connect, int(port))
