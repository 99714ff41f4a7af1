import random
import re
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from epcomm import EPError, EPGroup, EPTimeout, HandleError, ShapeError, TopKOutput
from epcomm.buffers.base import Buffer
from epcomm.buffers.collective.all_gather import AllGatherBuffer
from epcomm.buffers.collective.all_to_all import CollectiveBuffer
from epcomm.buffers.collective.all_to_all_static import StaticCollectiveBuffer
from epcomm.buffers.collective.replicated import ReplicatedBuffer
from epcomm.buffers.shared_memory.buffer import HostMover
from epcomm.calls.call import DispatchCall
from epcomm.calls.counts import guard_ids
from epcomm.calls.faults import DeviceFaults, pack_header
from epcomm.calls.header import CHECK, FAULT, FLAGS, HEADER_WORDS, ROWS
from epcomm.calls.order import Calls
from epcomm.collectives.base import Collectives, Splits
from epcomm.collectives.bounded import BoundedWait, FailureBoard
from epcomm.errors import RankNames
from epcomm.protocol import BatchFlags, FaultCode, pack_fault, unpack_status
from epcomm.types import WireFormat
from tests.cases.playing import FAULTY, KINDS, SPEC, H, K, M, identity, open_dispatcher
from tests.cases.specs import buffer_spec


class RowsWereSentError(Exception):
    """The header was accepted, although a word was wrong."""


class Paper(FailureBoard):
    """A failure board of a single rank."""

    texts: Sequence[str] = ()

    def post(self, text: str) -> None:
        self.texts = [*self.texts, text]

    def read(self) -> Mapping[int, str]:
        return {}

    def last_known(self) -> Mapping[int, str]:
        return {}


class Mirror(Collectives):
    """The collectives of rank 0 of 2; rank 1 sends the headers of rank 0 with changed words.

    words: the changed words of rank 1, by their index in the one or two messages.
    is_sealed: rank 1 has computed CHECK over the changed words, so the sum is right.
    """

    rank, world_size, device = 0, 2, torch.device("cpu")
    num_seen = 0

    def __init__(self, words: Mapping[int, int], *, is_sealed: bool = False) -> None:
        self.words, self.is_sealed, self.paper = words, is_sealed, Paper()
        self.bounded = BoundedWait(self.paper, rank=0, world_size=2)
        self.bounded.timeout_s = 1.0

    def _all_to_all(
        self, recv: Tensor, send: Tensor, recv_splits: Splits, send_splits: Splits, phase: str
    ) -> None:
        if send_splits is not None or send.dtype is not torch.int64:
            raise RowsWereSentError
        received, first = recv.copy_(send[:1]), self.num_seen
        self.num_seen += send.shape[1]
        for place, value in self.words.items():
            if first <= place < self.num_seen:
                if self.is_sealed:
                    received[1, CHECK] += received[1, place - first] - value
                received[1, place - first] = value

    def _all_gather(self, recv: Tensor, tensor: Tensor, phase: str) -> None:
        raise RowsWereSentError


BUFFERS: dict[str, type[Buffer]] = {
    "exact": CollectiveBuffer,
    "static": StaticCollectiveBuffer,
    "gathered": AllGatherBuffer,
    "replicated": ReplicatedBuffer,
}
# The words after the header are counts: the slots of these experts are read.
COUNTED = ("exact", "gathered")
L = 4


def dispatch_with(
    kind: str, words: Mapping[int, int], *, is_sealed: bool = False, num_local: int = L
) -> Mirror:
    """Dispatch four tokens, with `words` in the header of rank 1."""
    mirror = Mirror(words, is_sealed=is_sealed)
    spec = buffer_spec(8, 2, num_local, 6, rows=WireFormat.of(torch.float32))
    calls = Calls(mirror)
    buffer = BUFFERS[kind](calls, spec)
    buffer.prepare()
    call = DispatchCall(
        hidden_states=torch.ones(4, 8),
        topk_ids=torch.tensor([[0, 1], [2, num_local], [3, num_local + 1], [1, 2]]),
        topk_weights=torch.ones(4, 2),
        flags=BatchFlags.NONE,
        dispatcher=calls.add_dispatcher(KINDS["collective"].dispatcher.mode),
    )
    with suppress(RowsWereSentError):
        buffer.dispatch(call)
    return mirror


def word_of(kind: str, place: int) -> int:
    seen: list[Tensor] = []

    class Spy(Mirror):
        def all_to_all(self, send: Tensor, **_: object) -> Tensor:
            seen.append(send)
            raise RowsWereSentError

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(f"{__name__}.Mirror", Spy)
        dispatch_with(kind, {})
    return int(seen[0][0, place])


@pytest.mark.parametrize("kind", BUFFERS)
def test_one_changed_bit_of_any_word_is_found(kind: str) -> None:
    draw = random.Random(33)
    dispatch_with(kind, {})
    for place in range(HEADER_WORDS + (L if kind in COUNTED else 0)):
        right = word_of(kind, place)
        for bit in {0, 1, 2, *draw.sample(range(3, 63), 4), 63}:
            changed = ((right ^ 1 << bit) + 2**63) % 2**64 - 2**63
            with pytest.raises(EPError, match=r"the header of rank 1 has .*this is rank 0 of 2"):
                dispatch_with(kind, {place: changed})


def test_counts_of_many_experts_are_checked_in_both_exchanges() -> None:
    num_local = 200
    dispatch_with("exact", {}, num_local=num_local)
    with pytest.raises(EPError, match="the header of rank 1 has words that add up to"):
        dispatch_with("exact", {HEADER_WORDS + 127: 1}, num_local=num_local)
    with pytest.raises(EPError, match="the header of rank 1 has slots"):
        dispatch_with("exact", {HEADER_WORDS + 130: 2**40}, num_local=num_local)


# Words that a rank itself may have set wrongly, so that their sum is correct.
WRONG = [
    ({0: 77}, r"kind 77, expected 1 to 6"),
    ({3: 2**62}, rf"dispatcher {2**62}, expected -1 to 1"),
    ({5: 3}, r"number 3, expected 1 to 1"),
    ({6: -2}, r"size -2, expected -1 to"),
    ({FAULT: 2**40}, rf"fault {2**40}, expected a FaultCode and a rank"),
    ({FAULT: 3 << 8 | 1 << 10}, r"fault \d+, expected a FaultCode and a rank"),
    ({FLAGS: -1}, r"flags -1, expected 0 to"),
    ({ROWS: -1}, r"rows -1, expected 0 to"),
]
WRONG_COUNTS = [
    ({ROWS: 7}, r"rows 7, expected at most max_tokens_per_rank = 6"),
    ({ROWS: 1}, r"slots \[1, 2, 2, 1\], expected [01] to 2 for 1 rows"),
    ({HEADER_WORDS: -1}, r"slots \[-1, 2, 2, 1\], expected"),
    ({HEADER_WORDS + 1: 2**40}, r"slots \[1, 1099511627776, 2, 1\], expected"),
]


@pytest.mark.parametrize("kind", BUFFERS)
def test_a_word_that_its_rank_made_wrong_is_named(kind: str) -> None:
    for words, text in WRONG + (WRONG_COUNTS if kind in COUNTED else []):
        with pytest.raises(EPError, match=f"the header of rank 1 has {text}"):
            dispatch_with(kind, words, is_sealed=True)


def test_rows_without_slots_are_found_where_each_row_has_one() -> None:
    few = dict.fromkeys(range(HEADER_WORDS, HEADER_WORDS + L), 0)
    with pytest.raises(EPError, match=r"slots \[0, 0, 0, 0\], expected 4 to 8 for 4 rows"):
        dispatch_with("exact", few, is_sealed=True)
    dispatch_with("gathered", few, is_sealed=True)


@pytest.mark.parametrize("byte", [15, 16, -1, 1 | 3 << 4, 2**40])
def test_a_status_from_the_device_that_is_no_fault_is_named(byte: int) -> None:
    faults = DeviceFaults(RankNames.of_all(0, 2), torch.device("cpu"))
    faults.record_combine(torch.tensor([0, byte]), None)
    with pytest.raises(EPError, match=rf"status of rank 1 has fault {byte}, expected a FaultCode"):
        faults.check(8)
    faults.check(8)


@dataclass(frozen=True)
class Flip:
    """A change of one word that rank 0 receives from rank 1.

    number: index of the header exchange, 0 for dispatch and 1 for combine.
    """

    number: int
    place: int


def flip_word(patched: pytest.MonkeyPatch, flip: Flip) -> None:
    """Change one word of rank 1 that rank 0 receives, once."""
    exchange, numbers = Calls.exchange, iter(range(100))

    def changing(self: Calls, message: Tensor, phase: str) -> Tensor:
        received = exchange(self, message, phase)
        if next(numbers) == flip.number:
            received[1, flip.place] ^= 1 << 1
        return received

    patched.setattr(Calls, "exchange", changing)


def flip_table(patched: pytest.MonkeyPatch) -> None:
    """Change the number of rows from rank 1 that rank 0 reads in the headers of all ranks."""
    table_of = HostMover._table_of

    def changing(self: HostMover, headers: Tensor) -> object:
        headers[1, 0, ROWS] ^= 1
        return table_of(self, headers)

    patched.setattr(HostMover, "_table_of", changing)


CASES: list[tuple[str, Flip | None]] = [
    *((name, Flip(0, ROWS)) for name in KINDS),
    ("collective", Flip(1, FAULT)),
    ("shared_memory", Flip(1, 5)),
    ("shared_memory", None),
]


@pytest.mark.ranks(2)
@pytest.mark.parametrize(("name", "flip"), CASES, ids=str)
def test_all_ranks_raise_and_none_ends_its_process(
    name: str, flip: Flip | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    process_group = dist.new_group()
    kind = replace(KINDS[name], config=replace(KINDS[name].config, timeout_s=60.0))
    with EPGroup(process_group) as group, torch.no_grad():
        dispatcher = open_dispatcher(kind, group, SPEC)
        x = torch.ones(M, H)
        ids = torch.tensor([[0, 7]] * M)
        topk = TopKOutput(topk_ids=ids, topk_weights=torch.ones(M, K))

        def pair() -> Tensor:
            y = dispatcher.combine(identity(dispatcher.dispatch(x, topk)))
            dispatcher.check()
            return y

        torch.testing.assert_close(pair(), K * x)
        if group.rank != FAULTY:
            flip_table(monkeypatch) if flip is None else flip_word(monkeypatch, flip)
        started_s = time.monotonic()
        with pytest.raises(EPError, match="the header of rank 1 has") as caught:
            [pair() for _ in range(2)]
        assert time.monotonic() - started_s < 20.0, "no rank waits for its timeout"
        assert isinstance(caught.value, EPTimeout) == (group.rank == FAULTY)
        monkeypatch.undo()
        # The group is unusable; nothing that the other rank cannot match is sent.
        with pytest.raises(EPError, match=re.escape(str(caught.value)[:60])):
            pair()


def test_an_older_fault_of_this_rank_remains_when_the_call_has_raised_a_later_one() -> None:
    faults = DeviceFaults(RankNames.of_all(0, 2), torch.device("cpu"))
    headers = torch.tensor([int(FaultCode.IDS), 0], dtype=torch.int32)
    faults.record(headers, torch.zeros(2, dtype=torch.bool), torch.zeros(2).long(), None)
    later = HandleError("combine: the handle is used twice")
    later.was_raised = True
    faults.record_combine(torch.tensor([int(FaultCode.HANDLE), 0]), later)
    with pytest.raises(ShapeError, match="rank 0"):
        faults.check(8)
    faults.check(8)


def test_a_relayed_fault_leaves_the_flags_of_a_status() -> None:
    error = EPError("dispatch: rank 5 refuses")
    error.fault_word = pack_fault(FaultCode.GRAD_MODE, 5)
    _, fault = guard_ids(torch.zeros(1, 2, dtype=torch.int64), L, error)
    status = int(pack_header(fault, BatchFlags.GRAD_ENABLED))
    assert unpack_status(status) == (FaultCode.GRAD_MODE, BatchFlags.GRAD_ENABLED)
