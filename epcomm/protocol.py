"""Numbers that ranks send one another: fault codes and flags of a batch.

Hosts and kernels read them alike.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import IntEnum, IntFlag

from epcomm.errors import CapacityError, ConfigError, EPError, HandleError


class FaultCode(IntEnum):
    """The reason why a rank sends no rows."""

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
        """The code that reports `error`, found in dispatch or in combine."""
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


# In a status, one int32, the flags lie above the fault code.
FLAGS_SHIFT = 8


# Where bits of tensors of the experts begin, and how many code and flags leave in an int32.
TRAINED_SHIFT, MAX_TRAINED = 3, 20


class BatchFlags(IntFlag):
    """The flags by which a rank describes its batch; the value travels with its counts.

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


def pack_status(code: FaultCode, flags: BatchFlags) -> int:
    """Return the status of a rank whose fault the host knows."""
    return int(code) | (int(flags) << FLAGS_SHIFT)


def unpack_status(status: int) -> tuple[int, int]:
    """Return the FaultCode and the BatchFlags of a status of pack_status()."""
    return status & ((1 << FLAGS_SHIFT) - 1), status >> FLAGS_SHIFT


# 32-bit words of a header of normal mode over NVLink before its lists: status, T.
NORMAL_HEADER_WORDS = 2
