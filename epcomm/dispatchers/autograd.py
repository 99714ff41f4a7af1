"""Backward of dispatch and combine: each is the other along the same exchange plan.

With f_s the result of slot s = (t, k) and y[t] = sum of w_s f_s, the backward of combine sends dy
along the exchange plan, and the backward of dispatch brings the gradients of rows and weights back
as one message. Hidden states and router weights pass through one Function, and every rank runs the
same Functions whether its own inputs need gradients or not, so backward issues the same two
collectives in the same order everywhere.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from epcomm.buffers.base import Buffer, Dispatched
from epcomm.calls.call import DispatchCall
from epcomm.dispatchers import operators
from epcomm.dispatchers.operators import CombineCall
from epcomm.ops.slots import gather_rows, gather_scalars
from epcomm.platforms.profiler import ranged
from epcomm.protocol import BatchFlags
from epcomm.quantization import dequantize
from epcomm.records import ExchangePlan, RowsCombineInput
from epcomm.types import RowsPer, WireFormat, WireTensor, sum_dtype


class _Dispatch(torch.autograd.Function):
    """Ties what a dispatch brought to what was sent: [T, H] and [T, K] to [R, H] and [C]."""

    @staticmethod
    def forward(
        ctx: FunctionCtx, x: Tensor, topk_weights: Tensor, buffer: Buffer, out: Dispatched
    ) -> tuple[Tensor, Tensor]:
        ctx.buffer, ctx.exchange_plan, ctx.dtype = buffer, out.exchange_plan, x.dtype  # type: ignore[attr-defined]
        assert out.slot_weights is not None, "to a trainable buffer, weights travel"
        # Codes have no gradient. Rows that need one are handed out dequantised, and the gradient
        # passes the quantisation as if it were not there (straight through).
        return dequantize(out.rows, x.dtype), out.slot_weights

    @staticmethod
    @once_differentiable
    @ranged("dispatch_backward")
    def backward(  # type: ignore[override]
        ctx: FunctionCtx, grad_rows: Tensor, grad_slot_weights: Tensor
    ) -> tuple[Tensor, Tensor | None, None, None]:
        exchange_plan: ExchangePlan = ctx.exchange_plan  # type: ignore[attr-defined]
        slots_of_row = exchange_plan.index.slots_of_row
        assert slots_of_row is not None, "a trainable buffer hands out an index over rows"
        returned = ctx.buffer.combine(  # type: ignore[attr-defined]
            grad_rows,
            exchange_plan,
            rows_per=RowsPer.ROW,
            row_scalars=gather_scalars(grad_slot_weights, slots_of_row),
        )
        return returned.y.to(ctx.dtype), returned.scalars, None, None  # type: ignore[attr-defined]


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: FunctionCtx, rows: Tensor, slot_weights: Tensor | None, call: CombineCall
    ) -> Tensor:
        ctx.call = call  # type: ignore[attr-defined]
        if slot_weights is not None:
            ctx.save_for_backward(rows, slot_weights)
        return operators.combine(rows, slot_weights, call)

    @staticmethod
    @once_differentiable
    @ranged("combine_backward")
    def backward(  # type: ignore[override]
        ctx: FunctionCtx, grad_y: Tensor
    ) -> tuple[Tensor, Tensor | None, None]:
        call: CombineCall = ctx.call  # type: ignore[attr-defined]
        # contiguous(): an expanded gradient, as sum() makes, has no rows to send.
        wire = grad_y.to(call.gradient_dtype).contiguous()
        grad_rows = call.buffer.cached_dispatch(wire, call.exchange_plan).to(grad_y.dtype)
        if call.rows_per is RowsPer.ROW:
            # Autograd may keep them; slots are copied below.
            return grad_rows if call.lasts else grad_rows.clone(), None, None
        grad_slots = gather_rows(grad_rows, call.exchange_plan.index)
        if not ctx.saved_tensors:  # type: ignore[attr-defined]
            return grad_slots, None, None
        rows, slot_weights = ctx.saved_tensors  # type: ignore[attr-defined]
        dtype = sum_dtype(rows.dtype)
        grad_weights = (grad_slots.to(dtype) * rows.to(dtype)).sum(dim=1)
        weighted = (grad_slots * slot_weights.unsqueeze(1)).to(grad_slots.dtype)
        return weighted, grad_weights, None


def dispatch_rows(
    buffer: Buffer, x: Tensor | WireTensor, topk_weights: Tensor, call: DispatchCall
) -> Dispatched:
    """Dispatch with gradients for x and topk_weights.

    Args:
        x: [T, H], what call.hidden_states was made from; codes where the call has no flags.
        topk_weights: [T, K], call.topk_weights with its history.
        call: the call; its tensors carry no history.

    Collective: yes, and so is its backward, on every rank if any rank's inputs need gradients.
    """
    if call.flags == BatchFlags.NONE:
        return buffer.dispatch(call)
    assert isinstance(x, Tensor), "codes have no gradient, so their calls have no flags"
    out = operators.dispatch(buffer, call)
    if not out.any_flags & BatchFlags.INPUTS_NEED_GRAD:
        return out
    rows, slot_weights = _Dispatch.apply(_anchored(x), topk_weights, buffer, out)
    wire = WireTensor(data=rows, format=WireFormat.of(x.dtype))
    return replace(out, rows=wire, slot_weights=slot_weights)


def combine_rows(buffer: Buffer, rows: RowsCombineInput, gradient_dtype: torch.dtype) -> Tensor:
    """Combine with gradients for the expert rows and, if given, the slot weights.

    Args:
        buffer: the buffer that dispatched.
        rows: expert results.
        gradient_dtype: elements on the wire in backward.

    Collective: yes, and so is its backward, on every rank if any rank needs one.
    """
    handle, hidden_states, slot_weights = rows.handle, rows.hidden_states, rows.slot_weights
    if not torch.is_grad_enabled():
        return buffer.combine(
            hidden_states, handle.exchange_plan, rows_per=rows.rows_per, slot_weights=slot_weights
        ).y
    call = CombineCall(
        buffer=buffer,
        exchange_plan=handle.exchange_plan,
        rows_per=rows.rows_per,
        gradient_dtype=gradient_dtype,
        lasts=handle.needs_backward,
    )
    if handle.needs_backward:
        hidden_states = _anchored(hidden_states)
    elif not (
        hidden_states.requires_grad or (slot_weights is not None and slot_weights.requires_grad)
    ):
        return operators.combine(hidden_states, slot_weights, call)
    return _Combine.apply(hidden_states, slot_weights, call)


def _anchored(tensor: Tensor) -> Tensor:
    """Return `tensor` or an alias that requires grad, so that its Function is part of backward."""
    return tensor if tensor.requires_grad else tensor.detach().requires_grad_()
