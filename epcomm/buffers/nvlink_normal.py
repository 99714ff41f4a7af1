"""Normal mode between the GPUs of one host: one copy of a token to each rank of its experts.

Rows are used where peers have stored them, through an expert-major index; with gradients they are
copied once into memory of their own. Words, order and reuse: epcomm/kernels/nvlink_push.py,
nvlink_index.py and nvlink_reduce.py. Every operation stands alone: a dispatch needs no combine, a
combine no dispatch.
"""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from epcomm.buffers.base import BufferCaps, BufferSpec, Combined, DispatchCall, Dispatched
from epcomm.buffers.counts import check_headers
from epcomm.buffers.faults import (
    BatchFlags,
    FaultCode,
    any_flags,
    assume_all_need_grad,
    pack_word,
    raise_faults,
    unpack_word,
)
from epcomm.buffers.nvlink_host import NVLinkHost
from epcomm.buffers.nvlink_normal_layout import NUM_SLOTS, NormalLayout
from epcomm.buffers.sizes import CallShape, Region, index_bytes, most_slots_of, slot_regions
from epcomm.buffers.traffic import BufferTraffic
from epcomm.collectives.base import Collectives
from epcomm.config import Mode
from epcomm.errors import EPError, EPTimeout
from epcomm.records import Route, SlotIndex
from epcomm.types import (
    Layout,
    RowsPer,
    WeightsAppliedBy,
    WireDtype,
    WireFormat,
    WireTensor,
    align_up,
)

if TYPE_CHECKING:
    from epcomm.kernels.normal_exchange import Arrivals, NormalTuning, Sends

# A rank alone has no use for more, and an interpreter gains nothing by them.
_INTERPRETED_PROGRAMS = 3
# Sums of one source that are announced together: a fence costs a few hundredths of their time.
ITEM_ROWS = 64
# Tokens of a rank that a buffer without a limit has room for at first, and by which it grows.
_FIRST_TOKENS, _TOKEN_MULTIPLE = 256, 128


@dataclass(frozen=True, kw_only=True, eq=False)
class NVLinkNormalRoute(Route):
    """Where this rank's tokens went, and what came.

    owns_rows: rows are numbered without gaps, and copied; else place q of source s is row
        s * M + q, of room_tokens = M, of memory that peers write.
    """

    num_tokens: int
    num_rows: int
    index: SlotIndex
    sends: Sends
    arrivals: Arrivals
    owns_rows: bool
    room_tokens: int


class _NVLinkNormal(NVLinkHost):
    """What exact and static sizes share."""

    modes: ClassVar[frozenset[Mode]] = frozenset({Mode.NORMAL})
    # Used in turns; tests use one as well, which hides fewer faults.
    num_slots: ClassVar[int] = NUM_SLOTS
    # Of each kernel, a block on each: enough for nine tenths of what the wire takes.
    default_num_sms: ClassVar[int] = 32

    @classmethod
    def _waits(cls) -> Mapping[int, str]:
        from epcomm.kernels.nvlink_index import PHASE_ROWS
        from epcomm.kernels.nvlink_push import PHASE_BEGIN, PHASE_HEADERS
        from epcomm.kernels.nvlink_reduce import PHASE_READY, PHASE_SUMS

        return {
            PHASE_BEGIN: "the beginning of dispatch {epoch}",
            PHASE_HEADERS: "the counts of dispatch {epoch}",
            PHASE_ROWS: "dispatch {epoch}",
            PHASE_READY: "the beginning of combine {epoch}",
            PHASE_SUMS: "combine {epoch}",
        }

    @classmethod
    def _caps(cls, *, is_static: bool) -> BufferCaps:
        return BufferCaps(
            layout=Layout.ROWS,
            trainable=True,
            graph_safe=is_static,
            ordered=True,
            wire_dtypes=frozenset(WireDtype),
            weights_applied_by=frozenset(WeightsAppliedBy),
            is_static=is_static,
            host_reads=0 if is_static else 1,
            owns_rows=False,
            announces_faults=True,
            device_types=frozenset({"cuda"}),
            needs_process_group=True,
        )

    @classmethod
    def lacks(cls, mode: Mode, spec: BufferSpec, world_size: int) -> tuple[str, ...]:
        if spec.combine_format.dtype.is_quantized:
            return (f"combine carries unquantised rows, not {spec.combine_format}",)
        return ()

    @classmethod
    def region_bytes(cls, spec: BufferSpec, world_size: int) -> tuple[Region, ...]:
        layout = cls._layout_for(spec, world_size, spec.max_tokens_per_rank or _FIRST_TOKENS)
        is_bounded = spec.max_tokens_per_rank is not None
        index = index_bytes(
            spec,
            num_rows=layout.num_rows,
            num_slots=cls._most_slots(spec, layout.num_rows),
            num_members=0,
        )
        row = layout.record_bytes + layout.data_bytes + layout.scale_bytes
        sizes = {
            "words and headers": layout.slots_at
            - layout.num_rows * layout.back_bytes
            + cls.num_slots * layout.slot_regions["header"],
            "received rows": cls.num_slots * layout.num_rows * row,
            "home rows": layout.num_rows * layout.back_bytes,
            "slot index": index,
        }
        packed = slot_regions(
            spec, row_bytes=layout.data_bytes + layout.scale_bytes, max_rows=layout.num_rows
        )
        per_token = {name: size // layout.max_tokens for name, size in sizes.items()}
        return (
            *(
                Region(
                    name=name,
                    bytes_per_token=None if is_bounded else per_token[name],
                    max_bytes=size if is_bounded else None,
                )
                for name, size in sizes.items()
            ),
            *(
                Region(
                    name=region.name,
                    bytes_per_token=None if is_bounded else region.bytes_per_token,
                    max_bytes=region.max_bytes if is_bounded else None,
                )
                for region in packed
            ),
        )

    @classmethod
    def wire_bytes(
        cls, spec: BufferSpec, call: CallShape, *, backward: bool = False
    ) -> BufferTraffic:
        """As Buffer.wire_bytes(); words that count arrivals are not counted."""
        layout = cls._layout_for(spec, call.world_size, _FIRST_TOKENS)
        out, home = _row_bytes(spec, backward=backward)
        control = call.rows_sent * layout.record_bytes
        control += (call.world_size - 1) * layout.header_bytes
        return BufferTraffic(
            dispatch_bytes=call.rows_sent * out,
            combine_bytes=call.rows_received * home,
            control_bytes=0 if backward else control,
        )

    @classmethod
    def _layout_for(cls, spec: BufferSpec, world_size: int, max_tokens: int) -> NormalLayout:
        return NormalLayout(spec, world_size, max_tokens, ITEM_ROWS, cls.num_slots)

    @classmethod
    def _most_slots(cls, spec: BufferSpec, num_rows: int) -> int:
        return spec.max_recv_slots or most_slots_of(spec, num_rows)

    def __init__(self, collectives: Collectives, spec: BufferSpec) -> None:
        super().__init__(collectives, spec)
        self._num_dispatches = 0

    def prepare(self) -> None:
        """Map the blocks of all ranks.

        Collective: yes.   Host sync: yes.
        Raises:
            BackendUnavailable: some rank has not enough memory or cannot map it, or this is a CPU
                rank whose kernels are not interpreted.
        """
        # Kept when the blocks grow.
        self._counters = torch.zeros(6, dtype=torch.int64, device=self._device)
        self._open(self._spec.max_tokens_per_rank or _FIRST_TOKENS)
        if self._device.type == "cuda":
            self._warm_up()

    def redispatch(self, hidden_states: Tensor, route: Route) -> Tensor:
        """As Buffer.redispatch(); of a route made under no_grad, rows live as those of dispatch."""
        from epcomm.kernels.nvlink_collect import collect_rows
        from epcomm.kernels.nvlink_push import push_rows

        assert isinstance(route, NVLinkNormalRoute), "a route of this buffer"
        self._begin_call()
        slot = self._next_slot()
        words = _as_words(hidden_states)
        push_rows(self._exchange, words, None, route.sends, slot=slot, topk=None)
        if not route.owns_rows and route.room_tokens == self._layout.max_tokens:
            collect_rows(self._exchange, route.arrivals, slot=slot)
            wire = WireFormat.of(hidden_states.dtype)
            return self._received("data", slot, wire.dtype.torch_dtype, self._spec.hidden_size)
        rows = hidden_states.new_empty(route.num_rows, self._spec.hidden_size)
        collect_rows(
            self._exchange,
            route.arrivals,
            slot=slot,
            row_bytes=self._layout.data_bytes,
            out=_as_words(rows),
        )
        return rows

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
        route = self._empty_route()
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
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        self._check_report()
        self._faults.check(self._most_slots(self._spec, self._layout.num_rows))

    def traffic(self) -> BufferTraffic:
        """Bytes sent to other ranks so far.   Host sync: yes."""
        calls, rows, old_rows, sums, scaled_sums, _ = self._counters.tolist()
        out, home = _row_bytes(self._spec, backward=False)
        back_out, back_home = _row_bytes(self._spec, backward=True)
        headers = calls * (self._world_size - 1) * self._layout.header_bytes
        return BufferTraffic(
            dispatch_bytes=rows * out + old_rows * back_out,
            combine_bytes=sums * home + scaled_sums * back_home,
            control_bytes=rows * self._layout.record_bytes + headers,
        )

    def received_rows(self) -> tuple[WireTensor, ...]:
        """[W * M, H] of each slot, views of memory that peers write. Local."""
        return tuple(self._received_tensor(slot) for slot in range(self.num_slots))

    def _start_anew(self) -> None:
        assert self._memory is not None, "mask_ranks() has looked"
        layout, exchange = self._layout, self._exchange
        # All words, before the sums that came home.
        self._memory.block[: layout.offsets["back"]].zero_()
        for words in (exchange.state, exchange.counted):
            words.zero_()

    @abstractmethod
    def _compare_combine(self, error: EPError | None = None) -> None:
        """Where the specification asks for it, raise on every rank if any refuses a combine."""

    def _push(self, call: DispatchCall, sends: Sends, slot: int, totals: Tensor | None) -> None:
        """Send the tokens, or none if there is no room for them."""
        from epcomm.kernels.nvlink_push import push_rows

        wire = call.wire_tensor(self._spec.dispatch_format)
        num_tokens = wire.data.shape[0]
        fits = num_tokens <= self._layout.max_tokens
        data, scales = _as_words(wire.data), wire.scales
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
        from epcomm.kernels.nvlink_collect import collect_rows
        from epcomm.kernels.nvlink_index import index_rows

        index_rows(
            self._exchange,
            route.index,
            slot_weights,
            route.arrivals,
            slot=slot,
            is_compact=is_compact,
            has_budget=has_budget,
        )
        rows = self._received_tensor(slot)
        if not route.owns_rows:
            return rows

        def collected(region: str, part: Tensor, row_bytes: int) -> Tensor:
            out = part.new_empty(route.num_rows, part.shape[1])
            collect_rows(
                self._exchange,
                route.arrivals,
                slot=slot,
                region=region,
                row_bytes=row_bytes,
                out=_as_words(out),
            )
            return out

        data = collected("data", rows.data, self._layout.data_bytes)
        scales = rows.scales
        if scales is not None:
            scales = collected("scales", scales, self._layout.scale_bytes)
        return WireTensor(data=data, format=rows.format, scales=scales)

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
        from epcomm.kernels.nvlink_reduce import combine_rows

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
            slot_weights=slot_weights,
            row_scalars=row_scalars,
            out_scalars=scalars,
            announced=int(code),
        )
        return Combined(y=y, scalars=scalars)

    def _empty_route(self) -> NVLinkNormalRoute:
        """Nothing went anywhere, and nothing came."""
        from epcomm.kernels.normal_exchange import Arrivals

        integers = torch.zeros(self._world_size, dtype=torch.int32, device=self._device)
        arrivals = Arrivals(rows_from=integers, row_base=integers, has_failed=integers[:1])
        index = self._new_index(0, 0, None, is_dense=True)
        return self._new_route(0, 0, index, self._new_sends(0), arrivals, owns_rows=True)

    def _new_route(
        self,
        num_tokens: int,
        num_rows: int,
        index: SlotIndex,
        sends: Sends,
        arrivals: Arrivals,
        *,
        owns_rows: bool,
    ) -> NVLinkNormalRoute:
        return NVLinkNormalRoute(
            num_tokens=num_tokens,
            num_rows=num_rows,
            index=index,
            sends=sends,
            arrivals=arrivals,
            owns_rows=owns_rows,
            room_tokens=self._layout.max_tokens,
        )

    def _new_sends(self, num_tokens: int) -> Sends:
        from epcomm.kernels.normal_exchange import Sends

        top_k = self._spec.top_k
        return Sends(
            places=self._integers(num_tokens, self._world_size),
            positions=self._integers(num_tokens, top_k),
            owners=self._integers(num_tokens, top_k),
        )

    def _new_arrivals(self) -> Arrivals:
        from epcomm.kernels.normal_exchange import Arrivals

        return Arrivals(
            rows_from=self._integers(self._world_size),
            row_base=self._integers(self._world_size),
            has_failed=self._integers(1),
        )

    def _new_index(
        self,
        num_rows: int,
        num_slots: int,
        counts: Sequence[int] | None,
        *,
        is_dense: bool,
    ) -> SlotIndex:
        num_local = self._spec.num_local_experts
        return SlotIndex(
            row_of_slot=self._integers(num_slots),
            slots_of_row=self._integers(num_rows, self._spec.top_k),
            num_slots_per_expert=self._integers(num_local),
            first_slot=self._integers(num_local + 1),
            host_num_slots_per_expert=None if counts is None else tuple(counts),
            slot_alignment=self._spec.slot_alignment,
            is_dense=is_dense,
        )

    def _integers(self, *shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.int32, device=self._device)

    def _next_slot(self) -> int:
        slot = self._num_dispatches % self.num_slots
        self._num_dispatches += 1
        return slot

    def _received_tensor(self, slot: int) -> WireTensor:
        """The rows and scales of a slot, where they lie."""
        wire, hidden_size = self._spec.dispatch_format, self._spec.hidden_size
        data = self._received("data", slot, wire.dtype.torch_dtype, hidden_size)
        scales = None
        if wire.scale_dtype is not None:
            num_scales = wire.num_scales(hidden_size)
            scales = self._received("scales", slot, wire.scale_dtype, num_scales)
        return WireTensor(data=data, format=wire, scales=scales)

    def _received(self, region: str, slot: int, dtype: torch.dtype, width: int) -> Tensor:
        """[W * M, width]: a view of a region of a slot."""
        assert self._memory is not None, "the call has been checked"
        layout = self._layout
        row_bytes = layout.data_bytes if region == "data" else layout.scale_bytes
        begin = layout.slots_at + slot * layout.slot_bytes + layout.offsets[region]
        part = self._memory.block[begin : begin + layout.num_rows * row_bytes]
        return part.view(dtype).view(layout.num_rows, -1)[:, :width]

    def _open(self, max_tokens: int) -> None:
        """Blocks with room for M tokens of each rank, and words that begin anew."""
        self._layout = self._layout_for(self._spec, self._world_size, max_tokens)
        memory = self._open_memory(self._layout.num_bytes)
        self._exchange = exchange_of(
            self._layout,
            memory.addresses,
            self._rank,
            num_programs=self._num_programs,
            max_polls=self._max_polls,
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
        return self.default_num_sms


class NVLinkBuffer(_NVLinkNormal):
    """Exact sizes: the host reads counts once a dispatch, while rows are on their way."""

    name: ClassVar[str] = "nvlink"

    @classmethod
    def caps(cls, mode: Mode) -> BufferCaps:
        return cls._caps(is_static=False)

    def dispatch(self, call: DispatchCall) -> Dispatched:
        self._begin_call()
        while True:
            slot, sends = self._next_slot(), self._new_sends(call.hidden_states.shape[0])
            totals = self._begin_totals()
            self._push(call, sends, slot, totals)
            words, tokens, rows, counts = self._await_totals(totals)
            codes, flags = zip(*(unpack_word(word) for word in words), strict=True)
            check_headers(codes, flags, call, self._num_experts, self._rank)
            if max(tokens) <= self._layout.max_tokens:
                break
            self._grow(max(tokens))
        owns_rows = bool(call.flags & BatchFlags.GRAD_ENABLED)
        num_rows = sum(rows) if owns_rows else self._layout.num_rows
        num_slots = sum(align_up(count, self._spec.slot_alignment) for count in counts)
        index = self._new_index(num_rows, num_slots, counts, is_dense=num_slots == sum(counts))
        route = self._new_route(
            call.hidden_states.shape[0],
            num_rows,
            index,
            sends,
            self._new_arrivals(),
            owns_rows=owns_rows,
        )
        slot_weights = torch.empty(num_slots, device=self._device)
        received = self._index(route, slot_weights, slot, is_compact=owns_rows, has_budget=False)
        return Dispatched(
            rows=received,
            index=index,
            slot_weights=slot_weights,
            route=route,
            any_flags=any_flags(flags),
        )

    def _compare_combine(self, error: EPError | None = None) -> None:
        if not self._spec.compares_calls:
            return
        code = int(FaultCode.of(error, in_combine=True))
        mine = torch.full((1,), code, device=self._device)
        codes = self._collectives.all_gather(mine, phase="combine calls").flatten().tolist()
        raise_faults(codes, self._rank, error, function="combine")

    def _begin_totals(self) -> Tensor:
        """[3 * W + L], int32, negative until a kernel has written it."""
        num_words = 3 * self._world_size + self._spec.num_local_experts
        # Of this call alone: an earlier one may have ended in a timeout.
        totals = torch.empty(num_words, dtype=torch.int32, pin_memory=self._device.type == "cuda")
        return totals.fill_(-1)

    def _await_totals(self, totals: Tensor) -> tuple[list[int], list[int], list[int], list[int]]:
        """Fault and flags, T and rows of each rank, and slots of each expert; the host read.

        Raises:
            EPTimeout: some rank did not come.
        """
        # A kernel that waits in vain reports it; this is for one that never runs.
        deadline, size = time.monotonic() + 2 * self._timeout_s, self._world_size
        while True:
            words = totals.tolist()
            if min(words) >= 0:
                break
            self._check_report()
            if time.monotonic() > deadline:
                raise EPTimeout(
                    f"{self.name}: no counts within {2 * self._timeout_s:g} s (rank {self._rank} "
                    f"of {size}): work before this dispatch did not end; close the group and make "
                    "a new one"
                )
        return words[:size], words[size : 2 * size], words[2 * size : 3 * size], words[3 * size :]

    def _grow(self, num_tokens: int) -> None:
        """Room for so many tokens of a rank, on every rank: all have read the same counts."""
        # Nobody stores to the old blocks any more; views of this rank keep them.
        self._meet()
        wanted = max(num_tokens, 2 * self._layout.max_tokens)
        self._open(align_up(wanted, _TOKEN_MULTIPLE))

    @property
    def _num_experts(self) -> int:
        return self._spec.num_local_experts * self._world_size


class NVLinkStaticBuffer(_NVLinkNormal):
    """A budget of slots, no host read: for graphs, and where the host must not wait."""

    name: ClassVar[str] = "nvlink_static"

    @classmethod
    def caps(cls, mode: Mode) -> BufferCaps:
        return cls._caps(is_static=True)

    def dispatch(self, call: DispatchCall) -> Dispatched:
        self._begin_call()
        num_tokens = call.hidden_states.shape[0]
        assert num_tokens <= self._layout.max_tokens, "the dispatcher has checked T"
        self._faults.note_own(call.error)
        slot, sends = self._next_slot(), self._new_sends(num_tokens)
        self._push(call, sends, slot, None)
        owns_rows = bool(call.flags & BatchFlags.GRAD_ENABLED)
        num_rows = self._layout.num_rows
        num_slots = self._most_slots(self._spec, num_rows)
        index = self._new_index(num_rows, num_slots, None, is_dense=False)
        route = self._new_route(
            num_tokens, num_rows, index, sends, self._new_arrivals(), owns_rows=owns_rows
        )
        slot_weights = torch.zeros(num_slots, device=self._device)
        rows = self._index(route, slot_weights, slot, is_compact=False, has_budget=True)
        return Dispatched(
            rows=rows,
            index=index,
            slot_weights=slot_weights,
            route=route,
            any_flags=assume_all_need_grad(call.flags),
        )

    def _compare_combine(self, error: EPError | None = None) -> None:
        """Nobody waits: a refused combine is NaN, and check() tells."""


def exchange_of(
    layout: NormalLayout,
    addresses: Sequence[int],
    rank: int,
    *,
    num_programs: int,
    max_polls: int,
    counters: Tensor,
    faults: Tensor,
    report: Tensor,
) -> NormalExchange:
    """What kernels are given: blocks at `addresses`, words that begin anew.

    counters, faults, report: see NormalExchange; the device is that of counters.
    """
    from epcomm.kernels.epochs import STATE_WORDS
    from epcomm.kernels.launch import next_power_of_two
    from epcomm.kernels.normal_exchange import NormalExchange, NormalTuning
    from epcomm.kernels.nvlink_plan import GROUP_TOKENS, GROUP_WORDS
    from epcomm.kernels.peer_exchange import ExchangeDims

    spec, size, device = layout.spec, layout.world_size, counters.device
    rank_lanes, local_lanes = next_power_of_two(size), next_power_of_two(spec.num_local_experts)
    expert_lanes = next_power_of_two(size * spec.num_local_experts)
    run = -(-layout.max_tokens // num_programs)
    num_groups = max(1, -(-run // GROUP_TOKENS))

    def zeros(*shape: int) -> Tensor:
        return torch.zeros(shape, dtype=torch.int32, device=device)

    return NormalExchange(
        rank=rank,
        num_programs=num_programs,
        max_polls=max_polls,
        own_address=addresses[rank],
        table=torch.tensor(addresses, dtype=torch.int64, device=device),
        dims=ExchangeDims(
            world_size=size,
            max_tokens=layout.max_tokens,
            top_k=spec.top_k,
            num_local_experts=spec.num_local_experts,
        ),
        tuning=NormalTuning(item_rows=layout.item_rows),
        regions=layout.offsets,
        slots_at=layout.slots_at,
        slot_bytes=layout.slot_bytes,
        num_items=layout.num_items,
        num_groups=num_groups,
        record_words=layout.record_words,
        data_bytes=layout.data_bytes,
        scale_bytes=layout.scale_bytes,
        header_bytes=layout.header_bytes,
        back_bytes=layout.back_bytes,
        state=zeros(STATE_WORDS),
        scratch=zeros(num_programs, expert_lanes + rank_lanes + 1),
        bits=zeros(num_programs, num_groups, expert_lanes + rank_lanes, GROUP_WORDS),
        counted=zeros(num_programs),
        bases=zeros(num_programs, rank_lanes * local_lanes),
        counters=counters,
        faults=faults,
        report=report,
    )


def _as_words(rows: Tensor) -> Tensor:
    """[n, words]: rows as the widest integers that fit, for kernels that only move them."""
    rows = rows if rows.stride(-1) == 1 else rows.contiguous()
    row_bytes = rows.shape[1] * rows.itemsize
    for dtype in (torch.int32, torch.int16):
        if row_bytes % dtype.itemsize == 0 and rows.stride(0) * rows.itemsize % dtype.itemsize == 0:
            return rows.view(dtype)
    return rows.view(torch.uint8)


def _row_bytes(spec: BufferSpec, *, backward: bool) -> tuple[int, int]:
    """Of one row on its way to the experts and home, without the gaps between rows."""
    hidden_size = spec.hidden_size
    if backward:
        bare = spec.backward_format.data_bytes(hidden_size)
        return bare, bare + 4 * spec.top_k
    wire = spec.dispatch_format
    out = wire.data_bytes(hidden_size) + wire.scale_bytes(hidden_size)
    return out, spec.combine_format.data_bytes(hidden_size)
