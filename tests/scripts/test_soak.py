"""500 rounds of random sizes, routings and delays in both modes; sums are exact."""

import random
import time

import pytest
import torch
from torch import Tensor

from epcomm import (
    DeepEPLowLatencyDispatcher,
    DeepEPNormalDispatcher,
    EPConfig,
    EPGroup,
    MoESpec,
    RowsDispatchOutput,
    TopKOutput,
)
from epcomm.ops.slots import pack

pytestmark = pytest.mark.slow

NUM_ROUNDS = 500
NUM_EXPERTS, TOP_K, HIDDEN_SIZE, MAX_TOKENS = 8, 3, 16, 12
# Seconds; one rank in ten rounds is so late, which is many times an undisturbed round.
DELAY_S = 0.005


def draw(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Draw whole numbers [T, H] and topk_ids [T, K] with masked entries.

    Numbers are below 2**19, so float32 holds their sums over K experts, which multiply by up to 8.
    """
    num_tokens = int(torch.randint(0, MAX_TOKENS + 1, (), generator=generator))
    x = torch.randint(0, 1 << 19, (num_tokens, HIDDEN_SIZE), generator=generator).float()
    ids = torch.rand(num_tokens, NUM_EXPERTS, generator=generator).argsort(1)[:, :TOP_K]
    ids[torch.rand(ids.shape, generator=generator) < 0.2] = -1
    return x, ids


def compute(out: RowsDispatchOutput, first_expert: int) -> Tensor:
    """Return the results of experts, which multiply by 1 + their number, and NaN in padding."""
    slots = pack(out.hidden_states.data, out.index)
    results = torch.full_like(slots, float("nan"))
    starts, counts = out.index.first_slot.tolist(), out.num_tokens_per_expert.tolist()
    for expert, (start, count) in enumerate(zip(starts, counts, strict=False), first_expert):
        results[start : start + count] = slots[start : start + count] * (1 + expert)
    return results


@pytest.mark.ranks(4)
def test_soak(group: EPGroup) -> None:
    config = EPConfig(max_tokens_per_rank=MAX_TOKENS)
    spec = MoESpec(
        hidden_size=HIDDEN_SIZE, num_experts=NUM_EXPERTS, top_k=TOP_K, dtype=torch.float32
    )
    with torch.no_grad():
        dispatchers = [
            DeepEPNormalDispatcher(group, spec, config),
            DeepEPLowLatencyDispatcher(group, spec, config),
        ]
        delays, generator = random.Random(group.rank), torch.Generator().manual_seed(group.rank)
        first_expert = group.rank * NUM_EXPERTS // group.world_size
        for round_number in range(NUM_ROUNDS):
            if delays.random() < 0.1:
                time.sleep(DELAY_S)
            x, ids = draw(generator)
            dispatcher = dispatchers[round_number % 2]
            topk = TopKOutput(topk_ids=ids, topk_weights=torch.ones(ids.shape))
            out = dispatcher.dispatch(x, topk)
            y = dispatcher.combine(out.combine_input(compute(out, first_expert)))
            # An id of -1 adds nothing.
            assert torch.equal(y, x * (1 + ids).sum(1, keepdim=True)), f"round {round_number}"
        dispatchers[1].check()
