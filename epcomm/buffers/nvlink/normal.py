"""Normal mode between the GPUs of one host: one copy of a token to each rank of its experts.

Rows are used where peers have stored them, through an expert-major index; with gradients they are
copied once into memory of their own. Words, order and reuse:
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
from epcomm.buffers.nvlink.normal_plans import NVLinkNormalRoute, RouteMemory
from epcomm.buffers.nvlink.normal_sizes import FIRST_TOKENS, NVLinkNormalFacts, row_bytes
from epcomm.buffers.traffic import BufferTraffic
from epcomm.collectives.base import Collectives
from epcomm.errors import EPError
from epcomm.protocol import BatchFlags, FaultCode, pack_word
from epcomm.records import Route
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
        # Those that came before mask_ranks().
        self._num_earlier = 0
        # Ranks that are masked.
        self._dead: tuple[int, ...] = ()
        self._routes = RouteMemory(spec=spec, world_size=self._world_size, device=self._device)

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

    def redispatch(self, hidden_states: Tensor, route: Route) -> Tensor:
        """As Buffer.redispatch(); of a route made under no_grad, rows live as those of dispatch."""
        from epcomm.kernels.nvlink.normal_dispatch_copy_out import collect_rows
        from epcomm.kernels.nvlink.normal_dispatch_send import push_rows

        assert isinstance(route, NVLinkNormalRoute), "a route of this buffer"
        self._begin_call()
        slot = self._next_slot()
        words = as_words(hidden_states)
        push_rows(self._exchange, words, None, route.sends, slot=slot, topk=None)
        if not route.owns_rows and route.room_tokens == self._layout.max_tokens:
            collect_rows(self._exchange, route.arrivals, slot=slot)
            assert self._memory is not None, "the call has been checked"
            block = self._memory.block
            return received_data(self._layout, block, slot, hidden_states.dtype)
        return self._collected(route, slot, "data", hidden_states)

    def combine(
        self,
        rows: Tensor,
        route: Route,
        *,
        rows_per: RowsPer,
        slot_weights: Tensor | None = None,
        row_scalars: Tensor | None = None,
    ) -> Combined:
        assert isinstance(route, NVLinkNormalRoute), "a route of this buffer"
        if row_scalars is None:
            self._check_rows(route)
            self._compare_combine()
        self._begin_call()
        wire = self._spec.combine_format if row_scalars is None else self._spec.backward_format
        rows = rows.to(wire.dtype.torch_dtype)
        return self._combine(
            rows if rows.stride(-1) == 1 else rows.contiguous(),
            route,
            slot_weights if rows_per is RowsPer.SLOT else None,
            row_scalars,
            per_row=rows_per is RowsPer.ROW,
        )

    def refuse_combine(self, error: EPError) -> None:
        """As Buffer.refuse_combine(); unless ranks compare their calls, y is NaN on the others."""
        self._compare_combine(error)
        self._begin_call()
        self._faults.note_own(error)
        route = self._routes.empty_route()
        rows = torch.empty(
            0,
            self._spec.hidden_size,
            dtype=self._spec.combine_format.dtype.torch_dtype,
            device=self._device,
        )
        code = FaultCode.of(error, in_combine=True)
        self._combine(rows, route, None, None, per_row=True, code=code)

    def check(self) -> None:
        self._check_open()
        self._synchronize()
        self._check_report()
        self._faults.check(self._most_slots(self._spec, self._layout.num_rows))

    def traffic(self) -> BufferTraffic:
        """Bytes sent to other ranks so far.   Host sync: yes."""
        headers, rows, old_rows, sums, scaled_sums = self._counters.tolist()
        out, home = row_bytes(self._spec, backward=False)
        back_out, back_home = row_bytes(self._spec, backward=True)
        return BufferTraffic(
            dispatch_bytes=rows * out + old_rows * back_out,
            combine_bytes=sums * home + scaled_sums * back_home,
            control_bytes=rows * self._layout.record_bytes + headers * self._layout.header_bytes,
        )

    def received_rows(self) -> tuple[WireTensor, ...]:
        """[W * M, H] of each slot, views of memory that peers write. Local."""
        wire = self._spec.dispatch_format
        return tuple(self._received(slot, wire) for slot in range(self._layout.num_slots))

    def _start_anew(self) -> None:
        assert self._memory is not None, "mask_ranks() has looked"
        block, layout, exchange = self._memory.block, self._layout, self._exchange
        # All words, before the sums that came home.
        block[: layout.offsets["back"]].zero_()
        for words in (exchange.state, exchange.counted, exchange.faults):
            words.zero_()
        # Ranks may have come to different numbers.
        self._num_earlier += self._num_dispatches
        self._num_dispatches = 0
        self._dead = tuple(rank for rank, word in enumerate(self._masked.tolist()) if word)
        for slot in range(layout.num_slots):
            for rank in self._dead:
                # Rows along old routes are used where they lie.
                forget_rows(layout, block, slot, rank)

    @abstractmethod
    def _compare_combine(self, error: EPError | None = None) -> None:
        """Where the specification asks for it, raise on every rank if any refuses a combine."""

    def _push(self, call: DispatchCall, sends: Sends, slot: int, totals: Tensor | None) -> None:
        """Send the tokens, or none if there is no room for them."""
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
            slot=slot,
            topk=(call.topk_ids.contiguous(), call.topk_weights.contiguous()),
            announced=pack_word(FaultCode.of(call.error), call.flags),
            wanted_tokens=num_tokens,
            totals=totals,
        )

    def _index(
        self,
        route: NVLinkNormalRoute,
        slot_weights: Tensor,
        slot: int,
        *,
        is_compact: bool,
        has_budget: bool,
    ) -> WireTensor:
        """Wait for the rows, index them, and return them, copied if the route owns them."""
        from epcomm.kernels.nvlink.normal_dispatch_recv import index_rows

        index_rows(
            self._exchange,
            route.index,
            slot_weights,
            route.arrivals,
            slot=slot,
            is_compact=is_compact,
            has_budget=has_budget,
        )
        rows = self._received(slot, self._spec.dispatch_format)
        if not route.owns_rows:
            return rows
        data, scales = self._collected(route, slot, "data", rows.data), rows.scales
        if scales is not None:
            scales = self._collected(route, slot, "scales", scales)
        return WireTensor(data=data, format=rows.format, scales=scales)

    def _collected(self, route: NVLinkNormalRoute, slot: int, region: str, like: Tensor) -> Tensor:
        """[R, columns] of memory of their own: a region of the rows, once all are there."""
        from epcomm.kernels.nvlink.normal_dispatch_copy_out import collect_rows

        out, layout = like.new_empty(route.num_rows, like.shape[1]), self._layout
        collect_rows(
            self._exchange,
            route.arrivals,
            slot=slot,
            region=region,
            row_bytes=layout.data_bytes if region == "data" else layout.scale_bytes,
            out=as_words(out),
        )
        return out

    def _combine(
        self,
        rows: Tensor,
        route: NVLinkNormalRoute,
        slot_weights: Tensor | None,
        row_scalars: Tensor | None,
        *,
        per_row: bool,
        code: FaultCode = FaultCode.NONE,
    ) -> Combined:
        from epcomm.kernels.nvlink.normal_combine import combine_rows

        y = rows.new_empty(route.num_tokens, self._spec.hidden_size)
        scalars = None
        if row_scalars is not None:
            scalars = row_scalars.new_empty(route.num_tokens, self._spec.top_k)
            row_scalars = row_scalars.contiguous()
        combine_rows(
            self._exchange,
            rows,
            route.sends,
            route.arrivals,
            None if per_row else route.index.slots_of_row,
            y,
            slot_weights=None if slot_weights is None else slot_weights.contiguous(),
            row_scalars=row_scalars,
            out_scalars=scalars,
            announced=int(code),
        )
        return Combined(y=y, scalars=scalars)

    def _received(self, slot: int, wire: WireFormat) -> WireTensor:
        assert self._memory is not None, "the call has been checked"
        return received_rows(self._layout, self._memory.block, slot, wire)

    def _next_slot(self) -> int:
        slot = self._num_dispatches % self._layout.num_slots
        self._num_dispatches += 1
        return slot

    @property
    def _last_batch(self) -> int:
        """The number of the dispatch that took a slot last."""
        return self._num_earlier + self._num_dispatches

    def _check_rows(self, route: NVLinkNormalRoute) -> None:
        """Refuse a batch whose slot a later dispatch took; every rank counts alike."""
        num_slots = self._layout.num_slots
        if route.owns_rows or self._last_batch - route.batch < num_slots:
            return
        where = f"rank {self._rank} of {self._world_size}"
        error = overwritten_error(self.name, route.batch, num_slots, where)
        # Ranks that run with gradients own their rows and go on.
        self.refuse_combine(error)
        raise error

    def _open(self, max_tokens: int) -> None:
        """Blocks with room for M tokens of each rank, and words that begin anew."""
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
            masked=self._masked,
            counters=self._counters,
            faults=self._faults.words,
            report=self._report,
        )

    def _warm_up(self) -> None:
        """Batches without tokens: kernels are compiled and loaded before any rank waits for them.

        The ranks meet between launches, for compiling may take one of them longer than a wait.
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
            self._meet()
            num_slots = 0 if out.index.row_of_slot is None else out.index.row_of_slot.shape[0]
            rows = call.hidden_states.new_zeros(num_slots, spec.hidden_size)
            self.combine(rows, out.route, rows_per=RowsPer.SLOT, slot_weights=out.slot_weights)
            self._meet()
            self.combine(rows, out.route, rows_per=RowsPer.SLOT)
            self._meet()
        backward = self.redispatch(call.hidden_states, out.route)
        self._meet()
        scalars = torch.zeros(backward.shape[0], spec.top_k, device=self._device)
        self.combine(backward, out.route, rows_per=RowsPer.ROW, row_scalars=scalars)
        self._meet()

    @property
    def _num_programs(self) -> int:
        if self._device.type != "cuda":
            return _INTERPRETED_PROGRAMS
        return self._spec.num_sms or self.default_num_sms
