"""The layout of one row on the wire: elements, scales, expert ids, router weights."""

import torch
from torch import Tensor

from epcomm.calls.call import DispatchCall
from epcomm.quantization import row_major
from epcomm.types import ROW_ALIGNMENT_BYTES, WireFormat, WireTensor, align_up


class RowLayout:
    """The byte offsets inside one row [elements | scales | K ids int32 | K scalars | gap].

    The scalars are router weights in dispatch and their gradients in combine: float64 with float64
    elements, else float32. Rows in combine have no ids.
    """

    def __init__(self, *, hidden_size: int, top_k: int, format: WireFormat, has_ids: bool) -> None:
        self.format, self.scalar_dtype = format, format.dtype.scalar_dtype
        data_end = format.data_bytes(hidden_size)
        self.scales_at = align_up(data_end, 4)
        scales_end = self.scales_at + format.scale_bytes(hidden_size)
        self.ids_at = align_up(scales_end, 4)
        ids_end = self.ids_at + (4 * top_k if has_ids else 0)
        self.scalars_at = align_up(ids_end, self.scalar_dtype.itemsize)
        scalars_end = self.scalars_at + self.scalar_dtype.itemsize * top_k
        self.row_bytes = align_up(scalars_end, ROW_ALIGNMENT_BYTES)
        self._data, self._scales = slice(data_end), slice(self.scales_at, scales_end)
        self._ids, self._scalars = slice(self.ids_at, ids_end), slice(self.scalars_at, scalars_end)

    def data(self, rows: Tensor) -> Tensor:
        """Return the elements as a view [..., H]."""
        return rows[..., self._data].view(self.format.dtype.torch_dtype)

    def scales(self, rows: Tensor) -> Tensor | None:
        """Return the scales as a view [N, num_scales], or None."""
        if self.format.scale_dtype is None:
            return None
        return rows[:, self._scales].view(self.format.scale_dtype)

    def ids(self, rows: Tensor) -> Tensor:
        """Return the ids as a view [N, K], int32."""
        return rows[:, self._ids].view(torch.int32)

    def scalars(self, rows: Tensor) -> Tensor:
        """Return the scalars as a view [..., K], scalar_dtype."""
        return rows[..., self._scalars].view(self.scalar_dtype)

    def first_words(self, rows: Tensor) -> Tensor:
        """Return the scalars' first four bytes, a view [N], int32, for rows that are headers."""
        return rows[:, self.scalars_at : self.scalars_at + 4].view(torch.int32)[:, 0]

    def wire_tensor(self, rows: Tensor) -> WireTensor:
        """Return the elements and scales of received rows as views."""
        return WireTensor(data=self.data(rows), format=self.format, scales=self.scales(rows))

    def pack_tokens(
        self,
        hidden_states: WireTensor,
        token_of_row: Tensor,
        topk_ids: Tensor,
        weights: Tensor,
        *,
        out: Tensor,
    ) -> None:
        """Copy each row's token, ids and weights into a message `out`, [N, row_bytes], uint8.

        Tokens are gathered directly into the message, in one pass.
        """
        data, scales = hidden_states.data, hidden_states.scales
        torch.index_select(_movable(data), 0, token_of_row, out=_movable(self.data(out)))
        out_scales = self.scales(out)
        if out_scales is not None and scales is not None:
            torch.index_select(_movable(scales), 0, token_of_row, out=_movable(out_scales))
        self.ids(out).copy_(topk_ids[token_of_row])
        self.scalars(out).copy_(weights[token_of_row])

    def write_tokens(self, rows: Tensor, call: DispatchCall, topk_ids: Tensor) -> None:
        """Write tokens, and their ids and weights [T, K], into rows [T, row_bytes] of a message.

        Quantising directly into the message saves a pass over the tokens.

        topk_ids: checked ids, see guard_ids().
        """
        out = self.wire_tensor(rows)
        if isinstance(call.hidden_states, Tensor):
            call.quantize(call.hidden_states, out.format, out=out)
        else:
            wire = row_major(call.hidden_states)
            out.data.copy_(wire.data)
            if out.scales is not None and wire.scales is not None:
                out.scales.copy_(wire.scales)
        self.ids(rows).copy_(topk_ids)
        self.scalars(rows).copy_(call.topk_weights)

    def pack_rows(self, data: Tensor, scalars: Tensor) -> Tensor:
        """Copy rows [N, H] and scalars [N, K] into one message: [N, row_bytes], uint8."""
        rows = data.new_empty(data.shape[0], self.row_bytes, dtype=torch.uint8)
        self.data(rows).copy_(data)
        self.scalars(rows).copy_(scalars)
        return rows


def _movable(tensor: Tensor) -> Tensor:
    """Return 8-bit elements as a view of bytes, because torch cannot index 8-bit floats."""
    return tensor.view(torch.uint8) if tensor.itemsize == 1 else tensor


class Scratch:
    """A reusable block of memory that grows to the largest request.

    On a CPU new memory is expensive: the system clears each page on first access, which costs as
    much as sending the page over loopback (13 ms for 32 MiB, measured on two hosts).
    """

    def __init__(self, device: torch.device, *, keeps: bool) -> None:
        """Make an empty block.

        keeps: requests share the block, which is safe only if an exchange is complete when its
            collective returns. False: every request allocates new memory.
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
        self._block = self._block[:0].clone()


def wire_tensor_of(call: DispatchCall, wire_format: WireFormat) -> WireTensor:
    """Return the hidden states of a call in the wire format. Lifetime: may share their memory."""
    rows = call.hidden_states
    if isinstance(rows, WireTensor):
        return row_major(rows)
    if rows.dtype is wire_format.dtype.torch_dtype:
        return WireTensor(data=rows, format=wire_format)
    return call.quantize(rows, wire_format)
