"""A device graph of a layer is correct after its experts have moved, also for other tokens.

    MULTI_RANK_BACKEND=nccl scripts/launch_multi_rank.sh 2 tests/placement/test_graphs.py

CPU ranks have no graphs: there test_rebalance.py compares the addresses that a graph would keep.
"""

import os
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from epcomm import EPConfig, EPGroup, ExpertParallelExperts, ExpertParallelMoE
from epcomm.bench.timing import captured
from epcomm.testing.buffer_suite import BATCH_SPECS
from epcomm.testing.data import make_batch, make_weights
from epcomm.testing.oracle import relative_error, run_oracle
from tests.multi_rank import BACKEND_ENV, GPU_BACKENDS
from tests.placement.layers import any_placement

SPEC = replace(BATCH_SPECS["bf16"], hidden_size=256)
# Calls in a graph: an even number, so that it ends with the receive buffer with which it began.
CALLS = 2
# Roundings to bfloat16 of both products, the activation, the sum of a rank and y.
TOLERANCE = 5 * 2**-8


def needs_gpus(test: Callable[..., None]) -> Callable[..., None] | None:
    return test if os.environ.get(BACKEND_ENV) in GPU_BACKENDS else None


@needs_gpus
@pytest.mark.ranks(2, 4)
def test_a_layer_captured_before_its_experts_move_computes_rightly_after(group: EPGroup) -> None:
    with torch.no_grad():
        rank, world_size, device = group.rank, group.world_size, group.device
        weights = make_weights(SPEC, world_size, intermediate_size=128, device=device)
        layer = ExpertParallelExperts(
            weights, group, config_for(group), top_k=SPEC.num_topk(world_size)
        )
        first = make_batch(SPEC, rank, world_size).to(device)
        replay, y = captured_calls(lambda: layer(first.x, first.topk))
        for number in range(3):
            layer.rebalance(any_placement(layer, number))
            batches = [
                make_batch(SPEC, each, world_size, number=number).to(device)
                for each in range(world_size)
            ]
            for name, tensor in vars(batches[rank]).items():
                getattr(first, name).copy_(tensor)
            y.fill_(torch.nan)
            replay()
            with torch.enable_grad():
                expected = run_oracle(batches, weights).y[rank]
            assert relative_error(y, expected) <= TOLERANCE
        layer.check()


@needs_gpus
@pytest.mark.ranks(2, 4)
def test_a_captured_block_goes_on_to_choose_copies_and_to_count(group: EPGroup) -> None:
    with torch.no_grad():
        # The import takes seconds, and CPU ranks do not need it.
        from tests.cases.blocks import NUM_EXPERTS, qwen3_moe

        block = qwen3_moe(hidden_size=SPEC.hidden_size, moe_intermediate_size=128)
        block.to(group.device, torch.bfloat16)
        config = replace(config_for(group), record_load=True)
        moe = ExpertParallelMoE.from_transformers(block, group, config)
        torch.manual_seed(group.rank)
        x = torch.randn(1, 16, SPEC.hidden_size, device=group.device).bfloat16()
        replay, y = captured_calls(lambda: moe(x))
        for number in range(3):
            moe.experts.rebalance(any_placement(moe.experts, number))
            x.normal_()
            before = moe.load_table.sum(0)
            y.fill_(torch.nan)
            replay()
            # The reference is rounded as often as y.
            assert relative_error(y, block(x)) <= 2 * TOLERANCE
            ids = moe.route(x)[1].topk_ids
            counted = ids.flatten().bincount(minlength=NUM_EXPERTS) * CALLS
            assert torch.equal(moe.load_table.sum(0) - before, counted)


def config_for(group: EPGroup) -> EPConfig:
    return EPConfig(
        mode="low_latency",
        backend="nvlink",
        redundant_experts=group.world_size,
        max_tokens_per_rank=64,
    )


def captured_calls(call: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
    """Return a function that replays CALLS calls, and the result of the last."""
    results: list[Tensor] = []
    graph = captured(lambda: results.extend(call() for _ in range(CALLS)))
    return graph.replay, results[-1]
