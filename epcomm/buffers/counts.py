"""The counts message of exact-size buffers: what it holds and what a rank reads from it.

A header is int64 words [fault, flags, rows, slots of each expert]; it goes out before the rows, so
that sizes, faults and flags cost one small message and one host read together.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from epcomm.buffers.base import DispatchCall
from epcomm.buffers.faults import (
    BatchFlags,
    FaultCode,
    any_flags,
    check_grad_modes,
    ids_error,
    raise_faults,
)

# Words before the slot counts: fault, flags, rows.
HEADER_WORDS = 3


@dataclass(frozen=True, kw_only=True, eq=False)
class Counts:
    """What this rank will receive.

    rows_from_rank: [W].   slots_per_expert: [L], and the same as an int64 tensor on the device.
    any_flags: the flags of all ranks, or-ed.
    """

    rows_from_rank: tuple[int, ...]
    slots_per_expert: tuple[int, ...]
    device_slots_per_expert: Tensor
    any_flags: BatchFlags


def read_counts(
    headers: Sequence[Sequence[int]],
    device_slots: Tensor,
    call: DispatchCall,
    num_experts: int,
    rank: int,
) -> Counts:
    """Read the headers from all ranks.

    Args:
        headers: by rank, on the host; the slots are those of this rank's experts.
        device_slots: [W, L], the same slots on the device.
        call: this rank's call.
        num_experts: P.
        rank: this rank.

    Raises:
        ShapeError, CapacityError: some rank announced a fault; on every rank.
        ConfigError: some ranks need gradients, others run under no_grad; on every rank.
    """
    codes, flags = [words[0] for words in headers], [words[1] for words in headers]
    check_headers(codes, flags, call, num_experts, rank)
    slots_from_rank = [words[HEADER_WORDS:] for words in headers]
    return Counts(
        rows_from_rank=tuple(words[2] for words in headers),
        slots_per_expert=tuple(sum(column) for column in zip(*slots_from_rank, strict=True)),
        device_slots_per_expert=device_slots.sum(0),
        any_flags=any_flags(flags),
    )


def check_headers(
    codes: Sequence[int], flags: Sequence[int], call: DispatchCall, num_experts: int, rank: int
) -> None:
    """Raise what the headers of a dispatch say is wrong: a FaultCode and BatchFlags a rank.

    Raises:
        ShapeError, CapacityError, ConfigError: as read_counts().
    """
    own_error = call.error
    if codes[rank] == FaultCode.IDS:
        own_error = ids_error(call.topk_ids, num_experts, rank, len(codes))
    raise_faults(codes, rank, own_error)
    check_grad_modes(flags, rank)
