"""The words of a call's header, which every rank sends to every other before rows travel."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache
from zlib import crc32

import torch

# The words of a header. CHECK makes the sum of all words of a message zero, modulo 2**64.
KIND, CHECK, BUFFER, DISPATCHER, BATCH, NUMBER, SIZE, FAULT, FLAGS, ROWS = range(10)
HEADER_WORDS = 10
# Followed by the slot counts of up to 128 experts of the receiving rank; more take a second
# exchange. 128 experts a rank are half of the 256 of the largest models, and with the header they
# make 1104 B, which one Ethernet packet carries.
COUNTS_IN_HEADER = 128
MESSAGE_WORDS = HEADER_WORDS + COUNTS_IN_HEADER
MESSAGE_BYTES = 8 * MESSAGE_WORDS
# Wildcard in place of a number: a rank that refuses a combine does not know the batch.
ANY = -1

# Bits of the number that stands for a dtype in SIZE.
DTYPE_BITS = 16


class CallKind(IntEnum):
    """The call that a rank is about to make with all others.

    text: the kind in words, such as `backward of combine`, for messages.
    phase: the name of its exchange of headers in messages about a timeout.
    """

    text: str
    phase: str

    RECORDS = 1, "an agreement of all ranks (plan, open_buffer or gather_records)"
    DISPATCH = 2, "dispatch", "dispatch counts"
    COMBINE = 3, "combine"
    COMBINE_BACKWARD = 4, "backward of combine"
    DISPATCH_BACKWARD = 5, "backward of dispatch"
    PARAMETERS = 6, "an operation on an expert parameter"

    def __new__(cls, value: int, text: str, phase: str = "") -> CallKind:
        """Make the kind `value`, whose headers travel in `phase`."""
        kind = int.__new__(cls, value)
        kind._value_ = value
        kind.text, kind.phase = text, phase or f"{text} calls"
        return kind


@dataclass(frozen=True, kw_only=True)
class CallSign:
    """The identity of a call beside its kind, which is equal on all ranks.

    buffer, dispatcher: numbers of Calls.add_buffer() and add_dispatcher(), 0 for none.
    batch: number of the call that dispatched it; of a dispatch, its own, next_batch.
    size: of the rows of the call, see rows_size(), or the name of an operation, see
        operation_sign(); 0 for none.
    """

    buffer: int = 0
    dispatcher: int = 0
    batch: int = 0
    size: int = 0


# Of a call that belongs to no buffer.
NO_BUFFER = CallSign()
# Of a rank that refuses a call of which it knows neither buffer nor batch.
ANY_BATCH = CallSign(buffer=ANY, dispatcher=ANY, batch=ANY, size=ANY)


@lru_cache(maxsize=64)
def rows_size(num_columns: int, dtype: torch.dtype) -> int:
    """Return the word that describes rows of `num_columns` elements of `dtype` in a header."""
    return num_columns << DTYPE_BITS | crc32(str(dtype).encode()) & ((1 << DTYPE_BITS) - 1)


# Characters of the names of operations, of which a number holds twelve.
_LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789_"
_MAX_LETTERS = 12


def operation_sign(name: str) -> CallSign:
    """Return the sign of an operation on an expert parameter, such as `norm`, whose size names it.

    name: lower case; its first twelve characters count.
    """
    size = 0
    for letter in reversed(name[:_MAX_LETTERS]):
        size = size * (len(_LETTERS) + 1) + _LETTERS.find(letter) + 1
    return CallSign(size=size)


def operation_of(size: int) -> str:
    """Return the name that operation_sign() wrote into the size."""
    name = ""
    while size > 0:
        size, letter = divmod(size, len(_LETTERS) + 1)
        name += _LETTERS[letter - 1] if letter else "?"
    return name
