"""Normal mode between the GPUs of one host: one copy of a token to each rank of its experts.

Rows are used where peers have stored them, through an expert-major index; with gradients they are
copied once into separate memory. Signals, memory order and reuse: dispatch.cu and combine.cu in
epcomm/kernels/nvlink/normal. Operations are independent: a dispatch needs no combine, a combine no
dispatch.

Sizes are exact, and the host reads counts while rows are in flight; or there is a budget of slots,
and the host reads nothing: for graphs, and where it must not wait.
"""

import logging
from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor

from epcomm.buffers.base import AddsBias, Dispatched, ReturnsRowTopk, RowTopkDispatched
from epcomm.buffers.nvlink.base import NVLinkHost
from epcomm.buffers.nvlink.memory import raise_together, received_rows, region_rows
from epcomm.buffers.nvlink.normal_counts import NormalCounts, Totals
from epcomm.buffers.nvlink.sizes import (
    group_reasons,
    normal_layout,
    normal_regions,
    sum_bytes,
    wire_row_bytes,
)
from epcomm.buffers.row_layout import wire_tensor_of
from epcomm.buffers.sizes import CallShape, Region, max_slots_of, most_slots_of
from epcomm.buffers.traffic import BufferTraffic
from epcomm.calls.call import DispatchCall, RowTopkCall
from epcomm.calls.faults import assume_all_need_grad, overwritten_error
from epcomm.calls.header import ANY_BATCH, CallKind
from epcomm.calls.order import Calls
from epcomm.config import Mode
from epcomm.errors import CapacityError, EPError, EPTimeout, describe_ranks
from epcomm.kernels.cuda_jit import nvrtc_is_installed
from epcomm.kernels.nvlink.common.layout import NormalLayout
from epcomm.kernels.nvlink.common.plan_parts import IndexSizes, NVLinkNormalExchangePlan, PlanBlock
from epcomm.kernels.nvlink.normal import program
from epcomm.kernels.nvlink.normal.collect import collect_rows
from epcomm.kernels.nvlink.normal.combine import combine_rows
from epcomm.kernels.nvlink.normal.dispatch import dispatch_rows, limits_of, prepare
from epcomm.kernels.nvlink.normal.exchange import NormalExchange
from epcomm.platforms.cuda import COPY_ENGINE, cuda_reasons, triton_reasons
from epcomm.platforms.machine import Machine
from epcomm.protocol import BatchFlags, FaultCode, fault_byte, pack_status
from epcomm.quantization import dequantizer_for, quantizer_for
from epcomm.records import ExchangePlan, Steps, to_the_end
from epcomm.spec import Availability, BufferCaps, BufferSpec
from epcomm.types import FLOAT32_SUM_DTYPES, GRADIENT_DTYPES, Layout, RowsPer, WireTensor, align_up

_logger = logging.getLogger(__name__)

# Blocks of CPU ranks in tests: enough to wait for one another.
_CPU_BLOCKS = 3
# A buffer without a limit grows to a multiple of this number of tokens.
_TOKEN_MULTIPLE = 128


class NVLinkBuffer(NVLinkHost[NormalLayout], AddsBias, ReturnsRowTopk):
    """Serves normal mode with exact sizes; subclasses have a budget."""

    modes: ClassVar[frozenset[Mode]] = frozenset({Mode.NORMAL})
    sums_groups: ClassVar[bool] = True
    is_static: ClassVar[bool] = False
    # With static sizes, all ranks together send at most M rows, numbered without gaps.
    has_row_budget: ClassVar[bool] = False
    # One block of each kernel runs on each SM; 32 reach nine tenths of the bandwidth of the wire.
    default_num_sms: ClassVar[int] = 32

    @classmethod
    def probe(cls, machine: Machine) -> Availability:
        nvrtc = [] if machine.has_library(nvrtc_is_installed) else ["NVRTC is not installed"]
        return Availability.judge(
            missing=[*triton_reasons(machine), *nvrtc],
            command="pip install --upgrade 'torch>=2.11' triton nvidia-cuda-nvrtc",
            absent=cuda_reasons(machine) or COPY_ENGINE.lacking(machine.capability(None)),
            needs=f"NVIDIA GPUs of one host that NVLink joins, of {COPY_ENGINE}",
        )

    @classmethod
    def caps(cls, mode: Mode) -> BufferCaps:
        return BufferCaps(
            layout=Layout.ROWS,
            trainable=True,
            ordered=True,
            max_top_k=program.LANES,
            wire_dtypes=FLOAT32_SUM_DTYPES,
            combine_dtypes=cls.combine_dtypes,
            backward_dtypes=GRADIENT_DTYPES,
            is_static=cls.is_static,
            batches_in_flight=cls.num_buffers,
            batches_on_request=True,
            reports_faults=True,
            device_types=frozenset({"cuda"}),
        )

    @classmethod
    def lacks(cls, mode: Mode, spec: BufferSpec, world_size: int) -> tuple[str, ...]:
        if spec.sums_at_source:
            why = "returns sums, but sum_groups with redundant_experts needs a row for each slot"
            return (f"{why}, as low latency returns",)
        return tuple(group_reasons(spec, world_size))

    @classmethod
    def layout_for(
        cls, spec: BufferSpec, world_size: int, max_tokens: int | None = None
    ) -> NormalLayout:
        """Return the layout of blocks for M tokens, or for those of the specification. Local."""
        max_tokens = max_tokens or spec.max_tokens_per_rank
        return normal_layout(spec, world_size, max_tokens, cls.num_buffers_of(spec))

    @classmethod
    def region_bytes(cls, spec: BufferSpec, world_size: int) -> tuple[Region, ...]:
        layout = cls.layout_for(spec, world_size)
        return normal_regions(spec, layout, cls._max_slots_of(spec, layout.num_rows))

    @classmethod
    def wire_bytes(
        cls, spec: BufferSpec, call: CallShape, *, backward: bool = False
    ) -> BufferTraffic:
        row_bytes = sum_bytes(spec, backward=backward)
        combine_bytes = call.sums_sent * row_bytes
        if backward:
            return BufferTraffic(
                dispatch_bytes=call.rows_sent * row_bytes,
                combine_bytes=combine_bytes + call.rows_received * _scalar_bytes(spec),
            )
        layout = cls.layout_for(spec, call.world_size)
        return BufferTraffic(
            dispatch_bytes=call.rows_sent * wire_row_bytes(spec),
            combine_bytes=combine_bytes,
            control_bytes=call.rows_sent * layout.metadata_bytes
            + (call.world_size - 1) * layout.header_bytes,
        )

    @classmethod
    def _max_slots_of(cls, spec: BufferSpec, num_rows: int) -> int:
        if not cls.is_static:
            # Memory of an index that a kernel writes before the host has read its size.
            return most_slots_of(spec, num_rows)
        return spec.max_recv_slots or max_slots_of(spec, num_rows)

    def __init__(self, calls: Calls, spec: BufferSpec) -> None:
        super().__init__(calls, spec, num_counters=8)
        # On CPU ranks an interpreter runs the kernels.
        self.begins_calls = self._is_cuda
        self._num_dispatches = 0
        # Memory for counts that no kernel writes any longer.
        self._spare_totals: Totals | None = None
        # The number of dispatches before exclude_ranks().
        self._num_earlier = 0
        self._sum_dtype = spec.hidden_format.dtype.torch_dtype
        # Codecs of gradients.
        self._quantize = quantizer_for(self._device)
        self._dequantize = dequantizer_for(self._device)
        # Ranks that exclude_ranks() has excluded.
        self._excluded_ranks: tuple[int, ...] = ()

    def prepare(self) -> None:
        self._open()
        if self._device.type == "cuda":
            self._warm_up()

    def dispatch(self, call: DispatchCall) -> Dispatched:
        return to_the_end(self.dispatch_steps(call))

    def dispatch_steps(self, call: DispatchCall) -> Steps[Dispatched]:
        self._begin_call()
        if self.is_static:
            assert call.num_tokens <= self._layout.max_tokens, "the dispatcher has checked T"
            self._faults.note_own(call.error)
            buffer_index = self._next_buffer_index()
            return self._receive(call, buffer_index, None, self._push(call, buffer_index, None))
        while True:
            buffer_index = self._next_buffer_index()
            totals, self._spare_totals = self._spare_totals, None
            if totals is None:
                totals = Totals(self._layout, self._device)
            else:
                totals.begin()
            # The memory is kept, because a kernel may still write it after this call has raised.
            self._totals = totals
            pushed = self._push(call, buffer_index, totals.entries)
            yield
            counts = self._read_counts(call)
            if counts.most_tokens <= self._layout.max_tokens:
                return self._receive(call, buffer_index, counts, pushed)
            self._grow(counts.most_tokens)

    def cached_dispatch(self, hidden_states: Tensor, exchange_plan: ExchangePlan) -> Tensor:
        """Send rows along a plan; under no_grad rows live as long as those of a dispatch."""
        assert isinstance(exchange_plan, NVLinkNormalExchangePlan), "it is of this buffer"
        self._begin_call()
        buffer_index, layout, spec = self._next_buffer_index(), self._layout, self._spec
        data, scales, gradients = hidden_states, None, spec.backward_format
        if gradients is not None:
            wire = self._quantize(hidden_states, gradients)
            data, scales = wire.data, wire.scales
        dispatch_rows(
            self._exchange,
            data,
            scales,
            exchange_plan,
            buffer_index=buffer_index,
            topk=None,
            num_sms=exchange_plan.num_sms,
        )
        is_here = not exchange_plan.owns_rows and exchange_plan.capacity_tokens == layout.max_tokens
        if gradients is not None:
            rows = received_rows(self._block, layout, buffer_index, gradients, spec.hidden_size)
            rows = rows if is_here else self._copied(rows, exchange_plan, buffer_index)
            return self._dequantize(rows, hidden_states.dtype)
        if is_here:
            rows = region_rows(self._block, layout, buffer_index, "data")
            return rows.view(hidden_states.dtype)[:, : spec.hidden_size]
        out = hidden_states.new_empty(exchange_plan.num_rows, hidden_states.shape[1])
        collect_rows(self._exchange, exchange_plan, buffer_index=buffer_index, out=out)
        return out

    def combine(
        self,
        rows: Tensor,
        exchange_plan: ExchangePlan | None,
        *,
        rows_per: RowsPer,
        slot_weights: Tensor | None = None,
        row_scalars: Tensor | None = None,
        error: EPError | None = None,
        bias: Tensor | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        if row_scalars is None:
            if error is None:
                self._check_rows(rows, exchange_plan)
            self._compare_combine(error)
        self._begin_call()
        if error is not None:
            # Only the code of the error is sent. Unless ranks compare their calls, y is NaN on the
            # others.
            self._faults.note_own(error)
            exchange_plan = self._empty_exchange_plan()
        assert isinstance(exchange_plan, NVLinkNormalExchangePlan), "it is of this buffer"
        scalars, sums = None, self._spec.combine_format
        if row_scalars is not None:
            sums = self._spec.backward_format
            scalars = row_scalars.new_empty(exchange_plan.num_tokens, self._spec.top_k)
            row_scalars = row_scalars.contiguous()
        if slot_weights is not None:
            slot_weights = slot_weights.contiguous() if rows_per is RowsPer.SLOT else None
        assert rows_per is RowsPer.SLOT or self._layout.groups == 1 or len(rows) == 0, (
            "with groups, one row of slots has several sums"
        )
        return combine_rows(
            self._exchange,
            rows if rows.dtype is self._sum_dtype else rows.to(self._sum_dtype),
            exchange_plan,
            is_per_row=rows_per is RowsPer.ROW,
            slot_weights=slot_weights,
            row_scalars=row_scalars,
            out_scalars=scalars,
            bias=bias,
            status=int(FaultCode.of(error, in_combine=True)),
            buffer_index=-1 if row_scalars is not None else self._index_of_rows(exchange_plan),
            num_sms=exchange_plan.num_sms,
            sums=sums,
        ), scalars

    def traffic(self) -> BufferTraffic:
        """Return the bytes sent to other ranks so far.   Host sync: yes."""
        headers, rows, cached_rows, sums, *others = self._counters.tolist()
        scaled, quantized_sums, scaled_quantized, quantized_gradients = others
        spec, scaled = self._spec, scaled + scaled_quantized
        row_bytes = sum_bytes(spec, backward=True)
        return BufferTraffic(
            dispatch_bytes=rows * wire_row_bytes(spec) + cached_rows * row_bytes,
            combine_bytes=sums * spec.hidden_format.data_bytes(spec.hidden_size)
            + quantized_sums * sum_bytes(spec)
            + (scaled + quantized_gradients) * row_bytes
            + scaled * _scalar_bytes(spec),
            control_bytes=rows * self._layout.metadata_bytes + headers * self._layout.header_bytes,
        )

    def _start_anew(self) -> None:
        block, layout, exchange = self._block, self._layout, self._exchange
        # Zero all signals, which are stored before the returned sums.
        block[: layout.offsets["returned"]].zero_()
        for tensor in (exchange.state, exchange.counted, exchange.peers.faults):
            tensor.zero_()
        # The ranks may have counted different numbers of dispatches.
        self._num_earlier += self._num_dispatches
        self._num_dispatches = 0
        self._excluded_ranks = self._living.dead()
        for buffer_index in range(layout.num_buffers):
            for name in ("data", "scales"):
                rows = region_rows(block, layout, buffer_index, name)
                for rank in self._excluded_ranks:
                    # Rows along old exchange plans are used without a copy.
                    rows[rank * layout.max_tokens : (rank + 1) * layout.max_tokens].zero_()

    def _compare_combine(self, error: EPError | None) -> None:
        """Raise on every rank if any refuses a combine, where the specification asks for it."""
        if self.is_static or self._excluded_ranks or not self._spec.compares_calls:
            # Hosts must not wait for dead ranks: y is NaN, and check() raises the error.
            return
        self._calls.announce(CallKind.COMBINE, ANY_BATCH, error=error)

    def _push(self, call: DispatchCall, buffer_index: int, totals: Tensor | None) -> PlanBlock:
        """Send the tokens, or none if there is no capacity for them; return where they went."""
        status = 0
        if call.error is not None or call.flags is not BatchFlags.NONE:
            status = pack_status(fault_byte(call.error), call.flags)
        wire = wire_tensor_of(call, self._spec.dispatch_format)
        data, scales = wire.data, wire.scales
        num_tokens = data.shape[0]
        if scales is not None:
            scales = scales.view(torch.uint8) if scales.itemsize == 1 else scales
            scales = scales if scales.stride(-1) == 1 else scales.contiguous()
        if num_tokens > self._layout.max_tokens:
            data, scales = data[:0], None if scales is None else scales[:0]
        block = PlanBlock.of(
            self._spec,
            self._world_size,
            self._device,
            num_tokens,
            self._most_sizes,
            has_budget=self.is_static,
            has_row_budget=self.has_row_budget,
            is_compact=self.has_row_budget or (not self.is_static and _owns_rows(call)),
            wants_row_topk=isinstance(call, RowTopkCall),
        )
        dispatch_rows(
            self._exchange,
            data,
            scales,
            None,
            buffer_index=buffer_index,
            topk=(call.topk_ids.contiguous(), call.topk_weights.contiguous()),
            received=block,
            status=status,
            wanted_tokens=num_tokens,
            totals=totals,
            num_sms=_num_sms_of(call),
        )
        return block

    def _read_counts(self, call: DispatchCall) -> NormalCounts:
        """Wait for the counts of all ranks.

        Raises:
            EPTimeout: some rank did not arrive.
            ShapeError, CapacityError, ConfigError: as check_headers().
        """
        timeout_s = 2 * self._collectives.kernel_timeout_s
        totals = self._totals.wait(self._report.check, timeout_s)
        if totals is None:
            raise EPTimeout(
                f"{self.name}: no counts within {timeout_s:g} s (rank {self._rank} of "
                f"{self._world_size}): earlier work on the stream did not end; close the group and "
                "make a new one"
            )
        self._spare_totals = self._totals
        return NormalCounts.of(
            totals,
            call,
            self._layout,
            self._collectives.names,
            self._excluded_ranks,
            self._spec.expert_alignment,
        )

    def _receive(
        self, call: DispatchCall, buffer_index: int, counts: NormalCounts | None, block: PlanBlock
    ) -> Dispatched:
        """Return the rows and their index; counts is None where there is a budget."""
        owns_rows = self.has_row_budget or _owns_rows(call)
        if counts is None:
            sizes = self._most_sizes
        else:
            sizes = counts.sizes
            if not owns_rows:
                sizes = replace(sizes, num_rows=self._layout.num_rows)
        topk_ids = None
        if self._layout.groups > 1:
            # The caller may overwrite its ids before combine reads them.
            topk_ids = call.topk_ids.clone(memory_format=torch.contiguous_format)
        exchange_plan = block.exchange_plan(
            sizes,
            owns_rows=owns_rows,
            capacity_tokens=self._layout.max_tokens,
            batch=self._last_batch,
            num_sms=_num_sms_of(call),
            topk_ids=topk_ids,
        )
        rows = self._rows[buffer_index]
        if owns_rows:
            rows = self._copied(rows, exchange_plan, buffer_index)
        out = Dispatched(
            rows=rows,
            index=exchange_plan.index,
            slot_weights=exchange_plan.slot_weights,
            exchange_plan=exchange_plan,
            any_flags=assume_all_need_grad(call.flags) if counts is None else counts.any_flags,
        )
        if block.row_topk is None:
            return out
        ids, weights = block.row_topk
        row_topk = ids[: sizes.num_rows], weights[: sizes.num_rows]
        return RowTopkDispatched(**vars(out), row_topk=row_topk)

    def _empty_exchange_plan(self) -> NVLinkNormalExchangePlan:
        """Return the plan of a dispatch in which nothing was sent, and nothing arrived."""
        sizes = IndexSizes(num_rows=0, num_slots=0, per_expert=None, is_dense=True)
        block = PlanBlock.of(
            self._spec, self._world_size, self._device, 0, sizes, has_budget=False, is_compact=True
        )
        block.memory.zero_()
        return block.exchange_plan(sizes, owns_rows=True)

    def _copied(
        self, rows: WireTensor, exchange_plan: NVLinkNormalExchangePlan, buffer_index: int
    ) -> WireTensor:
        """Copy rows and scales to new memory, [R, columns], after all have arrived."""
        num_rows, scales = exchange_plan.num_rows, rows.scales
        data = rows.data.new_empty(num_rows, self._spec.hidden_size)
        if scales is not None:
            scales = scales.new_empty(num_rows, scales.shape[1])
        collect_rows(
            self._exchange, exchange_plan, buffer_index=buffer_index, out=data, scales=scales
        )
        return WireTensor(data=data, format=rows.format, scales=scales)

    def _next_buffer_index(self) -> int:
        buffer_index = self._num_dispatches % self._layout.num_buffers
        self._num_dispatches += 1
        return buffer_index

    def _index_of_rows(self, exchange_plan: NVLinkNormalExchangePlan) -> int:
        """Return the receive buffer that holds the rows of a batch, -1 if other memory does."""
        number = exchange_plan.batch - self._num_earlier
        is_here = exchange_plan.capacity_tokens == self._layout.max_tokens and number > 0
        if exchange_plan.owns_rows or not is_here:
            return -1
        return (number - 1) % self._layout.num_buffers

    @property
    def _last_batch(self) -> int:
        """The number of the dispatch that took a receive buffer last."""
        return self._num_earlier + self._num_dispatches

    def _check_rows(self, rows: Tensor, exchange_plan: ExchangePlan | None) -> None:
        """Refuse a batch whose receive buffer a later dispatch took; every rank counts alike."""
        assert isinstance(exchange_plan, NVLinkNormalExchangePlan), "it is of this buffer"
        num_buffers = self._layout.num_buffers
        if exchange_plan.owns_rows or self._last_batch - exchange_plan.batch < num_buffers:
            return
        where = f"rank {self._rank} of {self._world_size}"
        error = overwritten_error(self.name, exchange_plan.batch, num_buffers, where)
        # Ranks that run with gradients own their rows and do not raise.
        self.combine(rows[:0], None, rows_per=RowsPer.ROW, error=error)
        raise error

    def _open(self, max_tokens: int | None = None) -> None:
        """Open memory for M tokens of each rank, with signals of 0."""
        # The spare memory for counts may have the wrong length for the new layout.
        self._spare_totals = None
        layout = self.layout_for(self._spec, self._world_size, max_tokens)
        self._load_kernels(layout)
        self._open_memory(layout)
        self._exchange = NormalExchange.of(self._blocks)
        self._rows = self.received_rows()
        num_rows = self._layout.max_tokens if self.has_row_budget else self._layout.num_rows
        # These sizes are used until the host knows the counts; with a budget it never does.
        self._most_sizes = IndexSizes(
            num_rows=num_rows,
            num_slots=self._max_slots_of(self._spec, num_rows),
            per_expert=None,
            is_dense=False,
        )

    def _load_kernels(self, layout: NormalLayout) -> None:
        """Compile the kernels of dispatch, in which ranks wait for one another.

        Collective: yes.   Host sync: yes.
        Raises:
            BackendUnavailable: some rank cannot run them; on all ranks.
        """
        reasons = [*program.reasons_against(self._device), *limits_of(layout)]
        if not reasons:
            prepare(layout, self._spec, self._device)
        raise_together(
            self._calls,
            "; ".join(reasons),
            failure=f"{self.name}: kernels of normal mode cannot run",
            remedy="use backend='collective'",
            phase=f"open {self.name}",
        )

    def _grow(self, num_tokens: int) -> None:
        """Grow the memory of every rank to num_tokens a rank; all ranks have read the same counts.

        Raises:
            CapacityError: some rank is excluded; on all remaining ranks.
        """
        if self._excluded_ranks:
            raise CapacityError(
                f"dispatch: a rank has T = {num_tokens} tokens, expected at most "
                f"{self._layout.max_tokens}, because memory cannot grow without "
                f"{describe_ranks(self._excluded_ranks)} (this is rank {self._rank} of "
                f"{self._world_size}); pass max_tokens_per_rank to EPConfig, or make a new EPGroup"
            )
        # No rank stores to the old blocks any longer; views of this rank keep them alive.
        self._host_barrier()
        wanted = max(num_tokens, 2 * self._layout.max_tokens)
        self._open(align_up(wanted, _TOKEN_MULTIPLE))
        # The dispatch that did not fit overwrote no rows, and begins again.
        self._num_dispatches -= 1
        _logger.debug("rank %d: nvlink has capacity for %d tokens now", self._rank, wanted)

    def _warm_up(self) -> None:
        """Run batches without tokens, so that kernels are loaded before any rank waits for them.

        A barrier follows each launch, for compiling may take one rank longer than a wait.
        """
        spec = self._spec
        call = self._empty_call(spec.hidden_format.dtype.torch_dtype)
        for flags in (BatchFlags.NONE, BatchFlags.GRAD_ENABLED):
            out = self.dispatch(replace(call, flags=flags))
            self._host_barrier()
            num_slots = 0 if out.index.row_of_slot is None else out.index.row_of_slot.shape[0]
            rows = call.unquantized.new_zeros(num_slots, spec.hidden_size)
            self.combine(
                rows, out.exchange_plan, rows_per=RowsPer.SLOT, slot_weights=out.slot_weights
            )
            self._host_barrier()
            self.combine(rows, out.exchange_plan, rows_per=RowsPer.SLOT)
            self._host_barrier()
        backward = self.cached_dispatch(call.unquantized, out.exchange_plan)
        self._host_barrier()
        scalars = torch.zeros(
            backward.shape[0], spec.top_k, dtype=torch.float32, device=self._device
        )
        self.combine(rows, out.exchange_plan, rows_per=RowsPer.SLOT, row_scalars=scalars)
        self._host_barrier()

    def _release(self) -> None:
        super()._release()
        self._rows = ()

    @property
    def _num_programs(self) -> int:
        if self._device.type != "cuda":
            return _CPU_BLOCKS
        sums = self._spec.combine_format or self._spec.hidden_format
        # Senders that quantise are bound by instructions. On an H100 8 bits take 330 us on 48 SMs
        # and 460 on 32; 4 bits 430 on 64 and 750 on 32.
        wanted = self.default_num_sms
        if sums.dtype.is_quantized:
            wanted = 64 if sums.dtype.has_row_scale else 48
        return self._spec.num_sms or wanted


def _scalar_bytes(spec: BufferSpec) -> int:
    """Return the bytes of the scalars that return with a gradient."""
    return torch.float32.itemsize * spec.top_k


def _num_sms_of(call: DispatchCall) -> int | None:
    return call.num_sms if isinstance(call, RowTopkCall) else None


def _owns_rows(call: DispatchCall) -> bool:
    # Operators of flags themselves take 2 us.
    return bool(int(call.flags) & int(BatchFlags.GRAD_ENABLED))


class NVLinkStaticBuffer(NVLinkBuffer):
    """Serves normal mode with a budget of slots."""

    is_static: ClassVar[bool] = True
