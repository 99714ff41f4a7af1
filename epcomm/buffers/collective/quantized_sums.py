"""Quantise the sums of combine: the one place for all buffers over collectives.

A buffer calls pack() with the sums of its rank before they leave it, and restore() with the sums
that return to it before it adds them.
"""

from __future__ import annotations

import torch
from torch import Tensor

from epcomm.buffers.sizes import sum_layout
from epcomm.quantization import dequantizer_for, quantizer_for
from epcomm.spec import BufferSpec


class QuantizedSums:
    """The rows of combine in BufferSpec.combine_format.

    A sum [H] is quantised alone, so its bits depend on no other sum.

    row_bytes: the bytes of one sum, with its scales.
    """

    def __init__(self, spec: BufferSpec, device: torch.device) -> None:
        """Choose the codecs. spec: with a combine_format."""
        layout = sum_layout(spec)
        assert layout is not None, "sums are quantised"
        self._layout, self._hidden_size, self.row_bytes = layout, spec.hidden_size, layout.row_bytes
        self._quantize, self._dequantize = quantizer_for(device), dequantizer_for(device)

    def pack(self, sums: Tensor) -> Tensor:
        """Quantise [N, C * H], C sums in a row, to [N, C * row_bytes], uint8."""
        num_columns = sums.shape[1] // self._hidden_size
        sums = sums.reshape(-1, self._hidden_size)
        rows = sums.new_empty(sums.shape[0], self.row_bytes, dtype=torch.uint8)
        self._quantize(sums, self._layout.format, out=self._layout.wire_tensor(rows))
        return rows.unflatten(0, (-1, num_columns)).flatten(1)

    def restore(self, returned: Tensor) -> Tensor:
        """Dequantise [..., C * row_bytes] to [..., C * H], float32."""
        rows = returned.unflatten(-1, (-1, self.row_bytes))
        wire = self._layout.wire_tensor(rows.flatten(0, -2))
        return self._dequantize(wire, torch.float32).unflatten(0, rows.shape[:-1]).flatten(-2)
