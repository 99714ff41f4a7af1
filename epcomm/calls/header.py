"""The words of a call's header, which every rank sends to every other before any rows."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache
from zlib import crc32

import torch

# The words of a header. CHECK makes the sum of all words of a message zero, modulo 2**64.
# PAIRS is the number of rows that combine returns for the ROWS rows, with BufferSpec.sum_groups.
KIND, CHECK, BUFFER, DISPATCHER, BATCH, NUMBER, SIZE, FAULT, FLAGS, ROWS, PAIRS = range(11)
HEADER_WORDS = 11
# The header is followed by the slot counts of up to 128 experts of the receiving rank; more need a
# second exchange. 128 experts per rank are half of the 256 of the largest models, and with the
# header they are 1112 B, which fit into one Ethernet packet.
COUNTS_IN_HEADER = 128
MESSAGE_WORDS = HEADER_WORDS + COUNTS_IN_HEADER
MESSAGE_BYTES = 8 * MESSAGE_WORDS
# Wildcard in place of a number: a rank that refuses a combine does not know the batch.
ANY = -1

# Bits of the dtype in SIZE.
DTYPE_BITS = 16


class CallKind(IntEnum):
    """The kind of a collective call.

    text: the kind in words for messages, such as `backward of combine`.
    phase: the name of its header exchange in messages about a timeout.
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
        """Make the kind `value`, whose headers are exchanged in `phase`."""
        kind = int.__new__(cls, value)
        kind._value_ = value
        kind.text, kind.phase = text, phase or f"{text} calls"
        return kind


@dataclass(frozen=True, kw_only=True)
class CallSign:
    """The fields that identify a call together with its kind; equal on all ranks.

    buffer, dispatcher: numbers from Calls.add_buffer() and add_dispatcher(), 0 for none.
    batch: number of the call that dispatched the batch; for a dispatch, its own number.
    size: rows_size() of the rows, or operation_sign() of an operation; 0 for none.
    """

    buffer: int = 0
    dispatcher: int = 0
    batch: int = 0
    size: int = 0


# The sign of a call that belongs to no buffer.
NO_BUFFER = CallSign()
# The sign of a rank that refuses a call without knowing its buffer or batch.
ANY_BATCH = CallSign(buffer=ANY, dispatcher=ANY, batch=ANY, size=ANY)


@lru_cache(maxsize=64)
def rows_size(num_columns: int, dtype: torch.dtype) -> int:
    """Return the word that describes rows of `num_columns` elements of `dtype` in a header."""
    return num_columns << DTYPE_BITS | crc32(str(dtype).encode()) & ((1 << DTYPE_BITS) - 1)


# Characters of operation names; an int64 holds twelve of them.
_LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789_"
_MAX_LETTERS = 12


def operation_sign(name: str) -> CallSign:
    """Return the sign of an operation on an expert parameter; its size encodes the name.

    name: such as `norm`, lower case; only its first twelve characters are used.
    """
    size = 0
    for letter in reversed(name[:_MAX_LETTERS]):
        size = size * (len(_LETTERS) + 1) + _LETTERS.find(letter) + 1
    return CallSign(size=size)


def operation_of(size: int) -> str:
    """Return the name that operation_sign() encoded in `size`."""
    name = ""
    while size > 0:
        size, letter = divmod(size, len(_LETTERS) + 1)
        name += _LETTERS[letter - 1] if letter else "?"
    return name
