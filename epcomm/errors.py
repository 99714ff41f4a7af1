"""The errors that epcomm raises.

A message is one sentence: function, argument, actual and expected value, rank, remedy.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Self, TypeVar


class EPError(Exception):
    """The base of all errors that epcomm raises on purpose.

    fault_word: the word that relays a reported fault to the ranks of another exchange
        (fault_word() of epcomm/protocol.py); None if no exchange has reported the fault.
    was_passed_on: some rank relayed the fault from another exchange.
    was_raised: the call that found the fault has raised it, so check() does not.
    """

    fault_word: int | None = None
    was_passed_on: bool = False
    was_raised: bool = False


class ConfigError(EPError, ValueError):
    """A configuration, specification or name is not supported, or differs between ranks."""


class PlanRefused(ConfigError):
    """No backend supports a valid layer; the message has a reason for each candidate."""


class ShapeError(EPError, ValueError):
    """A tensor of a call has a wrong shape, dtype, device or value."""


class CapacityError(EPError, RuntimeError):
    """A call has more tokens, rows or slots than the limit set at construction."""


class HandleError(EPError, RuntimeError):
    """A handle is invalid, or ranks do not make the same calls in the same order.

    A handle is invalid if it was combined before, belongs to another dispatcher, or is closed.
    """


class BackendUnavailable(EPError, RuntimeError):
    """A backend that was selected by name cannot run here; the message gives the reasons."""


class EPTimeout(EPError, TimeoutError):
    """Some ranks did not arrive in time; the message names the phase, the call and the ranks.

    phases: the phases of the other ranks that gave up, as far as they are known.
    """

    phases: tuple[str, ...] = ()


class PickleRefused(EPError, TypeError):
    """An object with connections to other ranks was pickled; the message gives the remedy.

    It is a TypeError, as Python raises for objects that cannot be pickled.
    """


# Longest value shown in a message; a longer one hides the sentence around it.
_MAX_SHOWN = 80


def shown(value: object) -> str:
    """Return the repr of a value, cut to a readable length for a message."""
    try:
        text = repr(value)
    except ValueError:
        # Python does not convert integers of more than 4300 digits.
        return "a number of thousands of digits"
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."


def describe_kind(value: object) -> str:
    """Return the kind of a value from JSON, TOML or YAML in words: `a list`, `an object`."""
    if value is None:
        return "null"
    kinds = {bool: "true or false", dict: "an object", list: "a list", str: "text"}
    kinds |= {int: "a number", float: "a number"}
    return kinds.get(type(value), f"a value of type {type(value).__name__}")


K = TypeVar("K")
V = TypeVar("V")


def grouped(pairs: Iterable[tuple[K, V]]) -> dict[K, list[V]]:
    """Return the values of each key, with keys in the order of their first values."""
    found: dict[K, list[V]] = {}
    for key, value in pairs:
        found.setdefault(key, []).append(value)
    return found


def describe_ranks(ranks: Sequence[int]) -> str:
    """Return ranks in words: `rank 2` or `ranks 0, 1, 3`."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


def group_closed(function: str, where: str) -> HandleError:
    """Return the error of a call after close(); where: this rank, such as `rank 3 of 8`."""
    return HandleError(f"{function}: the EPGroup is closed ({where}); make a new one")


@dataclass(frozen=True, kw_only=True)
class RankNames:
    """The numbers of ranks in messages: always those of the EP group, also in a part of it.

    own: the number of this rank.   numbers: the number of each rank that takes part.
    world_size: the number of ranks of the EP group.
    """

    own: int
    numbers: tuple[int, ...]
    world_size: int

    @classmethod
    def of_all(cls, rank: int, world_size: int) -> Self:
        """Return the names of the ranks of a whole group."""
        return cls(own=rank, numbers=tuple(range(world_size)), world_size=world_size)

    @cached_property
    def place(self) -> int:
        """The index of this rank among the ranks that take part."""
        return self.numbers.index(self.own)

    @property
    def where(self) -> str:
        """The name of this rank, such as `rank 3 of 8`."""
        return f"rank {self.own} of {self.world_size}"

    def describe(self, ranks: Sequence[int]) -> str:
        """Return ranks in words, given by their indices in `numbers`: `ranks 1, 3`."""
        return describe_ranks([self.numbers[rank] for rank in ranks])
