"""Runners on one process: every expert kind in both layouts against the oracle, with gradients."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from epcomm import (
    Activation,
    ExpertFormat,
    ExpertWeights,
    RowsDispatchOutput,
    ShapeError,
    WireFormat,
    WireTensor,
)
from epcomm.ops.slots import spread_to_slots
from epcomm.records import SlotIndex
from epcomm.registry import RUNNERS, runner_class
from epcomm.runners.grouped_mm import GroupedMMRunner
from epcomm.testing.data import ACTIVATIONS, BatchSpec, holed_ids, make_batch, make_weights
from epcomm.testing.layer_suite import FP32_TOLERANCE
from epcomm.testing.oracle import relative_error, run_oracle
from epcomm.testing.poison import poison_rows, poisoned_memory
from epcomm.types import Layout, WeightsAppliedBy
from tests.ops.indices import index_of, strided
from tests.runners.records import Record, as_masked, results_of_experts, rows_record

NUM_EXPERTS = 4
# One rank owns all experts; half the entries are -1, so one row has no slot.
SPEC = BatchSpec(
    num_local_experts=NUM_EXPERTS,
    top_k=3,
    tokens_of_rank=lambda rank, world_size: 11,
    choose_ids=holed_ids,
)
WIRE = WireFormat.of(torch.float32)


# The runners that train. Operators of Ascend have no gradients: test_ascend.py has their runners.
UNQUANTIZED = [
    name
    for name in RUNNERS
    if ExpertWeights in runner_class(name).kinds and not name.startswith("ascend")
]
# Padding is that of an index, which masked records do not have.
LAYOUTS = [
    (runner, layout, padding)
    for runner in UNQUANTIZED
    for layout in sorted(runner_class(runner).layouts)
    for padding in (["dense", "aligned", "tail"] if layout is Layout.ROWS else ["dense"])
]


def padded_index(topk_ids: Tensor, padding: str) -> SlotIndex:
    """Make an index. aligned: padding between experts.   tail: slots after the last expert too."""
    index = index_of(topk_ids.tolist(), NUM_EXPERTS, 1 if padding == "dense" else 8)
    if padding != "tail":
        return index
    unused = index.row_of_slot.new_full((5,), -1)
    return replace(index, row_of_slot=torch.cat([index.row_of_slot, unused]), is_dense=False)


def record_of(
    x: Tensor, index: SlotIndex, slot_weights: Tensor, who: WeightsAppliedBy
) -> RowsDispatchOutput:
    """Make a record; rows without a slot, gaps between rows and weights of padding are NaN."""
    assert index.row_of_slot is not None
    assert index.slots_of_row is not None
    rows = poison_rows(x, (index.slots_of_row >= 0).any(1))
    wire = WireTensor(data=strided(torch.zeros_like(rows), 4).copy_(rows), format=WIRE)
    weights = poison_rows(slot_weights, index.row_of_slot >= 0)
    return rows_record(wire, index, weights, who, needs_backward=True)


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("who", WeightsAppliedBy)
@pytest.mark.parametrize(("runner", "layout", "padding"), LAYOUTS)
def test_runner_equals_the_oracle(
    runner: str,
    layout: Layout,
    padding: str,
    who: WeightsAppliedBy,
    activation: str,
    has_bias: bool,
) -> None:
    batch = make_batch(SPEC, 0, 1)
    weights = make_weights(SPEC, 1, expert_format=ACTIVATIONS[activation], has_bias=has_bias)
    index = padded_index(batch.topk_ids, padding)
    assert index.row_of_slot is not None
    x, topk_weights = batch.x.requires_grad_(), batch.topk_weights.requires_grad_()
    slot_weights = spread_to_slots(topk_weights, index)
    used = index.row_of_slot >= 0

    with poisoned_memory():
        record: Record = record_of(x, index, slot_weights, who)
        if layout is Layout.MASKED:
            record = as_masked(record)
        results = runner_class(runner)().run(record, weights)
        slots = torch.cat(results_of_experts(record, results.hidden_states))
        by_combine = results.slot_weights
        assert (by_combine is not None) == (who is WeightsAppliedBy.COMBINE)
        if by_combine is not None:
            slots = slots * slot_weights[used].unsqueeze(1)
        y = torch.zeros_like(x).index_add(0, index.row_of_slot[used].long(), slots)
        (y * batch.dy).sum().backward()

    expected = run_oracle([batch], weights)
    assert relative_error(y, expected.y[0]) <= FP32_TOLERANCE
    for name, actual, wanted in (
        ("dx", x.grad, expected.dx[0]),
        ("dw", topk_weights.grad, expected.dw[0]),
        *(
            (f"d {name}", tensor.grad, expected.weight_grads[name])
            for name, tensor in weights.tensors().items()
        ),
    ):
        assert actual is not None, name
        assert relative_error(actual, wanted) <= FP32_TOLERANCE, name


@pytest.mark.parametrize("runner", UNQUANTIZED)
def test_slots_without_an_index_are_computed_in_place(runner: str) -> None:
    weights = make_weights(SPEC, 1)
    rows = torch.randn(5, SPEC.hidden_size)
    index = SlotIndex(
        row_of_slot=None,
        slots_of_row=None,
        num_tokens_per_expert=torch.tensor([2, 0, 3, 0], dtype=torch.int32),
        first_slot=torch.tensor([0, 2, 2, 5, 5], dtype=torch.int32),
        host_num_tokens_per_expert=None,
    )
    wire = WireTensor(data=rows, format=WIRE)
    out = rows_record(wire, index, None, WeightsAppliedBy.COMBINE)
    expected = torch.cat(
        [
            torch.nn.functional.silu(gate_up[:, :16]) * gate_up[:, 16:] @ weights.down_proj[e].T
            for e, mine in ((0, rows[:2]), (2, rows[2:]))
            for gate_up in [mine @ weights.gate_up_proj[e].T]
        ]
    )
    results = runner_class(runner)().run(out, weights).hidden_states
    assert relative_error(results, expected) <= FP32_TOLERANCE


@pytest.mark.parametrize("runner", UNQUANTIZED)
def test_rank_without_slots_computes_nothing_and_keeps_gradients(runner: str) -> None:
    weights = make_weights(SPEC, 1, expert_format=ACTIVATIONS["clamped_swiglu"], has_bias=True)
    x = torch.randn(2, SPEC.hidden_size, requires_grad=True)
    index = index_of([[-1, -1], [-1, -1]], NUM_EXPERTS)
    record = record_of(x, index, torch.empty(0), WeightsAppliedBy.RUNNER)
    results = runner_class(runner)().run(record, weights).hidden_states
    assert results.shape == (0, SPEC.hidden_size)
    results.backward(torch.empty(0, SPEC.hidden_size))
    for tensor in (x, *weights.tensors().values()):
        assert tensor.grad is None or not tensor.grad.any()


@pytest.mark.parametrize(
    ("hidden", "inner", "dtype", "reasons"),
    [
        (4, 8, torch.float32, ()),
        (8, 16, torch.bfloat16, ()),
        (6, 8, torch.float32, ("hidden_size is 6, expected a multiple of 4",)),
        (
            12,
            4,
            torch.bfloat16,
            (
                "hidden_size is 12, expected a multiple of 8",
                "intermediate_size is 4, expected a multiple of 8",
            ),
        ),
    ],
)
def test_grouped_mm_needs_rows_of_whole_16_bytes(
    hidden: int, inner: int, dtype: torch.dtype, reasons: tuple[str, ...]
) -> None:
    weights = ExpertWeights(
        gate_up_proj=torch.ones(2, inner, hidden, dtype=dtype),
        down_proj=torch.ones(2, hidden, inner, dtype=dtype),
        format=ExpertFormat(activation=Activation.RELU2),
    )
    verdict = GroupedMMRunner.supports(weights)
    assert verdict.ok == (not reasons)
    assert verdict.reasons == reasons
    assert runner_class("reference").supports(weights).ok


def test_grouped_mm_refuses_the_masked_layout() -> None:
    batch = make_batch(SPEC, 0, 1)
    index = index_of(batch.topk_ids.tolist(), NUM_EXPERTS)
    slot_weights = spread_to_slots(batch.topk_weights, index)
    record = as_masked(record_of(batch.x, index, slot_weights, WeightsAppliedBy.RUNNER))
    with pytest.raises(ShapeError, match="MASKED layout, expected ROWS; use runner='auto'"):
        GroupedMMRunner().run(record, make_weights(SPEC, 1))
