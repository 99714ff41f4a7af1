"""DeepEP-low-latency: decode, static shapes, no host sync, no gradients."""

from __future__ import annotations

from typing import ClassVar

from epcomm.config import Mode
from epcomm.dispatchers.dispatcher import RowsDispatcher
from epcomm.records import CombineInput, DispatchOutput


class DeepEPLowLatencyDispatcher(RowsDispatcher[DispatchOutput, CombineInput]):
    """Moves at most M tokens a rank in buffers of fixed size; counts stay on the device.

    Router weights travel with the tokens and combine applies them, so that a rank reduces before
    it sends. A refused call gives NaN on every rank; check() tells why.
    """

    mode: ClassVar[Mode] = Mode.LOW_LATENCY
