"""Build the expert-major index with a fixed number of slots: counts stay on the device.

Order and tables are those of ops/slots.py, for callers that may not read a count on the host: the
index has C slots whatever the routing, and the unused slots at the end are padding.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from epcomm.ops.slots import count_experts, row_ops_for
from epcomm.records import SlotIndex
from epcomm.types import align_up


def max_slots(num_rows: int, top_k: int, num_experts: int, expert_alignment: int) -> int:
    """Return the slots that suffice for any routing of R rows to min(K, L) experts each."""
    used = num_rows * min(top_k, num_experts)
    return align_up(used + num_experts * (expert_alignment - 1), expert_alignment)


def aligned_counts(counts: Tensor, expert_alignment: int) -> Tensor:
    """Return the slots that each expert occupies: its count, rounded up to the alignment."""
    return (counts + expert_alignment - 1) // expert_alignment * expert_alignment


def build_static_slot_index(
    local_ids: Tensor, num_experts: int, num_slots: int, *, expert_alignment: int = 1
) -> SlotIndex:
    """Sort (row, k) pairs by expert into a fixed number of slots.

    Args:
        local_ids: [R, K], expert of this rank, or -1; the slots fit (the caller has checked).
        num_experts: L, the local experts.
        num_slots: C, the slots of the index.
        expert_alignment: each expert's slots start at a multiple of this.

    Host sync: none.   Graph capture: yes.   Deterministic: yes.
    """
    ops = row_ops_for(local_ids)
    if ops is not None:
        counts = count_experts(local_ids, num_experts)
        return ops.index_slots(
            local_ids, None, counts, num_slots, first_expert=0, expert_alignment=expert_alignment
        )[0]
    num_rows, top_k = local_ids.shape
    counts = count_experts(local_ids, num_experts)
    starts = F.pad(aligned_counts(counts, expert_alignment).cumsum(0), (1, 0))
    dense_starts = F.pad(counts.cumsum(0), (1, 0))
    flat_ids = local_ids.flatten()
    # Entries without an expert sort last, as expert L, into one extra slot.
    keys = torch.where(flat_ids < 0, num_experts, flat_ids)
    expert_of_pair, pairs = torch.sort(keys, stable=True)
    expert_of_pair = expert_of_pair.long()
    rank_in_all = torch.arange(pairs.shape[0], device=pairs.device)
    position = rank_in_all - dense_starts[expert_of_pair] + starts[expert_of_pair]
    is_used = expert_of_pair < num_experts
    row_of_slot = torch.full((num_slots + 1,), -1, dtype=torch.int32, device=pairs.device)
    row_of_slot[torch.where(is_used, position, num_slots)] = (pairs // top_k).to(torch.int32)
    slots_of_row = torch.full((num_rows * top_k,), -1, dtype=torch.int32, device=pairs.device)
    slots_of_row[pairs] = torch.where(is_used, position, -1).to(torch.int32)
    return SlotIndex(
        row_of_slot=row_of_slot[:num_slots],
        slots_of_row=slots_of_row.view(num_rows, top_k),
        num_tokens_per_expert=counts.to(torch.int32),
        first_slot=starts.to(torch.int32),
        host_num_tokens_per_expert=None,
        expert_alignment=expert_alignment,
        is_dense=False,
    )
