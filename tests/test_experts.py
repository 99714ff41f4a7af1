"""ExpertParallelExperts passes the layer suite in every mode, on 1 to 8 ranks and under MPI."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch.distributed as dist

from epcomm import EPConfig, EPGroup, WireDtype
from epcomm.runners.grouped_mm import GroupedMMRunner
from epcomm.testing import layer_suite

if TYPE_CHECKING:
    from mpi4py import MPI

# 32 tokens and 256 slots are more than any batch of the suite has on 8 ranks.
CONFIGS = {
    "normal": EPConfig(mode="normal"),
    "normal_collective": EPConfig(mode="normal", backend="collective"),
    "normal_budget": EPConfig(mode="normal", max_tokens_per_rank=32, max_recv_slots=256),
    "standard": EPConfig(mode="standard"),
    "replicated": EPConfig(mode="standard", replicated=True),
    "low_latency": EPConfig(mode="low_latency", max_tokens_per_rank=32),
}
# What changes nothing between ranks is run on one size of group.
VARIANTS = {
    "normal_reference": EPConfig(mode="normal", runner="reference"),
    "normal_aligned": EPConfig(mode="normal", runner="grouped_mm"),
}
# With replicated tokens all ranks pass the same inputs, so they need gradients alike.
GRADIENT_CASES = [
    (scenario, name)
    for scenario in layer_suite.GRADIENT_SCENARIOS
    for name, config in CONFIGS.items()
    if config.mode != "low_latency" and (name, scenario) != ("replicated", "rank_without_gradients")
]


def run(scenario: str, config: str, group: EPGroup) -> None:
    chosen = {**CONFIGS, **VARIANTS}[config]
    layer_suite.run_scenario(scenario, layer_suite.pipeline_env(group, chosen))


@pytest.mark.ranks(1, 2, 3, 4, 8)
@pytest.mark.mpi_ranks(2, 4)
@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("scenario", layer_suite.SCENARIOS)
def test_layer_equals_the_oracle(scenario: str, config: str, ep_ranks: MPI.Comm | None) -> None:
    with EPGroup(ep_ranks) as group:
        run(scenario, config, group)


@pytest.mark.ranks(1, 2, 3, 4, 8)
@pytest.mark.mpi_ranks(2, 4)
@pytest.mark.parametrize(("scenario", "config"), GRADIENT_CASES)
def test_layer_trains_like_the_oracle(
    scenario: str, config: str, ep_ranks: MPI.Comm | None
) -> None:
    with EPGroup(ep_ranks) as group:
        run(scenario, config, group)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("wire", ["fp8_e4m3", "int8"])
@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("scenario", layer_suite.SCENARIOS)
def test_layer_with_quantized_dispatch_equals_the_oracle(
    scenario: str, config: str, wire: str
) -> None:
    with EPGroup() as group:
        chosen = replace(CONFIGS[config], dispatch_dtype=WireDtype(wire))
        layer_suite.run_scenario(scenario, layer_suite.pipeline_env(group, chosen))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("wire", ["fp8_e4m3", "int8"])
@pytest.mark.parametrize(("scenario", "config"), GRADIENT_CASES)
def test_layer_with_quantized_dispatch_trains_like_the_oracle(
    scenario: str, config: str, wire: str
) -> None:
    with EPGroup() as group:
        chosen = replace(CONFIGS[config], dispatch_dtype=WireDtype(wire))
        layer_suite.run_scenario(scenario, layer_suite.pipeline_env(group, chosen))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("config", VARIANTS)
@pytest.mark.parametrize("scenario", {**layer_suite.SCENARIOS, **layer_suite.GRADIENT_SCENARIOS})
def test_variant_equals_the_oracle(
    scenario: str, config: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if config == "normal_aligned":
        monkeypatch.setattr(GroupedMMRunner, "expert_alignment", 8)
    with EPGroup() as group:
        run(scenario, config, group)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("scenario", ["uneven", "empty_rank", "holes", "checkpointing"])
def test_ep_group_smaller_than_the_world(scenario: str) -> None:
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    with EPGroup(halves[dist.get_rank() // 2]) as group:
        assert group.world_size == 2
        run(scenario, "normal", group)
