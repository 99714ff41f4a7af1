"""Standard: every rank sees every token, computes its own experts, and the sums are scattered."""

from __future__ import annotations

from typing import ClassVar

from epcomm.config import Mode
from epcomm.dispatchers.dispatcher import RowsDispatcher
from epcomm.records import RowsCombineInput, RowsDispatchOutput


class StandardDispatcher(RowsDispatcher[RowsDispatchOutput, RowsCombineInput]):
    """All-gather, local experts, reduce-scatter.

    Bytes do not depend on the routing, so it competes on up to about 8 ranks. Trainable.
    """

    mode: ClassVar[Mode] = Mode.STANDARD
