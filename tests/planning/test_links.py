"""Bytes by link: the formulas against tokens drawn one by one, and against what buffers count."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import combinations
from statistics import mean

import pytest

from epcomm import ConfigError, EPConfig, MoESpec, plan
from epcomm.buffers.sizes import CallShape, RowBytes
from epcomm.planning.links import ExchangeCost, GroupLimit, exchange_costs
from epcomm.planning.plans import PhasePlan
from epcomm.registry import buffer_class
from epcomm.spec import HostLayout

NUM_EXPERTS, TOP_K = 12, 3
IN_ORDER = (0, 0, 1, 1, 2, 2)
NO_LIMIT = GroupLimit()


def phase_of(host_of_rank: tuple[int, ...], **changes: int) -> PhasePlan:
    config = EPConfig(mode="normal", backend="collective", **changes)  # type: ignore[arg-type]
    spec = MoESpec(hidden_size=64, num_experts=NUM_EXPERTS, top_k=TOP_K)
    hosts = HostLayout(host_of_rank=host_of_rank)
    return plan(config, spec, world_size=len(host_of_rank), hosts=hosts).prefill


def rows(phase: PhasePlan, costs: Mapping[str, ExchangeCost]) -> dict[str, tuple[float, ...]]:
    """Bytes, at most and expected, between and inside, as rows."""
    row = RowBytes.of(phase.buffer_spec)
    return {
        name: tuple(
            number / (row.dispatch + row.combine)
            for each in (cost.most, cost.expected)
            for number in (each.between, each.inside)
        )
        for name, cost in costs.items()
    }


def drawn(limit: GroupLimit, host_of_rank: tuple[int, ...]) -> dict[str, tuple[float, ...]]:
    """Send a token of every rank with every routing that the limit allows, one by one."""
    size, num_local = NUM_EXPERTS // limit.num_groups, NUM_EXPERTS // len(host_of_rank)
    choices = [
        ids
        for groups in combinations(range(limit.num_groups), limit.topk_groups)
        for ids in combinations([g * size + e for g in groups for e in range(size)], TOP_K)
    ]
    found: dict[str, list[tuple[int, int]]] = {"flat": [], "hierarchical": []}
    for source, own in enumerate(host_of_rank):
        place = [r for r, host in enumerate(host_of_rank) if host == own].index(source)
        for ids in choices:
            ranks = {expert // num_local for expert in ids}
            hosts = {host_of_rank[rank] for rank in ranks}
            ways = {[r for r, h in enumerate(host_of_rank) if h == host][place] for host in hosts}
            away = sum(host_of_rank[rank] != own for rank in ranks)
            found["flat"].append((away, len(ranks - {source}) - away))
            found["hierarchical"].append((len(hosts - {own}), len(ranks - ways)))
    return {
        name: (
            *(max(column) for column in zip(*pairs, strict=True)),
            *(mean(column) for column in zip(*pairs, strict=True)),
        )
        for name, pairs in found.items()
    }


@pytest.mark.parametrize(
    ("limit", "host_of_rank"),
    [
        (NO_LIMIT, IN_ORDER),
        (NO_LIMIT, (0, 1, 0, 1)),
        # Groups lie whole on hosts: a token needs one host, though it needs three experts.
        (GroupLimit(num_groups=3, topk_groups=1), IN_ORDER),
        (GroupLimit(num_groups=6, topk_groups=2), IN_ORDER),
        # Each of the groups lies on two hosts.
        (GroupLimit(num_groups=2, topk_groups=1), IN_ORDER),
    ],
)
def test_rows_are_those_of_tokens_drawn_one_by_one(
    limit: GroupLimit, host_of_rank: tuple[int, ...]
) -> None:
    phase = phase_of(host_of_rank)
    found = rows(phase, exchange_costs(phase, limit))
    for name, expected in drawn(limit, host_of_rank).items():
        assert found[name][2:] == pytest.approx(expected[2:]), name
        # Bounds: those of both links need not be reached where routing is limited.
        assert found[name][0] == expected[0], name
        assert found[name][1] >= expected[1], name
        assert limit is not NO_LIMIT or found[name][1] == expected[1], name


@pytest.mark.parametrize("changes", [{}, {"max_tokens_per_rank": 16, "max_recv_slots": 40}])
def test_bounds_are_what_the_buffers_count(changes: dict[str, int]) -> None:
    phase = phase_of(IN_ORDER, **changes)
    costs = exchange_costs(phase, NO_LIMIT)
    kinds = ("StaticCollectiveBuffer",)
    if not changes:
        kinds = ("CollectiveBuffer", "HierarchicalBuffer")
    call = CallShape.most(16, TOP_K, 6, phase.buffer_spec.hosts)
    for name, kind in zip(costs, kinds, strict=True):
        sent = buffer_class(kind).wire_bytes(phase.buffer_spec, call)
        between = sent.dispatch_bytes_between + sent.combine_bytes_between
        assert between == 16 * costs[name].most.between, name
        inside = sent.dispatch_bytes + sent.combine_bytes - between
        # Flat, a token that needs many ranks elsewhere needs fewer here.
        assert inside == min(inside, 16 * costs[name].most.inside), name
        assert not changes or inside == 16 * costs[name].most.inside, name
        assert not changes or costs[name].expected == costs[name].most


def test_links_work_at_once_flat_and_in_turn_hierarchically() -> None:
    flat, hierarchical = exchange_costs(phase_of(IN_ORDER), NO_LIMIT).values()
    assert flat.seconds(10, 1e3, 1e9) == pytest.approx(10 * flat.expected.between / 1e3)
    both = hierarchical.expected.between / 1e3 + hierarchical.expected.inside / 1e2
    assert hierarchical.seconds(10, 1e3, 1e2) == pytest.approx(10 * both)


@pytest.mark.parametrize(
    ("limit", "message"),
    [
        (GroupLimit(num_groups=5, topk_groups=1), "1 of 5 groups of experts are used"),
        (GroupLimit(num_groups=4, topk_groups=5), "5 of 4 groups of experts are used"),
        (GroupLimit(num_groups=6, topk_groups=1), "top_k is 3, expected at most the experts of 1"),
    ],
)
def test_groups_that_cannot_be_are_refused(limit: GroupLimit, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        limit.check(NUM_EXPERTS, TOP_K)
