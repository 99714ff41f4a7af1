"""Autograd of dispatch and combine, and both as named operators.

The backward of each is the other along the same exchange plan. With f_s the result of slot
s = (t, k) and y[t] = sum of w_s f_s, the backward of combine sends dy along the exchange plan, and
the backward of dispatch returns the gradients of rows and weights in one message. Hidden states and
router weights share one Function, and every rank runs the same Functions whether or not its own
inputs need gradients, so backward runs the same two collectives in the same order on all ranks.

A call that is begun has two Functions. Forward begins the call at the first and waits for it at the
second; backward begins its dual at the second and waits at the first. So whatever runs between them
in forward has its backward between them too, because autograd runs later nodes first. The tensor
that connects them has no elements.

A policy of selective activation checkpointing selects by name what it saves:

    saved = {torch.ops.epcomm.dispatch.default, torch.ops.epcomm.combine.default}

Saved results are not sent again when backward recomputes. An operator takes only tensors and
numbers, so calls and exchange plans are passed by number. If a policy restores saved rows, their
number still leads to the exchange plan, because the graph of the forward pass holds the plan. Only
a TorchDispatchMode sees operators, so without one a call goes directly to its buffer.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Generic, TypeVar
from weakref import WeakKeyDictionary, WeakValueDictionary

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable
from torch.library import Library

from epcomm.buffers.base import Buffer, Dispatched
from epcomm.calls.call import DispatchCall
from epcomm.calls.order import Calls, Report
from epcomm.ops.slots import dot_rows, gather_rows, gather_scalars
from epcomm.platforms.tracing import ranged
from epcomm.protocol import BatchFlags
from epcomm.quantization import dequantize
from epcomm.records import ExchangePlan, Pending, RowsCombineInput, SlotIndex
from epcomm.types import RowsPer, WireFormat, WireTensor

T = TypeVar("T")
# The gradients of tokens [T, H] and of router weights [T, K].
_Gradients = tuple[Tensor, Tensor | None]


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


@dataclass(kw_only=True, eq=False)
class _Transfer(Generic[T]):
    """The call in flight between the two Functions of a begun call, forward or backward."""

    buffer: Buffer
    calls: Calls
    name: str
    pending: Pending[T] | None = None

    def begin(self, call: Callable[[], T]) -> None:
        """Begin a call of backward."""
        self.pending = self.calls.begin(call, name=f"backward of {self.name}")

    def wait(self) -> T:
        """Return the result of the call in flight."""
        assert self.pending is not None, "the other Function has begun the call"
        pending, self.pending = self.pending, None
        return pending.wait()


@dataclass(frozen=True, kw_only=True, eq=False)
class Sent:
    """A dispatch that was begun in grad mode: its first Function, for with_history()."""

    tensor: Tensor
    transfer: _Transfer[_Gradients]


class _Dispatch(torch.autograd.Function):
    """Connects sent tensors [T, H] and [T, K] to received [R, H] and [C] in the graph."""

    @staticmethod
    def forward(
        ctx: FunctionCtx,
        x: Tensor,
        topk_weights: Tensor,
        buffer: Buffer,
        calls: Calls | None,
        out: Dispatched,
        packs: bool,
    ) -> tuple[Tensor, Tensor]:
        ctx.buffer, ctx.calls, ctx.dtype = buffer, calls, x.dtype  # type: ignore[attr-defined]
        return _received(ctx, out, x.dtype, packs)

    @staticmethod
    @once_differentiable
    def backward(  # type: ignore[override]
        ctx: FunctionCtx, grad_rows: Tensor, grad_slot_weights: Tensor
    ) -> tuple[Tensor | None, ...]:
        if ctx.calls is not None:  # type: ignore[attr-defined]
            ctx.calls.settle()  # type: ignore[attr-defined]
        grad_x, grad_weights = _return_gradients(
            ctx.buffer,  # type: ignore[attr-defined]
            ctx.exchange_plan,  # type: ignore[attr-defined]
            ctx.rows_per,  # type: ignore[attr-defined]
            grad_rows,
            grad_slot_weights,
        )
        return grad_x.to(ctx.dtype), grad_weights, None, None, None, None  # type: ignore[attr-defined]


class _BeginDispatch(torch.autograd.Function):
    """The first Function of a begun dispatch: its input is that of _Dispatch."""

    @staticmethod
    def forward(
        ctx: FunctionCtx, x: Tensor, topk_weights: Tensor, transfer: _Transfer[_Gradients]
    ) -> Tensor:
        ctx.transfer, ctx.dtype = transfer, x.dtype  # type: ignore[attr-defined]
        return x.new_empty(0)

    @staticmethod
    @once_differentiable
    @ranged("dispatch_backward_wait")
    def backward(ctx: FunctionCtx, _: Tensor) -> tuple[Tensor, Tensor | None, None]:  # type: ignore[override]
        grad_x, grad_weights = ctx.transfer.wait()  # type: ignore[attr-defined]
        return grad_x.to(ctx.dtype), grad_weights, None  # type: ignore[attr-defined]


class _WaitDispatch(torch.autograd.Function):
    """The second Function of a begun dispatch: its output is that of _Dispatch."""

    @staticmethod
    def forward(
        ctx: FunctionCtx,
        sent: Tensor,
        transfer: _Transfer[_Gradients],
        out: Dispatched,
        packs: bool,
    ) -> tuple[Tensor, Tensor]:
        ctx.transfer = transfer  # type: ignore[attr-defined]
        return _received(ctx, out, sent.dtype, packs)

    @staticmethod
    @once_differentiable
    def backward(  # type: ignore[override]
        ctx: FunctionCtx, grad_rows: Tensor, grad_slot_weights: Tensor
    ) -> tuple[Tensor, None, None, None]:
        transfer: _Transfer[_Gradients] = ctx.transfer  # type: ignore[attr-defined]
        transfer.begin(
            partial(
                _return_gradients,
                transfer.buffer,
                ctx.exchange_plan,  # type: ignore[attr-defined]
                ctx.rows_per,  # type: ignore[attr-defined]
                grad_rows,
                grad_slot_weights,
            )
        )
        return grad_rows.new_zeros(0), None, None, None


def _received(
    ctx: FunctionCtx, out: Dispatched, dtype: torch.dtype, packs: bool
) -> tuple[Tensor, Tensor]:
    """Return rows in `dtype` and slot weights; keep in `ctx` what backward needs."""
    ctx.exchange_plan = out.exchange_plan  # type: ignore[attr-defined]
    ctx.rows_per = RowsPer.SLOT if packs else RowsPer.ROW  # type: ignore[attr-defined]
    assert out.slot_weights is not None, "a trainable buffer sends weights"
    # Quantised elements have no gradient, so rows that need gradients are returned dequantised.
    # The gradient ignores the quantisation (straight-through estimator).
    is_quantized = out.rows.format.dtype.is_quantized
    rows = dequantize(out.rows, dtype) if is_quantized else out.rows.data.to(dtype)
    return gather_rows(rows, out.index) if packs else rows, out.slot_weights


@ranged("dispatch_backward")
def _return_gradients(
    buffer: Buffer,
    exchange_plan: ExchangePlan,
    rows_per: RowsPer,
    grad_rows: Tensor,
    grad_slot_weights: Tensor,
) -> _Gradients:
    """Return the gradients of what a dispatch sent. Collective: yes."""
    slots_of_row = exchange_plan.index.slots_of_row
    assert slots_of_row is not None, "a trainable buffer returns an index over rows"
    row_scalars = gather_scalars(grad_slot_weights, slots_of_row)
    return buffer.combine(grad_rows, exchange_plan, rows_per=rows_per, row_scalars=row_scalars)


class _Combine(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: FunctionCtx,
        rows: Tensor,
        slot_weights: Tensor | None,
        buffer: Buffer,
        calls: Calls | None,
        exchange_plan: ExchangePlan,
        rows_per: RowsPer,
        gradient_dtype: torch.dtype,
        lasts: bool,
    ) -> Tensor:
        """Combine; for `lasts` see _keep()."""
        ctx.buffer, ctx.calls, ctx.gradient_dtype = buffer, calls, gradient_dtype  # type: ignore[attr-defined]
        _keep(ctx, rows, slot_weights, exchange_plan, rows_per, lasts)
        return _combine_watched(rows, slot_weights, buffer, exchange_plan, rows_per)

    @staticmethod
    @once_differentiable
    def backward(  # type: ignore[override]
        ctx: FunctionCtx, grad_y: Tensor
    ) -> tuple[Tensor | None, ...]:
        if ctx.calls is not None:  # type: ignore[attr-defined]
            ctx.calls.settle()  # type: ignore[attr-defined]
        grad_rows = _send_gradients(
            ctx.buffer,  # type: ignore[attr-defined]
            ctx.exchange_plan,  # type: ignore[attr-defined]
            ctx.gradient_dtype,  # type: ignore[attr-defined]
            grad_y,
        )
        return *_gradients_of_results(ctx, grad_rows), None, None, None, None, None, None


class _BeginCombine(torch.autograd.Function):
    """The first Function of a begun combine: its input is that of _Combine."""

    @staticmethod
    def forward(
        ctx: FunctionCtx,
        rows: Tensor,
        slot_weights: Tensor | None,
        transfer: _Transfer[Tensor],
        exchange_plan: ExchangePlan,
        rows_per: RowsPer,
        lasts: bool,
    ) -> Tensor:
        ctx.transfer = transfer  # type: ignore[attr-defined]
        _keep(ctx, rows, slot_weights, exchange_plan, rows_per, lasts)
        return rows.new_empty(0)

    @staticmethod
    @once_differentiable
    @ranged("combine_backward_wait")
    def backward(ctx: FunctionCtx, _: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        grad_rows = ctx.transfer.wait()  # type: ignore[attr-defined]
        return *_gradients_of_results(ctx, grad_rows), None, None, None, None


class _WaitCombine(torch.autograd.Function):
    """The second Function of a begun combine: its output is that of _Combine."""

    @staticmethod
    def forward(
        ctx: FunctionCtx,
        _: Tensor,
        transfer: _Transfer[Tensor],
        exchange_plan: ExchangePlan,
        gradient_dtype: torch.dtype,
    ) -> Tensor:
        ctx.transfer, ctx.exchange_plan = transfer, exchange_plan  # type: ignore[attr-defined]
        ctx.gradient_dtype = gradient_dtype  # type: ignore[attr-defined]
        return transfer.wait()

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, grad_y: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        transfer: _Transfer[Tensor] = ctx.transfer  # type: ignore[attr-defined]
        transfer.begin(
            partial(
                _send_gradients,
                transfer.buffer,
                ctx.exchange_plan,  # type: ignore[attr-defined]
                ctx.gradient_dtype,  # type: ignore[attr-defined]
                grad_y,
            )
        )
        return grad_y.new_zeros(0), None, None, None


def _keep(
    ctx: FunctionCtx,
    rows: Tensor,
    slot_weights: Tensor | None,
    exchange_plan: ExchangePlan,
    rows_per: RowsPer,
    lasts: bool,
) -> None:
    """Keep in `ctx` what _gradients_of_results() needs.

    lasts: the caller owns the rows that cached_dispatch() returns.
    """
    ctx.exchange_plan, ctx.rows_per, ctx.lasts = exchange_plan, rows_per, lasts  # type: ignore[attr-defined]
    if slot_weights is not None:
        ctx.save_for_backward(rows, slot_weights)


@ranged("combine_backward")
def _send_gradients(
    buffer: Buffer, exchange_plan: ExchangePlan, gradient_dtype: torch.dtype, grad_y: Tensor
) -> Tensor:
    """Send the gradients of tokens [T, H] to the ranks of their experts. Collective: yes."""
    # Rows that are sent must be contiguous, but sum() makes an expanded gradient.
    wire = grad_y.to(gradient_dtype).contiguous()
    return buffer.cached_dispatch(wire, exchange_plan).to(grad_y.dtype)


def _gradients_of_results(ctx: FunctionCtx, grad_rows: Tensor) -> tuple[Tensor, Tensor | None]:
    """Return the gradients of expert results and of their slot weights."""
    if ctx.rows_per is RowsPer.ROW:  # type: ignore[attr-defined]
        # Autograd may keep these rows, so copy them if a later dispatch overwrites them.
        return grad_rows if ctx.lasts else grad_rows.clone(), None  # type: ignore[attr-defined]
    grad, grad_weights = gather_rows(grad_rows, ctx.exchange_plan.index), None  # type: ignore[attr-defined]
    if ctx.saved_tensors:  # type: ignore[attr-defined]
        rows, slot_weights = ctx.saved_tensors  # type: ignore[attr-defined]
        grad_weights = dot_rows(grad, rows)
        grad = (grad * slot_weights.unsqueeze(1)).to(grad.dtype)
    return grad, grad_weights


def dispatch_rows(buffer: Buffer, call: DispatchCall) -> Dispatched:
    """Dispatch in grad mode; rows and weights have no history before with_history().

    Collective: as Buffer.dispatch; not if a checkpointing policy has saved the result, which it
        does on all ranks or none.
    """
    with torch.no_grad():
        return _dispatch_watched(buffer, call)


def begin_history(buffer: Buffer, calls: Calls, call: DispatchCall, name: str) -> Sent:
    """Make the first Function of a dispatch that is begun, for with_history(). Local."""
    transfer = _Transfer[_Gradients](buffer=buffer, calls=calls, name=name)
    x = _anchored(call.unquantized)
    tensor = _BeginDispatch.apply(x, call.topk_weights, transfer)
    return Sent(tensor=tensor, transfer=transfer)


def with_history(
    buffer: Buffer,
    call: DispatchCall,
    out: Dispatched,
    *,
    packs: bool = False,
    calls: Calls | None = None,
    sent: Sent | None = None,
) -> tuple[WireTensor, Tensor]:
    """Return the rows and slot weights of a dispatch, differentiable in the inputs of the call.

    packs: return one row per slot, [C, H], so that backward sums the gradients of slots by group.
    calls: the calls of the group; backward follows those begun before. None: none are begun.
    sent: the first Function, if the dispatch was begun.

    Collective: no, but backward is, on every rank if the inputs of any rank need gradients.
    """
    x = call.hidden_states
    assert isinstance(x, Tensor), "quantised rows have no gradient, so their calls have no flags"
    if sent is not None:
        rows, slot_weights = _WaitDispatch.apply(sent.tensor, sent.transfer, out, packs)
    else:
        rows, slot_weights = _Dispatch.apply(
            _anchored(x), call.topk_weights, buffer, calls, out, packs
        )
    return WireTensor(data=rows, format=WireFormat.of(x.dtype)), slot_weights


def combine_rows(
    buffer: Buffer,
    rows: RowsCombineInput,
    gradient_dtype: torch.dtype,
    *,
    calls: Calls | None = None,
) -> Tensor:
    """Combine in grad mode, differentiable in the expert results and the slot weights, if given.

    Args:
        buffer: the buffer of the dispatch.
        rows: the expert results.
        gradient_dtype: dtype of the rows that backward sends.
        calls: see with_history().

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
        calls,
        exchange_plan,
        rows_per,
        gradient_dtype,
        handle.needs_backward,
    )


def begin_combine(
    buffer: Buffer,
    calls: Calls,
    rows: RowsCombineInput,
    gradient_dtype: torch.dtype,
    report: Report | None,
    *,
    name: str,
) -> Pending[Tensor]:
    """Begin a combine; wait() returns y, differentiable as that of combine_rows() in grad mode.

    report, name: see Calls.begin().
    """
    handle, hidden_states, slot_weights = rows.handle, rows.hidden_states, rows.slot_weights
    exchange_plan, rows_per = handle.exchange_plan, rows.rows_per
    combining = partial(
        _combine_watched, hidden_states, slot_weights, buffer, exchange_plan, rows_per
    )
    if not torch.is_grad_enabled():
        return calls.begin(combining, report, name=name)
    if handle.needs_backward:
        hidden_states = _anchored(hidden_states)
    transfer = _Transfer[Tensor](buffer=buffer, calls=calls, name=name)
    # Checkpointing ends a recomputation when the last tensor is saved, here at the latest.
    sent = _BeginCombine.apply(
        hidden_states, slot_weights, transfer, exchange_plan, rows_per, handle.needs_backward
    )
    transfer.pending = calls.begin(combining, report, name=name)
    return Pending(partial(_WaitCombine.apply, sent, transfer, exchange_plan, gradient_dtype))


def _anchored(tensor: Tensor) -> Tensor:
    """Return `tensor` or an alias that requires grad, so that its Function runs in backward."""
    return tensor if tensor.requires_grad else tensor.detach().requires_grad_()


def _dispatch_watched(buffer: Buffer, call: DispatchCall) -> Dispatched:
    """Dispatch, through the operator if a mode sees operators.

    Lifetime: results saved by a policy are usable as long as the exchange plan exists.
    Collective: see dispatch_rows().
    """
    if not is_watched():
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
    if not is_watched():
        y, _ = buffer.combine(rows, exchange_plan, rows_per=rows_per, slot_weights=slot_weights)
        return y
    held = _CombineOn(buffer=buffer, exchange_plan=exchange_plan, rows_per=rows_per)
    return torch.ops.epcomm.combine.default(rows, slot_weights, _number_of(held))


def is_watched() -> bool:
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
