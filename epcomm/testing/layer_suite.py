"""Check every path through a layer against the oracle: y from (x, topk), and all gradients.

Scenarios run on all ranks of a group at once. A layer is anything that maps (x, topk) to y and
shows its live local weights, such as ExpertParallelExperts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from epcomm.config import EPConfig, Mode
from epcomm.experts import ExpertParallelExperts
from epcomm.group import EPGroup
from epcomm.quantization import QUANTIZED_FORMATS, dequantize, quantize
from epcomm.records import TopKOutput
from epcomm.testing.buffer_suite import BATCH_SPECS, PLAIN, none_on_rank_0
from epcomm.testing.data import ACTIVATIONS, BatchSpec, RankBatch, make_batch, make_weights
from epcomm.testing.oracle import OracleResult, relative_error, run_oracle
from epcomm.testing.poison import poisoned_memory
from epcomm.types import WireFormat
from epcomm.weights.quantized import Int8ChannelWeights
from epcomm.weights.unquantized import ExpertTensors, ExpertWeights

# The relative error that the library promises for float32, for outputs and gradients.
FP32_TOLERANCE = 1e-5
# bfloat16 rounds by 2**-9: a few products and activations, the weighted result, the sum of a rank,
# and y; gradients go through twice as many. 16 roundings of the largest value, all in one
# direction.
BF16_TOLERANCE = 16 * 2.0**-9
# W8A8 turns activations between the products into codes, each off by at most half a step, 1 / 254
# of the largest value of the row. These errors add up as y itself does, so y is off by
# largest / rms / 254 / sqrt(3) of its size; the tolerance takes a largest value of ten times the
# rms, and as much again for the tail.
W8A8_TOLERANCE = BF16_TOLERANCE + 2 * 10 / 254 / 3**0.5


class Layer(Protocol):
    """A layer under test."""

    @property
    def weights(self) -> ExpertTensors:
        """Return this rank's live weights."""
        ...

    def __call__(self, x: Tensor, topk: TopKOutput) -> Tensor:
        """Compute y [T, H] from x [T, H]; collective."""
        ...


@dataclass(frozen=True, kw_only=True)
class LayerEnv:
    """The environment of a scenario.

    make_layer: makes a layer from the weights of all experts and K; collective.
    has_gradients: compare gradients; False: all runs under no_grad and only outputs are compared.
    is_replicated: all ranks pass the same batch.
    wire: wire format of dispatch if it is quantised; the tokens are then values that the wire
        carries without loss, but for the last bit of a scale.
    hidden_size, dtype: of all batches, for a backend that does not take any H and dtype.
    poisons: memory that nobody has written is NaN; False where a package refuses torch's switch.
    is_w8a8: make_layer quantises the experts; the weights are then values that INT8 codes carry
        without loss, but for the last bit of a scale.
    intermediate_size: I of the experts.
    """

    group: EPGroup
    make_layer: Callable[[ExpertWeights, int], Layer]
    has_gradients: bool = True
    is_replicated: bool = False
    wire: WireFormat | None = None
    hidden_size: int | None = None
    dtype: torch.dtype | None = None
    poisons: bool = True
    is_w8a8: bool = False
    intermediate_size: int = 16

    @property
    def tolerance(self) -> float:
        """Return the largest error of results, relative to the largest result."""
        if self.is_w8a8:
            return W8A8_TOLERANCE
        if self.dtype is torch.float64:
            # float64 has the same number of roundings, each finer.
            return FP32_TOLERANCE * torch.finfo(torch.float64).eps / torch.finfo(torch.float32).eps
        return BF16_TOLERANCE if self.dtype is torch.bfloat16 else FP32_TOLERANCE

    def adapted(self, spec: BatchSpec) -> BatchSpec:
        """Return `spec` with a hidden size and dtype that the backend takes."""
        return replace(
            spec,
            hidden_size=self.hidden_size or spec.hidden_size,
            dtype=self.dtype or spec.dtype,
        )

    @property
    def source(self) -> int:
        """Return the index in batches() of the batch that this rank passes."""
        return 0 if self.is_replicated else self.group.rank

    def batches(self, spec: BatchSpec, number: int = 0) -> list[RankBatch]:
        """Make batch `number` of all ranks, or a single batch if all ranks pass the same."""
        world_size = self.group.world_size
        batches = [
            make_batch(spec, rank, world_size, number=number).to(self.group.device)
            for rank in range(1 if self.is_replicated else world_size)
        ]
        if self.wire is None:
            return batches
        return [
            replace(batch, x=dequantize(quantize(batch.x, self.wire), batch.x.dtype))
            for batch in batches
        ]

    @contextmanager
    def running(self) -> Iterator[None]:
        """Run with poisoned memory, and with the grad mode of the environment."""
        with self.memory(), torch.set_grad_enabled(self.has_gradients):
            yield

    def memory(self) -> AbstractContextManager[None]:
        """Poison memory within the context, where the environment allows it."""
        return poisoned_memory() if self.poisons else nullcontext()

    def backward(self, *losses: Tensor) -> None:
        """Run backward through the sum of the losses, if there are gradients."""
        if self.has_gradients:
            torch.stack(losses).sum().backward()

    def weights(self, spec: BatchSpec, number: int = 0) -> ExpertWeights:
        """Make experts `number` of all ranks."""
        weights = make_weights(
            spec,
            self.group.world_size,
            intermediate_size=self.intermediate_size,
            number=number,
            device=self.group.device,
        )
        if not self.is_w8a8:
            return weights
        carried = Int8ChannelWeights.from_unquantized(weights).dequantized()
        return replace(weights, **carried)


def pipeline_env(
    group: EPGroup,
    config: EPConfig,
    *,
    hidden_size: int | None = None,
    dtype: torch.dtype | None = None,
) -> LayerEnv:
    """Make the environment for ExpertParallelExperts under `config`; see LayerEnv."""
    return LayerEnv(
        group=group,
        make_layer=lambda weights, top_k: ExpertParallelExperts(
            weights, group, config, top_k=top_k
        ),
        has_gradients=config.mode != Mode.LOW_LATENCY,
        is_replicated=config.replicated,
        wire=QUANTIZED_FORMATS.get(config.dispatch_dtype) if config.dispatch_dtype else None,
        hidden_size=hidden_size,
        dtype=dtype,
    )


@dataclass(frozen=True, kw_only=True)
class Inputs:
    """The leaves of one rank: x [T, H], topk_weights [T, K], and the gradient of the output."""

    x: Tensor
    topk: TopKOutput
    dy: Tensor


def leaves(batch: RankBatch, *, requires_grad: bool = True) -> Inputs:
    """Make new leaves of a batch."""
    weights = batch.topk_weights.clone().requires_grad_(requires_grad)
    return Inputs(
        x=batch.x.clone().requires_grad_(requires_grad),
        topk=TopKOutput(topk_ids=batch.topk_ids, topk_weights=weights),
        dy=batch.dy,
    )


def check_batch(env: LayerEnv, spec: BatchSpec, weights: ExpertWeights | None = None) -> None:
    """Check the output and all gradients of two batches; the second must not see the first."""
    spec, world_size = env.adapted(spec), env.group.world_size
    weights = env.weights(spec) if weights is None else weights
    layer = env.make_layer(weights, spec.num_topk(world_size))
    for number in range(2):
        batches = env.batches(spec, number)
        mine = leaves(batches[env.source])
        _clear_gradients(layer)
        with env.running():
            y = layer(mine.x, mine.topk)
            env.backward((y * mine.dy).sum())
        expected = run_oracle(batches, weights)
        check_outputs(env, y, mine, expected)
        check_weight_gradients(env, layer, expected)


def check_outputs(env: LayerEnv, y: Tensor, mine: Inputs, expected: OracleResult) -> None:
    """Compare y, dx and dw of this rank, or y alone where there are no gradients."""
    _expect_close(env, "y", y, expected.y[env.source])
    if env.has_gradients:
        _expect_close(env, "dx", mine.x.grad, expected.dx[env.source])
        _expect_close(env, "dw", mine.topk.topk_weights.grad, expected.dw[env.source])


def check_weight_gradients(env: LayerEnv, layer: Layer, *expected: OracleResult) -> None:
    """Compare the gradients of this rank's experts, summed over the batches."""
    num_local = layer.weights.num_experts
    first = env.group.rank * num_local
    for name, tensor in _parameters(layer).items():
        if tensor.requires_grad and env.has_gradients:
            total = torch.stack([result.weight_grads[name] for result in expected]).sum(0)
            gradient = tensor.grad
            if isinstance(gradient, DTensor):
                gradient = gradient.to_local()
            _expect_close(env, f"d {name}", gradient, total[first : first + num_local])


def check_activation(env: LayerEnv, name: str, *, has_bias: bool) -> None:
    """Test experts other than SwiGLU, with biases, transposed and interleaved if the kind is so."""
    spec = env.adapted(PLAIN)
    weights = make_weights(
        spec,
        env.group.world_size,
        expert_format=ACTIVATIONS[name],
        has_bias=has_bias,
        device=env.group.device,
    )
    check_batch(env, spec, weights)


def check_two_layers(env: LayerEnv) -> None:
    """Check two layers on one buffer: both forwards, then both backwards."""
    spec, world_size = env.adapted(PLAIN), env.group.world_size
    all_weights = [env.weights(spec, number) for number in range(2)]
    layers = [env.make_layer(weights, spec.num_topk(world_size)) for weights in all_weights]
    all_batches = [env.batches(spec, number) for number in range(2)]
    inputs = [leaves(batches[env.source]) for batches in all_batches]
    with env.running():
        ys = [layer(mine.x, mine.topk) for layer, mine in zip(layers, inputs, strict=True)]
        for y, mine in zip(reversed(ys), reversed(inputs), strict=True):
            env.backward((y * mine.dy).sum())
    for number in range(2):
        expected = run_oracle(all_batches[number], all_weights[number])
        check_outputs(env, ys[number], inputs[number], expected)
        check_weight_gradients(env, layers[number], expected)


def check_two_batches(env: LayerEnv) -> None:
    """Check two micro-batches through one layer, with one backward for both."""
    spec, world_size = env.adapted(PLAIN), env.group.world_size
    weights = env.weights(spec)
    layer = env.make_layer(weights, spec.num_topk(world_size))
    all_batches = [env.batches(spec, number) for number in range(2)]
    inputs = [leaves(batches[env.source]) for batches in all_batches]
    with env.running():
        ys = [layer(mine.x, mine.topk) for mine in inputs]
        env.backward(*[(y * m.dy).sum() for y, m in zip(ys, inputs, strict=True)])
    expected = [run_oracle(batches, weights) for batches in all_batches]
    for number in range(2):
        check_outputs(env, ys[number], inputs[number], expected[number])
    check_weight_gradients(env, layer, *expected)


def check_interleaved(env: LayerEnv) -> None:
    """Check two batches in flight: begin both, dispatch both, compute, combine in order."""
    spec, world_size = env.adapted(PLAIN), env.group.world_size
    weights = env.weights(spec)
    layer = env.make_layer(weights, spec.num_topk(world_size))
    assert isinstance(layer, ExpertParallelExperts), "only a pipeline has two steps"
    all_batches = [env.batches(spec, number) for number in range(2)]
    inputs = [leaves(batches[env.source]) for batches in all_batches]
    dispatcher = layer.phases.prefill
    with env.running():
        pending = [dispatcher.dispatch_async(mine.x, mine.topk) for mine in inputs]
        outs = [one.wait() for one in pending]
        results = [layer.runner.run(out, layer.weights) for out in outs]
        pending_ys = [dispatcher.combine_async(result) for result in results]
        ys = [one.wait() for one in pending_ys]
        for y, mine in zip(reversed(ys), reversed(inputs), strict=True):
            env.backward((y * mine.dy).sum())
    expected = [run_oracle(batches, weights) for batches in all_batches]
    for number in range(2):
        check_outputs(env, ys[number], inputs[number], expected[number])
    check_weight_gradients(env, layer, *expected)


def check_checkpointing(env: LayerEnv) -> None:
    """Activation checkpointing re-runs the dispatch in backward."""
    # The first rank has no tokens, and takes part all the same; of 2 ranks each gets some rows.
    spec, world_size = (
        env.adapted(replace(PLAIN, tokens_of_rank=none_on_rank_0, seed=1)),
        env.group.world_size,
    )
    weights = env.weights(spec)
    layer = env.make_layer(weights, spec.num_topk(world_size))
    batches = env.batches(spec)
    mine = leaves(batches[env.source])
    with env.running():
        hidden = checkpoint(layer, mine.x, mine.topk, use_reentrant=False)
        assert isinstance(hidden, Tensor), "a layer returns a tensor"
        env.backward((hidden * mine.dy).sum())
    expected = run_oracle(batches, weights)
    check_outputs(env, hidden, mine, expected)
    check_weight_gradients(env, layer, expected)


def check_rank_without_gradients(env: LayerEnv) -> None:
    """Check that experts get gradients where the last rank's inputs need none."""
    spec, world_size = env.adapted(PLAIN), env.group.world_size
    weights = env.weights(spec)
    layer = env.make_layer(weights, spec.num_topk(world_size))
    batches = env.batches(spec)
    needs_grad = env.group.rank != world_size - 1
    mine = leaves(batches[env.source], requires_grad=needs_grad)
    with env.running():
        y = layer(mine.x, mine.topk)
        env.backward((y * mine.dy).sum())
    expected = run_oracle(batches, weights)
    _expect_close(env, "y", y, expected.y[env.source])
    check_weight_gradients(env, layer, expected)
    if needs_grad:
        check_outputs(env, y, mine, expected)
    elif mine.x.grad is not None:
        raise AssertionError(f"{env.group.where}: a gradient for inputs that need none")


def check_frozen_inputs(env: LayerEnv) -> None:
    """No input needs a gradient anywhere; the experts get theirs."""
    spec, world_size = env.adapted(PLAIN), env.group.world_size
    weights = env.weights(spec)
    layer = env.make_layer(weights, spec.num_topk(world_size))
    batches = env.batches(spec)
    mine = leaves(batches[env.source], requires_grad=False)
    with env.running():
        y = layer(mine.x, mine.topk)
        env.backward((y * mine.dy).sum())
    check_weight_gradients(env, layer, run_oracle(batches, weights))


def check_frozen_experts(env: LayerEnv) -> None:
    """No expert needs a gradient; the inputs get theirs. Without any gradient there is no graph."""
    spec, world_size = env.adapted(PLAIN), env.group.world_size
    weights = env.weights(spec)
    tensors = weights.tensors().items()
    frozen = replace(weights, **{n: nn.Parameter(t, requires_grad=False) for n, t in tensors})
    layer = env.make_layer(frozen, spec.num_topk(world_size))
    batches = env.batches(spec)
    mine = leaves(batches[env.source])
    y = layer(mine.x, mine.topk)
    env.backward((y * mine.dy).sum())
    check_outputs(env, y, mine, run_oracle(batches, frozen))
    still = leaves(batches[env.source], requires_grad=False)
    reads_flags = False
    if isinstance(layer, ExpertParallelExperts):
        caps = layer.phases.prefill.plan.caps
        reads_flags = caps.host_syncs > 0 and caps.reports_faults
    # A rank that may not read the flags of other ranks must assume that some need gradients.
    if layer(still.x, still.topk).requires_grad and reads_flags:
        raise AssertionError(f"{env.group.where}: y requires grad though nothing does")


def check_inference(env: LayerEnv) -> None:
    """Check that no_grad gives the same output and no graph."""
    spec, world_size = env.adapted(PLAIN), env.group.world_size
    weights = env.weights(spec)
    layer = env.make_layer(weights, spec.num_topk(world_size))
    batches = env.batches(spec)
    mine = leaves(batches[env.source])
    with torch.no_grad(), env.memory():
        y = layer(mine.x, mine.topk)
    _expect_close(env, "y", y, run_oracle(batches, weights).y[env.source])


_FLOAT32_SPECS = {
    name: spec
    for name, spec in BATCH_SPECS.items()
    if spec.dtype is torch.float32 and name != "odd_hidden"
}

# Scenarios that check outputs, and gradients where there are any.
SCENARIOS: Mapping[str, Callable[[LayerEnv], None]] = MappingProxyType(
    {
        **{
            name: (lambda env, spec=spec: check_batch(env, spec))
            for name, spec in _FLOAT32_SPECS.items()
        },
        "clamped_swiglu": lambda env: check_activation(env, "clamped_swiglu", has_bias=True),
        "relu2": lambda env: check_activation(env, "relu2", has_bias=False),
        "relu2_bias": lambda env: check_activation(env, "relu2", has_bias=True),
        "two_layers": check_two_layers,
        "two_batches": check_two_batches,
        "interleaved": check_interleaved,
        "inference": check_inference,
    }
)

# Scenarios that check gradients alone.
GRADIENT_SCENARIOS: Mapping[str, Callable[[LayerEnv], None]] = MappingProxyType(
    {
        "checkpointing": check_checkpointing,
        "rank_without_gradients": check_rank_without_gradients,
        "frozen_inputs": check_frozen_inputs,
        "frozen_experts": check_frozen_experts,
    }
)


def run_scenario(name: str, env: LayerEnv) -> None:
    """Run one scenario on this rank; all ranks of the group run it.

    Raises:
        AssertionError: a result is off; the message names rank, tensor and error.
    """
    {**SCENARIOS, **GRADIENT_SCENARIOS}[name](env)


def _clear_gradients(layer: Layer) -> None:
    for tensor in _parameters(layer).values():
        tensor.grad = None


def _parameters(layer: Layer) -> Mapping[str, Tensor]:
    """Return the tensors that hold gradients: parameters of a module, or the weights themselves."""
    if isinstance(layer, ExpertParallelExperts):
        return layer.expert_parameters()
    return layer.weights.tensors()


def _expect_close(env: LayerEnv, what: str, actual: Tensor | None, expected: Tensor) -> None:
    if actual is None:
        raise AssertionError(f"{env.group.where}: {what} is missing")
    error = relative_error(actual, expected)
    if not error <= env.tolerance:
        raise AssertionError(
            f"{env.group.where}: {what} is off by {error:.3g}, allowed {env.tolerance}"
        )
