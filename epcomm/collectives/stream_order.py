"""A single order for the calls of a group on the device, whatever stream each call uses."""

from __future__ import annotations

import torch


class StreamOrder:
    """Makes the stream of a call wait for the stream of the previous call of the group.

    Kernels wait for other ranks. On unordered streams they could occupy two GPUs in different
    orders and deadlock.
    """

    def __init__(self) -> None:
        """Start without a previous call."""
        # The stream of the last call and its raw handle, which is cheaper to compare.
        self._stream: torch.cuda.Stream | None = None
        self._number: int | None = None

    def follow(self, device: torch.device) -> None:
        """Make the current stream of a CUDA device wait for the stream of the last call. Local.

        During stream capture it does nothing: a graph cannot wait for work outside it.
        """
        number = torch._C._cuda_getCurrentRawStream(device.index)
        if number == self._number or torch.cuda.is_current_stream_capturing():
            return
        stream = torch.cuda.current_stream(device)
        if self._stream is not None:
            stream.wait_stream(self._stream)
        self._stream, self._number = stream, number
