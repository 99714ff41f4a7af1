"""Start short programs many times, and kill ranks at random; check exit codes and leftovers.

    python scripts/soak.py exits --number 200    programs that end regularly exit with 0
    python scripts/soak.py kills --number 200    killed ranks leave no memory behind

`make soak` runs both, next to a busy process.
"""

import argparse
import itertools
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from pathlib import Path

REPO = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(REPO))
from scripts.growing_program import run_rank  # noqa: E402 (torch once, for all ranks forked here)
from scripts.short_program import ENDINGS, KINDS  # noqa: E402

# Seconds for one launch, on a machine with a load of ten per core.
LAUNCH_LIMIT_S = 240
# Latest kill, in seconds after the start. A rank opens its memory after 0.2 s, and then grows and
# reopens it repeatedly.
LATEST_KILL_S = 2.0
# Seconds in which a rank whose peer is gone must exit.
END_LIMIT_S = 60
NUM_RANKS = 2


def main() -> int:
    """Run the command line; return 0 if no run has failed, else 1."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=["exits", "kills"])
    parser.add_argument("--number", type=int, default=200)
    parser.add_argument("--at-once", type=int, default=2, help="concurrent launches")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    with busy_process():
        if arguments.what == "exits":
            faults = soak_exits(arguments.number, arguments.at_once)
        else:
            faults = soak_kills(arguments.number, random.Random(arguments.seed))
    for fault in faults:
        print(fault)
    print(f"{arguments.what}: {arguments.number - len(faults)} of {arguments.number} passed")
    return 1 if faults else 0


def soak_exits(number: int, at_once: int) -> list[str]:
    """Launch every kind of layer with every ending in rotation; return the faults."""
    # There are as many kinds as endings, so cycling through both together would not cover all
    # pairs.
    pairs = [
        (kind, ENDINGS[(at + shift) % len(ENDINGS)])
        for shift in range(len(ENDINGS))
        for at, kind in enumerate(KINDS)
    ]
    with ThreadPoolExecutor(at_once) as pool:
        found = pool.map(_launch, itertools.islice(itertools.cycle(pairs), number))
        return [fault for fault in found if fault]


def _launch(pair: tuple[str, str]) -> str:
    """Return the fault of one launch, or an empty string."""
    kind, ending = pair
    launcher = ["-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
    program = [str(REPO / "scripts/short_program.py"), kind, ending]
    done = subprocess.run(
        [sys.executable, *launcher, "--nproc-per-node", str(NUM_RANKS), *program],
        env=os.environ | {"PYTHONPATH": str(REPO), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=LAUNCH_LIMIT_S,
        check=False,
    )
    # torchrun exits with 1 for any failure of a rank, and prints the exit code of the rank.
    signals = [line.strip() for line in done.stderr.splitlines() if "exitcode  : -" in line]
    # torchrun sends SIGTERM, 15, to the other ranks.
    aborted = [line for line in signals if "exitcode  : -15" not in line]
    if done.returncode == (1 if ending == "error" else 0) and not aborted:
        return ""
    return f"{kind}, {ending}: exit code {done.returncode}\n{done.stderr[-3000:]}"


def soak_kills(number: int, choices: random.Random) -> list[str]:
    """Fork ranks and kill some of them at a random moment; return the faults."""
    return [fault for fault in (_kill_some(choices) for _ in range(number)) if fault]


def _kill_some(choices: random.Random) -> str:
    listener = socket.create_server(("127.0.0.1", 0))
    port = listener.getsockname()[1]
    listener.close()
    before = _names()
    ranks = [_fork_rank(rank, port) for rank in range(NUM_RANKS)]
    ended = choices.choice([ranks[:1], ranks[1:], ranks])
    which = choices.choice([signal.SIGKILL, signal.SIGTERM])
    after_s = choices.uniform(0, LATEST_KILL_S)
    time.sleep(after_s)
    for pid in ended:
        os.kill(pid, which)
    _reap(ranks)
    left = [name for name in _names() - before if name.startswith("epcomm")]
    return f"{which.name} of {len(ended)} ranks after {after_s:.3f} s left {left}" if left else ""


def _fork_rank(rank: int, port: int) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    with suppress(BaseException), open(os.devnull, "w") as nowhere:
        for stream in (1, 2):
            os.dup2(nowhere.fileno(), stream)
        places = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        os.environ.update(places, RANK=str(rank), WORLD_SIZE=str(NUM_RANKS))
        run_rank()
        code = 0
    # soak_exits() tests the shutdown of the interpreter.
    os._exit(code)


def _reap(pids: list[int]) -> None:
    """Wait for all processes, and kill those that do not exit in time."""
    deadline_s = time.monotonic() + END_LIMIT_S
    waiting = set(pids)
    while waiting and time.monotonic() < deadline_s:
        waiting -= {pid for pid in waiting if os.waitpid(pid, os.WNOHANG)[0]}
        time.sleep(0.01)
    for pid in waiting:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def _names() -> set[str]:
    """Return the names of the files in shared memory, which outlive their processes."""
    return {path.name for path in Path("/dev/shm").iterdir()}


@contextmanager
def busy_process() -> Iterator[None]:
    """Run a process that keeps a core busy."""
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        yield
    finally:
        process.kill()
        process.wait()


if __name__ == "__main__":
    raise SystemExit(main())
