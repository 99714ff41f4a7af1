"""DeepEP-low-latency: decode, static shapes, no host read, no gradients."""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor

from epcomm.config import Mode
from epcomm.dispatchers.rows import RowsDispatcher
from epcomm.errors import ConfigError
from epcomm.records import RowsDispatchOutput, TopKOutput


class DeepEPLowLatencyDispatcher(RowsDispatcher):
    """Moves at most M tokens a rank in buffers of fixed size; counts stay on the device.

    Router weights travel with the tokens and combine applies them, so that a rank reduces before
    it sends. A refused call gives NaN on every rank; check() tells why.
    """

    mode: ClassVar[Mode] = Mode.LOW_LATENCY

    def dispatch(
        self, hidden_states: Tensor, topk: TopKOutput, *, experts_need_grad: bool = False
    ) -> RowsDispatchOutput:
        needs_grad = hidden_states.requires_grad or topk.topk_weights.requires_grad
        if torch.is_grad_enabled() and (needs_grad or experts_need_grad):
            # All ranks are in the same phase, so all raise here: nothing needs to be announced.
            raise ConfigError(
                f"dispatch: low latency has no gradients, but some are needed ({self._group.where})"
                "; use mode normal, or torch.no_grad()"
            )
        return super().dispatch(hidden_states, topk)
