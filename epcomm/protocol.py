"""Constants shared by hosts and kernels: faults, flags, waits, and the entries of a report.

Triton kernels import them as constants from kernels/nvlink/common/status.py; CUDA C++ kernels get
them as macros.
"""

from collections.abc import Iterable
from enum import IntEnum, IntFlag
from typing import Self

from epcomm.errors import CapacityError, ConfigError, EPError, HandleError, ShapeError


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
    CALLS = 13
    UNFINISHED = 14

    @classmethod
    def of(cls, error: EPError | None, *, in_combine: bool = False) -> "FaultCode":
        """Return the code that reports `error` of a dispatch or of a combine."""
        if error is None:
            return cls.NONE
        if isinstance(error, HandleError):
            return cls.HANDLE
        if isinstance(error, CapacityError):
            return cls.CAPACITY
        if isinstance(error, ConfigError):
            return cls.NO_GRADIENTS
        if isinstance(error, ShapeError):
            return cls.ROWS if in_combine else cls.SHAPE
        return cls.EXPERTS if in_combine else cls.UNREADY


# The bits of a fault word above its code: 1 + the rank of the EP group that has a relayed fault.
_FAULTY_RANK_SHIFT = 8


def fault_word(error: EPError | None, *, in_combine: bool = False) -> int:
    """Return the word that reports `error`: its FaultCode, and its rank if the fault is relayed.

    in_combine: the error was found in combine, not in dispatch.
    """
    if error is None:
        # Fast path: almost every call succeeds.
        return int(FaultCode.NONE)
    if error.fault_word is not None:
        return error.fault_word
    return int(FaultCode.of(error, in_combine=in_combine))


def pack_fault(code: FaultCode, rank: int) -> int:
    """Return the fault word that relays a fault of `rank` of the EP group."""
    return int(code) | (rank + 1) << _FAULTY_RANK_SHIFT


# The bit of a fault byte that marks a relayed fault; a byte has no bits for the rank.
_RELAYED = 1 << 7


def fault_byte(error: EPError | None) -> int:
    """Return the byte that reports `error`: its FaultCode, and a bit if the fault is relayed."""
    if error is None:
        # Fast path: almost every call succeeds.
        return int(FaultCode.NONE)
    word = fault_word(error)
    code, _ = unpack_fault(word, 0)
    return int(code) | _RELAYED if is_passed_on(word) else int(code)


def fault_word_of_byte(byte: int, rank: int) -> int:
    """Return the fault word of a byte from `rank`; a relayed fault is attributed to `rank`."""
    return pack_fault(FaultCode(byte & ~_RELAYED), rank) if byte & _RELAYED else byte


def is_fault_byte(byte: int) -> bool:
    return 0 <= byte & ~_RELAYED < len(FaultCode)


def is_passed_on(word: int) -> bool:
    """Return whether a fault word relays the fault of another rank than its sender."""
    return word >> _FAULTY_RANK_SHIFT > 0


def unpack_fault(word: int, rank: int) -> tuple[FaultCode, int]:
    """Return the code of a fault word received from `rank`, and the rank that has the fault."""
    passed_on = word >> _FAULTY_RANK_SHIFT
    return FaultCode(word & (1 << _FAULTY_RANK_SHIFT) - 1), passed_on - 1 if passed_on else rank


def is_fault_word(word: int, world_size: int) -> bool:
    """Return whether `word` is a valid fault word in a group of world_size ranks."""
    code = word & (1 << _FAULTY_RANK_SHIFT) - 1
    ranks = range(world_size + 1 if code else 1)
    return code < len(FaultCode) and word >> _FAULTY_RANK_SHIFT in ranks


# The first bit of the expert tensors, and the number of bits that an int32 has for them.
TRAINED_SHIFT, MAX_TRAINED = 3, 20


class BatchFlags(IntFlag):
    """The flags of a rank's batch, sent with its counts.

    Above these bits, each expert tensor has a bit, set if the tensor trains. All ranks use the same
    order of tensors.
    """

    NONE = 0
    GRAD_ENABLED = 1
    INPUTS_NEED_GRAD = 2
    EXPERTS_NEED_GRAD = 4

    @classmethod
    def of_experts(cls, trains: Iterable[bool]) -> Self:
        """Return the flags of expert tensors; `trains` has one entry for each tensor."""
        bits = sum(1 << place for place, trained in enumerate(trains) if trained)
        told = bits & ((1 << MAX_TRAINED) - 1)
        return cls((told << TRAINED_SHIFT) | (cls.EXPERTS_NEED_GRAD if bits else cls.NONE))


MAX_FLAGS = (1 << (TRAINED_SHIFT + MAX_TRAINED)) - 1
# The flags that must be equal on all ranks of a batch with gradients.
COMPARED_FLAGS = (((1 << MAX_TRAINED) - 1) << TRAINED_SHIFT) | int(BatchFlags.GRAD_ENABLED)


# A status, one int32, has the flags above the fault code.
FLAGS_SHIFT = 8
FAULT_MASK = (1 << FLAGS_SHIFT) - 1


def pack_status(code: int, flags: BatchFlags) -> int:
    """Return the status of a rank: its FaultCode or fault_byte(), and its BatchFlags."""
    return int(code) | (int(flags) << FLAGS_SHIFT)


def unpack_status(status: int) -> tuple[int, int]:
    """Return the FaultCode and the BatchFlags of a status from pack_status()."""
    return status & FAULT_MASK, status >> FLAGS_SHIFT


class Wait(IntEnum):
    """The signal that a kernel waited for when it timed out."""

    # Signals of low latency.
    CREDIT = 1
    DISPATCH = 2
    COMBINE = 3
    # Signals of normal mode.
    DISPATCH_BEGIN = 11
    HEADERS = 12
    ROWS = 13
    COMBINE_BEGIN = 14
    SUMS = 15


# Indices in the report of a kernel (int32): the Wait, its epoch, the abort flag of the rank that
# timed out first, then one entry for each rank, nonzero if the rank is missing.
REPORT_WAIT, REPORT_EPOCH, REPORT_ABORTED, REPORT_MISSING = 0, 1, 2, 4

# The abort flag has 1 + the rank that timed out, then bits of the first MAX_MISSING ranks, set if
# the rank is missing.
MISSING_SHIFT, MAX_MISSING = 8, 23


def decode_abort(value: int) -> tuple[int, list[int]]:
    """Return the rank that timed out and the missing ranks: 2 + 2**8 + 2**10 gives 1 and [0, 2]."""
    missing = [rank for rank in range(MAX_MISSING) if value >> (MISSING_SHIFT + rank) & 1]
    return (value & (2**MISSING_SHIFT - 1)) - 1, missing


# 32-bit words before the lists in a header of normal mode over NVLink: status and T.
HEADER_WORDS = 2
# Default number of receive buffers of a rank over NVLink.
NUM_BUFFERS = 2
