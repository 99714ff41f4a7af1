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
from epcomm.weights import ExpertWeights


class ExpertRunner(ABC):
    """Computes the local experts of one layer.

    layouts, wire_dtypes: what it reads.
    """

    name: ClassVar[str]
    layouts: ClassVar[frozenset[Layout]]
    wire_dtypes: ClassVar[frozenset[WireDtype]]

    @classmethod
    @abstractmethod
    def supports(cls, weights: ExpertWeights) -> Availability:
        """Whether it can compute these experts here. Local; pure."""

    @overload
    def run(self, dispatched: RowsDispatchOutput, weights: ExpertWeights) -> RowsCombineInput: ...

    @overload
    def run(
        self, dispatched: MaskedDispatchOutput, weights: ExpertWeights
    ) -> MaskedCombineInput: ...

    @abstractmethod
    def run(self, dispatched: DispatchOutput, weights: ExpertWeights) -> CombineInput:
        """Compute each slot with its expert, and weight it where the record says `runner`.

        Rows and slots past the counts are not read into any result. Differentiable in rows,
        slot_weights and weights. Local; no rank is waited for.
        """


def weight_slots(hidden: torch.Tensor, slot_weights: torch.Tensor) -> torch.Tensor:
    """hidden [S, *] times slot_weights [S], multiplied in float32 and cast once."""
    return (hidden * slot_weights.unsqueeze(1)).to(hidden.dtype)
