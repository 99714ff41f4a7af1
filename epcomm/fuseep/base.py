"""The contract of a fused operator: tokens and routing in, finished sums out, in one call."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Generic, Literal, TypeVar

from epcomm.buffers.base import Backend, DispatchCall
from epcomm.config import Mode
from epcomm.records import PathOutput
from epcomm.spec import Availability
from epcomm.weights.quantized import Int8ChannelWeights
from epcomm.weights.unquantized import ExpertTensors

PackedT = TypeVar("PackedT")


@dataclass(frozen=True, kw_only=True, eq=False)
class FuseEPResult(PathOutput):
    """What a call returns; y is weighted and summed over the experts of all ranks.

    num_tokens_per_expert: with the substitutes of weight 0 for entries without an expert and for
        calls without tokens.
    is_reduced: y is complete; adding it up over ranks once more would multiply it.
    """

    is_reduced: Literal[True] = True


class FusedBackend(Backend, Generic[PackedT]):
    """Dispatches, computes and combines W8A8 experts in one operation; for inference."""

    name: ClassVar[str]
    modes: ClassVar[frozenset[Mode]] = frozenset({Mode.FUSEEP})

    @classmethod
    def supports(cls, weights: ExpertTensors) -> Availability:
        """Whether it can compute these experts. Local; pure."""
        if isinstance(weights, Int8ChannelWeights):
            return Availability(ok=True)
        reason = (
            f"computes W8A8 experts, Int8ChannelWeights, not {type(weights).__name__}; quantise "
            "them, or take a mode with dispatchers"
        )
        return Availability(ok=False, reasons=(reason,))

    @classmethod
    @abstractmethod
    def pack(cls, weights: Int8ChannelWeights) -> PackedT:
        """This rank's experts as run() takes them. Local; pure."""

    @classmethod
    @abstractmethod
    def packed_bytes(cls, weights: Int8ChannelWeights) -> int:
        """Memory that pack() takes beside the weights of the checkpoint."""

    @abstractmethod
    def run(self, call: DispatchCall, experts: PackedT) -> FuseEPResult:
        """Compute the routed experts of this rank's tokens.

        Args:
            call: T tokens; T may be 0 and differ between ranks. Its error makes this rank take part
                without tokens.
            experts: what pack() returned.

        Collective: yes.   Host sync: caps.host_syncs times.
        Raises:
            TypeError: experts that were packed for another operator, or not at all.
            ShapeError, CapacityError: some rank reported a fault, where not caps.is_static; else y
                is NaN and check() tells.
        """


def check_packed(experts: object, wanted: type, name: str) -> None:
    """Refuse experts that were packed for another operator, or not at all.

    Raises:
        TypeError: they were; reading them would compute something else silently.
    """
    if not isinstance(experts, wanted):
        raise TypeError(
            f"{name}: experts are {type(experts).__name__}, expected {wanted.__name__}; pack the "
            "weights of the checkpoint with pack() of this operator"
        )
