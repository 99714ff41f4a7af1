"""Run a program or tests on the ranks of several hosts that are simulated on this machine.

    python -m tests.hosts.launch --hosts 2 --ranks 4 examples/train_qwen3_moe.py --steps 3
    python -m tests.hosts.launch --hosts 2 --ranks 4 --rate 1gbit benchmarks/hosts/bench_hosts.py

--ranks is the number per host. Each host runs scripts/launch_multi_rank.sh with the arguments after
the options. The exit code is that of the first launcher that fails; the others are then ended.
"""

import argparse
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from tests.hosts.network import INTERFACE, Host, HostsError, make_hosts

LAUNCHER = Path(__file__).parents[2] / "scripts" / "launch_multi_rank.sh"
# The port of the store; no other process of a simulated host uses it.
PORT = 29500
# Seconds from SIGTERM until the remaining processes are killed, as in torch.distributed.run.
STOP_LIMIT_S = 35


def environment_of(host: Host, hosts: Sequence[Host]) -> dict[str, str]:
    return {
        "NNODES": str(len(hosts)),
        "NODE_RANK": str(host.number),
        "MASTER_ADDR": hosts[0].address,
        "MASTER_PORT": str(PORT),
        "GLOO_SOCKET_IFNAME": INTERFACE,
    }


def launch(hosts: Sequence[Host], num_ranks: int, arguments: Sequence[str]) -> int:
    """Start the launcher on each host, wait for the end of all, and return the exit code."""
    with ExitStack() as stack:
        launchers = [
            stack.enter_context(
                subprocess.Popen(
                    host.command([str(LAUNCHER), str(num_ranks), *arguments]),
                    env={**os.environ, "PYTHON": sys.executable, **environment_of(host, hosts)},
                    stdin=subprocess.DEVNULL,
                    # Only this process receives Ctrl-C, and relays it once.
                    start_new_session=True,
                )
            )
            for host in hosts
        ]
        try:
            while True:
                codes = [launcher.poll() for launcher in launchers]
                if failed := [code for code in codes if code]:
                    # For a signal, the exit code that a shell returns.
                    return failed[0] if failed[0] > 0 else 128 - failed[0]
                if None not in codes:
                    return 0
                time.sleep(0.05)
        finally:
            _stop(launchers)
            for host in hosts:
                host.kill_all()


def _stop(launchers: Sequence[subprocess.Popen[bytes]]) -> None:
    running = [launcher for launcher in launchers if launcher.poll() is None]
    for launcher in running:
        launcher.terminate()
    end_s = time.monotonic() + STOP_LIMIT_S
    for launcher in running:
        try:
            launcher.wait(max(0.0, end_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            return


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--hosts", type=int, required=True, help="how many")
    parser.add_argument("--ranks", type=int, required=True, help="on each host")
    parser.add_argument("--rate", help="what each host may send, such as 1gbit")
    options, arguments = parser.parse_known_args()
    # SIGTERM acts like Ctrl-C, because an abrupt end would not remove the hosts.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        with make_hosts(options.hosts, rate=options.rate) as hosts:
            return launch(hosts, options.ranks, arguments)
    except HostsError as error:
        sys.stderr.write(f"tests.hosts.launch: {error}\n")
        return 1
    except KeyboardInterrupt:
        return 128 + signal.SIGTERM


if __name__ == "__main__":
    sys.exit(main())
