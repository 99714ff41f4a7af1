"""Autograd of dispatch and combine, and both as named operators.

The backward of each is the other along the same exchange plan. With f_s the result of slot
s = (t, k) and y[t] = sum of w_s f_s, the backward of combine sends dy along the exchange plan, and
the backward of dispatch returns the gradients of rows and weights in one message. Hidden states and
router weights share one Function, and every rank runs the same Functions whether or not its own
inputs need gradients, so backward runs the same two collectives in the same order on all ranks.

A policy of selective activation checkpointing selects by name what it saves:

    saved = {torch.ops.epcomm.dispatch.default, torch.ops.epcomm.combine.default}

Saved results are not sent again when backward recomputes. An operator takes only tensors and
numbers, so calls and exchange plans are passed by number. If a policy restores saved rows, their
number still leads to the exchange plan, because the graph of the forward pass holds the plan. Only
a TorchDispatchMode sees operators, so without one a call goes directly to its buffer.
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
from epcomm.ops.slots import dot_rows, gather_rows, gather_scalars
from epcomm.platforms.tracing import ranged
from epcomm.protocol import BatchFlags
from epcomm.quantization import dequantize
from epcomm.records import ExchangePlan, RowsCombineInput, SlotIndex
from epcomm.types import RowsPer, WireFormat, WireTensor


@dataclass(frozen=True, kw_only=True, eq=False)
class _CombineOn:
    """The arguments of a combine that are not tensors."""

    buffer: Buffer
    exchange_plan: ExchangePlan
    rows_per: RowsPer


@dataclass(kw_only=True, eq=False)
class _DispatchOn:
    """A dispatch call; it holds the resulting exchange plan until the caller does."""

    buffer: Buffer
    call: DispatchCall
    exchange_plan: ExchangePlan | None = None


@dataclass(frozen=True, kw_only=True, eq=False)
class _Arrival:
    """The results of a dispatch besides its plan and tensors; `rows` has no elements."""

    rows: WireTensor
    index: SlotIndex
    any_flags: BatchFlags


# Weak references: callers keep their calls and exchange plans alive.
_numbered: WeakValueDictionary[int, object] = WeakValueDictionary()
_arrivals: WeakKeyDictionary[ExchangePlan, _Arrival] = WeakKeyDictionary()
_numbers = itertools.count()


def _number_of(record: object) -> int:
    number = next(_numbers)
    _numbered[number] = record
    return number


class _Dispatch(torch.autograd.Function):
    """Connects sent tensors [T, H] and [T, K] to received [R, H] and [C] in the graph."""

    @staticmethod
    def forward(
        ctx: FunctionCtx,
        x: Tensor,
        topk_weights: Tensor,
        buffer: Buffer,
        out: Dispatched,
        packs: bool,
    ) -> tuple[Tensor, Tensor]:
        ctx.buffer, ctx.exchange_plan, ctx.dtype = buffer, out.exchange_plan, x.dtype  # type: ignore[attr-defined]
        assert out.slot_weights is not None, "a trainable buffer sends weights"
        # Quantised elements have no gradient, so rows that need gradients are returned dequantised.
        # The gradient ignores the quantisation (straight-through estimator).
        is_quantized = out.rows.format.dtype.is_quantized
        rows = dequantize(out.rows, x.dtype) if is_quantized else out.rows.data.to(x.dtype)
        ctx.rows_per = RowsPer.SLOT if packs else RowsPer.ROW  # type: ignore[attr-defined]
        return gather_rows(rows, out.index) if packs else rows, out.slot_weights

    @staticmethod
    @once_differentiable
    @ranged("dispatch_backward")
    def backward(  # type: ignore[override]
        ctx: FunctionCtx, grad_rows: Tensor, grad_slot_weights: Tensor
    ) -> tuple[Tensor, Tensor | None, None, None, None]:
        exchange_plan: ExchangePlan = ctx.exchange_plan  # type: ignore[attr-defined]
        slots_of_row = exchange_plan.index.slots_of_row
        assert slots_of_row is not None, "a trainable buffer returns an index over rows"
        grad_x, grad_weights = ctx.buffer.combine(  # type: ignore[attr-defined]
            grad_rows,
            exchange_plan,
            rows_per=ctx.rows_per,  # type: ignore[attr-defined]
            row_scalars=gather_scalars(grad_slot_weights, slots_of_row),
        )
        return grad_x.to(ctx.dtype), grad_weights, None, None, None  # type: ignore[attr-defined]


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
        """Combine; `lasts`: the caller owns the rows that cached_dispatch() returns in backward."""
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
        # Rows that are sent must be contiguous, but sum() makes an expanded gradient.
        wire = grad_y.to(ctx.gradient_dtype).contiguous()  # type: ignore[attr-defined]
        grad_rows = ctx.buffer.cached_dispatch(wire, exchange_plan).to(grad_y.dtype)  # type: ignore[attr-defined]
        if ctx.rows_per is RowsPer.ROW:  # type: ignore[attr-defined]
            # Autograd may keep these rows, so copy them if a later dispatch overwrites them.
            grad, grad_weights = grad_rows if ctx.lasts else grad_rows.clone(), None  # type: ignore[attr-defined]
        else:
            grad, grad_weights = gather_rows(grad_rows, exchange_plan.index), None
            if ctx.saved_tensors:  # type: ignore[attr-defined]
                rows, slot_weights = ctx.saved_tensors  # type: ignore[attr-defined]
                grad_weights = dot_rows(grad, rows)
                grad = (grad * slot_weights.unsqueeze(1)).to(grad.dtype)
        return grad, grad_weights, None, None, None, None, None


def dispatch_rows(buffer: Buffer, call: DispatchCall) -> Dispatched:
    """Dispatch in grad mode; rows and weights have no history before with_history().

    Collective: as Buffer.dispatch; not if a checkpointing policy has saved the result, which it
        does on all ranks or none.
    """
    with torch.no_grad():
        return _dispatch_watched(buffer, call)


def with_history(
    buffer: Buffer, call: DispatchCall, out: Dispatched, *, packs: bool = False
) -> tuple[WireTensor, Tensor]:
    """Return the rows and slot weights of a dispatch, differentiable in the inputs of the call.

    packs: return one row per slot, [C, H], so that backward sums the gradients of slots by group.

    Collective: no, but backward is, on every rank if the inputs of any rank need gradients.
    """
    x = call.hidden_states
    assert isinstance(x, Tensor), "quantised rows have no gradient, so their calls have no flags"
    rows, slot_weights = _Dispatch.apply(_anchored(x), call.topk_weights, buffer, out, packs)
    return WireTensor(data=rows, format=WireFormat.of(x.dtype)), slot_weights


def combine_rows(buffer: Buffer, rows: RowsCombineInput, gradient_dtype: torch.dtype) -> Tensor:
    """Combine in grad mode, differentiable in the expert results and the slot weights, if given.

    Args:
        buffer: the buffer of the dispatch.
        rows: the expert results.
        gradient_dtype: dtype of the rows that backward sends.

    Collective: yes, and so is its backward, on every rank if any rank needs it.
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
    """Return `tensor` or an alias that requires grad, so that its Function runs in backward."""
    return tensor if tensor.requires_grad else tensor.detach().requires_grad_()


def _dispatch_watched(buffer: Buffer, call: DispatchCall) -> Dispatched:
    """Dispatch, through the operator if a mode sees operators.

    Lifetime: results saved by a policy are usable as long as the exchange plan exists.
    Collective: see dispatch_rows().
    """
    if not _is_watched():
        return buffer.dispatch(call)
    held = _DispatchOn(buffer=buffer, call=call)
    rows, scales, slot_weights, number = torch.ops.epcomm.dispatch.default(
        call.unquantized, call.topk_ids, call.topk_weights, _number_of(held)
    )
    exchange_plan = _numbered[int(number)]
    assert isinstance(exchange_plan, ExchangePlan), "the number is that of an exchange plan"
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
    """Combine, through the operator if a mode sees operators; return y [T, H].

    Collective: as Buffer.combine; not if a checkpointing policy has saved the result, which it
        does on all ranks or none.
    """
    if not _is_watched():
        y, _ = buffer.combine(rows, exchange_plan, rows_per=rows_per, slot_weights=slot_weights)
        return y
    held = _CombineOn(buffer=buffer, exchange_plan=exchange_plan, rows_per=rows_per)
    return torch.ops.epcomm.combine.default(rows, slot_weights, _number_of(held))


def _is_watched() -> bool:
    """Return whether a TorchDispatchMode other than FakeTensorMode is active.

    Fake tensors have no data to save, and the operators have no kernels for them.
    """
    keys = torch._C._TorchDispatchModeKey
    has_mode = torch._C._len_torch_dispatch_stack() > 0
    return has_mode and torch._C._get_dispatch_mode(keys.FAKE) is None


def _dispatch_kernel(
    hidden_states: Tensor, topk_ids: Tensor, topk_weights: Tensor, call: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    held = _numbered[call]
    assert isinstance(held, _DispatchOn), "_dispatch_watched() passes the number of a call"
    out = held.buffer.dispatch(held.call)
    assert out.slot_weights is not None, "a trainable buffer sends weights"
    rows, scales = out.rows.data, out.rows.scales
    nothing = rows.new_empty(0)
    shell = replace(out.rows, data=nothing, scales=None if scales is None else nothing)
    _arrivals[out.exchange_plan] = _Arrival(rows=shell, index=out.index, any_flags=out.any_flags)
    held.exchange_plan = out.exchange_plan
    number = torch.tensor(_number_of(out.exchange_plan), device="cpu")
    return rows, nothing.clone() if scales is None else scales, out.slot_weights, number


def _combine_kernel(rows: Tensor, slot_weights: Tensor | None, call: int) -> Tensor:
    held = _numbered[call]
    assert isinstance(held, _CombineOn), "_combine_watched() passes the number of a call"
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
