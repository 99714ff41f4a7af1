"""With async_finish, results are undefined until a wait.

A CPU has no streams. The results of a call with async_finish are stored separately, and its tensors
are poisoned, until a wait for its event or the next call on the same buffer, which the real stream
would run after it.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from epcomm.integrations.deep_ep import EventHandle, EventOverlap
from fakes.deep_ep.limits import require
from fakes.deep_ep.undefined import poison


class _Wait(EventHandle):
    """A point on a stream of deferred work."""

    def __init__(self, wait: Callable[[], None]) -> None:
        super().__init__()
        self._wait = wait

    def current_stream_wait(self) -> None:
        self._wait()


class DeferredWork:
    """Launched work whose results have not been waited for, in order."""

    def __init__(self) -> None:
        self._pending: list[Callable[[], None]] = []

    def begin(
        self, previous_event: EventOverlap | None, is_async: bool, allocates_here: bool = False
    ) -> None:
        """Begin a call by finishing all work that was launched before.

        Raises:
            RuntimeError: tensors on this stream without an event before and one after.
        """
        event = None if previous_event is None else previous_event.event
        if allocates_here:
            require(event is not None and is_async, "previous_event.has_value() and async")
        self.finish()
        if event is not None:
            event.current_stream_wait()

    def launch(self, work: Callable[[], None]) -> EventHandle:
        """Add `work` to the stream; the event's wait runs it and all earlier work."""
        self._pending.append(work)

        def wait() -> None:
            while work in self._pending:
                self._pending.pop(0)()

        return _Wait(wait)

    def finish(self) -> None:
        """Run all that is pending."""
        while self._pending:
            self._pending.pop(0)()

    def hand_out(self, values: Sequence[Tensor], is_async: bool) -> EventOverlap:
        """Return the event for `values`, which an asynchronous call leaves undefined until then."""
        if not is_async:
            return EventOverlap()
        kept = [value.clone(memory_format=torch.preserve_format) for value in values]
        for value in values:
            poison(value)

        def restore() -> None:
            for value, original in zip(values, kept, strict=True):
                value.copy_(original)

        return EventOverlap(self.launch(restore))
