"""Dispatch and combine over the ROWS layout: check, send, wrap in a record."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import ClassVar, NoReturn, cast

import torch
from torch import Tensor

from epcomm.buffers.base import Combined, DispatchCall, Dispatched
from epcomm.buffers.traffic import BufferTraffic
from epcomm.config import EPConfig, Mode
from epcomm.dispatchers.autograd import combine_rows, dispatch_rows
from epcomm.dispatchers.base import CombineT, Dispatcher, DispatchT, NeedGrad
from epcomm.dispatchers.checks import (
    find_call_error,
    find_combine_error,
    num_tokens_of,
    unready_error,
)
from epcomm.errors import ConfigError, EPError, EPTimeout, HandleError
from epcomm.group import EPGroup
from epcomm.ops.precision import cast_results, cast_topk, in_dtype
from epcomm.planning.plan import plan
from epcomm.planning.plans import PhasePlan
from epcomm.platforms.compiler import untraced
from epcomm.platforms.profiler import ranged
from epcomm.protocol import BatchFlags
from epcomm.quantization import arrange_scales, quantize, quantizer_for, restore_scales
from epcomm.records import (
    ExchangePlan,
    Handle,
    MaskedCombineInput,
    MaskedDispatchOutput,
    Pending,
    RowsCombineInput,
    RowsDispatchOutput,
    TopKOutput,
    empty_topk,
)
from epcomm.spec import MoESpec
from epcomm.types import ROW_MAJOR, Layout, RowsPer, WireTensor


class RowsDispatcher(Dispatcher[DispatchT, CombineT]):
    """A dispatcher over any buffer, in the layout that the buffer hands out."""

    mode: ClassVar[Mode]

    def __init__(
        self,
        group: EPGroup,
        spec: MoESpec,
        config: EPConfig | None = None,
        *,
        chosen: PhasePlan | None = None,
    ) -> None:
        """Choose and open the buffer.

        Args:
            group: the ranks that share the experts.
            spec: what the layer looks like; equal on all ranks.
            config: `mode` is this class's own, whatever the configuration says.
            chosen: the part of an EPPlan for this mode, made with the same group and spec; None:
                plan here.

        Collective: yes.   Host sync: yes.
        Raises:
            ConfigError: ranks disagree, or nothing serves this configuration.
        """
        config = replace(config or EPConfig(), mode=self.mode)
        self.plan: PhasePlan = chosen or plan(config, spec, group).prefill
        self._group = group
        self._spec = self.plan.buffer_spec
        self._dtype = self._spec.combine_format.dtype.torch_dtype
        self._buffer = group.open_buffer(self.plan.buffer, self._spec)
        self._calls = group.collectives.calls
        self._number = self._calls.add_dispatcher(self.mode)
        # Plain torch casts; only eight bits need a kernel.
        is_quantized = self._spec.dispatch_format.dtype.is_quantized
        self._quantize = partial(
            quantizer_for(group.device) if is_quantized else quantize,
            profile=self.plan.int8_profile,
        )
        self._weights_applied_by = self.plan.weights_applied_by
        self._checks_calls = config.check_calls
        self._num_calls = 0
        self._is_closed = False

    @untraced
    @ranged("dispatch")
    def dispatch(
        self, hidden_states: Tensor, topk: TopKOutput, *, experts_need_grad: NeedGrad = False
    ) -> DispatchT:
        return self._begin(hidden_states, topk, experts_need_grad, defers_receive=False).wait()

    @untraced
    @ranged("dispatch_begin")
    def dispatch_async(
        self, hidden_states: Tensor, topk: TopKOutput, *, experts_need_grad: NeedGrad = False
    ) -> Pending[DispatchT]:
        if not self.plan.caps.has_receive_hook:
            return super().dispatch_async(hidden_states, topk, experts_need_grad=experts_need_grad)
        pending = self._begin(hidden_states, topk, experts_need_grad, defers_receive=True)
        return Pending(partial(_wait_for_rows, pending))

    def _begin(
        self,
        hidden_states: Tensor,
        topk: TopKOutput,
        experts_need_grad: NeedGrad,
        *,
        defers_receive: bool,
        refusal: EPError | None = None,
    ) -> Pending[DispatchT]:
        """Send; with defers_receive, which has no gradients, rows are received in wait().

        refusal: what the caller knows to be wrong; it is raised when all ranks have heard of it.
        """
        self._check_group_open("dispatch")
        number = self._calls.next_batch
        try:
            return self._send(
                hidden_states,
                topk,
                experts_need_grad,
                defers_receive=defers_receive,
                refusal=refusal,
            )
        except Exception as problem:
            if refusal is None and self._is_untold(number):
                self.refuse_for(problem)
            raise

    def _is_untold(self, number: int) -> bool:
        """Whether no rank has heard of call `number`, in which this rank has failed, nor waits."""
        return self._buffer.counts_calls and self._calls.next_batch == number

    def _send(
        self,
        hidden_states: Tensor,
        topk: TopKOutput,
        experts_need_grad: NeedGrad,
        *,
        defers_receive: bool,
        refusal: EPError | None,
    ) -> Pending[DispatchT]:
        """Do what _begin() does, but tell nobody of an error of this rank's own."""
        num_tokens = num_tokens_of(hidden_states)
        refusal = (
            refusal
            or self._closed_error("dispatch")
            or self._refusal(hidden_states, topk, experts_need_grad)
        )
        error = refusal or find_call_error(
            hidden_states,
            topk,
            self._spec,
            self._dtype,
            self._group.device,
            self._group.where,
            backend_limit=self.plan.caps.max_tokens_per_rank,
        )
        if error is not None:
            # Take part with no tokens, so that the others hear of the fault instead of waiting.
            hidden_states = torch.empty(
                0, self._spec.hidden_size, dtype=self._dtype, device=self._group.device
            )
            topk = empty_topk(self._spec.top_k, self._group.device)
        given, hidden_states = hidden_states.dtype, in_dtype(hidden_states, self._dtype)
        topk = cast_topk(topk, self._dtype)
        call = self._make_call(hidden_states, topk, experts_need_grad, error)
        if defers_receive:
            pending = self._buffer.dispatch_async(call)
        else:
            out = dispatch_rows(self._buffer, hidden_states, topk.topk_weights, call)
            pending = Pending(lambda: out)
        if refusal is not None:
            # A static buffer has not raised. No combine will come of this call, so end it here.
            self._refuse_combine(refusal, pending.wait().exchange_plan)
        self._num_calls += 1
        number = self._num_calls
        return Pending(lambda: self._record(pending.wait(), number, num_tokens, given))

    def _record(
        self, out: Dispatched, number: int, num_tokens: int, given: torch.dtype
    ) -> DispatchT:
        """The record of dispatch call `number`."""
        handle = Handle(
            owner=self,
            exchange_plan=out.exchange_plan,
            call=number,
            num_tokens=num_tokens,
            needs_backward=bool(out.any_flags & ~BatchFlags.GRAD_ENABLED),
            dtype=given,
        )
        if self.plan.caps.layout is Layout.MASKED:
            capacity = out.rows.data.shape[:2]
            record = MaskedDispatchOutput(
                hidden_states=self._arranged(out.rows),
                num_tokens_per_expert=out.index.num_tokens_per_expert,
                slot_weights=None if out.slot_weights is None else out.slot_weights.view(capacity),
                weights_applied_by=self._weights_applied_by,
                handle=handle,
            )
        else:
            record = RowsDispatchOutput(
                hidden_states=self._arranged(out.rows),
                index=out.index,
                slot_weights=out.slot_weights,
                weights_applied_by=self._weights_applied_by,
                handle=handle,
            )
        # Which of the two a dispatcher hands out is its buffer's choice, made once in the plan.
        return cast(DispatchT, record)

    @untraced
    @ranged("combine")
    def combine(self, combine_input: CombineT) -> Tensor:
        return self._begin_combine(combine_input, defers_receive=False).wait()

    @untraced
    @ranged("combine_begin")
    def combine_async(self, combine_input: CombineT) -> Pending[Tensor]:
        if not self.plan.caps.has_receive_hook:
            return super().combine_async(combine_input)
        pending = self._begin_combine(combine_input, defers_receive=True)
        return Pending(partial(_wait_for_sums, pending))

    def refuse(self, error: EPError) -> NoReturn:
        """Take part in the other ranks' dispatch without tokens, so that they hear of `error`.

        Collective: yes, in place of dispatch(), and on a static buffer of combine() too.
        """
        topk = empty_topk(self._spec.top_k, self._group.device)
        nothing = topk.topk_weights.new_empty(0, self._spec.hidden_size, dtype=self._dtype)
        self._begin(nothing, topk, False, defers_receive=False, refusal=error)
        raise error

    def refuse_for(self, problem: Exception) -> None:
        """Let the ranks that dispatch hear that `problem` keeps this one from it; returns then.

        Collective: yes, as refuse().
        """
        # A device that has failed may not be able to tell either.
        with suppress(EPError, RuntimeError):
            self.refuse(unready_error(problem, self._group.where))

    def refuse_results(self, out: DispatchT, problem: Exception) -> None:
        """Let the ranks that combine this batch hear that its experts failed here; returns then.

        Collective: yes, in place of combine().
        """
        self._refuse_results(out.handle.exchange_plan, problem)

    def _refuse_results(self, exchange_plan: ExchangePlan, problem: Exception) -> None:
        error = unready_error(problem, self._group.where, function="combine")
        # As in refuse_for().
        with suppress(EPError, RuntimeError):
            self._refuse_combine(error, exchange_plan)

    def _begin_combine(self, combine_input: CombineT, *, defers_receive: bool) -> Pending[Tensor]:
        """Send sums back; with defers_receive they are received in wait()."""
        self._check_group_open("combine")
        error = self._closed_error("combine") or find_combine_error(
            combine_input,
            self,
            self._spec,
            self._dtype,
            self._group.device,
            self._group.where,
            layout=self.plan.caps.layout,
        )
        if error is not None:
            self._refuse_combine(error, self._open_exchange_plan_of(combine_input))
        handle, number = combine_input.handle, self._calls.next_batch
        try:
            pending = self._send_results(combine_input, defers_receive=defers_receive)
        except Exception as problem:
            if self._is_untold(number):
                self._refuse_results(handle.exchange_plan, problem)
            raise
        handle.spend("was combined before")
        return Pending(lambda: self._finished(pending.wait().y, handle))

    def _send_results(self, combine_input: CombineT, *, defers_receive: bool) -> Pending[Combined]:
        rows = cast_results(_as_rows(combine_input), self._dtype)
        if defers_receive:
            return self._buffer.combine_async(
                rows.hidden_states,
                rows.handle.exchange_plan,
                rows_per=rows.rows_per,
                slot_weights=rows.slot_weights,
            )
        y = combine_rows(self._buffer, rows, self._spec.backward_format.dtype.torch_dtype)
        return Pending(lambda: Combined(y=y, scalars=None))

    def _finished(self, y: Tensor, handle: Handle) -> Tensor:
        """y of the batch as the caller gave it."""
        num_tokens = handle.num_tokens
        if y.shape[0] != num_tokens:
            # This rank's call was refused on a static buffer: it took part with no tokens.
            y = y.new_full((num_tokens, self._spec.hidden_size), float("nan"))
        if self._checks_calls:
            self.check()
        return y if handle.dtype is None else in_dtype(y, handle.dtype)

    def check(self) -> None:
        self._buffer.check()

    def traffic(self) -> BufferTraffic:
        """Bytes that the buffer has sent to other ranks, for all layers that share it."""
        return self._buffer.traffic()

    def close(self) -> None:
        self._is_closed = True

    def _check_group_open(self, function: str) -> None:
        if self._group.is_closed:
            raise HandleError(
                f"{function}: the EPGroup is closed ({self._group.where}); make a new one"
            )

    def _closed_error(self, function: str) -> HandleError | None:
        if not self._is_closed:
            return None
        return HandleError(
            f"{function}: the dispatcher is closed ({self._group.where}); construct a new one"
        )

    def _refusal(
        self, hidden_states: Tensor, topk: TopKOutput, experts_need_grad: NeedGrad
    ) -> EPError | None:
        """Return the error of a call that this dispatcher can never serve, or None."""
        # What is no TopKOutput is told to all ranks, as a fault of the call.
        inputs = (hidden_states, getattr(topk, "topk_weights", None))
        needs_grad = any(getattr(tensor, "requires_grad", False) for tensor in inputs)
        if isinstance(experts_need_grad, Mapping):
            experts_need_grad = any(experts_need_grad.values())
        is_needed = torch.is_grad_enabled() and (needs_grad or experts_need_grad)
        if self.plan.caps.trainable or not is_needed:
            return None
        what = "low latency" if self.mode is Mode.LOW_LATENCY else self.plan.backend
        other = "mode normal" if self.mode is Mode.LOW_LATENCY else "another backend"
        return ConfigError(
            f"dispatch: {what} has no gradients, but some are needed ({self._group.where}); "
            f"use {other}, or torch.no_grad()"
        )

    def _open_exchange_plan_of(self, combine_input: object) -> ExchangePlan | None:
        """Return the exchange plan of a refused combine input, or None if that is unknown."""
        handle = getattr(combine_input, "handle", None)
        if not isinstance(handle, Handle):
            return None
        try:
            handle.check(self)
        except HandleError:
            return None
        return handle.exchange_plan

    def _refuse_combine(self, error: EPError, exchange_plan: ExchangePlan | None) -> NoReturn:
        """Let the other ranks hear of `error` instead of waiting, then raise it.

        exchange_plan: of the batch that they combine, or end; None if that is not known.
        """
        try:
            if exchange_plan is None:
                self._buffer.refuse_combine(error)
            else:
                self._buffer.refuse_combine_of(exchange_plan, error)
            if self._checks_calls:
                self.check()
        except EPTimeout as timeout:
            raise error from timeout
        raise error

    def _make_call(
        self,
        hidden_states: Tensor,
        topk: TopKOutput,
        experts_need_grad: NeedGrad,
        error: EPError | None,
    ) -> DispatchCall:
        flags, expert_names = BatchFlags.NONE, ()
        # Without gradients the mode does not matter, and may differ between ranks.
        if torch.is_grad_enabled() and self.plan.caps.trainable:
            flags |= BatchFlags.GRAD_ENABLED
            if hidden_states.requires_grad or topk.topk_weights.requires_grad:
                flags |= BatchFlags.INPUTS_NEED_GRAD
            if isinstance(experts_need_grad, Mapping):
                flags |= BatchFlags.of_experts(experts_need_grad.values())
                expert_names = tuple(experts_need_grad)
            elif experts_need_grad:
                flags |= BatchFlags.EXPERTS_NEED_GRAD
        return DispatchCall(
            hidden_states=hidden_states.detach(),
            topk_ids=topk.topk_ids,
            topk_weights=topk.topk_weights.detach(),
            flags=flags,
            expert_names=expert_names,
            error=error,
            # Whatever keeps this rank from making rows, without rows it takes part.
            quantize=self._quantize if error is None else quantize,
            int8_profile=self.plan.int8_profile,
            dispatcher=self._number,
        )

    def _arranged(self, rows: WireTensor) -> WireTensor:
        """Received rows with their scales as the runner reads them; others as they are."""
        if rows.scales is None:
            return rows
        layout, came = self.plan.scale_layout, rows.scale_layout or ROW_MAJOR
        scales = rows.scales
        if layout != came:
            num_scales = rows.format.num_scales(self._spec.hidden_size)
            scales = arrange_scales(restore_scales(scales, came, num_scales), layout)
        return replace(rows, scales=scales, scale_layout=layout)


@ranged("dispatch_wait")
def _wait_for_rows(pending: Pending[DispatchT]) -> DispatchT:
    return pending.wait()


@ranged("combine_wait")
def _wait_for_sums(pending: Pending[Tensor]) -> Tensor:
    return pending.wait()


def _as_rows(combine_input: RowsCombineInput | MaskedCombineInput) -> RowsCombineInput:
    """Results of either layout as a buffer takes them: one row a slot."""
    if isinstance(combine_input, RowsCombineInput):
        return combine_input
    weights = combine_input.slot_weights
    return RowsCombineInput(
        hidden_states=combine_input.hidden_states.flatten(0, 1),
        rows_per=RowsPer.SLOT,
        slot_weights=None if weights is None else weights.flatten(),
        handle=combine_input.handle,
    )
