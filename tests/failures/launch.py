"""Run scenarios, several at the same time, and record how every process ended.

    python -m tests.failures.launch FOLDER < scenarios, one JSON a line

torch.distributed.run is not used, because it ends all ranks when one dies. Over gloo the ranks are
forked from this process, which has imported torch, and end like any program. Over MPI, mpirun
starts them with the option not to end the others, and they end as under
scripts/launch_multi_rank.sh. Each scenario gets a folder in FOLDER, with the outcome and the output
of each rank and `ends.json`.
"""

import gc
import json
import os
import signal
import socket
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist

from tests.failures.rank import run_rank
from tests.failures.scenario import Scenario
from tests.hosts.network import INTERFACE, Host, make_hosts

# Scenarios that run in parallel; most of the time they wait.
NUM_AT_ONCE = 4
# Time limit of one scenario in seconds. A process that has not ended by then hangs and is killed.
# On a busy machine mpirun alone took more than 90 s to start its ranks.
SCENARIO_LIMIT_S = 300.0
# Seconds that mpirun has to end its ranks.
MPIRUN_LIMIT_S = 20.0
# Runs one MPI rank; $0 is the folder.
MPI_SHELL = """
    rank=$OMPI_COMM_WORLD_RANK
    "$@" > "$0/rank$rank.log" 2>&1
    echo $? > "$0/end$rank"
"""


@dataclass(frozen=True, kw_only=True)
class End:
    """The end of one process.

    exit_code: negative for a signal; None: the process did not end.
    at_s: time of the end, on the clock of this program.
    """

    exit_code: int | None
    at_s: float


@dataclass(kw_only=True)
class Run(ABC):
    """A running scenario."""

    scenario: Scenario
    folder: Path
    start_s: float = field(default_factory=time.monotonic)
    ends: dict[int, End] = field(default_factory=dict)

    def poll(self) -> bool:
        """Poll the ranks; return whether all that should end have ended, or the time is up."""
        is_over = time.monotonic() - self.start_s > SCENARIO_LIMIT_S
        for rank in self.waiting:
            code = self.exit_code(rank)
            if code is not None:
                self.ends[rank] = End(exit_code=code, at_s=time.monotonic())
        return is_over or all(rank in self.ends for rank in self.scenario.ending)

    def finish(self) -> None:
        """Kill the remaining processes, including stopped ranks, and record their exit codes."""
        for rank in self.waiting:
            self.ends[rank] = End(exit_code=None, at_s=time.monotonic())
        self.end_all()
        ends = {rank: asdict(end) for rank, end in self.ends.items()}
        (self.folder / "ends.json").write_text(json.dumps(ends))

    @property
    def waiting(self) -> list[int]:
        return [rank for rank in range(self.scenario.num_ranks) if rank not in self.ends]

    @abstractmethod
    def exit_code(self, rank: int) -> int | None:
        """Return the exit code of a rank at its first call after the end; None if it still runs."""

    @abstractmethod
    def end_all(self) -> None:
        """Kill every remaining process."""


@dataclass(kw_only=True)
class GlooRun(Run):
    """A scenario over gloo.

    ranks, store: process ids.   hosts: hosts to remove at the end; empty: the ranks are on this
        machine.
    """

    ranks: list[int]
    store: int | None
    hosts: list[Host]
    removal: ExitStack
    is_lost: bool = False

    def poll(self) -> bool:
        if self.scenario.loses_hosts and not self.is_lost:
            lost = self.scenario.lost_ranks
            if all((self.folder / f"lost{rank}").exists() for rank in lost):
                self.is_lost = True
                for number in {self.scenario.host_of(rank) for rank in lost}:
                    _lose(self.hosts[number], self.scenario.fault)
        return super().poll()

    def exit_code(self, rank: int) -> int | None:
        pid, status = os.waitpid(self.ranks[rank], os.WNOHANG)
        return os.waitstatus_to_exitcode(status) if pid else None

    def end_all(self) -> None:
        left = [self.ranks[rank] for rank, end in self.ends.items() if end.exit_code is None]
        for pid in left + ([self.store] if self.store else []):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        self.removal.close()


@dataclass(kw_only=True)
class MpiRun(Run):
    """mpirun, which reports no exit codes, so a shell around each rank records them."""

    mpirun: subprocess.Popen[bytes]

    def exit_code(self, rank: int) -> int | None:
        path = self.folder / f"end{rank}"
        code = path.read_text() if path.exists() else ""
        return int(code) if code.endswith("\n") else None

    def end_all(self) -> None:
        # mpirun ends its ranks, even stopped ones, but the shells of stopped ranks would keep
        # waiting.
        self.mpirun.terminate()
        try:
            self.mpirun.wait(MPIRUN_LIMIT_S)
        except subprocess.TimeoutExpired:
            os.killpg(self.mpirun.pid, signal.SIGKILL)
            self.mpirun.wait()


def main() -> None:
    torch.set_num_threads(1)
    # A rank that ends must not collect the objects of all modules, which takes two thirds of its
    # time.
    gc.freeze()
    todo = [Scenario.loads(line) for line in sys.stdin]
    running: list[Run] = []
    while todo or running:
        while todo and len(running) < NUM_AT_ONCE:
            running.append(_start(todo.pop(0), Path(sys.argv[1])))
        time.sleep(0.02)
        for run in [run for run in running if run.poll()]:
            run.finish()
            running.remove(run)


def _start(scenario: Scenario, parent: Path) -> Run:
    folder = parent / scenario.name
    folder.mkdir()
    start = _start_mpi if scenario.is_over_mpi else _start_gloo
    return start(scenario, folder)


def _start_mpi(scenario: Scenario, folder: Path) -> Run:
    beside = Path(sys.executable).parent / "mpirun"
    mpirun = str(beside) if beside.exists() else "mpirun"
    options = ["--continuous", "--allow-run-as-root", "--oversubscribe", "--bind-to", "none"]
    rank_program = [sys.executable, "scripts/run_program.py", "tests/failures/rank.py"]
    arguments = ["--scenario", scenario.dumps(), "--folder", str(folder)]
    shell = ["bash", "-c", MPI_SHELL, str(folder)]
    with (folder / "mpirun.log").open("wb") as output:
        process = subprocess.Popen(
            [mpirun, *options, "-n", str(scenario.num_ranks), *shell, *rank_program, *arguments],
            env=os.environ | {"PYTHONPATH": os.getcwd()},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    return MpiRun(scenario=scenario, folder=folder, mpirun=process)


def _start_gloo(scenario: Scenario, folder: Path) -> Run:
    with ExitStack() as stack:
        hosts: list[Host] = []
        if scenario.num_hosts > 1:
            hosts = stack.enter_context(make_hosts(scenario.num_hosts))
        address = hosts[0].address if hosts else "127.0.0.1"
        with _on(hosts, 0):
            listener = socket.create_server((address, 0))
        port, listener_fd = listener.getsockname()[1], listener.detach()
        env = {
            "WORLD_SIZE": str(scenario.num_ranks),
            "MASTER_ADDR": address,
            "MASTER_PORT": str(port),
            "STORE_FD": str(listener_fd),
        }
        if hosts:
            env["GLOO_SOCKET_IFNAME"] = INTERFACE

        def fork_rank(rank: int) -> int:
            number = scenario.host_of(rank)
            with _on(hosts, number):
                return _fork_rank(rank, scenario, env, folder, hosts[number] if hosts else None)

        # The process that serves the store is started first, and only it gets the listener.
        first = scenario.store_host
        with _on(hosts, 0):
            store = _fork_store(env, folder) if first is None else None
        pids = {} if first is None else {first: fork_rank(first)}
        os.close(listener_fd)
        for rank in range(scenario.num_ranks):
            if rank not in pids:
                pids[rank] = fork_rank(rank)
        ranks = [pids[rank] for rank in range(scenario.num_ranks)]
        removal = stack.pop_all()
    return GlooRun(
        scenario=scenario, folder=folder, ranks=ranks, store=store, hosts=hosts, removal=removal
    )


def _on(hosts: list[Host], number: int) -> AbstractContextManager[None]:
    """Run processes that are forked in this context on a host, if there are several."""
    return hosts[number].inside() if hosts else nullcontext()


def _lose(host: Host, fault: str) -> None:
    if fault == "unplugged":
        host.unplug()
    else:
        assert fault == "killed", "hosts are killed or unplugged"
        host.kill_all()


def _fork_store(env: dict[str, str], folder: Path) -> int:
    pid = os.fork()
    if pid == 0:
        _send_output_to(folder / "store.log")
        _server = dist.TCPStore(  # type: ignore[attr-defined]
            env["MASTER_ADDR"],
            int(env["MASTER_PORT"]),
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=int(env["STORE_FD"]),
        )
        while True:
            signal.pause()
    return pid


def _fork_rank(
    rank: int, scenario: Scenario, env: dict[str, str], folder: Path, host: Host | None
) -> int:
    pid = os.fork()
    if pid == 0:
        _send_output_to(folder / f"rank{rank}.log")
        if host is not None:
            host.take_name()
        os.environ.update(env, RANK=str(rank))
        # Run to the end of the interpreter, as any program does, because that must not hang either.
        sys.exit(run_rank(scenario, folder))
    return pid


def _send_output_to(path: Path) -> None:
    file = os.open(path, os.O_CREAT | os.O_WRONLY)
    os.dup2(file, 1)
    os.dup2(file, 2)


if __name__ == "__main__":
    main()
