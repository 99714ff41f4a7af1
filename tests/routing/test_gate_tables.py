"""Load and replicas by the gate kernel equal an oracle in plain Python, and the reference."""

from collections import Counter

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from epcomm.config import Router
from epcomm.kernels.routing import gate
from epcomm.records import ReplicaTable
from epcomm.routing import presets, route
from epcomm.routing.choose import choose_router
from epcomm.routing.triton_gating import TritonGate
from tests.routing.calls import Operators

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SPEC = presets.qwen3_moe(top_k=3, renormalize=True)
# Logical expert -> its physical ids; expert 5 is nowhere.
COPIES = {0: [7], 1: [1, 8, 9], 2: [0, 3], 3: [2], 4: [6, 5, 4, 10], 5: []}
NUM_EXPERTS, FIRST = len(COPIES), 2


def table_of(*, counts_calls: bool) -> ReplicaTable:
    most = max(len(copies) for copies in COPIES.values())
    rows = [copies + [-1] * (most - len(copies)) for copies in COPIES.values()]
    numbers = [len(copies) for copies in COPIES.values()]
    calls = torch.zeros((), dtype=torch.int64, device=DEVICE)
    return ReplicaTable(
        replicas=torch.tensor(rows, dtype=torch.int32, device=DEVICE),
        num_replicas=torch.tensor(numbers, dtype=torch.int32, device=DEVICE),
        calls=calls if counts_calls else None,
        first=FIRST,
    )


def empty_load() -> Tensor:
    return torch.zeros(3, NUM_EXPERTS, dtype=torch.int64, device=DEVICE)


def physical(logical: list[list[int]], call: int) -> list[list[int]]:
    def choose(token: int, expert: int) -> int:
        copies = COPIES.get(expert, [])
        return copies[(FIRST + token + call) % len(copies)] if copies else -1

    return [[choose(token, each) for each in ids] for token, ids in enumerate(logical)]


def logits_of(num_tokens: int) -> Tensor:
    generator = torch.Generator().manual_seed(num_tokens)
    return torch.randn(num_tokens, NUM_EXPERTS, generator=generator).to(DEVICE)


@pytest.mark.parametrize("router", [Router.TRITON, Router.REFERENCE])
def test_load_and_replicas_follow_from_the_logical_experts(router: Router) -> None:
    choice = choose_router(router, SPEC, num_experts=NUM_EXPERTS, device=DEVICE, where="rank 0")
    table, load = table_of(counts_calls=True), empty_load()
    expected: Counter[int] = Counter()
    # 6000 tokens are more than one program has, so several would count the call; a call without
    # tokens does not count.
    for call, num_tokens in ((0, 5), (1, 0), (1, 1), (2, 6000)):
        logits = logits_of(num_tokens)
        logical = route(logits, SPEC).topk_ids.tolist()
        found = choice.route(
            logits, correction_bias=None, hidden_states=logits, load=load, replicas=table
        )
        assert found.is_physical
        assert found.topk_ids.tolist() == physical(logical, call)
        expected.update(each for ids in logical for each in ids)
        assert table.calls.item() == (call + bool(num_tokens)) << 32
    assert load.sum(0).tolist() == [expected[each] for each in range(NUM_EXPERTS)]


def test_scores_load_and_replicas_are_one_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    choice = choose_router(
        Router.TRITON, SPEC, num_experts=NUM_EXPERTS, device=DEVICE, where="rank 0"
    )
    logits, table, load = logits_of(5), table_of(counts_calls=True), empty_load()
    launches: list[object] = []
    monkeypatch.setattr(gate, "launch", lambda kernel, *_, **__: launches.append(kernel))
    with Operators() as seen:
        choice.route(logits, correction_bias=None, hidden_states=logits, load=load, replicas=table)
    assert launches == [gate._route_tokens_kernel]
    # The call allocates ids and weights, and nothing else.
    assert seen.names == ["aten.new_empty.default"] * 2


def test_without_a_number_of_calls_each_call_chooses_alike() -> None:
    route_by_gate, table = TritonGate(SPEC, NUM_EXPERTS), table_of(counts_calls=False)
    logits = logits_of(6)
    found = [route_by_gate(logits, correction_bias=None, replicas=table).topk_ids for _ in range(2)]
    assert found[0].tolist() == physical(route(logits, SPEC).topk_ids.tolist(), 0)
    assert torch.equal(*found)


def test_gradients_are_of_logical_experts() -> None:
    route_by_gate, grads = TritonGate(SPEC, NUM_EXPERTS), []
    for table in (table_of(counts_calls=True), None):
        logits = logits_of(9).requires_grad_()
        weights = route_by_gate(logits, correction_bias=None, replicas=table).topk_weights
        (weights * torch.arange(1, 4, device=DEVICE)).sum().backward()
        grads.append(logits.grad)
    assert torch.equal(*grads)
