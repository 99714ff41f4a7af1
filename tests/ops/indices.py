import torch
from torch import Tensor

from epcomm.ops.slots import build_slot_index
from epcomm.records import SlotIndex

# The worked example of epcomm/ops/slots.py: two experts.
WORKED_IDS = [[1, -1], [-1, 0], [0, 1]]


def index_of(ids: list[list[int]], num_experts: int, expert_alignment: int = 1) -> SlotIndex:
    """Return the index over rows with these local ids; ids is not empty."""
    counts = [sum(row.count(expert) for row in ids) for expert in range(num_experts)]
    table = torch.tensor(ids, dtype=torch.int32)
    return build_slot_index(table, torch.tensor(counts), counts, expert_alignment=expert_alignment)


def strided(rows: Tensor, gap: int) -> Tensor:
    """Return the same rows with NaN between them."""
    whole = torch.full((rows.shape[0], rows.shape[1] + gap), float("nan"), dtype=rows.dtype)
    whole[:, : rows.shape[1]] = rows
    return whole[:, : rows.shape[1]]
