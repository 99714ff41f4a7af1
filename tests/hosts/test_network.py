from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.hosts import network
from tests.hosts.network import Host, make_hosts

pytestmark = pytest.mark.slow

# Seconds for a small program on a busy machine.
LIMIT_S = 60


@pytest.fixture(autouse=True)
def _hosts_can_be_made() -> None:
    if reason := network.missing():
        pytest.skip(f"no simulated hosts: {reason}")


def on(host: Host, program: str) -> str:
    command = host.command([sys.executable, "-c", program])
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=True)
    return done.stdout.strip()


def sleeper_on(host: Host) -> subprocess.Popen[bytes]:
    """Start a process that sleeps, and return when it is on the host."""
    process = subprocess.Popen(
        host.command([sys.executable, "-c", "import time; print(flush=True); time.sleep(600)"]),
        stdout=subprocess.PIPE,
    )
    process.stdout.readline()
    return process


def test_lost_host_takes_its_processes_and_no_others() -> None:
    with make_hosts(2) as hosts:
        sleepers = [sleeper_on(host) for host in hosts]
        hosts[0].kill_all()
        assert sleepers[0].wait(LIMIT_S) == -signal.SIGKILL
        assert sleepers[1].poll() is None
    assert sleepers[1].wait(LIMIT_S) == -signal.SIGKILL


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
