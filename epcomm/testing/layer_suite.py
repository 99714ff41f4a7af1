"""Check a layer against the oracle: y from (x, topk), and all gradients.

Each scenario runs on all ranks of a group. A layer maps (x, topk) to y and has its local weights as
an attribute, such as ExpertParallelExperts.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Protocol, Self

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

from epcomm.config import EPConfig, Mode
from epcomm.experts import ExpertParallelExperts
from epcomm.group import EPGroup
from epcomm.quantization import dequantize, quantize
from epcomm.records import TopKOutput
from epcomm.testing.buffer_suite import BATCH_SPECS, PLAIN, SuiteEnv
from epcomm.testing.data import ACTIVATIONS, BatchSpec, RankBatch, make_weights
from epcomm.testing.oracle import OracleResult, relative_error, run_oracle
from epcomm.types import WireFormat
from epcomm.weights.quantized import Int8ChannelWeights
from epcomm.weights.unquantized import ExpertTensors, ExpertWeights

# The relative error that the library promises for float32, for outputs and gradients.
FP32_TOLERANCE = 1e-5
# Each rounding to bfloat16 has an error of at most 2**-9: those of a few products and activations,
# the weighted result, the sum of a rank, and y; gradients have twice as many. The tolerance is 16
# roundings of the largest value, all in one direction.
BF16_TOLERANCE = 16 * 2.0**-9
# W8A8 quantises activations between the products. The error of a code is at most half a step,
# 1 / 254 of the largest value of the row. These errors are summed like y, so the relative error of
# y is largest / rms / 254 / sqrt(3). The tolerance assumes a largest value of ten times the rms,
# and is doubled for the tail.
W8A8_TOLERANCE = BF16_TOLERANCE + 2 * 10 / 254 / 3**0.5


class Layer(Protocol):
    """A layer under test."""

    @property
    def weights(self) -> ExpertTensors:
        """The weights of this rank."""
        ...

    def __call__(self, x: Tensor, topk: TopKOutput) -> Tensor:
        """Compute y [T, H] from x [T, H]; collective."""
        ...


@dataclass(frozen=True, kw_only=True)
class LayerEnv(SuiteEnv):
    """The environment of a scenario of layers.

    make_layer: makes a layer from the weights of all experts and K; collective.
    has_gradients: compare gradients; False: run under no_grad and compare only outputs.
    is_replicated: all ranks pass the same batch.
    wire: if the wire format is quantised; tokens then have values that this format represents
        exactly, except for the last bit of a scale.
    is_w8a8: make_layer quantises the experts; weights then have values that INT8 represents
        exactly, except for the last bit of a scale.
    intermediate_size: I of the experts.
    """

    make_layer: Callable[[ExpertWeights, int], Layer]
    has_gradients: bool = True
    is_replicated: bool = False
    is_w8a8: bool = False
    intermediate_size: int = 16

    @property
    def tolerance(self) -> float:
        """The largest permitted error, relative to the largest result."""
        if self.is_w8a8:
            return W8A8_TOLERANCE
        if self.dtype is torch.float64:
            # float64 has the same number of roundings, with smaller errors.
            return FP32_TOLERANCE * torch.finfo(torch.float64).eps / torch.finfo(torch.float32).eps
        return BF16_TOLERANCE if self.dtype is torch.bfloat16 else FP32_TOLERANCE

    @property
    def source(self) -> int:
        """The index in batches() of the batch that this rank passes."""
        return 0 if self.is_replicated else self.group.rank

    def batches(self, spec: BatchSpec, number: int = 0) -> list[RankBatch]:
        """Make batch `number` of all ranks, or a single batch if all ranks pass the same."""
        num_sources = 1 if self.is_replicated else self.group.world_size
        batches = self.made_batches(spec, number, num_sources)
        if self.wire is None:
            return batches
        sent = [dequantize(quantize(batch.x, self.wire), batch.x.dtype) for batch in batches]
        return [replace(batch, x=x) for batch, x in zip(batches, sent, strict=True)]

    @contextmanager
    def running(self) -> Iterator[None]:
        """Run with poisoned memory, and with the grad mode of the environment."""
        with self.memory(), torch.set_grad_enabled(self.has_gradients):
            yield

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
        return replace(weights, **Int8ChannelWeights.from_unquantized(weights).dequantized())


def pipeline_env(
    group: EPGroup,
    config: EPConfig,
    *,
    hidden_size: int | None = None,
    dtype: torch.dtype | None = None,
) -> LayerEnv:
    """Make the environment for ExpertParallelExperts under `config`; see LayerEnv."""
    sent = config.dispatch_dtype
    return LayerEnv(
        group=group,
        make_layer=lambda weights, k: ExpertParallelExperts(weights, group, config, top_k=k),
        has_gradients=config.mode != Mode.LOW_LATENCY,
        is_replicated=config.replicated,
        wire=None if sent is None or not sent.is_quantized else WireFormat(dtype=sent),
        hidden_size=hidden_size,
        dtype=dtype,
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class _Batch:
    """The leaves of this rank, the gradient of its output, and the oracle's results of all ranks.

    x: [T, H].   topk: with topk_weights [T, K].   dy: [T, H].
    """

    x: Tensor
    topk: TopKOutput
    dy: Tensor
    expected: OracleResult


@dataclass(frozen=True, kw_only=True, eq=False)
class _Trial:
    """A layer under test, the experts of all ranks, and the recipe of the batches."""

    env: LayerEnv
    spec: BatchSpec
    weights: ExpertWeights
    layer: Layer

    @classmethod
    def make(
        cls, env: LayerEnv, spec: BatchSpec = PLAIN, weights: ExpertWeights | None = None
    ) -> Self:
        spec = env.adapted(spec)
        weights = env.weights(spec) if weights is None else weights
        layer = env.make_layer(weights, spec.num_topk(env.group.world_size))
        return cls(env=env, spec=spec, weights=weights, layer=layer)

    def batch(self, number: int = 0, *, requires_grad: bool = True) -> _Batch:
        batches = self.env.batches(self.spec, number)
        mine = batches[self.env.source]
        weights = mine.topk_weights.clone().requires_grad_(requires_grad)
        return _Batch(
            x=mine.x.clone().requires_grad_(requires_grad),
            topk=TopKOutput(topk_ids=mine.topk_ids, topk_weights=weights),
            dy=mine.dy,
            expected=run_oracle(batches, self.weights),
        )

    def run(self, batch: _Batch) -> Tensor:
        """Run forward and, with gradients, backward; return y."""
        with self.env.running():
            y = self.layer(batch.x, batch.topk)
            self.env.backward((y * batch.dy).sum())
        return y

    def check_y(self, y: Tensor, batch: _Batch) -> None:
        _expect_close(self.env, "y", y, batch.expected.y[self.env.source])

    def check_outputs(self, y: Tensor, batch: _Batch) -> None:
        """Compare y, dx and dw of this rank; only y if there are no gradients."""
        self.check_y(y, batch)
        if self.env.has_gradients:
            expected, source = batch.expected, self.env.source
            _expect_close(self.env, "dx", batch.x.grad, expected.dx[source])
            _expect_close(self.env, "dw", batch.topk.topk_weights.grad, expected.dw[source])

    def check_weight_gradients(self, *batches: _Batch) -> None:
        """Compare the gradients of this rank's experts, summed over the batches."""
        num_local = self.layer.weights.num_experts
        first = self.env.group.rank * num_local
        for name, tensor in _parameters(self.layer).items():
            if tensor.requires_grad and self.env.has_gradients:
                total = sum(batch.expected.weight_grads[name] for batch in batches)
                assert isinstance(total, Tensor), "there is a batch"
                gradient = tensor.grad
                if isinstance(gradient, DTensor):
                    gradient = gradient.to_local()
                _expect_close(self.env, f"d {name}", gradient, total[first : first + num_local])

    def check_all(self, ys: Sequence[Tensor], batches: Sequence[_Batch]) -> None:
        """Compare the outputs of each batch, and the gradients of the experts over all batches."""
        for y, batch in zip(ys, batches, strict=True):
            self.check_outputs(y, batch)
        self.check_weight_gradients(*batches)


def check_batch(env: LayerEnv, spec: BatchSpec, weights: ExpertWeights | None = None) -> None:
    """Check the output and all gradients of two batches; the second must not see the first."""
    trial = _Trial.make(env, spec, weights)
    for number in range(2):
        for tensor in _parameters(trial.layer).values():
            tensor.grad = None
        batch = trial.batch(number)
        trial.check_all([trial.run(batch)], [batch])


def check_activation(env: LayerEnv, name: str, *, has_bias: bool) -> None:
    """Check experts of another activation and format, with or without biases."""
    weights = make_weights(
        env.adapted(PLAIN),
        env.group.world_size,
        expert_format=ACTIVATIONS[name],
        has_bias=has_bias,
        device=env.group.device,
    )
    check_batch(env, PLAIN, weights)


def check_two_layers(env: LayerEnv) -> None:
    """Check two layers on one buffer: both forwards, then both backwards."""
    spec = env.adapted(PLAIN)
    trials = [_Trial.make(env, spec, env.weights(spec, number)) for number in range(2)]
    batches = [trial.batch(number) for number, trial in enumerate(trials)]
    with env.running():
        ys = [trial.layer(b.x, b.topk) for trial, b in zip(trials, batches, strict=True)]
        for y, batch in zip(reversed(ys), reversed(batches), strict=True):
            env.backward((y * batch.dy).sum())
    for trial, y, batch in zip(trials, ys, batches, strict=True):
        trial.check_all([y], [batch])


def check_two_batches(env: LayerEnv) -> None:
    """Check two micro-batches through one layer, with one backward for both."""
    trial = _Trial.make(env)
    batches = [trial.batch(number) for number in range(2)]
    with env.running():
        ys = [trial.layer(batch.x, batch.topk) for batch in batches]
        env.backward(*[(y * batch.dy).sum() for y, batch in zip(ys, batches, strict=True)])
    trial.check_all(ys, batches)


def check_interleaved(env: LayerEnv) -> None:
    """Check two batches in flight: begin both, dispatch both, compute, combine in order."""
    trial = _Trial.make(env)
    layer = trial.layer
    assert isinstance(layer, ExpertParallelExperts), "only a pipeline has two steps"
    batches = [trial.batch(number) for number in range(2)]
    dispatcher = layer.phases.prefill
    with env.running():
        pending = [dispatcher.dispatch_async(batch.x, batch.topk) for batch in batches]
        outs = [one.wait() for one in pending]
        results = [layer.runner.run(out, layer.weights) for out in outs]
        pending_ys = [dispatcher.combine_async(result) for result in results]
        ys = [one.wait() for one in pending_ys]
        for y, batch in zip(reversed(ys), reversed(batches), strict=True):
            env.backward((y * batch.dy).sum())
    trial.check_all(ys, batches)


def check_checkpointing(env: LayerEnv) -> None:
    """Check activation checkpointing, which repeats the dispatch in backward."""
    # Rank 0 of several has no tokens and makes the calls too; with 2 ranks, each receives rows.
    spec = replace(PLAIN, tokens_of_rank=lambda rank, size: 6 if rank or size == 1 else 0, seed=1)
    trial = _Trial.make(env, spec)
    batch = trial.batch()
    with env.running():
        y = checkpoint(trial.layer, batch.x, batch.topk, use_reentrant=False)
        assert isinstance(y, Tensor), "a layer returns a tensor"
        env.backward((y * batch.dy).sum())
    trial.check_all([y], [batch])


def check_frozen_inputs(env: LayerEnv, *, of_all_ranks: bool) -> None:
    """Check that experts get all gradients if inputs need none: of all ranks, or of the last."""
    needs_grad = not of_all_ranks and env.group.rank != env.group.world_size - 1
    trial = _Trial.make(env)
    batch = trial.batch(requires_grad=needs_grad)
    y = trial.run(batch)
    trial.check_y(y, batch)
    trial.check_weight_gradients(batch)
    if needs_grad:
        trial.check_outputs(y, batch)
    elif batch.x.grad is not None:
        raise AssertionError(f"{env.group.where}: a gradient for inputs that need none")


def check_frozen_experts(env: LayerEnv) -> None:
    """Check that inputs get gradients if no expert needs one, and y none if nothing does."""
    weights = env.weights(env.adapted(PLAIN))
    tensors = weights.tensors().items()
    frozen = replace(weights, **{n: nn.Parameter(t, requires_grad=False) for n, t in tensors})
    trial = _Trial.make(env, PLAIN, frozen)
    batch, still = trial.batch(), trial.batch(requires_grad=False)
    y = trial.layer(batch.x, batch.topk)
    env.backward((y * batch.dy).sum())
    trial.check_outputs(y, batch)
    reads_flags = False
    if isinstance(trial.layer, ExpertParallelExperts):
        caps = trial.layer.phases.prefill.plan.caps
        reads_flags = caps.host_syncs > 0 and caps.reports_faults
    # A rank that cannot read the flags of other ranks must assume that some need gradients.
    if trial.layer(still.x, still.topk).requires_grad and reads_flags:
        raise AssertionError(f"{env.group.where}: y requires grad though nothing does")


def check_inference(env: LayerEnv) -> None:
    """Check the output under no_grad."""
    trial = _Trial.make(env)
    batch = trial.batch()
    with torch.no_grad(), env.memory():
        y = trial.layer(batch.x, batch.topk)
    trial.check_y(y, batch)


# Scenarios that check outputs, and gradients if there are any.
SCENARIOS: Mapping[str, Callable[[LayerEnv], None]] = {
    **{
        name: (lambda env, spec=spec: check_batch(env, spec))
        for name, spec in BATCH_SPECS.items()
        if spec.dtype is torch.float32 and name != "odd_hidden"
    },
    "clamped_swiglu": lambda env: check_activation(env, "clamped_swiglu", has_bias=True),
    "relu2": lambda env: check_activation(env, "relu2", has_bias=False),
    "relu2_bias": lambda env: check_activation(env, "relu2", has_bias=True),
    "two_layers": check_two_layers,
    "two_batches": check_two_batches,
    "interleaved": check_interleaved,
    "inference": check_inference,
}

GRADIENT_SCENARIOS: Mapping[str, Callable[[LayerEnv], None]] = {
    "checkpointing": check_checkpointing,
    "rank_without_gradients": lambda env: check_frozen_inputs(env, of_all_ranks=False),
    "frozen_inputs": lambda env: check_frozen_inputs(env, of_all_ranks=True),
    "frozen_experts": check_frozen_experts,
}


def run_scenario(name: str, env: LayerEnv) -> None:
    """Run one scenario on this rank; all ranks of the group run it.

    Raises:
        AssertionError: a result differs; the message has the rank, the tensor and the error.
    """
    {**SCENARIOS, **GRADIENT_SCENARIOS}[name](env)


def _parameters(layer: Layer) -> Mapping[str, Tensor]:
    """Return the tensors that have gradients: parameters of a module, or the weights."""
    if isinstance(layer, ExpertParallelExperts):
        return layer.expert_parameters()
    return layer.weights.tensors()


def _expect_close(env: LayerEnv, what: str, actual: Tensor | None, expected: Tensor) -> None:
    if actual is None:
        raise AssertionError(f"{env.group.where}: {what} is missing")
    error = relative_error(actual, expected)
    if not error <= env.tolerance:
        raise AssertionError(
            f"{env.group.where}: {what} has an error of {error:.3g}, allowed {env.tolerance}"
        )
