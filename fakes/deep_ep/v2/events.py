"""Imitate events: they tell when the results of an asynchronous call may be read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import TracebackType

from torch import Tensor

from fakes.deep_ep.v2.poison import fill_with_poison


class EventHandle:
    """A captured event; waiting for it lets the results of its call land."""

    def __init__(self) -> None:
        self._late: list[tuple[Tensor, Tensor]] = []

    def current_stream_wait(self) -> None:
        """Write the results, which are poison before this call."""
        for result, value in self._late:
            result.copy_(value)
        self._late.clear()

    @classmethod
    def holding(cls, results: Sequence[Tensor | None]) -> EventHandle:
        """Poison the results until the event is waited for.

        A GPU writes them at some time in between: who reads early reads anything.
        """
        event = cls()
        for result in results:
            if result is not None:
                event._late.append((result, result.clone()))
                fill_with_poison(result)
        return event


class EventOverlap:
    """The last result of dispatch() and combine(): an event, or None if nothing must be awaited."""

    def __init__(
        self, event: EventHandle | None = None, extra_tensors: tuple[Tensor, ...] | None = None
    ) -> None:
        self.event = event
        self.extra_tensors = extra_tensors
        self.hook_after_wait: Callable[[], object] | None = None
        self._release_handle_by_call = False

    def current_stream_wait(self, release_handle: bool = False) -> object:
        """Wait, run the hook, and return what it returned.

        Raises:
            AssertionError: the call was not asynchronous, so there is no event.
        """
        assert self.event is not None
        self.event.current_stream_wait()
        hook, self.hook_after_wait = self.hook_after_wait, None
        if release_handle:
            self.event = None
        return None if hook is None else hook()

    def wait(self) -> object:
        """Wait as current_stream_wait() does."""
        return self.current_stream_wait()

    def register_hook_after_wait(self, hook_after_wait: Callable[[], object]) -> None:
        """Call it once, after the next wait."""
        assert self.hook_after_wait is None, "A hook is already registered on this `EventOverlap`"
        self.hook_after_wait = hook_after_wait

    def __call__(self, release_handle: bool = False) -> EventOverlap:
        self._release_handle_by_call = release_handle
        return self

    def __enter__(self) -> EventOverlap:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self.event is not None:
            self.current_stream_wait(release_handle=self._release_handle_by_call)
        self._release_handle_by_call = False
