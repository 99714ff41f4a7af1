"""The buffer for CPU ranks of one host: rows are written where the receiver reads them.

The protocol is that of symmetric memory in normal mode: epochs, headers that all ranks see, two
slots a region. What goes where, and all that is done with it, is CollectiveBuffer's; only the
exchanges differ: a row crosses memory once, from the token to the expert's rank, and a sum once on
its way home.

Rows and sums have room for the largest call so far: with the headers every rank knows what every
rank needs, and all of them grow alike.

Two slots in turns spare a round: who writes epoch e has heard of everybody's epoch e - 1, which
came after their last use of epoch e - 2. Rows that were handed out live longer, until their owner's
second next dispatch; so their writer waits for the header of that call, which all ranks announce on
the board of the group (host_board.py) before anything else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor

from epcomm.buffers.base import Availability, BufferCaps, BufferSpec, DispatchCall, Dispatched
from epcomm.buffers.collective import CollectiveBuffer, CollectiveRoute, RowTable
from epcomm.buffers.faults import BatchFlags
from epcomm.buffers.host_board import HostBoard
from epcomm.buffers.host_memory import HostMemory, host_of_this_process
from epcomm.buffers.host_region import NUM_SLOTS, HostRegion, line_aligned
from epcomm.buffers.host_signals import HostSignals, Signal, signal_bytes
from epcomm.buffers.over_collectives import COLLECTIVE_CAPS
from epcomm.buffers.sizes import RowBytes
from epcomm.collectives.base import Collectives
from epcomm.collectives.call_order import HEADER_WORDS, ROWS, CallKind, CallSign
from epcomm.config import Mode
from epcomm.errors import EPError, HandleError
from epcomm.records import Pending, Route

# Sums are made in pieces of so many bytes and copied while they lie in the cache: torch has no sum
# into memory that is given, and for memory as large as all of them malloc asks the system.
_PART_BYTES = 2**21


class SharedMemoryBuffer(CollectiveBuffer):
    """Normal mode over shared memory: exact sizes. Under no_grad rows are views of it."""

    name: ClassVar[str] = "shared_memory"
    needs_one_host: ClassVar[bool] = True
    needs_host_waits: ClassVar[bool] = True

    @classmethod
    def probe(cls, environment: Mapping[str, str]) -> Availability:
        if host_of_this_process():
            return Availability(ok=True)
        return Availability(ok=False, reasons=("there is no folder of shared memory",))

    @classmethod
    def caps(cls, mode: Mode) -> BufferCaps:
        return replace(COLLECTIVE_CAPS, owns_rows=False, device_types=frozenset({"cpu"}))

    def __init__(self, collectives: Collectives, spec: BufferSpec) -> None:
        super().__init__(collectives, spec)
        self._rank, self._world_size = collectives.rank, collectives.world_size
        # The widest row of either direction, out and home.
        ways = [RowBytes.of(spec), RowBytes.of(spec, backward=True)]
        self._widest_row = max(way.dispatch for way in ways)
        self._widest_sum = max(way.combine for way in ways)
        self._rows = HostRegion(collectives, "rows")
        self._sums = HostRegion(collectives, "sums")
        self._num_dispatches = 0
        # Memory has no rest.
        self._has_rest = False
        self._is_open = False

    def prepare(self) -> None:
        """Attach the words and headers of all ranks.

        Collective: yes.   Host sync: yes.
        Raises:
            BackendUnavailable: not enough shared memory on some rank; on every rank.
        """
        bounded, size = self._collectives.bounded, self._world_size
        assert bounded is not None, "the host waits in the verbs of a CPU group"
        table_shape = (NUM_SLOTS, size, size, HEADER_WORDS + self._spec.num_local_experts)
        table_words = NUM_SLOTS * size * size * table_shape[-1]
        table_at = line_aligned(signal_bytes(size))
        end = table_at + line_aligned(8 * table_words)
        if not self._calls.has_board:
            self._calls.use(HostBoard(self._collectives))
        memory = HostMemory(self._collectives, end, phase="open shared_memory")

        def words(at: int, shape: tuple[int, ...]) -> list[Tensor]:
            count = torch.Size(shape).numel()
            return [
                block[at : at + 8 * count].view(torch.int64).view(shape) for block in memory.blocks
            ]

        # Of each rank: headers from every rank to every rank.
        self._headers = words(table_at, table_shape)
        self._signals = HostSignals(memory, self._rank, size, bounded)
        self._bounded = bounded
        self._is_open = True

    def dispatch(self, call: DispatchCall) -> Dispatched:
        self._check_open()
        out = super().dispatch(call)
        if not call.flags & BatchFlags.GRAD_ENABLED:
            return out
        # Autograd keeps rows for as long as it likes.
        scales = None if out.rows.scales is None else out.rows.scales.clone()
        return replace(out, rows=replace(out.rows, data=out.rows.data.clone(), scales=scales))

    def redispatch(self, hidden_states: Tensor, route: Route) -> Tensor:
        # Its header says that every rank is done with the rows of the batch before the last.
        return super().redispatch(hidden_states, route).clone()

    def close(self) -> None:
        super().close()
        if self._is_open:
            self._is_open = False
            self._signals.release()
            self._headers = []
        self._rows.free()
        self._sums.free()

    def _exchange_headers(self, header: Tensor, call: DispatchCall) -> Tensor:
        self._bounded.check()
        slot = (self._num_dispatches + 1) % NUM_SLOTS
        for table in self._headers:
            table[slot, self._rank] = header[:, : table.shape[-1]]
        # Who has announced its call has written its counts before, and is done with the rows of
        # the batch before the last.
        announced = super()._exchange_headers(header[:, :HEADER_WORDS], call)
        self._calls.compare(announced.tolist(), call.error)
        # A call that differs leaves the slot to the next one, which writes the same places again.
        self._num_dispatches += 1
        headers = self._headers[self._rank][slot].clone()
        self._table = _table_of(headers)
        received = [sum(rows) for rows in zip(*self._table, strict=True)]
        self._rows.require(max(received) * self._widest_row)
        self._sums.require(max(map(sum, self._table)) * self._widest_sum)
        return headers[:, self._rank].contiguous()

    def _send_rows(
        self,
        write: Callable[[slice, Tensor], None],
        table: RowTable | None,
        send_splits: Sequence[int],
        recv_splits: Sequence[int],
        shape: tuple[int, torch.dtype],
        *,
        phase: str,
    ) -> Tensor:
        assert table is not None, "headers brought it"
        epoch, sent = self._signals.next_epoch(Signal.GOT), 0
        for destination, num_rows in enumerate(send_splits):
            first = sum(rows[destination] for rows in table[: self._rank])
            place = slice(first, first + num_rows)
            if num_rows:
                out = self._rows.rows(destination, epoch, place, *shape)
                write(slice(sent, sent + num_rows), out)
            sent += num_rows
        self._signals.publish(Signal.GOT)
        self._signals.wait(Signal.GOT, phase)
        return self._rows.rows(self._rank, epoch, slice(0, sum(recv_splits)), *shape)

    def _send_home(
        self,
        make: Callable[[slice], Tensor],
        route: CollectiveRoute,
        shape: tuple[int, torch.dtype],
        compared: Pending[None],
        *,
        phase: str,
    ) -> Tensor:
        assert route.table is not None, "headers brought it"
        row_bytes = shape[0] * shape[1].itemsize
        # A refused call leaves the epoch to the next one, which writes the same places again.
        epoch, first = self._signals.coming_epoch(Signal.DONE), 0
        for home, num_rows in enumerate(route.recv_splits):
            # There they lie as they left: by the rank of the experts.
            place = sum(route.table[home][: self._rank])
            out = self._sums.rows(home, epoch, slice(place, place + num_rows), *shape)
            for part in _parts(num_rows, row_bytes):
                out[part] = make(slice(first + part.start, first + part.stop))
            first += num_rows
        compared.wait()
        self._traffic.combine(route.recv_splits, row_bytes)
        self._signals.next_epoch(Signal.DONE)
        self._signals.publish(Signal.DONE)
        self._signals.wait(Signal.DONE, phase)
        return self._sums.rows(self._rank, epoch, slice(0, sum(route.send_splits)), *shape)

    def _begin_call(
        self, kind: CallKind, batch: CallSign, error: EPError | None = None
    ) -> Pending[None]:
        self._check_open()
        return super()._begin_call(kind, batch, error)

    def _check_open(self) -> None:
        if not self._is_open:
            raise HandleError(
                f"{self.name}: the buffer is closed (rank {self._rank} of {self._world_size}); "
                "make a new EPGroup"
            )


def _parts(num_rows: int, row_bytes: int) -> Iterator[slice]:
    """Neighbouring rows, at most _PART_BYTES at once."""
    step = max(_PART_BYTES // row_bytes, 1)
    return (slice(at, min(at + step, num_rows)) for at in range(0, num_rows, step))


def _table_of(headers: Tensor) -> RowTable:
    """Rows from each rank to each rank, from all headers [W, W, words]."""
    return tuple(tuple(rows) for rows in headers[:, :, ROWS].tolist())
