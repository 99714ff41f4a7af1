"""Normal mode between the GPUs of one host: one copy of a token to each rank of its experts.

Rows are used where peers have stored them, through an expert-major index; with gradients they are
copied once into memory of their own. Signals, memory order and reuse:
epcomm/kernels/nvlink/normal_dispatch_send.py, normal_dispatch_recv.py and normal_combine.py. Every
operation stands alone: a dispatch needs no combine, a combine no dispatch. Here is what
normal_exact.py and normal_static.py share.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from epcomm.buffers.base import Combined, DispatchCall
from epcomm.buffers.faults import overwritten_error
from epcomm.buffers.nvlink.normal_memory import (
    as_words,
    exchange_of,
    forget_rows,
    received_data,
    received_rows,
)
from epcomm.buffers.nvlink.normal_plans import ExchangePlanMemory, NVLinkNormalExchangePlan
from epcomm.buffers.nvlink.normal_sizes import FIRST_TOKENS, NVLinkNormalFacts, row_bytes
from epcomm.buffers.traffic import BufferTraffic
from epcomm.collectives.base import Collectives
from epcomm.errors import EPError
from epcomm.protocol import BatchFlags, FaultCode, pack_status
from epcomm.records import ExchangePlan
from epcomm.spec import BufferSpec
from epcomm.types import RowsPer, WireFormat, WireTensor

if TYPE_CHECKING:
    from epcomm.kernels.nvlink.normal_exchange import Sends

# Enough for programs to wait for one another; an interpreter gains nothing by more.
_INTERPRETED_PROGRAMS = 3


class NVLinkNormal(NVLinkNormalFacts):
    """What exact and static sizes share: all but dispatch."""

    def __init__(self, collectives: Collectives, spec: BufferSpec) -> None:
        super().__init__(collectives, spec)
        self._num_dispatches = 0
        # Those that came before exclude_ranks().
        self._num_earlier = 0
        # Ranks that exclude_ranks() has excluded.
        self._excluded_ranks: tuple[int, ...] = ()
        self._plan_memory = ExchangePlanMemory(
            spec=spec, world_size=self._world_size, device=self._device
        )

    def prepare(self) -> None:
        """Map the blocks of all ranks.

        Collective: yes.   Host sync: yes.
        Raises:
            BackendUnavailable: some rank has not enough memory or cannot map it, or this is a CPU
                rank whose kernels are not interpreted.
        """
        # Kept when the blocks grow.
        self._counters = torch.zeros(5, dtype=torch.int64, device=self._device)
        self._open(self._spec.max_tokens_per_rank or FIRST_TOKENS)
        if self._device.type == "cuda":
            self._warm_up()

    def cached_dispatch(self, hidden_states: Tensor, exchange_plan: ExchangePlan) -> Tensor:
        """As in Buffer; under no_grad rows live as long as those of a dispatch."""
        from epcomm.kernels.nvlink.normal_dispatch_copy_out import collect_rows
        from epcomm.kernels.nvlink.normal_dispatch_send import push_rows

        assert isinstance(exchange_plan, NVLinkNormalExchangePlan), (
            "an exchange plan of this buffer"
        )
        self._begin_call()
        buffer_index = self._next_buffer_index()
        words = as_words(hidden_states)
        push_rows(
            self._exchange, words, None, exchange_plan.sends, buffer_index=buffer_index, topk=None
        )
        if not exchange_plan.owns_rows and exchange_plan.capacity_tokens == self._layout.max_tokens:
            collect_rows(self._exchange, exchange_plan.arrivals, buffer_index=buffer_index)
            assert self._memory is not None, "the call has been checked"
            block = self._memory.block
            return received_data(self._layout, block, buffer_index, hidden_states.dtype)
        return self._collected(exchange_plan, buffer_index, "data", hidden_states)

    def combine(
        self,
        rows: Tensor,
        exchange_plan: ExchangePlan,
        *,
        rows_per: RowsPer,
        slot_weights: Tensor | None = None,
        row_scalars: Tensor | None = None,
    ) -> Combined:
        assert isinstance(exchange_plan, NVLinkNormalExchangePlan), (
            "an exchange plan of this buffer"
        )
        if row_scalars is None:
            self._check_rows(exchange_plan)
            self._compare_combine()
        self._begin_call()
        wire = self._spec.combine_format if row_scalars is None else self._spec.backward_format
        rows = rows.to(wire.dtype.torch_dtype)
        return self._combine(
            rows if rows.stride(-1) == 1 else rows.contiguous(),
            exchange_plan,
            slot_weights if rows_per is RowsPer.SLOT else None,
            row_scalars,
            per_row=rows_per is RowsPer.ROW,
        )

    def refuse_combine(self, error: EPError) -> None:
        """As Buffer.refuse_combine(); unless ranks compare their calls, y is NaN on the others."""
        self._compare_combine(error)
        self._begin_call()
        self._faults.note_own(error)
        exchange_plan = self._plan_memory.empty_exchange_plan()
        rows = torch.empty(
            0,
            self._spec.hidden_size,
            dtype=self._spec.combine_format.dtype.torch_dtype,
            device=self._device,
        )
        code = FaultCode.of(error, in_combine=True)
        self._combine(rows, exchange_plan, None, None, per_row=True, code=code)

    def check(self) -> None:
        self._check_open()
        self._synchronize()
        self._check_report()
        self._faults.check(self._max_slots_of(self._spec, self._layout.num_rows))

    def traffic(self) -> BufferTraffic:
        """Bytes sent to other ranks so far.   Host sync: yes."""
        headers, rows, old_rows, sums, scaled_sums = self._counters.tolist()
        out, combine_bytes = row_bytes(self._spec, backward=False)
        backward_dispatch_bytes, backward_combine_bytes = row_bytes(self._spec, backward=True)
        return BufferTraffic(
            dispatch_bytes=rows * out + old_rows * backward_dispatch_bytes,
            combine_bytes=sums * combine_bytes + scaled_sums * backward_combine_bytes,
            control_bytes=rows * self._layout.metadata_bytes + headers * self._layout.header_bytes,
        )

    def received_rows(self) -> tuple[WireTensor, ...]:
        """Return [W * M, H] of each receive buffer, views of memory that peers write. Local."""
        wire = self._spec.dispatch_format
        return tuple(
            self._received(buffer_index, wire) for buffer_index in range(self._layout.num_buffers)
        )

    def _start_anew(self) -> None:
        assert self._memory is not None, "exclude_ranks() has looked"
        block, layout, exchange = self._memory.block, self._layout, self._exchange
        # All signals: they lie before the returned sums.
        block[: layout.offsets["returned"]].zero_()
        for words in (exchange.state, exchange.counted, exchange.faults):
            words.zero_()
        # Ranks may have come to different numbers.
        self._num_earlier += self._num_dispatches
        self._num_dispatches = 0
        self._excluded_ranks = tuple(
            rank for rank, word in enumerate(self._excluded.tolist()) if word
        )
        for buffer_index in range(layout.num_buffers):
            for rank in self._excluded_ranks:
                # Rows along old exchange plans are used where they lie.
                forget_rows(layout, block, buffer_index, rank)

    @abstractmethod
    def _compare_combine(self, error: EPError | None = None) -> None:
        """Where the specification asks for it, raise on every rank if any refuses a combine."""

    def _push(
        self, call: DispatchCall, sends: Sends, buffer_index: int, totals: Tensor | None
    ) -> None:
        """Send the tokens, or none if there is no capacity for them."""
        from epcomm.kernels.nvlink.normal_dispatch_send import push_rows

        wire = call.wire_tensor(self._spec.dispatch_format)
        num_tokens = wire.data.shape[0]
        fits = num_tokens <= self._layout.max_tokens
        data, scales = as_words(wire.data), wire.scales
        if scales is not None:
            scales = scales.view(torch.uint8) if scales.itemsize == 1 else scales
            scales = scales if scales.stride(-1) == 1 else scales.contiguous()
        push_rows(
            self._exchange,
            data if fits else data[:0],
            scales if fits or scales is None else scales[:0],
            sends,
            buffer_index=buffer_index,
            topk=(call.topk_ids.contiguous(), call.topk_weights.contiguous()),
            status=pack_status(FaultCode.of(call.error), call.flags),
            wanted_tokens=num_tokens,
            totals=totals,
        )

    def _index(
        self,
        exchange_plan: NVLinkNormalExchangePlan,
        slot_weights: Tensor,
        buffer_index: int,
        *,
        is_compact: bool,
        has_budget: bool,
    ) -> WireTensor:
        """Wait for the rows, index them, and return them, copied if the exchange plan owns them."""
        from epcomm.kernels.nvlink.normal_dispatch_recv import index_rows

        index_rows(
            self._exchange,
            exchange_plan.index,
            slot_weights,
            exchange_plan.arrivals,
            buffer_index=buffer_index,
            is_compact=is_compact,
            has_budget=has_budget,
        )
        rows = self._received(buffer_index, self._spec.dispatch_format)
        if not exchange_plan.owns_rows:
            return rows
        data, scales = self._collected(exchange_plan, buffer_index, "data", rows.data), rows.scales
        if scales is not None:
            scales = self._collected(exchange_plan, buffer_index, "scales", scales)
        return WireTensor(data=data, format=rows.format, scales=scales)

    def _collected(
        self, exchange_plan: NVLinkNormalExchangePlan, buffer_index: int, region: str, like: Tensor
    ) -> Tensor:
        """[R, columns] of memory of their own: a region of the rows, once all are there."""
        from epcomm.kernels.nvlink.normal_dispatch_copy_out import collect_rows

        out, layout = like.new_empty(exchange_plan.num_rows, like.shape[1]), self._layout
        collect_rows(
            self._exchange,
            exchange_plan.arrivals,
            buffer_index=buffer_index,
            region=region,
            row_bytes=layout.data_bytes if region == "data" else layout.scale_bytes,
            out=as_words(out),
        )
        return out

    def _combine(
        self,
        rows: Tensor,
        exchange_plan: NVLinkNormalExchangePlan,
        slot_weights: Tensor | None,
        row_scalars: Tensor | None,
        *,
        per_row: bool,
        code: FaultCode = FaultCode.NONE,
    ) -> Combined:
        from epcomm.kernels.nvlink.normal_combine import combine_rows

        y = rows.new_empty(exchange_plan.num_tokens, self._spec.hidden_size)
        scalars = None
        if row_scalars is not None:
            scalars = row_scalars.new_empty(exchange_plan.num_tokens, self._spec.top_k)
            row_scalars = row_scalars.contiguous()
        combine_rows(
            self._exchange,
            rows,
            exchange_plan.sends,
            exchange_plan.arrivals,
            None if per_row else exchange_plan.index.slots_of_row,
            y,
            slot_weights=None if slot_weights is None else slot_weights.contiguous(),
            row_scalars=row_scalars,
            out_scalars=scalars,
            status=int(code),
        )
        return Combined(y=y, scalars=scalars)

    def _received(self, buffer_index: int, wire: WireFormat) -> WireTensor:
        assert self._memory is not None, "the call has been checked"
        return received_rows(self._layout, self._memory.block, buffer_index, wire)

    def _next_buffer_index(self) -> int:
        buffer_index = self._num_dispatches % self._layout.num_buffers
        self._num_dispatches += 1
        return buffer_index

    @property
    def _last_batch(self) -> int:
        """Return the number of the dispatch that took a receive buffer last."""
        return self._num_earlier + self._num_dispatches

    def _check_rows(self, exchange_plan: NVLinkNormalExchangePlan) -> None:
        """Refuse a batch whose receive buffer a later dispatch took; every rank counts alike."""
        num_buffers = self._layout.num_buffers
        if exchange_plan.owns_rows or self._last_batch - exchange_plan.batch < num_buffers:
            return
        where = f"rank {self._rank} of {self._world_size}"
        error = overwritten_error(self.name, exchange_plan.batch, num_buffers, where)
        # Ranks that run with gradients own their rows and go on.
        self.refuse_combine(error)
        raise error

    def _open(self, max_tokens: int) -> None:
        """Open memory for M tokens of each rank, with signals of 0."""
        layout = self._layout_for(self._spec, self._world_size, max_tokens)
        memory = self._open_memory(layout.num_bytes)
        # Not before: where memory cannot grow, that of the old layout stays in use.
        self._layout = layout
        self._exchange = exchange_of(
            self._layout,
            memory.addresses,
            self._rank,
            num_programs=self._num_programs,
            max_polls=self._max_polls,
            excluded=self._excluded,
            counters=self._counters,
            faults=self._faults.entries,
            report=self._report,
        )

    def _warm_up(self) -> None:
        """Batches without tokens: kernels are compiled and loaded before any rank waits for them.

        A barrier follows each launch, for compiling may take one rank longer than a wait.
        """
        spec = self._spec
        call = DispatchCall(
            hidden_states=torch.empty(
                0,
                spec.hidden_size,
                dtype=spec.backward_format.dtype.torch_dtype,
                device=self._device,
            ),
            topk_ids=torch.empty(0, spec.top_k, dtype=torch.int64, device=self._device),
            topk_weights=torch.empty(0, spec.top_k, device=self._device),
            flags=BatchFlags.NONE,
        )
        for flags in (BatchFlags.NONE, BatchFlags.GRAD_ENABLED):
            out = self.dispatch(replace(call, flags=flags))
            self._host_barrier()
            num_slots = 0 if out.index.row_of_slot is None else out.index.row_of_slot.shape[0]
            rows = call.hidden_states.new_zeros(num_slots, spec.hidden_size)
            self.combine(
                rows, out.exchange_plan, rows_per=RowsPer.SLOT, slot_weights=out.slot_weights
            )
            self._host_barrier()
            self.combine(rows, out.exchange_plan, rows_per=RowsPer.SLOT)
            self._host_barrier()
        backward = self.cached_dispatch(call.hidden_states, out.exchange_plan)
        self._host_barrier()
        scalars = torch.zeros(backward.shape[0], spec.top_k, device=self._device)
        self.combine(backward, out.exchange_plan, rows_per=RowsPer.ROW, row_scalars=scalars)
        self._host_barrier()

    @property
    def _num_programs(self) -> int:
        if self._device.type != "cuda":
            return _INTERPRETED_PROGRAMS
        return self._spec.num_sms or self.default_num_sms
