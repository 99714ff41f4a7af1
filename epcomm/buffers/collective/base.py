"""Share memory for rows, and the comparison of calls, among the buffers over plain collectives."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor

from epcomm.buffers.base import DispatchCall
from epcomm.buffers.collective.scratch import Scratch
from epcomm.buffers.counts import Counts, CountsMessage, read_counts
from epcomm.buffers.faults import check_gradients, raise_faults
from epcomm.buffers.row_layout import RowLayout
from epcomm.buffers.traffic import BufferTraffic, TrafficMeter
from epcomm.collectives.base import Collectives
from epcomm.collectives.call_order import (
    ANY,
    FAULT,
    FLAGS,
    HEADER_WORDS,
    ROWS,
    CallKind,
    CallSign,
    rows_size,
)
from epcomm.errors import EPError
from epcomm.ops.select import row_ops_of
from epcomm.platforms.machine import Machine
from epcomm.protocol import fault_word
from epcomm.spec import Availability, BufferCaps, BufferSpec
from epcomm.types import Layout, WireDtype, WireFormat

# The capabilities that every buffer over collectives has.
COLLECTIVE_CAPS = BufferCaps(
    layout=Layout.ROWS,
    trainable=True,
    ordered=True,
    wire_dtypes=frozenset(WireDtype),
)


class OverCollectives:
    """The base of buffers that need nothing but `Collectives`, and serve wherever a group does."""

    name: ClassVar[str]
    # See Buffer.
    counts_calls: bool
    # See read_counts().
    _rows_have_slots: ClassVar[bool] = True

    @classmethod
    def probe(cls, machine: Machine) -> Availability:
        return Availability(ok=True)

    def __init__(self, collectives: Collectives, spec: BufferSpec) -> None:
        self._collectives = collectives
        self._spec = spec
        self._traffic = TrafficMeter(collectives.rank, spec.hosts)
        self._waits = collectives.bounded is not None
        self._calls = collectives.calls
        self._number = self._calls.add_buffer(self.name)
        # Where the host does not wait in collectives, a header of its own would make it wait.
        self._compares_calls = self._waits or spec.compares_calls
        self.counts_calls |= self._compares_calls
        # Headers have one size in every call, and the rest of the counts a message of its own,
        # where two ranks in different calls would break the transport.
        self._has_rest = self._waits
        self._row_ops = row_ops_of(collectives.device)
        self._sent = Scratch(collectives.device, keeps=self._waits)
        self._returned = Scratch(collectives.device, keeps=self._waits)
        self._dispatch_layout = self._row_layout(spec.dispatch_format, has_ids=True)
        self._scalar_layouts: dict[torch.dtype, RowLayout] = {}

    def prepare(self) -> None:
        """Allocate nothing: sizes are known only with the calls."""

    def refuse_combine(self, error: EPError) -> None:
        # This rank does not know which batch the other ranks combine, nor through which buffer.
        anything = CallSign(kind=CallKind.COMBINE, buffer=ANY, dispatcher=ANY, batch=ANY, size=ANY)
        self._compare_call(CallKind.COMBINE, anything, error)

    def _new_batch(self, call: DispatchCall) -> CallSign:
        """Return the sign that all ranks give this dispatch and the calls along its plan."""
        return CallSign(
            kind=CallKind.DISPATCH,
            buffer=self._number,
            dispatcher=call.dispatcher,
            batch=self._calls.next_batch,
            size=call.size,
        )

    def _compare_rows(self, kind: CallKind, batch: CallSign, rows: Tensor) -> None:
        """Compare as _compare_call() does, and the columns and dtype of rows that will travel."""
        if self._compares_calls:
            size = rows_size(rows.shape[1], rows.dtype)
            self._compare_call(kind, replace(batch, size=size))

    def _compare_call(
        self,
        kind: CallKind,
        batch: CallSign,
        error: EPError | None = None,
        *,
        call: DispatchCall | None = None,
    ) -> None:
        """Tell all ranks which call this rank makes, and whether it refuses the call.

        Local work comes before: where it fails, no rank waits for rows of this rank, and the header
        of its next call tells the others. These headers are not counted as traffic.

        Args:
            kind: kind of the call.
            batch: sign of the batch that the call belongs to.
            error: why this rank refuses to combine.
            call: the dispatch whose flags are compared; None where others carry them.

        Raises:
            HandleError: some ranks make another call; on every rank.
            ConfigError: see check_gradients(); on every rank.
            HandleError, ShapeError: some rank refuses; on every rank.
        """
        if not self._compares_calls:
            return
        fault = fault_word(error, in_combine=kind is not CallKind.DISPATCH)
        mine = 0 if call is None else int(call.flags)
        headers = self._calls.exchange_headers(
            replace(batch, kind=kind), error=error, fault=fault, flags=mine
        )
        codes = [words[FAULT] for words in headers]
        function = "dispatch" if kind is CallKind.DISPATCH else "combine"
        names = self._collectives.names
        raise_faults(codes, names, error, function=function)
        if call is not None and any(flags := [words[FLAGS] for words in headers]):
            check_gradients(flags, names, call.expert_names)

    def _tell_counts(
        self,
        call: DispatchCall,
        message: CountsMessage,
        *,
        meanwhile: Callable[[], None] | None = None,
    ) -> tuple[Counts, tuple[int, ...]]:
        """Exchange row and slot counts: the only host sync of a dispatch.

        Args:
            call: this rank's part of the dispatch.
            message: for each rank.
            meanwhile: launches work that needs no answer; the device does it while the host reads.

        Returns: the counts that this rank will receive, and the number of rows for each rank.
        """
        self._traffic.control([1] * self._collectives.world_size, message.row_bytes)
        received = self._exchange_headers(message.header, call)
        end = HEADER_WORDS + self._spec.num_local_experts - message.rest.shape[1]
        both = torch.stack([message.header[:, :end], received[:, :end]])
        read = both.tolist if self._row_ops is None else self._row_ops.start_read(both)
        if meanwhile is not None:
            meanwhile()
        sent, received_headers = read()
        has_rest = message.rest.numel() > 0
        self._calls.compare(received_headers, received, call.error)
        slots = received[:, HEADER_WORDS:end]
        if has_rest:
            # CHECK excludes these counts, because a rank in a different call does not send them.
            # read_counts() rejects counts that are out of range.
            rest = self._collectives.all_to_all(message.rest, phase="dispatch counts")
            slots = torch.cat([slots, rest], dim=1)
            received_headers = [
                [*words, *more] for words, more in zip(received_headers, rest.tolist(), strict=True)
            ]
        found = read_counts(
            received_headers,
            slots,
            call,
            self._spec,
            self._calls,
            rows_have_slots=self._rows_have_slots,
        )
        return found, tuple(words[ROWS] for words in sent)

    def _exchange_headers(self, header: Tensor, call: DispatchCall) -> Tensor:
        """Send header row r of [W, words] to rank r, and return the rows from all ranks."""
        return self._calls.exchange(header, CallKind.DISPATCH.phase)

    def traffic(self) -> BufferTraffic:
        return self._traffic.snapshot()

    def check(self) -> None:
        """Do nothing: the calls raise all faults themselves."""

    def close(self) -> None:
        self._sent.free()
        self._returned.free()

    @property
    def _num_experts(self) -> int:
        return self._spec.num_local_experts * self._collectives.world_size

    @property
    def _first_expert(self) -> int:
        return self._spec.num_local_experts * self._collectives.rank

    def _scalar_layout(self, dtype: torch.dtype) -> RowLayout:
        """Return the layout of the rows of a combine that bring scalars of `dtype` along."""
        layout = self._scalar_layouts.get(dtype)
        if layout is None:
            layout = self._row_layout(WireFormat.of(dtype), has_ids=False)
            self._scalar_layouts[dtype] = layout
        return layout

    def _row_layout(self, wire: WireFormat, *, has_ids: bool) -> RowLayout:
        return RowLayout(
            hidden_size=self._spec.hidden_size,
            top_k=self._spec.top_k,
            format=wire,
            has_ids=has_ids,
        )


def row_bytes_of(rows: Tensor) -> int:
    """Return the bytes of one row of a matrix."""
    return rows.shape[1] * rows.element_size()
