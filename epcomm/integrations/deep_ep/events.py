"""Events and the communication stream of deep_ep, which also work without CUDA.

On a CPU a call has ended when it returns, so its event has nothing to wait for.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Self

import torch
from torch import Tensor


class EventHandle:
    """A point on the current stream, recorded at construction."""

    def __init__(self) -> None:
        self.event: torch.cuda.Event | None = None
        # is_initialized() rather than is_available(): an unused GPU has no work to wait for.
        if torch.cuda.is_initialized():
            self.event = torch.cuda.Event()
            self.event.record()

    def current_stream_wait(self) -> None:
        """Make the current stream wait for all work before this point. Host sync: none."""
        if self.event is not None:
            self.event.wait()


class EventOverlap:
    """An event, and the tensors to keep alive until then; `with event:` waits at the end."""

    def __init__(
        self, event: EventHandle | None = None, extra_tensors: tuple[Tensor, ...] | None = None
    ) -> None:
        self.event = event
        self.extra_tensors = extra_tensors
        self.hook_after_wait: Callable[[], object] | None = None
        self._releases_at_end = False

    def current_stream_wait(self, release_handle: bool = False) -> object:
        """Make the current stream wait for the event; return what the registered hook returns.

        release_handle: drop the event afterwards.
        """
        assert self.event is not None, "an event exists only after async_finish or capture()"
        self.event.current_stream_wait()
        hook, self.hook_after_wait = self.hook_after_wait, None
        if release_handle:
            self.event = None
        return None if hook is None else hook()

    def wait(self) -> object:
        return self.current_stream_wait()

    def register_hook_after_wait(self, hook_after_wait: Callable[[], object]) -> None:
        """Call a function once, after the next wait."""
        assert self.hook_after_wait is None, "a hook is already registered"
        self.hook_after_wait = hook_after_wait

    def __call__(self, release_handle: bool = False) -> Self:
        """Set whether `with` drops the event at its end."""
        self._releases_at_end = release_handle
        return self

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc_info: object) -> None:
        releases, self._releases_at_end = self._releases_at_end, False
        if self.event is not None:
            self.current_stream_wait(release_handle=releases)


class AsyncCall:
    """A call in progress; event() returns its event at the end.

    streams: of the call and of its caller; none on a CPU. None if the call is not asynchronous.
    """

    def __init__(self, streams: tuple[torch.cuda.Stream, ...] | None) -> None:
        self._streams = streams

    def event(self, tensors: Sequence[Tensor | None]) -> EventOverlap:
        """Return the event at the end of the call; tensors: all that it reads and writes."""
        if self._streams is None:
            return EventOverlap()
        for stream in self._streams:
            for tensor in tensors:
                if tensor is not None:
                    tensor.record_stream(stream)
        return EventOverlap(EventHandle())


_ON_CURRENT_STREAM = nullcontext(AsyncCall(None))


class CommStream:
    """The stream on which asynchronous calls run; the others run on the current one."""

    def __init__(self) -> None:
        self._stream: torch.cuda.Stream | None = None

    def of(self, device: torch.device) -> torch.cuda.Stream | torch.cpu.Stream:
        """Return the stream for tensors on `device`; that of a CPU does nothing."""
        return self._on_gpu(device) if device.type == "cuda" else torch.cpu.current_stream()

    def call(
        self, device: torch.device, *events: EventHandle | EventOverlap | None, is_async: bool
    ) -> AbstractContextManager[AsyncCall]:
        """Run a call on tensors of `device` after all of these events, in a context.

        is_async: the current stream does not wait for the call. Without events the call waits for
            all that the current stream holds.
        """
        given = [each.event if isinstance(each, EventOverlap) else each for each in events]
        given = [each for each in given if each is not None]
        if not given and not is_async:
            return _ON_CURRENT_STREAM
        return self._call(device, given, is_async=is_async)

    @contextmanager
    def _call(
        self, device: torch.device, events: Sequence[EventHandle], *, is_async: bool
    ) -> Iterator[AsyncCall]:
        if device.type != "cuda" or not is_async:
            for event in events:
                event.current_stream_wait()
            yield AsyncCall(() if is_async else None)
            return
        stream, current = self._on_gpu(device), torch.cuda.current_stream(device)
        with torch.cuda.stream(stream):
            for event in events:
                event.current_stream_wait()
            if not events:
                stream.wait_stream(current)
            yield AsyncCall((stream, current))

    def _on_gpu(self, device: torch.device) -> torch.cuda.Stream:
        if self._stream is None:
            # As in DeepEP, the stream has priority; otherwise its kernels would wait for those of a
            # product.
            self._stream = torch.cuda.Stream(device, priority=-1)
        return self._stream
