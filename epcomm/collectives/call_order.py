"""Compare which call each rank makes: a header of one size goes before every call.

A rank that makes another call than the others, or the calls of two layers in another order, is
named on every rank before any rows travel. Nobody waits for what never comes, and no transport
meets messages of different lengths. Worked example, two ranks, each header its first words:

    rank 0 dispatches    kind 2, mode 0, buffer 1, dispatcher 1, batch 7, call 7
    rank 1 combines      kind 3, mode 0, buffer 1, dispatcher 1, batch 6, call 7

Both raise HandleError; the next call of both is number 8, so the group goes on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache
from typing import Protocol
from zlib import crc32

import torch
from torch import Tensor

from epcomm.config import Mode
from epcomm.errors import EPError, HandleError, RankNames
from epcomm.protocol import FaultCode, is_passed_on, pack_fault

# Words of a header that must be equal on all ranks: kind, mode, buffer, dispatcher, batch, number,
# size.
_NUM_COMPARED = 7
# All of them: then fault, flags and the rows to come.
FAULT, FLAGS, ROWS = range(_NUM_COMPARED, _NUM_COMPARED + 3)
HEADER_WORDS = _NUM_COMPARED + 3
# Followed by the slot counts of up to 128 experts of the receiving rank; more take a second
# exchange. 128 experts a rank are half of the 256 of the largest models, and with the header they
# make 1096 B, which one Ethernet packet carries.
COUNTS_IN_HEADER = 128
MESSAGE_WORDS = HEADER_WORDS + COUNTS_IN_HEADER
MESSAGE_BYTES = 8 * MESSAGE_WORDS
# Wildcard in place of a number: a rank that refuses a combine does not know the batch.
ANY = -1

# Of a number that stands for a dtype.
_DTYPE_BITS = 16

_MODES = tuple(Mode)


class CallKind(IntEnum):
    """The call that a rank is about to make with all others."""

    RECORDS = 1
    DISPATCH = 2
    COMBINE = 3
    COMBINE_BACKWARD = 4
    DISPATCH_BACKWARD = 5
    REFUSAL = 6

    @property
    def text(self) -> str:
        """The kind in words, such as `backward of combine`, for messages."""
        return _TEXTS[self]

    @property
    def phase(self) -> str:
        """Return the name of the exchange of headers in messages about a timeout."""
        return "dispatch counts" if self is CallKind.DISPATCH else f"{self.text} calls"


_TEXTS = {
    CallKind.RECORDS: "an agreement of all ranks (plan, open_buffer or gather_records)",
    CallKind.DISPATCH: "dispatch",
    CallKind.COMBINE: "combine",
    CallKind.COMBINE_BACKWARD: "backward of combine",
    CallKind.DISPATCH_BACKWARD: "backward of dispatch",
    CallKind.REFUSAL: "a call that it refuses",
}


@dataclass(frozen=True, kw_only=True)
class CallSign:
    """One call, as all ranks must make it.

    buffer, dispatcher: numbers of CallOrder.add_buffer() and add_dispatcher(), 0 for none.
    batch: number of the call that dispatched it; of a dispatch, its own, next_batch.
    size: of the call or its rows, see DispatchCall.size and rows_size(); 0 for none.
    """

    kind: CallKind
    buffer: int = 0
    dispatcher: int = 0
    batch: int = 0
    size: int = 0


@lru_cache(maxsize=64)
def rows_size(num_columns: int, dtype: torch.dtype) -> int:
    """Return the number that stands for rows of so many elements in headers."""
    return num_columns << _DTYPE_BITS | crc32(str(dtype).encode()) & ((1 << _DTYPE_BITS) - 1)


Explain = Callable[[Sequence[CallKind], EPError | None], None]


class HeaderBoard(Protocol):
    """A HeaderBoard carries headers in place of the transport, where there is something faster."""

    def exchange(self, message: Tensor, *, phase: str) -> Tensor:
        """Move row r of [W, words], int64, to rank r; return the rows for this one, by source."""
        ...

    def close(self) -> None:
        """Free it. Local, idempotent."""
        ...


class Transport(Protocol):
    """The part of Collectives that CallOrder needs."""

    world_size: int
    device: torch.device

    @property
    def names(self) -> RankNames:
        """The numbers of the ranks for messages."""
        ...

    def all_to_all(self, send: Tensor, *, phase: str = ...) -> Tensor:
        """Exchange equal parts."""
        ...


class CallOrder:
    """The calls of one rank in a group, numbered alike on all ranks."""

    def __init__(
        self,
        collectives: Transport,
        *,
        whole: CallOrder | None = None,
        counts_in_whole: bool = False,
    ) -> None:
        """Begin without a call, over `collectives`.

        whole: the calls of a group of which these ranks are a part, whose dispatchers call here.
        counts_in_whole: what is called here counts there too.
        """
        self._collectives = collectives
        self._counted_in = whole if counts_in_whole else None
        self._board: HeaderBoard | None = None
        self._number = 0
        # Where the calls of ranks differ: raises what differs, see explain_by().
        self._explain: Explain | None = None
        self._buffers: list[str] = []
        # Places in _MODES.
        self._dispatchers: list[int] = [] if whole is None else whole._dispatchers

    @property
    def world_size(self) -> int:
        """The number of ranks, W."""
        return self._collectives.world_size

    @property
    def next_batch(self) -> int:
        """The number of the next call, equal on all ranks."""
        return self._number + 1

    @property
    def has_board(self) -> bool:
        """Tell whether headers travel over a board and not as rows of the transport."""
        return self._board is not None

    def use(self, board: HeaderBoard) -> None:
        """Send headers over `board` from now on, and close it in the end.

        Collective: yes, between the same calls on all ranks.
        """
        self._board = board

    def explain_by(self, explain: Explain) -> None:
        """Ask `explain` what differs, where ranks make different calls, before an error is raised.

        It is called on every rank with the kinds of all calls and this rank's own error, and may
        exchange records; it raises what it finds.

        Collective: yes, between the same calls on all ranks.
        """
        self._explain = explain

    def close(self) -> None:
        """Close the board, if there is one. Local, idempotent."""
        if self._board is not None:
            self._board.close()
            self._board = None

    def add_buffer(self, name: str) -> int:
        """Return the number of a new buffer. All ranks open the same ones in the same order."""
        self._buffers.append(name)
        return len(self._buffers)

    def add_dispatcher(self, mode: Mode) -> int:
        """Return the number of a new dispatcher, counted as add_buffer() counts buffers."""
        self._dispatchers.append(_MODES.index(mode))
        return len(self._dispatchers)

    def header(self, sign: CallSign, *, flags: int = 0, num_rows: int = 0) -> list[int]:
        """Return the header of this rank's next call, without a fault. Local.

        flags, num_rows: words that may differ between ranks.
        """
        mode = min(sign.dispatcher, 0)
        if sign.dispatcher > 0:
            mode = self._dispatchers[sign.dispatcher - 1]
        who = (int(sign.kind), mode, sign.buffer, sign.dispatcher, sign.batch, self.next_batch)
        return [*who, sign.size, 0, flags, num_rows]

    def message(self, words: Sequence[int], num_words: int = MESSAGE_WORDS) -> Tensor:
        """Return `words`, then zeros, as [W, num_words], int64, on the device. Host sync: none."""
        collectives = self._collectives
        message = torch.zeros(
            collectives.world_size, num_words, dtype=torch.int64, device=collectives.device
        )
        if not words:
            return message
        # The device is named, for models are built with meta as the default one.
        values = torch.tensor(words, device="cpu").to(collectives.device, non_blocking=True)
        message[:, : len(words)] = values
        return message

    def exchange(self, message: Tensor, phase: str) -> Tensor:
        """Send row r of [W, words] to rank r; return the rows for this one, by source.

        Counts the call: what fails on this rank before may still be told in a header.

        Collective: yes; of one size in all calls of the group, but for what a board takes.
        Host sync: as a collective.
        """
        self._count()
        if self._board is not None:
            return self._board.exchange(message, phase=phase)
        return self._collectives.all_to_all(message, phase=phase)

    def _count(self) -> None:
        self._number += 1
        if self._counted_in is not None:
            self._counted_in._count()

    def exchange_headers(
        self,
        sign: CallSign,
        *,
        error: EPError | None = None,
        fault: int = 0,
        flags: int = 0,
        num_rows: int = 0,
        phase: str | None = None,
    ) -> list[list[int]]:
        """Begin a call that has nothing for one rank alone, and return all headers.

        Args:
            sign: the call.
            error: this rank's own fault, which it raises if its call differs as well.
            fault, flags, num_rows: words that may differ.
            phase: the name of the exchange in messages about a timeout; None: as the kind says.

        Collective: yes.   Host sync: yes.
        Raises:
            HandleError: some ranks make another call; on every rank.
        """
        words = self.header(sign, flags=flags, num_rows=num_rows)
        words[FAULT] = fault
        received = self.exchange(self.message(words), phase or sign.kind.phase)
        headers = received[:, :HEADER_WORDS].tolist()
        self.compare(headers, error)
        return headers

    def compare(self, headers: Sequence[Sequence[int]], error: EPError | None = None) -> None:
        """Raise on every rank if some of them make another call: headers by rank.

        Raises:
            HandleError: which rank is where; or `error`, what this rank knows of its own call.
        """
        calls = [tuple(words[:_NUM_COMPARED]) for words in headers]
        if all(call == calls[0] for call in calls):
            return
        if all(len(set(words) - {ANY}) <= 1 for words in zip(*calls, strict=True)):
            return
        if self._explain is not None:
            self._explain([CallKind(call[0]) for call in calls], error)
        was_passed_on = any(is_passed_on(words[FAULT]) for words in headers)
        if error is not None:
            error.was_passed_on |= was_passed_on
            raise error
        problem = HandleError(self._describe(calls))
        fewest = min(calls, key=calls.count)
        rank = self._collectives.names.numbers[calls.index(fewest)]
        problem.fault_word = pack_fault(FaultCode.CALLS, rank)
        problem.was_passed_on = was_passed_on
        raise problem

    def _describe(self, calls: Sequence[tuple[int, ...]]) -> str:
        ranks_of: dict[tuple[int, ...], list[int]] = {}
        for rank, call in enumerate(calls):
            ranks_of.setdefault(call, []).append(rank)
        # The fewest first: it is they who differ.
        groups = sorted(ranks_of.items(), key=lambda group: len(group[1]))
        names = self._collectives.names
        parts = [
            f"{names.describe(ranks)} {'are' if len(ranks) > 1 else 'is'} in {self._name(call)}"
            for call, ranks in groups
        ]
        decoding = [r for r, call in enumerate(calls) if _mode_of(call) is Mode.LOW_LATENCY]
        advice = "call in the same order on all ranks"
        others = [r for r in range(len(calls)) if r not in decoding]
        decodes = ""
        if decoding and others:
            decodes = (
                f"; {names.describe(decoding)} decode{'' if len(decoding) > 1 else 's'}, "
                f"{names.describe(others)} do{'' if len(others) > 1 else 'es'} not"
            )
            advice = "pass the same decode on all ranks, and " + advice
        return (
            f"{CallKind(calls[names.place][0]).text}: {' while '.join(parts)}, call "
            f"{self._number} of the group (this is {names.where}){decodes}; no rows were sent and "
            f"the group is usable; {advice}"
        )

    def _name(self, call: tuple[int, ...]) -> str:
        """Name a call: `combine of dispatcher 2 (low_latency, buffer 2: collective, batch 5)`."""
        kind, _, buffer, dispatcher, batch, _, size = call
        details = []
        if _mode_of(call) is not None:
            details.append(str(_mode_of(call)))
        if buffer > 0:
            details.append(f"buffer {buffer}: {self._buffers[buffer - 1]}")
        if batch > 0 and kind != CallKind.DISPATCH:
            details.append(f"the batch of call {batch}")
        if size > 0 and kind != CallKind.DISPATCH:
            details.append(f"rows of {size >> _DTYPE_BITS} elements")
        name = CallKind(kind).text
        if dispatcher > 0:
            name += f" of dispatcher {dispatcher}"
        return f"{name} ({', '.join(details)})" if details else name


def _mode_of(call: tuple[int, ...]) -> Mode | None:
    return _MODES[call[1]] if call[3] > 0 else None
