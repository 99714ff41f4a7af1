import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.hosts import network

pytestmark = pytest.mark.slow

# Seconds for a small program on a busy machine.
LIMIT_S = 60


@pytest.fixture(autouse=True)
def _hosts_can_be_made() -> None:
    if reason := network.missing():
        pytest.skip(f"no simulated hosts: {reason}")


def test_launch_passes_exit_codes_on(tmp_path: Path) -> None:
    program = tmp_path / "program.py"
    program.write_text("import os, sys\nsys.exit(3 * (os.environ['RANK'] == '1'))\n")
    launch = [sys.executable, "-m", "tests.hosts.launch", "--hosts", "2", "--ranks", "1"]
    start_s = time.monotonic()
    done = subprocess.run(
        [*launch, str(program)], capture_output=True, text=True, timeout=LIMIT_S, check=False
    )
    assert done.returncode == 1, done.stderr
    assert "exitcode  : 3" in done.stderr
    assert time.monotonic() - start_s < LIMIT_S


def test_a_host_that_was_idle_sends_at_its_rate() -> None:
    num_bytes = missing = 100_000
    with network.make_hosts(2, rate="20mbit") as (first, second):
        with first.inside():
            server = socket.create_server((first.address, 0))
        with second.inside():
            sender = socket.create_connection(server.getsockname())
        with server, sender, server.accept()[0] as receiver:
            time.sleep(0.2)
            start_s = time.monotonic()
            sender.sendall(bytes(num_bytes))
            while missing > 0:
                missing -= len(receiver.recv(num_bytes))
            taken_s = time.monotonic() - start_s
    # At the rate they take 40 ms; a burst of 5 ms of the rate is sent at once.
    assert taken_s > 0.03
