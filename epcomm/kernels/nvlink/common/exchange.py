"""What the launchers of the NVLink kernels are given: one slot of memory that all ranks write."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class ExchangeDims:
    """W, M, K and L; equal on all ranks."""

    world_size: int
    max_tokens: int
    top_k: int
    num_local_experts: int


@dataclass(frozen=True, kw_only=True, eq=False)
class PeerExchange:
    """One slot, as one rank sees it.

    slot: its number.   num_slots: N.   rank: this one.
    num_programs: P, programs of a kernel that sends; at least W, and equal on all ranks.
    max_polls: of a wait before it gives up, see signals.py.
    slot_address, abort_address: of the slot and of the word to give up by, on this rank.
    offsets: where the regions of a slot begin, in bytes.
    record_words: of each of the three parts of a record.
    data_bytes, scale_bytes, back_bytes: from one row to the next.
    table: [N + 1, W], int64: addresses of all ranks' slots, then of their words to give up by.
    state: [4], int32: epoch of dispatch (1 at first) and of combine (0), whether the call failed.
    counters: [4], int64: rows, records, headers and sums sent to others.
    masked: [W], int32: not 0: a rank that is not waited for, and to which nothing is sent.
    faults: [W, 2], int64: the first fault of each rank since the last check, and another word.
    report: [REPORT_LATE + W], int32, in memory that the host reads while kernels run.

    No tensor here lies in the memory of the slot: an interpreter copies its arguments back.
    """

    slot: int
    num_slots: int
    rank: int
    num_programs: int
    max_polls: int
    slot_address: int
    abort_address: int
    dims: ExchangeDims
    offsets: Mapping[str, int]
    record_words: int
    data_bytes: int
    scale_bytes: int
    back_bytes: int
    table: Tensor
    state: Tensor
    counters: Tensor
    masked: Tensor
    faults: Tensor
    report: Tensor


def on_device(tensor: Tensor) -> AbstractContextManager[object]:
    """Launch where a tensor is; nothing on a CPU."""
    return torch.cuda.device_of(tensor)
