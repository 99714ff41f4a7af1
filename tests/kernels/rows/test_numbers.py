import pytest
import torch
from torch import Tensor

pytest.importorskip("triton")

from epcomm.kernels.rows import sends, slot_index
from epcomm.kernels.rows.sends import count_sends, order_sends
from epcomm.kernels.rows.slot_index import number_slots

# Index of the number of rows in a header, and of its first word of counts.
ROWS, SLOTS = 9, 10
WORDS = (2, 3, 1, 4, 7, 7, 8, 0, 5)
WRONG_IDS = 6


def slots_of(
    ids: Tensor, num_local: int, *, first_expert: int = 0, alignment: int = 1
) -> tuple[list[int], list[list[int]], list[int], list[int]]:
    """Return row_of_slot, slots_of_row, counts and first slots, by loops."""
    lines = ids.tolist()
    row_of_slot: list[int] = []
    slots_of_row = [[-1] * len(line) for line in lines]
    counts, first_slot = [], [0]
    for expert in range(first_expert, first_expert + num_local):
        before = len(row_of_slot)
        for row, line in enumerate(lines):
            for k, each in enumerate(line):
                if each == expert:
                    slots_of_row[row][k] = len(row_of_slot)
                    row_of_slot.append(row)
        counts.append(len(row_of_slot) - before)
        row_of_slot += [-1] * (-len(row_of_slot) % alignment)
        first_slot.append(len(row_of_slot))
    return row_of_slot, slots_of_row, counts, first_slot


def check_slots(ids: Tensor, num_local: int, *, first_expert: int = 0, alignment: int = 1) -> None:
    expected = slots_of(ids, num_local, first_expert=first_expert, alignment=alignment)
    row_of_slot, slots_of_row, counts, first_slot = expected
    # Ids and weights have strides as in a message, with other data in between.
    message = torch.full((len(ids), 2 * ids.shape[1] + 3), -7, dtype=torch.int32, device=ids.device)
    message[:, : ids.shape[1]] = ids
    weights = message.view(torch.float32)[:, -ids.shape[1] :]
    weights.copy_(torch.arange(1.0, ids.numel() + 1, device=ids.device).view(ids.shape))

    def integers(*shape: int) -> Tensor:
        return torch.full(shape, -1, dtype=torch.int32, device=ids.device)

    tables = (
        integers(len(row_of_slot)),
        integers(*ids.shape).fill_(-99),
        torch.zeros(len(row_of_slot), device=ids.device),
        integers(num_local),
        integers(num_local + 1),
    )
    number_slots(
        message[:, : ids.shape[1]],
        weights,
        torch.tensor(counts, device=ids.device),
        tables,
        first_expert=first_expert,
        expert_alignment=alignment,
    )
    assert tables[0].tolist() == row_of_slot
    assert tables[1].tolist() == slots_of_row
    for slots, line in zip(slots_of_row, weights.tolist(), strict=True):
        for slot, weight in zip(slots, line, strict=True):
            assert slot < 0 or tables[2][slot] == weight
    assert tables[2].count_nonzero() == sum(counts)
    assert (tables[3].tolist(), tables[4].tolist()) == (counts, first_slot)


def random_ids(num_rows: int, top_k: int, num_experts: int, device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(num_rows)
    ids = torch.rand(num_rows, num_experts, generator=generator).argsort(1)[:, :top_k].contiguous()
    ids[torch.rand(ids.shape, generator=generator) < 0.3] = -1
    return ids.to(device)


@pytest.mark.parametrize("alignment", [1, 8])
@pytest.mark.parametrize(
    ("num_rows", "top_k", "num_local"), [(0, 3, 2), (1, 1, 1), (50, 3, 5), (40, 8, 8)]
)
def test_slots_are_by_expert_then_row(
    num_rows: int, top_k: int, num_local: int, alignment: int, device: torch.device
) -> None:
    ids = random_ids(num_rows, top_k, 2 * num_local, device)
    for first_expert in (0, num_local):
        check_slots(ids, num_local, first_expert=first_expert, alignment=alignment)


def test_slot_segments_are_adjacent(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slot_index, "_PAIRS", 16)
    monkeypatch.setattr(slot_index, "_SEGMENT_PAIRS", 32)
    # 120 pairs: four segments of two steps, the last of them short.
    check_slots(random_ids(40, 3, 6, device), 3, first_expert=3)


def counted(ids: Tensor, num_ranks: int, num_local: int, num_here: int, fault: int = 0) -> Tensor:
    """Return headers followed by all counts, as count_sends() writes them."""
    header = torch.zeros(num_ranks, SLOTS + num_here + 2, dtype=torch.int64, device=ids.device)
    rest = header.new_zeros(num_ranks, num_local - num_here)
    words = (*WORDS[:7], fault, WORDS[8])
    count_sends(ids, header, rest, words, wrong_ids=WRONG_IDS, slots_at=SLOTS, num_local=num_local)
    # Nothing is written after the counts.
    assert not header[:, SLOTS + num_here :].any()
    return torch.cat([header[:, : SLOTS + num_here], rest], dim=1)


@pytest.mark.parametrize("num_here", [4, 1])
@pytest.mark.parametrize("num_tokens", [0, 1, 70])
def test_sends_are_those_of_plain_loops(
    num_tokens: int, num_here: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    # 70 tokens: more than two programs that count, and three segments of rows.
    monkeypatch.setattr(sends, "_TOKENS", 16)
    monkeypatch.setattr(sends, "_SEGMENT_TOKENS", 32)
    num_ranks, num_local, top_k = 3, 4, 5
    ids = random_ids(num_tokens, top_k, num_ranks * num_local, device)
    needed = [{each // num_local for each in line if each >= 0} for line in ids.tolist()]
    rows = [sum(rank in ranks for ranks in needed) for rank in range(num_ranks)]
    slots = [int((ids == expert).sum()) for expert in range(num_ranks * num_local)]
    header = counted(ids, num_ranks, num_local, num_here)
    for rank, line in enumerate(header.tolist()):
        mine = slots[rank * num_local : (rank + 1) * num_local]
        assert line == [*WORDS, rows[rank], *mine]

    row_of_rank = torch.full((num_tokens, num_ranks), -9, dtype=torch.int32, device=device)
    order_sends(ids, header, row_of_rank, rows_at=ROWS, num_local=num_local)
    number = 0
    expected = [[-1] * num_ranks for _ in needed]
    for rank in range(num_ranks):
        for token, ranks in enumerate(needed):
            if rank in ranks:
                expected[token][rank] = number
                number += 1
    assert row_of_rank.tolist() == expected


@pytest.mark.parametrize("wrong", [-2, 12, 2**40])
def test_wrong_ids_are_told_and_counted_nowhere(wrong: int, device: torch.device) -> None:
    ids = torch.tensor([[0, 5]] * 40, device=device)
    ids[39, 1] = wrong
    header = counted(ids, 3, 4, 4)
    assert header[:, 7].tolist() == [WRONG_IDS] * 3
    assert header[:, SLOTS:].sum() == 79
    # Another fault of the call comes first.
    assert counted(ids, 3, 4, 4, fault=1)[:, 7].tolist() == [1] * 3
