from dataclasses import replace

import pytest

from epcomm import ConfigError
from epcomm.placement.expert_placement import ExpertPlacement

EXAMPLE = ExpertPlacement(num_experts=3, num_ranks=2, physical_to_logical=(0, 1, 2, 0))


def test_the_worked_example() -> None:
    assert EXAMPLE.replicas == ((0, 3), (1,), (2,))
    assert [EXAMPLE.experts_of_rank(rank) for rank in range(2)] == [(0, 1), (2, 0)]
    assert [EXAMPLE.rank_of(physical) for physical in range(4)] == [0, 0, 1, 1]


def test_tokens_choose_among_all_copies_or_the_nearest() -> None:
    near = replace(EXAMPLE, prefers_near=True)
    assert near.replicas_for(1) == ((3,), (1,), (2,))
    assert EXAMPLE.replicas_for(1) == EXAMPLE.replicas
    assert ExpertPlacement.from_json(near.as_json()) == near
    with pytest.raises(ConfigError, match="prefers_near is 1, expected true or false"):
        replace(EXAMPLE, prefers_near=1)


def test_own_rank_comes_before_own_host_and_that_before_all() -> None:
    # Two physical experts a rank, two ranks a host: the copies 0 1 | 2 3 || 4 5 | 6 7.
    near = ExpertPlacement(
        num_experts=4,
        num_ranks=4,
        num_hosts=2,
        physical_to_logical=(0, 1, 0, 2, 2, 3, 0, 3),
        prefers_near=True,
    )
    assert near.replicas == ((0, 2, 6), (1,), (3, 4), (5, 7))
    assert [near.replicas_for(rank) for rank in range(4)] == [
        ((0,), (1,), (3,), (5, 7)),
        ((2,), (1,), (3,), (5, 7)),
        ((6,), (1,), (4,), (5,)),
        ((6,), (1,), (4,), (7,)),
    ]
    example = ExpertPlacement(
        num_experts=3,
        num_ranks=6,
        num_hosts=3,
        physical_to_logical=(0, 1, 1, 2, 2, 0),
        prefers_near=True,
    )
    assert example.replicas_for(1) == ((0,), (1,), (3, 4))


@pytest.mark.parametrize(("num_experts", "num_physical"), [(8, 8), (6, 8), (3, 8), (2, 8)])
def test_spread_places_every_expert(num_experts: int, num_physical: int) -> None:
    placement = ExpertPlacement.spread(
        num_experts=num_experts, num_ranks=4, num_physical_experts=num_physical
    )
    assert placement.physical_to_logical[:num_experts] == tuple(range(num_experts))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"physical_to_logical": (0, 1, 1, 0)}, "no copy of expert 2"),
        ({"physical_to_logical": (0, 0, 1, 2)}, "rank 0 holds 2 copies of expert 0"),
        ({"physical_to_logical": (0, 1, 2, 3)}, "physical expert 3 is a copy of 3"),
        ({"physical_to_logical": (0, 1, 2, -1)}, "physical expert 3 is a copy of -1"),
        ({"physical_to_logical": (False, 1, 2, 0)}, "physical expert 0 is a copy of False"),
        ({"physical_to_logical": (0.0, 1, 2, 0)}, "physical expert 0 is a copy of 0.0"),
        ({"physical_to_logical": (0, 1, 2)}, "3 physical experts"),
        ({"num_ranks": 0}, "num_ranks is 0"),
        ({"num_experts": True}, "num_experts is True"),
        ({"num_hosts": 3}, "num_hosts is 3"),
    ],
)
def test_what_is_no_placement_is_refused(change: dict[str, object], message: str) -> None:
    values = {"num_experts": 3, "num_ranks": 2, "physical_to_logical": (0, 1, 2, 0), **change}
    with pytest.raises(ConfigError, match=message):
        ExpertPlacement(**values)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "is not JSON"),
        ("[1]", "a list"),
        ('{"num_experts": 3}', "num_experts"),
        ('{"num_experts":1,"num_ranks":1,"num_hosts":1,"physical_to_logical":"0"}', "is text"),
    ],
)
def test_text_that_is_no_placement_is_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        ExpertPlacement.from_json(text)
