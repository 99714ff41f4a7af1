"""The three dispatchers: who sends what to whom, and which buffers serve it, is a mode."""

from __future__ import annotations

from typing import ClassVar

from epcomm.config import Mode
from epcomm.dispatchers.dispatcher import RowsDispatcher
from epcomm.records import CombineInput, DispatchOutput, RowsCombineInput, RowsDispatchOutput


class DeepEPNormalDispatcher(RowsDispatcher[RowsDispatchOutput, RowsCombineInput]):
    """Sends a token once to each rank that owns one of its experts: prefill and training.

    A dispatch costs the host one read of the counts; combine adds nothing to it. Trainable.
    """

    mode: ClassVar[Mode] = Mode.NORMAL


class DeepEPLowLatencyDispatcher(RowsDispatcher[DispatchOutput, CombineInput]):
    """Moves at most M tokens a rank in buffers of fixed size; counts stay on the device: decode.

    Router weights travel with the tokens and combine applies them, so that a rank reduces before
    it sends. A refused call gives NaN on every rank; check() tells why. No gradients.
    Over shared_memory it is as normal mode: exact sizes, one read of the counts, trainable.
    """

    mode: ClassVar[Mode] = Mode.LOW_LATENCY


class StandardDispatcher(RowsDispatcher[RowsDispatchOutput, RowsCombineInput]):
    """Shows every token to every rank: all-gather, local experts, reduce-scatter.

    Bytes do not depend on the routing, so it competes on up to about 8 ranks. Trainable.
    """

    mode: ClassVar[Mode] = Mode.STANDARD
