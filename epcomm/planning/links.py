"""Count the bytes that a token costs between hosts and inside them, flat and hierarchical.

Flat, a row goes to each rank that owns experts of the token. Hierarchically, a row goes to each
host that does, to the rank there with the place of the token's own rank, which forwards it to the
ranks of its host. Rows a token, W ranks on h hosts of n = W / h ranks, at most:

                    between hosts                   inside hosts
    flat            min(K, c, a * n)                min(K, c, n - 1)
    hierarchical    min(K, a)                       min(K, c, b * (n - 1))
    flat, static    W - n                           n - 1

a of the h - 1 other hosts, b of all h, and c of all W ranks are as many as one token may need: all,
unless its routing is limited to groups of experts, see GroupLimit.max_reached(). Static sizes send
M rows to every rank, whatever tokens need; the hierarchical exchange has exact sizes alone. A row
has the bytes of dispatch and of combine.

Expected, with p(X) the chance that a token needs some expert of the set X, Er of rank r and Eh of
host h: (W - n) / W * sum p(Er) and (n - 1) / W * sum p(Er) flat, (h - 1) / h * sum p(Eh) and
(n - 1) / n * sum p(Er) hierarchically. Where K of E experts are drawn at random,
p(X) = 1 - C(E - |X|, K) / C(E, K); with groups, these are drawn first, all alike likely.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import comb

from epcomm.buffers.sizes import RowBytes
from epcomm.errors import ConfigError
from epcomm.planning.plans import PhasePlan


@dataclass(frozen=True, kw_only=True)
class GroupLimit:
    """A routing that uses experts of few groups for a token, as DeepSeek-V3's.

    num_groups: experts form so many equal groups of neighbours.
    topk_groups: groups that a token may use.
    """

    num_groups: int = 1
    topk_groups: int = 1

    def check(self, num_experts: int, top_k: int) -> None:
        """Refuse groups that cannot be.

        Raises:
            ConfigError: they are not equal, more are used than there are, or K experts do not fit.
        """
        if num_experts % self.num_groups or not 1 <= self.topk_groups <= self.num_groups:
            raise ConfigError(
                f"plan: {self.topk_groups} of {self.num_groups} groups of experts are used, "
                f"expected a divisor of {num_experts} experts, and at most that many used; correct "
                "num_groups and topk_groups"
            )
        if top_k > self.topk_groups * (num_experts // self.num_groups):
            raise ConfigError(
                f"plan: top_k is {top_k}, expected at most the experts of {self.topk_groups} "
                "groups; correct topk_groups"
            )

    def max_reached(self, num_experts: int, num_ranks: int, sets: Iterable[Iterable[int]]) -> int:
        """Return the most of these sets of ranks, such as hosts, that one token may need.

        Its groups lie on so many of them; where groups lie whole in sets, that is topk_groups.
        """
        touched = Counter(
            group
            for ranks in sets
            for group in _groups_of(ranks, num_experts, num_ranks, self.num_groups)
        )
        return sum(sorted(touched.values(), reverse=True)[: self.topk_groups])


@dataclass(frozen=True, kw_only=True)
class LinkBytes:
    """The bytes of dispatch and combine that a token costs by link.

    They are those that all ranks send for it, which is what each rank sends a token where all have
    as many. Without headers.
    """

    between: float
    inside: float


@dataclass(frozen=True, kw_only=True)
class ExchangeCost:
    """The cost of one way to exchange.

    most: of any token.   expected: of a token whose experts are drawn at random; where sizes are
        static, the same.
    takes_turns: the links are used one after the other, and not at once.
    """

    most: LinkBytes
    expected: LinkBytes
    takes_turns: bool

    def seconds(self, num_tokens: int, between: float, inside: float) -> float:
        """Return the time of dispatch and combine, by `expected` and the speed of links alone.

        Args:
            num_tokens: T of each rank.
            between: bytes a second that a rank sends to other hosts.
            inside: bytes a second that a rank sends to ranks of its host.
        """
        times = self.expected.between / between, self.expected.inside / inside
        return num_tokens * (sum(times) if self.takes_turns else max(times))


def exchange_costs(phase: PhasePlan, limit: GroupLimit) -> Mapping[str, ExchangeCost]:
    """Return the costs of the flat exchange, and of the hierarchical one where sizes are exact.

    Nothing where hosts are uneven.

    phase: its specification says the hosts, and its capabilities whether sizes are static.
    """
    spec = phase.buffer_spec
    hosts = spec.hosts
    assert hosts is not None, "asked of several hosts alone"
    num_hosts, num_ranks = hosts.num_hosts, hosts.world_size
    if not hosts.is_even:
        return {}
    places, top_k = num_ranks // num_hosts, spec.top_k
    row = RowBytes.of(spec)

    def in_bytes(rows: tuple[float, float]) -> LinkBytes:
        between, inside = (number * (row.dispatch + row.combine) for number in rows)
        return LinkBytes(between=between, inside=inside)

    if phase.caps.is_static:
        every = in_bytes((num_ranks - places, places - 1))
        return {"flat": ExchangeCost(most=every, expected=every, takes_turns=False)}
    num_experts = spec.num_local_experts * num_ranks
    ranks = [(rank,) for rank in range(num_ranks)]
    reached = min(limit.max_reached(num_experts, num_ranks, hosts.ranks_of_host), num_hosts)
    # A token sends at most one row to each rank.
    most = min(top_k, limit.max_reached(num_experts, num_ranks, ranks))
    others = min(reached, num_hosts - 1)
    flat = min(most, others * places), min(most, places - 1)
    hierarchical = min(top_k, others), min(most, reached * (places - 1))
    need_rank = _chances(ranks, num_ranks, num_experts, top_k, limit)
    need_host = _chances(hosts.ranks_of_host, num_ranks, num_experts, top_k, limit)
    expected_flat = (
        need_rank * (num_ranks - places) / num_ranks,
        need_rank * (places - 1) / num_ranks,
    )
    expected_hierarchical = (
        need_host * (num_hosts - 1) / num_hosts,
        need_rank * (places - 1) / places,
    )
    return {
        "flat": ExchangeCost(
            most=in_bytes(flat), expected=in_bytes(expected_flat), takes_turns=False
        ),
        "hierarchical": ExchangeCost(
            most=in_bytes(hierarchical), expected=in_bytes(expected_hierarchical), takes_turns=True
        ),
    }


def _groups_of(
    ranks: Iterable[int], num_experts: int, num_ranks: int, num_groups: int
) -> Mapping[int, int]:
    """Count the experts of some ranks by group."""
    num_local, group_size = num_experts // num_ranks, num_experts // num_groups
    return Counter(
        expert // group_size
        for rank in ranks
        for expert in range(rank * num_local, (rank + 1) * num_local)
    )


def _chances(
    sets: Iterable[Iterable[int]],
    num_ranks: int,
    num_experts: int,
    top_k: int,
    limit: GroupLimit,
) -> float:
    """Return the sum over sets of ranks of the chances that a token needs an expert of the set."""
    sizes = Counter(
        tuple(sorted(_groups_of(ranks, num_experts, num_ranks, limit.num_groups).values()))
        for ranks in sets
    )
    return sum(
        number * _chance(owned, num_experts, top_k, limit) for owned, number in sizes.items()
    )


def _chance(owned: tuple[int, ...], num_experts: int, top_k: int, limit: GroupLimit) -> float:
    """Return p(X) of experts X, of which owned[i] lie in the i-th of the groups that have any."""
    # The ways to choose some of these groups, by their number and their experts of X.
    ways = Counter({(0, 0): 1})
    for size in owned:
        chosen = Counter({(groups + 1, m + size): number for (groups, m), number in ways.items()})
        ways += chosen
    candidates = limit.topk_groups * (num_experts // limit.num_groups)
    others = limit.num_groups - len(owned)
    misses = sum(
        number * comb(others, limit.topk_groups - groups) * comb(candidates - experts, top_k)
        for (groups, experts), number in ways.items()
        if groups <= limit.topk_groups
    )
    return 1 - misses / (comb(limit.num_groups, limit.topk_groups) * comb(candidates, top_k))
