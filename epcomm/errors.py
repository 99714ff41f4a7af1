"""The errors that a user of epcomm can meet.

A message is one sentence: function, argument, what came, what was expected, on which rank, what to
do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property


class EPError(Exception):
    """The base of all errors that epcomm raises on purpose.

    fault_word: of a fault that ranks of an exchange have heard of, what passes it on to those of
        another exchange (fault_word() of epcomm/protocol.py); else None.
    was_passed_on: whether that rank had heard of the fault in another exchange before.
    was_raised: whether the call that found it has raised it, so that check() does not.
    """

    fault_word: int | None = None
    was_passed_on: bool = False
    was_raised: bool = False


class ConfigError(EPError, ValueError):
    """A configuration, a specification or a name cannot be served, or differs between ranks."""


class PlanRefused(ConfigError):
    """Nothing serves a layer that could be; the message has a reason for each candidate."""


class ShapeError(EPError, ValueError):
    """A tensor of a call has a wrong shape, dtype, device or value."""


class CapacityError(EPError, RuntimeError):
    """A call has more tokens, rows or slots than was agreed at construction."""


class HandleError(EPError, RuntimeError):
    """A result was combined twice, by another dispatcher or after close(), or calls differ.

    Calls differ where ranks do not make the same calls in the same order.
    """


class BackendUnavailable(EPError, RuntimeError):
    """A backend that was asked for by name cannot run here; the message says what it lacks."""


class EPTimeout(EPError, TimeoutError):
    """Some ranks did not arrive in time; the message names the phase, the call and the ranks.

    phases: the phase that each other rank which gave up was in, as far as they are known.
    """

    phases: tuple[str, ...] = ()


class PickleRefused(EPError, TypeError):
    """Something that lives on connections to other ranks was pickled; the message says what to do.

    A TypeError, as Python raises it for whatever cannot be pickled.
    """


# Longest value shown in a message; a longer one hides the sentence around it.
_MAX_SHOWN = 80


def shown(value: object) -> str:
    """Write a value for a message, which stays one line of readable length."""
    try:
        text = repr(value)
    except ValueError:
        # Python writes no integer of more than 4300 digits.
        return "a number of thousands of digits"
    return text if len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."


def describe_kind(value: object) -> str:
    """Name the kind of what a file of JSON, TOML or YAML holds: `a list`, `an object`."""
    if value is None:
        return "null"
    kinds = {bool: "true or false", dict: "an object", list: "a list", str: "text"}
    kinds |= {int: "a number", float: "a number"}
    return kinds.get(type(value), f"a value of type {type(value).__name__}")


def describe_ranks(ranks: Sequence[int]) -> str:
    """Name ranks: `rank 2` or `ranks 0, 1, 3`."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


@dataclass(frozen=True, kw_only=True)
class RankNames:
    """The numbers by which messages name ranks: those of the EP group, in parts of it too.

    own: the number of this rank.   numbers: those of the ranks that take part, in their order.
    world_size: ranks of the EP group.
    """

    own: int
    numbers: tuple[int, ...]
    world_size: int

    @classmethod
    def of_all(cls, rank: int, world_size: int) -> RankNames:
        """Name the ranks of a whole group."""
        return cls(own=rank, numbers=tuple(range(world_size)), world_size=world_size)

    @cached_property
    def place(self) -> int:
        """The number of this rank among those that take part."""
        return self.numbers.index(self.own)

    @property
    def where(self) -> str:
        """The place of this rank, such as `rank 3 of 8`."""
        return f"rank {self.own} of {self.world_size}"

    def describe(self, ranks: Sequence[int]) -> str:
        """Name ranks that take part, given by their order: `ranks 1, 3`."""
        return describe_ranks([self.numbers[rank] for rank in ranks])
