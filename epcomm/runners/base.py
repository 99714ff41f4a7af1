"""The contract of a runner: from a DispatchOutput to the CombineInput of the same layout."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar, overload

import torch

from epcomm.buffers.base import Availability
from epcomm.records import (
    CombineInput,
    DispatchOutput,
    MaskedCombineInput,
    MaskedDispatchOutput,
    RowsCombineInput,
    RowsDispatchOutput,
)
from epcomm.types import Layout, WireDtype
from epcomm.weights import ExpertTensors


class ExpertRunner(ABC):
    """Computes the local experts of one layer.

    kinds: experts that it computes.   layouts: what it reads.
    """

    name: ClassVar[str]
    kinds: ClassVar[tuple[type[ExpertTensors], ...]]
    layouts: ClassVar[frozenset[Layout]]

    @classmethod
    def supports(cls, weights: ExpertTensors) -> Availability:
        """Whether it can compute these experts here. Local; pure. By default: by their kind."""
        if isinstance(weights, cls.kinds):
            return Availability(ok=True)
        computed = ", ".join(kind.__name__ for kind in cls.kinds)
        return Availability(
            ok=False, reasons=(f"computes {computed}, not {type(weights).__name__}",)
        )

    @classmethod
    @abstractmethod
    def wire_dtypes(cls, weights: ExpertTensors) -> frozenset[WireDtype]:
        """What rows it reads for these experts. Local; pure."""

    @overload
    def run(self, dispatched: RowsDispatchOutput, weights: ExpertTensors) -> RowsCombineInput: ...

    @overload
    def run(
        self, dispatched: MaskedDispatchOutput, weights: ExpertTensors
    ) -> MaskedCombineInput: ...

    @abstractmethod
    def run(self, dispatched: DispatchOutput, weights: ExpertTensors) -> CombineInput:
        """Compute each slot with its expert, and weight it where the record says `runner`.

        Rows and slots past the counts are not read into any result. Differentiable in rows,
        slot_weights and weights. Local; no rank is waited for.
        """


def weight_slots(hidden: torch.Tensor, slot_weights: torch.Tensor) -> torch.Tensor:
    """hidden [S, *] times slot_weights [S], multiplied in float32 and cast once."""
    return (hidden * slot_weights.unsqueeze(1)).to(hidden.dtype)
