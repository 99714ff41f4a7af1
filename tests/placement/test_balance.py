import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from epcomm import ConfigError
from epcomm.placement import balance as balancing
from epcomm.placement.balance import balance
from epcomm.placement.expert_placement import ExpertPlacement
from tests.placement import loads

RECORDED = json.loads((Path(__file__).parents[1] / "contracts/eplb_maxima.json").read_text())
SIZES = ("num_physical_experts", "num_ranks", "num_hosts", "num_groups")


def highest_load(placement: ExpertPlacement, load: list[float]) -> float:
    """Sum by the definition: each copy of an expert serves an equal part of its load."""
    copies = placement.physical_to_logical
    size = len(copies) // placement.num_ranks
    parts = [load[expert] / copies.count(expert) for expert in copies]
    return max(sum(parts[first : first + size]) for first in range(0, len(copies), size))


@pytest.mark.parametrize(
    "case", RECORDED["cases"], ids=lambda c: f"{c['num_experts']}x{c['num_ranks']}-{c['load']}"
)
def test_highest_load_is_at_most_that_of_eplb(case: dict[str, Any]) -> None:
    load = case["values"] or loads.drawn(case["num_experts"])[case["load"]]
    found = balance(load, **{name: case[name] for name in SIZES})
    # EPLB's loads were summed in another order.
    assert highest_load(found, load) <= case["highest"] * (1 + 1e-9)
    assert balancing.highest_load(found, load) == pytest.approx(highest_load(found, load))
    if case["num_groups"] > 1:
        expect_groups_on_hosts(found, case["num_groups"])


def expect_groups_on_hosts(placement: ExpertPlacement, num_groups: int) -> None:
    size = placement.num_experts // num_groups
    for group in range(num_groups):
        copies = [c for e in range(group * size, (group + 1) * size) for c in placement.replicas[e]]
        assert len({placement.host_of(copy) for copy in copies}) == 1


@pytest.mark.parametrize("num_redundant", [0, 6, 12, 60])
def test_no_load_at_all_spreads_the_copies(num_redundant: int) -> None:
    placement = balance([0.0] * 12, num_ranks=6, num_physical_experts=12 + num_redundant)
    numbers = [len(copies) for copies in placement.replicas]
    assert max(numbers) - min(numbers) <= 1


def test_one_loaded_expert_lies_on_every_rank() -> None:
    placement = balance([100.0, 0, 0, 0], num_ranks=4, num_physical_experts=8)
    assert [placement.rank_of(copy) for copy in placement.replicas[0]] == [0, 1, 2, 3]


def test_a_load_on_a_device_gives_what_a_list_gives() -> None:
    load = [3.0, 1.0, 2.0, 5.0]
    sizes = {"num_ranks": 2, "num_physical_experts": 6}
    assert balance(torch.tensor(load), **sizes) == balance(load, **sizes)


@pytest.mark.parametrize(
    ("load", "message"),
    [
        *(([1.0, bad, 1.0, 1.0], "load of expert 1 is") for bad in (math.nan, math.inf, -1.0)),
        (["many", 1.0], r"load is \['many', 1\.0\], expected \[E\]"),
        (torch.ones(2, 4), r"load is \[2, 4\]"),
    ],
    ids=str,
)
def test_a_load_that_is_no_load_is_refused(load: list[float], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        balance(load, num_ranks=2, num_physical_experts=4)


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ({"num_physical_experts": 9, "num_ranks": 2}, "9 physical experts"),
        ({"num_physical_experts": 6, "num_ranks": 2}, "from 8"),
        ({"num_physical_experts": 18, "num_ranks": 2}, "to 16, one of each"),
        ({"num_physical_experts": 8, "num_ranks": 4, "num_hosts": 3}, "num_hosts is 3"),
        ({"num_physical_experts": 8, "num_ranks": 4, "num_hosts": 0}, "num_hosts is 0"),
        ({"num_physical_experts": 8, "num_ranks": 4, "num_groups": 3}, "num_groups is 3"),
        ({"num_physical_experts": 8, "num_ranks": 4, "num_groups": 0}, "num_groups is 0"),
    ],
)
def test_sizes_that_do_not_fit_are_refused(sizes: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        balance([1.0] * 8, **sizes)


@pytest.mark.parametrize("num_physical", [10, 12, 16])
def test_copies_that_a_host_has_no_ranks_for_lie_on_the_other(num_physical: int) -> None:
    sizes = {"num_ranks": 2, "num_hosts": 2, "num_groups": 2}
    placement = balance([1.0] * 8, num_physical_experts=num_physical, **sizes)
    assert placement.num_physical_experts == num_physical
