"""ExpertParallelExperts passes the whole layer suite in every mode, on 1 to 8 ranks."""

import pytest
import torch.distributed as dist

from epcomm import EPConfig, EPGroup
from epcomm.testing import layer_suite

CONFIGS = {
    "normal": EPConfig(mode="normal"),
    "normal_reference": EPConfig(mode="normal", runner="reference"),
    "normal_aligned": EPConfig(mode="normal", slot_alignment=8),
    "standard": EPConfig(mode="standard"),
}


@pytest.mark.ranks(1, 2, 3, 4, 8)
@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("scenario", layer_suite.SCENARIOS)
def test_layer_equals_the_oracle(scenario: str, config: str) -> None:
    with EPGroup(dist.group.WORLD) as group:
        env = layer_suite.pipeline_env(group, CONFIGS[config])
        layer_suite.run_scenario(scenario, env)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("scenario", ["uneven", "empty_rank", "holes", "checkpointing"])
def test_ep_group_smaller_than_the_world(scenario: str) -> None:
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    with EPGroup(halves[dist.get_rank() // 2]) as group:
        assert group.world_size == 2
        env = layer_suite.pipeline_env(group, CONFIGS["normal"])
        layer_suite.run_scenario(scenario, env)
