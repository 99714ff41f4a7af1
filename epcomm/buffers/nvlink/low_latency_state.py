"""State of one receive buffer of the low-latency NVLink buffers, and arguments of its kernels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, TypeVar

import torch
from torch import Tensor

from epcomm.buffers.base import Combined, DispatchCall
from epcomm.buffers.nvlink.low_latency_layout import BlockLayout
from epcomm.records import ExchangePlan, SlotIndex
from epcomm.types import Int8Profile, WireDtype, WireFormat, WireTensor

if TYPE_CHECKING:
    from epcomm.kernels.nvlink.common.exchange import PeerExchange

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, eq=False)
class NVLinkLowLatencyExchangePlan(ExchangePlan):
    """The W * M received rows, of which rank s filled the first T from s * M on.

    batch: number of the dispatch; receive buffers are used in turn.
    """

    num_tokens: int
    num_rows: int
    index: SlotIndex
    batch: int


class DeferredStep(Generic[T]):
    """A step that runs once: when it is waited for, or earlier if its receive buffer is needed."""

    def __init__(self, step: Callable[[], T]) -> None:
        self._step: Callable[[], T] | None = step
        self._result: T | None = None

    def run(self) -> T:
        if self._step is not None:
            step, self._step = self._step, None
            self._result = step()
        assert self._result is not None, "steps return records"
        return self._result


@dataclass(kw_only=True, eq=False)
class ReceiveBuffer:
    """One receive buffer of this rank: the arguments of its kernels, and the batch that it holds.

    arrived: views of the memory that peers write.   rows, index: what is handed out.
    row_of_slot: None where nobody asks.
    batch: the last one dispatched.   is_open: it awaits its combine.
    unfinished: a combine whose sums have not been received.
    """

    exchange: PeerExchange
    arrived: WireTensor
    rows: WireTensor
    row_of_slot: Tensor | None
    slots_of_row: Tensor
    index: SlotIndex
    slot_weights: Tensor
    is_sent: Tensor
    batch: int = -1
    is_open: bool = False
    unfinished: DeferredStep[Combined] | None = None


def received_rows(layout: BlockLayout, block: Tensor, buffer_index: int) -> WireTensor:
    """Return views of the rows and scales of a receive buffer in this rank's memory."""
    spec, wire = layout.spec, layout.spec.dispatch_format

    def view(region: str, row_bytes: int, dtype: torch.dtype, width: int) -> Tensor:
        begin = layout.buffer_offset(buffer_index) + layout.offsets[region]
        part = block[begin : begin + layout.num_rows * row_bytes]
        return part.view(dtype).view(layout.num_rows, -1)[:, :width]

    scales = None
    if wire.scale_dtype is not None:
        num_scales = wire.num_scales(spec.hidden_size)
        scales = view("scales", layout.scale_bytes, wire.scale_dtype, num_scales)
    data = view("data", layout.data_bytes, wire.dtype.torch_dtype, spec.hidden_size)
    return WireTensor(data=data, format=wire, scales=scales)


def profile_of(wire: WireFormat, call: DispatchCall) -> Int8Profile:
    """Return the INT8 profile of a call; other formats share one, so that they share a kernel."""
    return call.int8_profile if wire.dtype is WireDtype.INT8 else Int8Profile.RINT127


def first_state(device: torch.device) -> Tensor:
    """Epochs of dispatch and combine, and no failure; see PeerExchange.state."""
    return torch.tensor([1, 0, 0, 0], dtype=torch.int32, device=device)


def kind_of(wire: WireFormat) -> int:
    """What the sending kernel calls a format."""
    from epcomm.kernels.nvlink import ll_dispatch_send

    if wire.dtype is WireDtype.INT8:
        return ll_dispatch_send.INT8
    if wire.dtype is not WireDtype.FP8_E4M3:
        return ll_dispatch_send.PLAIN
    is_power_of_two = wire.scale_dtype == torch.float8_e8m0fnu
    return ll_dispatch_send.FP8_POWER_OF_TWO if is_power_of_two else ll_dispatch_send.FP8
