"""DispatchCall: the input of one rank to a dispatch."""

from dataclasses import dataclass

from torch import Tensor

from epcomm.errors import EPError
from epcomm.protocol import BatchFlags
from epcomm.quantization import Quantizer, quantize
from epcomm.types import Int8Profile, WireTensor, data_of


@dataclass(frozen=True, kw_only=True, eq=False)
class DispatchCall:
    """The input of one rank to a dispatch.

    hidden_states: [T, H], unquantised; or a WireTensor of quantised rows in the dispatch format of
        the buffer, with scales of any layout and strides, which are sent unchanged. A WireTensor
        needs Backend.takes_wire_tensors and has no gradients.
    topk_ids: [T, K], int64.   topk_weights: [T, K], float32. With float64 rows, topk_weights and
        all that is float32 below are float64. With BufferSpec.returns_slots, any unread tensor.
    topk_groups: [T, K], int64, the sum group of each entry; only with BufferSpec.sums_at_source.
    expert_names: names of the expert tensors that have bits in `flags`, in the order of the bits.
    error: the reason why this rank takes part with T = 0, or None.
    quantize: converts hidden states to a wire format; buffers that can pass the message as `out`.
    int8_profile: the INT8 arithmetic, for buffers that quantise while they send.
    dispatcher: number of the calling dispatcher, see Calls.add_dispatcher(); 0 for none.
    """

    hidden_states: Tensor | WireTensor
    topk_ids: Tensor
    topk_weights: Tensor
    flags: BatchFlags
    topk_groups: Tensor | None = None
    expert_names: tuple[str, ...] = ()
    error: EPError | None = None
    quantize: Quantizer = quantize
    int8_profile: Int8Profile = Int8Profile.RINT127
    dispatcher: int = 0

    @property
    def num_tokens(self) -> int:
        """Return T."""
        return data_of(self.hidden_states).shape[0]

    @property
    def unquantized(self) -> Tensor:
        """Return the hidden states, which must not be a WireTensor."""
        assert isinstance(self.hidden_states, Tensor), "the hidden states are unquantised"
        return self.hidden_states


@dataclass(frozen=True, kw_only=True, eq=False)
class RowTopkCall(DispatchCall):
    """A call that also requests the experts and weights of each row, as DeepEP returns them.

    num_sms: most SMs that kernels may use for this call and along its exchange plan, at most
        BufferSpec.num_sms; None: BufferSpec.num_sms.
    """

    num_sms: int | None = None
