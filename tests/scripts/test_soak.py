"""500 rounds of random sizes, routings and delays in both modes; payloads are bit-equal."""

import random
import time

import pytest
import torch

from epcomm import (
    DeepEPLowLatencyDispatcher,
    DeepEPNormalDispatcher,
    EPConfig,
    EPGroup,
    MoESpec,
    RowsDispatchOutput,
    TopKOutput,
)

pytestmark = pytest.mark.slow

NUM_ROUNDS = 500
NUM_EXPERTS, TOP_K, HIDDEN_SIZE, MAX_TOKENS = 8, 3, 16, 12
# Seconds; one rank in ten rounds is so late, which is many times an undisturbed round.
DELAY_S = 0.005


def payload(rank: int, round_number: int, num_tokens: int) -> torch.Tensor:
    """Make whole numbers [T, H] below 2**20, exact in float32, from rank, token and round."""
    rows = torch.arange(num_tokens).unsqueeze(1) * 8 + rank
    columns = torch.arange(HIDDEN_SIZE) + round_number * 64
    return ((rows * 524287 + columns * 8191) % (1 << 20)).float()


def batch(rank: int, round_number: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Make the payload [T, H] and topk_ids [T, K], with masked entries, of any rank in any
    round."""
    generator = torch.Generator().manual_seed(round_number * 64 + rank)
    num_tokens = int(torch.randint(0, MAX_TOKENS + 1, (), generator=generator))
    ids = torch.rand(num_tokens, NUM_EXPERTS, generator=generator).argsort(1)[:, :TOP_K]
    ids[torch.rand(ids.shape, generator=generator) < 0.2] = -1
    return payload(rank, round_number, num_tokens), ids


def expected_slots(round_number: int, group: EPGroup) -> list[torch.Tensor]:
    """Return the payload rows of each local expert, by source rank, then token."""
    num_local = NUM_EXPERTS // group.world_size
    batches = [batch(rank, round_number) for rank in range(group.world_size)]
    return [
        torch.cat([x[(ids == group.rank * num_local + expert).any(1)] for x, ids in batches])
        for expert in range(num_local)
    ]


def check_round(out: RowsDispatchOutput, round_number: int, group: EPGroup) -> torch.Tensor:
    """Compare every slot; return the slots, [C, H]."""
    rows = out.hidden_states.data
    assert out.index.row_of_slot is not None
    slots = rows[out.index.row_of_slot.clamp(min=0).long()] if rows.shape[0] else rows
    starts = out.index.first_slot.tolist()
    for start, expected in zip(starts, expected_slots(round_number, group), strict=False):
        received = slots[start : start + expected.shape[0]]
        assert torch.equal(received, expected), f"round {round_number}, {group.where}"
    return slots.contiguous()


@pytest.mark.ranks(4)
def test_soak() -> None:
    config = EPConfig(max_tokens_per_rank=MAX_TOKENS)
    spec = MoESpec(
        hidden_size=HIDDEN_SIZE, num_experts=NUM_EXPERTS, top_k=TOP_K, dtype=torch.float32
    )
    with EPGroup() as group, torch.no_grad():
        dispatchers = [
            DeepEPNormalDispatcher(group, spec, config),
            DeepEPLowLatencyDispatcher(group, spec, config),
        ]
        delays = random.Random(group.rank)
        for round_number in range(NUM_ROUNDS):
            if delays.random() < 0.1:
                time.sleep(DELAY_S)
            x, ids = batch(group.rank, round_number)
            dispatcher = dispatchers[round_number % 2]
            topk = TopKOutput(topk_ids=ids, topk_weights=torch.ones(ids.shape))
            out = dispatcher.dispatch(x, topk)
            slots = check_round(out, round_number, group)
            y = dispatcher.combine(out.combine_input(slots))
            # The experts are the identity, and sums of K whole numbers below 2**20 are exact.
            assert torch.equal(y, x * (ids >= 0).sum(1, keepdim=True)), f"round {round_number}"
        dispatchers[1].check()
