"""Run micro-batches in turn, so that one computes while the rows of another are sent.

A function that may pause is a generator: it yields after it has begun a transfer, and waits for the
transfer when it is resumed. With two batches a and b, D their dispatch, E experts, C combine:

    caller     attention a | attention b | E a | E b | ...
    transfers              | D a         | D b | C a | C b
"""

from typing import TypeVar

from epcomm.records import Steps

T = TypeVar("T")


def interleave(*batches: Steps[T]) -> list[T]:
    """Run generators in turn, each until its next `yield`; return what they return, in order.

    It starts no threads: transfers run on resources of their EPGroup. A generator pauses in a layer
    by `y = yield from moe.steps(x)`, and by its own `yield` after any other transfer that it has
    begun. It must not pause inside a context that belongs to the thread, such as torch.no_grad()
    or autocast: enter those around interleave().

    Backward of the sum of the losses takes turns too, because autograd runs later nodes first.

    Args:
        batches: generators that have not started, usually two. Without gradients, at most as many
            as the buffer has batches in flight.

    Collective: if the generators make collective calls. All ranks pass equally many generators in
        one order, and each makes the same calls and yields on all ranks; its tokens may differ in
        number, also 0.
    Host sync: none but those of the generators.
    Raises: the first exception, after the other generators have run to their ends, so that no call
        stays unfinished. An error that the calls report on all ranks ends its generator after the
        same call on all ranks, and the group remains usable. If other code raises on some ranks
        only, the ranks make different calls: the others raise HandleError or time out.
    """
    results: dict[int, T] = {}
    problem: Exception | None = None
    running = dict(enumerate(batches))
    while running:
        for number, batch in tuple(running.items()):
            try:
                next(batch)
                continue
            except StopIteration as end:
                results[number] = end.value
            except Exception as error:  # noqa: BLE001
                problem = problem or error
            del running[number]
    if problem is not None:
        raise problem
    return [results[number] for number in range(len(batches))]
