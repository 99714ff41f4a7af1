"""Move tokens between CPU ranks of one host: a rank writes rows into the receiver's memory.

The protocol is that of symmetric memory in normal mode: epochs, headers that all ranks receive, and
receive buffers used in turn. RowsBuffer plans, packs and indexes, as over collectives. HostMover
copies each row once, from the token to the expert's rank, and each sum once in combine.

Rows and sums have capacity for the largest call so far. The headers show every rank the capacity
that all ranks need, so all ranks grow by the same amount.

Two receive buffers alternate. Writing epoch e is safe because every rank has reached e - 1, so no
rank reads e - 2. Rows that were returned to the caller live longer, so there is one receive buffer
for each batch in flight. A rank writes rows only after it has received the headers of the call from
all ranks. All ranks have the same epochs, so all of them raise for a batch whose receive buffer was
reused.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import ClassVar

from torch import Tensor

from epcomm.buffers.collective.all_to_all import (
    CollectiveExchangePlan,
    MakeRows,
    RowMover,
    RowsBuffer,
    RowShape,
    RowTable,
    WriteRows,
)
from epcomm.buffers.collective.base import COLLECTIVE_CAPS
from epcomm.buffers.shared_memory.memory import (
    MIN_CAPACITY_BYTES,
    HostMemory,
    HostRegion,
    line_aligned,
)
from epcomm.buffers.shared_memory.signals import HostBoard, HostSignals, Signal, signal_bytes
from epcomm.buffers.sizes import Region, RowBytes
from epcomm.calls.call import DispatchCall
from epcomm.calls.counts import seal
from epcomm.calls.faults import overwritten_error
from epcomm.calls.header import HEADER_WORDS, PAIRS, ROWS, CallKind
from epcomm.calls.order import Calls
from epcomm.config import Mode
from epcomm.errors import EPError, HandleError
from epcomm.platforms.machine import Machine
from epcomm.spec import Availability, BufferCaps, BufferSpec

# Number of receive buffers of headers and of sums, which are read within a call.
_NUM_BUFFERS = 2
# Default number of batches in flight.
_NUM_BATCHES = 2
# Bytes of the pieces in which sums are computed, and copied while they are in the cache. torch
# cannot sum into given memory, and memory for all sums would come from the system each time.
_PART_BYTES = 2**21


class HostMover(RowMover):
    """Moves rows through shared memory: a rank writes them into the receiver's block."""

    def __init__(self, calls: Calls, spec: BufferSpec, name: str) -> None:
        """Store the arguments. name: the name of the buffer, for messages."""
        # Headers in shared memory have all counts, so no second message is needed.
        super().__init__(calls.collectives, waits=False)
        self._calls, self._spec, self._name = calls, spec, name
        self._rank, self._world_size = calls.collectives.rank, calls.world_size
        self._widest_row, self._widest_sum = _widest_bytes(spec)
        self._num_batches = num_batches(spec)
        rows, sums = _most_bytes(spec, self._world_size)
        self._rows = HostRegion(calls, "rows", self._num_batches, rows)
        self._sums = HostRegion(calls, "sums", _NUM_BUFFERS, sums)
        self._num_dispatches = 0
        self._is_open = False

    @property
    def epoch(self) -> int:
        return self._signals.coming_epoch(Signal.ROWS_READY) - 1

    def prepare(self) -> None:
        """Map the signals and headers of all ranks.

        Collective: yes.   Host sync: yes.
        Raises:
            BackendUnavailable: not enough shared memory on some rank; on every rank.
        """
        self._calls.use_board(lambda: HostBoard(self._calls))
        size = self._world_size
        num_bytes = _opening_bytes(self._spec, size)
        memory = HostMemory(self._calls, num_bytes, phase="open shared_memory")
        # Each rank's block has the headers from every rank to every rank.
        table_at = line_aligned(signal_bytes(size))
        self._headers = memory.words(table_at, _table_shape(self._spec, size))
        self._signals = HostSignals(memory, self._calls)
        self._is_open = True

    def check_open(self) -> None:
        if not self._is_open:
            where = self._calls.names.where
            raise HandleError(f"{self._name}: the buffer is closed ({where}); make a new EPGroup")

    def find_overwritten(self, exchange_plan: CollectiveExchangePlan) -> EPError | None:
        written = exchange_plan.views_epoch
        if written is None or self.epoch - written < self._num_batches:
            return None
        return overwritten_error(self._name, written, self._num_batches, self._calls.names.where)

    def exchange_headers(self, call: DispatchCall) -> Callable[[Tensor], Tensor]:
        return partial(self._share_headers, call)

    def _share_headers(self, call: DispatchCall, header: Tensor) -> Tensor:
        self._signals.bounded.check()
        buffer_index = (self._num_dispatches + 1) % _NUM_BUFFERS
        for table in self._headers:
            table[buffer_index, self._rank] = header[:, : table.shape[-1]]
        # A rank writes its counts before it sends its header, and no longer reads the rows of the
        # batch before the last.
        of_call = self._calls.message(())
        of_call[:, :HEADER_WORDS] = header[:, :HEADER_WORDS]
        seal(of_call)
        call_headers = self._calls.exchange(of_call, CallKind.DISPATCH.phase)
        self._calls.compare(call_headers[:, :HEADER_WORDS].tolist(), call_headers, call.error)
        # After an error above, the next call writes the same header memory.
        self._num_dispatches += 1
        headers = self._headers[self._rank][buffer_index].clone()
        self.table = self._table_of(headers)
        if self._spec.sum_groups is not None:
            self.pair_table = tuple(map(tuple, headers[:, :, PAIRS].tolist()))
        received = [sum(rows) for rows in zip(*self.table, strict=True)]
        self._rows.require(max(received) * self._widest_row)
        self._sums.require(max(map(sum, self.pair_table or self.table)) * self._widest_sum)
        return headers[:, self._rank].contiguous()

    def _table_of(self, headers: Tensor) -> RowTable:
        """Return the number of rows from each rank to each rank, from all headers [W, W, words]."""
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

    def send_rows(
        self,
        rows: Tensor | WriteRows,
        table: RowTable | None,
        splits: tuple[Sequence[int], Sequence[int]],
        shape: RowShape,
        *,
        phase: str,
        is_kept: bool,
    ) -> Tensor:
        assert table is not None, "the headers have it"
        assert not isinstance(rows, Tensor), "on a CPU, a function writes the rows"
        epoch, sent = self._signals.next_epoch(Signal.ROWS_READY), 0
        for destination, num_rows in enumerate(splits[0]):
            first = sum(sends[destination] for sends in table[: self._rank])
            place = slice(first, first + num_rows)
            if num_rows:
                out = self._rows.rows(destination, epoch, place, *shape)
                rows(slice(sent, sent + num_rows), out)
            sent += num_rows
        self._signals.publish(Signal.ROWS_READY)
        self._signals.wait(Signal.ROWS_READY, phase)
        received = self._rows.rows(self._rank, epoch, slice(0, sum(splits[1])), *shape)
        return received.clone() if is_kept else received

    def write_sums(
        self, make: MakeRows, exchange_plan: CollectiveExchangePlan, shape: RowShape
    ) -> Callable[[str], Tensor]:
        table, (to_rank, from_rank) = exchange_plan.returned_table, exchange_plan.returned_splits
        assert table is not None, "the headers have it"
        # If the call is refused before the exchange, the next call uses the same epoch and memory.
        epoch, first = self._signals.coming_epoch(Signal.SUMS_READY), 0
        for destination, num_rows in enumerate(to_rank):
            # In the destination's block, sums are ordered by the rank of their experts.
            place = sum(table[destination][: self._rank])
            out = self._sums.rows(destination, epoch, slice(place, place + num_rows), *shape)
            for part in _parts(num_rows, shape[0] * shape[1].itemsize):
                out[part] = make(slice(first + part.start, first + part.stop))
            first += num_rows

        def exchange(phase: str) -> Tensor:
            self._signals.next_epoch(Signal.SUMS_READY)
            self._signals.publish(Signal.SUMS_READY)
            self._signals.wait(Signal.SUMS_READY, phase)
            return self._sums.rows(self._rank, epoch, slice(0, sum(from_rank)), *shape)

        return exchange

    def close(self) -> None:
        if self._is_open:
            self._is_open = False
            self._signals.release()
            self._headers = []
        self._rows.free()
        self._sums.free()


class SharedMemoryBuffer(RowsBuffer):
    """Serves both phases through shared memory; under no_grad rows are views of it.

    Decode needs no static sizes, because on a CPU there are no graphs and no asynchronous device.
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
            needs="Linux, with a /proc that shows the user's own processes",
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
        block += num_batches(spec) * (rows or MIN_CAPACITY_BYTES)
        block += _NUM_BUFFERS * (sums or MIN_CAPACITY_BYTES)
        # All ranks allocate their blocks on one host.
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
        super().__init__(calls, spec, HostMover(calls, spec, self.name))


def _parts(num_rows: int, row_bytes: int) -> Iterator[slice]:
    step = max(_PART_BYTES // row_bytes, 1)
    return (slice(at, min(at + step, num_rows)) for at in range(0, num_rows, step))


def num_batches(spec: BufferSpec) -> int:
    """Return the most batches in flight."""
    return spec.batches_in_flight or _NUM_BATCHES


def _widest_bytes(spec: BufferSpec) -> tuple[int, int]:
    """Return the bytes of the widest row in dispatch and in combine, forward or backward."""
    ways = [RowBytes.of(spec), RowBytes.of(spec, backward=True)]
    return max(way.dispatch for way in ways), max(way.combine for way in ways)


def _most_bytes(spec: BufferSpec, world_size: int) -> tuple[int | None, int | None]:
    """Return the most bytes of received rows and of returned sums of a rank; None without M."""
    if spec.max_tokens_per_rank is None:
        return None, None
    widest_row, widest_sum = _widest_bytes(spec)
    returned = min(spec.top_k, world_size * spec.returned_columns(world_size))
    max_tokens = spec.max_tokens_per_rank
    rows, sums = max_tokens * world_size * widest_row, max_tokens * returned * widest_sum
    return line_aligned(rows), line_aligned(sums)


def _table_shape(spec: BufferSpec, world_size: int) -> tuple[int, int, int, int]:
    """Return the shape of the headers from every rank to every rank, int64 words."""
    return (_NUM_BUFFERS, world_size, world_size, HEADER_WORDS + spec.num_local_experts)


def _opening_bytes(spec: BufferSpec, world_size: int) -> int:
    table_words = math.prod(_table_shape(spec, world_size))
    return line_aligned(signal_bytes(world_size)) + line_aligned(8 * table_words)
