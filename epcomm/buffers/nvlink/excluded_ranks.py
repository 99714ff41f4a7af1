"""Exclude dead ranks, so that the others go on.

Kernels read a flag for each rank from this rank's own memory: not 0, and the rank is neither waited
for nor sent to. Setting it is the smaller part: after a timeout the signals and epochs of the
remaining ranks differ, so these ranks pass a barrier, clear them, and pass another.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

from epcomm.buffers.nvlink.base import NVLinkHost
from epcomm.errors import ConfigError, EPTimeout, describe_ranks


class ExcludingHost(NVLinkHost):
    """A buffer all of whose kernels are given the flags of excluded ranks."""

    def exclude_ranks(self, ranks: Sequence[int]) -> None:
        """Go on without ranks that are dead: they are not waited for, and nothing is sent to them.

        Entries of topk_ids whose expert is theirs are as entries of -1, and sums leave them out.
        Nothing is decided here: an EPTimeout has named the missing ranks, and every other rank must
        pass the same ones. What was under way is lost; faults are forgotten, the EPTimeout too.
        Captured graphs may be replayed afterwards. An excluded rank stays excluded until the buffer
        is opened anew.

        Args:
            ranks: the ranks to exclude; ranks excluded before stay excluded.

        Collective: yes, among the ranks that are left, at one place in the order of their calls.
        Host sync: yes.
        Raises:
            ConfigError: ranks that are none of the group, or this one; before anything is done.
            EPTimeout: some other rank did not come; it may be excluded as well.
            HandleError: the buffer is closed.
        """
        self._check_open()
        wrong = [rank for rank in ranks if rank == self._rank or not 0 <= rank < self._world_size]
        if wrong:
            raise ConfigError(
                f"exclude_ranks: ranks holds {wrong}, expected other ranks of 0 to "
                f"{self._world_size - 1} (rank {self._rank} of {self._world_size}); pass those "
                "that are missing"
            )
        self._synchronize()
        for rank in ranks:
            self._excluded[rank] = 1
        # No remaining rank has a kernel under way that writes here.
        self._await_remaining()
        self._start_anew()
        self._report.zero_()
        self._synchronize()
        # Nobody writes before all have cleared their signals.
        self._await_remaining()

    def _await_remaining(self) -> None:
        missing = self._missing_ranks()
        if missing:
            raise EPTimeout(
                f"exclude_ranks: {describe_ranks(missing)} did not come within {self._timeout_s:g} "
                "s "
                f"(this is rank {self._rank} of {self._world_size}); exclude them as well, or make "
                "a "
                "new EPGroup"
            )

    @abstractmethod
    def _start_anew(self) -> None:
        """Reset signals and states to their first values; no kernel is under way. Local."""
