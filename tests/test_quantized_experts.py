"""Eight-bit experts over ranks, in every mode, equal to a float64 model of them."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from epcomm import EPConfig, EPGroup, ExpertParallelExperts, TopKOutput
from epcomm.testing.buffer_suite import BATCH_SPECS
from epcomm.testing.data import make_batch, make_weights
from tests.quantized_model import KINDS, assert_within, model

INNER = 144
CONFIGS = {
    "normal": EPConfig(mode="normal"),
    "budget": EPConfig(mode="normal", max_tokens_per_rank=16, max_recv_slots=128),
    "standard": EPConfig(mode="standard"),
    "low_latency": EPConfig(mode="low_latency", max_tokens_per_rank=16),
}
SPECS = {
    name: replace(BATCH_SPECS[name], hidden_size=200)
    for name in ("uneven", "empty_rank", "holes", "one_expert")
}


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("batch", SPECS)
@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("kind", KINDS)
def test_layer_equals_the_model(kind: str, config: str, batch: str) -> None:
    spec = SPECS[batch]
    with EPGroup() as group, torch.no_grad():
        plain = make_weights(spec, group.world_size, intermediate_size=INNER, device=group.device)
        weights = KINDS[kind].from_unquantized(plain)
        layer = ExpertParallelExperts(
            weights, group, CONFIGS[config], top_k=spec.num_topk(group.world_size)
        )
        assert f"wire: dispatch {weights.wire_format}, combine fp32" in layer.explain()
        on_cpu = make_batch(spec, group.rank, group.world_size)
        mine = on_cpu.to(group.device)
        topk = TopKOutput(topk_ids=mine.topk_ids, topk_weights=mine.topk_weights)
        y = layer(mine.x, topk)
        layer.check()
        assert_within(y, model(on_cpu, weights, kind))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("kind", KINDS)
def test_each_rank_holds_its_share_of_codes_and_scales(kind: str) -> None:
    spec = SPECS["uneven"]
    with EPGroup() as group:
        plain = make_weights(spec, 2, intermediate_size=INNER, device=group.device)
        weights = KINDS[kind].from_unquantized(plain)
        layer = ExpertParallelExperts(weights, group, top_k=3)
        for name, tensor in weights.shard(group.rank, 2).tensors().items():
            parameter = layer.get_parameter(name)
            assert not parameter.requires_grad
            assert torch.equal(parameter.view(torch.uint8), tensor.view(torch.uint8)), name
