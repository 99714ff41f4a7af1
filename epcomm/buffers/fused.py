"""The contract of a fused operator: one call that dispatches, computes and combines."""

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Generic, Literal, TypeVar

from torch import Tensor

from epcomm.buffers.base import Backend
from epcomm.calls.call import DispatchCall
from epcomm.config import Mode
from epcomm.spec import Availability
from epcomm.weights.quantized import Int8ChannelWeights
from epcomm.weights.unquantized import ExpertTensors

PackedT = TypeVar("PackedT")


@dataclass(frozen=True, kw_only=True, eq=False)
class FuseEPResult:
    """The result of a fused call.

    y: [T, H], weighted and summed over the experts of all ranks.
    num_rows: received rows.   num_slots: computed slots, or allocated slots if the host does not
        know the computed ones.
    num_tokens_per_expert: [L], int32, on the device: slots of each expert, including the slots of
        weight 0 that replace masked entries and calls without tokens.
    is_reduced: y is complete and must not be summed over the ranks again.
    """

    y: Tensor
    num_rows: int
    num_slots: int
    num_tokens_per_expert: Tensor
    is_reduced: Literal[True] = True


class FusedBackend(Backend, Generic[PackedT]):
    """Dispatches, computes and combines W8A8 experts in one operation; for inference.

    deprecated: the reason to replace this operator; empty if there is none.
    """

    deprecated: ClassVar[str] = ""
    modes: ClassVar[frozenset[Mode]] = frozenset({Mode.FUSEEP})

    @classmethod
    def supports(cls, weights: ExpertTensors) -> Availability:
        """Return whether the operator can compute these experts. Local; pure."""
        if isinstance(weights, Int8ChannelWeights):
            return Availability(ok=True)
        reason = (
            f"computes W8A8 experts, Int8ChannelWeights, not {type(weights).__name__}; quantise "
            "them, or use a mode with dispatchers"
        )
        return Availability(ok=False, reasons=(reason,))

    @classmethod
    @abstractmethod
    def pack(cls, weights: Int8ChannelWeights) -> PackedT:
        """Convert this rank's experts to the format of run(). Local; pure."""

    @abstractmethod
    def run(self, call: DispatchCall, experts: PackedT) -> FuseEPResult:
        """Compute the routed experts of this rank's tokens.

        Args:
            call: T tokens; T may be 0 and differ between ranks. If call.error is set, this rank
                takes part without tokens.
            experts: this rank's experts from pack().

        Collective: yes.   Host sync: caps.host_syncs times.
        Raises:
            TypeError: the experts were not packed by this operator.
            ShapeError, CapacityError: some rank reported a fault; with caps.is_static y is NaN
                instead, and check() raises.
        """


def check_packed(experts: object, wanted: type, name: str) -> None:
    """Check that experts were packed by this operator.

    Raises:
        TypeError: the experts have another type, which the operator would silently misread.
    """
    if not isinstance(experts, wanted):
        raise TypeError(
            f"{name}: experts are {type(experts).__name__}, expected {wanted.__name__}; pack the "
            "weights of the checkpoint with pack() of this operator"
        )
