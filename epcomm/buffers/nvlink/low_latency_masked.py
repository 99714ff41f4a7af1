"""The layout MASKED of low latency over NVLink, for runners that read only this layout.

Every expert has capacity for the rows of all ranks: [L, W * M, H], its first ones in the order of
(source rank, token). Each row is sent once per rank and copied to their experts on arrival,
by the kernel that indexes them.
"""

from dataclasses import replace

import torch
from torch import Tensor

from epcomm.buffers.nvlink.low_latency_state import ReceiveBuffer
from epcomm.kernels.nvlink.common.exchange import SlabMemory
from epcomm.quantization.scale_layout import SCALES_PER_WORD
from epcomm.spec import BufferSpec
from epcomm.types import ROW_MAJOR, WireTensor, align_up

_WORD_BYTES = 4


def scale_reasons(spec: BufferSpec) -> list[str]:
    """Return the reasons why slabs cannot have the scale layout of a specification."""
    wire, layout = spec.dispatch_format, spec.scale_layout
    if layout == ROW_MAJOR:
        return []
    if wire.scale_dtype is None:
        return [f"rows of {wire} have no scales that could be {layout}"]
    if layout.packed != (wire.scale_dtype.itemsize < _WORD_BYTES):
        return [f"scales of {wire} move as words, so they can be {layout} only if words hold them"]
    return []


def hand_out_masked(receive_buffer: ReceiveBuffer, spec: BufferSpec) -> None:
    """Allocate slabs for a receive buffer, with the strides of received rows; slot s is row s."""
    rows, layout = receive_buffer.rows, receive_buffer.exchange.peers.layout
    num_local, capacity, device = spec.num_local_experts, layout.num_rows, rows.data.device
    data = _words(num_local * capacity, layout.data_bytes // _WORD_BYTES, device=device)
    handed = data.view(rows.data.dtype).view(num_local, capacity, -1)[..., : spec.hidden_size]
    scales, words, strides = _scales(spec, capacity, layout.scale_bytes, device)
    receive_buffer.rows = WireTensor(
        data=handed,
        format=rows.format,
        scales=scales,
        scale_layout=None if scales is None else spec.scale_layout,
    )
    receive_buffer.scale_strides = strides
    slabs = SlabMemory(data=data, scales=words)
    if spec.returns_slots:
        slabs = slabs._replace(
            token_of_slot=torch.full((num_local, capacity), -1, dtype=torch.int32, device=device),
            source_ranges=torch.zeros(
                num_local, layout.world_size, dtype=torch.int64, device=device
            ),
        )
    receive_buffer.slabs = slabs
    receive_buffer.index = replace(receive_buffer.index, row_of_slot=None, slots_of_row=None)


def _scales(
    spec: BufferSpec, capacity: int, scale_bytes: int, device: torch.device
) -> tuple[Tensor | None, Tensor | None, tuple[int, int, int]]:
    """Return the scales of slabs as dispatch returns them, as words, and the strides of words."""
    wire, layout, num_local = spec.dispatch_format, spec.scale_layout, spec.num_local_experts
    num_scales = wire.num_scales(spec.hidden_size)
    if wire.scale_dtype is None:
        return None, None, (0, 0, 0)
    if layout.packed:
        num_scales = -(-num_scales // SCALES_PER_WORD)
    dtype = torch.int32 if layout.packed else wire.scale_dtype
    if layout.column_major:
        rows = align_up(capacity, layout.alignment)
        words = _words(num_local, num_scales, rows, device=device)
        handed = words.view(dtype).transpose(1, 2)[:, :capacity]
        return handed, words, (num_scales * rows, 1, rows)
    row_words = scale_bytes // _WORD_BYTES
    words = _words(num_local, capacity, row_words, device=device)
    return words.view(dtype)[..., :num_scales], words, (capacity * row_words, row_words, 1)


def _words(*shape: int, device: torch.device) -> Tensor:
    return torch.zeros(shape, dtype=torch.int32, device=device)
