"""Real launches, of programs and of tests written to a temporary folder.

A launch costs seconds of start-up, mostly spent importing torch, and some of these wait on purpose:
all start in one fixture, three at a time.
"""

import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

REPO = Path(__file__).parents[2]
LAUNCHER = str(REPO / "scripts" / "launch_multi_rank.sh")

# Far below the 60 s for which the other ranks would sit in their collective.
WITHIN_SECONDS = 20

# The limit is for the test that hangs; the others end in milliseconds after torch is imported.
STALL_LIMIT_S = 30

CONFTEST = """
    import sys

    pytest_plugins = ["tests.multi_rank"]

    def pytest_unconfigure():
        if "torch.distributed" in sys.modules:
            import torch.distributed as dist

            sys.stdout.write(f"process group at the end: {dist.is_initialized()}\\n")
"""

PASSING = """
    import pytest
    import torch
    import torch.distributed as dist

    @pytest.mark.ranks(1, 2)
    def test_sum(num_ranks):
        one = torch.ones(1)
        dist.all_reduce(one)
        assert one.item() == num_ranks == dist.get_world_size()

    def test_without_ranks():
        raise AssertionError("it belongs to the outer run")
"""

SKIPPING = """
    import pytest

    @pytest.mark.ranks(1)
    @pytest.mark.skip(reason="no such device")
    def test_skip():
        pass
"""

FAILING = """
    import os
    import time

    import pytest

    @pytest.fixture
    def slow_to_close():
        yield
        if os.environ["RANK"] == "1":
            time.sleep(60)

    @pytest.mark.ranks(2)
    @pytest.mark.mpi_ranks(2)
    def test_one_rank_fails(slow_to_close, ep_ranks):
        if os.environ["RANK"] == "1":
            raise ValueError(f"the message, failed at {time.time()}")
        if ep_ranks is None:
            import torch.distributed as dist

            dist.barrier()
        ep_ranks.Barrier()
"""

OUTER = """
    import time

    import pytest
    import torch.distributed as dist

    @pytest.mark.ranks(2)
    @pytest.mark.mpi_ranks(2)
    def test_passes(ep_ranks):
        print("printed by rank", dist.get_rank() if ep_ranks is None else ep_ranks.Get_rank())

    @pytest.mark.ranks(2)
    def test_one_rank_fails():
        if dist.get_rank() == 1:
            raise ValueError("the message")
        dist.barrier()

    @pytest.mark.ranks(2)
    @pytest.mark.skipif(True, reason="no such device")
    def test_skipped_before_the_launch():
        pass

    @pytest.mark.ranks(2)
    def test_after_the_failure():
        dist.barrier()

    @pytest.mark.ranks(2)
    def test_hangs():
        if dist.get_rank() == 1:
            time.sleep(600)

    def test_without_ranks():
        pass
"""

PROGRAM = """
    import atexit
    import os
    import sys

    import torch.distributed as dist

    def say_at_exit():
        sys.stdout.write(f"process group at the end: {dist.is_initialized()}\\n")

    atexit.register(say_at_exit)
    dist.init_process_group("gloo")
    threads = os.environ["OMP_NUM_THREADS"]
    sys.stdout.write(f"{__name__} {dist.get_rank()} of 2: {sys.argv[1:]}, threads {threads}\\n")
"""

MPI_PROGRAM = """
    import os
    import sys

    from mpi4py import MPI

    assert MPI.COMM_WORLD.Get_size() == 2
    MPI.COMM_WORLD.Barrier()
    threads = os.environ["OMP_NUM_THREADS"]
    rank, num_ranks = os.environ["RANK"], os.environ["WORLD_SIZE"]
    print(f"{__name__} {rank} of {num_ranks}: {sys.argv[1:]}, threads {threads}")
"""

WAITING_PROGRAM = """
    import os
    import pathlib
    import sys
    import time

    pathlib.Path(sys.argv[1] + os.environ["RANK"]).write_text(str(os.getpid()))
    time.sleep(600)
"""


@dataclass(frozen=True, kw_only=True)
class Run:
    returncode: int
    output: str
    ended_at_s: float


def environment() -> dict[str, str]:
    return os.environ | {"PYTHON": sys.executable, "PYTHONPATH": str(REPO)}


def run(folder: Path, command: list[str]) -> Run:
    process = subprocess.run(
        command,
        cwd=folder,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=150,
        check=False,
    )
    return Run(returncode=process.returncode, output=process.stdout, ended_at_s=time.time())


COMMANDS = {
    "outer": [sys.executable, "-m", "pytest", "-v", "-rA", "test_outer.py"],
    "failing": [LAUNCHER, "2", "test_failing.py"],
    "passing": [LAUNCHER, "2", "test_passing.py"],
    "skipping": [LAUNCHER, "1", "test_skipping.py"],
    "empty": [LAUNCHER, "1", "test_skipping.py", "-k", "no_such_test"],
    "program": [LAUNCHER, "2", "program.py", "--flag", "two words"],
    "mpi_failing": [LAUNCHER, "--mpi", "2", "test_failing.py"],
    "mpi_program": [LAUNCHER, "--mpi", "2", "mpi_program.py", "--flag", "two words"],
}

# The signal that ends a launch, and its options, by transport.
SIGNALLED = {"torch": (signal.SIGTERM, []), "mpi": (signal.SIGINT, ["--mpi"])}

# The beginning of a command above.
TRANSPORTS = pytest.mark.parametrize("prefix", ["", "mpi_"])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("launches")
    files = {
        "conftest.py": CONFTEST,
        "pytest.ini": f"[pytest]\nmulti_rank_stall_limit_s = {STALL_LIMIT_S}\n",
        "test_passing.py": PASSING,
        "test_skipping.py": SKIPPING,
        "test_failing.py": FAILING,
        "test_outer.py": OUTER,
        "program.py": PROGRAM,
        "mpi_program.py": MPI_PROGRAM,
        "waiting_program.py": WAITING_PROGRAM,
    }
    for name, text in files.items():
        (folder / name).write_text(textwrap.dedent(text))
    return folder


@dataclass(frozen=True, kw_only=True)
class Launches:
    """Under way, or done: of COMMANDS, and those that end when a signal comes."""

    runs: dict[str, Future[Run]]
    signalled: dict[str, Future[None]]


@pytest.fixture(scope="module")
def launches(folder: Path) -> Iterator[Launches]:
    with ThreadPoolExecutor(max_workers=3) as pool:
        runs = {name: pool.submit(run, folder, command) for name, command in COMMANDS.items()}
        signalled = {name: pool.submit(check_signal, folder, name) for name in SIGNALLED}
        yield Launches(runs=runs, signalled=signalled)


@pytest.fixture(scope="module")
def runs(launches: Launches) -> dict[str, Future[Run]]:
    return launches.runs


def test_passing_run_exits_0_and_destroys_the_process_group(runs: dict[str, Future[Run]]) -> None:
    passing = runs["passing"].result()
    assert passing.returncode == 0, passing.output
    assert passing.output.count("1 passed, 2 deselected") == 2  # on each rank
    assert passing.output.count("process group at the end: False") == 2


def test_skip_fails(runs: dict[str, Future[Run]]) -> None:
    skipping = runs["skipping"].result()
    assert skipping.returncode != 0, skipping.output
    assert "rank 0 of 1 failed in test_skipping.py::test_skip[" in skipping.output
    assert "no such device (under the launcher a skip is a failure)" in skipping.output


def test_empty_selection_fails(runs: dict[str, Future[Run]]) -> None:
    empty = runs["empty"].result()
    assert empty.returncode != 0, empty.output
    assert "rank 0 of 1 failed: no test is selected that is marked ranks(1)" in empty.output


@TRANSPORTS
def test_one_failing_rank_ends_the_run_though_it_hangs_in_clean_up(
    runs: dict[str, Future[Run]], prefix: str
) -> None:
    failing = runs[f"{prefix}failing"].result()
    assert failing.returncode != 0, failing.output
    assert "rank 1 of 2 failed in test_failing.py::test_one_rank_fails[" in failing.output
    failed_at = re.search(r"ValueError: the message, failed at ([\d.]+)", failing.output)
    assert failed_at, failing.output
    assert failing.ended_at_s - float(failed_at[1]) < WITHIN_SECONDS


@TRANSPORTS
def test_program_gets_its_arguments(runs: dict[str, Future[Run]], prefix: str) -> None:
    program = runs[f"{prefix}program"].result()
    assert program.returncode == 0, program.output
    for rank in range(2):
        line = f"__main__ {rank} of 2: ['--flag', 'two words'], threads 1"
        assert line in program.output.splitlines(), program.output
    if not prefix:
        assert program.output.count("process group at the end: False") == 2


def test_outer_run_reports_each_test_as_its_own_result(runs: dict[str, Future[Run]]) -> None:
    outer = runs["outer"].result()
    progress = outer.output.partition("= FAILURES =")[0]
    outcomes = dict(re.findall(r"^test_outer.py::(\S+) ([A-Z]+)", progress, re.MULTILINE))
    assert outcomes == {
        "test_passes[ranks2]": "PASSED",
        "test_passes[mpi2]": "PASSED",
        "test_one_rank_fails[ranks2]": "FAILED",
        "test_skipped_before_the_launch[ranks2]": "SKIPPED",
        "test_after_the_failure[ranks2]": "PASSED",  # This test runs in a second launch.
        "test_hangs[ranks2]": "FAILED",
        "test_without_ranks": "PASSED",
    }, outer.output
    assert outer.returncode == 1
    for line in (
        r"^mpi_ranks\(2\): 1 tests, [\d.]+ s, launches: 1$",
        r"^ranks\(2\): 4 tests, [\d.]+ s, launches: 2$",
    ):
        assert re.search(line, outer.output, re.MULTILINE), outer.output


def test_outer_run_shows_what_each_rank_says(runs: dict[str, Future[Run]]) -> None:
    output = runs["outer"].result().output
    assert "--- rank 1 failed first\n" in output
    assert "ValueError: the message" in output
    assert "Captured stdout call (rank 0)" in output
    assert "printed by rank 0\n" in output


def test_outer_run_ends_a_launch_that_hangs(runs: dict[str, Future[Run]]) -> None:
    output = runs["outer"].result().output
    assert (
        "test_outer.py::test_hangs[ranks2] on 2 ranks: no result from rank 1; the launch "
        f"was ended after {STALL_LIMIT_S} s in which no rank finished a test"
    ) in output
    assert re.search(r"--- rank 1 was ended here\n.*\n.* in test_hangs\n", output), output


@pytest.mark.parametrize("transport", SIGNALLED)
def test_signal_ends_all_ranks(launches: Launches, transport: str) -> None:
    launches.signalled[transport].result()


def check_signal(folder: Path, transport: str) -> None:
    """Launch two ranks that wait, send the signal to the launcher, and see everything end."""
    number, options = SIGNALLED[transport]
    files = [folder / f"{transport}_{rank}" for rank in range(2)]
    launcher = subprocess.Popen(
        [LAUNCHER, *options, "2", "waiting_program.py", f"{transport}_"],
        cwd=folder,
        env=environment(),
        stderr=subprocess.DEVNULL,
    )
    try:
        wait_until(lambda: all(file.exists() and file.read_text() for file in files))
    finally:
        launcher.send_signal(number)
    assert launcher.wait(WITHIN_SECONDS) != 0
    # mpirun exits up to two seconds before its ranks.
    wait_until(lambda: not any(is_alive(int(file.read_text())) for file in files))


def test_number_of_ranks_is_required(folder: Path) -> None:
    no_number = run(folder, [LAUNCHER, "test_passing.py"])
    assert no_number.returncode == 2
    assert "usage: launch_multi_rank.sh [--mpi] N" in no_number.output


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def wait_until(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline_s, "not within 60 s"
        time.sleep(0.05)
