"""Runners of GPUs in a captured graph: replays use new rows and counts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from epcomm import RowsDispatchOutput, WireFormat, WireTensor
from epcomm.ops.slots import build_slot_index
from epcomm.records import Handle
from epcomm.runners.grouped_mm import GroupedMMRunner
from epcomm.runners.reference import ReferenceRunner
from epcomm.testing.oracle import relative_error
from epcomm.types import WeightsAppliedBy
from epcomm.weights.unquantized import ExpertWeights

NUM_ROWS, HIDDEN, INNER = 96, 128, 64
# Results in bfloat16, from products rounded to bfloat16 between: a few times 2**-8.
TOLERANCE = 0.02


def needs_gpu(test: Callable[[], None]) -> Callable[[], None] | None:
    """Skip a test without a GPU."""
    return test if torch.cuda.is_available() else None


def make_record(ids: torch.Tensor, counts: list[int], x: torch.Tensor) -> RowsDispatchOutput:
    index = build_slot_index(ids.unsqueeze(1), torch.tensor(counts, device=x.device), counts)
    return RowsDispatchOutput(
        hidden_states=WireTensor(data=x, format=WireFormat.of(x.dtype)),
        # As with a buffer of static sizes, the host knows no counts.
        index=replace(index, host_num_tokens_per_expert=None),
        slot_weights=torch.rand(len(x), device=x.device),
        weights_applied_by=WeightsAppliedBy.RUNNER,
        handle=Handle(owner=None, num_tokens=len(x)),
    )


@needs_gpu
def test_unquantised_experts_are_captured() -> None:
    device = torch.device("cuda")
    torch.manual_seed(0)
    weights = ExpertWeights(
        gate_up_proj=torch.randn(3, 2 * INNER, HIDDEN, device=device).bfloat16() / HIDDEN**0.5,
        down_proj=torch.randn(3, HIDDEN, INNER, device=device).bfloat16() / INNER**0.5,
    )
    ids = torch.randint(0, 3, (NUM_ROWS,), device=device)
    counts = torch.bincount(ids, minlength=3).tolist()
    x = torch.randn(NUM_ROWS, HIDDEN, device=device).bfloat16()
    dispatched, runner = make_record(ids, counts, x), GroupedMMRunner()
    with torch.no_grad():
        runner.run(dispatched, weights)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            result = runner.run(dispatched, weights).hidden_states
        # Another routing and other rows, in the same memory.
        other_ids = torch.randint(0, 3, (NUM_ROWS,), device=device)
        other_counts = torch.bincount(other_ids, minlength=3).tolist()
        assert other_counts != counts
        other = make_record(other_ids, other_counts, x)
        for field in ("row_of_slot", "num_tokens_per_expert", "first_slot"):
            getattr(dispatched.index, field).copy_(getattr(other.index, field))
        x.normal_()
        graph.replay()
        again = replace(other, slot_weights=dispatched.slot_weights)
        expected = ReferenceRunner().run(again, weights).hidden_states
    assert relative_error(result, expected) <= TOLERANCE
