"""Run begun calls of a CUDA device on a stream of their own.

    caller's stream   begin A | compute ............. | A.wait() | compute
    side stream               | A, after the caller's work so far |

The side stream waits for what its caller had launched when the call was begun, and for the calls of
the group before it. wait() makes the stream of its caller wait for the end of the call; the host
does not wait for the device.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, is_dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from epcomm.collectives.base import StreamOrder

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, eq=False)
class Launched(Generic[T]):
    """A call that the host has made and the device may not have finished.

    end: the end of the call on the side stream.
    call: the call, which holds the memory that the device reads.
    """

    result: T
    end: torch.cuda.Event
    call: Callable[[], T]


class SideStream:
    """The stream of the begun calls of a group."""

    def __init__(self, device: torch.device, order: StreamOrder) -> None:
        """Create the stream, of higher priority than the default. Local.

        With priority, the programs of a transfer start as soon as some of a product have ended,
        and not after all of them.
        """
        self._device, self._order = device, order
        self._stream = torch.cuda.Stream(device, priority=-1)

    def begin(self, call: Callable[[], T]) -> Callable[[], Launched[T]]:
        """Return `call` on the side stream, after what this thread has launched so far. Local."""
        begun = self._order.fork(self._device, self._stream)

        def run() -> Launched[T]:
            with torch.cuda.stream(self._stream):
                self._stream.wait_event(begun)
                result, end = call(), torch.cuda.Event()
                end.record()
                return Launched(result=result, end=end, call=call)

        return run

    def precede(self) -> None:
        """Make the current stream wait for the calls begun so far. Local. Host sync: none."""
        self._order.follow(self._device)

    def has_ended(self, future: Future[Launched[Any]]) -> bool:
        """Return whether the device has finished a call. Local. Host sync: none."""
        if not future.done():
            return False
        return future.cancelled() or bool(future.exception()) or future.result().end.query()

    def join(self, launched: Launched[T]) -> T:
        """Return the result, for use on the current stream. Local. Host sync: none."""
        stream = torch.cuda.current_stream(self._device)
        stream.wait_event(launched.end)
        for tensor in tensors_of(launched.result):
            # Its memory belongs to the side stream, which must not reuse it before this stream has
            # finished with it.
            tensor.record_stream(stream)
        return launched.result


def tensors_of(value: object) -> Iterator[Tensor]:
    """Yield the tensors in a result: in tuples, and in the fields of records."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, tuple):
        for each in value:
            yield from tensors_of(each)
    elif is_dataclass(value):
        for each in vars(value).values():
            yield from tensors_of(each)
