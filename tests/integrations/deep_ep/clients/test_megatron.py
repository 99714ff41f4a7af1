"""Unmodified Megatron-core runs on the drop-in: its fused calls and its flex token dispatcher."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.integrations.deep_ep.clients.batches import HIDDEN, NUM_EXPERTS, TOP_K, Batch, needs
from tests.integrations.deep_ep.devices import here
from tests.integrations.deep_ep.v2_ranks import world

NUM_RANKS = 2
NUM_LOCAL = NUM_EXPERTS // NUM_RANKS

# Importing Megatron takes seconds.
pytestmark = [pytest.mark.slow, needs("megatron-core")]


@pytest.mark.ranks(NUM_RANKS)
@pytest.mark.parametrize("is_async", [False, True])
def test_fused_dispatch_and_combine_and_their_backward(is_async: bool) -> None:
    from megatron.core.transformer.moe import fused_a2a

    group, batch = world(), Batch.of_rank(3 + 2 * dist.get_rank())
    for _ in range(2):
        fused_a2a.set_deepep_num_sms(24)
        rows, ids, weights, counts, handle = fused_a2a.fused_dispatch(
            batch.x, batch.ids, batch.weights, NUM_EXPERTS, group, is_async, is_async
        )
        assert counts.sum() == (ids >= 0).sum()
        factors = torch.where(ids >= 0, 1.0 + ids + NUM_LOCAL * dist.get_rank(), 0.0)
        results = rows * (weights * factors).sum(1, keepdim=True).bfloat16()
        y, _ = fused_a2a.fused_combine(results, group, handle, is_async, is_async)
        batch.x.grad = batch.weights.grad = None
        batch.check_backward(y)


def flex_dispatcher() -> Any:  # noqa: ANN401 - of a package without annotations
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.transformer.moe.token_dispatcher import MoEFlexTokenDispatcher
    from megatron.core.transformer.transformer_config import TransformerConfig

    config = TransformerConfig(
        num_layers=1,
        hidden_size=HIDDEN,
        num_attention_heads=1,
        num_moe_experts=NUM_EXPERTS,
        moe_router_topk=TOP_K,
        moe_router_dtype="fp32",
        moe_token_dispatcher_type="flex",
        moe_flex_dispatcher_backend="deepep",
        expert_model_parallel_size=NUM_RANKS,
        bf16=True,
        params_dtype=torch.bfloat16,
    )
    groups, rank = ProcessGroupCollection(), dist.get_rank()
    groups.ep = groups.tp_ep = world()
    alone = [dist.new_group([each]) for each in range(NUM_RANKS)][rank]
    assert isinstance(alone, dist.ProcessGroup)
    groups.expt_tp = alone
    local = list(range(NUM_LOCAL * rank, NUM_LOCAL * (rank + 1)))
    return MoEFlexTokenDispatcher(NUM_LOCAL, local, config, groups)


@pytest.mark.ranks(NUM_RANKS)
def test_flex_token_dispatcher_forward_and_backward() -> None:
    dispatcher, batch = flex_dispatcher(), Batch.of_rank(6)
    # Megatron's format: routing as a boolean map, tokens by (sequence, batch).
    routing_map = torch.zeros(6, NUM_EXPERTS, dtype=torch.bool, device=here())
    routing_map.scatter_(1, batch.ids, True)
    probs = torch.zeros(6, NUM_EXPERTS, device=here()).scatter(1, batch.ids, batch.weights)
    hidden_states = batch.x.view(3, 2, HIDDEN)

    rows, probs = dispatcher.dispatch_preprocess(hidden_states, routing_map, probs)
    rows, probs = dispatcher.token_dispatch(rows, probs)
    rows, counts, probs = dispatcher.dispatch_postprocess(rows, probs)
    assert int(counts.sum()) == len(rows) == len(probs)
    first = NUM_LOCAL * dist.get_rank()
    factors = 1.0 + first + torch.arange(NUM_LOCAL, device=here())
    factors = factors.repeat_interleave(counts.to(here()))
    results = rows * (probs * factors).unsqueeze(1).bfloat16()
    results = dispatcher.combine_preprocess(results)
    results = dispatcher.token_combine(results)
    y: Tensor = dispatcher.combine_postprocess(results)

    assert y.shape == hidden_states.shape
    batch.check_backward(y.view(6, HIDDEN))
