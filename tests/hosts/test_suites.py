"""Buffers and layers pass their suites on two and four hosts, two ranks on each."""

from __future__ import annotations

import pytest

from epcomm import EPConfig, EPGroup, Mode
from epcomm.spec import HostLayout
from epcomm.testing import buffer_suite, layer_suite
from tests.multi_rank import RANKS_PER_HOST

pytestmark = pytest.mark.slow

# The flat exchange behaves the same over a network, so a few scenarios suffice. Four hosts run the
# scenarios that depend on the number of hosts.
ON_FOUR_HOSTS = ("uneven", "holes", "faults", "traffic", "checkpointing")
BUFFERS = {
    ("CollectiveBuffer", Mode.NORMAL): ("uneven", "faults", "traffic"),
    # A plan predicts the bytes of its largest call, which test_hierarchical.py sends.
    ("HierarchicalBuffer", Mode.NORMAL): tuple(
        name for name in buffer_suite.SCENARIOS if name != "traffic"
    ),
}
LAYERS = {
    "collective": ("uneven", "checkpointing"),
    "hierarchical": (*layer_suite.SCENARIOS, *layer_suite.GRADIENT_SCENARIOS),
}


def hosts_of(group: EPGroup) -> HostLayout:
    """Return the host of each rank of the launcher."""
    return HostLayout(
        host_of_rank=tuple(rank // RANKS_PER_HOST for rank in range(group.world_size))
    )


def check_buffer(buffer: str, mode: Mode, scenario: str) -> None:
    with EPGroup() as group:
        env = buffer_suite.BufferEnv(group=group, backend=buffer, mode=mode, hosts=hosts_of(group))
        buffer_suite.run_scenario(scenario, env)


def check_layer(backend: str, scenario: str) -> None:
    with EPGroup() as group:
        config = EPConfig(mode="normal", backend=backend)
        layer_suite.run_scenario(scenario, layer_suite.pipeline_env(group, config))


ALL_BUFFERS = [(*case, each) for case in BUFFERS for each in BUFFERS[case]]
ALL_LAYERS = [(name, each) for name in LAYERS for each in LAYERS[name]]


@pytest.mark.host_ranks(4)
@pytest.mark.parametrize(("buffer", "mode", "scenario"), ALL_BUFFERS)
def test_buffer_over_hosts_keeps_its_contract(buffer: str, mode: Mode, scenario: str) -> None:
    check_buffer(buffer, mode, scenario)


@pytest.mark.host_ranks(8)
@pytest.mark.parametrize(
    ("buffer", "mode", "scenario"), [case for case in ALL_BUFFERS if case[-1] in ON_FOUR_HOSTS]
)
def test_buffer_over_four_hosts_keeps_its_contract(buffer: str, mode: Mode, scenario: str) -> None:
    check_buffer(buffer, mode, scenario)


@pytest.mark.host_ranks(4)
@pytest.mark.parametrize(("backend", "scenario"), ALL_LAYERS)
def test_layer_over_hosts_equals_the_oracle(backend: str, scenario: str) -> None:
    check_layer(backend, scenario)


@pytest.mark.host_ranks(8)
@pytest.mark.parametrize(
    ("backend", "scenario"), [case for case in ALL_LAYERS if case[-1] in ON_FOUR_HOSTS]
)
def test_layer_over_four_hosts_equals_the_oracle(backend: str, scenario: str) -> None:
    check_layer(backend, scenario)
