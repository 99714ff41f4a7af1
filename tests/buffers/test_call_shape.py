import pytest
import torch
from torch import Tensor

from epcomm.buffers.sizes import CallShape
from epcomm.spec import HostLayout

NUM_LOCAL = 2
INTERLEAVED = (0, 1, 0, 2, 1, 2)
IN_ORDER = (0, 0, 0, 1, 1, 1)
UNEVEN = (0, 1, 1, 1, 0, 1)


def routing(num_ranks: int, top_k: int) -> list[Tensor]:
    """Return random distinct experts; T differs and is 0 on one rank; some ids are -1."""
    generator = torch.Generator().manual_seed(0)
    ids_of_rank = []
    for rank in range(num_ranks):
        scores = torch.rand(7 * rank % 5, NUM_LOCAL * num_ranks, generator=generator)
        ids = scores.topk(top_k, dim=1).indices
        ids[::2, 1:] = -1
        ids_of_rank.append(ids)
    ids_of_rank[1][-1] = -1
    return ids_of_rank


def send_one_by_one(ids_of_rank: list[Tensor]) -> list[tuple[int, int]]:
    return [
        (source, rank)
        for source, ids in enumerate(ids_of_rank)
        for token in ids.tolist()
        for rank in {expert // NUM_LOCAL for expert in token if expert >= 0}
        if rank != source
    ]


def both_ways(messages: list[tuple[int, int]], rank: int) -> tuple[int, int]:
    sent = sum(sender == rank for sender, _ in messages)
    return sent, sum(receiver == rank for _, receiver in messages)


@pytest.mark.parametrize("host_of_rank", [INTERLEAVED, IN_ORDER, UNEVEN, (0, 1, 2, 3, 4, 5)])
def test_rows_are_those_of_tokens_sent_one_by_one(host_of_rank: tuple[int, ...]) -> None:
    hosts, ids_of_rank = HostLayout(host_of_rank=host_of_rank), routing(6, 4)
    messages = send_one_by_one(ids_of_rank)
    between = [(s, r) for s, r in messages if host_of_rank[s] != host_of_rank[r]]
    for rank in range(6):
        found = CallShape.of(ids_of_rank, rank, num_local_experts=NUM_LOCAL, hosts=hosts)
        assert (found.rows_sent, found.rows_received) == both_ways(messages, rank)
        of_hosts = found.rows_sent_between, found.rows_received_between
        assert of_hosts == both_ways(between, rank)


def test_slots_are_counted_beside_rows() -> None:
    # Rank 0 has experts 0 and 1, rank 1 has 2 and 3; the other host has 4 to 7.
    ids_of_rank = [torch.tensor([[1, 2, 3, 4, 5, 6]]), *[torch.empty(0, 6, dtype=torch.int64)] * 3]

    def slots(rank: int) -> tuple[int, int]:
        found = CallShape.of(ids_of_rank, rank, num_local_experts=2)
        return found.slots_sent, found.slots_received

    assert [slots(rank) for rank in range(4)] == [(5, 0), (0, 2), (0, 2), (0, 1)]


def test_without_hosts_no_rows_go_between_them() -> None:
    found = CallShape.of(routing(2, 2), 0, num_local_experts=NUM_LOCAL)
    assert found.rows_received > 0
    assert (found.rows_sent_between, found.rows_received_between) == (0, 0)


# 4 of 6 ranks on 3 hosts are on other hosts than a token; the uneven hosts here have 4 too.
@pytest.mark.parametrize("host_of_rank", [INTERLEAVED, UNEVEN])
@pytest.mark.parametrize(("top_k", "expected"), [(1, 1), (3, 3), (8, 4)])
def test_the_largest_call_needs_as_many_ranks_of_other_hosts_as_it_can(
    top_k: int, expected: int, host_of_rank: tuple[int, ...]
) -> None:
    found = CallShape.most(5, top_k, 6, HostLayout(host_of_rank=host_of_rank))
    num_rows = 5 * expected
    assert (found.rows_sent_between, found.rows_received_between) == (num_rows, num_rows)
