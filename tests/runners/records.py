"""Records of one rank for runners, in both layouts: unused memory is NaN, or the code 127."""

import torch
from torch import Tensor

from epcomm import MaskedDispatchOutput, RowsDispatchOutput, WireTensor
from epcomm.records import Handle, SlotIndex
from epcomm.testing.oracle import relative_error
from epcomm.types import WeightsAppliedBy

Record = RowsDispatchOutput | MaskedDispatchOutput


def handle(*, needs_backward: bool = False) -> Handle:
    made = Handle(owner=None, num_tokens=9, where="rank 1 of 2")
    made.needs_backward = needs_backward
    return made


def rows_record(
    rows: WireTensor,
    index: SlotIndex,
    slot_weights: Tensor | None,
    who: WeightsAppliedBy,
    *,
    needs_backward: bool = False,
) -> RowsDispatchOutput:
    return RowsDispatchOutput(
        hidden_states=rows,
        index=index,
        slot_weights=slot_weights,
        weights_applied_by=who,
        handle=handle(needs_backward=needs_backward),
    )


def as_masked(record: RowsDispatchOutput, capacity: int | None = None) -> MaskedDispatchOutput:
    """Lay the slots of each expert side by side; None: two rows more than the largest count."""
    index, rows, weights = record.index, record.hidden_states, record.slot_weights
    counts = index.num_tokens_per_expert.tolist()
    width = max(counts) + 2 if capacity is None else capacity

    def spread(values: Tensor, places: Tensor) -> Tensor:
        # torch cannot index floats of 8 bits.
        is_code = values.itemsize == 1
        raw = values.contiguous().view(torch.uint8) if is_code else values
        poison = 0x7F if is_code else float("nan")
        wide = raw.new_full((len(counts), width, *raw.shape[1:]), poison)
        starts = index.first_slot.tolist()
        for expert, (start, count) in enumerate(zip(starts, counts, strict=False)):
            wide[expert, :count] = raw[places[start : start + count].long()]
        return wide.view(values.dtype) if is_code else wide

    slots = torch.arange(record.num_slots, device=rows.data.device)
    return MaskedDispatchOutput(
        hidden_states=WireTensor(
            data=spread(rows.data, index.row_of_slot),
            format=rows.format,
            scales=None if rows.scales is None else spread(rows.scales, index.row_of_slot),
        ),
        num_tokens_per_expert=index.num_tokens_per_expert,
        slot_weights=None if weights is None else spread(weights, slots),
        weights_applied_by=record.weights_applied_by,
        handle=record.handle,
    )


def results_of_experts(record: Record, results: Tensor) -> list[Tensor]:
    """Return the results of each expert's slots, without padding."""
    counts = record.num_tokens_per_expert.tolist()
    if isinstance(record, MaskedDispatchOutput):
        return [results[expert, :count] for expert, count in enumerate(counts)]
    starts = record.index.first_slot.tolist()
    return [results[starts[expert] :][:count] for expert, count in enumerate(counts)]


def largest_error(record: Record, actual: Tensor, expected: Tensor) -> float:
    """Return the largest relative error of the results of an expert; padding is not read."""
    pairs = zip(
        results_of_experts(record, actual), results_of_experts(record, expected), strict=True
    )
    return max(relative_error(*pair) for pair in pairs)
