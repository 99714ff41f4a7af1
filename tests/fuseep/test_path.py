from dataclasses import replace

import pytest
import torch

from epcomm import (
    EPConfig,
    EPGroup,
    ExpertParallelExperts,
    ExpertWeights,
    Int8ChannelWeights,
    TopKOutput,
)
from epcomm.fuseep.path import FuseEPPath
from epcomm.quantization import INT8_PER_TOKEN
from epcomm.testing import layer_suite
from tests.cases.fuseep_checkpoint import digest
from tests.fakes.ascend import fuseep

pytestmark = pytest.mark.ranks(2)

OPERATORS = ("fuseep_reference", "fused_deep_moe", "dispatch_ffn_combine")
# The least H and I of the operators, and smaller ones for speed; 2I = 384 shows a missing
# interleave.
LEAST_SIZES = {"fused_deep_moe": (512, 512), "dispatch_ffn_combine": (1024, 1024)}
SMALL_SIZES = (128, 192)
# Experts are W8A8, so plain SwiGLU; there is no step between dispatch and combine.
SCENARIOS = [
    name
    for name in layer_suite.SCENARIOS
    if name not in ("clamped_swiglu", "relu2", "relu2_bias", "interleaved")
]


def w8a8(weights: ExpertWeights) -> Int8ChannelWeights:
    return replace(Int8ChannelWeights.from_unquantized(weights), hidden_dtype=torch.bfloat16)


def config_of(operator: str) -> EPConfig:
    return EPConfig(mode="fuseep", backend=operator, max_tokens_per_rank=16)


def check_layer(scenario: str, operator: str, sizes: tuple[int, int]) -> None:
    hidden_size, intermediate_size = sizes
    with EPGroup() as group:
        env = layer_suite.LayerEnv(
            group=group,
            make_layer=lambda weights, top_k: ExpertParallelExperts(
                w8a8(weights), group, config_of(operator), top_k=top_k
            ),
            has_gradients=False,
            wire=INT8_PER_TOKEN,
            hidden_size=hidden_size,
            dtype=torch.bfloat16,
            is_w8a8=True,
            intermediate_size=intermediate_size,
        )
        layer_suite.run_scenario(scenario, env)


@pytest.mark.usefixtures("small_a3")
@pytest.mark.parametrize("operator", OPERATORS)
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_layer_equals_the_oracle(scenario: str, operator: str) -> None:
    check_layer(scenario, operator, SMALL_SIZES)


@pytest.mark.slow
@pytest.mark.ranks(4)
@pytest.mark.usefixtures("small_a3")
@pytest.mark.parametrize("operator", OPERATORS)
def test_layer_equals_the_oracle_on_more_ranks(operator: str) -> None:
    for scenario in SCENARIOS:
        check_layer(scenario, operator, SMALL_SIZES)


@pytest.mark.usefixtures("a3")
@pytest.mark.parametrize("operator", LEAST_SIZES)
def test_layer_within_the_limits_of_the_chip(operator: str) -> None:
    check_layer("holes", operator, LEAST_SIZES[operator])


MODES = {"mode1": "fused_deep_moe", "mode2": "dispatch_ffn_combine"}


@pytest.mark.usefixtures("small_a3")
def test_layers_equal_the_golden_values(group: EPGroup) -> None:
    """Check packing, routing and counts of our layers, with M = 5 of which rank 1 uses 3."""
    w13, w2, s13, s2 = fuseep.weights()
    weights = Int8ChannelWeights(gate_up_proj=w13, gate_up_scale=s13, down_proj=w2, down_scale=s2)
    recorded = fuseep.RECORDED
    listed = {key.split()[0]: value for key, value in recorded["counts"].items()}
    rank = group.rank
    x, (ids, topk_weights) = fuseep.hidden_states(rank), fuseep.topk(rank)
    topk = TopKOutput(topk_ids=ids, topk_weights=topk_weights)
    for mode, backend in MODES.items():
        config = EPConfig(mode="fuseep", backend=backend, max_tokens_per_rank=fuseep.M)
        layer = ExpertParallelExperts(weights, group, config, top_k=fuseep.K)
        assert isinstance(layer.path, FuseEPPath)
        out = layer.path.run(x, topk, layer.weights)
        assert digest(out.y) == recorded[mode]["y_sha256"][rank]
        counts = torch.tensor(listed[mode][rank]).view(fuseep.L, -1).sum(1)
        assert out.num_tokens_per_expert.dtype == torch.int32
        assert out.num_tokens_per_expert.tolist() == counts.tolist()
        assert out.is_reduced is True
        # The call of the layer is the same in both phases.
        assert torch.equal(layer(x, topk, decode=True), out.y)
        layer.check()
