"""ExpertParallelExperts passes the layer suite in every mode on 2 ranks.

A layer adds parts to buffer, autograd and runner that hardly depend on the number of ranks.
tests/buffers/test_buffers.py varies that number; here a batch with gradients runs on other numbers
and over MPI.
"""

from dataclasses import replace
from typing import TYPE_CHECKING

import pytest
import torch.distributed as dist

from epcomm import EPConfig, EPGroup, WireDtype
from epcomm.runners.grouped_mm import GroupedMMRunner
from epcomm.testing import layer_suite

if TYPE_CHECKING:
    from mpi4py import MPI

# No batch of the suite exceeds 32 tokens and 256 slots on 8 ranks.
CONFIGS = {
    "normal": EPConfig(mode="normal"),
    "normal_collective": EPConfig(mode="normal", backend="collective"),
    "normal_budget": EPConfig(mode="normal", max_tokens_per_rank=32, max_recv_slots=256),
    "standard": EPConfig(mode="standard"),
    "replicated": EPConfig(mode="standard", replicated=True),
    "low_latency": EPConfig(mode="low_latency", max_tokens_per_rank=32),
}
VARIANTS = {
    "normal_reference": EPConfig(mode="normal", runner="reference"),
    "normal_aligned": EPConfig(mode="normal", runner="grouped_mm"),
}
# With replicated tokens all ranks pass the same inputs, so they need the same gradients.
GRADIENT_CASES = [
    (scenario, name)
    for scenario in layer_suite.GRADIENT_SCENARIOS
    for name, config in CONFIGS.items()
    if config.mode != "low_latency" and (name, scenario) != ("replicated", "rank_without_gradients")
]


# Batches whose gradients depend on the number of ranks.
FEW = ("uneven", "checkpointing")
# Other activations, and shapes of batches that the suite of buffers varies, depend on no buffer.
OF_ANY_BUFFER = (
    *("all_empty", "one_token", "top_1", "many_experts"),
    *("clamped_swiglu", "relu2", "relu2_bias", "inference"),
)


def run(scenario: str, config: str, ep_ranks: "MPI.Comm | dist.ProcessGroup | None" = None) -> None:
    with EPGroup(ep_ranks) as group:
        chosen = {**CONFIGS, **VARIANTS}[config]
        layer_suite.run_scenario(scenario, layer_suite.pipeline_env(group, chosen))


def cases_of(*scenarios: str) -> list[tuple[str, str]]:
    """Return the scenarios, each with the configurations for which it tests something."""
    chosen = [(s, name) for s in scenarios if s in layer_suite.SCENARIOS for name in CONFIGS]
    return chosen + [case for case in GRADIENT_CASES if case[0] in scenarios]


ALL_CASES = [
    case
    for case in cases_of(*layer_suite.SCENARIOS, *layer_suite.GRADIENT_SCENARIOS)
    if case[0] not in OF_ANY_BUFFER or case[1] in ("normal", "low_latency")
]


@pytest.mark.ranks(2)
@pytest.mark.parametrize(("scenario", "config"), ALL_CASES)
def test_layer_equals_the_oracle(scenario: str, config: str) -> None:
    run(scenario, config)


@pytest.mark.ranks(1, 3)
@pytest.mark.parametrize(("scenario", "config"), cases_of(*FEW))
def test_layer_of_one_or_three_ranks_equals_the_oracle(scenario: str, config: str) -> None:
    run(scenario, config)


@pytest.mark.slow
@pytest.mark.ranks(8)
@pytest.mark.parametrize("config", CONFIGS)
def test_layer_of_eight_ranks_equals_the_oracle(config: str) -> None:
    run("uneven", config)


@pytest.mark.mpi_ranks(2)
@pytest.mark.parametrize(("scenario", "config"), cases_of(*FEW))
def test_layer_over_mpi_equals_the_oracle(scenario: str, config: str, ep_ranks: "MPI.Comm") -> None:
    run(scenario, config, ep_ranks)


@pytest.mark.ranks(2)
@pytest.mark.parametrize(("scenario", "config"), cases_of("holes", "checkpointing"))
def test_layer_of_quantized_rows_equals_oracle(scenario: str, config: str, group: EPGroup) -> None:
    wire = WireDtype.INT8 if scenario == "holes" else WireDtype.FP8_E4M3
    chosen = replace(CONFIGS[config], dispatch_dtype=wire)
    layer_suite.run_scenario(scenario, layer_suite.pipeline_env(group, chosen))


# Batches for runners: no slots, slots of one expert, masked entries, another kind of experts.
@pytest.mark.ranks(2)
@pytest.mark.parametrize("config", VARIANTS)
@pytest.mark.parametrize(
    "scenario", ["nowhere", "holes", "clamped_swiglu", "relu2_bias", "frozen_experts"]
)
def test_variant_equals_oracle(scenario: str, config: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if config == "normal_aligned":
        monkeypatch.setattr(GroupedMMRunner, "expert_alignment", 8)
    run(scenario, config)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("scenario", ["empty_rank", "checkpointing"])
def test_ep_group_smaller_than_the_world(scenario: str) -> None:
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    half = halves[dist.get_rank() // 2]
    assert isinstance(half, dist.ProcessGroup)
    assert half.size() == 2
    run(scenario, "normal", half)
