"""Arguments of the launchers of the NVLink kernels: a receive buffer that all ranks write."""

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
    """One receive buffer, as one rank sees it.

    buffer_index: its index.   num_buffers: N.   rank: this one.
    num_programs: P, programs of a kernel that sends; at least W, and equal on all ranks.
    max_polls: of a wait before it gives up, see signals.py.
    buffer_address, abort_address: of the receive buffer and of the abort flag of this rank.
    offsets: in bytes, of the regions of a receive buffer.
    metadata_words: 32-bit words of each of the three parts of a token's metadata.
    data_bytes, scale_bytes, return_bytes: stride in bytes between rows, scales and returned sums.
    table: [N + 1, W], int64: addresses of all ranks' receive buffers, then of their abort flags.
    state: [4], int32: epoch of dispatch (1 at first) and of combine (0), whether the call failed.
    counters: [4], int64: rows, metadata, headers and sums sent to others.
    excluded: [W], int32: not 0: a rank that is not waited for, and to which nothing is sent.
    faults: [W, 2], int64: the first fault code of each rank since the last check, and 0.
    report: [REPORT_MISSING + W], int32, in memory that the host reads while kernels run.

    No tensor here lies in the receive buffer: an interpreter copies its arguments back.
    """

    buffer_index: int
    num_buffers: int
    rank: int
    num_programs: int
    max_polls: int
    buffer_address: int
    abort_address: int
    dims: ExchangeDims
    offsets: Mapping[str, int]
    metadata_words: int
    data_bytes: int
    scale_bytes: int
    return_bytes: int
    table: Tensor
    state: Tensor
    counters: Tensor
    excluded: Tensor
    faults: Tensor
    report: Tensor


def on_device(tensor: Tensor) -> AbstractContextManager[object]:
    """Launch where a tensor is; nothing on a CPU."""
    return torch.cuda.device_of(tensor)
