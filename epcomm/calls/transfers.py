"""Run begun calls of a group on a thread, so that the caller computes while rows are sent.

One call of a group runs at a time, in call order: begun calls run on the thread, and any other call
first waits for those begun before it (settle()) and then runs on the thread of its caller. So the
calls of all ranks meet in one order, whichever thread makes them.

    caller   begin A | compute ......... | A.wait() | compute
    thread           | headers A, rows A |

On a CUDA device the calls run on a stream of their own (side_stream.py). A call that is begun while
a graph is captured runs on the thread of its caller: it needs no other, because it waits for
nothing, and torch captures what that thread launches.

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

from epcomm.calls.side_stream import SideStream
from epcomm.errors import HandleError
from epcomm.protocol import FaultCode
from epcomm.records import Pending

T = TypeVar("T")


class Transfers:
    """The begun calls of one rank in a group.

    last: the last call that was begun, until it has been waited for; or None.
    """

    def __init__(self, where: str, side_stream: SideStream | None = None) -> None:
        """Start without calls. The first call starts the thread.

        where: this rank for messages, such as `rank 3 of 8`.
        side_stream: the stream of the calls; None: the device has no streams.
        """
        self._where, self._side_stream = where, side_stream
        self._executor = ThreadPoolExecutor(1, "epcomm-transfers")
        self._thread: int | None = None
        self.last: Future[Any] | None = None
        # The calls that were begun and not waited for, by number, with their names.
        self._begun: dict[int, tuple[str, Future[Any]]] = {}
        self._numbers = itertools.count(1)
        # The error of a call whose Pending was dropped, until the next call reports it.
        self._unfinished: HandleError | None = None
        # Dropped calls, which hold memory that the device may still use.
        self._dropped: list[Future[Any]] = []

    @property
    def is_here(self) -> bool:
        """Whether a call that was begun runs on this thread."""
        return get_ident() == self._thread

    def begin(self, call: Callable[[], T], name: str, *, must_wait: bool = True) -> Pending[T]:
        """Run `call` on the thread, after the calls begun before; wait() returns its result.

        Its tensors must not be written until wait() returns.

        name: the call in words for messages, such as `dispatch of dispatcher 2`.
        must_wait: it is an error to drop the Pending without wait().
        """
        number, side = next(self._numbers), self._side_stream
        run = partial(_run, call, torch.is_inference_mode_enabled())
        if side is not None:
            self._dropped = [each for each in self._dropped if not side.has_ended(each)]
            run = side.begin(run)
        if side is not None and torch.cuda.is_current_stream_capturing():
            self.settle()
            future = _done(run)
        else:
            try:
                future = self._executor.submit(copy_context().run, self._on_thread, run)
            except RuntimeError as error:
                raise self._closed_error(name) from error
        self.last = future
        pending = Pending(partial(self._take, future, number, name))
        self._begun[number] = name if must_wait else "", future
        weakref.finalize(pending, self._drop, number).atexit = False
        return pending

    def settle(self) -> None:
        """Wait until the calls begun so far have ended; wait() raises their errors.

        On a CUDA device the current stream waits for them, and the host only for their launches.

        Local; on the thread of the calls it returns immediately.
        """
        if self.last is not None and not self.is_here:
            wait([self.last])
            self.last = None
            if self._side_stream is not None:
                self._side_stream.precede()

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

    def _take(self, future: Future[Any], number: int, name: str) -> Any:  # noqa: ANN401
        self._begun.pop(number, None)
        try:
            result = future.result()
            return result if self._side_stream is None else self._side_stream.join(result)
        except CancelledError:
            raise self._closed_error(name) from None
        finally:
            # Release the result, which the caller now owns.
            if self.last is future:
                self.last = None

    def _drop(self, number: int) -> None:
        name, future = self._begun.pop(number, ("", None))
        if future is not None and self._side_stream is not None:
            self._dropped.append(future)
        if not name or self._unfinished is not None:
            return
        self._unfinished = HandleError(
            f"{name}: the call was begun as number {number} and never waited for "
            f"({self._where}); call wait() of every Pending"
        )
        self._unfinished.fault_word = int(FaultCode.UNFINISHED)

    def _on_thread(self, run: Callable[[], T]) -> T:
        self._thread = get_ident()
        return run()


def _run(call: Callable[[], T], is_inference: bool) -> T:
    with torch.inference_mode(is_inference), torch.no_grad():
        return call()


def _done(run: Callable[[], T]) -> Future[T]:
    """Return the result or the error of `run`, which is called here."""
    future: Future[T] = Future()
    try:
        future.set_result(run())
    except Exception as error:  # noqa: BLE001
        future.set_exception(error)
    return future
