"""Read group_list, the rows of each expert, in the three formats of the operators."""

from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum

import torch
from torch import Tensor

from fakes.ascend.limits import require


class GroupListType(IntEnum):
    """CUMSUM [E]: inclusive sums.   COUNTS [E].   PAIRS [G, 2]: (expert, count)."""

    CUMSUM = 0
    COUNTS = 1
    PAIRS = 2


@dataclass(frozen=True, kw_only=True)
class Group:
    """The rows of one expert, first to last, last excluded."""

    expert: int
    first: int
    last: int

    @property
    def rows(self) -> slice:
        """Return the rows of the group as a slice."""
        return slice(self.first, self.last)


def groups_of(
    operator: str, group_list: Tensor, list_type: int, num_experts: int, num_rows: int
) -> tuple[Group, ...]:
    """Return the groups in the order of their rows.

    Worked example, 3 experts: (CUMSUM, [3, 3, 7]), (COUNTS, [3, 0, 4]) and (PAIRS, [[0, 3], [2, 4],
    [1, 0]]) all give rows 0 to 2 to expert 0, 3 to 6 to expert 2; further rows to no expert.

    Raises:
        RuntimeError: the list reaches past the rows or the experts, or goes backwards: the device
            would read memory beyond the tensor. If one type is mistaken for another and the numbers
            are valid, nothing is raised: the device computes wrong results, and so does this
            imitation.
    """
    rule = f"group_list_type in [0, 1, 2], is {list_type}"
    require(operator, list_type in tuple(GroupListType), rule)
    require(operator, group_list.dtype == torch.int64, "group_list is int64")
    is_pairs = list_type == GroupListType.PAIRS
    rule = "group_list [E], or [G, 2] with type 2"
    require(operator, group_list.dim() == (2 if is_pairs else 1), rule)
    if not is_pairs:
        rule = "group_list has as many entries as experts"
        require(operator, group_list.shape[0] == num_experts, rule)
    groups = tuple(_groups(group_list, GroupListType(list_type)))
    for group in groups:
        rule = "group_list names experts that are there"
        require(operator, 0 <= group.expert < num_experts, rule)
        require(operator, group.first <= group.last, "group_list goes forwards")
        require(operator, group.last <= num_rows, "group_list ends within the rows")
    return groups


def _groups(group_list: Tensor, list_type: GroupListType) -> Iterator[Group]:
    values: list[list[int]] = group_list.tolist()
    if list_type is GroupListType.PAIRS:
        pairs = [(expert, count) for expert, count in values]
    else:
        counts = group_list
        if list_type is GroupListType.CUMSUM:
            counts = group_list.diff(prepend=group_list.new_zeros(1))
        pairs = list(enumerate(counts.tolist()))
    first = 0
    for expert, count in pairs:
        yield Group(expert=expert, first=first, last=first + count)
        first += count
