"""float64 rows: every sum is float64 too on each backend that carries them; gradcheck passes."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from epcomm import (
    BackendUnavailable,
    ConfigError,
    DeepEPNormalDispatcher,
    EPConfig,
    EPGroup,
    ExpertParallelMoE,
    Mode,
    MoESpec,
    TopKOutput,
    WireDtype,
    plan,
)
from epcomm.registry import backend_class, backend_names, class_names
from epcomm.runners.reference import ReferenceRunner
from epcomm.testing import buffer_suite, layer_suite
from epcomm.testing.data import BatchSpec, make_batch, make_weights, random_ids
from epcomm.types import WeightsAppliedBy
from epcomm.weights.quantized import Int8ChannelWeights
from tests.buffers.test_buffers import CASES
from tests.cases.blocks import HIDDEN, qwen3_moe

FP64 = torch.float64
CONFIGS = {
    "shared_memory": EPConfig(mode="normal", backend="shared_memory"),
    "collective": EPConfig(mode="normal", backend="collective"),
    "collective_static": EPConfig(mode="normal", max_tokens_per_rank=32, max_recv_slots=256),
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
# Tolerance of gradcheck, whose steps are 1e-6: the digits of y, at most 10, over a step, four times
# that for sums. Gradients that were float32 anywhere are off by six times as much where they are of
# order 1.
CHECK_TOLERANCE = 4 * 10 * torch.finfo(FP64).eps / 1e-6


@pytest.mark.ranks(2)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("scenario", ["aligned_holes", "traffic"])
def test_buffer_keeps_its_contract(scenario: str, case: str, group: EPGroup) -> None:
    backend, mode = CASES[case]
    env = buffer_suite.BufferEnv(group=group, backend=backend, mode=mode, dtype=FP64)
    buffer_suite.run_scenario(scenario, env)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("name", CONFIGS)
def test_layer_trains_like_the_oracle(name: str, group: EPGroup) -> None:
    """Compare to the digits of float64: a sum in float32 is off by 2**29 times as much."""
    env = layer_suite.pipeline_env(group, CONFIGS[name], dtype=FP64)
    layer_suite.run_scenario("clamped_swiglu", env)


@pytest.mark.ranks(1)
@pytest.mark.parametrize("weigher", WeightsAppliedBy)
def test_gradcheck_of_one_rank(weigher: WeightsAppliedBy, group: EPGroup) -> None:
    """Rows, router weights, matrices and biases of the experts, by torch's own check."""
    config = CONFIGS["collective"]
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


@pytest.mark.ranks(1)
def test_gradcheck_of_a_whole_block(group: EPGroup) -> None:
    """The router's logits, the routing and the experts are computed in float64."""
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
