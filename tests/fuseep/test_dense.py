"""Compare every W8A8 path with float64 experts without dispatch, and with the other paths."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from epcomm import (
    EPConfig,
    EPGroup,
    ExpertParallelExperts,
    Int8ChannelWeights,
    TopKOutput,
    WireDtype,
)
from epcomm.fuseep.ascend import FusedDeepMoE
from epcomm.fuseep.weights import FusedDeepMoEWeights
from epcomm.platforms.ascend.formats import to_nz

W, E, H, I, K = 4, 16, 256, 192, 4  # noqa: E741 (the letter of the intermediate size)
NUM_TOKENS = (13, 0, 32, 7)
PATHS = {
    "unfused": EPConfig(
        mode="low_latency",
        backend="ascend",
        runner="ascend",
        dispatch_dtype=WireDtype.INT8,
        max_tokens_per_rank=32,
    ),
    **{
        name: EPConfig(mode="fuseep", backend=name, max_tokens_per_rank=32)
        for name in ("fused_deep_moe", "dispatch_ffn_combine", "fuseep_reference")
    },
}
# Rounding rows to one of 127 codes twice leaves 1.7 % of y in a simulation of these sizes.
TO_DENSE, TO_ONE_ANOTHER = 0.02, 0.01


def experts() -> Int8ChannelWeights:
    """Make all E experts, with scales that differ by a factor of 3, so that a wrong one shows."""
    made = torch.Generator().manual_seed(1)

    def codes(*shape: int) -> Tensor:
        return torch.randint(-127, 128, shape, generator=made, dtype=torch.int8)

    def scales(*shape: int, inner: int) -> Tensor:
        # Products of unit rows get a size of about 1.
        return (torch.rand(shape, generator=made) + 0.5) / 74 / math.sqrt(inner)

    return Int8ChannelWeights(
        gate_up_proj=codes(E, 2 * I, H),
        gate_up_scale=scales(E, 2 * I, inner=H),
        down_proj=codes(E, H, I),
        down_scale=scales(E, H, inner=I),
    )


def batch(rank: int) -> tuple[Tensor, TopKOutput]:
    made = torch.Generator().manual_seed(100 + rank)
    num_tokens = NUM_TOKENS[rank]
    ids = torch.rand(num_tokens, E, generator=made).argsort(dim=1)[:, :K]
    weights = torch.rand(num_tokens, K, generator=made).softmax(dim=-1)
    x = torch.randn(num_tokens, H, generator=made).bfloat16()
    return x, TopKOutput(topk_ids=ids.contiguous(), topk_weights=weights)


def dense(x: Tensor, topk: TopKOutput, weights: Int8ChannelWeights) -> Tensor:
    """Compute y [T, H] in float64; only the weights are rounded."""
    w13 = weights.gate_up_proj.double() * weights.gate_up_scale.double()[:, :, None]
    w2 = weights.down_proj.double() * weights.down_scale.double()[:, :, None]
    y = torch.zeros(x.shape, dtype=torch.float64)
    for token, (ids, factors) in enumerate(zip(topk.topk_ids, topk.topk_weights, strict=True)):
        for expert, factor in zip(ids.tolist(), factors.double().tolist(), strict=True):
            sums = w13[expert] @ x[token].double()
            gate, up = sums[:I], sums[I:]
            y[token] += factor * (w2[expert] @ (gate / (1 + torch.exp(-gate)) * up))
    return y


def distance(found: Tensor, expected: Tensor) -> float:
    """Return the relative L2 distance over the tokens of all ranks; collective."""
    sums = torch.stack([(found.double() - expected.double()).square().sum()])
    sums = torch.cat([sums, expected.double().square().sum()[None]])
    dist.all_reduce(sums)
    return float((sums[0] / sums[1]).sqrt())


@pytest.mark.ranks(4)
@pytest.mark.usefixtures("small_a3")
def test_all_paths_are_near_the_dense_experts_and_one_another() -> None:
    weights = experts()
    with EPGroup() as group:
        x, topk = batch(group.rank)
        found = {}
        for name, config in PATHS.items():
            layer = ExpertParallelExperts(weights, group, config, top_k=K)
            assert layer.plan.prefill.backend == ("ascend" if name == "unfused" else name)
            with torch.no_grad():
                found[name] = layer(x, topk, decode=True)
            layer.check()
            assert found[name].dtype is torch.bfloat16
        expected = dense(x, topk, weights)
        to_dense = {name: distance(y, expected) for name, y in found.items()}
        # The error is above 0, which shows that rows were rounded.
        assert all(0.001 < each <= TO_DENSE for each in to_dense.values()), to_dense
        for name, y in found.items():
            for other in found.values():
                assert distance(y, other) <= TO_ONE_ANOTHER, name


@pytest.mark.ranks(4)
@pytest.mark.usefixtures("small_a3")
def test_gate_and_up_that_are_not_interleaved_compute_nonsense(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Shapes and dtypes are equal, so only the values differ."""

    def forget(weights: Int8ChannelWeights) -> FusedDeepMoEWeights:
        return replace(
            FusedDeepMoEWeights.pack(weights),
            gate_up_proj=to_nz(weights.gate_up_proj.transpose(1, 2)),
            gate_up_scale=weights.gate_up_scale.clone(),
        )

    monkeypatch.setattr(FusedDeepMoE, "pack", staticmethod(forget))
    weights = experts()
    with EPGroup() as group:
        x, topk = batch(group.rank)
        layer = ExpertParallelExperts(weights, group, PATHS["fused_deep_moe"], top_k=K)
        assert distance(layer(x, topk), dense(x, topk, weights)) > 0.5
