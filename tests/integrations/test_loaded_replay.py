from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from epcomm import EPError, idle_step
from epcomm.routing import record_routes, replay_routes, routes_of_batch, watch_gates
from epcomm.testing.layer_suite import FP32_TOLERANCE
from epcomm.testing.oracle import relative_error
from tests.integrations.test_expert_parallel import (
    KINDS,
    TINY,
    VOCABULARY,
    check_gradients,
    load,
    load_alone,
    registered,
    saved,
    whole_gradients,
)
from tests.integrations.test_expert_parallel import folder as folder

NUM_RANKS, NUM_EXPERTS, TOP_K, NUM_LAYERS = 2, 8, 2, TINY["num_hidden_layers"]
pytestmark = pytest.mark.ranks(NUM_RANKS)
LAYOUT = "own_batches"
# The second sequence ends with padding.
MASK = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]])


def batch_of(rank: int) -> tuple[Tensor, Tensor]:
    """Return ids [2, 5] and routes [10, layers, K] of a rank, with -1 in some tokens."""
    generator = torch.Generator().manual_seed(rank)
    ids = torch.randint(0, VOCABULARY, MASK.shape, generator=generator)
    routes = []
    for length in MASK.sum(dim=1).tolist():
        drawn = torch.rand(length, NUM_LAYERS, NUM_EXPERTS, generator=generator)
        chosen = drawn.argsort(dim=-1)[:, :, :TOP_K].to(torch.int16)
        chosen[-1] = -1
        routes.append(chosen)
    return ids, routes_of_batch(routes, MASK)


def weights_of(kind: str, logits: Tensor, ids: Tensor) -> Tensor:
    """Weigh given experts as the model's own router does."""
    if kind == "gpt_oss":
        return torch.softmax(logits.gather(1, ids), dim=1)
    scores = logits.sigmoid() if kind == "deepseek_v3" else torch.softmax(logits, dim=1)
    weights = scores.gather(1, ids)
    return weights / weights.sum(dim=1, keepdim=True) * (2.5 if kind == "deepseek_v3" else 1.0)


def forced(kind: str, routes: Tensor) -> Callable[..., tuple[Tensor, ...]]:
    """Return a hook of a router of transformers that replaces its choice by routes [T, K]."""

    def hook(_: nn.Module, __: object, outputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        logits, weights, ids = outputs
        is_given = routes >= 0
        ids = torch.where(is_given, routes.long(), ids)
        weights = torch.where(is_given, weights_of(kind, logits, ids), weights)
        return logits, weights, ids

    return hook


def force(kind: str, model: nn.Module, routes: Tensor) -> list[Callable[[], None]]:
    name = "router" if kind == "gpt_oss" else "gate"
    removers = []
    for index, layer in enumerate(model.model.layers):  # type: ignore[union-attr,arg-type]
        router = getattr(layer.mlp, name, None)
        if router is not None:
            removers.append(router.register_forward_hook(forced(kind, routes[:, index])).remove)
    return removers


def train(model: nn.Module, ids: Tensor) -> Tensor:
    labels = ids.masked_fill(MASK == 0, -100)
    loss = model(input_ids=ids, attention_mask=MASK, labels=labels).loss
    loss.backward()
    return loss.detach()


@pytest.mark.parametrize("kind", list(KINDS))
def test_loaded_model_trains_like_one_process_with_forced_ids(kind: str, folder: Path) -> None:
    path, alone, losses = saved(kind, folder), load_alone(kind, saved(kind, folder)), []
    alone.train()
    for rank in range(NUM_RANKS):
        ids, routes = batch_of(rank)
        removers = force(kind, alone, routes)
        losses.append(train(alone, ids))
        for remove in removers:
            remove()
    # FSDP takes the mean over batches.
    expected = {n: p.grad / NUM_RANKS for n, p in alone.named_parameters() if p.grad is not None}
    with registered():
        model = load(path, LAYOUT).train()
        model.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]
        ids, routes = batch_of(dist.get_rank())
        with replay_routes(model, routes) as replay:
            loss = train(model, ids)
        assert relative_error(loss, losses[dist.get_rank()]) <= FP32_TOLERANCE
        check_gradients(whole_gradients(model), expected)
        assert set(replay.disagreement()) == {1} if kind == "deepseek_v3" else {0, 1}
        for counts in replay.disagreement().values():
            assert counts.num_tokens == int(MASK.sum()) - len(MASK)


def test_recorded_routes_of_a_loaded_model_are_those_of_its_routers(folder: Path) -> None:
    path = saved("qwen3_moe", folder)
    alone, ids = load_alone("qwen3_moe", path), batch_of(dist.get_rank())[0]
    with torch.no_grad():
        logits = alone(input_ids=ids, output_router_logits=True).router_logits
    with registered(), torch.no_grad():
        model = load(path, LAYOUT)
        with record_routes(model) as record, watch_gates(model) as gates:
            model(input_ids=ids)
        for index, each in enumerate(logits):
            best = each.topk(TOP_K, dim=-1).indices
            assert torch.equal(record.routes()[:, index].long(), best)
            assert relative_error(gates[index].logits, each) <= FP32_TOLERANCE


def test_rank_without_data_and_bad_tokens_are_handled_in_a_loaded_model(folder: Path) -> None:
    path, rank = saved("qwen3_moe", folder), dist.get_rank()
    with registered():
        model = load(path, LAYOUT)
        ids, routes = batch_of(rank)
        with replay_routes(model, routes if rank == 0 else routes[:0]):
            if rank == 0:
                train(model, ids)
            else:
                idle_step(model)
        text = "layer 0 is called with 10 tokens, but routes have 9 left" if rank else "rank 1"
        with (
            torch.no_grad(),
            pytest.raises(EPError, match=text),
            replay_routes(model, routes[: 9 if rank else 10]),
        ):
            model(input_ids=ids)
        with replay_routes(model, routes), torch.no_grad():
            model(input_ids=ids)
