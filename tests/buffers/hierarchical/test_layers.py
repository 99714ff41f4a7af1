from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch

from epcomm import BackendUnavailable, EPConfig, EPGroup, MoESpec, WireDtype, plan
from epcomm.testing import layer_suite
from tests.cases.meshes import mesh_of

pytestmark = pytest.mark.ranks(4)

CONFIG = EPConfig(mode="normal")
SPEC = MoESpec(hidden_size=16, num_experts=8, top_k=2, dtype=torch.float32)


@contextmanager
def two_hosts() -> Iterator[EPGroup]:
    """Declare that ranks 0 and 1 are on one host, and 2 and 3 on another."""
    with EPGroup(mesh_of((2, 2), ("host", "place"))) as group:
        yield group


@pytest.mark.parametrize("scenario", ["interleaved", "checkpointing", "rank_without_gradients"])
def test_layer_on_two_hosts_equals_the_oracle(scenario: str) -> None:
    with two_hosts() as group:
        chosen = plan(CONFIG, SPEC, group=group)
        assert chosen.prefill.backend == "hierarchical", chosen.explain()
        # Counts are read between hosts and inside hosts.
        assert "host syncs a dispatch: 2" in chosen.explain()
        layer_suite.run_scenario(scenario, layer_suite.pipeline_env(group, CONFIG))


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


def test_tokens_are_quantized_once_for_both_ways() -> None:
    with two_hosts() as group:
        chosen = replace(CONFIG, dispatch_dtype=WireDtype("fp8_e4m3"))
        layer_suite.run_scenario("holes", layer_suite.pipeline_env(group, chosen))
