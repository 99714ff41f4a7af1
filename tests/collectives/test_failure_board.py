import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from multiprocessing.context import ForkProcess

import pytest
from torch.distributed import HashStore, PrefixStore, TCPStore  # type: ignore[attr-defined]

from epcomm.collectives import failure_board
from epcomm.collectives.bounded import LOOK_LIMIT_S
from epcomm.collectives.failure_board import StoreFailureBoard, StoreReports

# Seconds that a program may take to start or end on a busy machine.
PATIENCE_S = 120.0
# Seconds by which a call may exceed its limit on a busy machine.
SLACK_S = 1.0

# The answer arrives, or the connection ends, during interpreter shutdown.
LEAVING = """
    import os
    import signal
    import subprocess
    import sys
    import time

    from torch.distributed import TCPStore

    from epcomm.collectives.failure_board import StoreFailureBoard

    port, pid = int(sys.argv[1]), int(sys.argv[2])
    store = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    board = StoreFailureBoard(store, rank=0, world_size=2)
    assert board.read() == {}
    os.kill(pid, signal.SIGSTOP)
    time.sleep(0.2)  # until it has stopped
    assert board.read() is None
    subprocess.Popen(["sh", "-c", f"sleep 0.2; kill -CONT {pid}"])
    sys.exit(7)
"""


@dataclass
class Host:
    """A process that serves a store."""

    process: ForkProcess
    port: int

    def connect(self) -> TCPStore:
        return TCPStore("127.0.0.1", self.port, is_master=False, wait_for_workers=False)

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.process.pid, number)

    def kill(self) -> None:
        self.process.kill()
        self.process.join()


def serve(pipe: Connection) -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    pipe.send(store.port)
    while True:
        signal.pause()


@pytest.fixture
def host() -> Iterator[Host]:
    context = get_context("fork")
    here, there = context.Pipe()
    process = context.Process(target=serve, args=(there,))
    process.start()
    host = Host(process, here.recv())
    yield host
    host.kill()


def test_reports_reach_all_ranks_and_the_last_counts() -> None:
    store = HashStore()
    boards = [StoreFailureBoard(store, rank=rank, world_size=3) for rank in range(3)]
    assert [board.read() for board in boards] == [{}, {}, {}]
    boards[1].post("waits")
    boards[1].post("gave up")
    boards[2].post("é\n")
    assert [board.read() for board in boards] == [{1: "gave up", 2: "é\n"}] * 3


def test_rank_that_holds_the_store_is_known_to_the_others(host: Host) -> None:
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    assert StoreFailureBoard(server, rank=1, world_size=2).host_rank == 1
    # A process outside the group serves this store.
    board = StoreFailureBoard(host.connect(), rank=0, world_size=2)
    assert board.read() == {}
    assert board.host_rank is None
    # The host_rank of another rank's board is read from the store.
    shared = HashStore()
    boards = [StoreFailureBoard(shared, rank=rank, world_size=2) for rank in range(2)]
    assert [board.read() for board in boards] == [{}, {}]
    PrefixStore("epcomm/lost_ranks", shared).set("host_rank", "1")
    assert [board.read() for board in boards] == [{}, {}]
    assert [board.host_rank for board in boards] == [1, 1]


@pytest.mark.slow
def test_stopped_host_is_silence_until_it_goes_on(host: Host) -> None:
    board = StoreFailureBoard(host.connect(), rank=0, world_size=2)
    board.post("waits")
    assert board.read() == {0: "waits"}
    host.signal(signal.SIGSTOP)
    time.sleep(0.2)  # wait until it has stopped
    start_s = time.monotonic()
    board.post("gave up")
    assert board.read() is None
    assert board.read() is None
    assert time.monotonic() - start_s < LOOK_LIMIT_S + SLACK_S
    host.signal(signal.SIGCONT)
    while (reports := board.read()) is None:
        assert time.monotonic() - start_s < PATIENCE_S
        time.sleep(0.01)
    assert reports == {0: "gave up"}


@pytest.mark.slow
def test_killed_host_is_silence_immediately(host: Host) -> None:
    board = StoreFailureBoard(host.connect(), rank=0, world_size=2)
    assert board.read() == {}
    host.kill()
    start_s = time.monotonic()
    board.post("gave up")
    assert board.read() is None
    assert time.monotonic() - start_s < LOOK_LIMIT_S


@pytest.mark.slow
def test_reports_outlive_the_host_of_the_store(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    boards = {0: StoreFailureBoard(host.connect(), rank=0, world_size=4)}
    # Ranks 1 to 3 see the store on another host; the first of them serves the second store.
    monkeypatch.setattr(failure_board, "address_beside", lambda port: "127.0.0.1")
    for rank in (1, 2, 3):
        boards[rank] = StoreFailureBoard(host.connect(), rank=rank, world_size=4)
    assert [board.read() for board in boards.values()] == [{}] * 4
    boards[0].post("is lost")
    assert [board.read() for board in boards.values()] == [{0: "is lost"}] * 4
    host.kill()
    boards[2].post("waits")
    boards[3].post("gave up")
    for rank in (1, 2, 3):
        assert boards[rank].read() == {0: "is lost", 2: "waits", 3: "gave up"}


def test_what_was_read_stays_known_when_the_store_ends_within_a_read() -> None:
    class Ending(HashStore):
        def get(self, key: str) -> bytes:
            if key == "2":
                raise RuntimeError("Connection reset by peer")
            return super().get(key)

    store = Ending()
    reports = [StoreReports(lambda: store, port=None, rank=rank, world_size=4) for rank in range(4)]
    reports[1].post("gave up")
    reports[2].post("waits")
    assert reports[3].read() is None
    assert reports[3].last_known() == {1: "gave up"}


@pytest.mark.slow
def test_process_ends_by_itself_while_the_store_is_silent(host: Host) -> None:
    arguments = [str(host.port), str(host.process.pid)]
    leaving = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(LEAVING), *arguments],
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        check=False,
    )
    assert leaving.returncode == 7, leaving.stderr
