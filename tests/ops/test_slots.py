from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from epcomm.ops.slots import (
    Members,
    build_slot_index,
    count_experts,
    gather_rows,
    gather_scalars,
    index_slots,
    localize,
    members_of,
    reduce_rows,
    row_topk,
    slots_by_row,
    spread_to_slots,
)
from epcomm.records import SlotIndex
from tests.ops.indices import WORKED_IDS, index_of, strided

NAN = float("nan")


def test_no_row_gives_no_slot() -> None:
    index = build_slot_index(torch.empty(0, 3, dtype=torch.int32), torch.zeros(2).long(), [0, 0])
    assert (index.row_of_slot.shape, index.slots_of_row.shape) == ((0,), (0, 3))
    assert index.first_slot.tolist() == [0, 0, 0]
    rows = torch.empty(0, 4)
    assert gather_rows(rows, index).shape == (0, 4)
    assert reduce_rows(rows, slots_by_row(index)).shape == (0, 4)
    assert spread_to_slots(torch.empty(0, 3), index).shape == (0,)


@st.composite
def routings(draw: st.DrawFn) -> tuple[list[list[int]], int, int]:
    """Draw local ids of some rows, distinct in a row, the number of experts, and alignment."""
    num_experts, top_k = draw(st.integers(1, 5)), draw(st.integers(1, 4))
    row = st.permutations([*range(num_experts), *[-1] * top_k]).map(lambda ids: ids[:top_k])
    rows = draw(st.lists(row, min_size=1, max_size=12))
    return rows, num_experts, draw(st.sampled_from([1, 2, 3, 8]))


@settings(deadline=None, max_examples=60)
@given(routings())
def test_index_and_sums_equal_plain_loops(routing: tuple[list[list[int]], int, int]) -> None:
    ids, num_experts, expert_alignment = routing
    index = index_of(ids, num_experts, expert_alignment)
    row_of_slot: list[int] = []
    slots_of_row = [[-1] * len(ids[0]) for _ in ids]
    counts = [sum(expert in row for row in ids) for expert in range(num_experts)]
    first_slot = [0]
    for expert in range(num_experts):
        for row, experts in enumerate(ids):
            if expert in experts:
                slots_of_row[row][experts.index(expert)] = len(row_of_slot)
                row_of_slot.append(row)
        row_of_slot += [-1] * (-len(row_of_slot) % expert_alignment)
        first_slot.append(len(row_of_slot))
    # With a static size, three more slots are padding.
    static = build_slot_index(
        torch.tensor(ids),
        torch.tensor(counts),
        len(row_of_slot) + 3,
        expert_alignment=expert_alignment,
    )
    for found, padding, host_counts in ((index, [], tuple(counts)), (static, [-1] * 3, None)):
        assert found.row_of_slot.tolist() == row_of_slot + padding
        assert found.slots_of_row.tolist() == slots_of_row
        assert found.num_tokens_per_expert.tolist() == counts
        assert found.host_num_tokens_per_expert == host_counts
        assert found.first_slot.tolist() == first_slot
        assert found.is_dense == (-1 not in row_of_slot + padding)
        assert found.expert_alignment == expert_alignment

    assert index.slots_of_row is not None

    values = torch.arange(len(row_of_slot)).float()
    scalars = torch.arange(len(ids) * len(ids[0])).float().view(len(ids), -1) + 1
    sums = [sum(float(slot) for slot in slots if slot >= 0) for slots in slots_of_row]
    totals = reduce_rows(values.unsqueeze(1), slots_by_row(index)).flatten()
    assert totals.tolist() == sums
    spread = spread_to_slots(scalars, index)
    for slot, row in enumerate(row_of_slot):
        k = slots_of_row[row].index(slot) if row >= 0 else 0
        assert spread[slot] == (scalars[row, k] if row >= 0 else 0)
    back = gather_scalars(spread, index.slots_of_row)
    assert torch.equal(back, torch.where(index.slots_of_row >= 0, scalars, 0))


def without_last_gap(rows: Tensor) -> Tensor:
    """Return strided rows whose storage ends with the last element, like a slice of a message."""
    num_rows, hidden_size = rows.shape
    flat = torch.full(((num_rows - 1) * (hidden_size + 3) + hidden_size,), NAN)
    view = flat.as_strided((num_rows, hidden_size), (hidden_size + 3, 1))
    return view.copy_(rows)


ROWS = torch.arange(12.0).view(3, 4)
VIEWS = {
    "contiguous": ROWS,
    "gaps of NaN": strided(ROWS, 5),
    "no gap after the last row": without_last_gap(ROWS),
    "columns of a wider matrix": torch.cat([torch.full((3, 2), NAN), ROWS], dim=1)[:, 2:],
    "transposed": ROWS.T.contiguous().T,
    "one row expanded": ROWS[1].expand(3, 4),
    "overlapping rows": torch.arange(8.0).as_strided((3, 4), (2, 1)),
}


@pytest.mark.parametrize("name", VIEWS)
@pytest.mark.parametrize("expert_alignment", [1, 3])
def test_gather_reads_rows_of_any_stride(name: str, expert_alignment: int) -> None:
    rows, index = VIEWS[name], index_of(WORKED_IDS, 2, expert_alignment)
    slots = gather_rows(rows, index)
    for slot, row in enumerate(index.row_of_slot.tolist()):
        assert slots[slot].tolist() == (rows[row].tolist() if row >= 0 else [0.0] * 4)


def test_gather_without_an_index_copies_nothing() -> None:
    index = SlotIndex(
        row_of_slot=None,
        slots_of_row=None,
        num_tokens_per_expert=torch.tensor([3], dtype=torch.int32),
        first_slot=torch.tensor([0, 3], dtype=torch.int32),
        host_num_tokens_per_expert=None,
    )
    assert gather_rows(ROWS, index) is ROWS


MEMBERS = Members(flat=torch.tensor([2, 0, 2]), offsets=torch.tensor([0, 2, 2, 3]))


@pytest.mark.parametrize("has_weights", [False, True])
@pytest.mark.parametrize("name", VIEWS)
def test_sums_are_over_members_of_any_stride(name: str, has_weights: bool) -> None:
    rows = VIEWS[name]
    weights = torch.tensor([2.0, NAN, -3.0]) if has_weights else None
    scale = weights if weights is not None else torch.ones(3)
    expected = torch.stack(
        [rows[2] * scale[2] + rows[0] * scale[0], torch.zeros(4), rows[2] * scale[2]]
    )
    sums = reduce_rows(rows, MEMBERS, weights)
    assert sums.is_contiguous()
    assert torch.equal(sums, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("has_weights", [False, True])
def test_rows_that_are_no_member_are_never_read(dtype: torch.dtype, has_weights: bool) -> None:
    rows = ROWS.to(dtype)
    rows[1] = NAN
    weights = torch.tensor([1.0, NAN, 1.0]) if has_weights else None
    sums = reduce_rows(rows, MEMBERS, weights)
    assert sums.dtype is dtype
    assert sums.tolist() == [[8.0, 10.0, 12.0, 14.0], [0.0] * 4, [8.0, 9.0, 10.0, 11.0]]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("has_weights", [False, True])
def test_sums_have_bits_of_float32_sums_cast_once(dtype: torch.dtype, has_weights: bool) -> None:
    generator = torch.Generator().manual_seed(5)
    num_members = torch.randint(0, 6, (50,), generator=generator)
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), num_members.cumsum(0)])
    flat = torch.randperm(int(offsets[-1]), generator=generator)
    rows = torch.randn(len(flat), 200, generator=generator).to(dtype)
    # Weights of 8 bits: products are exact in float32, and their sums have ties as well.
    weights = torch.rand(len(flat), generator=generator).bfloat16().float()

    terms = rows.to(torch.float32).numpy()
    if has_weights:
        terms = terms * weights.numpy()[:, None]
    totals = np.zeros((len(num_members), rows.shape[1]), dtype=np.float32)
    for target, (start, end) in enumerate(pairwise(offsets.tolist())):
        for member in flat[start:end].tolist():
            totals[target] += terms[member]
    members = Members(flat=flat, offsets=offsets)
    sums = reduce_rows(rows, members, weights if has_weights else None)
    assert torch.equal(sums, torch.from_numpy(totals).to(dtype))


@pytest.mark.parametrize(
    ("targets", "flat", "offsets"),
    [
        (slice(0, 3), [2, 0, 2], [0, 2, 2, 3]),
        (slice(0, 2), [2, 0], [0, 2, 2]),
        (slice(1, 3), [2], [0, 0, 1]),
        (slice(1, 1), [], [0]),
    ],
)
def test_a_part_of_members_is_that_of_its_targets(
    targets: slice, flat: list[int], offsets: list[int]
) -> None:
    part = MEMBERS.part(targets)
    assert (part.flat.tolist(), part.offsets.tolist()) == (flat, offsets)
    assert part.num_targets == targets.stop - targets.start


def test_members_are_the_valid_entries_in_order() -> None:
    members = members_of(torch.tensor([[3, -1, 0], [-1, -1, -1], [-1, 2, 1]]), 4)
    assert members.flat.tolist() == [3, 0, 2, 1]
    assert members.offsets.tolist() == [0, 2, 2, 4]


def test_experts_are_counted_without_holes() -> None:
    ids = torch.tensor([[0, 3], [-1, 3], [3, -1]])
    assert count_experts(ids, 5).tolist() == [1, 0, 0, 3, 0]
    assert count_experts(torch.empty(0, 2, dtype=torch.int64), 2).tolist() == [0, 0]


@pytest.mark.parametrize(
    ("first_expert", "expected"), [(0, [0, 1, 2, -1, -1, -1]), (3, [-1, -1, -1, 0, 2, -1])]
)
def test_ids_of_other_ranks_become_holes(first_expert: int, expected: list[int]) -> None:
    assert localize(torch.tensor([0, 1, 2, 3, 5, -1]), first_expert, 3).tolist() == expected


@pytest.mark.parametrize("alignment", [1, 4])
@pytest.mark.parametrize("num_rows", [0, 70])
def test_experts_and_weights_of_rows_are_those_indexed(num_rows: int, alignment: int) -> None:
    # This rank has experts 3 to 5 of 6, and one of them gets no row.
    generator = torch.Generator().manual_seed(num_rows + alignment)
    ids = torch.randint(-1, 5, (num_rows, 3), generator=generator, dtype=torch.int32)
    weights = torch.rand(num_rows, 3, generator=generator)
    local = localize(ids, 3, 3).long()
    counts = count_experts(local, 3)
    index, slot_weights = index_slots(
        ids, weights, counts, counts.tolist(), first_expert=3, expert_alignment=alignment
    )
    found_ids, found_weights = row_topk(index, slot_weights)
    assert torch.equal(found_ids, local)
    assert torch.equal(found_weights, torch.where(local >= 0, weights, 0.0))
