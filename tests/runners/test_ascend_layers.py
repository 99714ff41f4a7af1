"""Whole W8A8 layers on Ascend's operators, their experts reloaded between two calls."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from epcomm import (
    EPConfig,
    EPGroup,
    ExpertParallelExperts,
    Int8ChannelWeights,
    TopKOutput,
    WireDtype,
)
from epcomm.testing.ascend import limits, registry
from epcomm.testing.buffer_suite import BATCH_SPECS
from epcomm.testing.data import make_batch, make_weights
from epcomm.testing.oracle import relative_error
from tests.quantized_model import model

# The runners, and what their configuration must say. Two operators of Ascend's round as div, which
# its dispatch does not, so rows travel unquantised there.
RUNNERS = {
    "ascend": EPConfig(mode="normal"),
    "ascend_nz": EPConfig(mode="normal"),
    "ascend_swiglu_quant": EPConfig(
        mode="normal", dispatch_dtype=WireDtype.BF16, int8_profile="div"
    ),
}
# Of the largest result: single activations fall to the next of 127 codes, and bfloat16 rounds the
# result of each slot and their sum, 2**-9 each.
TOLERANCE = 0.012


def check_w8a8_layer(group: EPGroup, config: EPConfig, hidden_size: int) -> None:
    """y equals a float64 model, of the experts of construction and of those loaded later."""
    spec = replace(BATCH_SPECS["uneven"], hidden_size=hidden_size, dtype=torch.bfloat16)
    world_size = group.world_size
    old, new = (
        Int8ChannelWeights.from_unquantized(
            make_weights(spec, world_size, intermediate_size=128, number=number)
        )
        for number in (0, 1)
    )
    on_device = old.with_tensors({k: each.to(group.device) for k, each in old.tensors().items()})
    layer = ExpertParallelExperts(on_device, group, config, top_k=spec.num_topk(world_size))
    batch = make_batch(spec, group.rank, world_size)
    x, ids, weights = (
        each.to(group.device) for each in (batch.x, batch.topk_ids, batch.topk_weights)
    )
    topk = TopKOutput(topk_ids=ids, topk_weights=weights)
    with torch.no_grad():
        first, again = layer(x, topk), layer(x, topk)
        layer.load_state_dict(new.shard(group.rank, world_size).tensors())
        second = layer(x, topk)
    layer.check()
    assert torch.equal(first, again)
    for y, experts in ((first, old), (second, new)):
        assert relative_error(y.cpu(), model(batch, experts, "int8").values) <= TOLERANCE


@pytest.mark.ranks(2)
@pytest.mark.parametrize("runner", RUNNERS)
def test_a_layer_equals_a_float64_model_before_and_after_a_reload(runner: str) -> None:
    registry.register()
    with limits.soc("A3"), EPGroup() as group:
        config = replace(RUNNERS[runner], backend="collective", runner=runner)
        check_w8a8_layer(group, config, hidden_size=64)
