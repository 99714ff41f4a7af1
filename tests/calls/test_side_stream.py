"""The order in which begun calls of a GPU are launched, with imitations of streams and events."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import pytest
import torch
from torch import Tensor

from epcomm.calls.side_stream import StreamTransfers, tensors_of
from epcomm.collectives.base import StreamOrder
from epcomm.errors import HandleError
from epcomm.records import Steps, at_once

CPU = torch.device("cpu")


@dataclass(eq=False)
class Log:
    """What streams have been given, in order."""

    lines: list[str] = field(default_factory=list)
    current: str = "caller"

    def add(self, line: str) -> None:
        self.lines.append(f"{self.current}: {line}")


class Order(StreamOrder):
    """The order of calls on a device that is not there."""

    def __init__(self, log: Log) -> None:
        super().__init__()
        self._log = log

    def follow(self, device: torch.device) -> None:
        self._log.add("follow")

    def fork(self, device: torch.device, side: object) -> str:  # type: ignore[override]
        return "caller"


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch) -> Log:
    return imitate_streams(monkeypatch)


def imitate_streams(monkeypatch: pytest.MonkeyPatch) -> Log:
    """Imitate streams and events of CUDA; return the log of what they are given."""
    log = Log()

    class Event:
        def record(self) -> None:
            self.place = log.current

        def query(self) -> bool:
            return True

    class Stream:
        def __init__(self, name: str) -> None:
            self.name = name

        def wait_event(self, event: object) -> None:
            log.lines.append(f"{self.name} waits for {getattr(event, 'place', event)}")

    @contextmanager
    def stream(used: Stream) -> Iterator[None]:
        before, log.current = log.current, used.name
        yield
        log.current = before

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "Stream", lambda *args, **options: Stream("side"))
    monkeypatch.setattr(torch.cuda, "stream", stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: Stream(log.current))
    monkeypatch.setattr(Tensor, "record_stream", lambda tensor, stream: log.add(f"uses {tensor}"))
    return log


@pytest.fixture
def transfers(log: Log) -> StreamTransfers:
    return StreamTransfers("rank 3 of 8", CPU, Order(log))


def call(log: Log, name: str, error: BaseException | None = None) -> Callable[[], Steps[str]]:
    def steps() -> Steps[str]:
        log.add(f"{name} headers")
        yield
        assert not torch.is_grad_enabled()
        if error is not None:
            raise error
        log.add(f"{name} rows")
        return name

    return steps


def test_a_pausing_call_is_launched_before_the_next(log: Log, transfers: StreamTransfers) -> None:
    first = transfers.begin(call(log, "A"), "A")
    log.add("product")
    second = transfers.begin(partial(at_once, lambda: log.add("B")), "B")
    assert first.wait() == "A"
    second.wait()
    assert log.lines == [
        "side waits for caller",
        "side: A headers",
        "caller: product",
        "side: A rows",
        "side waits for caller",
        "side: B",
        "caller waits for side",
        "caller waits for side",
    ]


@pytest.mark.parametrize("waits", [True, False])
def test_the_rest_is_launched_by_wait_or_by_another_call_of_the_group(
    waits: bool, log: Log, transfers: StreamTransfers
) -> None:
    begun = transfers.begin(call(log, "A"), "A")
    if waits:
        begun.wait()
    transfers.settle()
    end = "caller waits for side" if waits else "caller: follow"
    assert log.lines[-2:] == ["side: A rows", end]
    assert transfers.last is None


def test_an_error_is_raised_by_wait_alone_or_logged(
    log: Log, transfers: StreamTransfers, caplog: pytest.LogCaptureFixture
) -> None:
    failing = transfers.begin(call(log, "A", ValueError("no memory")), "A")
    following = transfers.begin(call(log, "B"), "B")
    assert following.wait() == "B"
    with pytest.raises(ValueError, match="no memory"):
        failing.wait()
    transfers.begin(partial(at_once, lambda: 1 / 0), "C", must_wait=False)
    assert transfers.take_unfinished(is_last=True) is None
    assert "ZeroDivisionError" in caplog.text
    # This one fails after its Pending was dropped.
    transfers.begin(call(log, "D", ValueError("no rows")), "D", must_wait=False)
    transfers.settle()
    assert "no rows" in caplog.text


def test_an_interrupt_ends_its_call(log: Log, transfers: StreamTransfers) -> None:
    begun = transfers.begin(call(log, "A", KeyboardInterrupt()), "A")
    for function in (transfers.settle, begun.wait):
        with pytest.raises(KeyboardInterrupt):
            function()


def test_a_dropped_call_is_launched_and_reported(log: Log, transfers: StreamTransfers) -> None:
    transfers.begin(call(log, "A"), "dispatch of dispatcher 2")
    transfers.begin(call(log, "B"), "B", must_wait=False)
    transfers.settle()
    assert [line for line in log.lines if "rows" in line] == ["side: A rows", "side: B rows"]
    told = r"dispatch of dispatcher 2: the call was begun and never waited for \(rank 3 of 8\)"
    with pytest.raises(HandleError, match=told):
        raise transfers.take_unfinished() or AssertionError
    assert transfers.take_unfinished() is None


def test_a_closed_group_begins_and_completes_nothing(log: Log, transfers: StreamTransfers) -> None:
    begun = transfers.begin(call(log, "A"), "A")
    transfers.close()
    for function in (begun.wait, lambda: transfers.begin(call(log, "B"), "B")):
        with pytest.raises(HandleError, match="the EPGroup is closed"):
            function()
    assert not any("rows" in line for line in log.lines)


@dataclass(frozen=True)
class Nested:
    inner: object
    tensor: Tensor


def test_results_are_used_on_the_stream_of_the_caller(log: Log, transfers: StreamTransfers) -> None:
    one, two, three = torch.ones(()), torch.zeros(()), torch.full((), 2.0)
    result = (one, Nested((two, None, "text"), three))
    assert set(tensors_of(result)) == {one, two, three}
    transfers.begin(lambda: at_once(lambda: result), "A").wait()
    assert set(log.lines[-3:]) == {f"caller: uses {each}" for each in (one, two, three)}
