"""The gate kernel against the reference: every preset, random routings, ties, odd logits.

Its load and replicas equal an oracle in plain Python.
"""

import math
import random
from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from epcomm.config import Router
from epcomm.kernels.routing import gate
from epcomm.records import ReplicaTable, TopKOutput
from epcomm.routing import RoutingSpec, presets, route
from epcomm.routing.choose import choose_router
from epcomm.routing.triton_gating import MAX_EXPERTS, MAX_TOP_K, TritonGate
from tests.cases.operators import Operators
from tests.routing.cases import PRESETS, bias_for, every_spec, pick_spec, spread_logits
from tests.routing.gate_comparison import Comparison, compare

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
MOST_EXCUSED = 1e-4


def random_logits(num_tokens: int, num_experts: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_tokens, num_experts, generator=generator) * 2


def routed(logits: Tensor, spec: RoutingSpec, bias: Tensor | None) -> TopKOutput:
    gate = TritonGate(spec, logits.shape[1])
    assert gate.takes(logits)
    return gate(logits, correction_bias=bias)


def compared(logits: Tensor, spec: RoutingSpec, bias: Tensor | None) -> Comparison:
    logits, bias = logits.to(DEVICE), None if bias is None else bias.to(DEVICE)
    return compare(routed(logits, spec, bias), logits, spec, bias)


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_routes_as_the_reference(name: str) -> None:
    spec = PRESETS[name]
    found = compared(random_logits(512, 32, 1), spec, bias_for(spec, 32))
    assert not found.wrong
    assert not found.num_excused


@pytest.mark.filterwarnings("ignore::RuntimeWarning:triton")
@every_spec
def test_odd_logits_are_ranked_and_weighed_as_by_the_reference(spec: RoutingSpec) -> None:
    # 20 experts, 5 in a group: neither is a power of two.
    logits = torch.cat((spread_logits(64, 20), torch.full((1, 20), 0.7)))
    logits[0, ::2] = math.nan
    logits[1, 3:] = math.nan
    logits[2] = math.nan
    logits[3, ::3], logits[3, 1::3] = -math.inf, math.inf
    logits[4] = -math.inf
    logits[5, ::2], logits[5, 1::2] = 300.0, -300.0
    logits[6] = -torch.linspace(60.0, 110.0, 20)
    # Scores that are saturated and equal, though their logits are not.
    logits[7] = torch.linspace(30.0, 60.0, 20)
    bias = bias_for(spec, 20)
    if bias is not None and spec.correction_bias == "selection":
        bias[4] = -math.inf
    found, expected = (
        routed(logits.to(DEVICE), spec, None if bias is None else bias.to(DEVICE)),
        route(logits, spec, correction_bias=bias),
    )
    assert torch.equal(found.topk_ids.cpu(), expected.topk_ids)
    torch.testing.assert_close(
        found.topk_weights.cpu(), expected.topk_weights, rtol=2e-6, atol=1e-44
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_logits_and_rows_apart_are_read_as_they_are(dtype: torch.dtype) -> None:
    spec = PRESETS["deepseek_v3"]
    # Ties are common among logits of so few bits; columns of something larger, and rows too.
    wide = random_logits(256, 80, 2).to(dtype)
    bias = bias_for(spec, 32)
    for logits in (wide[:, 16:48], wide[:, ::2][:, :32], wide[:32, :32].T):
        found = compared(logits, spec, bias)
        assert not found.wrong
        assert not found.num_excused


def test_no_tokens() -> None:
    assert routed(torch.zeros(0, 32), PRESETS["qwen3_moe"], None).topk_ids.shape == (0, 8)


@every_spec
def test_gradients_are_those_of_the_reference(spec: RoutingSpec) -> None:
    logits = spread_logits(6, 16)
    logits[1, ::2] = math.nan
    logits[2, ::3] = -math.inf
    logits[3] = math.nan
    bias = bias_for(spec, 16)
    grads = []
    for is_ours in (True, False):
        leaf = logits.to(DEVICE).requires_grad_()
        learned = None if bias is None else bias.to(DEVICE).requires_grad_()
        if is_ours:
            gate = TritonGate(spec, 16)
            weights = gate(leaf, correction_bias=learned).topk_weights
        else:
            weights = route(leaf, spec, correction_bias=learned).topk_weights
        factors = torch.arange(1, spec.top_k + 1, device=DEVICE)
        (weights * factors).sum().backward()
        grads.append((leaf.grad, None if learned is None else learned.grad))
    for ours, theirs in zip(*grads, strict=True):
        assert (ours is None) == (theirs is None)
        if ours is not None and theirs is not None:
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-7)


def test_only_what_the_kernel_reads_is_taken() -> None:
    gate = TritonGate(PRESETS["mixtral"], 8)
    assert gate.takes(torch.zeros(1, 8, dtype=torch.float16))
    assert not gate.takes(torch.zeros(1, 8, dtype=torch.float64))


@pytest.mark.slow
def test_random_routings_equal_the_reference() -> None:
    """Compare 200 tokens of each of 500 routings; 1 in 10,000 tokens may differ by rounding.

    Those that are have a softcap of half a unit, which presses logits of several units onto a few
    numbers: where torch's exp of one of these lies beside the middle of two float32, many tokens
    have a border there.
    """
    draw = random.Random(0)
    found = []
    for seed in range(500):
        num_experts = draw.choice([8, 12, 40, 64, 96])
        spec = pick_spec(draw.choice, num_experts, MAX_TOP_K)
        logits = random_logits(200, num_experts, seed) * draw.choice([0.5, 1.0, 3.0])
        logits = logits.to(draw.choice([torch.float32, torch.bfloat16, torch.float16]))
        logits[::7, draw.randrange(num_experts)] = draw.choice([math.nan, math.inf, -math.inf])
        each = compared(logits, spec, bias_for(spec, num_experts))
        assert not each.wrong, (seed, spec, num_experts, each)
        found.append(each)
    num_excused = sum(each.num_excused for each in found)
    assert num_excused <= MOST_EXCUSED * sum(each.num_tokens for each in found)


@pytest.mark.slow
def test_the_largest_gate_routes_as_the_reference() -> None:
    spec = replace(PRESETS["deepseek_v3"], top_k=MAX_TOP_K, num_groups=32, topk_groups=4)
    found = compared(random_logits(64, MAX_EXPERTS, 4), spec, bias_for(spec, MAX_EXPERTS))
    assert not found.wrong


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
    choice = choose_router(router, SPEC, num_experts=NUM_EXPERTS, device=DEVICE, where="")
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
    choice = choose_router(Router.TRITON, SPEC, num_experts=NUM_EXPERTS, device=DEVICE, where="")
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
