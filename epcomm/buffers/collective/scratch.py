"""Keep memory for rows in transit, so that no call allocates it anew.

On a CPU new memory is expensive: the system clears each page on first access, which costs as much
as sending the page over loopback (13 ms for 32 MiB, seen on two hosts).
"""

from __future__ import annotations

import torch
from torch import Tensor


class Scratch:
    """One block of memory, as large as the largest request so far, for one caller at a time."""

    def __init__(self, device: torch.device, *, keeps: bool) -> None:
        """Make an empty block.

        keeps: requests share the block, which is safe only where an exchange is complete when its
            collective returns. False: every request gets new memory.
        """
        self._device = device
        self._keeps = keeps
        self._block = torch.empty(0, dtype=torch.uint8, device=device)

    def rows(self, num_rows: int, width: int, dtype: torch.dtype) -> Tensor:
        """Return rows [num_rows, width], undefined. Lifetime: until the next request."""
        if not self._keeps:
            return torch.empty(num_rows, width, dtype=dtype, device=self._device)
        num_bytes = num_rows * width * dtype.itemsize
        if self._block.numel() < num_bytes:
            self._block = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
        return self._block[:num_bytes].view(dtype).view(num_rows, width)

    def free(self) -> None:
        """Free the block."""
        self._block = self._block[:0].clone()
