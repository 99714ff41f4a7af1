"""Buffers and layers pass their suites on two and four hosts, two ranks on each."""

import pytest

from epcomm import EPConfig, EPGroup, Mode
from epcomm.spec import HostLayout
from epcomm.testing import buffer_suite, layer_suite
from tests.multi_rank import RANKS_PER_HOST

pytestmark = pytest.mark.slow

# Exchanges behave the same over a network, so a few scenarios suffice. Four hosts run those that
# depend on the number of hosts. A plan predicts the bytes of the largest call of the hierarchical
# buffer, which test_hierarchical.py sends.
ON_FOUR_HOSTS = ("uneven", "faults", "checkpointing")
BUFFERS = {
    "CollectiveBuffer": ("uneven", "faults", "traffic"),
    "HierarchicalBuffer": ("uneven", "empty_rank", "stand_alone", "faults", "combine_faults"),
}
LAYERS = {
    "collective": ("checkpointing",),
    "hierarchical": ("holes", "interleaved", "checkpointing", "rank_without_gradients"),
}


def hosts_of(group: EPGroup) -> HostLayout:
    return HostLayout.of([rank // RANKS_PER_HOST for rank in range(group.world_size)])


CASES = [
    *((name, each) for name in BUFFERS for each in BUFFERS[name]),
    *((name, each) for name in LAYERS for each in LAYERS[name]),
]


def check(name: str, scenario: str) -> None:
    with EPGroup() as group:
        if name in BUFFERS:
            env = buffer_suite.BufferEnv(
                group=group, backend=name, mode=Mode.NORMAL, hosts=hosts_of(group)
            )
            buffer_suite.run_scenario(scenario, env)
        else:
            config = EPConfig(mode="normal", backend=name)
            layer_suite.run_scenario(scenario, layer_suite.pipeline_env(group, config))


@pytest.mark.host_ranks(4)
@pytest.mark.parametrize(("name", "scenario"), CASES)
def test_two_hosts_keep_the_contract(name: str, scenario: str) -> None:
    check(name, scenario)


@pytest.mark.host_ranks(8)
@pytest.mark.parametrize(("name", "scenario"), [each for each in CASES if each[1] in ON_FOUR_HOSTS])
def test_four_hosts_keep_the_contract(name: str, scenario: str) -> None:
    check(name, scenario)
