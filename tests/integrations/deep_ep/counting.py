from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from unittest.mock import patch

from epcomm.integrations.deep_ep.normal import RowExchange
from epcomm.integrations.deep_ep.ranks import Ranks

EXCHANGES = ("dispatch", "cached_dispatch", "combine")


@contextmanager
def counted_exchanges(exchange: RowExchange) -> Iterator[list[str]]:
    """Yield the names of the exchanges that this rank begins on the buffer of `exchange`.

    Each exchange raises an error before it waits for another rank.
    """
    begun: list[str] = []

    def refuse(name: str) -> Callable[..., None]:
        def begin(*_: object, **__: object) -> None:
            begun.append(name)
            raise AssertionError(f"{name} communicates")

        return begin

    kind = type(exchange.buffer)
    with ExitStack() as patches:
        for owner, names in ((Ranks, ("gather", "announce")), (kind, EXCHANGES)):
            for name in names:
                patches.enter_context(patch.object(owner, name, refuse(name)))
        yield begun
