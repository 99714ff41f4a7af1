"""State of one receive buffer of the low-latency NVLink buffers, and arguments of its kernels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from epcomm.kernels.nvlink.common.exchange import (
    NO_SLABS,
    LowLatencyExchange,
    PeerBlocks,
    SlabMemory,
)
from epcomm.kernels.nvlink.common.layout import LowLatencyLayout
from epcomm.records import ExchangePlan, SlotIndex
from epcomm.types import WireDtype, WireFormat, WireTensor

_MAX_INT32 = 2**31 - 1


@dataclass(frozen=True, kw_only=True, eq=False)
class NVLinkLowLatencyExchangePlan(ExchangePlan):
    """The plan of W * M received rows; those of rank s begin at s * M, and its first T are filled.

    batch: number of the dispatch; receive buffers are used in turn.
    slabs: the memory of the rows in the layout MASKED, and with BufferSpec.returns_slots where they
        came from.
    """

    batch: int
    slabs: SlabMemory = NO_SLABS


@dataclass(frozen=True, kw_only=True, eq=False)
class SlotTerms:
    """The weights of returned slots, [T, K], float32, and their sum groups, int32, or None."""

    weights: Tensor
    groups: Tensor | None = None


@dataclass(kw_only=True, eq=False)
class ReceiveBuffer:
    """One receive buffer of this rank: the arguments of its kernels, and the batch that it holds.

    rows, index: the rows and the index that dispatch returns.   slots_of_row: [W * M, K].
    is_sent: [M, W], uint8, whether the token was sent to the rank; if each slot returns, [M, K],
        1 + the rank that has the slot.   slot_weights: None if each slot returns.
    slabs, scale_strides: the memory to which rows of MASKED are copied.
    terms: how slots that return are summed; None if none return.
    batch: number of the last dispatch, of T = num_tokens, sent in lines or in bulk; its header has
        the batch.   is_open: the batch awaits its combine.   is_combined: this rank has received
        the sums, so that the batch can be combined again.
    was_captured: a graph holds that dispatch, so that the state of the batch is not known.
    unfinished: receives the sums of a combine; calling it again has no effect.
    """

    exchange: LowLatencyExchange
    rows: WireTensor
    slots_of_row: Tensor
    index: SlotIndex
    slot_weights: Tensor | None
    is_sent: Tensor
    slabs: SlabMemory = NO_SLABS
    scale_strides: tuple[int, int, int] = (0, 0, 0)
    terms: SlotTerms | None = None
    batch: int = -1
    num_tokens: int = 0
    is_in_lines: bool = False
    is_open: bool = False
    is_combined: bool = False
    was_captured: bool = False
    unfinished: Callable[[], Tensor] | None = None

    @classmethod
    def of(
        cls,
        peers: PeerBlocks[LowLatencyLayout],
        buffer_index: int,
        rows: WireTensor,
        num_slots: int,
        expert_alignment: int,
    ) -> ReceiveBuffer:
        """Return a receive buffer whose index has capacity for C slots; nothing is written yet."""
        layout, device = peers.layout, peers.table.device

        def integers(*shape: int) -> Tensor:
            return torch.full(shape, -1, dtype=torch.int32, device=device)

        slots_of_row = integers(layout.num_rows, layout.top_k)
        return cls(
            exchange=LowLatencyExchange.of(peers, buffer_index),
            rows=rows,
            slots_of_row=slots_of_row,
            index=SlotIndex(
                row_of_slot=integers(num_slots),
                slots_of_row=slots_of_row,
                num_tokens_per_expert=integers(layout.num_local_experts),
                first_slot=integers(layout.num_local_experts + 1),
                host_num_tokens_per_expert=None,
                expert_alignment=expert_alignment,
            ),
            slot_weights=None
            if layout.returns_slots
            else torch.zeros(num_slots, dtype=torch.float32, device=device),
            is_sent=torch.zeros(
                layout.max_tokens, layout.parts_of_token, dtype=torch.uint8, device=device
            ),
        )

    @property
    def batch_word(self) -> int:
        """The number of the batch as an argument of kernels."""
        return self.batch & _MAX_INT32


def scale_words(wire: WireTensor) -> Tensor | None:
    """View the scales of a wire tensor, if any, as integers [T, n] of any strides."""
    if wire.scales is None:
        return None
    return wire.scales.view(torch.uint8 if wire.scales.itemsize == 1 else torch.int32)


def kind_of(wire: WireFormat) -> int:
    """Return the kind of a wire format, as the sending kernel takes it."""
    from epcomm.kernels.nvlink import ll_dispatch_header

    if wire.dtype is WireDtype.INT8:
        return ll_dispatch_header.INT8
    if wire.dtype is not WireDtype.FP8_E4M3:
        return ll_dispatch_header.PLAIN
    is_power_of_two = wire.scale_dtype == torch.float8_e8m0fnu
    return ll_dispatch_header.FP8_POWER_OF_TWO if is_power_of_two else ll_dispatch_header.FP8
