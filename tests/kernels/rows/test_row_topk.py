"""The slots of each row, read from the index: kernel and plain torch against the received ids."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from epcomm.ops.slots import index_slots, row_topk
from epcomm.ops.with_triton import TritonRowOps


@pytest.mark.parametrize("alignment", [1, 4])
@pytest.mark.parametrize("num_rows", [0, 1, 70])
def test_reads_what_was_indexed(num_rows: int, alignment: int, device: torch.device) -> None:
    # This rank has experts 3 to 5 of 6, and one of them gets no row.
    generator = torch.Generator().manual_seed(num_rows + alignment)
    ids = torch.randint(-1, 5, (num_rows, 3), generator=generator, dtype=torch.int32)
    weights = torch.rand(num_rows, 3, generator=generator)
    local = torch.where(ids >= 3, ids - 3, -1).long()
    counts = torch.stack([(local == expert).sum() for expert in range(3)])
    index, slot_weights = index_slots(
        ids, weights, counts, counts.tolist(), first_expert=3, expert_alignment=alignment
    )
    expected = (local, torch.where(local >= 0, weights, 0.0))
    slots, first_slot = index.slots_of_row, index.first_slot
    assert slots is not None
    by_kernel = TritonRowOps().row_topk(
        slots.to(device), first_slot.to(device), slot_weights.to(device)
    )
    for found in (row_topk(index, slot_weights), by_kernel):
        assert all(
            torch.equal(mine.cpu(), theirs) for mine, theirs in zip(found, expected, strict=True)
        )
