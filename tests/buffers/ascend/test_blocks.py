"""Blocks of two models through all Ascend buffers: the same outputs, and those of the model."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from epcomm import (
    EPGroup,
    ExpertParallelExperts,
    ExpertParallelMoE,
    ExpertWeights,
    Int8ChannelWeights,
    TopKOutput,
)
from tests.buffers.ascend.test_ascend import CASES, hidden_size_of, machine
from tests.cases.blocks import BLOCKS
from tests.cases.quantized_model import Bounded, assert_within, expert_model

__all__ = ["machine"]

INNER = 64
MODELS = ("deepseek_v3", "afmoe")
# Half a unit in the last place of bfloat16, relative.
BF16_ROUNDING = 2.0**-8


def make_block(name: str, hidden_size: int) -> nn.Module:
    """Return a block that keeps its activations of order one at this size."""
    block = BLOCKS[name](
        hidden_size=hidden_size, moe_intermediate_size=INNER, intermediate_size=INNER
    )
    with torch.no_grad():
        for parameter in block.parameters():
            if parameter.dim() > 1:
                parameter.mul_(2 / parameter.shape[-1] ** 0.5)
    return block.to(torch.bfloat16)


def tokens_of(rank: int, hidden_size: int) -> Tensor:
    generator = torch.Generator().manual_seed(31 + rank)
    # One of the ranks has no tokens.
    return torch.randn(5 * rank, hidden_size, generator=generator).to(torch.bfloat16)


def through_all_buffers(
    name: str, group: EPGroup, hidden_size: int, *, is_int8: bool
) -> dict[str, Tensor]:
    """Compute y by buffer; with is_int8 the experts are W8A8, and so are the rows."""
    found = {}
    for backend, case in CASES.items():
        config = replace(case.config, backend="ascend", runner="ascend")
        block = make_block(name, hidden_size)
        moe = ExpertParallelMoE.from_transformers(block, group, config)
        if is_int8:
            moe.experts = ExpertParallelExperts(
                int8_weights(block), group, config, top_k=moe.routing.top_k
            )
        wire = "int8/0" if is_int8 else "bf16"
        assert f"({backend}), " in moe.explain()
        assert f"wire: dispatch {wire}, combine bf16" in moe.explain()
        found[backend] = moe(tokens_of(group.rank, hidden_size))
        moe.check()
    return found


def int8_weights(block: nn.Module) -> Int8ChannelWeights:
    experts = block.get_submodule("experts")
    return Int8ChannelWeights.from_unquantized(
        ExpertWeights(
            gate_up_proj=experts.get_parameter("gate_up_proj"),
            down_proj=experts.get_parameter("down_proj"),
        )
    )


def int8_model(x: Tensor, topk: TopKOutput, weights: Int8ChannelWeights) -> Bounded:
    """Return routed experts in float64, with the error that codes and bfloat16 may cause."""
    values = torch.zeros(x.shape, dtype=torch.float64)
    error = torch.zeros_like(values)
    for expert in range(weights.num_experts):
        own = weights.with_tensors({n: t[expert, None] for n, t in weights.tensors().items()})
        result = expert_model(x.double(), own, 0, "int8")
        is_chosen = topk.topk_ids == expert
        factors = (topk.topk_weights.double() * is_chosen).sum(1, keepdim=True)
        values += factors * result.values
        # The scale of a result, the result, the sum of a rank and y are in bfloat16.
        error += factors * (result.error * 1.02 + 4.04 * BF16_ROUNDING * result.values.abs())
    return Bounded(values=values, error=error)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", MODELS)
def test_w8a8_blocks_are_within_what_their_scales_allow(name: str) -> None:
    with EPGroup() as group, torch.no_grad(), hidden_size_of(group) as hidden_size:
        block, x = make_block(name, hidden_size), tokens_of(group.rank, hidden_size)
        found = through_all_buffers(name, group, hidden_size, is_int8=True)
        routed = ExpertParallelMoE.from_transformers(block, group).route(x)[1]
        expected = int8_model(x, routed, int8_weights(block))
        shared = block.get_submodule("shared_experts")(x).double()
        for y in found.values():
            whole = Bounded(values=expected.values + shared, error=expected.error)
            assert_within(y, whole, extra=BF16_ROUNDING)
        # The permitted difference is small compared with the results; otherwise the test would not
        # detect errors.
        slack = float(expected.error.sum()) / max(float(expected.values.abs().sum()), 1e-9)
        assert slack <= 0.2


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", MODELS[1:])
def test_unquantised_blocks_give_the_same_through_all_buffers(name: str) -> None:
    with EPGroup() as group, torch.no_grad(), hidden_size_of(group) as hidden_size:
        found = through_all_buffers(name, group, hidden_size, is_int8=False)
        normal = found.pop("AscendNormalBuffer").double()
        # Rows of the other two buffers are the same, and so are the experts'. Sums of a rank, the
        # sum over ranks and the sum with shared experts are stored in bfloat16.
        largest = normal.abs().amax() if normal.numel() else 1.0
        for y in found.values():
            assert ((y.double() - normal).abs() <= 6 * BF16_ROUNDING * largest).all()
