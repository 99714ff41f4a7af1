from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn

from epcomm import ConfigError, EPGroup, RoutingSpec, ShapeError
from epcomm.routing.spec import ScoreFunction
from epcomm.testing.oracle import relative_error
from epcomm.training.auxiliary_losses import (
    load_balancing_loss,
    router_probabilities,
    sequence_balancing_loss,
    watch_gates,
    z_loss,
)
from epcomm.training.gradients import sum_replicated_gradients

NUM_EXPERTS, TOP_K = 6, 2
# Difference of float64 sums in another order.
SAME = 1e-12


def logits_of(number: int, num_tokens: int) -> Tensor:
    generator = torch.Generator().manual_seed(number)
    logits = torch.randn(num_tokens, NUM_EXPERTS, generator=generator, dtype=torch.float64)
    return 3 * logits + torch.linspace(0, 2, NUM_EXPERTS, dtype=torch.float64)


def plain_balance(probabilities: Tensor, ids: Tensor) -> Tensor:
    """Compute the loss token by token, by eq. 4 to 6 of Switch Transformers, for any K."""
    num_tokens, num_experts = probabilities.shape
    total = probabilities.new_zeros(())
    for expert in range(num_experts):
        chosen = sum(expert in row for row in ids.tolist())
        mean = sum(probabilities[token, expert] for token in range(num_tokens)) / num_tokens
        total = total + chosen / (num_tokens * ids.shape[1]) * mean
    return num_experts * total


def plain_z(logits: Tensor) -> Tensor:
    return logits.exp().sum(1).log().square().mean()


def test_the_worked_example() -> None:
    # The mean probabilities of two tokens with one expert each are 0.6 and 0.4.
    probabilities = torch.tensor([[0.9, 0.1], [0.3, 0.7]])
    even, one = torch.tensor([[0], [1]]), torch.tensor([[0], [0]])
    assert float(load_balancing_loss(probabilities, even)) == pytest.approx(1.0)
    assert float(load_balancing_loss(probabilities, one)) == pytest.approx(1.2)
    assert float(z_loss(torch.zeros(5, 2))) == pytest.approx(0.4804530)  # log(2) ** 2


@pytest.mark.parametrize("function", list(ScoreFunction))
def test_losses_are_those_of_the_papers(function: ScoreFunction) -> None:
    spec = RoutingSpec(top_k=TOP_K, score_function=function, softcap=5.0)
    found, expected = (logits_of(0, 12).requires_grad_() for _ in range(2))
    capped = 5 * torch.tanh(expected / 5)
    scores = {
        ScoreFunction.SOFTMAX: capped.exp(),
        ScoreFunction.SIGMOID: 1 / (1 + (-capped).exp()),
        ScoreFunction.SQRT_SOFTPLUS: (1 + capped.exp()).log().sqrt(),
    }[function]
    wanted = scores / scores.sum(1, keepdim=True)
    ids = logits_of(0, 12).topk(TOP_K).indices
    probabilities = router_probabilities(found, spec)
    assert relative_error(probabilities, wanted) <= SAME
    parts = [
        plain_balance(wanted[first : first + 4], ids[first : first + 4]) for first in (0, 4, 8)
    ]
    total = plain_balance(wanted, ids) + torch.stack(parts).mean() + plain_z(expected)
    total.backward()
    sequences = probabilities.view(3, 4, NUM_EXPERTS), ids.view(3, 4, TOP_K)
    loss = load_balancing_loss(probabilities, ids) + sequence_balancing_loss(*sequences)
    loss = loss + z_loss(found)
    loss.backward()
    assert relative_error(loss, total) <= SAME
    assert relative_error(found.grad, expected.grad) <= SAME


def test_padding_and_masked_entries_have_no_part() -> None:
    logits, ids = logits_of(1, 8), logits_of(1, 8).topk(TOP_K).indices
    probabilities = logits.softmax(1)
    mask = torch.tensor([True, False, True, True, True, True, False, False])
    # The second sequence has only padding.
    order = torch.tensor([[0, 2, 3, 4, 5], [1, 6, 7, 1, 6]])
    is_token = torch.tensor([[True] * 5, [False] * 5])
    dirty = probabilities.masked_fill(~mask.unsqueeze(1), torch.nan)
    expected = plain_balance(probabilities[mask], ids[mask])
    assert relative_error(load_balancing_loss(dirty, ids, mask=mask), expected) <= SAME
    assert relative_error(z_loss(logits, mask=mask), plain_z(logits[mask])) <= SAME
    by_sequence = sequence_balancing_loss(dirty[order], ids[order], mask=is_token)
    assert relative_error(by_sequence, expected) <= SAME
    gone = ids.masked_fill(ids == 5, -1)
    assert (
        relative_error(load_balancing_loss(probabilities, gone), plain_balance(probabilities, gone))
        <= SAME
    )


@pytest.mark.parametrize("shape", [(0, NUM_EXPERTS), (0, 3, NUM_EXPERTS), (2, 0, NUM_EXPERTS)])
def test_without_tokens_losses_are_zero_and_have_gradients(shape: Sequence[int]) -> None:
    values = torch.zeros(*shape, requires_grad=True)
    ids = torch.zeros(*shape[:-1], TOP_K, dtype=torch.int64)
    function = load_balancing_loss if len(shape) == 2 else sequence_balancing_loss
    losses = [function(values, ids)] + ([z_loss(values)] if len(shape) == 2 else [])
    for loss in losses:
        assert float(loss.detach()) == 0
        loss.backward()


@pytest.mark.slow
def test_the_loss_of_transformers_is_k_times_as_much() -> None:
    from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

    layers = tuple(logits_of(number, 10).float().requires_grad_() for number in range(2))
    mask = torch.arange(10).view(2, 5) % 4 != 3
    theirs = load_balancing_loss_func(layers, NUM_EXPERTS, TOP_K, mask)
    assert isinstance(theirs, Tensor)
    expected = torch.autograd.grad(theirs, layers)
    logits = torch.cat(layers)
    ours = TOP_K * load_balancing_loss(
        router_probabilities(logits, RoutingSpec(top_k=TOP_K)),
        logits.topk(TOP_K).indices,
        mask=mask.flatten().repeat(2),
    )
    assert relative_error(ours, theirs) <= 1e-6
    for found, wanted in zip(torch.autograd.grad(ours, layers), expected, strict=True):
        assert relative_error(found, wanted) <= 1e-5


@pytest.mark.ranks(4)
def test_parts_and_gradients_of_ranks_add_up_to_those_of_one_process(group: EPGroup) -> None:
    # The last rank has no token.
    sizes = [4 * (rank + 1) for rank in range(group.world_size - 1)] + [0]
    all_logits = [logits_of(rank, size) for rank, size in enumerate(sizes)]
    whole = torch.cat(all_logits).requires_grad_()
    ids = whole.detach().topk(TOP_K).indices
    parts = zip(whole.softmax(1).split(4), ids.split(4), strict=True)
    by_sequence = torch.stack([plain_balance(*part) for part in parts]).mean()
    expected = torch.stack((plain_balance(whole.softmax(1), ids), by_sequence, plain_z(whole)))
    mine = all_logits[group.rank].clone().requires_grad_()
    own_ids = mine.detach().topk(TOP_K).indices
    probabilities = mine.softmax(1)
    found = torch.stack(
        (
            load_balancing_loss(probabilities, own_ids, group=group),
            sequence_balancing_loss(
                probabilities.view(-1, 4, NUM_EXPERTS), own_ids.view(-1, 4, TOP_K), group=group
            ),
            z_loss(mine, group=group),
        )
    )
    together = group.collectives.all_gather(found.detach()).sum(0)
    assert relative_error(together, expected) <= SAME
    weights = torch.tensor([1.0, 0.5, 0.1], dtype=torch.float64)
    (expected * weights).sum().backward()
    (found * weights).sum().backward()
    wanted = whole.grad.split(sizes)[group.rank]
    torch.testing.assert_close(mine.grad, wanted, rtol=1e-10, atol=1e-15)


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    "is_checkpointed",
    [pytest.param(False, marks=pytest.mark.slow), True],
    ids=["kept", "checkpointed"],
)
def test_losses_of_gates_train_like_one_process(is_checkpointed: bool, group: EPGroup) -> None:
    from tests.training.test_gradients import NUM_RANKS, TinyModel, check, spread, tokens

    alone, seen = TinyModel(), []
    for block in alone.blocks:
        block.get_submodule("gate").register_forward_hook(noting(seen))
    total = torch.stack([alone(tokens(rank)) for rank in range(NUM_RANKS)]).mean()
    for logits in (torch.cat(seen[0::2]), torch.cat(seen[1::2])):
        balance = plain_balance(logits.softmax(1), logits.topk(TOP_K).indices)
        total = total + 0.5 * balance + 0.1 * plain_z(logits)
    total.backward()
    model = spread(group)
    model.is_checkpointed = is_checkpointed
    with watch_gates(model) as gates:
        loss = model(tokens(group.rank)) / NUM_RANKS
        for gate in gates:
            scores = router_probabilities(gate.logits, gate.routing)
            loss = loss + 0.5 * load_balancing_loss(scores, gate.topk_ids, group=group)
            loss = loss + 0.1 * z_loss(gate.logits, group=group)
        loss.backward()
    assert len(gates) == 2
    sum_replicated_gradients(model, group)
    check(model, group, {n: p.grad for n, p in alone.named_parameters()})  # type: ignore[misc]
    model(tokens(group.rank))
    assert len(gates) == 2


def noting(seen: list[Tensor]) -> Callable[[nn.Module, object, object], None]:
    def note(module: nn.Module, args: object, output: object) -> None:
        logits = output[0] if isinstance(output, tuple) else output
        seen.append(logits)

    return note


def test_what_does_not_fit_is_refused() -> None:
    scores, ids = torch.ones(4, 3), torch.zeros(4, 2, dtype=torch.int64)
    for wrong in (ids[:3], ids.float(), ids.bool(), ids[0]):
        with pytest.raises(ShapeError, match=r"expected integers \[4, 'K'\]"):
            load_balancing_loss(scores, wrong)
    for wrong in (scores.long(), scores[0]):
        with pytest.raises(ShapeError, match=r"expected floating point \[T, E\]"):
            z_loss(wrong)
    with pytest.raises(ShapeError, match=r"floating point \[B, S, E\]"):
        sequence_balancing_loss(scores, ids)
    for wrong in (torch.ones(4), torch.ones(3, dtype=torch.bool)):
        with pytest.raises(ShapeError, match=r"expected bool \[4\]"):
            load_balancing_loss(scores, ids, mask=wrong)
    spec = RoutingSpec(top_k=1, custom_function=lambda *_, **__: None)  # type: ignore[arg-type,return-value]
    with pytest.raises(ConfigError, match="custom function"):
        router_probabilities(scores, spec)
