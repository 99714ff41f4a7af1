"""Layers on a mesh of hosts take the buffer made of two, and equal the oracle."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch

from epcomm import (
    DeepEPNormalDispatcher,
    EPConfig,
    EPError,
    EPGroup,
    MoESpec,
    TopKOutput,
    WireDtype,
    plan,
)
from epcomm.testing import layer_suite
from tests.cases.meshes import mesh_of

CONFIGS = {
    "normal": EPConfig(mode="normal"),
    "budget": EPConfig(mode="normal", max_tokens_per_rank=32, max_recv_slots=256),
    "low_latency": EPConfig(mode="low_latency", max_tokens_per_rank=32),
}
SCENARIOS = [
    (scenario, config)
    for config in CONFIGS
    for scenario in ("uneven", "holes", "interleaved")
    + (("checkpointing", "rank_without_gradients", "frozen_experts") * (config != "low_latency"))
]
SPEC = MoESpec(hidden_size=16, num_experts=8, top_k=2, dtype=torch.float32)


@contextmanager
def two_hosts() -> Iterator[EPGroup]:
    """Say that ranks 0 and 1 are on one host, and 2 and 3 on another."""
    with EPGroup(mesh_of((2, 2), ("host", "place"))) as group:
        yield group


@pytest.mark.ranks(4)
@pytest.mark.parametrize(("scenario", "config"), SCENARIOS)
def test_layer_on_two_hosts_equals_the_oracle(scenario: str, config: str) -> None:
    with two_hosts() as group:
        chosen = plan(CONFIGS[config], SPEC, group=group)
        assert chosen.prefill.backend == "hierarchical", chosen.explain()
        # Exact sizes are read between hosts and inside.
        num_syncs = 2 if config == "normal" else 0
        assert f"host syncs a dispatch: {num_syncs}" in chosen.explain()
        layer_suite.run_scenario(scenario, layer_suite.pipeline_env(group, CONFIGS[config]))


@pytest.mark.ranks(4)
@pytest.mark.parametrize("config", CONFIGS)
def test_tokens_are_quantized_once_for_both_ways(config: str) -> None:
    with two_hosts() as group:
        chosen = replace(CONFIGS[config], dispatch_dtype=WireDtype("fp8_e4m3"))
        layer_suite.run_scenario("holes", layer_suite.pipeline_env(group, chosen))


@pytest.mark.ranks(4)
@pytest.mark.parametrize("faulty", [1, 2])
def test_a_bad_call_is_named_by_its_rank_on_all_and_the_group_goes_on(faulty: int) -> None:
    with two_hosts() as group:
        dispatcher = DeepEPNormalDispatcher(group, SPEC, CONFIGS["normal"])
        ids = torch.tensor([[0, 7], [3, 4]])
        topk = TopKOutput(topk_ids=ids, topk_weights=torch.ones(2, 2))
        wrong = replace(topk, topk_ids=ids + 90) if group.rank == faulty else topk
        x = torch.randn(2, 16)
        with torch.no_grad():
            expected = "holds 97" if group.rank == faulty else f"out of range on rank {faulty} "
            with pytest.raises(EPError, match=expected):
                dispatcher.dispatch(x, wrong)
            out = dispatcher.dispatch(x, topk)
            # Some rank cannot combine: the others hear of it, on its host and on the other.
            rows = torch.zeros(out.num_slots + (group.rank == faulty), 16)
            expected = "expected" if group.rank == faulty else f"on rank {faulty} "
            with pytest.raises(EPError, match=expected):
                dispatcher.combine(out.combine_input(rows))
            out = dispatcher.dispatch(x, topk)
            y = dispatcher.combine(out.combine_input(torch.ones(out.num_slots, 16)))
        assert y.eq(2).all()
        group.calls.agree({}, what="the end")
