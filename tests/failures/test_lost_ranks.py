import json
import re
import subprocess
import sys
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest

from tests.failures.scenario import (
    CLOSE_LIMIT_S,
    EXIT_CODE,
    EXIT_LIMIT_S,
    NAMING_LIMIT_S,
    Outcome,
    Scenario,
)
from tests.hosts import network

pytestmark = pytest.mark.slow

REPO = Path(__file__).parents[2]
# Seconds for all scenarios together; they take 35 s on two idle cores and 300 s on busy ones. Each
# scenario has its own limit too.
LAUNCH_LIMIT_S = 1800
# Seconds without a core, of all threads of a rank together, after which the rank may miss the grace
# period for its report. On two idle cores it is at most 1.9, and 15.5 over MPI, whose ranks poll.
STARVED_S, STARVED_OVER_MPI_S = 5.0, 30.0

PHASE_NAMES = {
    "dispatch": "dispatch counts",
    "combine": "combine calls",
    "backward": "backward of combine calls",
    "within dispatch rows": "dispatch rows",
    "within combine": "combine",
    "within backward of dispatch": "backward of dispatch",
}
MATRIX = [
    Scenario(fault=fault, phase=phase)
    for fault in ("killed", "stopped", "late")
    for phase in ("dispatch", "combine")
]
OTHERS = [
    # Each rank over MPI is an interpreter, which imports torch.
    Scenario(transport="mpi", fault="killed", phase="dispatch"),
    Scenario(transport="mpi", fault="stopped", phase="combine"),
    Scenario(transport="mpi", fault="late", phase="dispatch"),
    Scenario(transport="shared_memory", fault="killed", phase="dispatch"),
    Scenario(transport="shared_memory", fault="stopped", phase="combine"),
    Scenario(transport="shared_memory", fault="late", phase="dispatch"),
    Scenario(fault="late", phase="backward"),
    Scenario(fault="killed", phase="dispatch", begins=True),
    Scenario(fault="stopped", phase="combine", begins=True),
    Scenario(fault="killed", phase="backward", begins=True),
    Scenario(fault="killed", phase="within dispatch rows", begins=True),
    Scenario(fault="killed", phase="within combine", begins=True),
    Scenario(fault="killed", phase="within backward of dispatch", begins=True),
    Scenario(transport="mpi", fault="killed", phase="within dispatch rows", begins=True),
    Scenario(transport="mpi", fault="killed", phase="backward", begins=True),
    Scenario(transport="shared_memory", fault="stopped", phase="combine", begins=True),
    Scenario(transport="shared_memory", fault="killed", phase="backward", begins=True),
    Scenario(fault="stopped", phase="combine", lost_ranks=(1,), destroys=False),
    Scenario(fault="killed", phase="combine", lost_ranks=(1, 3)),
    # The store of the process group is lost with the rank, or a survivor serves it.
    Scenario(fault="killed", phase="dispatch", lost_ranks=(0,), store_host=0),
    Scenario(fault="stopped", phase="dispatch", lost_ranks=(0,), store_host=0),
    Scenario(fault="stopped", phase="combine", store_host=0),
    Scenario(fault="killed", phase="combine", combine_dtype="fp8_e4m3"),
    Scenario(transport="shared_memory", fault="stopped", phase="combine", combine_dtype="mxfp8"),
    Scenario(fault="late", phase="combine", combine_dtype="nvfp4"),
    # All ranks of a declared host.
    Scenario(transport="hierarchical_mpi", fault="stopped", phase="combine", lost_ranks=(2, 3)),
]
# A host of two or four is lost with all its ranks: the host with the store, which a process or a
# rank serves, or another one.
OF_TWO_HOSTS = partial(Scenario, num_hosts=2)
BETWEEN_HOSTS = partial(OF_TWO_HOSTS, transport="hierarchical", fault="killed")
HOSTS = [
    OF_TWO_HOSTS(fault="killed", phase="dispatch", lost_ranks=(2, 3)),
    OF_TWO_HOSTS(fault="killed", phase="combine", lost_ranks=(0, 1)),
    OF_TWO_HOSTS(fault="unplugged", phase="combine", lost_ranks=(0, 1)),
    Scenario(
        fault="killed", phase="dispatch", lost_ranks=(0, 1), store_host=0, num_ranks=8, num_hosts=4
    ),
    # Ranks of a host also wait for one another, and some of them wait for the lost host.
    BETWEEN_HOSTS(phase="dispatch", lost_ranks=(2, 3), store_host=0),
    BETWEEN_HOSTS(phase="combine", combine_dtype="nvfp4", lost_ranks=(0, 1)),
    # A single rank: one rank waits for it between hosts, two wait for others inside.
    BETWEEN_HOSTS(phase="combine", lost_ranks=(2,), begins=True),
    BETWEEN_HOSTS(phase="dispatch", lost_ranks=(2,)),
]
SCENARIOS = {scenario.name: scenario for scenario in MATRIX + OTHERS + HOSTS}


@dataclass(frozen=True, kw_only=True)
class Played:
    """The results of a scenario; exit_codes and ended_at_s are by rank."""

    scenario: Scenario
    folder: Path
    exit_codes: dict[int, int | None]
    ended_at_s: dict[int, float]

    def outcome(self, rank: int) -> Outcome:
        path = self.folder / f"outcome{rank}.json"
        if not path.exists():
            log = (self.folder / f"rank{rank}.log").read_text()
            pytest.fail(f"rank {rank} left no outcome, exit code {self.exit_codes[rank]}\n{log}")
        return Outcome.read(self.folder, rank)


@pytest.fixture(scope="module")
def played(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Played]:
    folder = tmp_path_factory.mktemp("scenarios")
    playable = [one for one in SCENARIOS.values() if one.num_hosts == 1 or not network.missing()]
    launch = subprocess.run(
        [sys.executable, "-m", "tests.failures.launch", str(folder)],
        cwd=REPO,
        input="\n".join(scenario.dumps() for scenario in playable),
        capture_output=True,
        text=True,
        timeout=LAUNCH_LIMIT_S,
        check=False,
    )
    assert launch.returncode == 0, launch.stderr
    runs = {}
    for scenario in playable:
        name = scenario.name
        ends = json.loads((folder / name / "ends.json").read_text())
        runs[name] = Played(
            scenario=scenario,
            folder=folder / name,
            exit_codes={int(rank): end["exit_code"] for rank, end in ends.items()},
            ended_at_s={int(rank): end["at_s"] for rank, end in ends.items()},
        )
    return runs


@pytest.fixture(params=SCENARIOS)
def run(request: pytest.FixtureRequest, played: dict[str, Played]) -> Played:
    if request.param not in played:
        pytest.skip(f"no simulated hosts: {network.missing()}")
    return played[request.param]


def test_survivors_name_phase_call_and_lost_ranks_in_time(run: Played) -> None:
    scenario = run.scenario
    lost = set(scenario.lost_ranks)
    outcomes = {rank: run.outcome(rank) for rank in scenario.survivors}
    starved_s = sum(outcome.starved_s for outcome in outcomes.values())
    # A survivor that has no core reports after the grace, and is named with the lost ranks.
    most_s = STARVED_OVER_MPI_S if scenario.is_over_mpi else STARVED_S
    is_starved = any(outcome.starved_s > most_s for outcome in outcomes.values())
    for rank, outcome in outcomes.items():
        scope = "(, (between|inside) hosts)?" if scenario.backend == "hierarchical" else ""
        message = rf"{PHASE_NAMES[scenario.phase]}{scope}: ranks? (?P<named>[\d, ]+) did not arrive"
        found = re.match(message, outcome.message)
        assert found, outcome.message
        named = set(map(int, found["named"].split(", ")))
        assert named == lost or (lost < named and is_starved), outcome.message
        assert "(call 2, exchange " in outcome.message
        assert f"; this is rank {rank} of {scenario.num_ranks})" in outcome.message
        assert outcome.elapsed_s <= scenario.timeout_s + NAMING_LIMIT_S + starved_s


def test_killed_rank_is_named_without_waiting_for_the_deadline(played: dict[str, Played]) -> None:
    for name, run in played.items():
        if run.scenario.has_news:
            for rank in run.scenario.survivors:
                assert run.outcome(rank).elapsed_s < run.scenario.timeout_s, (name, rank)


def test_next_call_repeats_the_message_immediately(run: Played) -> None:
    for rank in run.scenario.ending:
        outcome = run.outcome(rank)
        # The second message has the call and exchange of the first, because nothing was exchanged
        # again.
        assert outcome.again == outcome.message
        assert outcome.again_s < run.scenario.timeout_s


def test_close_and_exit_do_not_wait(run: Played) -> None:
    for rank in run.scenario.ending:
        assert run.outcome(rank).close_s < CLOSE_LIMIT_S
        assert run.exit_codes[rank] == EXIT_CODE + rank
        # The interpreter ends too: no thread of the transport or the failure board blocks it.
        assert run.ended_at_s[rank] - run.outcome(rank).left_at_s < EXIT_LIMIT_S


@pytest.mark.parametrize("name", [n for n, s in SCENARIOS.items() if s.fault == "late"])
def test_late_rank_reports_that_the_others_gave_up(played: dict[str, Played], name: str) -> None:
    scenario, outcome = played[name].scenario, played[name].outcome(2)
    starved_s = sum(played[name].outcome(rank).starved_s for rank in scenario.ending)
    # On a busy machine a survivor may not have posted its report within LOOK_LIMIT_S.
    given_up = r"this rank came too late: ranks? [013](, [13])* had given up on ranks? ([013], )*2"
    # In other cases the others have finished the first exchange, and the rank misses them later.
    phase = PHASE_NAMES[scenario.phase] if scenario.transport == "gloo" else ""
    assert outcome.message.startswith(phase)
    assert re.search(given_up, outcome.message)
    assert outcome.elapsed_s < NAMING_LIMIT_S + starved_s
