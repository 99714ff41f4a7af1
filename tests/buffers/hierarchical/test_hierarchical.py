"""The buffer made of two keeps the contract of a Buffer, on ranks that are said to be on hosts."""

from __future__ import annotations

from types import MappingProxyType
from typing import TYPE_CHECKING

import pytest
import torch

from epcomm import EPGroup, Mode
from epcomm.spec import HostLayout
from epcomm.testing import buffer_suite

if TYPE_CHECKING:
    from mpi4py import MPI

# Ranks of a host are neighbours, or lie apart as in a mesh whose first dimension is inside hosts.
LAYOUTS = MappingProxyType(
    {"neighbours": HostLayout.of([0, 0, 1, 1]), "apart": HostLayout.of([0, 1, 0, 1])}
)


CASES = MappingProxyType(
    {
        "exact": ("HierarchicalBuffer", Mode.NORMAL),
        "budget": ("HierarchicalStaticBuffer", Mode.NORMAL),
        "low_latency": ("HierarchicalStaticBuffer", Mode.LOW_LATENCY),
    }
)


def env_of(group: EPGroup, case: str, layout: str) -> buffer_suite.BufferEnv:
    backend, mode = CASES[case]
    # Between GPUs NVLink carries no other rows inside a host.
    dtype = torch.bfloat16 if group.device.type == "cuda" else None
    return buffer_suite.BufferEnv(
        group=group, backend=backend, mode=mode, hosts=LAYOUTS[layout], dtype=dtype
    )


@pytest.mark.mpi_ranks(4)
@pytest.mark.parametrize("scenario", ["uneven", "faults", "combine_faults"])
@pytest.mark.parametrize("case", ["exact", "low_latency"])
def test_two_hosts_over_mpi_keep_the_contract(case: str, scenario: str, ep_ranks: MPI.Comm) -> None:
    with EPGroup(ep_ranks) as group:
        buffer_suite.run_scenario(scenario, env_of(group, case, "neighbours"))


# What static sizes may get wrong beside exact ones.
OF_STATIC = ("uneven", "holes", "faults", "combine_faults", "ids_out_of_range", "budget", "traffic")
QUICK = [
    (case, scenario)
    for case in CASES
    for scenario in (buffer_suite.SCENARIOS if case == "exact" else OF_STATIC)
]


def run(case: str, scenario: str) -> None:
    with EPGroup() as group:
        env = env_of(group, case, "apart" if scenario in ("uneven", "traffic") else "neighbours")
        buffer_suite.run_scenario(scenario, env)


@pytest.mark.ranks(4)
@pytest.mark.parametrize(("case", "scenario"), QUICK)
def test_two_hosts_of_two_ranks_keep_the_contract(case: str, scenario: str) -> None:
    run(case, scenario)


@pytest.mark.slow
@pytest.mark.ranks(4)
@pytest.mark.parametrize("scenario", sorted(set(buffer_suite.SCENARIOS) - set(OF_STATIC)))
@pytest.mark.parametrize("case", ["budget", "low_latency"])
def test_static_sizes_on_two_hosts_keep_the_contract(case: str, scenario: str) -> None:
    run(case, scenario)
