from dataclasses import replace

import pytest
import torch

from epcomm import EPConfig, EPGroup, ExpertWeights, MoESpec, plan
from epcomm.fuseep.ascend import MegaMoE
from epcomm.fuseep.path import FuseEPPath
from epcomm.platforms.machine import this_machine
from epcomm.registry import fused_class
from epcomm.testing.oracle import relative_error
from epcomm.weights.quantized import Int8ChannelWeights
from fakes.ascend import limits
from fakes.deep_ep import install
from tests.cases import fuseep_layers
from tests.cases.fuseep_layers import batch, make_layer

SPEC = MoESpec(hidden_size=1024, num_experts=4, top_k=2)
CONFIG = EPConfig(mode="fuseep", max_tokens_per_rank=512)


def weights() -> Int8ChannelWeights:
    gate_up = torch.empty(4, 2048, 1024, dtype=torch.bfloat16, device="meta")
    down = torch.empty(4, 1024, 1024, dtype=torch.bfloat16, device="meta")
    plain = ExpertWeights(gate_up_proj=gate_up, down_proj=down)
    return Int8ChannelWeights.from_unquantized(plain)


def test_plan_prefers_it_where_it_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HCCL_BUFFSIZE", "2000")
    older = replace(CONFIG, backend="dispatch_ffn_combine")
    with limits.soc("A3"), install("ascend_flags"):
        chosen, mode_2 = (
            plan(config, SPEC, world_size=2, weights=weights()) for config in (CONFIG, older)
        )
    assert chosen.prefill.backend == "mega_moe"
    assert "deprecated" not in chosen.explain()
    assert (
        "dispatch_ffn_combine is deprecated: CANN does not maintain it from 9.1 on; mega_moe "
        "replaces it" in mode_2.explain().splitlines()
    )


def test_releases_without_it_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HCCL_BUFFSIZE", "2000")
    with limits.soc("A3"), install("ascend"):
        chosen = plan(CONFIG, SPEC, world_size=2, weights=weights())
        assert chosen.prefill.backend == "fused_deep_moe"
        assert "mega_moe: the installed deep_ep has no MEGA_MOE" in chosen.explain()
        found = this_machine().find_deep_ep()
    real = replace(
        this_machine(),
        find_deep_ep=lambda: replace(found, is_stand_in=False, has_mega_moe=True),
        has_module=lambda name: name != "cann_ops_transformer",
    )
    assert "cann_ops_transformer is not installed" in MegaMoE.probe(real).reasons[-1]


# The reference quantises rows and activations in the same way and sums in the same order. exp() and
# the order of scales differ, so some codes differ by one, 1/127 of the largest activation.
TOLERANCE = 0.01


@pytest.mark.ranks(2)
@pytest.mark.usefixtures("small_a3")
@pytest.mark.parametrize("call_tokens", [None, 3])
def test_layer_equals_a_reference(call_tokens: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some batches take two calls of 3 tokens, and rank 0 has no tokens in the second."""
    if call_tokens is not None:
        few = replace(MegaMoE.limits, max_tokens=call_tokens)
        monkeypatch.setattr(fused_class("MegaMoE"), "limits", few)
    with install("ascend_flags"), EPGroup() as group, torch.no_grad():
        x, topk = batch(group.rank, 5 if group.rank else 2)
        layers = [make_layer(group, name) for name in ("mega_moe", "fuseep_reference")]
        actual, expected = (
            layer.path.run(x, topk, layer.weights)
            for layer in layers
            if isinstance(layer.path, FuseEPPath)
        )
        layers[0].check()
        assert relative_error(actual.y, expected.y) <= TOLERANCE
        own = sum(expected.num_tokens_per_expert.tolist())
        # Dummy tokens of calls without tokens are counted too.
        extra = 0 if call_tokens is None else 2 * fuseep_layers.K
        assert own <= sum(actual.num_tokens_per_expert.tolist()) <= own + extra
