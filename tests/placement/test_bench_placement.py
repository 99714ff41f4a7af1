import pytest
import torch

from benchmarks.routing.bench_placement import Options, run
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


@pytest.mark.ranks(2)
def test_placed_experts_have_an_even_load() -> None:
    with EPGroup() as group, torch.no_grad():
        ways, placement = run(OPTIONS, group)
    in_order, placed = ways
    assert placement.num_physical_experts == OPTIONS.experts + 2
    assert placed.slots_ratio <= 1.15 < in_order.slots_ratio
    assert all(each.us.p50 > 0 for each in ways)
