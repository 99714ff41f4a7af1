"""Low latency between the GPUs of one host: kernels store rows in the memory of the experts' rank.

Static sizes, no host sync, two launches a phase, two receive buffers used in turn, router weights
that are sent with the tokens, and one returned row for the sum of a rank's experts, or of each
group of them. Signals, memory order and reuse: ll_dispatch_send.py, ll_dispatch_recv.py and
ll_combine_send.py of epcomm/kernels/nvlink.

A dispatch into a receive buffer whose last batch was never combined ends that batch first, on every
rank, because calls have one order; a combine of that batch is then refused. Until then a batch can
be combined any number of times, each time in a new epoch.
"""

from functools import cache
from types import ModuleType
from typing import ClassVar

import torch
from torch import Tensor

from epcomm.buffers.base import Dispatched, ReturnsSlots
from epcomm.buffers.nvlink import sizes
from epcomm.buffers.nvlink.base import NVLinkHost
from epcomm.buffers.nvlink.low_latency_masked import hand_out_masked, scale_reasons
from epcomm.buffers.nvlink.low_latency_state import (
    NVLinkLowLatencyExchangePlan,
    ReceiveBuffer,
    SlotTerms,
    kind_of,
    scale_words,
)
from epcomm.buffers.nvlink.memory import as_words
from epcomm.buffers.sizes import CallShape, Region, max_slots_of
from epcomm.buffers.traffic import BufferTraffic
from epcomm.calls.call import DispatchCall
from epcomm.calls.faults import assume_all_need_grad
from epcomm.calls.order import Calls
from epcomm.config import Mode
from epcomm.errors import EPError, HandleError
from epcomm.kernels.nvlink.common.exchange import first_state
from epcomm.kernels.nvlink.common.layout import MAX_LINE_RANKS, MAX_RETURNED_ROWS, LowLatencyLayout
from epcomm.protocol import BatchFlags, FaultCode, pack_status
from epcomm.records import ExchangePlan, Pending
from epcomm.spec import BufferCaps, BufferSpec
from epcomm.types import FLOAT32_SUM_DTYPES, Int8Profile, Layout, RowsPer, WireDtype, WireTensor

# Most columns of a sum that has a scale of the row: a program has the whole row.
_ROW_COLUMNS = 16384
# An interpreter runs the programs of a grid one after another, so more programs only take more
# time.
_INTERPRETED_PROGRAMS = 2


class NVLinkLowLatencyBuffer(NVLinkHost[LowLatencyLayout], ReturnsSlots):
    """Serves low latency; rows are used where peers have stored them, through an index."""

    modes: ClassVar[frozenset[Mode]] = frozenset({Mode.LOW_LATENCY})
    handed_layout: ClassVar[Layout] = Layout.ROWS
    # Largest grid of a sending kernel: one program a token at 128 tokens, all resident on an H200.
    max_programs: ClassVar[int] = 128
    # The most tokens that a rank sends in lines, see kernels/nvlink/common/lines.py: a third more
    # bytes, and no fence.
    line_tokens: ClassVar[int] = 32
    needs_distinct_ids: ClassVar[bool] = False
    sums_groups: ClassVar[bool] = True
    _has_slot_budget: ClassVar[bool] = False

    # The module ll_launchers, which prepare() imports.
    _kernels: ModuleType

    @classmethod
    def caps(cls, mode: Mode) -> BufferCaps:
        return BufferCaps(
            layout=cls.handed_layout,
            trainable=False,
            ordered=True,
            wire_dtypes=FLOAT32_SUM_DTYPES,
            combine_dtypes=cls.combine_dtypes,
            batches_in_flight=cls.num_buffers,
            batches_on_request=True,
            has_receive_hook=True,
            is_static=True,
            has_slot_budget=cls._has_slot_budget,
            device_types=frozenset({"cuda"}),
        )

    @classmethod
    def lacks(cls, mode: Mode, spec: BufferSpec, world_size: int) -> tuple[str, ...]:
        reasons = []
        if world_size == 1:
            reasons.append("writes to peers, and a single rank has none")
        if world_size > MAX_LINE_RANKS:
            reasons.append(f"serves at most {MAX_LINE_RANKS} ranks, not {world_size}")
        if spec.dispatch_format.dtype is WireDtype.INT8 and spec.dispatch_format.scale_block:
            reasons.append(f"INT8 rows have one scale, not {spec.dispatch_format}")
        if (spec.returns_slots or spec.sums_at_source) and spec.top_k > MAX_RETURNED_ROWS:
            reasons.append(f"returns at most {MAX_RETURNED_ROWS} slots a token, not {spec.top_k}")
        if (spec.returns_slots or spec.sums_at_source) and spec.combine_format is not None:
            reasons.append(f"returns slots as {spec.hidden_format}, not as {spec.combine_format}")
        sums = spec.combine_format or spec.hidden_format
        if sums.dtype.has_row_scale and spec.hidden_size > _ROW_COLUMNS:
            reasons.append(f"returns {sums} of at most {_ROW_COLUMNS} columns")
        reasons += sizes.group_reasons(spec, world_size)
        if cls.handed_layout is Layout.MASKED and spec.expert_alignment > 1:
            reasons.append("gives every expert the same capacity, so expert_alignment must be 1")
        if cls.handed_layout is Layout.MASKED:
            reasons += scale_reasons(spec)
        return tuple(reasons)

    @classmethod
    def region_bytes(cls, spec: BufferSpec, world_size: int) -> tuple[Region, ...]:
        layout = cls.layout_for(spec, world_size)
        num_slots = cls._max_slots_of(spec, layout.num_rows)
        return sizes.low_latency_regions(spec, layout, num_slots, cls.handed_layout)

    @classmethod
    def _max_slots_of(cls, spec: BufferSpec, num_rows: int) -> int:
        """Return C, into which any routing of R rows fits."""
        if cls.handed_layout is Layout.MASKED:
            return spec.num_local_experts * num_rows
        return max_slots_of(spec, num_rows)

    @classmethod
    def layout_for(cls, spec: BufferSpec, world_size: int) -> LowLatencyLayout:
        """Return the layout of the blocks that such buffers open. Local."""
        return sizes.low_latency_layout(spec, world_size, cls.num_buffers_of(spec), cls.line_tokens)

    @classmethod
    def wire_bytes(
        cls, spec: BufferSpec, call: CallShape, *, backward: bool = False
    ) -> BufferTraffic:
        layout = cls.layout_for(spec, call.world_size)
        num_returned = call.slots_received if layout.returns_slots else call.sums_sent
        control = call.tokens_of_rank[call.rank] * layout.metadata_bytes + layout.control_bytes
        return BufferTraffic(
            dispatch_bytes=call.rows_sent * sizes.wire_row_bytes(spec),
            combine_bytes=num_returned * sizes.sum_bytes(spec),
            control_bytes=(call.world_size - 1) * control,
        )

    def __init__(self, calls: Calls, spec: BufferSpec) -> None:
        super().__init__(calls, spec, num_counters=4)
        self._receive_buffers: list[ReceiveBuffer] = []
        self._num_batches = 0
        # The number of the batch in the first receive buffer; exclude_ranks() increases it.
        self._first_batch = 0
        wire = spec.dispatch_format
        self._plain_dtype = None if wire.dtype.is_quantized else wire.dtype.torch_dtype
        self._sum_dtype = spec.hidden_format.dtype.torch_dtype
        self._scale_block = wire.scale_block or spec.hidden_size
        # Rows that are not INT8 have a constant one, so that they share one kernel.
        self._profile = "" if wire.dtype is WireDtype.INT8 else Int8Profile.RINT127.value

    def prepare(self) -> None:
        spec = self._spec
        # Plans read this module on machines without Triton.
        from epcomm.kernels.nvlink import ll_launchers

        self._kernels = ll_launchers
        self._open_memory(self.layout_for(spec, self._world_size))
        num_slots = self._max_slots_of(spec, self._layout.num_rows)
        # The kinds of rows that the kernels quantise, and of rows that are sent as they are passed.
        self._kind, self._plain_kind = kind_of(spec.dispatch_format), kind_of(spec.hidden_format)
        self._line_tokens = self._layout.line_tokens
        self._receive_buffers = [
            ReceiveBuffer.of(self._blocks, number, rows, num_slots, spec.expert_alignment)
            for number, rows in enumerate(self.received_rows())
        ]
        if self.handed_layout is Layout.MASKED:
            for receive_buffer in self._receive_buffers:
                hand_out_masked(receive_buffer, spec)
        self._no_rows = torch.zeros(
            1, spec.hidden_size, dtype=self._sum_dtype, device=self._block.device
        )
        if self._layout.returns_slots:
            for receive_buffer in self._receive_buffers:
                receive_buffer.terms = self._terms_of(self._empty_call(self._sum_dtype))
        if self._device.type == "cuda":
            self._warm_up()

    def dispatch(self, call: DispatchCall) -> Dispatched:
        receive_buffer = self._send(call)
        out = self._promise(receive_buffer, call)
        self._receive(receive_buffer)
        return out

    def dispatch_async(self, call: DispatchCall) -> Pending[Dispatched]:
        receive_buffer = self._send(call)
        batch, out = receive_buffer.batch, self._promise(receive_buffer, call)

        def receive() -> Dispatched:
            self._check_open()
            if receive_buffer.batch != batch:
                raise self._ended_error(batch)
            self._follow()
            self._receive(receive_buffer, receive_buffer.batch_word)
            return out

        return Pending(receive, record=out)

    def _send(self, call: DispatchCall) -> ReceiveBuffer:
        """Begin a batch, and return the receive buffer that it takes."""
        num_tokens, status = call.num_tokens, 0
        assert num_tokens <= self._layout.max_tokens, "the dispatcher has checked T"
        self._begin_call()
        receive_buffer = self._receive_buffer_of(self._num_batches)
        if receive_buffer.unfinished is not None:
            receive_buffer.unfinished()
        is_captured = self._is_captured()
        # A capture ends no batch. The kernels of its replay end an eager batch themselves.
        is_known = receive_buffer.was_captured == is_captured
        if receive_buffer.is_open if is_known else receive_buffer.was_captured:
            self._kernels.release_buffer(receive_buffer.exchange)
        receive_buffer.was_captured = is_captured
        receive_buffer.batch = self._num_batches
        receive_buffer.is_open, receive_buffer.is_combined = True, False
        receive_buffer.unfinished = None
        self._num_batches += 1
        if call.error is not None or call.flags is not BatchFlags.NONE:
            self._faults.note_own(call.error)
            status = pack_status(FaultCode.of(call.error), call.flags)
        hidden_states, kind, scales = call.hidden_states, self._kind, None
        if isinstance(hidden_states, WireTensor):
            kind, scales = self._plain_kind, scale_words(hidden_states)
            hidden_states = hidden_states.data if scales is None else as_words(hidden_states.data)
        elif self._plain_dtype is not None and hidden_states.dtype is not self._plain_dtype:
            hidden_states = hidden_states.to(self._plain_dtype)
        if self._spec.sums_at_source:
            receive_buffer.terms = self._terms_of(call)
        receive_buffer.num_tokens = num_tokens
        receive_buffer.is_in_lines = 0 < self._line_tokens >= num_tokens
        self._kernels.send_dispatch(
            receive_buffer.exchange,
            hidden_states if hidden_states.stride(-1) == 1 else hidden_states.contiguous(),
            call.topk_ids.contiguous(),
            None if self._layout.returns_slots else call.topk_weights.contiguous(),
            receive_buffer.is_sent,
            status=status,
            batch=receive_buffer.batch_word,
            is_captured=is_captured,
            kind=kind,
            scale_block=self._scale_block,
            profile=self._profile or call.int8_profile.value,
            scales=scales,
            needs_distinct_ids=self.needs_distinct_ids,
            in_lines=receive_buffer.is_in_lines,
        )
        return receive_buffer

    def _terms_of(self, call: DispatchCall) -> SlotTerms:
        """Copy the weights and groups of a call, which the caller may overwrite before combine."""
        weights, groups = call.topk_weights.clone(memory_format=torch.contiguous_format), None
        if self._spec.sums_at_source:
            # A call without tokens has no groups.
            found = call.topk_ids if call.topk_groups is None else call.topk_groups
            groups = found.to(torch.int32, memory_format=torch.contiguous_format)
        return SlotTerms(weights=weights, groups=groups)

    def _receive(self, receive_buffer: ReceiveBuffer, batch: int = -1) -> None:
        """Receive the batch of a receive buffer; `batch` unless it has just been sent."""
        self._kernels.receive_dispatch(
            receive_buffer.exchange,
            receive_buffer.index.row_of_slot,
            receive_buffer.slots_of_row,
            receive_buffer.slot_weights,
            receive_buffer.index.num_tokens_per_expert,
            receive_buffer.index.first_slot,
            expert_alignment=self._spec.expert_alignment,
            num_tokens=receive_buffer.num_tokens,
            is_captured=receive_buffer.was_captured,
            batch=batch,
            scale_strides=receive_buffer.scale_strides,
            slabs=receive_buffer.slabs,
        )

    def _promise(self, receive_buffer: ReceiveBuffer, call: DispatchCall) -> Dispatched:
        """Return what _receive() will fill: memory of the receive buffer, the same at each turn."""
        num_rows = self._layout.num_rows
        if self.handed_layout is Layout.MASKED:
            num_rows *= self._spec.num_local_experts
        return Dispatched(
            rows=receive_buffer.rows,
            index=receive_buffer.index,
            slot_weights=receive_buffer.slot_weights,
            exchange_plan=NVLinkLowLatencyExchangePlan(
                num_tokens=call.num_tokens,
                num_rows=num_rows,
                index=receive_buffer.index,
                batch=receive_buffer.batch,
                slabs=receive_buffer.slabs,
            ),
            any_flags=assume_all_need_grad(call.flags),
        )

    def combine(
        self,
        rows: Tensor,
        exchange_plan: ExchangePlan | None,
        *,
        rows_per: RowsPer,
        slot_weights: Tensor | None = None,
        row_scalars: Tensor | None = None,
        error: EPError | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        assert row_scalars is None, "without gradients there are none"
        if error is not None:
            # Only the code of the error is sent.
            receive_buffer = self._find_batch(exchange_plan, error)
            code = FaultCode.of(error, in_combine=True)
            y = self._send_results(receive_buffer, rows, 0, per_row=True, code=code)
            return self._take_sums(receive_buffer, y), None
        assert exchange_plan is not None, "it is None with an error alone"
        assert not self._spec.returns_slots, "combine_slots_async() returns a row for each slot"
        receive_buffer, y = self._begin_combine(rows, exchange_plan, rows_per, slot_weights)
        return self._take_sums(receive_buffer, y), None

    def combine_async(
        self,
        rows: Tensor,
        exchange_plan: ExchangePlan,
        *,
        rows_per: RowsPer,
        slot_weights: Tensor | None = None,
    ) -> Pending[Tensor]:
        assert not self._spec.returns_slots, "combine_slots_async() returns a row for each slot"
        receive_buffer, y = self._begin_combine(rows, exchange_plan, rows_per, slot_weights)
        return self._receive_later(receive_buffer, y)

    def combine_slots_async(
        self,
        rows: Tensor,
        exchange_plan: ExchangePlan,
        topk_weights: Tensor,
        *,
        out: Tensor | None = None,
    ) -> Pending[Tensor]:
        receive_buffer, y = self._begin_combine(rows, exchange_plan, RowsPer.SLOT, out=out)
        receive_buffer.terms = SlotTerms(weights=topk_weights.contiguous())
        return self._receive_later(receive_buffer, y)

    def _receive_later(self, receive_buffer: ReceiveBuffer, y: Tensor) -> Pending[Tensor]:
        """Return what receives the sums that other ranks have begun to send."""
        sent_on = torch.cuda.current_stream(y.device) if y.is_cuda else None

        # A batch is received once: in wait(), or earlier if its receive buffer is needed.
        @cache
        def receive() -> Tensor:
            if sent_on is not None and sent_on != (stream := torch.cuda.current_stream(y.device)):
                y.record_stream(stream)
            self._follow()
            return self._take_sums(receive_buffer, y)

        receive_buffer.unfinished = receive

        def wait() -> Tensor:
            receive()
            if receive_buffer.unfinished is receive:
                # The caller owns y: a receive buffer that waits for its turn must not keep it.
                receive_buffer.unfinished = None
            return y

        return Pending(wait, record=y)

    def _begin_combine(
        self,
        rows: Tensor,
        exchange_plan: ExchangePlan,
        rows_per: RowsPer,
        slot_weights: Tensor | None = None,
        *,
        out: Tensor | None = None,
    ) -> tuple[ReceiveBuffer, Tensor]:
        """Send the results of a batch; return its receive buffer, and memory for y."""
        assert isinstance(exchange_plan, NVLinkLowLatencyExchangePlan), "it is of this buffer"
        is_per_slot = rows_per is RowsPer.SLOT
        assert is_per_slot or self.handed_layout is Layout.ROWS, "a MASKED row is a slot"
        assert is_per_slot or self._layout.groups == 1, "a row has one sum for all groups"
        self._begin_call()
        batch = exchange_plan.batch
        receive_buffer = self._receive_buffer_of(batch)
        if receive_buffer.batch != batch or not self._reopen(receive_buffer):
            raise self._ended_error(batch)
        return receive_buffer, self._send_results(
            receive_buffer,
            rows,
            exchange_plan.num_tokens,
            per_row=not is_per_slot,
            slot_weights=slot_weights,
            out=out,
        )

    def _reopen(self, receive_buffer: ReceiveBuffer) -> bool:
        """Begin a batch again if it was combined; return whether it awaits a combine now."""
        if not receive_buffer.is_open and receive_buffer.unfinished is not None:
            receive_buffer.unfinished()
        if not receive_buffer.is_open and receive_buffer.is_combined:
            self._kernels.begin_again(receive_buffer.exchange, receive_buffer.batch_word)
            receive_buffer.is_open, receive_buffer.is_combined = True, False
        return receive_buffer.is_open

    def _send_results(
        self,
        receive_buffer: ReceiveBuffer,
        rows: Tensor,
        num_tokens: int,
        *,
        per_row: bool = False,
        slot_weights: Tensor | None = None,
        out: Tensor | None = None,
        code: FaultCode = FaultCode.NONE,
    ) -> Tensor:
        """Send sums, slots or a refusal; return memory for y: [T, H], not written yet."""
        # to() takes host time even if there is nothing to convert.
        rows = rows if rows.dtype is self._sum_dtype else rows.to(self._sum_dtype)
        shape = (num_tokens, self._spec.hidden_size)
        # Allocate y now, because the receiving kernel may run together with kernels before this
        # sender. Their inputs may be freed by then, and could be the same memory.
        y = rows.new_empty(shape) if out is None else out
        if out is not None:
            is_fit = out.shape == shape and out.dtype is self._sum_dtype and out.is_contiguous()
            assert is_fit, f"out is {list(out.shape)} {out.dtype}, expected {list(shape)}"
        self._kernels.send_combine(
            receive_buffer.exchange,
            rows if rows.stride(-1) == 1 else rows.contiguous(),
            None if slot_weights is None else slot_weights.contiguous(),
            receive_buffer.slots_of_row,
            receive_buffer.index.first_slot,
            num_tokens=receive_buffer.num_tokens,
            per_row=per_row,
            batch=receive_buffer.batch_word,
            status=int(code),
        )
        receive_buffer.is_open = False
        return y

    def _take_sums(self, receive_buffer: ReceiveBuffer, y: Tensor) -> Tensor:
        """End the combine of a batch: write y, and return it."""
        terms = receive_buffer.terms
        self._kernels.receive_combine(
            receive_buffer.exchange,
            y,
            receive_buffer.is_sent,
            terms and terms.weights,
            terms and terms.groups,
            # As this rank sent, which its header told all ranks.
            wanted_tokens=receive_buffer.num_tokens,
            in_lines=receive_buffer.is_in_lines,
            batch=receive_buffer.batch_word,
        )
        receive_buffer.is_combined = True
        return y

    def _find_batch(self, exchange_plan: ExchangePlan | None, error: EPError) -> ReceiveBuffer:
        """Begin a combine without rows, and return the receive buffer of its batch.

        Without an exchange plan that is the oldest batch that awaits its combine; ranks that
        combine another one wait until the timeout.

        Raises:
            error: the batch was ended, or none awaits its combine.
        """
        self._begin_call()
        if exchange_plan is None:
            meant = [each for each in self._receive_buffers if each.is_open]
        else:
            assert isinstance(exchange_plan, NVLinkLowLatencyExchangePlan), "it is of this buffer"
            batch = exchange_plan.batch
            of_batch = (each for each in self._receive_buffers if each.batch == batch)
            meant = [each for each in of_batch if self._reopen(each)]
        if not meant:
            raise error
        self._faults.note_own(error)
        return min(meant, key=lambda each: each.batch)

    def traffic(self) -> BufferTraffic:
        """Return the bytes sent to other ranks so far.   Host sync: yes."""
        rows, metadata, headers, sums = self._counters.tolist()
        return BufferTraffic(
            dispatch_bytes=rows * sizes.wire_row_bytes(self._spec),
            combine_bytes=sums * sizes.sum_bytes(self._spec),
            control_bytes=metadata * self._layout.metadata_bytes
            + headers * self._layout.control_bytes,
        )

    def _is_captured(self) -> bool:
        """Return whether the current stream is captured, so that a graph repeats this call."""
        return self._is_cuda and torch.cuda.is_current_stream_capturing()

    def _receive_buffer_of(self, batch: int) -> ReceiveBuffer:
        return self._receive_buffers[(batch - self._first_batch) % self._layout.num_buffers]

    def _start_anew(self) -> None:
        block, layout = self._block, self._layout
        # The abort flag is stored before the receive buffers.
        block[: layout.buffers_at].zero_()
        for number, receive_buffer in enumerate(self._receive_buffers):
            begin = layout.buffer_offset(number)
            # Signals and lines, which are compared with epochs, are stored before the rest.
            block[begin : begin + layout.offsets["data"]].zero_()
            receive_buffer.exchange.state.copy_(first_state(self._world_size, block.device))
            receive_buffer.is_open = receive_buffer.is_combined = False
            receive_buffer.was_captured = False
            receive_buffer.unfinished = None
        # Ranks may have reached different numbers, and exchange plans of old batches stay refused.
        self._first_batch = self._num_batches

    def _release(self) -> None:
        super()._release()
        self._receive_buffers = []

    def _warm_up(self) -> None:
        """Run batches without tokens through each receive buffer: kernels are compiled and loaded.

        They are sent in bulk, then in lines, whose kernels differ. A barrier follows each step, for
        compiling may take one rank longer than a wait.
        """
        call, num_buffers = self._empty_call(self._sum_dtype), self._layout.num_buffers
        for turn in range(2 * num_buffers):
            self._line_tokens = 0 if turn < num_buffers else self._layout.line_tokens
            sent = self.dispatch_async(call)
            self._host_barrier()
            out = sent.wait()
            self._host_barrier()
            # No row has a slot, so a single row can stand for all C.
            receive_buffer, y = self._begin_combine(
                self._no_rows, out.exchange_plan, RowsPer.SLOT, out.slot_weights
            )
            self._host_barrier()
            self._take_sums(receive_buffer, y)
            self._host_barrier()

    def _ended_error(self, batch: int) -> HandleError:
        num_buffers = self._layout.num_buffers
        return HandleError(
            f"combine: batch {batch} of {self.name} was overwritten by dispatch "
            f"{batch + num_buffers}, because {num_buffers} may be in flight (rank {self._rank} of "
            f"{self._world_size}); dispatch again, or set EPConfig.batches_in_flight"
        )

    @property
    def _num_programs(self) -> int:
        """Return P: at least one per header of a rank."""
        is_cuda = self._device.type == "cuda"
        return max(self._world_size, self.max_programs if is_cuda else _INTERPRETED_PROGRAMS)


class NVLinkMaskedBuffer(NVLinkLowLatencyBuffer):
    """Serves low latency; rows are copied to experts on arrival, see low_latency_masked.py."""

    handed_layout: ClassVar[Layout] = Layout.MASKED
    # Each expert has capacity for one slot of each token.
    needs_distinct_ids: ClassVar[bool] = True
