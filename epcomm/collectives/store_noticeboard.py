"""A noticeboard in the key-value store of a torch process group.

Under torchrun the agent of the first host answers for the store; started otherwise, rank 0 does,
and it may be the rank that is lost. A call to a store whose host is stopped never returns, so every
call runs in a thread that may be left waiting.
"""

from __future__ import annotations

import atexit
import os
import re
import socket
import threading
from collections.abc import Callable, Mapping

# Documented there, though torch does not list them for type checkers.
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from epcomm.collectives.bounded import LOOK_LIMIT_S, Noticeboard

_PREFIX = "epcomm/lost_ranks"
_NUM_REPORTS = "num_reports"
_HOST_RANK = "host_rank"


class StoreNoticeboard(Noticeboard):
    """Reports of the ranks of one process group.

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
        if _is_server(store):
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
        """Whether the store answered; not, while an earlier call still waits for an answer."""
        is_waiting = self._thread is not None and self._thread.is_alive()
        if self._is_lost or is_waiting:
            return False

        def run() -> None:
            try:
                call()
            except RuntimeError:
                self._is_lost = True  # the host has ended, and connections are not made anew

        # A daemon: the interpreter does not wait for it.
        self._thread = threading.Thread(target=run, name="epcomm-noticeboard", daemon=True)
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
        descriptor = re.search(r"fd=(\d+)", repr(_innermost(self._store)))
        if descriptor and self._thread is not None and self._thread.is_alive():
            with socket.socket(fileno=os.dup(int(descriptor[1]))) as connection:
                connection.shutdown(socket.SHUT_RDWR)
            self._thread.join(LOOK_LIMIT_S)


def _is_server(store: Store) -> bool:
    """Whether this process answers for the store."""
    # A TCPStore tells only in its text whether it holds the server: `server=<nullptr>` elsewhere.
    inner = _innermost(store)
    return isinstance(inner, TCPStore) and "server=TCPServer" in repr(inner)


def _innermost(store: Store) -> Store:
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return store
