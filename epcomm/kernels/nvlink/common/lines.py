"""Lines: three words of 32 bits with the epoch that wrote them, one access of 128 bits.

A rank polls a line until its flag is the epoch of the batch, and then has its words as well, so
nothing is released or acquired: one store crosses NVLink. Lines take a third more bytes than rows,
which pays off for a few tokens. A short line is a word with its epoch, one access of 64 bits.

The words of a row are in parts of three planes, and line j of a part has word j of each plane, so
that words of neighbouring lines are neighbours. With planes of 4 words, the second part of a row
has the words 12 to 23, and its lines 12 16 20 | 13 17 21 | 14 18 22 | 15 19 23.

Rules: memory of lines contains nothing else and is zero at first. Epochs begin at 1 and grow; 0 is
left out when they wrap. Flags of data are compared for equality. The flag of the credit of combine
is compared by order, because the next credit may have arrived when a slow program looks. Every line
of a batch is awaited, or no rank uses it: stores of one rank to one address keep their order. The
model of tests/kernels/nvlink/test_line_protocol.py tests these rules in random schedules.

Reads are ordered before the writes of the next batch as follows. A rank sends the line that gives
the credit in a kernel after those that read, whose loads have returned. The sender of combine gives
the credit before it has read the rows that it combines in place. A rank that combines rows in place
must therefore send a sum for each row that it reads: their source awaits these sums before it
dispatches again.

All threads of a program must leave a wait together, because they synchronise in it. Each warp sees
memory, the abort flag and the clock by itself, so what they found is reduced first.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl

from epcomm.kernels.launch import IS_INTERPRETED
from epcomm.kernels.nvlink.common import constexprs
from epcomm.kernels.nvlink.common.exchange import Peers
from epcomm.kernels.nvlink.common.layout import (
    LINE_BYTES,
    LINE_WORDS,
    MAX_LINE_RANKS,
    SHORT_LINE_BYTES,
)
from epcomm.kernels.nvlink.common.signals import (
    abort_if_missing,
    int32_at,
    living_ranks,
    polls_spent,
)
from epcomm.kernels.nvlink.common.status import WAIT_CREDIT

# Polls that one look counts for in an interpreter, because it does more work there.
INTERPRETED_POLLS = 4

_SHORT_LINE_BYTES = tl.constexpr(SHORT_LINE_BYTES)
# From one line to the next, in units of 64 bits.
_LINE_STRIDE = tl.constexpr(LINE_BYTES // SHORT_LINE_BYTES)
_LINE_WORDS = tl.constexpr(LINE_WORDS)
# Word, word, word and flag are one access. A whole load is volatile, which is relaxed.sys that is
# done as it is; from the other, the assembler makes smaller loads of the words that are used, which
# are up to a third faster together.
_STORE_LINE = tl.constexpr(
    "{ .reg .pred p; .reg .b64 low, high; .reg .b128 line; setp.ne.s32 p, $6, 0; "
    "mov.b64 low, {$2, $3}; mov.b64 high, {$4, $5}; mov.b128 line, {low, high}; "
    "@p st.relaxed.sys.global.b128 [$1], line; mov.b32 $0, 0; }"
)
_LOAD = (
    "{ .reg .pred p; .reg .b64 low, high; .reg .b128 line; setp.ne.s32 p, $5, 0; "
    "mov.b64 low, 0; mov.b64 high, 0; mov.b128 line, {low, high}; "
    "@p ld.HOW.global.b128 line, [$4]; mov.b128 {low, high}, line; "
    "mov.b64 {$0, $1}, low; mov.b64 {$2, $3}, high; }"
)
_LOAD_WHOLE_LINE = tl.constexpr(_LOAD.replace("HOW", "volatile"))
_LOAD_WORDS = tl.constexpr(_LOAD.replace("HOW", "relaxed.sys"))
_IS_INTERPRETED = tl.constexpr(IS_INTERPRETED)
_INTERPRETED_POLLS = tl.constexpr(INTERPRETED_POLLS)
# A wait keeps the ranks that it still misses as bits, below this one.
_ABORTED = tl.constexpr(1 << MAX_LINE_RANKS)


@triton.jit
def next_epoch(epoch: tl.tensor) -> tl.tensor:
    """Return the epoch after an epoch: never 0, the flag of lines that no rank has written."""
    return tl.where(epoch == -1, 1, epoch + 1)


@triton.jit
def int64_at(address: tl.tensor) -> tl.tensor:
    """Return a pointer to the short line at an address."""
    # The interpreter types an integer by its value, and a CPU has addresses below 2**31.
    return tl.multiple_of(address.to(tl.int64).to(tl.pointer_type(tl.int64)), 16)


@triton.jit
def line_of(word: tl.tensor, epoch: tl.tensor) -> tl.tensor:
    """Return the short line of a word, int32: 3 * 2**32 + 5 of the word 5 in epoch 3."""
    return (tl.cast(epoch, tl.int64) << 32) | (word.to(tl.int64) & 0xFFFFFFFF)


@triton.jit
def word_of(line: tl.tensor) -> tl.tensor:
    """Return the word of a short line."""
    return line.to(tl.int32)


@triton.jit
def flag_of(line: tl.tensor) -> tl.tensor:
    """Return the epoch of a short line, 0 before the first."""
    return (line >> 32).to(tl.int32)


@triton.jit
def store_lines(
    address: tl.tensor, line: tl.tensor, words: tl.tuple, epoch: tl.tensor, is_stored: tl.tensor
) -> None:
    """Store three words, int32, in each of some lines after an address.

    All threads of the program store: `line` has as many elements as threads, or more.
    """
    lines_ptr = int64_at(address) + line * _LINE_STRIDE
    if _IS_INTERPRETED:
        for each in tl.static_range(_LINE_WORDS):  # pyright: ignore[reportArgumentType]
            tl.store(lines_ptr + each, line_of(words[each], epoch), mask=is_stored)
    else:
        tl.inline_asm_elementwise(
            _STORE_LINE,  # pyright: ignore[reportArgumentType]
            "=r,l,r,r,r,r,r",
            [lines_ptr, words[0], words[1], words[2], epoch, is_stored.to(tl.int32)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )


@triton.jit
def load_lines(
    address: tl.tensor,
    line: tl.tensor,
    is_loaded: tl.tensor,
    IS_WHOLE: tl.constexpr = True,  # pyright: ignore[reportArgumentType]
) -> tl.tuple:
    """Load some lines after an address: three words, and the epoch that wrote them, else 0.

    IS_WHOLE: words are used with the flag of this load. Otherwise only the flag is used, or only
        words of a line that has been awaited.
    """
    LOAD: tl.constexpr = _LOAD_WHOLE_LINE if IS_WHOLE else _LOAD_WORDS  # pyright: ignore[reportAssignmentType]
    lines_ptr = int64_at(address) + line * _LINE_STRIDE
    if _IS_INTERPRETED:
        first = tl.load(lines_ptr, mask=is_loaded, other=0, volatile=True)
        second = tl.load(lines_ptr + 1, mask=is_loaded, other=0, volatile=True)
        third = tl.load(lines_ptr + 2, mask=is_loaded, other=0, volatile=True)
        is_whole = (flag_of(first) == flag_of(second)) & (flag_of(second) == flag_of(third))
        flags = tl.where(is_whole, flag_of(first), 0)
        return word_of(first), word_of(second), word_of(third), flags  # pyright: ignore[reportReturnType]
    else:  # noqa: RET505 - what is not compiled must be the other branch
        return tl.inline_asm_elementwise(  # pyright: ignore[reportReturnType]
            LOAD,  # pyright: ignore[reportArgumentType]
            "=r,=r,=r,=r,l,r",
            [lines_ptr, is_loaded.to(tl.int32)],
            dtype=(tl.int32, tl.int32, tl.int32, tl.int32),
            is_pure=False,
            pack=1,
        )


@triton.jit
def word_in_row(line: tl.tensor, plane: tl.constexpr, PLANE: tl.constexpr) -> tl.tensor:
    """Return the index in its row of the word of a plane in a line: 17 of line 5, plane 1 of 4."""
    part = line // PLANE
    return line + (part * (_LINE_WORDS - 1) + plane) * PLANE  # pyright: ignore[reportOperatorIssue]


@triton.jit
def words_of(elements: tl.tensor) -> tl.tensor:
    """Return elements [n] of 8, 16 or 32 bits as words: the bytes 1 2 3 4 are 0x04030201."""
    BITS: tl.constexpr = elements.dtype.primitive_bitwidth  # pyright: ignore[reportAssignmentType]
    SIZE: tl.constexpr = elements.shape[0]  # pyright: ignore[reportArgumentType, reportGeneralTypeIssues]
    if BITS == 32:
        words = elements.to(tl.int32, bitcast=True)
    elif BITS == 16:
        words = _paired(elements.to(tl.int16, bitcast=True).to(tl.int32), SIZE, 16)
    else:
        halves = _paired(elements.to(tl.int8, bitcast=True).to(tl.int32), SIZE, 8)
        words = _paired(halves, SIZE // 2, 16)
    return words


@triton.jit
def _paired(values: tl.tensor, SIZE: tl.constexpr, BITS: tl.constexpr) -> tl.tensor:
    """Put neighbours together: 1 2 3 4 of 8 bits are 0x0201 0x0403."""
    low, high = tl.split(tl.reshape(values, [SIZE // 2, 2]))
    return (low & ((1 << BITS) - 1)) | (high << BITS)  # pyright: ignore[reportOperatorIssue]


@triton.jit
def elements_of(words: tl.tensor, DTYPE: tl.constexpr) -> tl.tensor:
    """Return words [n] as elements of 16 or 32 bits, what words_of() was given."""
    BITS: tl.constexpr = DTYPE.primitive_bitwidth  # pyright: ignore[reportAttributeAccessIssue]
    SIZE: tl.constexpr = words.shape[0]  # pyright: ignore[reportArgumentType, reportGeneralTypeIssues]
    if BITS == 32:
        return words.to(DTYPE, bitcast=True)  # pyright: ignore[reportArgumentType]
    else:  # noqa: RET505 - what is not compiled must be the other branch
        halves = tl.join(words & 0xFFFF, (words >> 16) & 0xFFFF)
        return tl.reshape(halves, [2 * SIZE]).to(tl.int16).to(DTYPE, bitcast=True)


@triton.jit
def in_lanes(values: tl.tensor, LANES: tl.constexpr) -> tl.tensor:
    """Return values [n] in LANES lanes, each as often: 1 1 2 2 of 1 2."""
    SIZE: tl.constexpr = values.shape[0]  # pyright: ignore[reportArgumentType, reportGeneralTypeIssues]
    return tl.reshape(tl.broadcast_to(values[:, None], [SIZE, LANES // SIZE]), [LANES])


@triton.jit
def bits_of_ranks(is_late: tl.tensor, LANES: tl.constexpr) -> tl.tensor:
    """Return flags [LANES] of ranks as bits: 5 of 1 0 1 0."""
    lane = tl.arange(0, LANES)
    return tl.sum(tl.where(is_late, 1 << tl.minimum(lane, 30), 0))


class Looks(NamedTuple):
    """The looks of a wait so far: the ranks that are late as bits, and when the next poll ends."""

    late: Any
    polls_left: Any
    number: Any
    end_ns: Any


@triton.jit
def begin_wait(max_polls: tl.tensor) -> Looks:
    """Return the state of a wait before the first look."""
    number = max_polls * 0
    return Looks(number + 1, max_polls, number, number.to(tl.int64))


@triton.jit
def is_waiting(looks: Looks) -> tl.tensor:
    """Return whether to look again: a rank is late, no rank has aborted, and polls are left."""
    return (looks.late > 0) & (looks.late < _ABORTED) & (looks.polls_left > 0)


@triton.jit
def end_look(looks: Looks, late: tl.tensor, aborted: tl.tensor, THREADS: tl.constexpr) -> Looks:
    """Combine what all threads of the program have seen in a look, and count the look.

    late: bits of the ranks whose lines have not arrived, of all threads or [THREADS].
    aborted: the abort flag.
    """
    seen = tl.where(aborted != 0, _ABORTED, late)
    late = tl.max(tl.zeros([THREADS], tl.int32) + seen)
    number = looks.number + 1
    spent, end_ns = polls_spent(number, looks.end_ns, THREADS)  # pyright: ignore[reportGeneralTypeIssues]
    if _IS_INTERPRETED:
        spent *= _INTERPRETED_POLLS
    return Looks(late, looks.polls_left - spent, number, end_ns)


@triton.jit
def abort_if_late(
    peers: Peers, late: tl.tensor, wait: tl.constexpr, epoch: tl.tensor, c: constexprs.Layout
) -> tl.tensor:
    """End a wait for lines as abort_if_missing() does; return whether this rank cannot continue.

    late: bits of the ranks whose lines did not arrive, as end_look() left them.
    """
    is_lost = late != 0
    if is_lost:
        lane = tl.arange(0, c.W_LANES)
        is_aborted = late == _ABORTED
        aborted = tl.where(is_aborted, tl.load(int32_at(peers.own_address), volatile=True), 0)
        is_late = (is_aborted == 0) & (lane < c.W) & (((late >> tl.minimum(lane, 30)) & 1) != 0)
        abort_if_missing(is_late.to(tl.int32), aborted, peers, wait, epoch, c)
    return is_lost


@triton.jit
def send_to_all(
    peers: Peers,
    lines_at: tl.constexpr,
    stride: tl.constexpr,
    epoch: tl.tensor,
    c: constexprs.Layout,
) -> None:
    """Send a short line with the word 0 to every rank, at index rank * stride after `lines_at`."""
    is_rank = living_ranks(peers, c)
    bases = tl.load(peers.bases + tl.arange(0, c.W_LANES), mask=is_rank, other=0)
    addresses = bases + lines_at + peers.rank * (stride * _SHORT_LINE_BYTES)
    lines = line_of(tl.zeros([c.W_LANES], tl.int32), epoch)
    tl.store(addresses.to(tl.pointer_type(tl.int64)), lines, mask=is_rank)


@triton.jit
def give_credit(peers: Peers, epoch: tl.tensor, c: constexprs.Layout) -> None:
    """End `epoch`, of which this rank has read the batch, as a combine would."""
    # Read by await_credit() on every rank: all loads of kernels before this one have returned.
    send_to_all(peers, c.COMBINED_LINES_AT, 1, epoch, c)  # pyright: ignore[reportArgumentType]


@triton.jit
def await_all(
    peers: Peers,
    lines_at: tl.constexpr,
    stride: tl.constexpr,
    wanted: tl.tensor,
    c: constexprs.Layout,
    THREADS: tl.constexpr,
) -> tl.tensor:
    """Wait for short lines of all ranks, as of send_to_all(), in the epoch `wanted` or later.

    Returns: bits of the ranks whose lines did not arrive, as end_look() returns them.
    """
    is_rank = living_ranks(peers, c)
    lines_ptr = int64_at(peers.buffer_address + lines_at) + tl.arange(0, c.W_LANES) * stride
    looks = begin_wait(peers.max_polls)
    while is_waiting(looks):
        aborted = tl.load(int32_at(peers.own_address), volatile=True)
        lines = tl.load(lines_ptr, mask=is_rank, other=0, volatile=True)
        is_late = is_rank & (flag_of(lines) - wanted < 0)
        looks = end_look(looks, bits_of_ranks(is_late, c.W_LANES), aborted, THREADS)
    return looks.late


@triton.jit
def await_credit(
    peers: Peers, epoch: tl.tensor, c: constexprs.Layout, THREADS: tl.constexpr
) -> tl.tensor:
    """Wait until every rank has read the last batch of a receive buffer, which may be written then.

    Returns: whether this rank cannot continue.
    """
    # -1 for the first epoch, because the lines of 0 at first are not before it.
    previous = tl.where(epoch == 1, -1, epoch - 1)
    late = await_all(peers, c.COMBINED_LINES_AT, 1, previous, c, THREADS)  # pyright: ignore[reportArgumentType]
    return abort_if_late(peers, late, WAIT_CREDIT, epoch, c)
