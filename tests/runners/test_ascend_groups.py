"""Ascend's grouped operators get the kind of group_list that each of them reads."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from epcomm.runners.ascend.groups import (
    ExpertGroups,
    GroupListKind,
    Int8Rows,
    activate_sums,
    multiply,
    multiply_and_activate,
)
from fakes.ascend import limits, registry

# Three experts, the second without rows; the last two of nine rows are nobody's.
COUNTS = (3, 0, 4)
NUM_USED, NUM_ROWS = 7, 9
E, H, I = 3, 32, 64  # noqa: E741 (the letter of the intermediate size)


@pytest.fixture(autouse=True)
def machine() -> Iterator[None]:
    registry.register()
    with limits.soc("A3"):
        yield


def groups() -> ExpertGroups:
    return ExpertGroups(torch.tensor(COUNTS, dtype=torch.int32))


def codes(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randint(-127, 128, shape, generator=generator).to(torch.int8)


def scales(*shape: int) -> Tensor:
    return torch.rand(*shape, generator=torch.Generator().manual_seed(sum(shape))) / 1000


@pytest.mark.parametrize(
    ("kind", "number", "expected"),
    [(GroupListKind.CUMULATIVE, 0, [3, 3, 7]), (GroupListKind.COUNTS, 1, [3, 0, 4])],
)
def test_a_kind_has_the_operators_number_and_its_list(
    kind: GroupListKind, number: int, expected: list[int]
) -> None:
    assert kind == number
    found = groups().as_kind(kind)
    assert found.dtype == torch.int64
    assert found.tolist() == expected


@pytest.mark.parametrize("expert_of_row", [[0, 0, 0, 2, 2, 2, 2], [0, 0, 0]])
def test_rows_are_multiplied_by_their_experts(expert_of_row: list[int]) -> None:
    """Check several experts, and one expert, whose group the operator takes only as a sum."""
    counts = torch.tensor(expert_of_row).bincount()
    rows, matrices = codes(NUM_ROWS, H), codes(len(counts), H, 2 * I)
    found = multiply(rows, matrices, ExpertGroups(counts), output_dtype=torch.int32)
    expected = [
        rows[row].long() @ matrices[expert].long() for row, expert in enumerate(expert_of_row)
    ]
    assert torch.equal(found[: len(expert_of_row)], torch.stack(expected).int())


def test_one_operator_equals_the_two_that_want_another_list() -> None:
    rows = Int8Rows(codes=codes(NUM_ROWS, H), scales=scales(NUM_ROWS))
    matrices, weight_scale = codes(E, H, 2 * I), scales(E, 2 * I)
    sums = multiply(rows.codes, matrices, groups(), output_dtype=torch.int32)
    two = activate_sums(sums, groups(), weight_scale=weight_scale, row_scales=rows.scales)
    one = multiply_and_activate(rows, matrices, groups(), weight_scale=weight_scale)
    assert torch.equal(one.scales[:NUM_USED], two.scales[:NUM_USED])
    # They round quotients that are close to one another; see Int8Profile.
    apart = (one.codes[:NUM_USED].int() - two.codes[:NUM_USED].int()).abs()
    assert apart.max() <= 1
    assert one.codes[:NUM_USED].any(dim=1).all()


class WrongKind(ExpertGroups):
    """Hands out the other list, as a caller who passes tensors might."""

    def as_kind(self, kind: GroupListKind) -> Tensor:
        return super().as_kind(GroupListKind(1 - kind))


def test_the_wrong_list_is_refused_or_gives_other_results() -> None:
    rows = Int8Rows(codes=codes(NUM_ROWS, H), scales=scales(NUM_ROWS))
    matrices, weight_scale = codes(E, H, 2 * I), scales(E, 2 * I)
    falling = WrongKind(torch.tensor(COUNTS))
    # Counts 3 0 4 taken for sums go backwards, sums 3 3 7 taken for counts leave the rows.
    with pytest.raises(RuntimeError, match="group_list goes forwards"):
        multiply_and_activate(rows, matrices, falling, weight_scale=weight_scale)
    sums = multiply(rows.codes, matrices, groups(), output_dtype=torch.int32)
    with pytest.raises(RuntimeError, match="group_list ends within the rows"):
        activate_sums(sums, falling, weight_scale=weight_scale, row_scales=rows.scales)
    # Growing counts pass for sums, and rows go to other experts.
    counts = torch.tensor([1, 2, 4])
    wrong, right = (
        multiply_and_activate(rows, matrices, kind(counts), weight_scale=weight_scale).codes
        for kind in (WrongKind, ExpertGroups)
    )
    assert torch.equal(wrong[0], right[0])
    assert not torch.equal(wrong[2], right[2])
