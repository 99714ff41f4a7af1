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

import itertools
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
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
from epcomm.quantization import dequantizer_for
from epcomm.records import ExchangePlan, Pending, RowsCombineInput, SlotIndex, at_once
from epcomm.types import RowsPer, WireFormat, WireTensor

T = TypeVar("T")
# The gradients of tokens [T, H] and of router weights [T, K].
_Gradients = tuple[Tensor, Tensor | None]


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
class _Transfer(ABC, Generic[T]):
    """A call in the graph, whose backward makes the dual call.

    calls: the calls of the group; the dual follows those begun before. None: none are begun.
    name: the call in words for messages.
    rows_per: of the rows on the rank of the experts.
    """

    buffer: Buffer
    calls: Calls | None = None
    name: str = ""
    exchange_plan: ExchangePlan | None = None
    rows_per: RowsPer = RowsPer.ROW
    # The dual call that was begun.
    pending: Pending[T] | None = None

    @abstractmethod
    def send(self, *gradients: Tensor) -> T:
        """Make the dual call with the gradients of the outputs. Collective: yes."""

    @abstractmethod
    def gradients(self, returned: T, saved: Sequence[Tensor]) -> tuple[Tensor | None, ...]:
        """Return the gradients of the inputs from the result of the dual call. Local."""

    def plan(self) -> ExchangePlan:
        """Return the exchange plan, which exists once the call is complete."""
        assert self.exchange_plan is not None, "the call is complete"
        return self.exchange_plan


@dataclass(kw_only=True, eq=False)
class Sending(_Transfer[_Gradients]):
    """A dispatch: tokens [T, H] and router weights [T, K] become rows [R, H] and weights [C].

    first: the output of _Begin, if the dispatch is begun.
    """

    dtype: torch.dtype
    first: Tensor | None = None

    def begin_history(self, call: DispatchCall) -> None:
        """Make the first Function of a dispatch that is begun. Local."""
        self.first = _Begin.apply(self, None, False, _anchored(call.unquantized), call.topk_weights)

    def with_history(
        self, call: DispatchCall, out: Dispatched, *, packs: bool = False
    ) -> tuple[WireTensor, Tensor]:
        """Return the rows and slot weights of the result, differentiable in the inputs of the call.

        packs: return one row per slot, [C, H]; backward sums the gradients of slots by group.

        Collective: no, but backward is, on every rank if the inputs of any rank need gradients.
        """
        self.exchange_plan = out.exchange_plan
        self.rows_per = RowsPer.SLOT if packs else RowsPer.ROW
        make, first = partial(self._received, out), self.first
        if first is None:
            x, weights = _anchored(call.unquantized), call.topk_weights
            rows, slot_weights = _Call.apply(self, make, False, x, weights)
        else:
            # The graph holds this object, which must not hold the graph.
            self.first = None
            rows, slot_weights = _Wait.apply(self, make, first)
        return WireTensor(data=rows, format=WireFormat.of(self.dtype)), slot_weights

    def _received(self, out: Dispatched) -> tuple[Tensor, Tensor]:
        assert out.slot_weights is not None, "a trainable buffer sends weights"
        # Quantised elements have no gradient, so rows that need gradients are returned dequantised.
        # The gradient ignores the quantisation (straight-through estimator).
        if out.rows.format.dtype.is_quantized:
            rows = dequantizer_for(out.rows.data.device)(out.rows, self.dtype)
        else:
            rows = out.rows.data.to(self.dtype)
        packs = self.rows_per is RowsPer.SLOT
        return gather_rows(rows, out.index) if packs else rows, out.slot_weights

    @ranged("dispatch_backward")
    def send(self, *gradients: Tensor) -> _Gradients:
        exchange_plan, (grad_rows, grad_slot_weights) = self.plan(), gradients
        slots_of_row = exchange_plan.index.slots_of_row
        assert slots_of_row is not None, "a trainable buffer returns an index over rows"
        row_scalars = gather_scalars(grad_slot_weights, slots_of_row)
        return self.buffer.combine(
            grad_rows, exchange_plan, rows_per=self.rows_per, row_scalars=row_scalars
        )

    def gradients(self, returned: _Gradients, saved: Sequence[Tensor]) -> tuple[Tensor | None, ...]:
        return returned[0].to(self.dtype), returned[1]


@dataclass(kw_only=True, eq=False)
class _Returning(_Transfer[Tensor]):
    """A combine: expert results and slot weights become y [T, H].

    gradient_dtype: dtype of the rows that backward sends.
    lasts: the caller owns the rows that cached_dispatch() returns.
    """

    gradient_dtype: torch.dtype
    lasts: bool

    @ranged("combine_backward")
    def send(self, *gradients: Tensor) -> Tensor:
        (grad_y,) = gradients
        # Rows that are sent must be contiguous, but sum() makes an expanded gradient.
        wire = grad_y.to(self.gradient_dtype).contiguous()
        return self.buffer.cached_dispatch(wire, self.plan()).to(grad_y.dtype)

    def gradients(self, returned: Tensor, saved: Sequence[Tensor]) -> tuple[Tensor | None, ...]:
        if self.rows_per is RowsPer.ROW:
            # Autograd may keep these rows, so copy them if a later dispatch overwrites them.
            return returned if self.lasts else returned.clone(), None
        grad, grad_weights = gather_rows(returned, self.plan().index), None
        if saved:
            rows, slot_weights = saved
            grad_weights = dot_rows(grad, rows)
            grad = (grad * slot_weights.unsqueeze(1)).to(grad.dtype)
        return grad, grad_weights


class _Call(torch.autograd.Function):
    """A call that is made at once: connects its inputs to its outputs, which `make` returns."""

    @staticmethod
    def forward(
        ctx: FunctionCtx,
        transfer: _Transfer[T],
        make: Callable[[], Tensor | tuple[Tensor, ...]] | None,
        saves: bool,
        *inputs: Tensor,
    ) -> Tensor | tuple[Tensor, ...]:
        """Make the call, or for None return a tensor without elements.

        saves: gradients() needs the inputs.
        """
        ctx.transfer = transfer  # type: ignore[attr-defined]
        if saves:
            ctx.save_for_backward(*inputs)
        return inputs[0].new_empty(0) if make is None else make()

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, *gradients: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        transfer: _Transfer[object] = ctx.transfer  # type: ignore[attr-defined]
        if transfer.calls is not None:
            transfer.calls.settle()
        returned = transfer.send(*gradients)
        return None, None, None, *transfer.gradients(returned, ctx.saved_tensors)  # type: ignore[attr-defined]


class _Begin(_Call):
    """The first Function of a begun call, which makes nothing."""

    @staticmethod
    @once_differentiable
    @ranged("backward_wait")
    def backward(ctx: FunctionCtx, *gradients: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        transfer: _Transfer[object] = ctx.transfer  # type: ignore[attr-defined]
        assert transfer.pending is not None, "_Wait has begun the dual call"
        returned = transfer.pending.wait()
        return None, None, None, *transfer.gradients(returned, ctx.saved_tensors)  # type: ignore[attr-defined]


class _Wait(torch.autograd.Function):
    """The second Function of a begun call, with the outputs of _Call; `first` is that of _Begin."""

    @staticmethod
    def forward(
        ctx: FunctionCtx,
        transfer: _Transfer[T],
        make: Callable[[], Tensor | tuple[Tensor, ...]],
        first: Tensor,
    ) -> Tensor | tuple[Tensor, ...]:
        ctx.transfer = transfer  # type: ignore[attr-defined]
        return make()

    @staticmethod
    @once_differentiable
    def backward(ctx: FunctionCtx, *gradients: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        transfer: _Transfer[object] = ctx.transfer  # type: ignore[attr-defined]
        assert transfer.calls is not None, "only a group with transfers begins calls"
        send, name = partial(transfer.send, *gradients), f"backward of {transfer.name}"
        # If an error ends backward before the first Function, the caller gets that error.
        transfer.pending = transfer.calls.begin(partial(at_once, send), name=name, must_wait=False)
        return None, None, gradients[0].new_zeros(0)


def dispatch_rows(buffer: Buffer, call: DispatchCall) -> Dispatched:
    """Dispatch in grad mode; rows and weights have no history before Sending.with_history().

    Collective: as Buffer.dispatch; not if a checkpointing policy has saved the result, which it
        does on all ranks or none.
    """
    with torch.no_grad():
        return _dispatch_watched(buffer, call)


def combine_rows(
    buffer: Buffer,
    rows: RowsCombineInput,
    gradient_dtype: torch.dtype,
    *,
    calls: Calls | None = None,
) -> Tensor:
    """Combine in grad mode, differentiable in the expert results and the slot weights, if given.

    gradient_dtype: dtype of the rows that backward sends.
    calls: the calls of the group; None: none are begun.

    Collective: yes, and so is its backward, on every rank if any rank needs it.
    """
    combining = partial(_combine_watched, buffer, rows)
    returning = _returning(buffer, rows, gradient_dtype, calls)
    if returning is None:
        return combining()
    saves = rows.slot_weights is not None
    return _Call.apply(returning, combining, saves, _results(rows), rows.slot_weights)


def begin_combine(
    buffer: Buffer,
    rows: RowsCombineInput,
    gradient_dtype: torch.dtype,
    *,
    calls: Calls,
    report: Report | None,
    name: str,
) -> Pending[Tensor]:
    """Begin a combine; wait() returns y, differentiable as that of combine_rows() in grad mode.

    report, name: see Calls.begin().
    """
    returning, combining = None, partial(_combine_watched, buffer, rows)
    if torch.is_grad_enabled():
        returning = _returning(buffer, rows, gradient_dtype, calls, name)
    if returning is None:
        return calls.begin(partial(at_once, combining), report, name=name)
    # Checkpointing ends a recomputation when the last tensor is saved, here at the latest, so the
    # call is begun after that.
    saves = rows.slot_weights is not None
    first = _Begin.apply(returning, None, saves, _results(rows), rows.slot_weights)
    pending = calls.begin(partial(at_once, combining), report, name=name)
    return Pending(partial(_Wait.apply, returning, pending.wait, first))


def _returning(
    buffer: Buffer,
    rows: RowsCombineInput,
    gradient_dtype: torch.dtype,
    calls: Calls | None,
    name: str = "",
) -> _Returning | None:
    """Return the combine for the graph, or None if no rank and no tensor needs gradients."""
    needed, weights = rows.handle.needs_backward, rows.slot_weights
    weights_need = weights is not None and weights.requires_grad
    if not (needed or weights_need or rows.hidden_states.requires_grad):
        return None
    return _Returning(
        buffer=buffer,
        calls=calls,
        name=name,
        exchange_plan=rows.handle.exchange_plan,
        rows_per=rows.rows_per,
        gradient_dtype=gradient_dtype,
        lasts=needed,
    )


def _results(rows: RowsCombineInput) -> Tensor:
    """Return the expert results, as an alias that requires grad if any rank needs backward."""
    return _anchored(rows.hidden_states) if rows.handle.needs_backward else rows.hidden_states


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


def _combine_watched(buffer: Buffer, rows: RowsCombineInput) -> Tensor:
    """Combine, through the operator if a mode sees operators; return y [T, H].

    Collective: as Buffer.combine; not if a checkpointing policy has saved the result, which it
        does on all ranks or none.
    """
    results, weights, plan = rows.hidden_states, rows.slot_weights, rows.handle.exchange_plan
    combine = partial(buffer.combine, exchange_plan=plan, rows_per=rows.rows_per)
    if is_watched():
        return torch.ops.epcomm.combine.default(results, weights, _number_of(combine))
    y, _ = combine(results, slot_weights=weights)
    return y


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
    combine = _numbered[call]
    assert isinstance(combine, partial), "_combine_watched() passes the number of a call"
    y, _ = combine(rows, slot_weights=slot_weights)
    return y


_library = Library("epcomm", "DEF")
_library.define(
    "dispatch(Tensor hidden_states, Tensor topk_ids, Tensor topk_weights, int call)"
    " -> (Tensor rows, Tensor scales, Tensor slot_weights, Tensor number)"
)
_library.define("combine(Tensor rows, Tensor? slot_weights, int call) -> Tensor")
_library.impl("dispatch", _dispatch_kernel, "CompositeExplicitAutograd")
_library.impl("combine", _combine_kernel, "CompositeExplicitAutograd")
