"""Ranks that are left go on without dead ones, where kernels look at a mask.

Kernels read a word for each rank from this rank's own memory: not 0, and the rank is neither waited
for nor sent to. Setting it is the smaller part: after a wait in vain the words and epochs of those
left have come to different counts, so they meet, clear them and meet again.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

from epcomm.buffers.nvlink.base import NVLinkHost
from epcomm.errors import ConfigError, EPTimeout, describe_ranks


class MaskingHost(NVLinkHost):
    """A buffer all of whose kernels are given the mask."""

    def mask_ranks(self, ranks: Sequence[int]) -> None:
        """Go on without ranks that are dead: they are not waited for, and nothing is sent to them.

        Entries of topk_ids whose expert is theirs are as entries of -1, and sums leave them out.
        Nothing is decided here: who is missing an EPTimeout has said, and all others must be told
        of the same ranks. What was under way is lost; faults are forgotten, the EPTimeout too.
        Captured graphs may be replayed afterwards. A rank that was masked stays so, whatever it
        does, until the buffer is opened anew.

        Args:
            ranks: those to do without; those masked before stay masked.

        Collective: yes, among the ranks that are left, at one place in the order of their calls.
        Host sync: yes.
        Raises:
            ConfigError: ranks that are none of the group, or this one; before anything is done.
            EPTimeout: some other rank did not come; it may be masked as well.
            HandleError: the buffer is closed.
        """
        self._check_open()
        wrong = [rank for rank in ranks if rank == self._rank or not 0 <= rank < self._world_size]
        if wrong:
            raise ConfigError(
                f"mask_ranks: ranks holds {wrong}, expected other ranks of 0 to "
                f"{self._world_size - 1} (rank {self._rank} of {self._world_size}); pass those "
                "that are missing"
            )
        self._synchronize()
        for rank in ranks:
            self._masked[rank] = 1
        # Nobody who is left has a kernel under way that writes here.
        self._meet_living()
        self._start_anew()
        self._report.zero_()
        self._synchronize()
        # Nobody writes before all have cleared their words.
        self._meet_living()

    def _meet_living(self) -> None:
        late = self._late_ranks()
        if late:
            raise EPTimeout(
                f"mask_ranks: {describe_ranks(late)} did not come within {self._timeout_s:g} s "
                f"(this is rank {self._rank} of {self._world_size}); mask them as well, or make a "
                "new EPGroup"
            )

    @abstractmethod
    def _start_anew(self) -> None:
        """Bring words and states to what they were at first; no kernel is under way. Local."""
