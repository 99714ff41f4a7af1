"""Run begun calls of a group on a thread, so that the caller computes while rows are sent.

One call of a group runs at a time, in call order: begun calls run on the thread, and any other call
first waits for those begun before it (settle()) and then runs on the thread of its caller. So the
calls of all ranks meet in one order, whichever thread makes them.

    caller   begin A | compute ......... | A.wait() | compute
    thread           | headers A, rows A |

A begun call runs in the context of its caller. PyTorch keeps grad mode and inference mode by
thread, so the call gets inference mode from its caller too, and never records a graph.
"""

import itertools
import weakref
from collections.abc import Callable
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor, wait
from contextvars import copy_context
from functools import partial
from threading import get_ident
from typing import Any, TypeVar

import torch

from epcomm.errors import HandleError
from epcomm.protocol import FaultCode
from epcomm.records import Pending

T = TypeVar("T")


class Transfers:
    """The begun calls of one rank in a group.

    last: the last call that was begun, until it has been waited for; or None.
    """

    def __init__(self, where: str) -> None:
        """Start without calls. The first call starts the thread.

        where: this rank for messages, such as `rank 3 of 8`.
        """
        self._where = where
        self._executor = ThreadPoolExecutor(1, "epcomm-transfers")
        self._thread: int | None = None
        self.last: Future[Any] | None = None
        # The names of calls that were begun and not waited for, by number.
        self._begun: dict[int, str] = {}
        self._numbers = itertools.count(1)
        # The error of a call whose Pending was dropped, until the next call reports it.
        self._unfinished: HandleError | None = None

    def begin(self, call: Callable[[], T], name: str, *, must_wait: bool = True) -> Pending[T]:
        """Run `call` on the thread, after the calls begun before; wait() returns its result.

        Its tensors must not be written until wait() returns.

        name: the call in words for messages, such as `dispatch of dispatcher 2`.
        must_wait: it is an error to drop the Pending without wait().
        """
        number, is_inference = next(self._numbers), torch.is_inference_mode_enabled()
        try:
            future = self._executor.submit(copy_context().run, self._run, call, is_inference)
        except RuntimeError as error:
            raise self._closed_error(name) from error
        self.last = future
        pending = Pending(partial(self._take, future, number, name))
        if must_wait:
            self._begun[number] = name
            weakref.finalize(pending, self._drop, number).atexit = False
        return pending

    def settle(self) -> None:
        """Wait until the calls begun so far have ended; wait() raises their errors.

        Local; on the thread of the calls it returns immediately.
        """
        if self.last is not None and get_ident() != self._thread:
            wait([self.last])
            self.last = None

    def close(self) -> None:
        """End the thread after its current call. Local, idempotent."""
        self._executor.shutdown(wait=False, cancel_futures=True)
        # Nothing would tell settle() that a cancelled call has ended.
        self.last = None

    def take_unfinished(self, *, is_last: bool = False) -> HandleError | None:
        """Return the error of a call that was begun and never waited for, once, or None. Local.

        is_last: no call will be waited for after this.
        """
        for number in tuple(self._begun) if is_last else ():
            self._drop(number)
        error, self._unfinished = self._unfinished, None
        return error

    def _closed_error(self, name: str) -> HandleError:
        return HandleError(f"{name}: the EPGroup is closed ({self._where}); make a new one")

    def _take(self, future: Future[T], number: int, name: str) -> T:
        self._begun.pop(number, None)
        try:
            return future.result()
        except CancelledError:
            raise self._closed_error(name) from None
        finally:
            # Release the result, which the caller now owns.
            if self.last is future:
                self.last = None

    def _drop(self, number: int) -> None:
        name = self._begun.pop(number, None)
        if name is None or self._unfinished is not None:
            return
        self._unfinished = HandleError(
            f"{name}: the call was begun as number {number} and never waited for "
            f"({self._where}); call wait() of every Pending"
        )
        self._unfinished.fault_word = int(FaultCode.UNFINISHED)

    def _run(self, call: Callable[[], T], is_inference: bool) -> T:
        self._thread = get_ident()
        with torch.inference_mode(is_inference), torch.no_grad():
            return call()
