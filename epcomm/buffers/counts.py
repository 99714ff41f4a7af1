"""The counts message of exact-size buffers: what it holds and what a rank reads from it.

It is the header of the call, with what each rank needs to know alone: the rows and the slots of
each of its experts. It goes out before the rows, so that sizes, faults and flags cost one small
message and one host sync together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from epcomm.buffers.base import DispatchCall
from epcomm.buffers.faults import any_flags, check_gradients, ids_error, raise_faults
from epcomm.collectives.call_order import (
    COUNTS_IN_HEADER,
    FAULT,
    FLAGS,
    HEADER_WORDS,
    MESSAGE_BYTES,
    MESSAGE_WORDS,
    ROWS,
    CallOrder,
    CallSign,
    seal,
)
from epcomm.errors import RankNames, shown
from epcomm.protocol import BatchFlags, FaultCode
from epcomm.spec import BufferSpec


@dataclass(frozen=True, kw_only=True, eq=False)
class Counts:
    """The counts of what this rank will receive.

    rows_from_rank: [W].   tokens_per_expert: [L], and the same as an int64 tensor on the device.
    any_flags: the flags of all ranks, or-ed.
    """

    rows_from_rank: tuple[int, ...]
    tokens_per_expert: tuple[int, ...]
    device_tokens_per_expert: Tensor
    any_flags: BatchFlags


@dataclass(frozen=True, kw_only=True, eq=False)
class CountsMessage:
    """The header of a dispatch for each rank, [W, words], int64, and counts that do not fit.

    header: with the slots of the first COUNTS_IN_HEADER experts.
    rest: [W, L - COUNTS_IN_HEADER], those of the others.
    """

    header: Tensor
    rest: Tensor

    @classmethod
    def make(
        cls,
        calls: CallOrder,
        sign: CallSign,
        flags: BatchFlags,
        counts: tuple[Tensor, Tensor, Tensor],
        *,
        has_rest: bool,
    ) -> CountsMessage:
        """Write the message, without a host sync.

        Args:
            calls: of the group.
            sign: of the dispatch.
            flags: of this rank's batch.
            counts: FaultCode, a scalar; rows for each rank, [W] or one number for all; slots of
                all experts, [P].
            has_rest: counts beyond the header's capacity take a second exchange; else it is longer.
        """
        fault, rows, slots = counts
        words = calls.header(sign, flags=int(flags))
        num_experts = slots.numel() // calls.world_size
        num_here = min(num_experts, COUNTS_IN_HEADER) if has_rest else num_experts
        header = calls.message(words, max(MESSAGE_WORDS, HEADER_WORDS + num_here))
        header[:, FAULT] = fault
        header[:, ROWS] = rows
        by_rank = slots.view(calls.world_size, num_experts)
        header[:, HEADER_WORDS : HEADER_WORDS + num_here] = by_rank[:, :num_here]
        seal(header)
        return cls(header=header, rest=by_rank[:, num_here:].contiguous())

    @classmethod
    def empty(cls, calls: CallOrder, num_experts: int, *, has_rest: bool) -> CountsMessage:
        """Return a message of zeros that a kernel writes.

        Args:
            calls: of the group.
            num_experts: L.
            has_rest: see make().
        """
        num_here = min(num_experts, COUNTS_IN_HEADER) if has_rest else num_experts
        num_words = max(MESSAGE_WORDS, HEADER_WORDS + num_here)
        header = calls.message((), num_words)
        return cls(header=header, rest=header.new_zeros(calls.world_size, num_experts - num_here))

    @property
    def row_bytes(self) -> int:
        """The bytes of the header for one rank."""
        return 8 * (self.header.shape[1] + self.rest.shape[1])


def counts_bytes(num_local_experts: int) -> int:
    """Return the bytes of the message for one rank, in one exchange or two."""
    return MESSAGE_BYTES + 8 * max(num_local_experts - COUNTS_IN_HEADER, 0)


def read_counts(
    headers: Sequence[Sequence[int]],
    device_slots: Tensor,
    call: DispatchCall,
    spec: BufferSpec,
    calls: CallOrder,
    *,
    rows_have_slots: bool,
) -> Counts:
    """Read the headers from all ranks, which make the same call and have passed check_words().

    Args:
        headers: by rank, on the host; the slots behind them are those of this rank's experts.
        device_slots: [W, L], the same slots on the device.
        call: this rank's call.
        spec: of the buffer.
        calls: of the group.
        rows_have_slots: a rank sends a row only where it has a slot.

    Raises:
        ShapeError, CapacityError: some rank reported a fault; on every rank.
        ConfigError: some ranks need gradients, others run under no_grad; on every rank.
        EPError: counts that no rank can have sent; then the group ends, see CallOrder.reject().
    """
    codes, flags = ([words[place] for words in headers] for place in (FAULT, FLAGS))
    check_headers(codes, flags, call, spec.num_local_experts * calls.world_size, calls.names)
    num_slots = device_slots.shape[1]
    slots_from_rank = [words[HEADER_WORDS : HEADER_WORDS + num_slots] for words in headers]
    for rank, (words, slots) in enumerate(zip(headers, slots_from_rank, strict=True)):
        num_rows, most = words[ROWS], spec.max_tokens_per_rank
        if most is not None and num_rows > most:
            calls.reject(rank, f"rows {num_rows}, expected at most max_tokens_per_rank = {most}")
        least = num_rows if rows_have_slots else 0
        if min(slots) < 0 or not least <= sum(slots) <= num_rows * spec.top_k:
            expected = f"{least} to {num_rows * spec.top_k} for {num_rows} rows"
            calls.reject(rank, f"slots {shown(slots)}, expected {expected}")
    return Counts(
        rows_from_rank=tuple(words[ROWS] for words in headers),
        tokens_per_expert=tuple(map(sum, zip(*slots_from_rank, strict=True))),
        device_tokens_per_expert=device_slots.sum(0),
        any_flags=any_flags(flags),
    )


def check_headers(
    codes: Sequence[int],
    flags: Sequence[int],
    call: DispatchCall,
    num_experts: int,
    names: RankNames,
) -> None:
    """Raise what the headers of a dispatch say is wrong: a fault word and BatchFlags a rank.

    Raises:
        ShapeError, CapacityError, ConfigError: as read_counts().
    """
    own_error = call.error
    if codes[names.place] == FaultCode.IDS:
        own_error = ids_error(call.topk_ids, num_experts, names)
    raise_faults(codes, names, own_error)
    check_gradients(flags, names, call.expert_names)
