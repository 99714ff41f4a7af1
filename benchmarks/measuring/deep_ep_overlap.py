"""Measure what calls of DeepEP V1 through the drop-in and a matrix product hide of each other.

Normal mode: a dispatch (or combine) on the communication stream, and a product on the current one,
which leaves it the SMs that it may take. A dispatch knows its sizes by a handle, for else the host
waits for counts meanwhile. Low latency, captured as a graph: products between a call and its
receive hook, which share a stream, so that they hide only what a rank waits for; or beside
asynchronous calls on the communication stream, which need free SMs as well.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.bench_overlap import free_sms
from epcomm.bench.timing import captured
from epcomm.integrations.deep_ep import Buffer, EventOverlap

# Calls in one measurement: the host gets ahead of the device, and the launch of a graph of them is
# short beside it.
_CALLS = 10


# Ends a call that was begun.
End = Callable[[], object]
# Returns the microseconds of one of so many equal parts of a call, on all ranks together.
Timed = Callable[[Callable[[], object], int], float]


@dataclass(frozen=True, kw_only=True, eq=False)
class Halves:
    """Calls of communication in two halves.

    begins: begins each call, in this order, and returns what ends it.
    """

    begins: tuple[Callable[[], End], ...]

    def alone(self) -> None:
        """Make the calls without anything between their halves."""
        self.around(lambda: None)

    def around(self, work: Callable[[], object]) -> None:
        """Make the calls with `work` between the halves of each."""
        for begin in self.begins:
            end = begin()
            work()
            end()


@dataclass(frozen=True, kw_only=True)
class Hidden:
    """The times of communication and of products, alone and together, in microseconds.

    share: of the shorter one, that no longer shows: 1 where both take as long as the longer one, 0
    where they take as long as one after the other.
    """

    communication_us: float
    product_us: float
    together_us: float
    share: float

    @classmethod
    def of(cls, communication_us: float, product_us: float, together_us: float) -> Hidden:
        """Compute the share: of 30, 50 and 60 us together, 20 of 30 us are hidden."""
        saved = communication_us + product_us - together_us
        return cls(
            communication_us=communication_us,
            product_us=product_us,
            together_us=together_us,
            share=saved / min(communication_us, product_us),
        )


def normal_halves(
    buffer: Buffer, x: Tensor | tuple[Tensor, Tensor], rows: Tensor, handle: tuple[Tensor, ...]
) -> Mapping[str, Halves]:
    """Return a dispatch of `x` along a handle, and a combine of its `rows`, as asynchronous calls.

    x: tokens [T, H], or their codes and scales.   rows: [R, H], bfloat16.
    """

    def dispatch() -> End:
        *_, event = buffer.dispatch(
            x,
            handle=handle,
            previous_event=buffer.capture(),
            async_finish=True,
            allocate_on_comm_stream=True,
        )
        return event.current_stream_wait

    def combine() -> End:
        *_, event = buffer.combine(
            rows,
            handle,
            previous_event=buffer.capture(),
            async_finish=True,
            allocate_on_comm_stream=True,
        )
        return event.current_stream_wait

    return {"dispatch": Halves(begins=(dispatch,)), "combine": Halves(begins=(combine,))}


@dataclass(kw_only=True, eq=False)
class LowLatencyPair:
    """A pair of low latency of which both calls have two halves.

    rows: results of experts.   handle, y: of the last dispatch and combine.
    """

    buffer: Buffer
    x: Tensor
    ids: Tensor
    weights: Tensor
    sizes: tuple[int, int]
    rows: Tensor
    handle: tuple[Tensor, Tensor, int, int, int] | None = None
    y: Tensor | None = None

    def halves(self, *, is_async: bool) -> Halves:
        """Return a dispatch and a combine, on the communication stream or with a hook."""

        def end_of(event: EventOverlap, hook: End | None) -> End:
            return event.current_stream_wait if hook is None else hook

        def dispatch() -> End:
            *_, self.handle, event, hook = self.buffer.low_latency_dispatch(
                self.x, self.ids, *self.sizes, async_finish=is_async, return_recv_hook=not is_async
            )
            return end_of(event, hook)

        def combine() -> End:
            assert self.handle is not None, "a dispatch came before"
            self.y, event, hook = self.buffer.low_latency_combine(
                self.rows,
                self.ids,
                self.weights,
                self.handle,
                async_finish=is_async,
                return_recv_hook=not is_async,
            )
            return end_of(event, hook)

        return Halves(begins=(dispatch, combine))


def timed_hidden(
    halves: Halves,
    work: Callable[[], object],
    times_us: Timed,
    device: torch.device,
    *,
    num_sms: int,
    is_graph: bool,
) -> Hidden:
    """Time halves and the products between them, alone and together.

    num_sms: SMs that the products leave free.   is_graph: capture the calls, which read no counts.

    Collective: yes.   Host sync: yes.
    """
    calls = (
        halves.alone,
        lambda: [work() for _ in halves.begins],
        lambda: halves.around(work),
    )
    is_on_gpu = device.type == "cuda"
    with free_sms(num_sms) if is_on_gpu and num_sms else nullcontext():
        found = [
            times_us(repeated(call, is_graph=is_graph and is_on_gpu), _CALLS) for call in calls
        ]
    return Hidden.of(*found)


def repeated(call: Callable[[], object], *, is_graph: bool) -> Callable[[], object]:
    """Return _CALLS calls one after another."""

    def calls() -> None:
        for _ in range(_CALLS):
            call()

    return captured(calls).replay if is_graph else calls
