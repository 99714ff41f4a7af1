from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from epcomm import (
    BackendUnavailable,
    ConfigError,
    EPConfig,
    EPError,
    EPGroup,
    EPStats,
    ExpertParallelMoE,
)
from epcomm.blocks import BlockLayout
from epcomm.buffers.traffic import BufferTraffic
from epcomm.dispatchers.dispatcher import Dispatcher
from epcomm.runners.grouped_mm import GroupedMMRunner
from epcomm.stats import gather_expert_slots
from epcomm.testing.layer_suite import FP32_TOLERANCE
from epcomm.testing.oracle import relative_error
from tests.cases.blocks import BLOCKS, HIDDEN, NUM_EXPERTS, qwen3_moe
from tests.cases.operators import expect_gating_calls
from tests.cases.recorder import Recorder

# Only routed experts; tests/integrations has all kinds of block.
PLAIN = ["qwen3_moe", "mixtral"]
NUM_RANKS = 2
pytestmark = pytest.mark.ranks(NUM_RANKS)
NUM_LOCAL = NUM_EXPERTS // NUM_RANKS


def tokens(rank: int, device: torch.device) -> Tensor:
    """Return tokens [B, S, H], where B differs by rank."""
    generator = torch.Generator().manual_seed(1 + rank)
    return torch.randn(2 + rank, 3, HIDDEN, generator=generator).to(device).requires_grad_()


@pytest.mark.parametrize("name", PLAIN)
def test_route_gives_the_logits_and_experts_of_the_block(name: str, group: EPGroup) -> None:
    block = BLOCKS[name]().to(group.device)
    moe = ExpertParallelMoE.from_transformers(block, group)
    x = tokens(group.rank, group.device)
    logits, topk = moe.route(x)
    wanted_logits, wanted_weights, wanted_ids = block.get_submodule("gate")(x)
    assert torch.equal(logits, wanted_logits)
    assert torch.equal(topk.topk_ids, wanted_ids)
    torch.testing.assert_close(topk.topk_weights, wanted_weights)
    (logits.logsumexp(1).sum() + topk.topk_weights.sum()).backward()
    assert x.grad.any()


def test_tokens_keep_their_shape(group: EPGroup) -> None:
    block = qwen3_moe().to(group.device)
    moe = ExpertParallelMoE.from_transformers(block, group)
    x = tokens(group.rank, group.device).detach()
    y = moe(x)
    assert relative_error(y, block(x)) <= FP32_TOLERANCE
    x = x[0, 0]
    flat = moe(x.view(1, HIDDEN))
    assert torch.equal(moe(x), flat[0])
    assert moe(x.new_empty(0, 5, HIDDEN)).shape == (0, 5, HIDDEN)


# Experts of each token, by rank; rank 0 owns experts 0 to 3, rank 1 the others.
CHOSEN = [[(0, 1), (0, 4), (7, 4)], [(1, 5)]]
# Rank 0 receives tokens 0 and 1 of rank 0 and the token of rank 1, with 2, 1 and 1 slots; rank 1
# receives tokens 1 and 2 of rank 0 and its own token, with 1, 2 and 1.
NUM_ROWS, NUM_SLOTS = (3, 3), (4, 4)
# Slots by local expert: expert 0 has tokens 0 and 1 of rank 0, expert 1 token 0 and that of rank 1.
LOADS = [[2, 2, 0, 0], [2, 1, 0, 1]]
# Tokens sent to the other rank, and rows of the other rank that are returned.
NUM_SENT, NUM_RETURNED = (2, 1), (1, 2)
# Dispatch: 16 float32 elements, K ids, K weights. Combine: K scalars, and a gap up to 16 B.
ROW_BYTES, COMBINE_BYTES, SCALARS_BYTES = 64 + 16, 64, 64 + 16
# A header and the slots of up to 128 experts, int64.
HEADER_BYTES = 8 * (11 + 128)


def test_stats_equal_numbers_counted_by_hand(group: EPGroup) -> None:
    rank = group.rank
    block = qwen3_moe().to(group.device)
    with torch.no_grad():
        block.get_parameter("gate.weight").copy_(torch.eye(NUM_EXPERTS, HIDDEN))
    config = EPConfig(mode="normal", backend="collective")
    moe = ExpertParallelMoE.from_transformers(block, group, config)
    assert moe.stats() == EPStats()

    x = torch.zeros(len(CHOSEN[rank]), HIDDEN, device=group.device)
    for token, experts in enumerate(CHOSEN[rank]):
        x[token, list(experts)] = 1.0
    with torch.no_grad():
        moe(x)
    forward = EPStats(
        num_calls=1,
        num_tokens=len(CHOSEN[rank]),
        num_rows=NUM_ROWS[rank],
        num_slots=NUM_SLOTS[rank],
        max_slots=NUM_SLOTS[rank],
        traffic=BufferTraffic(
            dispatch_bytes=NUM_SENT[rank] * ROW_BYTES,
            combine_bytes=NUM_RETURNED[rank] * COMBINE_BYTES,
            control_bytes=HEADER_BYTES,
        ),
    )
    first = moe.stats()
    assert first == forward

    moe(x.requires_grad_()).sum().backward()
    # Backward sends dy without ids, and returns dx with K gradients of weights.
    assert moe.stats() == EPStats(
        num_calls=2,
        num_tokens=2 * forward.num_tokens,
        num_rows=2 * forward.num_rows,
        num_slots=2 * forward.num_slots,
        max_slots=forward.max_slots,
        traffic=BufferTraffic(
            dispatch_bytes=NUM_SENT[rank] * (2 * ROW_BYTES + 64),
            combine_bytes=NUM_RETURNED[rank] * (2 * COMBINE_BYTES + SCALARS_BYTES),
            control_bytes=2 * HEADER_BYTES,
        ),
    )
    assert moe.stats().num_tokens_per_expert == tuple(2 * load for load in LOADS[rank])
    # The statistics are read for the first time here, but hold the counts of the first call.
    assert first.num_tokens_per_expert == tuple(LOADS[rank])
    # Four slots of four experts.
    assert first.imbalance == 2.0
    assert gather_expert_slots(first, group).tolist() == LOADS
    assert EPStats().imbalance == 1.0


def test_slots_of_padding_are_not_counted(monkeypatch: pytest.MonkeyPatch, group: EPGroup) -> None:
    config = EPConfig(mode="normal", backend="collective", runner="grouped_mm")
    monkeypatch.setattr(GroupedMMRunner, "expert_alignment", 16)
    moe = ExpertParallelMoE.from_transformers(qwen3_moe().to(group.device), group, config)
    moe(tokens(group.rank, group.device))
    all_ids = [moe.route(tokens(rank, group.device))[1].topk_ids for rank in range(NUM_RANKS)]
    mine = sum(int((ids // NUM_LOCAL == group.rank).sum()) for ids in all_ids)
    assert moe.stats().num_slots == mine


@pytest.mark.parametrize("mode", ["normal", "standard"])
def test_traffic_stays_below_what_the_plan_promises(mode: str, group: EPGroup) -> None:
    config = EPConfig(mode=mode)
    block = qwen3_moe(hidden_size=36, num_experts_per_tok=3).to(group.device)
    moe = ExpertParallelMoE.from_transformers(block, group, config)
    num_tokens = 5
    moe(torch.randn(num_tokens, 36, device=group.device))
    most = moe.experts.phases.prefill.plan.max_bytes_per_token()
    sent = moe.stats().traffic
    assert sent.dispatch_bytes <= num_tokens * most["dispatch"]
    assert sent.combine_bytes <= num_tokens * NUM_RANKS * most["combine"]


def test_explain_names_plan_and_runner(group: EPGroup) -> None:
    block = qwen3_moe(moe_intermediate_size=6).to(group.device)
    config = EPConfig(mode="normal", backend="collective")
    text = ExpertParallelMoE.from_transformers(block, group, config).explain()
    assert text.startswith("mode normal on backend collective (CollectiveBuffer), 2 ranks")
    assert text.splitlines()[-2:] == [
        "runner reference",
        "rejected runner grouped_mm: intermediate_size is 6, expected a multiple of 4",
    ]


# Four experts per group, enough for the operator.
GATED: dict[str, Callable[[], nn.Module]] = {
    "deepseek_v3": partial(BLOCKS["deepseek_v3"], n_routed_experts=16),
    "afmoe": BLOCKS["afmoe"],
}
UNGATED = partial(BLOCKS["deepseek_v3"], norm_topk_prob=False, n_group=1, topk_group=1)


def routed_block(router: str, make: Callable[[], nn.Module], group: EPGroup) -> ExpertParallelMoE:
    config = EPConfig(router=router)
    return ExpertParallelMoE.from_transformers(make().to(group.device), group, config)


@pytest.mark.usefixtures("npu_operators")
@pytest.mark.parametrize("name", GATED)
def test_block_that_the_gating_operator_routes_equals_the_reference(
    name: str, group: EPGroup
) -> None:
    x = tokens(group.rank, group.device)
    reference = routed_block("reference", GATED[name], group)
    moe = routed_block("ascend", GATED[name], group)
    assert moe.explain().splitlines() == [
        *reference.explain().splitlines(),
        "routing by npu_moe_gating_top_k, with gradients by the reference",
    ]
    with torch.no_grad(), expect_gating_calls(0):
        expected, (_, wanted) = reference(x), reference.route(x)
    with torch.no_grad(), expect_gating_calls(2):
        y, (_, topk) = moe(x), moe.route(x)
    assert relative_error(y, expected) <= FP32_TOLERANCE
    assert torch.equal(topk.topk_ids, wanted.topk_ids)
    assert topk.topk_weights.dtype is torch.float32
    assert relative_error(topk.topk_weights, wanted.topk_weights) <= FP32_TOLERANCE

    twin = tokens(group.rank, group.device)
    with expect_gating_calls(0):
        moe(x).square().sum().backward()
    reference(twin).square().sum().backward()
    pairs = {"dx": (x.grad, twin.grad)}
    theirs = dict(reference.named_parameters())
    pairs |= {key: (p.grad, theirs[key].grad) for key, p in moe.named_parameters()}
    trained = {key for key, (actual, _) in pairs.items() if actual is not None}
    assert {"dx", "experts.gate_up_proj"} <= trained
    assert any(key.endswith(("gate.weight", "router.gate.weight")) for key in trained)
    for key, (actual, expected) in pairs.items():
        assert (actual is None) == (expected is None), key
        assert actual is None or torch.equal(actual, expected), key


@pytest.mark.usefixtures("npu_operators")
def test_routing_that_the_operator_cannot_say_is_the_references(group: EPGroup) -> None:
    with torch.no_grad():
        x = tokens(group.rank, group.device)
        moe = routed_block("ascend", UNGATED, group)
        with expect_gating_calls(0):
            y = moe(x)
        assert torch.equal(y, routed_block("auto", UNGATED, group)(x))
        assert moe.explain().splitlines()[-1] == (
            "routing by the reference: npu_moe_gating_top_k always renormalises sigmoid weights"
        )


def test_absent_router_says_what_to_import(monkeypatch: pytest.MonkeyPatch, group: EPGroup) -> None:
    # Use another name, because another test of this process may have registered the real one.
    monkeypatch.setattr("epcomm.routing.ascend_gating.OPERATOR", "npu_gating_of_no_version")
    message = f"not on {group.device.type}; import torch_npu first, .*{group.where}"
    with pytest.raises(BackendUnavailable, match=message):
        routed_block("ascend", BLOCKS["afmoe"], group)
    assert routed_block("auto", BLOCKS["afmoe"], group).routing.top_k


def test_missing_part_and_another_top_k_are_named(group: EPGroup) -> None:
    whole = ExpertParallelMoE.from_transformers(qwen3_moe().to(group.device), group)
    routing, experts = whole.routing, whole.experts
    message = "ExpertParallelMoE: gate is NoneType, expected its router"
    with pytest.raises(ConfigError, match=message):
        ExpertParallelMoE(routing=routing, experts=experts, parts={})
    layout = BlockLayout(correction_bias="gate.bias")
    message = "ExpertParallelMoE: gate.bias is NoneType, expected its correction_bias"
    parts = {"gate": whole.get_submodule("gate")}
    with pytest.raises(ConfigError, match=message):
        ExpertParallelMoE(routing=routing, experts=experts, parts=parts, layout=layout)
    routing = replace(routing, top_k=experts.top_k + 1)
    message = f"top_k of routing is {routing.top_k}, expected {experts.top_k} as top_k of exp"
    with pytest.raises(ConfigError, match=message):
        ExpertParallelMoE(routing=routing, experts=experts, parts=parts)


def test_runner_that_cannot_compute_the_experts_is_refused_by_name(group: EPGroup) -> None:
    block = qwen3_moe(moe_intermediate_size=6).to(group.device)
    with pytest.raises(BackendUnavailable, match="runner grouped_mm cannot compute these"):
        ExpertParallelMoE.from_transformers(block, group, EPConfig(runner="grouped_mm"))
    with pytest.raises(ConfigError, match="runner is 'fastest', expected auto or one of"):
        ExpertParallelMoE.from_transformers(block, group, EPConfig(runner="fastest"))


@pytest.mark.parametrize("backend", ["collective", "shared_memory"])
@pytest.mark.parametrize("name", ["qwen2_moe", "deepseek_v3"])
def test_shared_experts_run_while_rows_are_sent(
    name: str, backend: str, monkeypatch: pytest.MonkeyPatch, group: EPGroup
) -> None:
    recorder = Recorder(monkeypatch)
    config = EPConfig(backend=backend, mode="normal", max_tokens_per_rank=64)
    moe = ExpertParallelMoE.from_transformers(BLOCKS[name](), group, config)
    shared = moe.get_submodule(str(moe._layout.shared_experts))

    def results() -> list[Tensor]:
        """Return y and all gradients."""
        moe.zero_grad()
        x = tokens(group.rank, group.device)
        y = moe(x)
        (y * y).sum().backward()
        given = [x.grad, *(each.grad for each in moe.parameters())]
        return [y.detach(), *(each.clone() for each in given if each is not None)]

    with monkeypatch.context() as patch:
        patch.setattr(Dispatcher, "is_asynchronous", False)
        expected = results()
    found = results()
    assert len(found) == len(expected) > 3
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one, other)
    with torch.no_grad():
        assert torch.equal(moe(tokens(group.rank, group.device)), expected[0])

    recorder.ended.clear()
    recorder.on_caller = 0
    hooks = [
        shared.register_forward_hook(lambda *_: recorder.compute_until("dispatch", 1)),
        # The first combine is that of forward, the second returns the gradients of rows.
        shared.register_full_backward_hook(lambda *_: recorder.compute_until("combine", 2)),
    ]
    results()
    for hook in hooks:
        hook.remove()
    assert recorder.on_caller == 0


@pytest.mark.ranks(NUM_RANKS)
def test_failure_of_shared_experts_is_reported_to_the_ranks_that_combine(group: EPGroup) -> None:
    moe = ExpertParallelMoE.from_transformers(BLOCKS["qwen2_moe"](), group)
    x = tokens(group.rank, group.device)
    y = moe(x)
    if group.rank == 1:

        def fail(*_: object) -> None:
            raise OSError("no memory")

        hook = moe.get_submodule("shared_expert").register_forward_hook(fail)
        with pytest.raises(OSError, match="no memory"):
            moe(x)
        hook.remove()
    else:
        with pytest.raises(EPError, match="on rank 1"):
            moe(x)
    again = moe(x)
    assert torch.equal(again, y)
