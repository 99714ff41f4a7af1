"""Layers on a mesh of hosts use the hierarchical buffer and equal the oracle."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch

from epcomm import (
    BackendUnavailable,
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

CONFIG = EPConfig(mode="normal")
SPEC = MoESpec(hidden_size=16, num_experts=8, top_k=2, dtype=torch.float32)


@contextmanager
def two_hosts() -> Iterator[EPGroup]:
    """Declare that ranks 0 and 1 are on one host, and 2 and 3 on another."""
    with EPGroup(mesh_of((2, 2), ("host", "place"))) as group:
        yield group


@pytest.mark.ranks(4)
@pytest.mark.parametrize(
    "scenario",
    [
        "uneven",
        "holes",
        "interleaved",
        "checkpointing",
        "rank_without_gradients",
        "frozen_experts",
    ],
)
def test_layer_on_two_hosts_equals_the_oracle(scenario: str) -> None:
    with two_hosts() as group:
        chosen = plan(CONFIG, SPEC, group=group)
        assert chosen.prefill.backend == "hierarchical", chosen.explain()
        # Counts are read between hosts and inside hosts.
        assert "host syncs a dispatch: 2" in chosen.explain()
        layer_suite.run_scenario(scenario, layer_suite.pipeline_env(group, CONFIG))


@pytest.mark.ranks(4)
@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (EPConfig(mode="low_latency", max_tokens_per_rank=32), "has no mode low_latency"),
        (
            EPConfig(mode="normal", max_tokens_per_rank=32, max_recv_slots=256),
            "has exact sizes and no slot budget; leave max_recv_slots None",
        ),
    ],
    ids=["low_latency", "budget"],
)
def test_static_sizes_are_refused_by_name_and_flat_in_auto(config: EPConfig, reason: str) -> None:
    with two_hosts() as group:
        with pytest.raises(BackendUnavailable) as caught:
            plan(replace(config, backend="hierarchical"), SPEC, group=group)
        refusal = f"plan: backend hierarchical cannot serve this layer: {reason}; change the "
        assert str(caught.value).startswith(refusal)
        assert plan(config, SPEC, group=group).prefill.buffer == "StaticCollectiveBuffer"


@pytest.mark.ranks(4)
def test_tokens_are_quantized_once_for_both_ways() -> None:
    with two_hosts() as group:
        chosen = replace(CONFIG, dispatch_dtype=WireDtype("fp8_e4m3"))
        layer_suite.run_scenario("holes", layer_suite.pipeline_env(group, chosen))


@pytest.mark.ranks(4)
@pytest.mark.parametrize("faulty", [1, 2])
def test_a_bad_call_is_named_by_its_rank_on_all_and_the_group_goes_on(faulty: int) -> None:
    with two_hosts() as group:
        dispatcher = DeepEPNormalDispatcher(group, SPEC, CONFIG)
        ids = torch.tensor([[0, 7], [3, 4]])
        topk = TopKOutput(topk_ids=ids, topk_weights=torch.ones(2, 2))
        wrong = replace(topk, topk_ids=ids + 90) if group.rank == faulty else topk
        x = torch.randn(2, 16)
        with torch.no_grad():
            expected = "holds 97" if group.rank == faulty else f"out of range on rank {faulty} "
            with pytest.raises(EPError, match=expected):
                dispatcher.dispatch(x, wrong)
            out = dispatcher.dispatch(x, topk)
            # A rank that cannot combine is reported to the ranks of its host and of the other.
            rows = torch.zeros(out.num_slots + (group.rank == faulty), 16)
            expected = "expected" if group.rank == faulty else f"on rank {faulty} "
            with pytest.raises(EPError, match=expected):
                dispatcher.combine(out.combine_input(rows))
            out = dispatcher.dispatch(x, topk)
            y = dispatcher.combine(out.combine_input(torch.ones(out.num_slots, 16)))
        assert y.eq(2).all()
        group.calls.agree({}, what="the end")
