"""Begun calls on a CUDA device, on a stream of their own.

The side stream waits for what the caller had launched when the call was begun, and for the calls
before it. wait() makes the stream of its caller wait for the end of the call. A call whose sizes
the host must read pauses there; the host reads them when the next call begins, or in wait(). Until
then it has launched other work, and the device does both:

    host               begin D1 | launch E0 | begin C0: read the counts of D1, launch its rows | ...
    caller's stream                 | E0 ........................... |
    side stream        | headers D1 |        | rows D1 .. |           | C0 ..
"""

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, is_dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from epcomm.calls.transfers import Transfers
from epcomm.collectives.base import StreamOrder
from epcomm.errors import group_closed
from epcomm.records import Steps

_logger = logging.getLogger(__name__)


@dataclass(kw_only=True, eq=False)
class LaunchedCall:
    """A call that the host has begun to launch.

    make: holds the tensors of the call, which the device may still read.
    steps: what the host has not launched; None: nothing.
    result, error: of the call; None until steps is.
    end: the end of the call on the side stream.
    """

    make: Callable[[], Steps[Any]]
    steps: Steps[Any] | None
    is_inference: bool
    end: torch.cuda.Event
    result: Any = None
    error: BaseException | None = None


class StreamTransfers(Transfers[LaunchedCall]):
    """Begun calls on a stream; the thread of the caller launches them.

    They take SMs from the products beside them. Overlap was slower than no overlap on two H100
    and four H200, see docs/performance.md.
    """

    are_free: ClassVar[bool] = False

    def __init__(self, where: str, device: torch.device, order: StreamOrder) -> None:
        """Create the stream, of higher priority than the default. Local.

        With priority, the programs of a transfer start as soon as some of a product have ended,
        and not after all of them.
        """
        super().__init__(where)
        self._device, self._order = device, order
        self._stream = torch.cuda.Stream(device, priority=-1)
        # Whether the host launches a call now.
        self._is_launching = False
        # Calls that nobody waits for, which the device may not have finished.
        self._forgotten: list[LaunchedCall] = []
        self._is_closed = False

    def settle(self) -> None:
        if self.last is None or self._is_launching:
            return
        self._launch_all(self.last)
        # Calls on the current stream follow those on the side stream.
        self._order.follow(self._device)
        self.last = None

    def close(self) -> None:
        self._is_closed, self.last = True, None
        self._forgotten.clear()

    def _start(self, make: Callable[[], Steps[Any]], name: str) -> LaunchedCall:
        if self._is_closed:
            raise group_closed(name, self._where)
        self._launch_all(self.last)
        if not torch.cuda.is_current_stream_capturing():
            self._forgotten = [each for each in self._forgotten if not each.end.query()]
        call = LaunchedCall(
            make=make,
            steps=make(),
            is_inference=torch.is_inference_mode_enabled(),
            end=torch.cuda.Event(),
        )
        self._stream.wait_event(self._order.fork(self._device, self._stream))
        self._launch(call)
        return call

    def _launch_all(self, call: LaunchedCall | None) -> None:
        """Launch what is left of a call; before the last one, all have been launched."""
        while call is not None and call.steps is not None:
            self._launch(call)

    def _launch(self, call: LaunchedCall) -> None:
        """Launch the next step of a call."""
        assert call.steps is not None, "there is a step"
        self._is_launching = True
        try:
            with (
                torch.inference_mode(call.is_inference),
                torch.no_grad(),
                torch.cuda.stream(self._stream),
            ):
                try:
                    next(call.steps)
                    return
                except StopIteration as end:
                    call.result = end.value
                except BaseException as error:  # noqa: BLE001
                    call.error = error
                    self._log_if_forgotten(call)
                call.steps = None
                call.end.record()
                if call.error is not None and not isinstance(call.error, Exception):
                    raise call.error
        finally:
            self._is_launching = False

    def _finish(self, call: LaunchedCall, name: str) -> Any:  # noqa: ANN401
        if self._is_closed and call.steps is not None:
            raise group_closed(name, self._where)
        self._launch_all(call)
        stream = torch.cuda.current_stream(self._device)
        stream.wait_event(call.end)
        if call.error is not None:
            raise call.error
        for tensor in tensors_of(call.result):
            # Its memory belongs to the side stream, which must not reuse it before this stream has
            # finished with it.
            tensor.record_stream(stream)
        return call.result

    def _forget(self, call: LaunchedCall) -> None:
        self._forgotten.append(call)
        self._log_if_forgotten(call)

    def _log_if_forgotten(self, call: LaunchedCall) -> None:
        # Nothing else shows the error, and ranks without one may wait for the rows of this rank.
        if call.error is not None and call in self._forgotten:
            _logger.error("a begun call has failed (%s)", self._where, exc_info=call.error)


def tensors_of(value: object) -> Iterator[Tensor]:
    """Yield the tensors in a result: in tuples, and in the fields of records."""
    parts = [value]
    # The list grows while it is read. A generator in each record takes twice as long.
    for part in parts:
        if isinstance(part, Tensor):
            yield part
        elif isinstance(part, tuple):
            parts += part
        elif is_dataclass(part):
            parts += vars(part).values()
