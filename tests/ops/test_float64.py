"""float64 rows: every sum is float64 too on each backend that carries them; gradcheck passes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from epcomm import (
    BackendUnavailable,
    ConfigError,
    DeepEPNormalDispatcher,
    EPConfig,
    EPGroup,
    ExpertParallelExperts,
    ExpertParallelMoE,
    Mode,
    MoESpec,
    TopKOutput,
    WireDtype,
    plan,
)
from epcomm.registry import backend_class, backend_names, class_names
from epcomm.runners.reference import ReferenceRunner
from epcomm.sharding.shards import piece_of
from epcomm.testing import buffer_suite, layer_suite
from epcomm.testing.data import BatchSpec, make_batch, make_weights, random_ids
from epcomm.types import WeightsAppliedBy
from epcomm.weights.quantized import Int8ChannelWeights
from tests.buffers.test_buffers import CASES
from tests.cases.blocks import HIDDEN, qwen3_moe

FP64 = torch.float64
# Static sizes for 4 tokens a rank.
STATIC = EPConfig(mode="normal", max_tokens_per_rank=4, max_recv_slots=32)
CONFIGS = {
    "shared_memory": EPConfig(mode="normal", backend="shared_memory"),
    "collective": EPConfig(mode="normal", backend="collective"),
    "collective_static": STATIC,
    "all_gather": EPConfig(mode="standard"),
    "replicated": EPConfig(mode="standard", replicated=True),
}
TINY = BatchSpec(
    hidden_size=3,
    num_local_experts=2,
    dtype=FP64,
    tokens_of_rank=lambda rank, world_size: 2,
    choose_ids=random_ids,
)
# Step of central differences: small compared with values of order 1, and large compared with their
# rounding.
STEP = 1e-5
# The error of central differences: STEP**2 times a third derivative of order 1, and the rounding of
# the loss, a sum of at most 100 values of order 1, over STEP.
SLOPE_TOLERANCE = 10 * STEP**2 + 100 * torch.finfo(FP64).eps / STEP
# Tolerance of gradcheck, whose steps are 1e-6: the digits of y, at most 10, over a step, four times
# that for sums. Gradients that were float32 anywhere are off by six times as much where they are of
# order 1.
CHECK_TOLERANCE = 4 * 10 * torch.finfo(FP64).eps / 1e-6


@pytest.mark.ranks(2)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("scenario", ["aligned_holes", "traffic"])
def test_buffer_keeps_its_contract(scenario: str, case: str) -> None:
    backend, mode = CASES[case]
    with EPGroup() as group:
        env = buffer_suite.BufferEnv(group=group, backend=backend, mode=mode, dtype=FP64)
        buffer_suite.run_scenario(scenario, env)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", CONFIGS)
def test_layer_trains_like_the_oracle(name: str) -> None:
    """Compare to the digits of float64: a sum in float32 is off by 2**29 times as much."""
    config = CONFIGS[name]
    if config is STATIC:
        config = EPConfig(mode="normal", max_tokens_per_rank=32, max_recv_slots=256)
    with EPGroup() as group:
        env = layer_suite.pipeline_env(group, config, dtype=FP64)
        layer_suite.run_scenario("clamped_swiglu", env)


@pytest.mark.ranks(1)
@pytest.mark.parametrize("weigher", WeightsAppliedBy)
def test_gradcheck_of_one_rank(weigher: WeightsAppliedBy) -> None:
    """Rows, router weights, matrices and biases of the experts, by torch's own check."""
    config = CONFIGS["collective"]
    with EPGroup() as group:
        weights = make_weights(TINY, 1, intermediate_size=2, has_bias=True)
        batch = make_batch(TINY, 0, 1)
        spec = MoESpec(hidden_size=3, num_experts=2, top_k=2, dtype=FP64)
        chosen = replace(plan(config, spec, group).prefill, weights_applied_by=weigher)
        dispatcher = DeepEPNormalDispatcher(group, spec, config, chosen=chosen)
        runner, roles = ReferenceRunner(), weights.tensors()

        def run(x: Tensor, router_weights: Tensor, *tensors: Tensor) -> Tensor:
            topk = TopKOutput(topk_ids=batch.topk_ids, topk_weights=router_weights)
            out = dispatcher.dispatch(x, topk, experts_need_grad=True)
            experts = weights.with_tensors(dict(zip(roles, tensors, strict=True)))
            return dispatcher.combine(runner.run(out, experts))

        inputs = (batch.x.requires_grad_(), batch.topk_weights.requires_grad_(), *roles.values())
        assert torch.autograd.gradcheck(run, inputs, atol=CHECK_TOLERANCE, rtol=0.0)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", CONFIGS)
def test_gradients_are_slopes_of_the_loss_of_all_ranks(name: str) -> None:
    """Central differences, a tensor of one rank at a time; all ranks make the same calls."""
    config = CONFIGS[name]
    with EPGroup() as group:
        weights = make_weights(TINY, 2, intermediate_size=2)
        source = 0 if config.replicated else group.rank
        batch = make_batch(TINY, source, 2)
        layer = ExpertParallelExperts(weights, group, config, top_k=2)
        x, router_weights = batch.x.requires_grad_(), batch.topk_weights.requires_grad_()
        topk = TopKOutput(topk_ids=batch.topk_ids, topk_weights=router_weights)
        # Replicated tokens are one batch with one loss.
        share = 0.5 if config.replicated else 1.0

        def loss() -> Tensor:
            return share * (layer(x, topk) * batch.dy).sum()

        # Backward of replicated tokens expects the gradient of the whole loss on every rank.
        (loss() / share).backward()
        tensors = {"x": x, "router weights": router_weights, **layer.expert_parameters()}
        is_shared = {"x", "router weights"} if config.replicated else set()
        for field, tensor in tensors.items():
            assert tensor.grad is not None
            movers = [[0, 1]] if field in is_shared else [[0], [1]]
            for ranks in movers:
                for direction in _directions(piece_of(tensor)):
                    moved = direction * (group.rank in ranks)
                    slope = _slope(piece_of(tensor), loss, moved)
                    error = ((piece_of(tensor.grad) * direction).sum() - slope).abs().item()
                    is_here = group.rank in ranks
                    assert not is_here or error <= SLOPE_TOLERANCE, f"{field}: {error:.3g}"


def _directions(tensor: Tensor) -> list[Tensor]:
    """Return three directions of length 1: each element has a part in all of them."""
    generator = torch.Generator().manual_seed(7)
    drawn = [torch.randn(tensor.shape, generator=generator, dtype=FP64) for _ in range(3)]
    return [each / each.norm() for each in drawn]


def _slope(tensor: Tensor, loss: Callable[[], Tensor], direction: Tensor) -> Tensor:
    """Return the slope of the sum of all ranks' losses; all ranks take part."""
    before, sums = tensor.detach().clone(), []
    with torch.no_grad():
        for step in (STEP, -STEP):
            tensor.copy_(before + step * direction)
            total = loss().detach()
            dist.all_reduce(total)
            sums.append(total)
        tensor.copy_(before)
    return (sums[0] - sums[1]) / (2 * STEP)


@pytest.mark.ranks(1)
def test_gradcheck_of_a_whole_block() -> None:
    """The router's logits, the routing and the experts are computed in float64."""
    with EPGroup() as group:
        block = ExpertParallelMoE.from_transformers(qwen3_moe().double(), group, EPConfig())
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(1, 2, HIDDEN, generator=generator, dtype=FP64).requires_grad_()
        assert torch.autograd.gradcheck(block, (x,), fast_mode=True)


SPEC = MoESpec(hidden_size=64, num_experts=8, top_k=2, dtype=FP64)
# Backends that sum float64 rows in float64.
OURS = {"collective", "shared_memory", "hierarchical"}
OTHERS = [
    (mode, name)
    for mode in (Mode.STANDARD, Mode.NORMAL, Mode.LOW_LATENCY)
    for name in backend_names("auto", mode)
    if name not in OURS and any(mode in backend_class(each).modes for each in class_names(name))
]


@pytest.mark.parametrize(("mode", "name"), OTHERS, ids=lambda value: str(value))
def test_backends_that_add_up_in_float32_are_refused(mode: Mode, name: str) -> None:
    config = EPConfig(mode=mode, backend=name, max_tokens_per_rank=16)
    with pytest.raises(BackendUnavailable, match=r"carries \[[^\]]*\], not fp64"):
        plan(config, SPEC, world_size=2)


def test_float64_is_not_sent_in_eight_bits() -> None:
    config = EPConfig(mode="normal", dispatch_dtype=WireDtype.INT8)
    message = "rows are sent as int8/0, but the hidden states are fp64; expected bf16, fp16 or fp32"
    with pytest.raises(ConfigError, match=message):
        plan(config, SPEC, world_size=2)
    spec = BatchSpec(tokens_of_rank=lambda *_: 1, choose_ids=random_ids, dtype=FP64)
    with pytest.raises(ConfigError, match=r"hidden_dtype is torch\.float64, expected bfloat16"):
        Int8ChannelWeights.from_unquantized(make_weights(spec, 1))
