"""Refuse calls that break rules of use, and limits of sizes unless these are switched off."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_LIMITS_ARE_ON: ContextVar[bool] = ContextVar("limits_are_on", default=True)


@contextmanager
def limits_off() -> Iterator[None]:
    """While open, accept sizes for which the real package is not compiled or has no memory.

    For suites with small sizes. Rules that hold at any size (dtypes, contiguity, T <= M) stay.
    """
    token = _LIMITS_ARE_ON.set(False)
    try:
        yield
    finally:
        _LIMITS_ARE_ON.reset(token)


def is_enforced() -> bool:
    """Return whether limits of sizes apply."""
    return _LIMITS_ARE_ON.get()


def require(condition: bool, rule: str) -> None:
    """Check a rule that holds at any size, in the words of the real package.

    Raises:
        RuntimeError: as an EP_HOST_ASSERT arrives in Python.
    """
    if not condition:
        raise RuntimeError(f"Assertion exception (fake of deep_ep): {rule}")


def require_size(condition: bool, rule: str) -> None:
    """Require a limit that limits_off() lifts."""
    require(condition or not is_enforced(), rule)
