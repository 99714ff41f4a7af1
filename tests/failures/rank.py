"""One rank of a scenario, over any transport.

    mpirun --continuous -n 4 python -m tests.failures.rank --scenario JSON --folder FOLDER

tests/failures/launch.py starts it. Over gloo, launch.py forks the ranks and sets RANK, WORLD_SIZE,
MASTER_ADDR and MASTER_PORT.
"""

import argparse
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from epcomm import DeepEPNormalDispatcher, EPConfig, EPGroup, EPTimeout, MoESpec, TopKOutput
from epcomm.spec import HostLayout
from epcomm.types import RowsPer
from tests.failures.scenario import EXIT_CODE, SETUP_TIMEOUT_S, Outcome, Scenario

SPEC = MoESpec(hidden_size=16, num_experts=8, top_k=2, dtype=torch.float32)
# Seconds before a fault, so that the others receive the messages of this rank.
SETTLE_S = 0.3


@contextmanager
def open_gloo(scenario: Scenario) -> Iterator[EPGroup]:
    """Open a group over a separate process group."""
    rank, num_ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    is_host = rank == scenario.store_host
    store = dist.TCPStore(  # type: ignore[attr-defined]
        os.environ["MASTER_ADDR"],
        int(os.environ["MASTER_PORT"]),
        is_master=is_host,
        wait_for_workers=False,
        master_listen_fd=int(os.environ["STORE_FD"]) if is_host else None,
    )
    dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks)
    try:
        with EPGroup() as group:
            yield group
    finally:
        if scenario.destroys:
            dist.destroy_process_group()


@contextmanager
def open_mpi(scenario: Scenario) -> Iterator[EPGroup]:
    """Open a group over all ranks that mpirun started."""
    from mpi4py import MPI

    with EPGroup(MPI.COMM_WORLD) as group:
        if scenario.backend == "hierarchical":
            # A communicator has no mesh that defines hosts, and probing finds only one.
            group.hosts = HostLayout.of(
                [rank * 2 // scenario.num_ranks for rank in range(group.world_size)]
            )
        yield group


def run_rank(scenario: Scenario, folder: Path) -> int:
    open_group = open_mpi if scenario.is_over_mpi else open_gloo
    with open_group(scenario) as group:
        message, elapsed_s, again, again_s = _lose(scenario, group, folder)
        rank, close_start_s, starved_s = group.rank, time.monotonic(), _starved_s()
    outcome = Outcome(
        message=message,
        elapsed_s=elapsed_s,
        again=again,
        again_s=again_s,
        starved_s=starved_s,
        close_s=time.monotonic() - close_start_s,
        left_at_s=time.monotonic(),
    )
    outcome.write(folder, rank)
    return EXIT_CODE + rank


def _lose(scenario: Scenario, group: EPGroup, folder: Path) -> tuple[str, float, str, float]:
    config = EPConfig(
        backend=scenario.backend,
        timeout_s=SETUP_TIMEOUT_S,
        combine_dtype=scenario.combine_dtype,
        combine_dtype_with_gradients=True,
    )
    dispatcher = DeepEPNormalDispatcher(group, SPEC, config)
    x = torch.randn(8, SPEC.hidden_size, requires_grad=True)
    ids = torch.arange(8 * SPEC.top_k).view(8, SPEC.top_k) % SPEC.num_experts
    topk = TopKOutput(topk_ids=ids, topk_weights=torch.full((8, SPEC.top_k), 0.5))
    wait_start_s = 0.0

    def come_to(phase: str, fault_phase: str | None) -> None:
        nonlocal wait_start_s
        if phase == fault_phase:
            group.collectives.bounded.timeout_s = scenario.timeout_s
            if group.rank in scenario.lost_ranks:
                time.sleep(SETTLE_S)
                _meet_fault(scenario, folder)
            wait_start_s = time.monotonic()

    exchange = group.collectives.all_to_all

    def exchange_rows(*args: Any, phase: str = "", **options: Any) -> torch.Tensor:  # noqa: ANN401
        come_to(f"within {phase}", exchange_fault_phase)
        return exchange(*args, phase=phase, **options)

    group.collectives.all_to_all = exchange_rows
    exchange_fault_phase: str | None = None

    def call(fault_phase: str | None) -> None:
        nonlocal exchange_fault_phase
        exchange_fault_phase = fault_phase
        come_to("dispatch", fault_phase)
        if scenario.begins:
            assert dispatcher.is_asynchronous, "CPU ranks over gloo or MPI"
            out = dispatcher.dispatch_async(x, topk).wait()
        else:
            out = dispatcher.dispatch(x, topk)
        come_to("combine", fault_phase)
        results = out.combine_input(out.hidden_states.data, rows_per=RowsPer.ROW)
        if scenario.begins:
            y = dispatcher.combine_async(results).wait()
        else:
            y = dispatcher.combine(results)
        come_to("backward", fault_phase)
        y.sum().backward()

    call(None)
    group.calls.gather_records({})
    message = _message_of(lambda: call(scenario.phase))
    (folder / f"gave_up{group.rank}").touch()
    elapsed_s, again_start_s = time.monotonic() - wait_start_s, time.monotonic()
    again = _message_of(lambda: call(None))
    return message, elapsed_s, again, time.monotonic() - again_start_s


def _meet_fault(scenario: Scenario, folder: Path) -> None:
    if scenario.loses_hosts:
        # The launcher kills or unplugs the whole host when all its ranks have arrived here.
        (folder / f"lost{os.environ['RANK']}").touch()
        while True:
            signal.pause()
    elif scenario.fault == "late":
        end_s = time.monotonic() + SETUP_TIMEOUT_S
        while not all((folder / f"gave_up{rank}").exists() for rank in scenario.survivors):
            assert time.monotonic() < end_s, "the others never gave up"
            time.sleep(0.02)
    else:
        # Neither call returns, because a stopped rank is never continued.
        os.kill(os.getpid(), signal.SIGKILL if scenario.fault == "killed" else signal.SIGSTOP)


def _starved_s() -> float:
    """Return the seconds that threads of this process waited for a core; 0 if unknown."""
    starved_ns = 0
    for file in Path("/proc/self/task").glob("*/schedstat"):
        # A thread may end at any time.
        with suppress(FileNotFoundError, ProcessLookupError):
            starved_ns += int(file.read_text().split()[1])
    return starved_ns / 1e9


def _message_of(call: Callable[[], None]) -> str:
    try:
        call()
    except EPTimeout as error:
        return str(error)
    raise AssertionError("the call went well, expected an EPTimeout")


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--scenario", type=Scenario.loads, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    arguments = parser.parse_args()
    return run_rank(arguments.scenario, arguments.folder)


if __name__ == "__main__":
    raise SystemExit(main())
