"""Buffers and layers pass their suites on two and four hosts, two ranks on each."""

from __future__ import annotations

import pytest

from epcomm import EPConfig, EPGroup, Mode
from epcomm.spec import HostLayout
from epcomm.testing import buffer_suite, layer_suite
from tests.multi_rank import RANKS_PER_HOST

pytestmark = pytest.mark.slow

# The flat way crosses a network as it crosses one host; a few scenarios prove the hosts.
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
    """Return where the ranks of the launcher are."""
    return HostLayout(
        host_of_rank=tuple(rank // RANKS_PER_HOST for rank in range(group.world_size))
    )


@pytest.mark.host_ranks(4, 8)
@pytest.mark.parametrize(
    ("buffer", "mode", "scenario"), [(*case, each) for case in BUFFERS for each in BUFFERS[case]]
)
def test_buffer_over_hosts_keeps_its_contract(buffer: str, mode: Mode, scenario: str) -> None:
    with EPGroup() as group:
        env = buffer_suite.BufferEnv(group=group, backend=buffer, mode=mode, hosts=hosts_of(group))
        buffer_suite.run_scenario(scenario, env)


@pytest.mark.host_ranks(4, 8)
@pytest.mark.parametrize(
    ("backend", "scenario"), [(name, each) for name in LAYERS for each in LAYERS[name]]
)
def test_layer_over_hosts_equals_the_oracle(backend: str, scenario: str) -> None:
    with EPGroup() as group:
        config = EPConfig(mode="normal", backend=backend)
        layer_suite.run_scenario(scenario, layer_suite.pipeline_env(group, config))
