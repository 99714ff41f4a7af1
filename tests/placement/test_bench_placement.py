"""The benchmark of placement: its random draws, and the even load of its placements."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from benchmarks.routing.bench_placement import Options, experts_of_tokens, run
from epcomm import EPGroup

OPTIONS = Options(
    tokens=256,
    mode="normal",
    hidden=32,
    intermediate=16,
    experts=16,
    top_k=2,
    exponent=1.0,
    shuffled=False,
    counted=4,
    iterations=3,
    seed=0,
)


def test_tokens_choose_distinct_experts_by_the_law() -> None:
    device = torch.device("cpu")
    one = replace(OPTIONS, top_k=1, tokens=20000)
    shares = experts_of_tokens(one, 0, 0, device).flatten().bincount(minlength=16) / one.tokens
    law = torch.arange(1, 17).double() ** -1
    # Five standard deviations of a share.
    assert (shares - law / law.sum()).abs().max() <= 5 * 0.5 / one.tokens**0.5
    ids = experts_of_tokens(OPTIONS, 0, 0, device)
    assert all(len(set(chosen)) == OPTIONS.top_k for chosen in ids.tolist())
    assert not torch.equal(ids, experts_of_tokens(OPTIONS, 1, 0, device))
    assert not torch.equal(ids, experts_of_tokens(replace(OPTIONS, shuffled=True), 0, 0, device))


@pytest.mark.ranks(2)
def test_placed_experts_have_an_even_load() -> None:
    with EPGroup() as group, torch.no_grad():
        ways, placement = run(OPTIONS, group)
    in_order, placed = ways
    assert placement.num_physical_experts == OPTIONS.experts + 2
    assert placed.slots_ratio <= 1.15 < in_order.slots_ratio
    assert all(each.us.p50 > 0 for each in ways)
