"""Memory that a buffer keeps for rows which are on their way, so that no call asks for it anew.

On a CPU new memory is dear: the system clears each page when it is first touched, which costs as
much as sending what lies there over loopback (13 ms for 32 MiB, seen on two hosts).
"""

from __future__ import annotations

import torch
from torch import Tensor


class Scratch:
    """One block, as large as the largest request so far. What lies there is the last caller's."""

    def __init__(self, device: torch.device, *, keeps: bool) -> None:
        """Hold nothing yet.

        keeps: a request may hand out what an earlier one did. Only where an exchange is complete
            when its collective returns; elsewhere every request gets memory of its own.
        """
        self._device = device
        self._keeps = keeps
        self._block = torch.empty(0, dtype=torch.uint8, device=device)

    def rows(self, num_rows: int, width: int, dtype: torch.dtype) -> Tensor:
        """[num_rows, width], undefined. Lifetime: until the next request."""
        if not self._keeps:
            return torch.empty(num_rows, width, dtype=dtype, device=self._device)
        num_bytes = num_rows * width * dtype.itemsize
        if self._block.numel() < num_bytes:
            self._block = torch.empty(num_bytes, dtype=torch.uint8, device=self._device)
        return self._block[:num_bytes].view(dtype).view(num_rows, width)

    def free(self) -> None:
        """Hold nothing again."""
        self._block = self._block[:0].clone()
