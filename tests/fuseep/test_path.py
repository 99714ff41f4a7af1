"""Mode fuseep over ranks: the reference and both operators, by stand-ins, in the layer suite."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from epcomm import EPConfig, EPGroup, ExpertParallelExperts, ExpertWeights, Int8ChannelWeights
from epcomm.quantization import INT8_PER_TOKEN
from epcomm.testing import layer_suite
from epcomm.testing.ascend import limits, registry
from epcomm.testing.deep_ep import install

OPERATORS = ("fuseep_reference", "fused_deep_moe", "dispatch_ffn_combine")
HIDDEN, INNER = 512, 512
# Experts are W8A8, so plain SwiGLU; there is no step between dispatch and combine.
SCENARIOS = [
    name
    for name in layer_suite.SCENARIOS
    if name not in ("clamped_swiglu", "relu2", "relu2_bias", "interleaved")
]


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("HCCL_BUFFSIZE", "2000")
    registry.register()
    with limits.soc("A3"), install("ascend"):
        yield


def w8a8(weights: ExpertWeights) -> Int8ChannelWeights:
    return replace(Int8ChannelWeights.from_unquantized(weights), hidden_dtype=torch.bfloat16)


def config_of(operator: str, max_tokens: int = 16) -> EPConfig:
    return EPConfig(mode="fuseep", backend=operator, max_tokens_per_rank=max_tokens)


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_layer_equals_the_oracle(scenario: str, operator: str) -> None:
    with EPGroup() as group:
        env = layer_suite.LayerEnv(
            group=group,
            make_layer=lambda weights, top_k: ExpertParallelExperts(
                w8a8(weights), group, config_of(operator), top_k=top_k
            ),
            has_gradients=False,
            wire=INT8_PER_TOKEN,
            hidden_size=HIDDEN,
            dtype=torch.bfloat16,
            is_w8a8=True,
            intermediate_size=INNER,
        )
        layer_suite.run_scenario(scenario, env)
