"""Compare the calls of all ranks: every call starts with an exchange of headers of a fixed size.

If a rank makes a different call, or calls two layers in a different order, all ranks raise an error
that names it before any rows are sent. So no rank waits for a message that is never sent, and no
transport receives messages of different lengths. Worked example, two ranks, first words of their
headers:

    rank 0 dispatches    kind 2, buffer 1, dispatcher 1, batch 7, call 7
    rank 1 combines      kind 3, buffer 1, dispatcher 1, batch 6, call 7

Both raise HandleError; the next call of both is number 8, so the group stays usable.

A rank checks every word of a header before it uses any. A header can only be wrong if memory or the
network is faulty, or if ranks run different versions of epcomm. The ranks may then disagree on what
follows, so a rank that reads a wrong header ends the waits of all ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, NoReturn, Protocol, TypeVar

import torch
from torch import Tensor

from epcomm import protocol
from epcomm.calls import header
from epcomm.calls.faults import check_gradients, raise_faults
from epcomm.calls.header import MESSAGE_WORDS, NO_BUFFER, CallKind, CallSign
from epcomm.calls.side_stream import StreamTransfers
from epcomm.calls.transfers import ThreadTransfers, Transfers
from epcomm.collectives.base import Closable, Collectives, Scalar
from epcomm.config import Mode
from epcomm.errors import EPError, EPTimeout, HandleError, grouped
from epcomm.records import Pending, Steps

T = TypeVar("T")
# Sends an exception to the other ranks in place of a call.
Report = Callable[[Exception], object]

# The function named in messages about faults; for other kinds, the name of the exchange.
_FUNCTIONS = {
    CallKind.DISPATCH: "dispatch",
    CallKind.COMBINE: "combine",
    CallKind.COMBINE_BACKWARD: "combine",
    CallKind.DISPATCH_BACKWARD: "combine",
}


class HeaderBoard(Closable, Protocol):
    """An exchange of headers that is faster than the transport."""

    def exchange(self, message: Tensor, *, phase: str) -> Tensor:
        """Send row r of [W, words], int64, to rank r; return the received rows, by source."""
        ...


class Calls:
    """The calls of one rank in a group, with numbers that are equal on all ranks."""

    def __init__(
        self, collectives: Collectives, *, whole: Calls | None = None, counts_in_whole: bool = False
    ) -> None:
        """Start without calls, over `collectives`.

        whole: the calls of the whole group, if these ranks are a part of one; its dispatchers make
            the calls.
        counts_in_whole: calls of this part count as calls of the whole group too.
        """
        self.collectives = collectives
        collectives.calls = self
        self.world_size = collectives.world_size
        # The numbers of the ranks for messages; in a part of a group, those in the group.
        self.names = collectives.names
        # The host waits in collectives anyway, so comparing calls adds no host sync.
        self.waits = collectives.bounded is not None
        self._counted_in = whole if counts_in_whole else None
        self._board: HeaderBoard | None = None
        # Runs begun calls; None if the transport cannot, and in a part of a group.
        self.transfers: Transfers[Any] | None = None
        self._has_begun = False
        # Why the transport cannot run begun calls; '' if it can, and before open_transfers().
        self.cannot_begin = ""
        # The number of the next call, equal on all ranks.
        self.next_batch = 1
        self._buffers: list[str] = []
        # The mode of each dispatcher.
        self._dispatchers: list[Mode] = [] if whole is None else whole._dispatchers
        self._parts: dict[tuple[tuple[int, ...], ...], Calls] = {}

    @classmethod
    def of(cls, collectives: Collectives) -> Calls:
        """Return the calls over `collectives`, shared by all groups on them. Local."""
        found = collectives.calls
        return found if isinstance(found, Calls) else cls(collectives)

    def use_board(self, make: Callable[[], HeaderBoard]) -> None:
        """Exchange headers over the board that `make` returns, which close() closes.

        Does nothing if there is a board.   Collective: yes, between the same calls on all ranks.
        """
        self._board = self._board or make()

    def open_transfers(self) -> None:
        """Make what begun calls need: connections and a thread, if the transport can have them.

        Collective: yes, the first time.   Host sync: yes.
        """
        if self.transfers is None and not self.cannot_begin and self.world_size > 1:
            self.cannot_begin = self.collectives.separate()
            if not self.cannot_begin:
                where, device = self.names.where, self.collectives.device
                if device.type == "cuda":
                    self.transfers = StreamTransfers(where, device, self.collectives.streams)
                else:
                    self.transfers = ThreadTransfers(where)

    def settle(self) -> None:
        """Wait for the calls begun so far, before another call of the group. Local."""
        if self.transfers is not None and self.transfers.last is not None:
            self.transfers.settle()

    def take_unfinished(self) -> HandleError | None:
        """Return the error of a call that was begun and never waited for, once, or None. Local."""
        if self.transfers is None or self.transfers.unfinished is None:
            return None
        return self.transfers.take_unfinished()

    def begin(
        self,
        make: Callable[[], Steps[T]],
        report: Report | None = None,
        *,
        name: str,
        must_wait: bool = True,
    ) -> Pending[T]:
        """Begin a call, after the calls begun before; see announced() and Transfers.begin()."""
        assert self.transfers is not None, "only a group with transfers begins calls"
        if not self._has_begun:
            self._has_begun = True
            self.collectives.separate_begun()
        announced = partial(self._announced_steps, make, report)
        return self.transfers.begin(announced, name, must_wait=must_wait)

    def _announced_steps(self, make: Callable[[], Steps[T]], report: Report | None) -> Steps[T]:
        """Make a begun call; report an exception that precedes its header."""
        number = self.next_batch
        try:
            return (yield from make())
        except Exception as problem:
            if self.next_batch == number:
                self._send_report(report, problem)
            raise

    def split(
        self, parts: Sequence[Sequence[int]], *, scope: str, counts_calls: bool = False
    ) -> Calls:
        """Return the calls of the part that contains this rank.

        Args:
            parts, scope: see Collectives.split().
            counts_calls: calls of the part count as calls of the whole group too.

        Collective: yes, the first time for these parts.   Host sync: yes.
        Lifetime: until close(); the same parts return the same object.
        """
        key = tuple(map(tuple, parts))
        if key not in self._parts:
            if self.waits:
                self._records_phase("dividing the ranks")
            found = self.collectives.split(parts, scope=scope)
            self._parts[key] = Calls(found, whole=self, counts_in_whole=counts_calls)
        return self._parts[key]

    def close(self) -> None:
        """Close the board and the parts; called by the collectives. Local, idempotent."""
        if self.transfers is not None:
            self.transfers.close()
        self._parts.clear()
        if self._board is not None:
            self._board.close()
            self._board = None

    def add_buffer(self, name: str) -> int:
        """Return the number of a new buffer. All ranks open the same buffers in the same order."""
        self._buffers.append(name)
        return len(self._buffers)

    def add_dispatcher(self, mode: Mode) -> int:
        """Return the number of a new dispatcher. All ranks make the same ones in the same order."""
        self._dispatchers.append(mode)
        return len(self._dispatchers)

    def header(
        self, kind: CallKind, sign: CallSign, *, flags: int = 0, num_rows: int = 0
    ) -> list[int]:
        """Return the header of this rank's next call, with FAULT and CHECK 0. Local.

        flags, num_rows: the words that may differ between ranks.
        """
        who = (int(kind), 0, sign.buffer, sign.dispatcher, sign.batch, self.next_batch)
        return [*who, sign.size, 0, flags, num_rows, 0]

    def message(self, words: Sequence[int], num_words: int = MESSAGE_WORDS) -> Tensor:
        """Return `words` and then zeros, [W, num_words], int64, on the device. Host sync: none."""
        device = self.collectives.device
        message = torch.zeros(self.world_size, num_words, dtype=torch.int64, device=device)
        if words:
            # Models may be built with meta as the default device, so name the device.
            values = torch.tensor(words, device="cpu").to(device, non_blocking=True)
            message[:, : len(words)] = values
        return message

    def exchange(self, message: Tensor, phase: str) -> Tensor:
        """Send row r of [W, words] to rank r; return the received rows, by source.

        Counts the call. A failure on this rank before this can still be reported in a header.

        Collective: yes; all calls of the group use the same size.
        Host sync: as in the collectives.
        """
        self.next_batch += 1
        if self._counted_in is not None:
            self._counted_in.next_batch += 1
        if self._board is not None:
            return self._board.exchange(message, phase=phase)
        return self.collectives.all_to_all(message, phase=phase)

    def announce(
        self,
        kind: CallKind,
        sign: CallSign = NO_BUFFER,
        *,
        size: int | None = None,
        error: EPError | None = None,
        fault: int | None = None,
        flags: int = 0,
        num_rows: int = 0,
        expert_names: Sequence[str] = (),
        phase: str | None = None,
    ) -> list[list[int]]:
        """Send the same header to all ranks, compare the calls, and return all headers.

        The caller does its local work first: if that fails, no rank waits for its rows, and it
        reports the failure in its next header. A rank that refuses the call passes its error; then
        no rank sends rows.

        Args:
            kind, sign: the call.
            size: rows_size() of its rows; None: the size of the sign.
            error: the reason why this rank refuses the call, or None.
            fault: the fault word of the refusal; None: the fault word of `error`.
            flags: BatchFlags of this rank's batch, which the ranks compare.
            num_rows: a word that may differ between ranks.
            expert_names: names of the expert tensors, in the order of their bits in the flags.
            phase: the name of the exchange in messages about a timeout; None: kind.phase.

        Collective: yes.   Host sync: yes.
        Raises:
            HandleError: some ranks make a different call; on every rank.
            ConfigError: see check_gradients(); on every rank.
            EPError: some rank refuses; on every rank.
        """
        if fault is None:
            in_combine = kind is not CallKind.DISPATCH
            fault = 0 if error is None else protocol.fault_word(error, in_combine=in_combine)
        words = self.header(kind, sign, flags=flags, num_rows=num_rows)
        words[header.FAULT] = fault
        if size is not None:
            words[header.SIZE] = size
        words[header.CHECK] = -sum(words)
        received = self.exchange(self.message(words), phase or kind.phase)
        headers = received[:, : header.HEADER_WORDS].tolist()
        if not fault and headers.count(words) == self.world_size:
            # The usual case, in which all headers are this one.
            return headers
        self.compare(headers, received, error)
        codes = [words[header.FAULT] for words in headers]
        if any(codes):
            self.check_others()
            function = _FUNCTIONS.get(kind) or phase or kind.text
            raise_faults(codes, self.names, error, function=function)
        found = [words[header.FLAGS] for words in headers]
        if len(set(found)) > 1:
            check_gradients(found, self.names, expert_names)
        return headers

    def announced(self, call: Callable[[], T], report: Report | None, *, settles: bool = True) -> T:
        """Return `call()`; report an exception that precedes the header of the call.

        Args:
            call: makes the call, or begins it.
            report: None: the other ranks do not wait for this one, because they know of the
                exception, or because the host sends no header in this call.
            settles: first wait for the calls begun before; False if `call` begins one.
        """
        if settles:
            self.settle()
        number = self.next_batch
        try:
            return call()
        except Exception as problem:
            # The thread may have counted calls begun before, but `call` has counted none.
            if self.next_batch == number or not settles:
                self._send_report(report, problem)
            raise

    @staticmethod
    def _send_report(report: Report | None, problem: Exception) -> None:
        # A device that has failed may be unable to send the report too.
        with suppress(EPError, RuntimeError):
            if report is not None:
                report(problem)

    def gather_records(
        self, record: Mapping[str, Scalar], *, phase: str = "gather_records"
    ) -> list[dict[str, Scalar]]:
        """Compare the calls, then return the records of all ranks, by rank.

        Collective: yes.   Host sync: yes.
        Raises:
            HandleError: some ranks make a different call; on every rank.
        """
        return self.collectives.gather_records(record, phase=self._records_phase(phase))

    def agree(
        self,
        record: Mapping[str, Scalar],
        *,
        what: str,
        findings: Mapping[str, Scalar] | None = None,
    ) -> list[dict[str, Scalar]]:
        """Compare the calls, then compare a record over all ranks; see Collectives.agree()."""
        return self.collectives.agree(
            record, what=what, findings=findings, phase=self._records_phase(what)
        )

    def _records_phase(self, phase: str) -> str:
        """Compare calls if the host waits; return the name of the exchange that follows."""
        if not self.waits:
            self.settle()
            return phase
        self.announce_to_parts(CallKind.RECORDS, phase=phase)
        return f"{phase}, records"

    def announce_to_parts(self, kind: CallKind, sign: CallSign = NO_BUFFER, *, phase: str) -> None:
        """Announce a call of the whole group to the ranks of each part first.

        Other ranks may be in a call of a buffer that uses the parts, and wait for this rank there.

        Collective: yes.   Host sync: yes.
        Raises:
            HandleError: some ranks make a different call; on every rank.
        """
        self.settle()
        problem: EPError | None = None
        for part in self._parts.values():
            # Relay the fault of one part to the next, as a buffer made of parts does.
            try:
                fault = protocol.fault_word(problem)
                part.announce(kind, sign, fault=fault, phase=phase + part.collectives.scope)
            except EPTimeout:
                raise
            except EPError as error:
                problem = problem or error
        if problem is not None:
            raise problem
        self.announce(kind, sign, phase=phase)

    def check_words(
        self, headers: Sequence[Sequence[int]], messages: Tensor | Sequence[Sequence[int]]
    ) -> bool:
        """Return whether all ranks make the same call; raise if a header is invalid.

        headers: the headers, by rank.
        messages: [W, words], the whole messages, which start with `headers`; read only if the sum
            of a header is not zero.

        Raises:
            EPError: a header is invalid; names its rank and word. The group becomes unusable, see
                reject().
        """
        first, are_equal = headers[0], True
        who = (first[header.KIND], *first[header.BUFFER : header.FAULT])
        for rank, words in enumerate(headers):
            is_equal = (words[header.KIND], *words[header.BUFFER : header.FAULT]) == who
            are_equal &= is_equal
            is_usual = (
                not words[header.FAULT]
                and 0 <= words[header.FLAGS] <= protocol.MAX_FLAGS
                and words[header.ROWS] >= 0
            )
            if not (is_equal and is_usual):
                self._check_words_apart(headers)
            if not sum(words) % 2**64:
                continue
            # A rank in a different call may have sent more words.
            total = sum(map(int, messages[rank])) % 2**64
            if total:
                shown = ", ".join(map(str, words[: header.HEADER_WORDS]))
                self.reject(
                    rank,
                    f"words that add up to {total}, expected 0: {shown} of kind, check, buffer, "
                    "dispatcher, batch, number, size, fault, flags and rows, or a count",
                )
        return are_equal

    def _check_words_apart(self, headers: Sequence[Sequence[int]]) -> None:
        """Raise if a header is invalid for the current call, word by word; see check_words()."""
        number = headers[self.names.place][header.NUMBER]
        for rank, words in enumerate(headers):
            problem = self._wrong_word(words, number)
            if problem is not None:
                self.reject(rank, problem)

    def _wrong_word(self, words: Sequence[int], number: int) -> str | None:
        """Return what is wrong with the first invalid word of call `number`, or None."""
        most = (
            ("kind", header.KIND, 1, len(CallKind)),
            ("buffer", header.BUFFER, header.ANY, len(self._buffers)),
            ("dispatcher", header.DISPATCHER, header.ANY, len(self._dispatchers)),
            ("batch", header.BATCH, header.ANY, self.next_batch - 1),
            # next_batch may be larger by now, because growing memory makes calls too.
            ("number", header.NUMBER, number, number),
            ("size", header.SIZE, header.ANY, 2**63 - 1),
            ("flags", header.FLAGS, 0, protocol.MAX_FLAGS),
            ("rows", header.ROWS, 0, 2**63 - 1),
        )
        for name, place, least, largest in most:
            if not least <= words[place] <= largest:
                return f"{name} {words[place]}, expected {least} to {largest}"
        if not protocol.is_fault_word(words[header.FAULT], self.names.world_size):
            return f"fault {words[header.FAULT]}, expected a FaultCode and a rank of the group"
        return None

    def reject(self, rank: int, problem: str) -> NoReturn:
        """Raise an error for an invalid header of `rank` (a position), and end this group.

        No later call is safe, because this rank does not know which rows the others will send. If
        the host waits in collectives, later calls raise the same error, and ranks that wait for
        this one raise EPTimeout with the reason. Over NCCL they wait until the process group times
        out.

        problem: the invalid word, its value and the expected values.

        Raises:
            EPError: always.
        """
        names = self.names
        error = EPError(
            f"call {self.next_batch - 1} of the group: the header of {names.describe([rank])} has "
            f"{problem} (this is {names.where}); check that all ranks run the same version of "
            "epcomm, and the memory and network of the rank named, then make an EPGroup over a new "
            "process group or communicator"
        )
        if self.collectives.bounded is not None:
            self.collectives.bounded.fail(error)
        raise error

    def compare(
        self, headers: Sequence[Sequence[int]], messages: Tensor, error: EPError | None = None
    ) -> None:
        """Raise on every rank if ranks make different calls.

        headers, messages: see check_words().

        Raises:
            HandleError: the call of each rank. If `error` is given, it is raised instead.
            EPError: a header that is wrong in itself, see check_words().
        """
        if self.check_words(headers, messages):
            return
        calls = [(words[header.KIND], *words[header.BUFFER : header.FAULT]) for words in headers]
        if all(len(set(words) - {header.ANY}) <= 1 for words in zip(*calls, strict=True)):
            return
        was_passed_on = any(protocol.is_passed_on(words[header.FAULT]) for words in headers)
        if error is not None:
            error.was_passed_on |= was_passed_on
            raise error
        self.check_others()
        problem = HandleError(self._describe(calls))
        fewest = min(calls, key=calls.count)
        rank = self.names.numbers[calls.index(fewest)]
        problem.fault_word = protocol.pack_fault(protocol.FaultCode.CALLS, rank)
        problem.was_passed_on = was_passed_on
        raise problem

    def check_others(self) -> None:
        """Raise EPTimeout if others have given up: the group is then unusable. Local.

        Called before an error that all ranks raise, which would leave the group usable.
        """
        if self.collectives.bounded is not None:
            self.collectives.bounded.check_others()

    def _describe(self, calls: Sequence[tuple[int, ...]]) -> str:
        ranks_of = grouped((call, rank) for rank, call in enumerate(calls))
        # The smallest group first, because it is the likely culprit.
        groups = sorted(ranks_of.items(), key=lambda group: len(group[1]))
        names = self.names
        parts = [
            f"{names.describe(ranks)} {'are' if len(ranks) > 1 else 'is'} in {self._name(call)}"
            for call, ranks in groups
        ]
        decoding = [r for r, c in enumerate(calls) if self._mode_of(c[2]) is Mode.LOW_LATENCY]
        advice = "call in the same order on all ranks"
        others = [r for r in range(len(calls)) if r not in decoding]
        decodes = ""
        if decoding and others:
            decodes = (
                f"; {names.describe(decoding)} decode{'' if len(decoding) > 1 else 's'}, "
                f"{names.describe(others)} do{'' if len(others) > 1 else 'es'} not"
            )
            advice = "pass the same decode on all ranks, and " + advice
        if any(call[0] == CallKind.PARAMETERS for call in calls):
            advice += ", or call to_local() if one rank needs a value of only its experts"
        return (
            f"{CallKind(calls[names.place][0]).text}: {' while '.join(parts)}, call "
            f"{self.next_batch - 1} of the group (this is {names.where}){decodes}; no rows were "
            f"sent and the group is usable; {advice}"
        )

    def _name(self, call: tuple[int, ...]) -> str:
        """Return a call in words: `combine of dispatcher 2 (low_latency, the batch of call 5)`."""
        kind, buffer, dispatcher, batch, _, size = call
        if kind == CallKind.PARAMETERS:
            return f"{header.operation_of(size)} of an expert parameter"
        mode, details = self._mode_of(dispatcher), []
        if mode is not None:
            details.append(str(mode))
        if buffer > 0:
            details.append(f"buffer {buffer}: {self._buffers[buffer - 1]}")
        if batch > 0 and kind != CallKind.DISPATCH:
            details.append(f"the batch of call {batch}")
        if size > 0 and kind == CallKind.COMBINE_BACKWARD:
            details.append(f"rows of {size >> header.DTYPE_BITS} elements")
        name = CallKind(kind).text
        if dispatcher > 0:
            name += f" of dispatcher {dispatcher}"
        return f"{name} ({', '.join(details)})" if details else name

    def _mode_of(self, dispatcher: int) -> Mode | None:
        return self._dispatchers[dispatcher - 1] if dispatcher > 0 else None
