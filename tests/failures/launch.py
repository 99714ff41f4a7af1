"""Plays scenarios over gloo, several at once, and tells how every process ended.

    python -m tests.failures.launch FOLDER < scenarios, one JSON a line

Not torch.distributed.run: it ends all ranks when one dies. The ranks are forked from this process,
which has imported torch, and end like any program. FOLDER gets, for each scenario, a folder with
the outcome and the output of each rank and `ends.json`.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import socket
import sys
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist

from tests.failures.rank import run_rank
from tests.failures.scenario import Scenario

# Scenarios that run at the same time: most of their time they wait.
NUM_AT_ONCE = 4
# Seconds for one scenario; what has not ended by then hangs, and is ended.
SCENARIO_LIMIT_S = 90.0


@dataclass(frozen=True, kw_only=True)
class End:
    """How one process ended.

    exit_code: negative for a signal; None: it did not end.   at_s: on the clock of this program.
    """

    exit_code: int | None
    at_s: float


@dataclass(kw_only=True)
class Run:
    """A scenario under way. ranks, store: process ids."""

    scenario: Scenario
    folder: Path
    ranks: list[int]
    store: int | None
    start_s: float = field(default_factory=time.monotonic)
    ends: dict[int, End] = field(default_factory=dict)

    def poll(self) -> bool:
        """Look which ranks have ended; whether all that should have, or the time is up."""
        is_over = time.monotonic() - self.start_s > SCENARIO_LIMIT_S
        waiting = [rank for rank in range(len(self.ranks)) if rank not in self.ends]
        for rank in waiting:
            pid, status = os.waitpid(self.ranks[rank], os.WNOHANG)
            if pid:
                code = os.waitstatus_to_exitcode(status)
                self.ends[rank] = End(exit_code=code, at_s=time.monotonic())
        return is_over or all(rank in self.ends for rank in self.scenario.ending)

    def finish(self) -> None:
        """End what is left, stopped ranks among it, and write down the ends."""
        left = [rank for rank in range(len(self.ranks)) if rank not in self.ends]
        for rank in left:
            self.ends[rank] = End(exit_code=None, at_s=time.monotonic())
        for pid in [self.ranks[rank] for rank in left] + ([self.store] if self.store else []):
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        ends = {rank: asdict(end) for rank, end in self.ends.items()}
        (self.folder / "ends.json").write_text(json.dumps(ends))


def main() -> None:
    """Play the scenarios of standard input."""
    torch.set_num_threads(1)
    # A rank that ends need not look through the objects of all modules: two thirds of its time.
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
    listener = socket.create_server(("127.0.0.1", 0))
    port, listener_fd = listener.getsockname()[1], listener.detach()
    env = {
        "WORLD_SIZE": str(scenario.num_ranks),
        "MASTER_PORT": str(port),
        "STORE_FD": str(listener_fd),
    }
    # The process that answers for the store comes first, and alone gets the listener.
    host = scenario.store_host
    store = _fork_store(env, folder) if host is None else None
    pids = {} if host is None else {host: _fork_rank(host, scenario, env, folder)}
    os.close(listener_fd)
    for rank in range(scenario.num_ranks):
        if rank not in pids:
            pids[rank] = _fork_rank(rank, scenario, env, folder)
    ranks = [pids[rank] for rank in range(scenario.num_ranks)]
    return Run(scenario=scenario, folder=folder, ranks=ranks, store=store)


def _fork_store(env: dict[str, str], folder: Path) -> int:
    pid = os.fork()
    if pid == 0:
        _send_output_to(folder / "store.log")
        _server = dist.TCPStore(  # type: ignore[attr-defined]
            "127.0.0.1",
            int(env["MASTER_PORT"]),
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=int(env["STORE_FD"]),
        )
        while True:
            signal.pause()
    return pid


def _fork_rank(rank: int, scenario: Scenario, env: dict[str, str], folder: Path) -> int:
    pid = os.fork()
    if pid == 0:
        _send_output_to(folder / f"rank{rank}.log")
        os.environ.update(env, RANK=str(rank))
        # Up to the end of the interpreter, as in any program: that must not hang either.
        sys.exit(run_rank(scenario, "gloo", folder))
    return pid


def _send_output_to(path: Path) -> None:
    file = os.open(path, os.O_CREAT | os.O_WRONLY)
    os.dup2(file, 1)
    os.dup2(file, 2)


if __name__ == "__main__":
    main()
