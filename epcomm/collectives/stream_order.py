"""The one order in which calls of a group run on the device, whatever streams they are made on."""

from __future__ import annotations

import torch


class StreamOrder:
    """Makes the stream of a call wait for that of the call before, of any buffer of the group.

    Kernels that wait for other ranks, on streams without an order, could fill two GPUs in different
    orders and wait for ever.
    """

    def __init__(self) -> None:
        """Begin before the first call."""
        # Of the last call, and the driver's number of it, which takes less time to compare.
        self._stream: torch.cuda.Stream | None = None
        self._number: int | None = None

    def follow(self, device: torch.device) -> None:
        """Make the current stream of a CUDA device wait for that of the last call. Local.

        A stream that is captured follows nothing: a graph cannot wait for work outside it.
        """
        number = torch._C._cuda_getCurrentRawStream(device.index)
        if number == self._number or torch.cuda.is_current_stream_capturing():
            return
        stream = torch.cuda.current_stream(device)
        if self._stream is not None:
            stream.wait_stream(self._stream)
        self._stream, self._number = stream, number
