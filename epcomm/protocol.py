"""Numbers on which hosts and kernels agree: faults, flags, waits, and entries of a report.

Below buffers and kernels, so that neither repeats them. Triton kernels take them as constants from
kernels/nvlink/common/status.py, kernels in CUDA C++ as definitions.
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
        """Return the code that reports `error`, found in dispatch or in combine."""
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
        """Return the flags of experts of which these tensors train, with their bits."""
        bits = sum(1 << place for place, trained in enumerate(trains) if trained)
        told = bits & ((1 << MAX_TRAINED) - 1)
        return cls((told << TRAINED_SHIFT) | (cls.EXPERTS_NEED_GRAD if bits else cls.NONE))


# What must be equal on all ranks of a batch with gradients.
COMPARED_FLAGS = (((1 << MAX_TRAINED) - 1) << TRAINED_SHIFT) | int(BatchFlags.GRAD_ENABLED)


# In a status, one int32, the flags lie above the fault code.
FLAGS_SHIFT = 8
FAULT_MASK = (1 << FLAGS_SHIFT) - 1


def pack_status(code: FaultCode, flags: BatchFlags) -> int:
    """Return the FaultCode and the BatchFlags of a rank in one int32."""
    return int(code) | (int(flags) << FLAGS_SHIFT)


def unpack_status(status: int) -> tuple[int, int]:
    """Return the FaultCode and the BatchFlags of a status of pack_status()."""
    return status & FAULT_MASK, status >> FLAGS_SHIFT


class Wait(IntEnum):
    """The signal that a kernel waited for in vain, as it reports it."""

    # Of low latency.
    CREDIT = 1
    DISPATCH = 2
    COMBINE = 3
    # Of normal mode.
    DISPATCH_BEGIN = 11
    HEADERS = 12
    ROWS = 13
    COMBINE_BEGIN = 14
    SUMS = 15


# Entries of the report of a kernel (int32): the Wait, its epoch, the abort flag of the rank that
# timed out first, and then one entry for each rank, not 0 if it is missing.
REPORT_WAIT, REPORT_EPOCH, REPORT_ABORTED, REPORT_MISSING = 0, 1, 2, 4

# The abort flag: 1 + the rank that timed out, then a bit for each missing rank, as many as fit.
MISSING_SHIFT, MAX_MISSING = 8, 23


def decode_abort(value: int) -> tuple[int, list[int]]:
    """Return the rank that timed out, and the missing ranks: of 2 + 2**8 + 2**10, 1 and [0, 2]."""
    missing = [rank for rank in range(MAX_MISSING) if value >> (MISSING_SHIFT + rank) & 1]
    return (value & (2**MISSING_SHIFT - 1)) - 1, missing


# 32-bit words of a header of normal mode over NVLink before its lists: status, T.
HEADER_WORDS = 2
# Receive buffers of a rank over NVLink, unless the configuration asks for another number.
NUM_BUFFERS = 2
