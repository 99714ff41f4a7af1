"""Quantise the sums of combine and the gradients of backward, for all buffers over collectives.

A buffer calls pack() with rows of its rank before they leave it, and restore() with the rows that
it receives.
"""

from typing import Self

import torch
from torch import Tensor

from epcomm.buffers.row_layout import RowLayout
from epcomm.buffers.sizes import quantized_layout
from epcomm.quantization import dequantizer_for, quantizer_for
from epcomm.spec import BufferSpec
from epcomm.types import WireFormat


class QuantizedRows:
    """The rows of an exchange in a quantised format, which may have scalars after their scales.

    A row [H] is quantised alone, so its bits depend on no other row.

    row_bytes: the bytes of one row, with its scales and scalars.
    """

    def __init__(self, layout: RowLayout, hidden_size: int, device: torch.device) -> None:
        self._layout, self._hidden_size, self.row_bytes = layout, hidden_size, layout.row_bytes
        self._quantize, self._dequantize = quantizer_for(device), dequantizer_for(device)

    @classmethod
    def of(
        cls, spec: BufferSpec, wire: WireFormat | None, device: torch.device, *, top_k: int = 0
    ) -> Self | None:
        """Return the rows of a format, with top_k scalars, or None without a format."""
        layout = quantized_layout(spec, wire, top_k)
        return None if layout is None else cls(layout, spec.hidden_size, device)

    def pack(self, rows: Tensor, scalars: Tensor | None = None) -> Tensor:
        """Quantise [N, C * H], C rows side by side, to [N, C * row_bytes], uint8.

        scalars: [N, K], copied after the scales of the first of the C rows.
        """
        num_columns = rows.shape[1] // self._hidden_size
        rows = rows.reshape(-1, self._hidden_size)
        message = rows.new_empty(rows.shape[0], self.row_bytes, dtype=torch.uint8)
        self._quantize(rows, self._layout.format, out=self._layout.wire_tensor(message))
        message = message.unflatten(0, (-1, num_columns)).flatten(1)
        if scalars is not None:
            self._layout.scalars(message).copy_(scalars)
        return message

    def restore(self, message: Tensor) -> Tensor:
        """Dequantise [..., C * row_bytes] to [..., C * H], float32."""
        rows = message.unflatten(-1, (-1, self.row_bytes))
        wire = self._layout.wire_tensor(rows.flatten(0, -2))
        return self._dequantize(wire, torch.float32).unflatten(0, rows.shape[:-1]).flatten(-2)

    def scalars(self, message: Tensor) -> Tensor:
        """Return the scalars of [..., C * row_bytes] as a view [..., K]."""
        return self._layout.scalars(message)
