"""DeepEP-normal: prefill and training, one copy of a token per destination rank."""

from __future__ import annotations

from typing import ClassVar

from epcomm.config import Mode
from epcomm.dispatchers.dispatcher import RowsDispatcher
from epcomm.records import RowsCombineInput, RowsDispatchOutput


class DeepEPNormalDispatcher(RowsDispatcher[RowsDispatchOutput, RowsCombineInput]):
    """Sends a token once to each rank that owns one of its experts.

    A dispatch costs the host one read of the counts; combine adds nothing to it. Trainable.
    """

    mode: ClassVar[Mode] = Mode.NORMAL
