"""A pytest plugin: `@pytest.mark.ranks(1, 2, 4)` runs a test on 1, 2 and 4 processes.

`@pytest.mark.mpi_ranks(2, 4)` runs it under MPI, and `@pytest.mark.host_ranks(4, 8)` on simulated
hosts (tests/hosts/network.py) with two ranks each. A test may have several of these marks. It is
parametrised over the sizes as `num_ranks`, with ids like `ranks4`, `mpi4` and `hosts4`; the sizes
of `ranks(2, slow=(4, 8))` that `slow` names are marked slow, and so are more than two MPI ranks.
The fixture `ep_ranks` is the argument of EPGroup: None for the default process group, or the MPI
world.

Outer run (plain pytest): up to MAX_TESTS_OF_LAUNCH selected tests of one transport and size run in
one launch of scripts/launch_multi_rank.sh, and each has its own result: passed if it passed on
every rank. A failure ends its launch, because the ranks are then out of step; the remaining tests
run in the next launch. Launches run in the background, two at a time during the single-process
tests, which run first, and then three at a time, because ranks often wait for one another. With
tests marked slow, which have limits in seconds, and on devices, launches run one after another.
The first launches of CPU ranks need no launcher: they are copies of this process, forked after it
has collected the tests.

Inner run (under the launcher or in a copy, one process per rank): the session has a process group
(gloo) or MPI, skips and empty selections are failures, and each rank appends its results to a file
of JSON lines for the outer run.
"""

import faulthandler
import gc
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from _pytest.capture import CaptureManager  # each rank needs its own
from _pytest.skipping import evaluate_skip_marks  # pytest has no public way to ask this

from tests.buffers.nvlink.shared_gpus import let_ranks_share_gpus
from tests.forked_ranks import Copy, fork_copy, fork_ranks
from tests.hosts import network

if TYPE_CHECKING:
    from mpi4py import MPI

LAUNCHER = Path(__file__).parents[1] / "scripts" / "launch_multi_rank.sh"
UNDER_LAUNCHER_ENV = "MULTI_RANK_TRANSPORT"  # set by the launcher: the transport
BACKEND_ENV = "MULTI_RANK_BACKEND"  # set by the user: nccl and hccl run the tests on devices
# Another value of it: ranks are assigned to GPUs in rotation, several to one if there are fewer
# GPUs, and hosts communicate over gloo, because NCCL refuses two ranks of one GPU.
SHARED_GPUS = "gloo_on_gpus"
GPU_BACKENDS = ("nccl", SHARED_GPUS)
RESULTS_ENV = "MULTI_RANK_RESULTS"  # set by the outer run: the folder for results
# Set by the launcher: the number of ranks, which this process forks after it has collected.
FORK_ENV = "MULTI_RANK_FORK"
HOSTS_ENV = "MULTI_RANK_HOSTS"  # set by the outer run: the ranks are on simulated hosts
RANKS_PER_HOST = 2

# Tests of one launch; more are split, so that no launch continues alone after the others ended.
MAX_TESTS_OF_LAUNCH = 1000
# A run of at least this many tests imports transformers before it forks ranks: some tests need it,
# and with the compiler and DTensor it takes 5 s.
MANY_TESTS = 100
# Seconds that a collective waits for a missing rank.
COLLECTIVE_LIMIT_S = 60
# Seconds from the start of a launch until all ranks have collected their tests: 10 on an idle
# machine with two cores and two ranks, most of them for importing torch.
START_LIMIT_S = 120
# Seconds that a launch may then continue without finishing a test on any rank. Twice the limit of a
# collective, so that the message of a collective that timed out comes first.
STALL_LIMIT_S = 120
# Seconds that a failed rank has for its cleanup, which may wait for ranks that never answer.
LEAVE_LIMIT_S = 5
# Seconds from SIGTERM to SIGKILL; torch.distributed.run gives its ranks 30 of them.
STOP_LIMIT_S = 40
# Lines of a launch's output that are shown for a test without a result: enough for the 100 lines
# that torch.distributed.run prints about 8 ranks at its end, and for the cause before them.
TAIL_LINES = 150

# The mark for each transport, and its ids before the number of ranks.
MARKS = {"torch": "ranks", "mpi": "mpi_ranks", "hosts": "host_ranks"}
IDS = {"torch": "ranks", "mpi": "mpi", "hosts": "hosts"}


@dataclass(frozen=True, order=True)
class World:
    """The ranks that a launch starts."""

    transport: str  # torch | mpi | hosts: torch as well, on several hosts
    num_ranks: int

    def __str__(self) -> str:
        return f"{MARKS[self.transport]}({self.num_ranks})"

    @property
    def num_hosts(self) -> int:
        return self.num_ranks // RANKS_PER_HOST if self.transport == "hosts" else 1

    @property
    def is_slow(self) -> bool:
        """Return whether launches are slow: over MPI each rank imports and collects itself."""
        return self.transport == "mpi" and self.num_ranks > 2


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addini(
        "multi_rank_stall_limit_s",
        "seconds that a launch may continue without finishing a test on any rank",
        default=str(STALL_LIMIT_S),
    )


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "ranks(*sizes): run the test on these numbers of processes")
    config.addinivalue_line(
        "markers", "mpi_ranks(*sizes): run the test on these numbers of MPI ranks"
    )
    config.addinivalue_line(
        "markers",
        "host_ranks(*sizes): run the test on these numbers of processes, two on each host",
    )
    # Disabled during collection, which takes a third less time without it.
    gc.disable()
    transport = os.environ.get(UNDER_LAUNCHER_ENV)
    if transport and HOSTS_ENV in os.environ:
        transport = "hosts"
    if transport:
        num_forks = os.environ.pop(FORK_ENV, None)  # not for what the tests launch
        world = World(transport, int(num_forks or os.environ["WORLD_SIZE"]))
        config.pluginmanager.register(InnerRun(world, forks=num_forks is not None))
    else:
        config.pluginmanager.register(OuterRun(config))


def pytest_collection_finish() -> None:
    freeze_objects()


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    worlds = []
    for transport, mark in MARKS.items():
        marker = metafunc.definition.get_closest_marker(mark)
        if marker is None:
            continue
        if not marker.args:
            pytest.fail(f"{metafunc.definition.nodeid}: {mark}() names no size", pytrace=False)
        for size in (*marker.args, *marker.kwargs.get("slow", ())):
            is_slow = size not in marker.args or World(transport, size).is_slow
            marks = [pytest.mark.slow] if is_slow else []
            worlds.append(pytest.param(transport, size, marks=marks, id=f"{IDS[transport]}{size}"))
    if not worlds:
        return
    if hasattr(metafunc.function, "hypothesis"):
        pytest.fail(f"{metafunc.definition.nodeid}: ranks draw different examples", pytrace=False)
    names = ["transport", "num_ranks"]
    metafunc.fixturenames += [name for name in names if name not in metafunc.fixturenames]
    metafunc.parametrize(names, worlds)


def world_of(item: pytest.Item) -> World | None:
    """Return the ranks that an item needs; None without a mark."""
    if isinstance(item, pytest.Function) and any(map(item.get_closest_marker, MARKS.values())):
        transport, num_ranks = (item.callspec.params[key] for key in ("transport", "num_ranks"))
        assert isinstance(num_ranks, int), f"ranks() takes integers, not {num_ranks!r}"
        return World(str(transport), num_ranks)
    return None


@dataclass(frozen=True, kw_only=True)
class RankResult:
    """The result of one test on one rank: a line in the rank's file."""

    rank: int
    nodeid: str
    outcome: str  # passed | failed
    ended_at_s: float  # time.time(): the first failure is the cause, others may follow from it
    duration_s: float
    longrepr: str
    summary: str  # the last words of longrepr
    sections: list[tuple[str, str]]  # captured output: title, text


class InnerRun:
    """One rank under the launcher."""

    def __init__(self, world: World, *, forks: bool) -> None:
        self.rank = 0  # also before the ranks are forked
        self.world = world
        self.forks = forks
        # Nothing is captured yet, so this stays the terminal.
        self.terminal = os.fdopen(os.dup(2), "w")
        self.results_path: Path | None = None
        if not forks:
            self.begin()

    def begin(self) -> None:
        """Prepare the process of a rank."""
        self.rank = int(os.environ["RANK"])
        if folder := os.environ.get(RESULTS_ENV):
            self.results_path = Path(folder, f"rank{self.rank}.jsonl")
            # Records where this rank is when another one fails, or when all hang.
            stack_fd = os.open(Path(folder, f"rank{self.rank}.stack"), os.O_CREAT | os.O_WRONLY)
            faulthandler.register(signal.SIGTERM, file=stack_fd, chain=True)
        self.exitstatus = 0
        self.failed: set[str] = set()
        self.duration_s: dict[str, float] = defaultdict(float)
        if hasattr(os, "SCHED_BATCH"):
            # There are more ranks than cores, and each exchange wakes several threads per rank.
            # Batch scheduling avoids preemption, which saves a third of the time on 4 ranks and 2
            # cores. If it is forbidden, the tests are only slower.
            with suppress(OSError):
                os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))

    @pytest.fixture(scope="session", autouse=True)
    @classmethod
    def ep_ranks(cls) -> "Iterator[MPI.Comm | None]":
        """Yield the argument of EPGroup: the MPI world, or None for the default process group."""
        if os.environ[UNDER_LAUNCHER_ENV] == "mpi":
            from mpi4py import MPI

            yield MPI.COMM_WORLD
        else:
            with process_group():
                yield None

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        others = [item for item in items if world_of(item) != self.world]
        items[:] = [item for item in items if world_of(item) == self.world]
        config.hook.pytest_deselected(items=others)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> None:
        if self.forks and not session.testsfailed and not session.config.option.collectonly:
            with ready_to_fork(session.config, len(session.items)):
                fork_ranks(self.world.num_ranks)
            self.begin()

    def take_over(self, session: pytest.Session, nodeids: Sequence[str]) -> None:
        """Fork the ranks from a process that was an outer run, and select their tests."""
        config = session.config
        for name in ("lfplugin", "nfplugin", "stepwiseplugin"):  # -p no:cacheprovider
            if config.pluginmanager.has_plugin(name):
                config.pluginmanager.unregister(name=name)
        config.option.no_summary = config.option.runxfail = True
        config.option.maxfail = 1
        # Crashes are shown here, not on the terminal of the outer run.
        faulthandler.enable(self.terminal)
        fork_ranks(self.world.num_ranks, self.world.num_hosts)
        config.pluginmanager.register(self)
        self.begin()
        chosen = set(nodeids)
        session.items = [item for item in session.items if item.nodeid in chosen]
        for item in session.items:
            assert isinstance(item, pytest.Function), "only functions have a world"
            # The name was not a fixture when the test was collected.
            names = [name for name in item.fixturenames if name != "ep_ranks"]
            item.fixturenames[:] = ["ep_ranks", *names]

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_make_collect_report(
        self,
    ) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
        report = yield
        fail_if_skipped(report)
        return report

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_makereport(self) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        fail_if_skipped(report)
        return report

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.say(f"failed to collect {report.nodeid}\n{report.longreprtext}")

    def pytest_runtest_logstart(self) -> None:
        if self.results_path:
            self.results_path.touch()  # this rank got as far as its tests

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.duration_s[report.nodeid] += report.duration
        if report.failed:
            # Immediately, because the launcher ends the other ranks, and cleanup may end this one.
            output = "".join(f"\n{title}\n{text}" for title, text in report.sections)
            self.say(f"failed in {report.nodeid} ({report.when})\n{report.longreprtext}{output}")
            if report.nodeid not in self.failed:
                self.failed.add(report.nodeid)
                self.record(report)
        elif report.when == "teardown" and report.nodeid not in self.failed:
            self.record(report)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_teardown(self) -> None:
        if self.failed:
            self.leave_soon()

    @pytest.hookimpl(tryfirst=True)
    def pytest_sessionfinish(self, exitstatus: int) -> None:
        if exitstatus == pytest.ExitCode.NO_TESTS_COLLECTED:
            self.say(f"failed: no test is selected that is marked {self.world}")
        self.exitstatus = int(exitstatus)
        if exitstatus != pytest.ExitCode.OK:
            self.leave_soon()

    @pytest.hookimpl(trylast=True)
    def pytest_unconfigure(self) -> None:
        # At exit mpi4py would wait in MPI_Finalize for ranks that never call it. Without it, the
        # non-zero exit code makes mpirun end the other ranks.
        if self.world.transport == "mpi" and self.exitstatus:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(self.exitstatus)

    def leave_soon(self) -> None:
        """End this process in time even if a fixture waits for the other ranks."""
        faulthandler.dump_traceback_later(LEAVE_LIMIT_S, exit=True, file=self.terminal)

    def say(self, text: str) -> None:
        # One write, so that the messages of several ranks are not interleaved.
        self.terminal.write(f"\nrank {self.rank} of {self.world.num_ranks} {text}\n")
        self.terminal.flush()

    def record(self, report: pytest.TestReport) -> None:
        if not self.results_path:
            return
        crash = getattr(report.longrepr, "reprcrash", None)
        result = RankResult(
            rank=self.rank,
            nodeid=report.nodeid,
            outcome=report.outcome,
            ended_at_s=time.time(),
            duration_s=self.duration_s[report.nodeid],
            longrepr=report.longreprtext,
            summary=str(crash) if crash else report.longreprtext,
            sections=report.sections,
        )
        with self.results_path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(asdict(result)) + "\n")


@contextmanager
def process_group() -> Iterator[None]:
    """Provide the default process group; destroy it after a failure too, or torch may abort."""
    import torch.distributed as dist  # The import is slow, and useless if no test is selected.

    backend = os.environ.get(BACKEND_ENV, "gloo")
    take_device(backend)
    backend = "gloo" if backend == SHARED_GPUS else backend
    dist.init_process_group(backend, timeout=timedelta(seconds=COLLECTIVE_LIMIT_S))
    try:
        yield
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()


def take_device(backend: str) -> None:
    """Select the device of this rank, if the backend uses devices."""
    if backend in GPU_BACKENDS:
        import torch

        place = int(os.environ["LOCAL_RANK"])
        if backend == SHARED_GPUS:
            place %= torch.cuda.device_count()
            let_ranks_share_gpus(torch.device("cuda", place))
        torch.cuda.set_device(place)
    elif backend == "hccl":
        # The import also registers the backend.
        import_module("torch_npu").npu.set_device(int(os.environ["LOCAL_RANK"]))


def fail_if_skipped(report: pytest.CollectReport | pytest.TestReport) -> None:
    """Turn a skip into a failure: if a rank skips, the others hang in a collective."""
    if report.skipped and not hasattr(report, "wasxfail"):
        reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr
        report.outcome = "failed"
        report.longrepr = f"{reason} (under the launcher a skip is a failure)"


def freeze_objects() -> None:
    """Exclude existing objects from garbage collection, which took a tenth of the test time.

    Forked ranks share the memory of these objects until they write to it.
    """
    gc.collect()
    gc.freeze()
    gc.enable()


@contextmanager
def ready_to_fork(config: pytest.Config, num_tests: int) -> Iterator[None]:
    """Import and freeze what forked processes share; each captures to its own files."""
    capture = config.pluginmanager.getplugin("capturemanager")
    assert isinstance(capture, CaptureManager), "pytest's own plugin"
    capture.stop_global_capturing()
    if num_tests >= MANY_TESTS:
        with suppress(ImportError):
            import_module("transformers.modeling_utils")
    freeze_objects()
    sys.stdout.flush()
    sys.stderr.flush()
    yield
    capture.start_global_capturing()
    capture.suspend_global_capture()


def can_fork(world: World) -> bool:
    """Return whether the ranks can be forked from this process."""
    has_devices = BACKEND_ENV in os.environ or Path("/dev/nvidiactl").exists()
    return world.transport != "mpi" and sys.platform == "linux" and not has_devices


@dataclass(frozen=True, kw_only=True)
class Launch:
    """The results of one launch."""

    world: World
    nodeids: list[str]
    results: list[RankResult]
    num_ranks_started: int  # ranks that reached their tests
    stacks: dict[int, str]  # by rank: where it was when it was ended
    ending: str  # how it failed; empty on success
    output: str
    duration_s: float


Process = Copy | subprocess.Popen[bytes]


@dataclass(frozen=True, kw_only=True)
class Share:
    """Tests of one launch."""

    world: World
    nodeids: list[str]
    copy: Copy | None  # None if the launcher starts the ranks.


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The result of one test over all ranks."""

    failure: str  # empty if passed
    results: list[RankResult]


class OuterRun:
    """The run that launches the others and reports their results."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.stall_limit_s = float(config.getini("multi_rank_stall_limit_s"))
        self.items: dict[World, list[pytest.Function]] = defaultdict(list)
        self.nodeids: dict[World, list[str]] = {}  # those to launch
        # Written by the threads of launches, under `changed`; the tests that none has taken yet.
        self.shares: list[Share] = []
        self.verdicts: dict[str, Verdict] = {}
        self.launches: list[Launch] = []
        self.threads: list[threading.Thread] = []
        self.num_at_first = 0
        self.error: BaseException | None = None
        self.changed = threading.Condition()
        self.must_end = threading.Event()
        # SIGTERM acts like Ctrl-C, because an abrupt end would not end a launch.
        signal.signal(signal.SIGTERM, signal.default_int_handler)

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items.sort(key=lambda item: world_of(item) is not None)

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        for item in session.items:
            if isinstance(item, pytest.Function) and (world := world_of(item)):
                self.items[world].append(item)
                if world.transport == "hosts" and (reason := network.missing()):
                    item.add_marker(pytest.mark.skip(reason=f"no simulated hosts: {reason}"))
        for world, items in self.items.items():
            launched = [item.nodeid for item in items if evaluate_skip_marks(item) is None]
            if launched:
                self.nodeids[world] = launched

    @pytest.hookimpl(wrapper=True)
    def pytest_runtestloop(self, session: pytest.Session) -> Generator[None, object, object]:
        if not self.nodeids or self.config.option.collectonly:
            return (yield)
        if self.fork_copies(session):
            return (yield)  # on a rank
        for item in (item for of_world in self.items.values() for item in of_world):
            # The fixtures of the test live on the ranks. Only pytest's protocol runs here, with
            # skip and xfail marks, -x and all reports.
            item.fixturenames = []
        self.num_at_first = self.num_at_a_time()
        for _ in range(self.num_at_first):
            self.start_thread()
        try:
            return (yield)
        finally:
            self.must_end.set()
            for thread in self.threads:
                thread.join()
            for share in self.shares:
                if share.copy:
                    share.copy.cancel()

    def fork_copies(self, session: pytest.Session) -> bool:
        """Fork a copy of this process for each launch of CPU ranks; return True on its ranks."""
        # The longest is the first to be taken.
        launches = sorted(split(self.nodeids), key=lambda launch: len(launch[1]))
        num_tests = max((len(nodeids) for world, nodeids in launches if can_fork(world)), default=0)
        with ready_to_fork(self.config, num_tests):
            for world, nodeids in launches:
                copies = [share.copy for share in self.shares if share.copy]
                copy = fork_copy(copies) if can_fork(world) else None
                if isinstance(copy, Path):
                    os.environ |= {UNDER_LAUNCHER_ENV: world.transport, RESULTS_ENV: str(copy)}
                    self.config.pluginmanager.unregister(self)
                    InnerRun(world, forks=True).take_over(session, nodeids)
                    return True
                self.shares.append(Share(world=world, nodeids=nodeids, copy=copy))
        return False

    def start_thread(self) -> None:
        """Start launching, in parallel with running launches."""
        self.threads.append(threading.Thread(target=self.launch_all))
        self.threads[-1].start()

    def num_at_a_time(self) -> int:
        """Return the number of launches that run in parallel with the tests of this process."""
        items = (item for of_world in self.items.values() for item in of_world)
        is_timed = any(item.get_closest_marker("slow") for item in items)
        return 1 if is_timed or BACKEND_ENV in os.environ else 2

    def next_share(self) -> Share | None:
        """Take tests that no thread has taken, or return None."""
        with self.changed:
            return self.shares.pop() if self.shares else None

    def launch_all(self) -> None:
        """Launch until every test has a verdict, or the run ends."""
        try:
            while (share := self.next_share()) is not None:
                copy = share.copy
                while undone := [n for n in share.nodeids if n not in self.verdicts]:
                    launch = self.launch(share.world, undone, copy)
                    copy = None
                    if self.must_end.is_set():
                        return
                    with self.changed:
                        self.launches.append(launch)
                        self.verdicts.update(judge(launch))
                        self.changed.notify_all()
        except BaseException as error:  # noqa: BLE001  (raised where a verdict is waited for)
            with self.changed:
                self.error = error
                self.changed.notify_all()

    def verdict(self, nodeid: str) -> Verdict:
        """Wait for the launch of a test."""
        if len(self.threads) == self.num_at_first > 1:
            # This process has run its own tests.
            self.start_thread()
        with self.changed:
            # Wait with a limit, so that Ctrl-C is handled.
            while nodeid not in self.verdicts and self.error is None:
                self.changed.wait(0.1)
            if nodeid not in self.verdicts:
                raise RuntimeError(f"no launch of {nodeid}") from self.error
            return self.verdicts[nodeid]

    @pytest.hookimpl(tryfirst=True)
    def pytest_pyfunc_call(self, pyfuncitem: pytest.Function) -> bool | None:
        if world_of(pyfuncitem) is None:
            return None
        if failure := self.verdict(pyfuncitem.nodeid).failure:
            pytest.fail(failure, pytrace=False)
        return True

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(
        self, item: pytest.Item, call: pytest.CallInfo[None]
    ) -> Generator[None, pytest.TestReport, pytest.TestReport]:
        report = yield
        verdict = self.verdicts.get(item.nodeid)
        if call.when == "call" and verdict:
            report.duration = max((result.duration_s for result in verdict.results), default=0.0)
            for result in verdict.results:
                report.sections += [
                    (f"{title} (rank {result.rank})", text) for title, text in result.sections
                ]
        return report

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if self.launches:
            terminalreporter.section("multi-rank runs")
        for world in sorted({launch.world for launch in self.launches}):
            launches = [launch for launch in self.launches if launch.world == world]
            num_tests = sum(item.nodeid in self.verdicts for item in self.items[world])
            seconds = sum(launch.duration_s for launch in launches)
            terminalreporter.line(
                f"{world}: {num_tests} tests, {seconds:.1f} s, launches: {len(launches)}"
            )

    def launch(self, world: World, nodeids: list[str], copy: Copy | None) -> Launch:
        """Run tests of one world, in a copy of this process or by the launcher."""
        start_s = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="epcomm-ranks-") as folder_name:
            folder = Path(folder_name)
            selection = folder / "selection.txt"
            selection.write_text("\n".join(nodeids), encoding="utf-8")
            arguments = [
                f"--rootdir={self.config.rootpath}",
                f"--tb={self.config.option.tbstyle}",
                f"--verbosity={self.config.option.verbose}",
                # An expected failure fails on the ranks too; only this run knows that it is
                # expected.
                "--runxfail",
                # Node ids are passed in a file, because a command line has a limit.
                f"@{selection}",
            ]
            if self.config.inipath:
                arguments += ["-c", str(self.config.inipath)]
            if copy:
                copy.start(folder)
            process = copy or self.start_launcher(world, arguments, folder)
            try:
                ending = self.wait(process, world.num_ranks, folder)
            finally:
                stop(process)
            files = list(folder.glob("rank*.jsonl"))
            lines = [line for file in files for line in file.read_text("utf-8").splitlines()]
            return Launch(
                world=world,
                nodeids=nodeids,
                results=[RankResult(**json.loads(line)) for line in lines],
                num_ranks_started=len(files),
                stacks={
                    rank: without_pytest_frames(path.read_text("utf-8", errors="replace"))
                    for rank in range(world.num_ranks)
                    if (path := folder / f"rank{rank}.stack").exists()
                },
                ending=ending,
                output=without_pytest_frames(
                    (folder / "output.txt").read_text("utf-8", errors="replace")
                ),
                duration_s=time.monotonic() - start_s,
            )

    def start_launcher(
        self, world: World, arguments: list[str], folder: Path
    ) -> subprocess.Popen[bytes]:
        environment = os.environ | {"PYTHON": sys.executable, RESULTS_ENV: str(folder)}
        environment.pop("NNODES", None)
        command = [str(LAUNCHER), str(world.num_ranks)]
        if world.transport == "mpi":
            command.insert(1, "--mpi")
        elif world.transport == "hosts":
            environment[HOSTS_ENV] = str(world.num_hosts)
            options = ["--hosts", str(world.num_hosts), "--ranks", str(RANKS_PER_HOST)]
            command = [sys.executable, "-m", "tests.hosts.launch", *options]
        with (folder / "output.txt").open("wb") as output:
            # A new session, so that only this process receives Ctrl-C, which stop() relays once.
            return subprocess.Popen(
                [*command, *arguments],
                cwd=self.config.rootpath,  # node ids are relative to it
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def wait(self, process: Process, num_ranks: int, folder: Path) -> str:
        """Wait for the end while results arrive; return how it failed, empty on success."""
        progress, changed_at_s = [], time.monotonic()
        while process.poll() is None:
            if self.must_end.wait(0.05):
                return "was ended with the run"
            progress_now = [path.stat().st_size for path in folder.glob("rank*.jsonl")]
            if progress_now != progress:
                progress, changed_at_s = progress_now, time.monotonic()
            started = len(progress) == num_ranks
            limit_s = self.stall_limit_s if started else START_LIMIT_S
            if time.monotonic() - changed_at_s > limit_s:
                what = "no rank finished a test" if started else "not all ranks started"
                return f"was ended after {limit_s:g} s in which {what}"
        return f"ended with exit code {process.returncode}" if process.returncode else ""


def split(nodeids: Mapping[World, list[str]]) -> Iterator[tuple[World, list[str]]]:
    """Yield the tests of each launch, in order and of one world, in equal numbers."""
    for world, of_world in nodeids.items():
        num_launches = -(-len(of_world) // MAX_TESTS_OF_LAUNCH)
        size = -(-len(of_world) // num_launches)
        for start in range(0, len(of_world), size):
            yield world, of_world[start : start + size]


def stop(process: Process) -> None:
    """End a launch; its first process ends the ranks, which have their own sessions or groups."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(STOP_LIMIT_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def judge(launch: Launch) -> dict[str, Verdict]:
    """Set the verdict of each test that passed, and of the one that ended the launch."""
    results: dict[str, list[RankResult]] = defaultdict(list)
    for result in sorted(launch.results, key=lambda result: result.rank):
        results[result.nodeid].append(result)
    passed = [
        nodeid
        for nodeid in launch.nodeids
        if [result.outcome for result in results[nodeid]] == ["passed"] * launch.world.num_ranks
    ]
    verdicts = {nodeid: Verdict(failure="", results=results[nodeid]) for nodeid in passed}
    undone = [nodeid for nodeid in launch.nodeids if nodeid not in verdicts]
    failures = [result for result in launch.results if result.outcome != "passed"]
    if failures:
        # A rank that runs ahead may fail in a later test because this one ended a rank.
        culprits = [min(failures, key=lambda result: result.ended_at_s).nodeid]
    elif launch.num_ranks_started < launch.world.num_ranks:
        culprits = undone  # no test is at fault, and the next launch would end in the same way
    elif undone:
        culprits = undone[:1]
    else:
        culprits = launch.nodeids[-1:] if launch.ending else []
    for nodeid in culprits:
        failure = describe_failure(nodeid, results[nodeid], launch)
        verdicts[nodeid] = Verdict(failure=failure, results=results[nodeid])
    return verdicts


def describe_failure(nodeid: str, results: list[RankResult], launch: Launch) -> str:
    """Describe the failed ranks, the first in full, and where the other ranks were."""
    failed = sorted(
        (result for result in results if result.outcome != "passed"),
        key=lambda result: result.ended_at_s,
    )
    silent = sorted(set(range(launch.world.num_ranks)) - {result.rank for result in results})
    sentences = [f"{nodeid} on {launch.world.num_ranks} ranks:"]
    if failed:
        sentences.append(f"failed on {name_ranks(sorted(result.rank for result in failed))};")
    if silent:
        sentences.append(f"no result from {name_ranks(silent)};")
    sentences.append(f"the launch {launch.ending or 'ended with exit code 0'}")
    parts = [" ".join(sentences)]
    parts += [f"--- rank {result.rank} failed first\n{result.longrepr}" for result in failed[:1]]
    parts += [f"--- rank {result.rank} failed later\n{result.summary}" for result in failed[1:]]
    parts += [
        f"--- rank {rank} was ended here\n{launch.stacks[rank]}"
        for rank in silent
        if launch.stacks.get(rank)
    ]
    if not failed:
        tail = "\n".join(launch.output.splitlines()[-TAIL_LINES:])
        parts.append(f"--- the last lines of the launch\n{tail}")
    return "\n".join(parts)


def name_ranks(ranks: list[int]) -> str:
    """Return ranks as text: rank 3; ranks 0, 2."""
    return ("ranks " if len(ranks) > 1 else "rank ") + ", ".join(map(str, ranks))


def without_pytest_frames(text: str) -> str:
    """Return a stack without the lines, about 30, between the start of a process and its test."""
    noise = ("/_pytest/", "/pluggy/", '/pytest/__main__.py"', '"<frozen runpy>"')
    lines = text.splitlines()
    return "\n".join(
        line
        for line in lines
        if not (line.startswith("  File ") and any(part in line for part in noise))
    )
