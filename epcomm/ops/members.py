"""Name the sources that are summed into each target, in the order of the sum."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class Members:
    """The sources of each target as one list, as torch's embedding_bag reads them.

    flat: [N], int64, sources of target 0, then of target 1, ...
    offsets: [targets + 1], int64; target i owns flat[offsets[i]:offsets[i + 1]].
    has_tail: flat is longer than its members, and one more offset, N, closes it.
    """

    flat: Tensor
    offsets: Tensor
    has_tail: bool = False

    @property
    def num_targets(self) -> int:
        """Return the number of targets, without the tail."""
        return self.offsets.shape[0] - (2 if self.has_tail else 1)

    def part(self, targets: slice) -> Members:
        """Return the members of a range of neighbouring targets; `targets` has start and stop.

        Host sync: none for all targets, else two reads.
        """
        if (targets.start, targets.stop) == (0, self.num_targets):
            return self
        offsets = self.offsets[targets.start : targets.stop + 1]
        first, end = int(offsets[0]), int(offsets[-1])
        return Members(flat=self.flat[first:end], offsets=offsets - first)

    def led(self) -> Members:
        """Put source t in front of those of target t, whose numbers all grow by the targets.

        Of [5, 7] and [] they become [0, 7, 9] and [1].   Host sync: none.
        """
        assert not self.has_tail, "a tail has no target"
        num_members, num_targets = self.flat.shape[0], self.num_targets
        targets = torch.arange(num_targets + 1, device=self.flat.device)
        target_of_member = torch.repeat_interleave(
            targets[:-1], self.offsets.diff(), output_size=num_members
        )
        places = torch.arange(num_members, device=self.flat.device) + target_of_member + 1
        offsets = self.offsets + targets
        flat = self.flat.new_empty(num_members + num_targets)
        flat[offsets[:-1]] = targets[:-1]
        flat[places] = self.flat + num_targets
        return Members(flat=flat, offsets=offsets)


@dataclass(frozen=True, kw_only=True, eq=False)
class MemberTable:
    """The sources of each target as a line of a table, as kernels read them.

    table: [targets, K], int32, contiguous, -1 for none.
    """

    table: Tensor

    def part(self, targets: slice) -> MemberTable:
        """Return the members of a range of neighbouring targets. Host sync: none."""
        return MemberTable(table=self.table[targets])

    def led(self) -> MemberTable:
        """Put source t in front, as Members.led() does. Host sync: none."""
        num_targets = self.table.shape[0]
        first = torch.arange(num_targets, dtype=self.table.dtype, device=self.table.device)
        moved = torch.where(self.table < 0, -1, self.table + num_targets)
        return MemberTable(table=torch.cat([first.unsqueeze(1), moved], dim=1))


AnyMembers = Members | MemberTable
