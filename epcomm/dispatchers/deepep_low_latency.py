"""DeepEP-low-latency: decode, static shapes, no host read, no gradients."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from epcomm.config import Mode
from epcomm.dispatchers.rows import RowsDispatcher
from epcomm.errors import ConfigError, EPError
from epcomm.records import CombineInput, DispatchOutput, TopKOutput


class DeepEPLowLatencyDispatcher(RowsDispatcher[DispatchOutput, CombineInput]):
    """Moves at most M tokens a rank in buffers of fixed size; counts stay on the device.

    Router weights travel with the tokens and combine applies them, so that a rank reduces before
    it sends. A refused call gives NaN on every rank; check() tells why.
    """

    mode: ClassVar[Mode] = Mode.LOW_LATENCY

    def _refusal(
        self, hidden_states: Tensor, topk: TopKOutput, experts_need_grad: bool
    ) -> EPError | None:
        inputs = (hidden_states, topk.topk_weights)
        needs_grad = any(getattr(tensor, "requires_grad", False) for tensor in inputs)
        if not (torch.is_grad_enabled() and (needs_grad or experts_need_grad)):
            return None
        return ConfigError(
            f"dispatch: low latency has no gradients, but some are needed ({self._group.where}); "
            "use mode normal, or torch.no_grad()"
        )
