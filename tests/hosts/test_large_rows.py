"""Large rows between hosts over gloo, which are sent and received at once."""

import subprocess
import sys

import pytest
import torch

from epcomm import EPGroup
from tests.hosts import exchange_large_rows, network
from tests.hosts.exchange_large_rows import NUM_ROWS, WIDTH

pytestmark = pytest.mark.slow

MBIT_PER_S = 50
# Seconds for a program of two ranks on a busy machine.
LIMIT_S = 100


@pytest.mark.host_ranks(4)
def test_rows_of_all_sizes_keep_their_bits(group: EPGroup) -> None:
    group.calls.open_transfers()
    collectives, rank, world_size = group.collectives, group.rank, group.world_size
    generator = torch.Generator().manual_seed(5)
    for _ in range(8):
        # None, a few and many rows, to each rank.
        numbers = torch.tensor([0, 3, 200])[
            torch.randint(3, (world_size,) * 2, generator=generator)
        ]
        rows = torch.randn(int(numbers.sum()), WIDTH, generator=generator)
        # By sender, then receiver.
        messages = rows.split(numbers.flatten().tolist())
        sent, due = numbers[rank].tolist(), numbers[:, rank].tolist()
        out = torch.full((sum(due), WIDTH), float("nan"))
        mine = torch.cat(messages[rank * world_size : (rank + 1) * world_size])
        found = collectives.all_to_all(mine, send_splits=sent, recv_splits=due, out=out)
        assert found is out
        assert torch.equal(out, torch.cat(messages[rank::world_size]))


@pytest.fixture
def _hosts_can_be_made() -> None:
    if reason := network.missing():
        pytest.skip(f"no simulated hosts: {reason}")


def run(case: str) -> str:
    """Run a case of exchange_large_rows.py on two hosts and return what it printed."""
    launch = [sys.executable, "-m", "tests.hosts.launch", "--hosts", "2", "--ranks", "1"]
    program = [exchange_large_rows.__file__, case]
    done = subprocess.run(
        [*launch, "--rate", f"{MBIT_PER_S}mbit", *program],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
        check=False,
    )
    assert "seconds" in done.stdout, done.stdout + done.stderr
    return done.stdout


def seconds_of(text: str) -> float:
    return float(text.split("seconds ")[1].split()[0])


@pytest.mark.usefixtures("_hosts_can_be_made")
def test_a_late_rank_does_not_delay_the_other_direction() -> None:
    one_way_s = NUM_ROWS * 4 * WIDTH * 8 / (1e6 * MBIT_PER_S)
    # In turn, the two messages would take twice as long.
    assert 0.9 * one_way_s < seconds_of(run("late")) < 1.6 * one_way_s


@pytest.mark.usefixtures("_hosts_can_be_made")
def test_a_rank_that_stops_inside_a_message_is_named() -> None:
    text = run("stops")
    # The first exchange, and one that is refused after it.
    assert text.count("rank 1 did not arrive") == 2
    # The timeout of 2 s, and 1 s in which others may report.
    assert 2 < seconds_of(text) < 5
