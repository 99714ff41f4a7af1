"""Compute the expected slots of one rank with plain loops, and read the slots of a buffer."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from epcomm.buffers.base import Dispatched
from epcomm.quantization import row_major
from epcomm.testing.data import RankBatch
from epcomm.types import Layout, WireTensor, align_up


@dataclass(frozen=True, kw_only=True)
class ExpectedSlot:
    """The expected content of one slot: expert of this rank, source rank, token, k."""

    expert: int
    source: int
    token: int
    k: int


def expected_slots(
    batches: list[RankBatch], rank: int, num_local: int, source_order: Sequence[int]
) -> list[ExpectedSlot]:
    """Return the slots of `rank`, ordered by (expert, source rank in source_order, token)."""
    first = rank * num_local
    place = {source: number for number, source in enumerate(source_order)}
    found = [
        ExpectedSlot(expert=expert - first, source=source, token=token, k=k)
        for source, batch in enumerate(batches)
        for token, row in enumerate(batch.topk_ids.tolist())
        for k, expert in enumerate(row)
        if first <= expert < first + num_local
    ]
    return sorted(found, key=lambda slot: (slot.expert, place[slot.source], slot.token))


def slot_positions(
    slots: list[ExpectedSlot], num_local: int, expert_alignment: int, capacity: int | None
) -> list[int]:
    """Return the positions of slots; experts start at multiples of alignment, or capacity apart."""
    positions, start = [], 0
    for expert in range(num_local):
        mine = [slot for slot in slots if slot.expert == expert]
        positions += range(start, start + len(mine))
        start += align_up(len(mine), expert_alignment) if capacity is None else capacity
    return positions


def flat_rows(out: Dispatched, layout: Layout) -> WireTensor:
    """Return received rows of either layout as [R, H], with row-major scales."""
    rows = row_major(out.rows)
    if layout is Layout.ROWS:
        return rows
    scales = None if rows.scales is None else rows.scales.flatten(0, 1)
    return replace(rows, data=rows.data.flatten(0, 1), scales=scales)


def rows_of_slots(out: Dispatched, rows: WireTensor) -> Tensor:
    """Return the row of each slot, [C], -1 for padding."""
    if out.index.row_of_slot is None:
        return torch.arange(rows.data.shape[0], device=rows.data.device)
    return out.index.row_of_slot


def row_bits(rows: WireTensor, row: int) -> list[list[int]]:
    """Return the bytes of one row: elements, then scales."""
    parts = [rows.data[row], *([] if rows.scales is None else [rows.scales[row]])]
    return [part.contiguous().view(torch.uint8).tolist() for part in parts]


def as_received(
    slots: list[ExpectedSlot], received: list[list[list[int]]], sent: list[WireTensor]
) -> list[ExpectedSlot]:
    """Return the slots in the order in which they were received; tokens must be distinct.

    received: the bytes of each slot.   sent: the tokens of all ranks in the wire format.
    Bytes that no rank has sent get any slot of their expert, and fail the later comparison.
    """
    left = list(slots)
    ordered = []
    for wanted, bits in zip(slots, received, strict=True):
        mine = [slot for slot in left if slot.expert == wanted.expert]
        match = (slot for slot in mine if row_bits(sent[slot.source], slot.token) == bits)
        found = next(match, mine[0])
        left.remove(found)
        ordered.append(found)
    return ordered
