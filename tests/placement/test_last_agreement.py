import time
from collections.abc import Mapping
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from epcomm import EPConfig, EPGroup, EPTimeout
from epcomm.collectives.base import Scalar
from epcomm.collectives.bounded import Step
from epcomm.placement import rebalancing
from tests.placement.layers import placed_layer

LOST_RANK, UNLUCKY_RANK = 2, 1
# Seconds of the last agreement, to which all ranks come together.
TIMEOUT_S = 4.0


def never() -> Step:
    """Begin an exchange in which the message of the lost rank does not arrive."""

    def step(seconds: float) -> bool:
        time.sleep(seconds)
        return False

    return step


@pytest.mark.ranks(3)
@pytest.mark.parametrize("reaches", ["no rank", "one rank", "all ranks"])
def test_survivors_have_one_placement(reaches: str, monkeypatch: pytest.MonkeyPatch) -> None:
    process_group = dist.new_group()
    config = EPConfig(mode="normal", redundant_experts=3)
    group = EPGroup(process_group)
    placed = placed_layer(group, config)
    layer, collectives, bounded = placed.layer, group.collectives, group.collectives.bounded
    old = layer.placement
    new = replace(old, physical_to_logical=old.physical_to_logical[::-1])
    gather, agree = collectives.all_gather, group.calls.agree
    is_lost = group.rank == LOST_RANK

    def gathered(tensor: Tensor, *, phase: str = "") -> Tensor:
        is_last = phase.startswith("rebalance, all rows are there")
        if is_last and is_lost and reaches == "no rank":
            raise SystemExit
        found = gather(tensor, phase=phase)
        if is_last and group.rank == UNLUCKY_RANK and reaches == "one rank":
            bounded.run(never, phase)
        return found

    def agreed(
        record: Mapping[str, Scalar], *, what: str, findings: Mapping[str, Scalar] | None = None
    ) -> object:
        if is_lost and what == rebalancing._ALL_WRITE:
            raise SystemExit
        if what.startswith("rebalance, "):
            bounded.timeout_s = TIMEOUT_S
        return agree(record, what=what, findings=findings)

    monkeypatch.setattr(group.calls, "agree", agreed)
    monkeypatch.setattr(collectives, "all_gather", gathered)
    with pytest.raises(SystemExit if is_lost else EPTimeout):
        layer.rebalance(new)
    monkeypatch.undo()
    if not is_lost:
        assert layer.placement == (old if reaches == "no rank" else new)
        held = layer.weights.tensors()["down_proj"].detach()
        experts = list(layer.placement.experts_of_rank(group.rank))
        assert torch.equal(held, placed.weights.tensors()["down_proj"][experts])
        group.close(after_error=True)
    dist.barrier()
