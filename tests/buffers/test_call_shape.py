"""What a rank sends and receives, counted from the routing: against tokens sent one by one."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from epcomm.buffers.call_shape import call_shape
from epcomm.buffers.sizes import CallByLink, CallShape
from epcomm.spec import HostLayout

NUM_LOCAL = 2
INTERLEAVED = (0, 1, 0, 2, 1, 2)
IN_ORDER = (0, 0, 0, 1, 1, 1)
UNEVEN = (0, 1, 1, 1, 0, 1)


def routing(num_ranks: int, top_k: int) -> list[Tensor]:
    """Draw distinct experts for each token; T differs, is 0 on one rank; some entries are -1."""
    generator = torch.Generator().manual_seed(0)
    ids_of_rank = []
    for rank in range(num_ranks):
        scores = torch.rand(7 * rank % 5, NUM_LOCAL * num_ranks, generator=generator)
        ids = scores.topk(top_k, dim=1).indices
        ids[::2, 1:] = -1
        ids_of_rank.append(ids)
    ids_of_rank[1][-1] = -1
    return ids_of_rank


@dataclass(kw_only=True)
class Messages:
    """The (sender, receiver) pairs of every row that is sent, one by one."""

    flat: list[tuple[int, int]] = field(default_factory=list)
    outer: list[tuple[int, int]] = field(default_factory=list)
    inner: list[tuple[int, int]] = field(default_factory=list)
    arrived: Counter[int] = field(default_factory=Counter)


def send_one_by_one(ids_of_rank: list[Tensor], host_of_rank: tuple[int, ...]) -> Messages:
    """Send every token flat, and by way of the rank with its place on every host that it needs."""
    messages = Messages()
    ranks_of_host: dict[int, list[int]] = {}
    for rank, host in enumerate(host_of_rank):
        ranks_of_host.setdefault(host, []).append(rank)
    for source, ids in enumerate(ids_of_rank):
        place = ranks_of_host[host_of_rank[source]].index(source)
        for token in ids.tolist():
            needed = {expert // NUM_LOCAL for expert in token if expert >= 0}
            messages.flat += [(source, rank) for rank in needed if rank != source]
            for host in {host_of_rank[rank] for rank in needed}:
                if len({len(ranks) for ranks in ranks_of_host.values()}) > 1:
                    continue
                way = ranks_of_host[host][place]
                messages.arrived[way] += 1
                messages.outer += [(source, way)] * (way != source)
                there = needed & set(ranks_of_host[host])
                messages.inner += [(way, rank) for rank in there if rank != way]
    return messages


def both_ways(messages: list[tuple[int, int]], rank: int) -> tuple[int, int]:
    sent = sum(sender == rank for sender, _ in messages)
    return sent, sum(receiver == rank for _, receiver in messages)


def rows(part: CallShape | None) -> tuple[int, int]:
    assert part is not None
    return part.rows_sent, part.rows_received


@pytest.mark.parametrize("host_of_rank", [INTERLEAVED, IN_ORDER, UNEVEN, (0, 1, 2, 3, 4, 5)])
def test_rows_by_link_are_those_of_tokens_sent_one_by_one(host_of_rank: tuple[int, ...]) -> None:
    hosts, ids_of_rank = HostLayout(host_of_rank=host_of_rank), routing(6, 4)
    messages = send_one_by_one(ids_of_rank, host_of_rank)
    between = [(s, r) for s, r in messages.flat if host_of_rank[s] != host_of_rank[r]]
    for rank in range(6):
        found = call_shape(ids_of_rank, rank, num_local_experts=NUM_LOCAL, hosts=hosts)
        assert rows(found) == both_ways(messages.flat, rank)
        assert found.by_link is not None
        flat_between = found.by_link.rows_sent_between, found.by_link.rows_received_between
        assert flat_between == both_ways(between, rank)
        if host_of_rank == UNEVEN:
            assert found.by_link.outer is None is found.by_link.inner
            continue
        outer, inner = found.by_link.outer, found.by_link.inner
        assert rows(outer) == both_ways(messages.outer, rank)
        assert rows(inner) == both_ways(messages.inner, rank)
        assert outer is not None
        assert inner is not None
        own = [other for other in range(6) if host_of_rank[other] == host_of_rank[rank]]
        assert list(inner.tokens_of_rank) == [messages.arrived[other] for other in own]
        assert (outer.rank, inner.rank) == (host_of_rank[rank], own.index(rank))
        assert outer.tokens_of_rank[outer.rank] == len(ids_of_rank[rank])


def test_slots_are_counted_on_every_way() -> None:
    # Rank 0 has the experts 0 and 1, rank 1 has 2 and 3; the other host has 4 to 7.
    ids_of_rank = [torch.tensor([[1, 2, 3, 4, 5, 6]]), *[torch.empty(0, 6, dtype=torch.int64)] * 3]
    hosts = HostLayout(host_of_rank=(0, 0, 1, 1))

    def slots(rank: int) -> list[tuple[int, int]]:
        found = call_shape(ids_of_rank, rank, num_local_experts=2, hosts=hosts)
        assert found.by_link is not None
        parts = found, found.by_link.outer, found.by_link.inner
        return [(part.slots_sent, part.slots_received) for part in parts if part is not None]

    assert slots(0) == [(5, 0), (3, 0), (2, 0)]
    assert slots(2) == [(0, 2), (0, 3), (1, 0)]
    assert slots(3) == [(0, 1), (0, 0), (0, 1)]


def test_without_hosts_nothing_is_said_of_links() -> None:
    ids_of_rank = routing(2, 2)
    assert call_shape(ids_of_rank, 0, num_local_experts=NUM_LOCAL).by_link is None


@pytest.mark.parametrize(
    ("top_k", "expected"),
    [
        # Of 6 ranks on 3 hosts: 4 ranks elsewhere, 2 hosts elsewhere, 3 ranks of no row's place.
        (1, (1, 1, 1)),
        (3, (3, 2, 3)),
        (8, (4, 2, 3)),
    ],
)
def test_the_largest_call_needs_as_much_of_every_link_as_it_can(
    top_k: int, expected: tuple[int, int, int]
) -> None:
    hosts = HostLayout(host_of_rank=INTERLEAVED)
    found = CallShape.most(5, top_k, 6, hosts).by_link
    assert found is not None
    flat, outer, inner = (5 * number for number in expected)
    assert (found.rows_sent_between, found.rows_received_between) == (flat, flat)
    assert rows(found.outer) == (outer, outer)
    assert rows(found.inner) == (inner, inner)


def test_uneven_hosts_have_a_largest_flat_call_alone() -> None:
    found = CallByLink.most(5, 8, HostLayout(host_of_rank=UNEVEN))
    assert found == CallByLink(rows_sent_between=20, rows_received_between=20)
