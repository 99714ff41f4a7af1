"""Begun calls of a group, which send rows while the caller computes.

One call of a group runs at a time, in call order, and any other call first completes those begun
before it (settle()). So the calls of all ranks meet in one order. Where the host waits in the
transport, a thread makes the calls (ThreadTransfers); on a CUDA device the host only launches them
(epcomm/calls/side_stream.py).

    caller   begin A | compute ......... | A.wait() | compute
    thread           | headers A, rows A |
"""

import itertools
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor, wait
from contextvars import copy_context
from functools import partial
from threading import get_ident
from typing import Any, ClassVar, Generic, TypeVar

import torch

from epcomm.errors import HandleError, group_closed
from epcomm.protocol import FaultCode
from epcomm.records import Pending, Steps, to_the_end

T = TypeVar("T")
# What represents a begun call: of any result, so that calls of all kinds have one order.
CallT = TypeVar("CallT")


class Transfers(ABC, Generic[CallT]):
    """The begun calls of one rank in a group.

    last: the last call that was begun, until it has been waited for; or None.
    unfinished: the error of a call whose Pending was dropped, until the next call reports it.
    are_free: transfers do not slow down computation beside them.
    """

    are_free: ClassVar[bool] = True

    def __init__(self, where: str) -> None:
        """Start without calls.

        where: this rank for messages, such as `rank 3 of 8`.
        """
        self._where = where
        self.last: CallT | None = None
        # The calls that were begun and not waited for, with their names; '' for one that may be
        # dropped.
        self._begun: dict[int, tuple[str, CallT]] = {}
        self._numbers = itertools.count()
        self.unfinished: HandleError | None = None

    def begin(
        self, make: Callable[[], Steps[T]], name: str, *, must_wait: bool = True
    ) -> Pending[T]:
        """Begin a call, after the calls begun before; wait() returns its result.

        Its tensors must not be written until wait() returns.

        Args:
            make: returns the steps of the call, and holds its tensors. It pauses only where the
                host waits for the device.
            name: the call in words for messages, such as `dispatch of dispatcher 2`.
            must_wait: it is an error to drop the Pending without wait().
        """
        number, call = next(self._numbers), self._start(make, name)
        self.last = call
        self._begun[number] = name if must_wait else "", call
        pending = Pending(partial(self._take, call, number, name))
        weakref.finalize(pending, self._drop, number).atexit = False
        return pending

    @abstractmethod
    def settle(self) -> None:
        """Complete the calls begun so far, on the host; wait() raises their errors.

        Local; in such a call it returns immediately.
        """

    @abstractmethod
    def close(self) -> None:
        """End after the current call. Local, idempotent."""

    @abstractmethod
    def _start(self, make: Callable[[], Steps[Any]], name: str) -> CallT:
        """Begin a call; see begin()."""

    @abstractmethod
    def _finish(self, call: CallT, name: str) -> Any:  # noqa: ANN401
        """Complete a call; return its result, or raise its error."""

    def _forget(self, call: CallT) -> None:
        """Note that a call will not be waited for."""

    def take_unfinished(self, *, is_last: bool = False) -> HandleError | None:
        """Return the error of a call that was begun and never waited for, once, or None. Local.

        is_last: no call will be waited for after this.
        """
        for number in tuple(self._begun) if is_last else ():
            self._drop(number)
        error, self.unfinished = self.unfinished, None
        return error

    def _take(self, call: CallT, number: int, name: str) -> Any:  # noqa: ANN401
        self._begun.pop(number, None)
        try:
            return self._finish(call, name)
        finally:
            # Release the result, which the caller now owns.
            if self.last is call:
                self.last = None

    def _drop(self, number: int) -> None:
        name, call = self._begun.pop(number, ("", None))
        if call is not None:
            self._forget(call)
        if not name or self.unfinished is not None:
            return
        self.unfinished = HandleError(
            f"{name}: the call was begun and never waited for ({self._where}); call wait() of "
            "every Pending"
        )
        self.unfinished.fault_word = int(FaultCode.UNFINISHED)


class ThreadTransfers(Transfers[Future[Any]]):
    """Begun calls on a thread, which the first one starts.

    A call runs in the context of its caller. PyTorch keeps grad mode and inference mode by thread,
    so the call gets inference mode from its caller too, and never records a graph.
    """

    def __init__(self, where: str) -> None:
        super().__init__(where)
        self._executor = ThreadPoolExecutor(1, "epcomm-transfers")
        self._thread: int | None = None

    def _start(self, make: Callable[[], Steps[T]], name: str) -> Future[T]:
        is_inference = torch.is_inference_mode_enabled()
        try:
            return self._executor.submit(copy_context().run, self._run, make, is_inference)
        except RuntimeError as error:
            raise group_closed(name, self._where) from error

    def _run(self, make: Callable[[], Steps[T]], is_inference: bool) -> T:
        self._thread = get_ident()
        with torch.inference_mode(is_inference), torch.no_grad():
            return to_the_end(make())

    def _finish(self, call: Future[T], name: str) -> T:
        try:
            return call.result()
        except CancelledError:
            raise group_closed(name, self._where) from None

    def settle(self) -> None:
        if self.last is not None and get_ident() != self._thread:
            wait([self.last])
            self.last = None

    def close(self) -> None:
        self._executor.shutdown(wait=False, cancel_futures=True)
        # Nothing would tell settle() that a cancelled call has ended.
        self.last = None
