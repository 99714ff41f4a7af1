"""Numbers that ranks send one another: fault codes and flags of a batch.

Hosts and kernels read them alike.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import IntEnum, IntFlag

from epcomm.errors import CapacityError, ConfigError, EPError, HandleError


class FaultCode(IntEnum):
    """Why a rank sends no rows."""

    NONE = 0
    SHAPE = 1
    IDS = 2
    CAPACITY = 3
    OVERFLOW = 4
    GRAD_MODE = 5
    HANDLE = 6
    ROWS = 7
    NO_GRADIENTS = 8
    REPEATED_IDS = 9
    EXPERTS = 10
    FROZEN = 11
    UNREADY = 12

    @classmethod
    def of(cls, error: EPError | None, *, in_combine: bool = False) -> FaultCode:
        """The code that announces `error`, found in dispatch or in combine."""
        if error is None:
            return cls.NONE
        if isinstance(error, HandleError):
            return cls.HANDLE
        if isinstance(error, CapacityError):
            return cls.CAPACITY
        if isinstance(error, ConfigError):
            return cls.NO_GRADIENTS
        if type(error) is EPError:
            return cls.EXPERTS if in_combine else cls.UNREADY
        return cls.ROWS if in_combine else cls.SHAPE


# In a header of one word, the flags lie above the code.
FLAGS_SHIFT = 8


# Where bits of tensors of the experts begin, and how many code and flags leave in an int32.
TRAINED_SHIFT, MAX_TRAINED = 3, 20


class BatchFlags(IntFlag):
    """What a rank says of its batch; travels with its counts.

    Above these lies a bit for each tensor of the experts, in one order on all ranks: it trains.
    """

    NONE = 0
    GRAD_ENABLED = 1
    INPUTS_NEED_GRAD = 2
    EXPERTS_NEED_GRAD = 4

    @classmethod
    def of_experts(cls, trains: Iterable[bool]) -> BatchFlags:
        """The flags of experts of which these tensors train, with their bits."""
        bits = sum(1 << place for place, trained in enumerate(trains) if trained)
        told = bits & ((1 << MAX_TRAINED) - 1)
        return cls((told << TRAINED_SHIFT) | (cls.EXPERTS_NEED_GRAD if bits else cls.NONE))


# What must be equal on all ranks of a batch with gradients.
COMPARED_FLAGS = (((1 << MAX_TRAINED) - 1) << TRAINED_SHIFT) | int(BatchFlags.GRAD_ENABLED)


def pack_word(code: FaultCode, flags: BatchFlags) -> int:
    """Return a FaultCode and BatchFlags of a rank in one word, where the host knows the fault."""
    return int(code) | (int(flags) << FLAGS_SHIFT)


def unpack_word(word: int) -> tuple[int, int]:
    """FaultCode and BatchFlags of a word of pack_word()."""
    return word & ((1 << FLAGS_SHIFT) - 1), word >> FLAGS_SHIFT


# Words of a header of normal mode over NVLink before its lists: fault and flags, T.
NORMAL_HEADER_WORDS = 2
