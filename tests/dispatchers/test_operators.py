"""Dispatch and combine as operators that selective activation checkpointing selects by name."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from epcomm import EPConfig, EPGroup, EPStats, ExpertParallelMoE
from epcomm.types import WireDtype
from tests.cases.blocks import HIDDEN, qwen3_moe

# The buffer has memory for two batches, so the rows of the first layer are overwritten in backward.
NUM_LAYERS = 3
DISPATCH, COMBINE = torch.ops.epcomm.dispatch.default, torch.ops.epcomm.combine.default


def step(layers: list[ExpertParallelMoE], x: Tensor, call: Callable[..., object]) -> list[Tensor]:
    """Return the gradients of one step through residual layers, each in its own checkpoint."""
    parameters = [parameter for layer in layers for parameter in layer.experts.parameters()]
    for parameter in parameters:
        parameter.grad = None

    def region(x: Tensor, layer: nn.Module) -> Tensor:
        # The square needs y again, so recomputation continues past combine.
        return x + layer(x.tanh()).square()

    y = x
    for layer in layers:
        y = call(region, y, layer)
        assert isinstance(y, Tensor)
    y.square().sum().backward()
    return [parameter.grad for parameter in parameters]  # type: ignore[misc]


def spent(before: EPStats, after: EPStats) -> tuple[int, int]:
    sent, was = after.traffic, before.traffic
    return sent.dispatch_bytes - was.dispatch_bytes, sent.combine_bytes - was.combine_bytes


@pytest.mark.ranks(2)
def test_what_a_policy_saves_does_not_travel_again() -> None:
    config = EPConfig(mode="normal", backend="shared_memory", dispatch_dtype=WireDtype.FP8_E4M3)
    with EPGroup() as group:
        layers = [
            ExpertParallelMoE.from_transformers(qwen3_moe(), group, config)
            for _ in range(NUM_LAYERS)
        ]
        # Here rows of the first layer need no gradient and are saved in quantised form.
        for layer in layers:
            layer.get_parameter("gate.weight").requires_grad_(False)
        generator = torch.Generator().manual_seed(group.rank)
        x = torch.randn(3 + group.rank, HIDDEN, generator=generator)

        def measure(call: Callable[..., object]) -> tuple[int, int]:
            before = layers[0].stats()
            gradients = step(layers, x, call)
            after = layers[0].stats()
            # Recomputation is not counted as a forward pass.
            assert after.num_calls == before.num_calls + 1
            assert after.num_slots - before.num_slots == sum(after.num_tokens_per_expert) - sum(
                before.num_tokens_per_expert
            )
            for gradient, wanted in zip(gradients, expected, strict=True):
                assert torch.equal(gradient, wanted)
            return spent(before, after)

        def call_saving(saved: set[object]) -> Callable[..., object]:
            def policy(
                _: object, operator: object, *args: object, **kwargs: object
            ) -> CheckpointPolicy:
                is_saved = operator in saved
                return CheckpointPolicy.MUST_SAVE if is_saved else CheckpointPolicy.PREFER_RECOMPUTE

            contexts = partial(create_selective_checkpoint_contexts, policy)
            return partial(checkpoint, use_reentrant=False, context_fn=contexts)

        def plainly(region: Callable[..., Tensor], x: Tensor, layer: nn.Module) -> Tensor:
            return region(x, layer)

        expected = step(layers, x, plainly)
        dispatched, combined = measure(plainly)
        again = measure(call_saving(set()))
        assert again[0] > dispatched
        assert again[1] > combined
        assert measure(call_saving({DISPATCH})) == (dispatched, again[1])
        assert measure(call_saving({COMBINE})) == (again[0], combined)
        assert measure(call_saving({DISPATCH, COMBINE})) == (dispatched, combined)
