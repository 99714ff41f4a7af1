from __future__ import annotations

import gc
import os
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch

from epcomm import ConfigError, EPGroup, EPTimeout, HandleError, ShapeError
from epcomm.collectives.base import Collectives

if TYPE_CHECKING:
    from mpi4py import MPI

LAUNCHER = Path(__file__).parents[2] / "scripts" / "launch_multi_rank.sh"

NUM_RANKS = 4
# Timeout in seconds; each test of a timeout takes this long and a second of grace.
TIMEOUT_S = 0.3
# The other rank receives 2.2 GB.
HAS_MEMORY = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") > 12 * 2**30

# Rank 2 is stopped. The first rank to exit ends the others, so they wait until all have printed.
PROGRAM_THAT_LOSES_RANK_2 = """
    import os
    import signal
    import sys
    import time
    from pathlib import Path

    import torch
    from mpi4py import MPI

    from epcomm import EPGroup, EPTimeout

    folder = Path(sys.argv[1])
    group = EPGroup(MPI.COMM_WORLD)
    group.collectives.all_gather(torch.zeros(1))
    group.collectives.bounded.timeout_s = 1
    if group.rank == 2:
        (folder / "stopped").write_text(str(os.getpid()))
        os.kill(os.getpid(), signal.SIGSTOP)
    try:
        group.collectives.all_gather(torch.zeros(1))
    except EPTimeout:
        (folder / f"spoke{group.rank}").touch()
        while len(list(folder.glob("spoke*"))) < 2:
            time.sleep(0.01)
        (folder / "left").write_text(str(time.time()))
        raise
"""


@pytest.mark.mpi_ranks(2, NUM_RANKS)
@pytest.mark.parametrize("size_bytes", [8 * 2**20 + 1], ids=["8 MiB"])
def test_long_messages(size_bytes: int, num_ranks: int, group: EPGroup) -> None:
    # Rank d receives 1 / (d + 1) of the rows, so ranks end at different times; twice in a row.
    def sent(src: int, dst: int) -> torch.Tensor:
        pattern = torch.arange(251, dtype=torch.uint8) ^ (16 * src + dst)
        return pattern.repeat(size_bytes // 251 + 1)[: size_bytes // (dst + 1)]

    everyone = range(num_ranks)
    mine = [sent(group.rank, dst) for dst in everyone]
    expected = torch.cat([sent(src, group.rank) for src in everyone])
    for _ in range(2):
        received = group.collectives.all_to_all(
            torch.cat(mine),
            send_splits=[len(rows) for rows in mine],
            recv_splits=[size_bytes // (group.rank + 1)] * num_ranks,
        )
        assert torch.equal(received, expected)
    gathered = group.collectives.all_gather(sent(group.rank, 0))
    assert torch.equal(gathered, torch.stack([sent(src, 0) for src in everyone]))


@pytest.mark.slow
@pytest.mark.mpi_ranks(2)
@pytest.mark.skipif(not HAS_MEMORY, reason="less than 12 GiB of memory")
def test_more_than_2_gib_travel(ep_ranks: MPI.Comm) -> None:
    num_rows, row_bytes = 2**20 + 3, 2112
    assert num_rows * row_bytes > 2**31
    with EPGroup(ep_ranks) as group:
        # Zero pages that nobody writes use no memory.
        send = torch.zeros(num_rows if group.rank == 0 else 1, row_bytes, dtype=torch.uint8)
        send[-1] = torch.arange(row_bytes).to(torch.uint8)
        received = group.collectives.all_to_all(
            send,
            send_splits=[0, send.shape[0]],
            recv_splits=[0, 0] if group.rank == 0 else [num_rows, 1],
        )
        for row in received[-2:]:
            assert torch.equal(row, send[-1])
        assert not received[:-2:4096].any()


@pytest.mark.mpi_ranks(NUM_RANKS)
def test_what_mpi_cannot_count_is_refused(group: EPGroup) -> None:
    with pytest.raises(ShapeError, match="2147483648 rows of 0 bytes, expected at most 21474"):
        group.collectives.all_gather(torch.empty(2**31 // NUM_RANKS, 0))
    with pytest.raises(ShapeError, match=r"send_splits \[1, 1, 1, 1\] sum to 4, expected"):
        group.collectives.all_to_all(torch.empty(5), send_splits=[1] * NUM_RANKS)
    with pytest.raises(ShapeError, match="3 splits for 4 ranks"):
        group.collectives.all_to_all(torch.empty(4), recv_splits=[1] * 3)
    with pytest.raises(ShapeError, match=r"tensor \[8, 4\] with strides \(1, 8\)"):
        group.collectives.all_gather(torch.ones(4, 8).T)
    assert_works(group)


@pytest.mark.mpi_ranks(2)
def test_communicators_that_are_no_group_are_refused(ep_ranks: MPI.Comm) -> None:
    from mpi4py import MPI

    with pytest.raises(ConfigError, match=r"this rank is not a member; construct the EPGroup"):
        EPGroup(MPI.COMM_NULL)
    between = MPI.COMM_SELF.Create_intercomm(0, ep_ranks, 1 - ep_ranks.Get_rank())
    with pytest.raises(ConfigError, match="of type Intercomm, expected Intracomm"):
        EPGroup(between)
    between.Free()


@pytest.mark.mpi_ranks(2)
def test_messages_of_the_caller_stay_apart(ep_ranks: MPI.Comm) -> None:
    from mpi4py import MPI

    # Wildcards that would receive any of our messages on this communicator.
    other, caught = 1 - ep_ranks.Get_rank(), bytearray(1)
    request = ep_ranks.Irecv([caught, MPI.BYTE], MPI.ANY_SOURCE, MPI.ANY_TAG)
    gathering = ep_ranks.Ibarrier()
    with EPGroup(ep_ranks) as group:
        assert_works(group)
    ep_ranks.Send([b"x", MPI.BYTE], other, 5)
    request.Wait()
    gathering.Wait()
    assert caught == b"x"


@pytest.mark.mpi_ranks(2)
def test_close_frees_what_the_group_made_and_nothing_else(ep_ranks: MPI.Comm) -> None:
    group = EPGroup(ep_ranks)
    assert_works(group)
    group.close()
    group.close()
    with pytest.raises(HandleError, match=r"all_gather: the EPGroup is closed \(rank . of 2\)"):
        group.collectives.all_gather(torch.zeros(1))
    with EPGroup(ep_ranks) as lender:
        EPGroup(lender.collectives).close()
        assert_works(lender)
    EPGroup(ep_ranks).close()  # unused
    assert ep_ranks.allgather(1) == [1, 1]


@pytest.mark.mpi_ranks(2)
def test_a_thread_that_exchanges_frees_what_close_could_not(ep_ranks: MPI.Comm) -> None:
    from epcomm.collectives.mpi import MpiCollectives

    group = EPGroup(ep_ranks)
    assert_works(group)
    mine, collectives = torch.tensor(group.rank), group.collectives
    assert isinstance(collectives, MpiCollectives)
    with ThreadPoolExecutor(1) as threads:
        if group.rank == 1:
            ep_ranks.recv(source=0)
        gathering = threads.submit(collectives.all_gather, mine)
        if group.rank == 0:
            while not collectives._in_use.locked():
                time.sleep(0.001)
            group.close(after_error=True)
            assert collectives._duplicate is not None
            ep_ranks.send(None, 1)
        assert gathering.result().tolist() == [0, 1]
    group.close()
    assert collectives._duplicate is None


@pytest.mark.mpi_ranks(NUM_RANKS)
@pytest.mark.parametrize("has_opened", [True, False], ids=["in_use", "never_opened"])
def test_late_rank_is_named_and_a_new_group_works(
    has_opened: bool, ep_ranks: MPI.Comm, group: EPGroup
) -> None:
    with EPGroup(ep_ranks) as other:
        if has_opened:
            assert_works(group)
            assert_works(other)
        message, again = lose_rank_2(ep_ranks, group.collectives)
        assert again == message
        if group.rank == 2:
            assert "this rank came too late" in message
            assert "ranks 0, 1, 3 had given up" in message
        else:
            assert message.startswith("dispatch rows")
            assert "rank 2 did not arrive" in message
            assert f"this is {group.where}" in message
        # The unfinished collectives must not disturb these.
        del group
        gc.collect()
        assert_works(other)
        if not has_opened:
            message, _ = lose_rank_2(ep_ranks, other.collectives)
            assert "this rank came too late" in message or "rank 2 did not arrive" in message
        with EPGroup(ep_ranks) as fresh:
            assert_works(fresh)
        assert ep_ranks.allgather(ep_ranks.Get_rank()) == [0, 1, 2, 3]


@pytest.mark.mpi_ranks(NUM_RANKS)
def test_a_rank_that_is_late_but_not_too_late_is_waited_for(group: EPGroup) -> None:
    assert_works(group)
    for late_rank in range(NUM_RANKS):
        sent_s = time.monotonic()
        if group.rank == late_rank:
            time.sleep(0.2)
            sent_s = time.monotonic()
        gathered = group.collectives.all_gather(torch.tensor(sent_s, dtype=torch.float64))
        assert time.monotonic() >= gathered[late_rank]
        assert_works(group)


@pytest.mark.slow
def test_program_that_lost_a_rank_names_it_and_ends(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(textwrap.dedent(PROGRAM_THAT_LOSES_RANK_2))
    launch = subprocess.run(
        [LAUNCHER, "--mpi", "3", "program.py", str(tmp_path)],
        cwd=tmp_path,
        env=os.environ | {"PYTHON": sys.executable},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=100,
        check=False,
    )
    ended_s = time.time()
    assert launch.returncode != 0, launch.stdout
    assert "EPTimeout: all_gather: rank 2 did not arrive" in launch.stdout
    assert ended_s - float((tmp_path / "left").read_text()) < 10, "it waited in MPI_Finalize"
    deadline_s = time.monotonic() + 10
    while Path("/proc", (tmp_path / "stopped").read_text()).exists():
        assert time.monotonic() < deadline_s, "the stopped rank is still there"
        time.sleep(0.05)


def lose_rank_2(world: MPI.Comm, collectives: Collectives) -> tuple[str, str]:
    """Delay rank 2 until the others have given up; return the messages of this rank, twice."""
    collectives.bounded.timeout_s = TIMEOUT_S
    if collectives.rank == 2:
        for _ in range(NUM_RANKS - 1):
            world.recv(tag=1)

    def call_twice() -> None:
        # Nobody keeps a reference to the tensor. The call of the late rank may succeed, because the
        # others have done their part of it, but no rank joins the next one.
        collectives.all_to_all(torch.zeros(NUM_RANKS, 100_000), phase="dispatch rows")
        collectives.all_gather(torch.zeros(1))

    message = message_of(call_twice)
    again = message_of(lambda: collectives.all_gather(torch.zeros(1)))
    for _ in range(collectives.rank):  # Ranks may give up at different times.
        message_of(lambda: collectives.all_gather(torch.zeros(1)))
    if collectives.rank != 2:
        world.send(None, 2, tag=1)
    return message, again


def message_of(call: Callable[[], object]) -> str:
    with pytest.raises(EPTimeout) as caught:
        call()
    return str(caught.value)


def assert_works(group: EPGroup) -> None:
    gathered = group.collectives.all_gather(torch.tensor(group.rank))
    assert gathered.tolist() == list(range(group.world_size))
