"""Whether the stand-ins enforce the limits of the devices that the packages run on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

_enforced = True


def is_enforced() -> bool:
    """Whether a size that the devices cannot handle is refused."""
    return _enforced


@contextmanager
def limits_off() -> Iterator[None]:
    """While open, sizes that the devices cannot handle are accepted.

    What a call means is still checked: only what follows from kernels and memory is not.
    """
    global _enforced
    before = _enforced
    _enforced = False
    try:
        yield
    finally:
        _enforced = before
