"""Micro-batches in turn: the order of calls in forward and backward, and errors of one of them."""

from collections.abc import Callable
from itertools import count
from typing import Any

import pytest
import torch
from torch import Tensor

from epcomm import (
    EPConfig,
    EPError,
    EPGroup,
    ExpertParallelExperts,
    ExpertParallelMoE,
    TopKOutput,
    interleave,
)
from epcomm.calls.order import Calls
from epcomm.micro_batches import Steps
from epcomm.records import Pending
from epcomm.testing.data import BatchSpec, make_batch, make_weights, random_ids
from tests.cases.blocks import BLOCKS, HIDDEN

NUM_RANKS, FAULTY = 2, 1
# The second micro-batch has no tokens on rank 1.
BATCHES = [
    BatchSpec(
        hidden_size=16,
        num_local_experts=2,
        dtype=torch.float32,
        tokens_of_rank=lambda rank, size, number=number: 5 - rank - 4 * rank * number,
        choose_ids=random_ids,
        seed=number,
    )
    for number in range(2)
]


def test_generators_run_in_turn_and_after_an_error_to_their_ends() -> None:
    seen: list[str] = []

    def batch(name: str, num_steps: int, error: Exception | None = None) -> Steps[str]:
        for step in range(num_steps):
            seen.append(f"{name}{step}")
            yield
        if error is not None:
            raise error
        return name

    assert interleave(batch("a", 1), batch("b", 3), batch("c", 0)) == ["a", "b", "c"]
    assert seen == ["a0", "b0", "b1", "b2"]
    seen.clear()
    with pytest.raises(OSError, match="no memory"):
        interleave(batch("a", 3), batch("b", 1, OSError("no memory")), batch("c", 2, KeyError()))
    assert seen == ["a0", "b0", "c0", "a1", "c1", "a2"]
    assert interleave() == []


def open_layer(group: EPGroup) -> ExpertParallelExperts:
    config = EPConfig(mode="normal", backend="collective", max_tokens_per_rank=8)
    return ExpertParallelExperts(
        make_weights(BATCHES[0], NUM_RANKS), group, config, top_k=BATCHES[0].top_k
    )


def inputs(group: EPGroup) -> list[tuple[Tensor, TopKOutput]]:
    """Return x, which requires grad, and the routing of both micro-batches."""
    made = [make_batch(spec, group.rank, NUM_RANKS) for spec in BATCHES]
    return [(each.x.requires_grad_(), each.topk) for each in made]


def record(patch: pytest.MonkeyPatch, layer: ExpertParallelExperts) -> list[str]:
    """Return the begun calls of a rank, by number, their waits and the products, as they happen."""
    seen: list[str] = []
    numbers, batches, begin, run = count(), count(), Calls.begin, layer.runner.run

    def begun(calls: Calls, *args: Any, name: str, **options: Any) -> Pending[Any]:  # noqa: ANN401
        number, pending = next(numbers), begin(calls, *args, name=name, **options)
        seen.append(f"begin {number}: {name.partition(' of dispatcher')[0]}")
        return Pending(lambda: (seen.append(f"wait {number}"), pending.wait())[1])

    def computed(*args: Any) -> object:  # noqa: ANN401
        seen.append(f"experts {(number := next(batches))}")
        results = run(*args)
        log = lambda _: seen.append(f"backward of experts {number}")  # noqa: E731
        results.hidden_states.register_hook(log)
        return results

    patch.setattr(Calls, "begin", begun)
    patch.setattr(layer.runner, "run", computed)
    return seen


@pytest.mark.ranks(NUM_RANKS)
def test_one_micro_batch_computes_while_the_other_is_sent(
    monkeypatch: pytest.MonkeyPatch, group: EPGroup
) -> None:
    layer = open_layer(group)
    alone, turns = inputs(group), inputs(group)
    expected = [layer(*each) for each in alone]
    torch.cat(expected).square().sum().backward()
    gradients = [each.grad for each in layer.parameters()]
    layer.zero_grad()

    seen = record(monkeypatch, layer)
    ys = interleave(*(layer.steps(*each) for each in turns))
    torch.cat(ys).square().sum().backward()
    assert seen == [
        *("begin 0: dispatch", "begin 1: dispatch"),
        *("wait 0", "experts 0", "begin 2: combine"),
        *("wait 1", "experts 1", "begin 3: combine"),
        *("wait 2", "wait 3"),
        *("begin 4: backward of combine", "begin 5: backward of combine"),
        *("wait 4", "backward of experts 1", "begin 6: backward of dispatch"),
        *("wait 5", "backward of experts 0", "begin 7: backward of dispatch"),
        *("wait 6", "wait 7"),
    ]
    found = [*ys, *(each.grad for each in layer.parameters()), *(x.grad for x, _ in turns)]
    known = [*expected, *gradients, *(x.grad for x, _ in alone)]
    for one, other in zip(found, known, strict=True):
        assert torch.equal(one, other)


@pytest.mark.ranks(NUM_RANKS)
@pytest.mark.parametrize("faulty_batch", [0, 1])
@pytest.mark.parametrize("place", ["router", "weights", "shared experts", "experts"])
def test_an_error_of_one_micro_batch_is_raised_on_all_ranks(
    place: str, faulty_batch: int, monkeypatch: pytest.MonkeyPatch, group: EPGroup
) -> None:
    moe = ExpertParallelMoE.from_transformers(BLOCKS["qwen2_moe"](), group)
    torch.manual_seed(group.rank)
    batches = [torch.randn(1, 3 + number, HIDDEN) for number in range(2)]
    expected = [moe(x) for x in batches]
    calls = count()

    def fail(*_: object) -> None:
        if group.rank == FAULTY and next(calls) == faulty_batch:
            raise OSError("no memory")

    def failing(call: Callable[..., object]) -> Callable[..., object]:
        return lambda *args: (fail(), call(*args))[1]

    with monkeypatch.context() as patch:
        if place == "weights":
            read = ExpertParallelExperts.weights.fget
            patch.setattr(ExpertParallelExperts, "weights", property(failing(read)))
        else:
            owner, name = {
                "router": (moe.get_submodule("gate"), "forward"),
                "shared experts": (moe.get_submodule("shared_expert"), "forward"),
                "experts": (moe.experts.runner, "run"),
            }[place]
            patch.setattr(owner, name, failing(getattr(owner, name)))
        error = (OSError, "no memory") if group.rank == FAULTY else (EPError, "on rank 1")
        with pytest.raises(error[0], match=error[1]):
            interleave(*(moe.steps(x) for x in batches))
    for y, other in zip(interleave(*(moe.steps(x) for x in batches)), expected, strict=True):
        assert torch.equal(y, other)
