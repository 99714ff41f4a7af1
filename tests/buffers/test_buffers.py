"""Every buffer that runs on a CPU passes the whole buffer suite, on 1 to 8 ranks and under MPI."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import pytest

from epcomm import EPGroup, Mode
from epcomm.testing import buffer_suite

if TYPE_CHECKING:
    from mpi4py import MPI


class Case(NamedTuple):
    """A buffer and the mode it serves."""

    backend: str
    mode: Mode


CASES = {
    "normal": Case("collective", Mode.NORMAL),
    "standard": Case("all_gather", Mode.STANDARD),
    "normal_budget": Case("collective_static", Mode.NORMAL),
    "low_latency": Case("collective_static", Mode.LOW_LATENCY),
}


@pytest.mark.ranks(1, 2, 3, 4, 8)
@pytest.mark.mpi_ranks(2, 4)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("scenario", buffer_suite.SCENARIOS)
def test_buffer_keeps_its_contract(scenario: str, case: str, ep_ranks: MPI.Comm | None) -> None:
    with EPGroup(ep_ranks) as group:
        env = buffer_suite.BufferEnv(
            group=group, backend=CASES[case].backend, mode=CASES[case].mode
        )
        buffer_suite.run_scenario(scenario, env)
