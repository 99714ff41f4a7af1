"""DispatchCall: what one rank brings to a dispatch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from epcomm.errors import EPError
from epcomm.protocol import BatchFlags
from epcomm.quantization import quantize
from epcomm.types import Int8Profile, WireFormat, WireTensor, data_of


class RowQuantizer(Protocol):
    """The signature of quantize() without its choices."""

    def __call__(
        self, hidden_states: Tensor, wire_format: WireFormat, /, *, out: WireTensor | None = None
    ) -> WireTensor: ...


@dataclass(frozen=True, kw_only=True, eq=False)
class DispatchCall:
    """The part of one rank in a dispatch.

    hidden_states: [T, H], unquantised, or a WireTensor of rows that are quantised already, in the
        dispatch format of the buffer, with scales of any layout and strides: those travel as they
        are. Where Backend.takes_wire_tensors is not set, and with gradients, they do not.
    topk_ids: [T, K], int64.   topk_weights: [T, K], float32; beside float64 rows this and all that
        is float32 below is float64. Where slots come home apart, any tensor, which is not read.
    expert_names: of the tensors of the experts whose bits `flags` has, in their order.
    error: why this rank takes part with T = 0, if it does.
    quantize: brings hidden states to a format, into the memory of a message where a buffer can.
    int8_profile: its arithmetic of INT8 rows, for buffers that make them while they send.
    dispatcher: number of the dispatcher that calls, see Calls.add_dispatcher(); 0 for none.
    num_sms: SMs of a GPU that kernels may take for this call and along its exchange plan, at most
        those that the buffer was opened for; None for these.
    wants_row_topk: the caller asks for Dispatched.row_topk, and may leave the index unread.
    """

    hidden_states: Tensor | WireTensor
    topk_ids: Tensor
    topk_weights: Tensor
    flags: BatchFlags
    expert_names: tuple[str, ...] = ()
    error: EPError | None = None
    quantize: RowQuantizer = quantize
    int8_profile: Int8Profile = Int8Profile.RINT127
    dispatcher: int = 0
    num_sms: int | None = None
    wants_row_topk: bool = False

    @property
    def num_tokens(self) -> int:
        """Return T."""
        return data_of(self.hidden_states).shape[0]

    @property
    def unquantized(self) -> Tensor:
        """Return the hidden states, which must be no WireTensor."""
        assert isinstance(self.hidden_states, Tensor), "this call was to be quantised here"
        return self.hidden_states
