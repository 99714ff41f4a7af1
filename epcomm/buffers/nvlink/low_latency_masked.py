"""The layout MASKED of low latency over NVLink, for experts that read such rows alone.

Every expert has capacity for the rows of all ranks: [L, W * M, H], its first ones in the order of
(source rank, token). Rows travel once a rank, as ever, and are copied to their experts on arrival.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from epcomm.buffers.nvlink.low_latency_state import ReceiveBuffer, SlotSources


def hand_out_masked(receive_buffer: ReceiveBuffer, num_local: int) -> None:
    """Give a receive buffer memory for copies, with the strides that rows have; slot s is row s.

    Where slots come home apart, for where they came from too.
    """

    def packed(views: Tensor) -> Tensor:
        stride, num_rows = views.stride(0), num_local * views.shape[0]
        memory = torch.zeros(
            num_rows, stride * views.element_size(), dtype=torch.uint8, device=views.device
        )
        return memory.view(views.dtype).view(num_local, -1, stride)[..., : views.shape[1]]

    rows, layout = receive_buffer.rows, receive_buffer.exchange.peers.layout
    if layout.returns_slots:
        capacity, device = rows.data.shape[0], rows.data.device
        receive_buffer.sources = SlotSources(
            token_of_slot=torch.full((num_local, capacity), -1, dtype=torch.int32, device=device),
            ranges=torch.zeros(num_local, layout.world_size, dtype=torch.int64, device=device),
        )
    scales = None if rows.scales is None else packed(rows.scales)
    receive_buffer.rows = replace(rows, data=packed(rows.data), scales=scales)
    receive_buffer.index = replace(receive_buffer.index, row_of_slot=None, slots_of_row=None)
    receive_buffer.row_of_slot = None


def copy_to_experts(receive_buffer: ReceiveBuffer) -> None:
    """Copy the rows that have arrived.   Local.   Host sync: none."""
    from epcomm.kernels.nvlink.ll_dispatch_pack import pack_rows

    rows = receive_buffer.rows
    scales = None if rows.scales is None else _words_of(rows.scales)
    pack_rows(receive_buffer.exchange, receive_buffer.slots_of_row, _words_of(rows.data), scales)


def _words_of(rows: Tensor) -> Tensor:
    """View packed rows as [L * W * M, words], with all their bytes, the gaps between them too."""
    num_local, capacity, _ = rows.shape
    stride = rows.stride(1)
    whole = rows.as_strided((num_local * capacity, stride), (stride, 1))
    return whole.view(torch.int32)
