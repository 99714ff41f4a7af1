"""The dispatchers: check a call, send it through any buffer, wrap the result in a record."""

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import cache, partial
from typing import ClassVar, Generic, NoReturn, TypeVar, cast

import torch
from torch import Tensor

from epcomm.buffers.base import Dispatched
from epcomm.buffers.traffic import BufferTraffic
from epcomm.calls.call import DispatchCall
from epcomm.config import EPConfig, Mode
from epcomm.dispatchers import checks
from epcomm.dispatchers.autograd import (
    Sending,
    begin_combine,
    combine_rows,
    dispatch_rows,
    is_watched,
)
from epcomm.errors import ConfigError, EPError, EPTimeout, HandleError, ShapeError, group_closed
from epcomm.group import EPGroup
from epcomm.ops.precision import cast_results, in_dtype
from epcomm.planning.plan import plan
from epcomm.planning.plans import PhasePlan
from epcomm.platforms.tracing import ranged
from epcomm.protocol import BatchFlags
from epcomm.quantization import arrange_scales, quantize, quantizer_for, row_major
from epcomm.records import (
    CombineInput,
    DispatchOutput,
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
from epcomm.types import ROW_MAJOR, Layout, RowsPer, ScaleLayout, WireTensor, data_of, sum_dtype

DispatchT = TypeVar("DispatchT", bound=DispatchOutput)
CombineT = TypeVar("CombineT", bound=CombineInput)

# If any of these flags is set, all ranks run the backward of the batch.
_NEEDS_BACKWARD = ~int(BatchFlags.GRAD_ENABLED)


class Dispatcher(Generic[DispatchT, CombineT]):
    """Moves the tokens of one layer to their experts and the results back, over any buffer.

    The buffer determines the layout. A dispatcher keeps no state of a batch, so batches may
    interleave: without gradients up to BufferCaps.batches_in_flight, with gradients any number.

    mode: the mode of this class.
    """

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
            spec: the sizes of the layer; equal on all ranks.
            config: the configuration; its `mode` is ignored, the class determines the mode.
            chosen: the part of an EPPlan for this mode, made with the same group and spec; None:
                make a plan.

        Collective: yes.   Host sync: yes.
        Raises:
            ConfigError: ranks disagree, or no backend supports this configuration.
        """
        config = replace(config or EPConfig(), mode=self.mode)
        self.plan: PhasePlan = chosen or plan(config, spec, group).prefill
        self._group, self._where = group, group.where
        self._spec = self.plan.buffer_spec
        self._dtype = self._spec.hidden_format.dtype.torch_dtype
        self._weights_dtype = sum_dtype(self._dtype)
        self._checks = checks.CallChecks(
            spec=self._spec,
            dtype=self._dtype,
            device=group.device,
            where=self._where,
            backend_limit=self.plan.caps.max_tokens_per_rank,
        )
        self._buffer = group.open_buffer(self.plan.buffer, self._spec)
        self._calls = group.calls
        self._number = self._calls.add_dispatcher(self.mode)
        self._name = f"dispatcher {self._number} ({self.mode})"
        # Casts run in plain torch; only 8-bit formats need a kernel.
        is_quantized = self._spec.dispatch_format.dtype.is_quantized
        self._quantize = partial(
            quantizer_for(group.device) if is_quantized else quantize,
            profile=self.plan.int8_profile,
        )
        self._weights_applied_by = self.plan.weights_applied_by
        self._checks_calls = config.check_calls
        self._quantizes_with_gradients = config.combine_dtype_with_gradients
        self._num_calls = 0
        self._is_closed = False

    @property
    def is_asynchronous(self) -> bool:
        """Return whether dispatch_async() and combine_async() begin the whole transfer.

        True over gloo, NCCL, MPI with MPI_THREAD_MULTIPLE, and for nvlink and deep_ep on GPUs
        where they have no receive hook; not while a TorchDispatchMode must see the operators.
        """
        has_thread = self._calls.transfers is not None and self._buffer.begins_calls
        return has_thread and not is_watched()

    @ranged("dispatch", is_traced=False)
    def dispatch(
        self,
        hidden_states: Tensor | WireTensor,
        topk: TopKOutput,
        *,
        experts_need_grad: checks.NeedGrad = False,
    ) -> DispatchT:
        """Send each token to the ranks that own its experts.

        Args:
            hidden_states: [T, H], T <= M, T = 0 is legal; in the dtype given at construction, or in
                another floating dtype, which is cast and is the dtype of y. Or quantised rows in
                the dispatch format of the plan, with scales of any layout and strides: they are
                sent unchanged, have no gradients, and y has the dtype given at construction.
            topk: topk_ids [T, K], int64, physical expert ids, -1 for none; topk_weights [T, K],
                float32, or another floating dtype, which is cast.
            experts_need_grad: whether this rank's expert weights will receive gradients, so that
                the backward of combine runs even if no input needs gradients; or one answer for
                each name, with equal names, order and answers on all ranks.

        Collective: all ranks of the group; T may differ.
        Host sync, graph capture, lifetime of rows: see BufferCaps of the buffer.
        Raises:
            ShapeError: a tensor of some rank is invalid; on every rank, before rows are sent.
            CapacityError: T > M on some rank; on every rank.
            ConfigError: some ranks need gradients while others run under torch.no_grad(), pass
                quantised rows, or train different expert weights.
            HandleError: the dispatcher is closed.
            EPTimeout: other ranks did not arrive in time; the group is unusable, close() returns.
        On a static buffer only check() raises the first three.
        """
        return self._dispatch(hidden_states, topk, experts_need_grad)

    def _dispatch(
        self,
        hidden_states: Tensor | WireTensor,
        topk: TopKOutput,
        experts_need_grad: checks.NeedGrad,
        refusal: EPError | None = None,
    ) -> DispatchT:
        """Dispatch, or report `refusal` to all ranks and raise it."""
        self._check_group_open("dispatch")

        def send() -> DispatchT:
            call, handle = self._prepare(hidden_states, topk, experts_need_grad, refusal)
            if call.flags == BatchFlags.NONE:
                out = self._buffer.dispatch(call)
            else:
                out = dispatch_rows(self._buffer, call)
            return self._record(call, out, handle)

        is_reported = refusal is not None or not self._buffer.counts_calls
        return self._calls.announced(send, None if is_reported else self._report_dispatch)

    @ranged("dispatch_begin", is_traced=False)
    def dispatch_async(
        self,
        hidden_states: Tensor | WireTensor,
        topk: TopKOutput,
        *,
        experts_need_grad: checks.NeedGrad = False,
    ) -> Pending[DispatchT]:
        """Begin a dispatch; `wait()` completes it and makes its autograd node.

        is_asynchronous: a thread makes the call, after the calls begun before; do not write the
        tensors before `wait()` returns. With a receive hook (BufferCaps), rows are sent here and
        received in `wait()`. Otherwise `wait()` does all the work.

        All ranks begin calls, and call `wait()`, in the same order. If a rank drops a call without
        `wait()`, the next call raises HandleError on every rank.
        """
        begins = self.is_asynchronous
        if not (begins or self.plan.caps.has_receive_hook):
            return Pending(
                lambda: self.dispatch(hidden_states, topk, experts_need_grad=experts_need_grad)
            )
        self._check_group_open("dispatch")
        report = self._report_dispatch if self._buffer.counts_calls else None

        def begin() -> Pending[DispatchT]:
            call, handle = self._prepare(hidden_states, topk, experts_need_grad)
            sending = None
            if begins:
                name = f"dispatch of {self._name}"
                if call.flags != BatchFlags.NONE:
                    sending = self._sending(name)
                    sending.begin_history(call)
                make = partial(self._buffer.dispatch_steps, call)
                pending = self._calls.begin(make, report, name=name)
            else:
                pending = self._buffer.dispatch_async(call)
                if call.error is not None and call.error.was_raised:
                    self._record(call, pending.wait(), handle)
            return Pending(partial(self._receive, pending, call, handle, sending))

        return self._calls.announced(begin, report, settles=not begins)

    @ranged("dispatch_wait")
    def _receive(
        self,
        pending: Pending[Dispatched],
        call: DispatchCall,
        handle: Handle,
        sending: Sending | None,
    ) -> DispatchT:
        return self._record(call, pending.wait(), handle, sending)

    def _sending(self, name: str = "") -> Sending:
        return Sending(buffer=self._buffer, calls=self._calls, name=name, dtype=self._dtype)

    def _prepare(
        self,
        hidden_states: Tensor | WireTensor,
        topk: TopKOutput,
        experts_need_grad: checks.NeedGrad,
        refusal: EPError | None = None,
    ) -> tuple[DispatchCall, Handle]:
        """Check a call and cast its tensors; a call with an error gets no tokens."""
        if refusal is None:
            refusal = self._calls.take_unfinished()
        if refusal is None and (self._is_closed or torch.is_grad_enabled()):
            refusal = self._find_refusal(hidden_states, topk, experts_need_grad)
        error = refusal or self._call_error(hidden_states, topk)
        if error is None:
            num_tokens = data_of(hidden_states).shape[0]
        else:
            # Take part without tokens, so that the other ranks learn of the fault and do not wait.
            num_tokens = checks.num_tokens_of(hidden_states)
            hidden_states, topk = self._nothing()
            error.was_raised |= refusal is not None
        dtype = self._dtype
        if isinstance(hidden_states, Tensor) and hidden_states.dtype is not dtype:
            dtype, hidden_states = hidden_states.dtype, hidden_states.to(dtype)
        if topk.topk_weights.dtype is not self._weights_dtype:
            topk = replace(topk, topk_weights=topk.topk_weights.to(self._weights_dtype))
        handle = Handle(owner=self, num_tokens=num_tokens, dtype=dtype, where=self._where)
        return self._make_call(hidden_states, topk, experts_need_grad, error), handle

    def _nothing(self) -> tuple[Tensor, TopKOutput]:
        """Return the hidden states and top-k entries of a rank without tokens."""
        device = self._group.device
        hidden_states = torch.empty(0, self._spec.hidden_size, dtype=self._dtype, device=device)
        return hidden_states, empty_topk(self._spec.top_k, device)

    def _record(
        self, call: DispatchCall, out: Dispatched, handle: Handle, sending: Sending | None = None
    ) -> DispatchT:
        """Open the handle of a batch and return its record.

        sending: the dispatch in the graph, if it was begun.

        Raises:
            EPError: the error of this rank's call, if a static buffer has not raised it. This rank
                first takes part in the combine of the other ranks.
        """
        if call.error is not None and call.error.was_raised:
            self.refuse_combine(call.error, out.exchange_plan)
        self._num_calls += 1
        needs_backward = bool(int(out.any_flags) & _NEEDS_BACKWARD)
        handle.open(out.exchange_plan, call=self._num_calls, needs_backward=needs_backward)
        rows, slot_weights, index = out.rows, out.slot_weights, out.index
        if out.any_flags & BatchFlags.INPUTS_NEED_GRAD:
            packs = self._spec.sum_groups is not None
            sending = sending or self._sending()
            rows, slot_weights = sending.with_history(call, out, packs=packs)
            if packs:
                index = replace(index, row_of_slot=None, slots_of_row=None)
        rows = _arranged(rows, self.plan.scale_layout)
        if self.plan.caps.layout is Layout.MASKED:
            capacity = rows.data.shape[:2]
            # Mean slots of an expert: W * T * K slots on W * L experts.
            mean = -(-handle.num_tokens * self._spec.top_k // self._spec.num_local_experts)
            record = MaskedDispatchOutput(
                hidden_states=rows,
                num_tokens_per_expert=out.index.num_tokens_per_expert,
                slot_weights=None if slot_weights is None else slot_weights.view(capacity),
                weights_applied_by=self._weights_applied_by,
                handle=handle,
                mean_tokens_per_expert=mean,
            )
        else:
            record = RowsDispatchOutput(
                hidden_states=rows,
                index=index,
                slot_weights=slot_weights,
                weights_applied_by=self._weights_applied_by,
                handle=handle,
            )
        # The layout of the buffer, fixed by the plan, determines the type of the record.
        return cast(DispatchT, record)

    @ranged("combine", is_traced=False)
    def combine(self, combine_input: CombineT) -> Tensor:
        """Return the results to the ranks of their tokens and sum them: y [T, H].

        y has the dtype of the hidden states as the caller passed them.

        Collective: all ranks that dispatched this batch.   Host sync: none on a device.
        Lifetime: the caller owns the result.
        Raises:
            HandleError: the batch was combined before, belongs to another dispatcher, or the
                dispatcher is closed.
            ShapeError: the rows do not match the batch.
            EPTimeout: as in dispatch.
        The first two are raised on every rank, before rows are sent, and the batch may then be
        combined again. On a static buffer only the rank with the error raises; y is NaN on the
        other ranks, and their check() raises. On NCCL the others only learn of it with check_calls.
        """
        self._check_combine(combine_input)

        def send() -> Tensor:
            rows = cast_results(_as_rows(combine_input), self._dtype, self._weights_dtype)
            if torch.is_grad_enabled():
                return combine_rows(self._buffer, rows, self._dtype, calls=self._calls)
            y, _ = self._buffer.combine(
                rows.hidden_states,
                rows.handle.exchange_plan,
                rows_per=rows.rows_per,
                slot_weights=rows.slot_weights,
            )
            return y

        y = self._calls.announced(send, self._report_combine(combine_input.handle))
        combine_input.handle.spend("was combined before")
        return self._finished(y, combine_input.handle)

    @ranged("combine_begin", is_traced=False)
    def combine_async(self, combine_input: CombineT) -> Pending[Tensor]:
        """Begin a combine; `wait()` completes it. What each half does: see dispatch_async()."""
        begins = self.is_asynchronous
        if not (begins or self.plan.caps.has_receive_hook):
            return Pending(lambda: self.combine(combine_input))
        self._check_combine(combine_input)
        report = self._report_combine(combine_input.handle)

        def begin() -> Pending[Tensor]:
            rows = cast_results(_as_rows(combine_input), self._dtype, self._weights_dtype)
            if begins:
                name, calls = f"combine of {self._name}", self._calls
                return begin_combine(
                    self._buffer, rows, self._dtype, calls=calls, report=report, name=name
                )
            return self._buffer.combine_async(
                rows.hidden_states,
                rows.handle.exchange_plan,
                rows_per=rows.rows_per,
                slot_weights=rows.slot_weights,
            )

        pending = self._calls.announced(begin, report, settles=not begins)
        combine_input.handle.spend("was combined before")
        return Pending(partial(self._receive_sums, pending, combine_input.handle))

    @ranged("combine_wait")
    def _receive_sums(self, pending: Pending[Tensor], handle: Handle) -> Tensor:
        try:
            y = pending.wait()
        except EPError:
            handle.reopen()
            raise
        return self._finished(y, handle)

    def refuse(self, error: EPError) -> NoReturn:
        """Report `error` to the other ranks, in place of a dispatch; then raise it.

        Collective: yes, in place of dispatch(), and on a static buffer of combine() too.
        """
        self._dispatch(*self._nothing(), False, refusal=error)
        raise error

    def refuse_combine(self, error: EPError, exchange_plan: ExchangePlan | None) -> NoReturn:
        """Report `error` to the other ranks, in place of a combine; then raise it.

        exchange_plan: the exchange plan of the batch; None if the batch is unknown.

        Collective: yes, in place of combine().
        """
        self._calls.settle()
        error.was_raised = True
        no_rows, _ = self._nothing()
        try:
            self._buffer.combine(no_rows, exchange_plan, rows_per=RowsPer.ROW, error=error)
            if self._checks_calls:
                # Faults of other ranks must not hide the fault of this rank.
                with suppress(EPError):
                    self.check()
        except EPTimeout as timeout:
            raise error from timeout
        raise error

    def _report_dispatch(self, problem: Exception) -> None:
        """Report a failure before the header of a dispatch."""
        self.refuse(checks.unready_error(problem, self._where))

    def refuse_results(self, problem: Exception, handle: Handle) -> None:
        """Report a failure before the rows of a combine, in place of it.

        Collective: yes, in place of combine().
        """
        # A device that has failed may be unable to send the report too.
        with suppress(EPError, RuntimeError):
            error = checks.unready_error(problem, self._where, function="combine")
            self.refuse_combine(error, handle.exchange_plan)

    def _report_combine(self, handle: Handle) -> Callable[[Exception], None] | None:
        """Return the function that reports a failure before combine's header, if it has one."""
        return partial(self.refuse_results, handle=handle) if self._buffer.counts_calls else None

    def _check_combine(self, combine_input: CombineT) -> None:
        """Report an invalid call to all ranks and raise its error."""
        self._check_group_open("combine")
        error = self._closed_error("combine") or self._calls.take_unfinished()
        error = error or self._checks.find_combine_error(combine_input, self, self.plan.caps.layout)
        if error is not None:
            self.refuse_combine(error, checks.open_exchange_plan_of(combine_input, self))

    def _finished(self, y: Tensor, handle: Handle) -> Tensor:
        """Return y [T, H] in the dtype of the caller's hidden states."""
        num_tokens = handle.num_tokens
        if y.shape[0] != num_tokens:
            # The dispatch had an error on a static buffer, so this rank took part without tokens.
            y = y.new_full((num_tokens, self._spec.hidden_size), float("nan"))
        if self._checks_calls:
            self.check()
        return y if handle.dtype is None else in_dtype(y, handle.dtype)

    def check(self) -> None:
        """Raise the faults recorded on the device.

        Static buffers (low latency, or a slot budget) cannot raise in dispatch: y of the call is
        NaN on every rank, and check() raises the reason. On other buffers it does nothing.

        Local; every rank raises the same fault.   Host sync: yes.
        Raises:
            CapacityError: T > M, or more received slots than the budget, with the size needed.
            ShapeError, ConfigError: another fault, with the ranks that have it.
        """
        self._calls.settle()
        self._buffer.check()

    def traffic(self) -> BufferTraffic:
        """Return the bytes that the buffer has sent to other ranks, for all of its layers."""
        return self._buffer.traffic()

    def close(self) -> None:
        """Make further calls raise, also for batches in flight. Local, idempotent.

        A call on a closed dispatcher is still reported to the other ranks, which may be waiting.
        After the EPGroup is closed too, calls raise immediately.
        """
        self._is_closed = True

    def _check_group_open(self, function: str) -> None:
        if self._group.is_closed:
            raise group_closed(function, self._where)

    def _closed_error(self, function: str) -> HandleError | None:
        if not self._is_closed:
            return None
        return HandleError(
            f"{function}: the dispatcher is closed ({self._where}); construct a new one"
        )

    def _find_refusal(
        self,
        hidden_states: Tensor | WireTensor,
        topk: TopKOutput,
        experts_need_grad: checks.NeedGrad,
    ) -> EPError | None:
        """Return the error of a closed dispatcher or of a call that needs gradients, or None."""
        if self._is_closed:
            return self._closed_error("dispatch")
        is_wire, trains = isinstance(hidden_states, WireTensor), self.plan.caps.trainable
        sums = self._spec.combine_format if trains and not self._quantizes_with_gradients else None
        if trains and not is_wire and sums is None:
            return None
        if not checks.needs_gradients(hidden_states, topk, experts_need_grad):
            return None
        if sums is not None:
            return ConfigError(
                f"dispatch: combine_dtype is {sums.dtype.value}, and gradients are needed "
                f"({self._where}); set EPConfig.combine_dtype_with_gradients, or use "
                "torch.no_grad()"
            )
        if is_wire:
            return ConfigError(
                "dispatch: hidden_states are quantised and have no gradients, but some are "
                f"needed ({self._where}); pass them unquantised, or use torch.no_grad()"
            )
        what = "low latency" if self.mode is Mode.LOW_LATENCY else self.plan.backend
        other = "mode normal" if self.mode is Mode.LOW_LATENCY else "another backend"
        return ConfigError(
            f"dispatch: {what} has no gradients, but some are needed ({self._where}); "
            f"use {other}, or torch.no_grad()"
        )

    def _call_error(self, hidden_states: Tensor | WireTensor, topk: TopKOutput) -> EPError | None:
        if isinstance(hidden_states, WireTensor) and not self._buffer.takes_wire_tensors:
            return ShapeError(
                "dispatch: hidden_states are a WireTensor, expected a tensor, because kernels of "
                f"{self.plan.backend} quantise ({self._where}); pass them unquantised"
            )
        return self._checks.find_call_error(hidden_states, topk)

    def _make_call(
        self,
        hidden_states: Tensor | WireTensor,
        topk: TopKOutput,
        experts_need_grad: checks.NeedGrad,
        error: EPError | None,
    ) -> DispatchCall:
        flags, expert_names = BatchFlags.NONE, ()
        is_tensor = isinstance(hidden_states, Tensor)
        # Without gradients, ranks may differ in grad mode.
        if is_tensor and torch.is_grad_enabled() and self.plan.caps.trainable:
            inputs_need_grad = hidden_states.requires_grad or topk.topk_weights.requires_grad
            if isinstance(experts_need_grad, Mapping):
                expert_names = tuple(experts_need_grad)
                flags = _flags_of(inputs_need_grad, tuple(experts_need_grad.values()))
            else:
                flags = _flags_of(inputs_need_grad, experts_need_grad)
        return DispatchCall(
            hidden_states=hidden_states,
            topk_ids=topk.topk_ids,
            topk_weights=topk.topk_weights,
            topk_groups=topk.topk_groups,
            flags=flags,
            expert_names=expert_names,
            error=error,
            # After an error use plain torch, because the kernel may be what failed.
            quantize=self._quantize if error is None else quantize,
            int8_profile=self.plan.int8_profile,
            dispatcher=self._number,
        )


class DeepEPNormalDispatcher(Dispatcher[RowsDispatchOutput, RowsCombineInput]):
    """Sends a token once to each rank that owns one of its experts: prefill and training.

    Host sync: dispatch reads the counts once; combine none. Trainable.
    """

    mode: ClassVar[Mode] = Mode.NORMAL


class DeepEPLowLatencyDispatcher(Dispatcher[DispatchOutput, CombineInput]):
    """Sends at most M tokens per rank through buffers of fixed size: decode.

    Counts stay on the device. Router weights are sent with the tokens and combine applies them, so
    a rank sums before it sends. If a call has a fault, y is NaN on every rank and check() raises
    the reason. No gradients.
    Over shared_memory it works like normal mode: exact sizes, one host sync, trainable.
    """

    mode: ClassVar[Mode] = Mode.LOW_LATENCY


class StandardDispatcher(Dispatcher[RowsDispatchOutput, RowsCombineInput]):
    """Sends every token to every rank: all-gather, local experts, reduce-scatter.

    Bytes do not depend on the routing; worthwhile on up to about 8 ranks. Trainable.
    """

    mode: ClassVar[Mode] = Mode.STANDARD


@cache
def _flags_of(inputs_need_grad: bool, experts_need_grad: bool | tuple[bool, ...]) -> BatchFlags:
    flags = BatchFlags.GRAD_ENABLED
    if inputs_need_grad:
        flags |= BatchFlags.INPUTS_NEED_GRAD
    if isinstance(experts_need_grad, tuple):
        flags |= BatchFlags.of_experts(experts_need_grad)
    elif experts_need_grad:
        flags |= BatchFlags.EXPERTS_NEED_GRAD
    return flags


def _arranged(rows: WireTensor, layout: ScaleLayout) -> WireTensor:
    """Return rows with scales in `layout`, which the runner reads; rows without scales as is."""
    if rows.scales is None:
        return rows
    if rows.scale_layout is layout or rows.scale_layout == layout:
        return rows
    if layout != (rows.scale_layout or ROW_MAJOR):
        rows = row_major(rows)
        assert rows.scales is not None, "there were some"
        rows = replace(rows, scales=arrange_scales(rows.scales, layout))
    return replace(rows, scale_layout=layout)


def _as_rows(combine_input: RowsCombineInput | MaskedCombineInput) -> RowsCombineInput:
    """Return the expert results as rows; those of MASKED become one row per slot."""
    if isinstance(combine_input, RowsCombineInput):
        return combine_input
    weights = combine_input.slot_weights
    return RowsCombineInput(
        hidden_states=combine_input.hidden_states.flatten(0, 1),
        rows_per=RowsPer.SLOT,
        slot_weights=None if weights is None else weights.flatten(),
        handle=combine_input.handle,
    )
