"""Fork the ranks of launches from one process, which has imported torch and collected the tests.

torchrun starts each rank as a new interpreter, which imports and collects for 5 to 8 s of CPU time.
Forked ranks have one seed of hashes, so that a set has the same order on all of them; ranks of MPI
are interpreters of their own.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from tests.hosts.network import INTERFACE, Host, make_hosts

# Seconds from SIGTERM to SIGKILL: those of torch.distributed.run.
_KILL_AFTER_S = 30


@dataclass
class Copy:
    """A copy of this process, with methods of subprocess.Popen."""

    pid: int
    pipe: int  # the end of the pipe in this process
    returncode: int | None = None

    def start(self, folder: Path) -> None:
        """Start the copy, with its output in output.txt of the folder."""
        os.write(self.pipe, os.fsencode(folder))
        os.close(self.pipe)

    def cancel(self) -> None:
        """End a copy that was not started."""
        os.close(self.pipe)
        os.waitpid(self.pid, 0)

    def poll(self) -> int | None:
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float = float("inf")) -> int:
        deadline_s = time.monotonic() + timeout
        while self.poll() is None:
            if time.monotonic() > deadline_s:
                raise subprocess.TimeoutExpired("a copy of pytest", timeout)
            time.sleep(0.05)
        assert self.returncode is not None, "it has ended"
        return self.returncode

    def terminate(self) -> None:
        os.kill(self.pid, signal.SIGTERM)


def fork_copy(others: Sequence[Copy]) -> Copy | Path:
    """Return a copy of this process; in the copy, wait for start() and return the folder."""
    end_of_copy, end_here = os.pipe()
    if pid := os.fork():
        os.close(end_of_copy)
        return Copy(pid=pid, pipe=end_here)
    # Signals of the terminal reach the first process alone.
    os.setsid()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    # Ranks that were not started end when the first process has closed their pipes.
    for pipe in (end_here, *(other.pipe for other in others)):
        os.close(pipe)
    folder = Path(os.fsdecode(os.read(end_of_copy, 4096)))
    if folder == Path():
        os._exit(0)
    os.close(end_of_copy)
    with (folder / "output.txt").open("wb") as output, open(os.devnull) as nothing:
        for file, number in ((nothing, 0), (output, 1), (output, 2)):
            os.dup2(file.fileno(), number)
    return folder


def fork_ranks(num_ranks: int, num_hosts: int = 1) -> None:
    """Return in each of N new processes, the ranks; this process waits for them and exits.

    The environment of a rank is what init_process_group() needs of torchrun's. If a rank ends with
    another exit code than 0, or this process receives SIGTERM or SIGINT, the other ranks are ended.
    Several hosts are simulated, with equally many ranks.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    with make_hosts(num_hosts) if num_hosts > 1 else nullcontext([]) as hosts:
        ports: list[int] = []
        ranks: dict[int, int] = {}
        for rank in range(num_ranks):
            host = hosts[rank * num_hosts // num_ranks] if hosts else None
            port, port_of_parent = os.pipe()
            with host.inside() if host else nullcontext():
                if (pid := os.fork()) == 0:
                    os.close(port_of_parent)
                    _become(rank, num_ranks // num_hosts, host)
                    _join(hosts, num_ranks, port)
                    return
            os.close(port)
            ports.append(port_of_parent)
            ranks[pid] = rank
        # After the forks: the store has threads, which a fork would not copy.
        import torch.distributed as dist

        with hosts[0].inside() if hosts else nullcontext():
            store = dist.TCPStore(  # type: ignore[attr-defined]
                _address(hosts), 0, is_master=True, wait_for_workers=False
            )
        for port in ports:
            os.write(port, str(store.port).encode())
        code = _wait(ranks)
        del store
    os._exit(code)


def _address(hosts: Sequence[Host]) -> str:
    """Return the address of the store."""
    return hosts[0].address if hosts else "127.0.0.1"


def _become(rank: int, ranks_of_host: int, host: Host | None) -> None:
    """Take the number of a rank, and the name of its host."""
    os.environ |= {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank % ranks_of_host),
        "LOCAL_WORLD_SIZE": str(ranks_of_host),
    }
    if host is not None:
        host.take_name()
        os.environ["GLOO_SOCKET_IFNAME"] = INTERFACE


def _join(hosts: Sequence[Host], num_ranks: int, port: int) -> None:
    """Wait for the port of the store, and take the environment of all ranks."""
    os.environ |= {
        "WORLD_SIZE": str(num_ranks),
        "MASTER_ADDR": _address(hosts),
        "MASTER_PORT": os.read(port, 16).decode(),
        # The store is that of the parent, so that rank 0 starts none.
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "TORCHELASTIC_RESTART_COUNT": "0",
    }
    os.close(port)


def _wait(ranks: dict[int, int]) -> int:
    """Wait for the ranks, by process id; return 0 if all of them return 0, else 1."""

    def send(number: int) -> None:
        for pid in list(ranks):
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def end(number: int = 0, frame: FrameType | None = None) -> None:
        send(signal.SIGTERM)
        signal.alarm(_KILL_AFTER_S)

    def kill(number: int, frame: FrameType | None) -> None:
        send(signal.SIGKILL)

    signal.signal(signal.SIGTERM, end)
    signal.signal(signal.SIGINT, end)
    signal.signal(signal.SIGALRM, kill)
    has_failed = False
    while ranks:
        pid, status = os.wait()
        if pid not in ranks:
            # The process is another child of this one, and not a rank.
            continue
        rank, code = ranks.pop(pid), os.waitstatus_to_exitcode(status)
        if code and not has_failed:
            has_failed = True
            sys.stderr.write(f"rank {rank} ended first with exit code {code}\n")
            end()
    return int(has_failed)
