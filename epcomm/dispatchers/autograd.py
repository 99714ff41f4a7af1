"""Backward of dispatch and combine, and both as operators with names.

Each is the other along the same exchange plan. With f_s the result of slot s = (t, k) and y[t] =
sum of w_s f_s, the backward of combine sends dy along the exchange plan, and the backward of
dispatch brings the gradients of rows and weights back as one message. Hidden states and router
weights pass through one Function, and every rank runs the same Functions whether its own inputs
need gradients or not, so backward issues the same two collectives in the same order everywhere.

A policy of selective activation checkpointing chooses by name what it saves:

    saved = {torch.ops.epcomm.dispatch.default, torch.ops.epcomm.combine.default}

What is saved does not travel again when backward recomputes. An operator takes tensors and numbers
alone, so the call of a buffer goes by a number, and so does the exchange plan of a batch: when rows
come from the storage of a policy, that number still finds it, because the graph of the forward pass
holds it. Only a TorchDispatchMode sees operators, so without one a call goes to its buffer.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable
from torch.library import Library

from epcomm.buffers.base import Buffer, Dispatched
from epcomm.calls.call import DispatchCall
from epcomm.ops.slots import gather_rows, gather_scalars
from epcomm.platforms.tracing import ranged
from epcomm.protocol import BatchFlags
from epcomm.quantization import dequantize
from epcomm.records import ExchangePlan, RowsCombineInput, SlotIndex
from epcomm.types import RowsPer, WireFormat, WireTensor, sum_dtype


@dataclass(frozen=True, kw_only=True, eq=False)
class _CombineOn:
    """The arguments of a combine that are no tensors of the graph."""

    buffer: Buffer
    exchange_plan: ExchangePlan
    rows_per: RowsPer


@dataclass(kw_only=True, eq=False)
class _DispatchOn:
    """A call of a buffer, which holds the exchange plan that came of it until the caller does."""

    buffer: Buffer
    call: DispatchCall
    exchange_plan: ExchangePlan | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class _Arrival:
    """The fields that a dispatch returns beside its plan and tensors; `rows` has no elements."""

    rows: WireTensor
    index: SlotIndex
    any_flags: BatchFlags


# Who makes a call or has an exchange plan holds it; nothing is kept alive here.
_numbered: WeakValueDictionary[int, object] = WeakValueDictionary()
_arrivals: WeakKeyDictionary[ExchangePlan, _Arrival] = WeakKeyDictionary()
_numbers = itertools.count()


def _number_of(record: object) -> int:
    number = next(_numbers)
    _numbered[number] = record
    return number


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
        rows = out.rows
        if not rows.format.dtype.is_quantized:
            return rows.data.to(x.dtype), out.slot_weights
        return dequantize(rows, x.dtype), out.slot_weights

    @staticmethod
    @once_differentiable
    @ranged("dispatch_backward")
    def backward(  # type: ignore[override]
        ctx: FunctionCtx, grad_rows: Tensor, grad_slot_weights: Tensor
    ) -> tuple[Tensor, Tensor | None, None, None]:
        exchange_plan: ExchangePlan = ctx.exchange_plan  # type: ignore[attr-defined]
        slots_of_row = exchange_plan.index.slots_of_row
        assert slots_of_row is not None, "a trainable buffer hands out an index over rows"
        grad_x, grad_weights = ctx.buffer.combine(  # type: ignore[attr-defined]
            grad_rows,
            exchange_plan,
            rows_per=RowsPer.ROW,
            row_scalars=gather_scalars(grad_slot_weights, slots_of_row),
        )
        return grad_x.to(ctx.dtype), grad_weights, None, None  # type: ignore[attr-defined]


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: FunctionCtx,
        rows: Tensor,
        slot_weights: Tensor | None,
        buffer: Buffer,
        exchange_plan: ExchangePlan,
        rows_per: RowsPer,
        gradient_dtype: torch.dtype,
        lasts: bool,
    ) -> Tensor:
        """Combine; `lasts`: rows along the exchange plan are the caller's own in backward."""
        ctx.buffer, ctx.exchange_plan, ctx.rows_per = buffer, exchange_plan, rows_per  # type: ignore[attr-defined]
        ctx.gradient_dtype, ctx.lasts = gradient_dtype, lasts  # type: ignore[attr-defined]
        if slot_weights is not None:
            ctx.save_for_backward(rows, slot_weights)
        return _combine_watched(rows, slot_weights, buffer, exchange_plan, rows_per)

    @staticmethod
    @once_differentiable
    @ranged("combine_backward")
    def backward(  # type: ignore[override]
        ctx: FunctionCtx, grad_y: Tensor
    ) -> tuple[Tensor | None, ...]:
        exchange_plan: ExchangePlan = ctx.exchange_plan  # type: ignore[attr-defined]
        # contiguous(): an expanded gradient, as sum() makes, has no rows to send.
        wire = grad_y.to(ctx.gradient_dtype).contiguous()  # type: ignore[attr-defined]
        grad_rows = ctx.buffer.cached_dispatch(wire, exchange_plan).to(grad_y.dtype)  # type: ignore[attr-defined]
        if ctx.rows_per is RowsPer.ROW:  # type: ignore[attr-defined]
            # Autograd may keep them; slots are copied below.
            grad, grad_weights = grad_rows if ctx.lasts else grad_rows.clone(), None  # type: ignore[attr-defined]
        else:
            grad, grad_weights = gather_rows(grad_rows, exchange_plan.index), None
            if ctx.saved_tensors:  # type: ignore[attr-defined]
                rows, slot_weights = ctx.saved_tensors  # type: ignore[attr-defined]
                dtype = sum_dtype(rows.dtype)
                grad_weights = (grad.to(dtype) * rows.to(dtype)).sum(dim=1)
                grad = (grad * slot_weights.unsqueeze(1)).to(grad.dtype)
        return grad, grad_weights, None, None, None, None, None


def dispatch_rows(buffer: Buffer, call: DispatchCall) -> Dispatched:
    """Dispatch in grad mode; rows and weights have no history before with_history().

    Collective: as Buffer.dispatch; unless a policy of checkpointing had saved the result, on all
        ranks alike.
    """
    with torch.no_grad():
        return _dispatch_watched(buffer, call)


def with_history(buffer: Buffer, call: DispatchCall, out: Dispatched) -> tuple[WireTensor, Tensor]:
    """Return the rows and slot weights of a dispatch, with gradients for those of the call.

    Backward is collective, on every rank if the inputs of any rank need gradients.
    """
    x = call.hidden_states
    assert isinstance(x, Tensor), "codes have no gradient, so their calls have no flags"
    rows, slot_weights = _Dispatch.apply(_anchored(x), call.topk_weights, buffer, out)
    return WireTensor(data=rows, format=WireFormat.of(x.dtype)), slot_weights


def combine_rows(buffer: Buffer, rows: RowsCombineInput, gradient_dtype: torch.dtype) -> Tensor:
    """Combine in grad mode, with gradients for the expert rows and, if given, the slot weights.

    Args:
        buffer: the buffer that dispatched.
        rows: expert results.
        gradient_dtype: elements on the wire in backward.

    Collective: yes, and so is its backward, on every rank if any rank needs one.
    """
    handle, hidden_states, slot_weights = rows.handle, rows.hidden_states, rows.slot_weights
    exchange_plan, rows_per = handle.exchange_plan, rows.rows_per
    if handle.needs_backward:
        hidden_states = _anchored(hidden_states)
    elif not (
        hidden_states.requires_grad or (slot_weights is not None and slot_weights.requires_grad)
    ):
        return _combine_watched(hidden_states, slot_weights, buffer, exchange_plan, rows_per)
    return _Combine.apply(
        hidden_states,
        slot_weights,
        buffer,
        exchange_plan,
        rows_per,
        gradient_dtype,
        handle.needs_backward,
    )


def _anchored(tensor: Tensor) -> Tensor:
    """Return `tensor` or an alias that requires grad, so that its Function is part of backward."""
    return tensor if tensor.requires_grad else tensor.detach().requires_grad_()


def _dispatch_watched(buffer: Buffer, call: DispatchCall) -> Dispatched:
    """Dispatch through the operator, where somebody watches.

    Lifetime: a policy's storage serves as long as somebody holds the exchange plan.
    Collective: as Buffer.dispatch; unless a policy had saved it, on all ranks alike.
    """
    if not _is_watched():
        return buffer.dispatch(call)
    held = _DispatchOn(buffer=buffer, call=call)
    rows, scales, slot_weights, number = torch.ops.epcomm.dispatch.default(
        call.unquantized, call.topk_ids, call.topk_weights, _number_of(held)
    )
    exchange_plan = _numbered[int(number)]
    assert isinstance(exchange_plan, ExchangePlan), "the operator returned the number of one"
    arrival = _arrivals[exchange_plan]
    has_scales = arrival.rows.scales is not None
    return Dispatched(
        rows=replace(arrival.rows, data=rows, scales=scales if has_scales else None),
        index=arrival.index,
        slot_weights=slot_weights,
        exchange_plan=exchange_plan,
        any_flags=arrival.any_flags,
    )


def _combine_watched(
    rows: Tensor,
    slot_weights: Tensor | None,
    buffer: Buffer,
    exchange_plan: ExchangePlan,
    rows_per: RowsPer,
) -> Tensor:
    """Combine through the operator, where somebody watches: y [T, H].

    Collective: as Buffer.combine; unless a policy had saved it, on all ranks alike.
    """
    if not _is_watched():
        y, _ = buffer.combine(rows, exchange_plan, rows_per=rows_per, slot_weights=slot_weights)
        return y
    held = _CombineOn(buffer=buffer, exchange_plan=exchange_plan, rows_per=rows_per)
    return torch.ops.epcomm.combine.default(rows, slot_weights, _number_of(held))


def _is_watched() -> bool:
    """Return whether a mode sees operators that is more than one for tensors without data.

    A tensor without data has nothing that a policy could save, and the operators no kernel for it.
    """
    keys = torch._C._TorchDispatchModeKey
    has_mode = torch._C._len_torch_dispatch_stack() > 0
    return has_mode and torch._C._get_dispatch_mode(keys.FAKE) is None


def _dispatch_kernel(
    hidden_states: Tensor, topk_ids: Tensor, topk_weights: Tensor, call: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    held = _numbered[call]
    assert isinstance(held, _DispatchOn), "numbers are made here"
    out = held.buffer.dispatch(held.call)
    assert out.slot_weights is not None, "to a trainable buffer, weights travel"
    rows, scales = out.rows.data, out.rows.scales
    nothing = rows.new_empty(0)
    shell = replace(out.rows, data=nothing, scales=None if scales is None else nothing)
    _arrivals[out.exchange_plan] = _Arrival(rows=shell, index=out.index, any_flags=out.any_flags)
    held.exchange_plan = out.exchange_plan
    number = torch.tensor(_number_of(out.exchange_plan), device="cpu")
    return rows, nothing.clone() if scales is None else scales, out.slot_weights, number


def _combine_kernel(rows: Tensor, slot_weights: Tensor | None, call: int) -> Tensor:
    held = _numbered[call]
    assert isinstance(held, _CombineOn), "numbers are made here"
    y, _ = held.buffer.combine(
        rows, held.exchange_plan, rows_per=held.rows_per, slot_weights=slot_weights
    )
    return y


_library = Library("epcomm", "DEF")
_library.define(
    "dispatch(Tensor hidden_states, Tensor topk_ids, Tensor topk_weights, int call)"
    " -> (Tensor rows, Tensor scales, Tensor slot_weights, Tensor number)"
)
_library.define("combine(Tensor rows, Tensor? slot_weights, int call) -> Tensor")
_library.impl("dispatch", _dispatch_kernel, "CompositeExplicitAutograd")
_library.impl("combine", _combine_kernel, "CompositeExplicitAutograd")
