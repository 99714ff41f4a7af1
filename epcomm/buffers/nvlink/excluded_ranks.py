"""The barrier of ranks on their devices, and the dead ranks that are excluded from it.

Kernels read an int32 for each rank from this rank's own memory. If it is not 0, they neither wait
for the rank nor send to it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


class LivingRanks:
    """The ranks that take part in a barrier: all but those that were excluded.

    excluded: [W], int32, on the device, not 0 for dead ranks.
    """

    def __init__(self, addresses: Sequence[int], rank: int, device: torch.device) -> None:
        """Begin with all ranks.

        Args:
            addresses: of W signals in the block of each rank, zero at first, used for nothing else.
            rank: this one.
            device: of the blocks.
        """
        self._rank, self._address, self._num_barriers = rank, addresses[rank], 0
        self._table = torch.tensor(addresses, dtype=torch.int64, device=device)
        self.excluded = torch.zeros(len(addresses), dtype=torch.int32, device=device)
        self._missing = torch.zeros_like(self.excluded)

    def dead(self) -> tuple[int, ...]:
        """Return the ranks that are excluded.   Host sync: yes."""
        return tuple(rank for rank, value in enumerate(self.excluded.tolist()) if value)

    def device_barrier(self, max_polls: int) -> list[int]:
        """Wait for all ranks on the device, and return the ranks that are missing after max_polls.

        Collective: yes, and ends if some do not arrive.   Host sync: yes.
        """
        from epcomm.kernels.nvlink.common.barrier import device_barrier

        self._num_barriers += 1
        device_barrier(
            self._table,
            self.excluded,
            self._missing,
            flags_address=self._address,
            rank=self._rank,
            number=self._num_barriers,
            max_polls=max_polls,
        )
        return [rank for rank, is_missing in enumerate(self._missing.tolist()) if is_missing]
