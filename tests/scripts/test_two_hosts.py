"""The suites over 2 x 2 ranks on two hosts: network namespaces joined by a veth pair."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

REPO = Path(__file__).parents[2]
# One network of this machine's own; the names and addresses exist inside the namespaces alone.
NAMES = [f"epcomm{os.getpid()}h{host}" for host in range(2)]
ADDRESSES = ["10.77.0.1", "10.77.0.2"]
LIMIT_S = 180
# A group that is smaller than the world lies on one host.
SELECTION = "not smaller"


def ip(*arguments: str) -> None:
    """Run one `ip` command."""
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)


def join_hosts() -> None:
    """Make both namespaces and the cable between them."""
    for name in NAMES:
        ip("netns", "add", name)
    cable = [f"veth{os.getpid() % 100000}{end}" for end in "ab"]
    ip("link", "add", cable[0], "type", "veth", "peer", "name", cable[1])
    for name, end, address in zip(NAMES, cable, ADDRESSES, strict=True):
        ip("link", "set", end, "netns", name)
        ip("-n", name, "link", "set", end, "name", "eth0")
        ip("-n", name, "address", "add", f"{address}/24", "dev", "eth0")
        ip("-n", name, "link", "set", "eth0", "up")
        ip("-n", name, "link", "set", "lo", "up")


@pytest.fixture
def two_hosts() -> Iterator[None]:
    if shutil.which("ip") is None:
        pytest.skip("no `ip` command: install iproute2 to test two hosts")
    try:
        join_hosts()
        yield
    except (subprocess.CalledProcessError, PermissionError) as error:
        detail = getattr(error, "stderr", "") or str(error)
        pytest.skip(f"this machine permits no network namespaces: {detail.strip()}")
    finally:
        for name in NAMES:
            subprocess.run(["ip", "netns", "delete", name], check=False, capture_output=True)


def start_host(host: int, folder: Path) -> subprocess.Popen[bytes]:
    """Start this host's two ranks on the suites; output goes to a file."""
    launcher = str(REPO / "scripts" / "launch_multi_rank.sh")
    env = {
        **os.environ,
        "PYTHON": sys.executable,
        "NNODES": "2",
        "NODE_RANK": str(host),
        "MASTER_ADDR": ADDRESSES[0],
        "GLOO_SOCKET_IFNAME": "eth0",
    }
    # The ranks must not take this run's place in an outer launch.
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MULTI_RANK_RESULTS"):
        env.pop(name, None)
    suites = ["tests/buffers/test_buffers.py", "tests/test_experts.py", "-k", SELECTION]
    with (folder / f"host{host}.log").open("wb") as log:
        return subprocess.Popen(
            ["ip", "netns", "exec", NAMES[host], launcher, "2", *suites],
            cwd=REPO,
            env=env,
            stdout=log,
            stderr=subprocess.STDOUT,
        )


@pytest.mark.slow
def test_suites_over_two_hosts(two_hosts: None, tmp_path: Path) -> None:
    hosts = [start_host(host, tmp_path) for host in range(2)]
    try:
        codes = [host.wait(timeout=LIMIT_S) for host in hosts]
    finally:
        for host in hosts:
            host.kill()
    logs = [(tmp_path / f"host{host}.log").read_text() for host in range(2)]
    assert codes == [0, 0], "\n".join(log[-3000:] for log in logs)
    for log in logs:
        assert "[100%]" in log
