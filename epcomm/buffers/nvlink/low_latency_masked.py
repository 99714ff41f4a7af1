"""The low-latency NVLink buffer for experts that read MASKED rows alone.

Every expert has capacity for the rows of all ranks: [L, W * M, H], its first ones in the order of
(source rank, token). Rows travel once a rank, as ever, and are copied to their experts on arrival.
"""

from __future__ import annotations

from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor

from epcomm.buffers.base import Combined
from epcomm.buffers.nvlink.low_latency import NVLinkLowLatencyBuffer
from epcomm.buffers.nvlink.low_latency_layout import BlockLayout
from epcomm.buffers.nvlink.low_latency_state import ReceiveBuffer
from epcomm.buffers.sizes import Region
from epcomm.config import Mode
from epcomm.records import ExchangePlan, Pending, SlotIndex
from epcomm.spec import BufferCaps, BufferSpec
from epcomm.types import Layout, RowsPer, WireTensor


class NVLinkMaskedBuffer(NVLinkLowLatencyBuffer):
    """Low latency in the layout MASKED: one capacity for all experts, and a copy of the rows."""

    name: ClassVar[str] = "nvlink"

    @classmethod
    def caps(cls, mode: Mode) -> BufferCaps:
        return replace(super().caps(mode), layout=Layout.MASKED)

    @classmethod
    def lacks(cls, mode: Mode, spec: BufferSpec, world_size: int) -> tuple[str, ...]:
        reasons = super().lacks(mode, spec, world_size)
        if spec.expert_alignment > 1:
            reasons += ("gives every expert the same capacity, so expert_alignment must be 1",)
        return reasons

    @classmethod
    def _num_slots_of(cls, spec: BufferSpec, num_rows: int) -> int:
        return spec.num_local_experts * num_rows

    @classmethod
    def _handed_regions(cls, spec: BufferSpec, layout: BlockLayout) -> tuple[Region, ...]:
        num_slots = cls._num_slots_of(spec, layout.num_rows)
        row_bytes = layout.data_bytes + layout.scale_bytes
        result_bytes = spec.combine_format.data_bytes(spec.hidden_size)
        return (
            Region(name="packed rows", max_bytes=layout.num_buffers * num_slots * row_bytes),
            Region(name="expert results", max_bytes=num_slots * result_bytes),
        )

    def combine_async(
        self,
        rows: Tensor,
        exchange_plan: ExchangePlan,
        *,
        rows_per: RowsPer,
        slot_weights: Tensor | None = None,
    ) -> Pending[Combined]:
        assert rows_per is RowsPer.SLOT, "a row is a slot here"
        return super().combine_async(
            rows, exchange_plan, rows_per=rows_per, slot_weights=slot_weights
        )

    @property
    def _expert_capacity(self) -> int:
        return self._layout.num_rows

    @property
    def _num_handed_rows(self) -> int:
        return self._num_index_slots

    def _handed_index(self, index: SlotIndex) -> SlotIndex:
        """Slot s is row s."""
        return replace(index, row_of_slot=None, slots_of_row=None)

    def _handed_rows(self, arrived: WireTensor) -> WireTensor:
        """Memory for the copies, rows as far apart as they come."""

        def packed(views: Tensor) -> Tensor:
            stride = views.stride(0)
            shape = (self._spec.num_local_experts, self._expert_capacity, stride)
            return (
                torch.zeros(
                    shape[0] * shape[1],
                    stride * views.element_size(),
                    dtype=torch.uint8,
                    device=views.device,
                )
                .view(views.dtype)
                .view(shape)[..., : views.shape[1]]
            )

        scales = None if arrived.scales is None else packed(arrived.scales)
        return replace(arrived, data=packed(arrived.data), scales=scales)

    def _hand_out(self, receive_buffer: ReceiveBuffer) -> None:
        from epcomm.kernels.nvlink.ll_dispatch_pack import pack_rows

        scales = receive_buffer.rows.scales
        pack_rows(
            receive_buffer.exchange,
            receive_buffer.slots_of_row,
            _words_of(receive_buffer.rows.data),
            None if scales is None else _words_of(scales),
        )


def _words_of(rows: Tensor) -> Tensor:
    """[L * W * M, words]: all bytes of packed rows, the gaps between them too."""
    num_local, capacity, _ = rows.shape
    stride = rows.stride(1)
    whole = rows.as_strided((num_local * capacity, stride), (stride, 1))
    return whole.view(torch.int32)
