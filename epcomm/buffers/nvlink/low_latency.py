"""Low latency between the GPUs of one host: kernels store rows where the experts' rank reads them.

Static sizes, no host sync, two launches a phase, two receive buffers used in turn, router weights
that travel with the tokens, and one returned row for the sum of a rank's experts. Signals, memory
order and reuse: epcomm/kernels/nvlink/ll_dispatch_send.py, ll_dispatch_recv.py and ll_combine.py.

A dispatch into a receive buffer whose last batch was never combined ends that batch first, on every
rank alike, for calls have one order; a combine of that batch is then refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import ClassVar

import torch
from torch import Tensor

from epcomm.buffers.base import Combined, DispatchCall, Dispatched
from epcomm.buffers.faults import assume_all_need_grad
from epcomm.buffers.nvlink.excluded_ranks import ExcludingHost
from epcomm.buffers.nvlink.low_latency_layout import HEADER_BYTES, NUM_BUFFERS, BlockLayout
from epcomm.buffers.nvlink.low_latency_state import (
    DeferredStep,
    NVLinkLowLatencyExchangePlan,
    ReceiveBuffer,
    first_state,
    kind_of,
    profile_of,
    received_rows,
)
from epcomm.buffers.nvlink.memory import SymmetricMemory
from epcomm.buffers.sizes import CallShape, Region, index_bytes, max_slots_of, slot_regions
from epcomm.buffers.traffic import BufferTraffic
from epcomm.collectives.base import Collectives
from epcomm.config import Mode
from epcomm.errors import EPError, HandleError
from epcomm.protocol import BatchFlags, FaultCode, pack_status
from epcomm.records import ExchangePlan, Pending, SlotIndex
from epcomm.spec import BufferCaps, BufferSpec
from epcomm.types import (
    FLOAT32_SUM_DTYPES,
    Layout,
    RowsPer,
    WireDtype,
    WireTensor,
)

# An interpreter runs the programs of a grid one after another: more of them only cost time.
_INTERPRETED_PROGRAMS = 2


class NVLinkLowLatencyBuffer(ExcludingHost):
    """Low latency between the GPUs of one host; under Triton's interpreter between CPU ranks."""

    name: ClassVar[str] = "nvlink"
    modes: ClassVar[frozenset[Mode]] = frozenset({Mode.LOW_LATENCY})
    # Number of receive buffers. Tests also use 1, where a missing wait fails at once.
    num_buffers: ClassVar[int] = NUM_BUFFERS
    # Largest grid of a sending kernel: one program a token at 128 tokens, all resident on an H200.
    max_programs: ClassVar[int] = 128

    @classmethod
    def _waits(cls) -> Mapping[int, str]:
        from epcomm.kernels.nvlink.ll_combine import PHASE_COMBINE
        from epcomm.kernels.nvlink.ll_dispatch_recv import PHASE_DISPATCH
        from epcomm.kernels.nvlink.ll_dispatch_send import PHASE_CREDIT

        return {
            PHASE_CREDIT: "the previous combine, use {epoch} of its receive buffer",
            PHASE_DISPATCH: "dispatch, use {epoch} of its receive buffer",
            PHASE_COMBINE: "combine, use {epoch} of its receive buffer",
        }

    @classmethod
    def caps(cls, mode: Mode) -> BufferCaps:
        return BufferCaps(
            layout=Layout.ROWS,
            trainable=False,
            ordered=True,
            wire_dtypes=FLOAT32_SUM_DTYPES,
            batches_in_flight=cls.num_buffers,
            batches_on_request=True,
            has_receive_hook=True,
            is_static=True,
            has_slot_budget=False,
            device_types=frozenset({"cuda"}),
        )

    @classmethod
    def lacks(cls, mode: Mode, spec: BufferSpec, world_size: int) -> tuple[str, ...]:
        reasons = []
        if world_size == 1:
            reasons.append("writes to peers, and a single rank has none")
        if spec.combine_format.dtype.is_quantized:
            reasons.append(f"combine carries unquantised rows, not {spec.combine_format}")
        if spec.dispatch_format.dtype is WireDtype.INT8 and spec.dispatch_format.scale_block:
            reasons.append(f"INT8 rows have one scale, not {spec.dispatch_format}")
        return tuple(reasons)

    @classmethod
    def region_bytes(cls, spec: BufferSpec, world_size: int) -> tuple[Region, ...]:
        layout = BlockLayout(spec, world_size, cls.num_buffers_of(spec))
        num_slots = cls._num_slots_of(spec, layout.num_rows)
        index = index_bytes(spec, num_rows=layout.num_rows, num_slots=num_slots, num_members=0)
        words = sum(layout.regions[name] for name in layout.regions if name not in _ROW_REGIONS)
        sizes = {
            "signals and metadata": layout.num_buffers * words,
            **{name: layout.num_buffers * layout.regions[name] for name in _ROW_REGIONS},
            "slot index": layout.num_buffers * (index + layout.num_rows),
        }
        return (
            *(Region(name=name, max_bytes=size) for name, size in sizes.items()),
            *cls._handed_regions(spec, layout),
        )

    @classmethod
    def _num_slots_of(cls, spec: BufferSpec, num_rows: int) -> int:
        """C: any routing fits."""
        return max_slots_of(spec, num_rows)

    @classmethod
    def _handed_regions(cls, spec: BufferSpec, layout: BlockLayout) -> tuple[Region, ...]:
        """What is made of the received rows."""
        packed = slot_regions(
            spec, row_bytes=layout.data_bytes + layout.scale_bytes, max_rows=layout.num_rows
        )
        return tuple(Region(name=each.name, max_bytes=each.max_bytes) for each in packed)

    @classmethod
    def wire_bytes(
        cls, spec: BufferSpec, call: CallShape, *, backward: bool = False
    ) -> BufferTraffic:
        """As Buffer.wire_bytes(); signals are not counted."""
        layout, num_others = (
            BlockLayout(spec, call.world_size, cls.num_buffers_of(spec)),
            call.world_size - 1,
        )
        num_tokens = call.tokens_of_rank[call.rank]
        return BufferTraffic(
            dispatch_bytes=call.rows_sent * _row_bytes(spec),
            combine_bytes=call.rows_received * spec.combine_format.data_bytes(spec.hidden_size),
            control_bytes=num_others * (num_tokens * layout.metadata_bytes + _call_bytes(spec)),
        )

    def __init__(self, collectives: Collectives, spec: BufferSpec) -> None:
        super().__init__(collectives, spec)
        self._layout = BlockLayout(spec, self._world_size, self.num_buffers_of(spec))
        self._receive_buffers: list[ReceiveBuffer] = []
        self._num_batches = 0
        # The batch in the first receive buffer: a later one after exclude_ranks().
        self._first_batch = 0

    def prepare(self) -> None:
        """Map the blocks of all ranks, and launch each kernel once where launching is slow.

        Collective: yes.   Host sync: yes.
        Raises:
            BackendUnavailable: some rank has not enough memory or cannot map it, or this is a CPU
                rank whose kernels are not interpreted.
        """
        memory = self._open_memory(self._layout.num_bytes)
        device = memory.block.device
        self._counters = torch.zeros(4, dtype=torch.int64, device=device)
        table = [
            [base + self._layout.buffer_offset(buffer_index) for base in memory.addresses]
            for buffer_index in range(self._layout.num_buffers)
        ]
        aborts = list(memory.addresses)
        self._table = torch.tensor([*table, aborts], dtype=torch.int64, device=device)
        self._receive_buffers = [
            self._make_receive_buffer(buffer_index, memory)
            for buffer_index in range(self._layout.num_buffers)
        ]
        self._no_rows = torch.zeros(
            1, self._spec.hidden_size, dtype=self._combine_dtype, device=device
        )
        if device.type == "cuda":
            self._warm_up()

    def dispatch(self, call: DispatchCall) -> Dispatched:
        return self.dispatch_async(call).wait()

    def dispatch_async(self, call: DispatchCall) -> Pending[Dispatched]:
        from epcomm.kernels.nvlink.ll_dispatch_recv import release_buffer
        from epcomm.kernels.nvlink.ll_dispatch_send import send_dispatch

        assert len(call.hidden_states) <= self._layout.max_tokens, "the dispatcher has checked T"
        self._begin_call()
        batch = self._num_batches
        receive_buffer = self._receive_buffer_of(batch)
        if receive_buffer.unfinished is not None:
            receive_buffer.unfinished.run()
        if receive_buffer.is_open:
            release_buffer(receive_buffer.exchange)
        self._num_batches += 1
        receive_buffer.batch, receive_buffer.is_open, receive_buffer.unfinished = batch, True, None
        self._faults.note_own(call.error)
        wire, hidden_states = self._spec.dispatch_format, call.hidden_states
        if not wire.dtype.is_quantized:
            hidden_states = hidden_states.to(wire.dtype.torch_dtype)
        if hidden_states.stride(-1) != 1:
            hidden_states = hidden_states.contiguous()
        send_dispatch(
            receive_buffer.exchange,
            hidden_states,
            call.topk_ids.contiguous(),
            call.topk_weights.contiguous(),
            receive_buffer.is_sent,
            status=pack_status(FaultCode.of(call.error), call.flags),
            kind=kind_of(wire),
            scale_block=wire.scale_block or self._spec.hidden_size,
            profile=profile_of(wire, call).value,
        )
        return Pending(lambda: self._receive(receive_buffer, batch, call))

    def combine(
        self,
        rows: Tensor,
        exchange_plan: ExchangePlan,
        *,
        rows_per: RowsPer,
        slot_weights: Tensor | None = None,
        row_scalars: Tensor | None = None,
    ) -> Combined:
        assert row_scalars is None, "without gradients there are none"
        return self.combine_async(
            rows, exchange_plan, rows_per=rows_per, slot_weights=slot_weights
        ).wait()

    def combine_async(
        self,
        rows: Tensor,
        exchange_plan: ExchangePlan,
        *,
        rows_per: RowsPer,
        slot_weights: Tensor | None = None,
    ) -> Pending[Combined]:
        assert isinstance(exchange_plan, NVLinkLowLatencyExchangePlan), (
            "an exchange plan of this buffer"
        )
        self._begin_call()
        receive_buffer = self._receive_buffer_of(exchange_plan.batch)
        self._check_batch(receive_buffer, exchange_plan.batch)
        rows = rows.to(self._combine_dtype)
        return self._send_sums(
            receive_buffer,
            rows if rows.stride(-1) == 1 else rows.contiguous(),
            slot_weights,
            per_row=rows_per is RowsPer.ROW,
            num_tokens=exchange_plan.num_tokens,
        )

    def refuse_combine(self, error: EPError) -> None:
        """As Buffer.refuse_combine(), of the oldest batch that awaits its combine.

        Which batch the other ranks combine is not known here; if it is another, they wait in vain.
        Raises:
            error: no batch awaits its combine.
        """
        self._refuse(error, lambda receive_buffer: receive_buffer.is_open)

    def refuse_combine_of(self, exchange_plan: ExchangePlan, error: EPError) -> None:
        """As Buffer.refuse_combine_of().

        Raises:
            error: the batch was combined or ended.
        """
        assert isinstance(exchange_plan, NVLinkLowLatencyExchangePlan), (
            "an exchange plan of this buffer"
        )
        self._refuse(
            error,
            lambda receive_buffer: (
                receive_buffer.is_open and receive_buffer.batch == exchange_plan.batch
            ),
        )

    def _refuse(self, error: EPError, is_meant: Callable[[ReceiveBuffer], bool]) -> None:
        """Send only the fault, in the combine of the oldest batch that may be meant."""
        self._begin_call()
        meant = [
            receive_buffer for receive_buffer in self._receive_buffers if is_meant(receive_buffer)
        ]
        if not meant:
            raise error
        self._faults.note_own(error)
        self._send_sums(
            min(meant, key=lambda receive_buffer: receive_buffer.batch),
            self._no_rows,
            None,
            per_row=True,
            num_tokens=0,
            code=FaultCode.of(error, in_combine=True),
        ).wait()

    def cached_dispatch(self, hidden_states: Tensor, exchange_plan: ExchangePlan) -> Tensor:
        raise NotImplementedError("low latency has no backward (caps.trainable)")

    def received_rows(self) -> tuple[WireTensor, ...]:
        """Return [W * M, H] of each receive buffer, views of memory that peers write. Local."""
        return tuple(receive_buffer.arrived for receive_buffer in self._receive_buffers)

    def check(self) -> None:
        self._check_open()
        self._synchronize()
        self._check_report()
        self._faults.check(self._num_index_slots)

    def traffic(self) -> BufferTraffic:
        """Bytes sent to other ranks so far.   Host sync: yes."""
        rows, records, headers, sums = self._counters.tolist()
        return BufferTraffic(
            dispatch_bytes=rows * _row_bytes(self._spec),
            combine_bytes=sums * self._spec.combine_format.data_bytes(self._spec.hidden_size),
            control_bytes=records * self._layout.metadata_bytes + headers * _call_bytes(self._spec),
        )

    def _receive_buffer_of(self, batch: int) -> ReceiveBuffer:
        return self._receive_buffers[(batch - self._first_batch) % self._layout.num_buffers]

    def _start_anew(self) -> None:
        assert self._memory is not None, "exclude_ranks() has looked"
        block, layout = self._memory.block, self._layout
        # the abort flag.
        block[: layout.buffer_offset(0)].zero_()
        for number, receive_buffer in enumerate(self._receive_buffers):
            begin = layout.buffer_offset(number)
            for name in ("arrived_dispatch", "arrived_combine"):
                at = begin + layout.offsets[name]
                block[at : at + layout.regions[name]].zero_()
            receive_buffer.exchange.state.copy_(first_state(block.device))
            receive_buffer.is_open, receive_buffer.unfinished = False, None
        # Ranks may have come to different numbers, and exchange plans of old batches stay refused.
        self._first_batch = self._num_batches

    def _release(self) -> None:
        super()._release()
        self._receive_buffers = []

    def _receive(self, receive_buffer: ReceiveBuffer, batch: int, call: DispatchCall) -> Dispatched:
        from epcomm.kernels.nvlink.ll_dispatch_recv import receive_dispatch

        self._check_open()
        self._check_batch(receive_buffer, batch)
        self._follow()
        receive_dispatch(
            receive_buffer.exchange,
            receive_buffer.row_of_slot,
            receive_buffer.slots_of_row,
            receive_buffer.slot_weights,
            receive_buffer.index.num_tokens_per_expert,
            receive_buffer.index.first_slot,
            expert_alignment=self._spec.expert_alignment,
            expert_capacity=self._expert_capacity,
        )
        self._hand_out(receive_buffer)
        exchange_plan = NVLinkLowLatencyExchangePlan(
            num_tokens=call.hidden_states.shape[0],
            num_rows=self._num_handed_rows,
            index=receive_buffer.index,
            batch=batch,
        )
        return Dispatched(
            rows=receive_buffer.rows,
            index=receive_buffer.index,
            slot_weights=receive_buffer.slot_weights,
            exchange_plan=exchange_plan,
            any_flags=assume_all_need_grad(call.flags),
        )

    def _send_sums(
        self,
        receive_buffer: ReceiveBuffer,
        rows: Tensor,
        slot_weights: Tensor | None,
        *,
        per_row: bool,
        num_tokens: int,
        code: FaultCode = FaultCode.NONE,
    ) -> Pending[Combined]:
        from epcomm.kernels.nvlink import ll_combine

        # Not when it is received: its kernel does not wait for those behind this sender, whose
        # inputs, freed by then, could be the same memory.
        y = rows.new_empty(num_tokens, self._spec.hidden_size)
        ll_combine.send_combine(
            receive_buffer.exchange,
            rows,
            None if slot_weights is None else slot_weights.contiguous(),
            receive_buffer.slots_of_row,
            per_row=per_row,
            status=int(code),
        )
        receive_buffer.is_open = False
        sent_on = torch.cuda.current_stream(y.device) if y.is_cuda else None

        def receive() -> Combined:
            if sent_on is not None and sent_on != (stream := torch.cuda.current_stream(y.device)):
                y.record_stream(stream)
            self._follow()
            ll_combine.receive_combine(receive_buffer.exchange, y, receive_buffer.is_sent)
            return Combined(y=y, scalars=None)

        unfinished = DeferredStep(receive)
        receive_buffer.unfinished = unfinished

        def wait() -> Combined:
            combined = unfinished.run()
            if receive_buffer.unfinished is unfinished:
                # The caller owns y: a receive buffer that waits for its turn must not keep it.
                receive_buffer.unfinished = None
            return combined

        return Pending(wait)

    def _make_receive_buffer(self, number: int, memory: SymmetricMemory) -> ReceiveBuffer:
        from epcomm.kernels.nvlink.common.exchange import ExchangeDims, PeerExchange

        layout, spec, device = self._layout, self._spec, memory.block.device
        num_rows, num_local = layout.num_rows, spec.num_local_experts

        def integers(*shape: int) -> Tensor:
            return torch.full(shape, -1, dtype=torch.int32, device=device)

        exchange = PeerExchange(
            buffer_index=number,
            num_buffers=layout.num_buffers,
            rank=self._rank,
            num_programs=self._num_programs,
            max_polls=self._max_polls,
            buffer_address=memory.addresses[self._rank] + layout.buffer_offset(number),
            abort_address=memory.addresses[self._rank],
            dims=ExchangeDims(
                world_size=self._world_size,
                max_tokens=layout.max_tokens,
                top_k=spec.top_k,
                num_local_experts=num_local,
            ),
            offsets=layout.offsets,
            metadata_words=layout.metadata_words,
            data_bytes=layout.data_bytes,
            scale_bytes=layout.scale_bytes,
            return_bytes=layout.return_bytes,
            table=self._table,
            state=first_state(device),
            counters=self._counters,
            excluded=self._excluded,
            faults=self._faults.entries,
            report=self._report,
        )
        index = SlotIndex(
            row_of_slot=integers(self._num_index_slots),
            slots_of_row=integers(num_rows, spec.top_k),
            num_tokens_per_expert=integers(num_local),
            first_slot=integers(num_local + 1),
            host_num_tokens_per_expert=None,
            expert_alignment=spec.expert_alignment,
        )
        handed = self._handed_index(index)
        arrived = received_rows(layout, memory.block, number)
        assert index.slots_of_row is not None, "made above"
        return ReceiveBuffer(
            exchange=exchange,
            arrived=arrived,
            rows=self._handed_rows(arrived),
            row_of_slot=handed.row_of_slot,
            slots_of_row=index.slots_of_row,
            index=handed,
            slot_weights=torch.zeros(self._num_index_slots, device=device),
            is_sent=torch.zeros(
                layout.max_tokens, self._world_size, dtype=torch.uint8, device=device
            ),
        )

    @property
    def _expert_capacity(self) -> int:
        """Slots of each expert, used or not; 0: as many as it has."""
        return 0

    @property
    def _num_handed_rows(self) -> int:
        """Rows that are handed out, whatever comes."""
        return self._layout.num_rows

    def _handed_index(self, index: SlotIndex) -> SlotIndex:
        """The index as it is handed out."""
        return index

    def _handed_rows(self, arrived: WireTensor) -> WireTensor:
        """The rows as they are handed out: those that peers write."""
        return arrived

    def _hand_out(self, receive_buffer: ReceiveBuffer) -> None:
        """Bring what has arrived to where it is handed out.   Local.   Host sync: none."""

    def _warm_up(self) -> None:
        """Run a batch without tokens through each receive buffer: kernels are compiled and loaded.

        A barrier follows each step, for compiling may take one rank longer than a wait.
        """
        spec, device = self._spec, self._no_rows.device
        call = DispatchCall(
            hidden_states=self._no_rows[:0],
            topk_ids=torch.empty(0, spec.top_k, dtype=torch.int64, device=device),
            topk_weights=torch.empty(0, spec.top_k, device=device),
            flags=BatchFlags.NONE,
        )
        for _ in range(self._layout.num_buffers):
            sent = self.dispatch_async(call)
            self._host_barrier()
            out = sent.wait()
            self._host_barrier()
            # No row has a slot, so one is as good as C of them.
            combining = self.combine_async(
                self._no_rows,
                out.exchange_plan,
                rows_per=RowsPer.SLOT,
                slot_weights=out.slot_weights,
            )
            self._host_barrier()
            combining.wait()
            self._host_barrier()

    def _check_batch(self, receive_buffer: ReceiveBuffer, batch: int) -> None:
        if receive_buffer.batch != batch or not receive_buffer.is_open:
            num_buffers = self._layout.num_buffers
            raise HandleError(
                f"combine: batch {batch} of {self.name} was combined, or ended by dispatch "
                f"{batch + num_buffers}, for {num_buffers} may be in flight (rank {self._rank} of "
                f"{self._world_size}); dispatch again, or set EPConfig.batches_in_flight"
            )

    @property
    def _num_programs(self) -> int:
        """P: at least one for each rank's header, and no more than rows that a rank may reduce."""
        if self._device.type != "cuda":
            return max(self._world_size, _INTERPRETED_PROGRAMS)
        return max(self._world_size, min(self.max_programs, self._layout.num_rows))

    @property
    def _num_index_slots(self) -> int:
        return self._num_slots_of(self._spec, self._layout.num_rows)

    @property
    def _combine_dtype(self) -> torch.dtype:
        return self._spec.combine_format.dtype.torch_dtype


_ROW_REGIONS = ("data", "scales", "returned")


def _row_bytes(spec: BufferSpec) -> int:
    """Return the bytes of one row in dispatch, without the gaps between rows."""
    wire = spec.dispatch_format
    return wire.data_bytes(spec.hidden_size) + wire.scale_bytes(spec.hidden_size)


def _call_bytes(spec: BufferSpec) -> int:
    """What a dispatch tells each rank besides its tokens: a header and counts."""
    return HEADER_BYTES + 4 * spec.num_local_experts
