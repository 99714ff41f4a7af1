"""Move tokens between CPU ranks of one host: rows are written where the receiver reads them.

The protocol is that of symmetric memory in normal mode: epochs, headers that all ranks see, receive
buffers used in turn. CollectiveBuffer plans and packs; only the exchanges differ: a row crosses
memory once, from the token to the expert's rank, and a sum once in combine.

Rows and sums have capacity for the largest call so far: with the headers every rank knows the
capacity that every rank needs, and all ranks grow alike.

Two receive buffers alternate. Writing epoch e is safe because every rank has reached e - 1, so
nobody reads e - 2 any more. Rows that were handed to the caller live longer: one receive buffer for
each batch in flight. A rank that writes rows first waits for the headers of the call, which every
rank exchanges before anything else. Every rank counts alike, so all ranks refuse a batch whose
receive buffer was used again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from epcomm.buffers.base import Dispatched
from epcomm.buffers.collective.all_to_all import CollectiveBuffer, CollectiveExchangePlan, RowTable
from epcomm.buffers.collective.base import COLLECTIVE_CAPS
from epcomm.buffers.requirements import batches_in_flight_of
from epcomm.buffers.shared_memory.board import HostBoard
from epcomm.buffers.shared_memory.growable import MIN_CAPACITY_BYTES, HostRegion, line_aligned
from epcomm.buffers.shared_memory.memory import HostMemory
from epcomm.buffers.shared_memory.signals import HostSignals, Signal, signal_bytes
from epcomm.buffers.sizes import Region, RowBytes
from epcomm.calls.call import DispatchCall
from epcomm.calls.counts import seal
from epcomm.calls.faults import overwritten_error
from epcomm.calls.header import HEADER_WORDS, ROWS, CallKind, CallSign
from epcomm.calls.order import Calls
from epcomm.config import Mode
from epcomm.errors import EPError, HandleError
from epcomm.platforms.machine import Machine
from epcomm.protocol import BatchFlags
from epcomm.records import ExchangePlan
from epcomm.spec import Availability, BufferCaps, BufferSpec
from epcomm.types import RowsPer

# Number of receive buffers of headers and of sums, which are read within a call.
_NUM_BUFFERS = 2
# Default number of batches in flight.
_NUM_BATCHES = 2
# Sums are computed in pieces of this many bytes and copied while they are in the cache: torch
# cannot sum into given memory, and malloc asks the system for memory as large as all sums.
_PART_BYTES = 2**21


class SharedMemoryBuffer(CollectiveBuffer):
    """Serves both phases over shared memory, with exact sizes; under no_grad rows are views of it.

    Decode needs no static sizes here: on a CPU no graph is captured, and no device runs ahead of
    the host.
    """

    name: ClassVar[str] = "shared_memory"
    modes: ClassVar[frozenset[Mode]] = frozenset({Mode.NORMAL, Mode.LOW_LATENCY})
    needs_one_host: ClassVar[bool] = True
    needs_host_waits: ClassVar[bool] = True

    @classmethod
    def probe(cls, machine: Machine) -> Availability:
        reason = "the system does not report which processes can share memory, or hides /proc"
        return Availability.judge(
            absent=[] if machine.host() else [reason],
            needs="Linux, with /proc in which a user sees the own processes",
        )

    @classmethod
    def caps(cls, mode: Mode) -> BufferCaps:
        return replace(
            COLLECTIVE_CAPS,
            batches_in_flight=_NUM_BATCHES,
            batches_on_request=True,
            device_types=frozenset({"cpu"}),
        )

    @classmethod
    def lacks_with(cls, machine: Machine, spec: BufferSpec, world_size: int) -> tuple[str, ...]:
        left, (rows, sums) = machine.memory_left(), _most_bytes(spec, world_size)
        block = _opening_bytes(spec, world_size)
        block += num_batches(spec) * (rows or MIN_CAPACITY_BYTES) + _NUM_BUFFERS * (
            sums or MIN_CAPACITY_BYTES
        )
        # All ranks take their blocks from the memory of one host.
        if left is None or world_size * block <= left:
            return ()
        return (
            f"needs {world_size * block} B of memory that {world_size} ranks share, and {left} B "
            "are left on this host or in its container",
        )

    @classmethod
    def region_bytes(cls, spec: BufferSpec, world_size: int) -> tuple[Region, ...]:
        rows, sums = _most_bytes(spec, world_size)
        areas = {"received rows": (num_batches(spec), rows), "returned rows": (_NUM_BUFFERS, sums)}
        found = {each.name: each for each in super().region_bytes(spec, world_size)}
        for name, (number, most) in areas.items():
            per_token = number * (found[name].bytes_per_token or 0)
            max_bytes = None if most is None else number * most
            found[name] = Region(name=name, bytes_per_token=per_token, max_bytes=max_bytes)
        return tuple(found.values())

    def __init__(self, calls: Calls, spec: BufferSpec) -> None:
        super().__init__(calls, spec)
        self._widest_row, self._widest_sum = _widest_bytes(spec)
        self._num_batches = num_batches(spec)
        rows, sums = _most_bytes(spec, self._world_size)
        self._rows = HostRegion(calls, "rows", self._num_batches, rows)
        self._sums = HostRegion(calls, "sums", _NUM_BUFFERS, sums)
        self._num_dispatches = 0
        # Headers in shared memory hold all counts, so that no second message carries the rest.
        self._has_rest = False
        self._is_open = False

    def prepare(self) -> None:
        """Attach the signals and headers of all ranks.

        Collective: yes.   Host sync: yes.
        Raises:
            BackendUnavailable: not enough shared memory on some rank; on every rank.
        """
        bounded, size = self._collectives.bounded, self._world_size
        assert bounded is not None, "the host waits in the collectives of a CPU group"
        table_shape = _table_shape(self._spec, size)
        table_at = line_aligned(signal_bytes(size))
        if not self._calls.has_board:
            self._calls.use(HostBoard(self._calls))
        num_bytes = _opening_bytes(self._spec, size)
        memory = HostMemory(self._calls, num_bytes, phase="open shared_memory")

        def words(at: int, shape: tuple[int, ...]) -> list[Tensor]:
            count = torch.Size(shape).numel()
            return [
                block[at : at + 8 * count].view(torch.int64).view(shape) for block in memory.blocks
            ]

        # Each rank's block has the headers from every rank to every rank.
        self._headers = words(table_at, table_shape)
        self._signals = HostSignals(memory, self._rank, size, bounded)
        self._bounded = bounded
        self._is_open = True

    def dispatch(self, call: DispatchCall) -> Dispatched:
        self._check_open()
        is_view = not call.flags & BatchFlags.GRAD_ENABLED
        self._views_epoch = self._signals.coming_epoch(Signal.ROWS_READY) if is_view else None
        out = super().dispatch(call)
        if is_view:
            return out
        # Autograd keeps rows beyond the life of a receive buffer, so they are copied.
        scales = None if out.rows.scales is None else out.rows.scales.clone()
        return replace(out, rows=replace(out.rows, data=out.rows.data.clone(), scales=scales))

    def cached_dispatch(self, hidden_states: Tensor, exchange_plan: ExchangePlan) -> Tensor:
        # The header of this call says that every rank is done with the rows of the batch before
        # the last.
        return super().cached_dispatch(hidden_states, exchange_plan).clone()

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
        if error is None:
            self._check_views(exchange_plan)
        return super().combine(
            rows,
            exchange_plan,
            rows_per=rows_per,
            slot_weights=slot_weights,
            row_scalars=row_scalars,
            error=error,
            bias=bias,
        )

    def close(self) -> None:
        super().close()
        if self._is_open:
            self._is_open = False
            self._signals.release()
            self._headers = []
        self._rows.free()
        self._sums.free()

    def _exchange_headers(self, call: DispatchCall) -> Callable[[Tensor], Tensor]:
        return partial(self._share_headers, call)

    def _share_headers(self, call: DispatchCall, header: Tensor) -> Tensor:
        self._bounded.check()
        buffer_index = (self._num_dispatches + 1) % _NUM_BUFFERS
        for table in self._headers:
            table[buffer_index, self._rank] = header[:, : table.shape[-1]]
        # A rank that has sent its header has written its counts before, and is done with the rows
        # of the batch before the last.
        of_call = self._calls.message(())
        of_call[:, :HEADER_WORDS] = header[:, :HEADER_WORDS]
        seal(of_call)
        call_headers = self._calls.exchange(of_call, CallKind.DISPATCH.phase)
        self._calls.compare(call_headers[:, :HEADER_WORDS].tolist(), call_headers, call.error)
        # A refused call leaves the receive buffer to the next call, which writes the same memory.
        self._num_dispatches += 1
        headers = self._headers[self._rank][buffer_index].clone()
        self._table = self._table_of(headers)
        received = [sum(rows) for rows in zip(*self._table, strict=True)]
        self._rows.require(max(received) * self._widest_row)
        self._sums.require(max(map(sum, self._table)) * self._widest_sum)
        return headers[:, self._rank].contiguous()

    def _table_of(self, headers: Tensor) -> RowTable:
        """Read the number of rows from each rank to each rank in all headers [W, W, words]."""
        table = tuple(tuple(rows) for rows in headers[:, :, ROWS].tolist())
        most = self._spec.max_tokens_per_rank
        for source, totals in enumerate(headers.sum(2).tolist()):
            for destination, total in enumerate(totals):
                num_rows = table[source][destination]
                if total or num_rows < 0 or (most is not None and num_rows > most):
                    self._calls.reject(
                        source,
                        f"words for rank {destination} that add up to {total}, expected 0, with "
                        f"rows {num_rows}, expected 0 to {most or 'any'}",
                    )
        return table

    def _send_rows(
        self,
        rows: Tensor | Callable[[slice, Tensor], None],
        table: RowTable | None,
        send_splits: Sequence[int],
        recv_splits: Sequence[int],
        shape: tuple[int, torch.dtype],
        *,
        phase: str,
    ) -> Tensor:
        assert table is not None, "headers brought it"
        assert not isinstance(rows, Tensor), "on a CPU, rows are written where they are read"
        epoch, sent = self._signals.next_epoch(Signal.ROWS_READY), 0
        for destination, num_rows in enumerate(send_splits):
            first = sum(sends[destination] for sends in table[: self._rank])
            place = slice(first, first + num_rows)
            if num_rows:
                out = self._rows.rows(destination, epoch, place, *shape)
                rows(slice(sent, sent + num_rows), out)
            sent += num_rows
        self._signals.publish(Signal.ROWS_READY)
        self._signals.wait(Signal.ROWS_READY, phase)
        return self._rows.rows(self._rank, epoch, slice(0, sum(recv_splits)), *shape)

    def _send_sums(
        self,
        make: Callable[[slice], Tensor],
        exchange_plan: CollectiveExchangePlan,
        shape: tuple[int, torch.dtype],
        kind: CallKind,
    ) -> Tensor:
        assert exchange_plan.table is not None, "headers brought it"
        row_bytes = shape[0] * shape[1].itemsize
        # A refused call leaves the epoch to the next call, which writes the same memory again.
        epoch, first = self._signals.coming_epoch(Signal.SUMS_READY), 0
        for destination, num_rows in enumerate(exchange_plan.recv_splits):
            # In the destination's block, sums lie by the rank of their experts.
            place = sum(exchange_plan.table[destination][: self._rank])
            out = self._sums.rows(destination, epoch, slice(place, place + num_rows), *shape)
            for part in _parts(num_rows, row_bytes):
                out[part] = make(slice(first + part.start, first + part.stop))
            first += num_rows
        self._announce(kind, exchange_plan.call)
        self._traffic.combine(exchange_plan.recv_splits, row_bytes)
        self._signals.next_epoch(Signal.SUMS_READY)
        self._signals.publish(Signal.SUMS_READY)
        self._signals.wait(Signal.SUMS_READY, kind.text)
        return self._sums.rows(self._rank, epoch, slice(0, sum(exchange_plan.send_splits)), *shape)

    def _announce(
        self,
        kind: CallKind,
        batch: CallSign,
        *,
        rows: Tensor | None = None,
        error: EPError | None = None,
    ) -> None:
        self._check_open()
        super()._announce(kind, batch, rows=rows, error=error)

    def _check_views(self, exchange_plan: ExchangePlan | None) -> None:
        """Refuse, on every rank, a batch whose rows a later exchange has overwritten."""
        self._check_open()
        assert isinstance(exchange_plan, CollectiveExchangePlan), "an exchange plan of this buffer"
        epoch = exchange_plan.views_epoch
        if (
            epoch is None
            or self._signals.coming_epoch(Signal.ROWS_READY) - epoch <= self._num_batches
        ):
            return
        error = overwritten_error(
            self.name, epoch, self._num_batches, self._collectives.names.where
        )
        # Ranks may differ in grad mode, and a rank in grad mode has copies, which stay valid: that
        # rank must hear of the error.
        self._announce(CallKind.COMBINE, exchange_plan.call, error=error)

    def _check_open(self) -> None:
        if not self._is_open:
            raise HandleError(
                f"{self.name}: the buffer is closed ({self._collectives.names.where}); "
                "make a new EPGroup"
            )


def _parts(num_rows: int, row_bytes: int) -> Iterator[slice]:
    """Cut num_rows into ranges of neighbouring rows of at most _PART_BYTES."""
    step = max(_PART_BYTES // row_bytes, 1)
    return (slice(at, min(at + step, num_rows)) for at in range(0, num_rows, step))


def num_batches(spec: BufferSpec) -> int:
    """Return how many batches may be in flight."""
    number = batches_in_flight_of(spec, SharedMemoryBuffer.caps(Mode.NORMAL))
    assert number is not None, "rows are views"
    return number


def _widest_bytes(spec: BufferSpec) -> tuple[int, int]:
    """Return the bytes of the widest row in dispatch and in combine, of forward and backward."""
    ways = [RowBytes.of(spec), RowBytes.of(spec, backward=True)]
    return max(way.dispatch for way in ways), max(way.combine for way in ways)


def _most_bytes(spec: BufferSpec, world_size: int) -> tuple[int | None, int | None]:
    """Return the most bytes of received rows and of returned sums of a rank, if M is known."""
    if spec.max_tokens_per_rank is None:
        return None, None
    widest_row, widest_sum = _widest_bytes(spec)
    copies = min(spec.top_k, world_size)
    max_tokens = spec.max_tokens_per_rank
    rows, sums = max_tokens * world_size * widest_row, max_tokens * copies * widest_sum
    return line_aligned(rows), line_aligned(sums)


def _table_shape(spec: BufferSpec, world_size: int) -> tuple[int, int, int, int]:
    """Return the shape of the headers from every rank to every rank, in words."""
    return (_NUM_BUFFERS, world_size, world_size, HEADER_WORDS + spec.num_local_experts)


def _opening_bytes(spec: BufferSpec, world_size: int) -> int:
    """Return the bytes of a rank's block of signals and headers."""
    table_words = math.prod(_table_shape(spec, world_size))
    return line_aligned(signal_bytes(world_size)) + line_aligned(8 * table_words)
