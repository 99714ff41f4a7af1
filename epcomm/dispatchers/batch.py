"""Say what a dispatcher gives a buffer, and what it makes of what a buffer returns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from epcomm.calls.call import DispatchCall
from epcomm.dispatchers.base import NeedGrad
from epcomm.errors import EPError
from epcomm.protocol import BatchFlags
from epcomm.quantization import arrange_scales, restore_scales
from epcomm.records import MaskedCombineInput, RowsCombineInput
from epcomm.types import ROW_MAJOR, RowsPer, ScaleLayout, WireTensor


@dataclass(frozen=True, kw_only=True, eq=False)
class Batch:
    """A batch as it is sent.

    call: without history.   hidden_states, topk_weights: those of the call, with their history.
    num_tokens, dtype: of the hidden states as the caller gave them.
    refusal: why the call is none that this dispatcher serves, if so.
    """

    call: DispatchCall
    hidden_states: Tensor | WireTensor
    topk_weights: Tensor
    num_tokens: int
    dtype: torch.dtype
    refusal: EPError | None


def flags_of(inputs_need_grad: bool, experts_need_grad: NeedGrad) -> BatchFlags:
    """Return the flags of a batch in grad mode."""
    flags = BatchFlags.GRAD_ENABLED
    if inputs_need_grad:
        flags |= BatchFlags.INPUTS_NEED_GRAD
    if isinstance(experts_need_grad, Mapping):
        flags |= BatchFlags.of_experts(experts_need_grad.values())
    elif experts_need_grad:
        flags |= BatchFlags.EXPERTS_NEED_GRAD
    return flags


def arranged(rows: WireTensor, layout: ScaleLayout, hidden_size: int) -> WireTensor:
    """Arrange the scales of received rows as the runner reads them; leave rows without scales."""
    if rows.scales is None:
        return rows
    if rows.scale_layout is layout or rows.scale_layout == layout:
        return rows
    came, scales = rows.scale_layout or ROW_MAJOR, rows.scales
    if layout != came:
        num_scales = rows.format.num_scales(hidden_size)
        scales = arrange_scales(restore_scales(scales, came, num_scales), layout)
    return replace(rows, scales=scales, scale_layout=layout)


def as_rows(combine_input: RowsCombineInput | MaskedCombineInput) -> RowsCombineInput:
    """Return the results of either layout as a buffer takes them: MASKED as one row a slot."""
    if isinstance(combine_input, RowsCombineInput):
        return combine_input
    weights = combine_input.slot_weights
    return RowsCombineInput(
        hidden_states=combine_input.hidden_states.flatten(0, 1),
        rows_per=RowsPer.SLOT,
        slot_weights=None if weights is None else weights.flatten(),
        handle=combine_input.handle,
    )
