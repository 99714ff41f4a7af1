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


def env_of(group: EPGroup, layout: str) -> buffer_suite.BufferEnv:
    # Between GPUs NVLink carries no other rows inside a host.
    dtype = torch.bfloat16 if group.device.type == "cuda" else None
    return buffer_suite.BufferEnv(
        group=group,
        backend="HierarchicalBuffer",
        mode=Mode.NORMAL,
        hosts=LAYOUTS[layout],
        dtype=dtype,
    )


@pytest.mark.mpi_ranks(4)
@pytest.mark.parametrize("scenario", ["uneven", "faults", "combine_faults"])
def test_two_hosts_over_mpi_keep_the_contract(scenario: str, ep_ranks: MPI.Comm) -> None:
    with EPGroup(ep_ranks) as group:
        buffer_suite.run_scenario(scenario, env_of(group, "neighbours"))


@pytest.mark.ranks(4)
@pytest.mark.parametrize("scenario", buffer_suite.SCENARIOS)
def test_two_hosts_of_two_ranks_keep_the_contract(scenario: str) -> None:
    with EPGroup() as group:
        env = env_of(group, "apart" if scenario in ("uneven", "traffic") else "neighbours")
        buffer_suite.run_scenario(scenario, env)
