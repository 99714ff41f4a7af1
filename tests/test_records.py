import dataclasses

import pytest
import torch

from epcomm import (
    HandleError,
    MaskedDispatchOutput,
    Pending,
    RowsDispatchOutput,
    WireFormat,
    WireTensor,
)
from epcomm.ops.slots import build_slot_index
from epcomm.records import ExchangePlan, Handle, SlotIndex, empty_topk
from epcomm.types import WeightsAppliedBy

HIDDEN = 8
OWNER = object()


def handle(index: SlotIndex) -> Handle:
    made = Handle(owner=OWNER, num_tokens=2)
    exchange_plan = ExchangePlan(num_tokens=2, num_rows=3, index=index)
    made.open(exchange_plan, call=7, needs_backward=False)
    return made


def rows_output(who: WeightsAppliedBy, *, has_index: bool = True) -> RowsDispatchOutput:
    """Return three rows and four slots, one of them padding; without an index a row is a slot."""
    ids = torch.tensor([[0, -1], [-1, 1], [1, -1]], dtype=torch.int32)
    index = build_slot_index(ids, torch.tensor([1, 2]), [1, 2], expert_alignment=2)
    if not has_index:
        index = dataclasses.replace(index, row_of_slot=None, slots_of_row=None)
    return RowsDispatchOutput(
        hidden_states=WireTensor(data=torch.ones(3, HIDDEN), format=WireFormat.of(torch.float32)),
        index=index,
        slot_weights=torch.ones(4),
        weights_applied_by=who,
        handle=handle(index),
    )


def masked_output(who: WeightsAppliedBy) -> MaskedDispatchOutput:
    """Return two experts with capacity for three slots each."""
    rows = WireTensor(data=torch.ones(2, 3, HIDDEN), format=WireFormat.of(torch.float32))
    return MaskedDispatchOutput(
        hidden_states=rows,
        num_tokens_per_expert=torch.tensor([3, 1], dtype=torch.int32),
        slot_weights=torch.ones(2, 3),
        weights_applied_by=who,
        handle=rows_output(who).handle,
    )


def test_handle_belongs_to_its_owner_and_is_spent_once() -> None:
    claim = rows_output(WeightsAppliedBy.RUNNER).handle
    assert claim.find_error(OWNER) is None
    other = str(claim.find_error(object()))
    assert "dispatch call 7 belongs to another dispatcher" in other
    claim.spend("was combined before")
    claim.spend("came too late")
    assert "dispatch call 7 was combined before; dispatch again" in str(claim.find_error(OWNER))


@pytest.mark.parametrize("has_index", [True, False])
def test_number_of_slots_is_what_the_index_holds(has_index: bool) -> None:
    out = rows_output(WeightsAppliedBy.RUNNER, has_index=has_index)
    assert out.num_slots == (4 if has_index else 3)
    assert out.num_tokens_per_expert.tolist() == [1, 2]
    assert out.exchange_plan is out.handle.exchange_plan


@pytest.mark.parametrize("who", WeightsAppliedBy)
def test_slot_weights_travel_on_only_where_combine_applies_them(who: WeightsAppliedBy) -> None:
    by_combine = who is WeightsAppliedBy.COMBINE
    out, masked = rows_output(who), masked_output(who)
    for_combine = out.combine_input(torch.ones(4, HIDDEN))
    assert for_combine.slot_weights is (out.slot_weights if by_combine else None)
    assert for_combine.handle is out.handle
    masked_for_combine = masked.combine_input(torch.ones(2, 3, HIDDEN))
    assert masked_for_combine.slot_weights is (masked.slot_weights if by_combine else None)
    assert masked_for_combine.handle is masked.handle


def test_pending_is_completed_once() -> None:
    calls: list[int] = []
    pending = Pending(lambda: calls.append(1) or "record")
    assert calls == []
    assert pending.wait() == "record"
    with pytest.raises(HandleError, match="already completed"):
        pending.wait()
    assert calls == [1]


def test_rank_without_tokens_has_an_empty_routing() -> None:
    topk = empty_topk(3, torch.device("cpu"))
    assert topk.topk_ids.shape == topk.topk_weights.shape == (0, 3)
    assert (topk.topk_ids.dtype, topk.topk_weights.dtype) == (torch.int64, torch.float32)
