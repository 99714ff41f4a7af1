"""Arguments of the launchers of the kernels of normal mode over NVLink."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from epcomm.kernels.nvlink.common.exchange import ExchangeDims


@dataclass(frozen=True, kw_only=True)
class NormalTuning:
    """How the work is cut; equal on all ranks.

    push_warps: of a program that pushes.   pushed_tokens: that it holds at once.
    combine_warps: of a program of combine.   combined_rows: that it sums at once.
    combine_stages, reduce_stages: rows whose loads are under way at once, of senders and reducers.
    item_rows: sums of one source that share a signal.
    waited_tokens: of a reducer, whose sums it waits for together; at most item_rows.
    reducer_share: share of the programs of combine that add up returned sums.
    """

    push_warps: int = 16
    pushed_tokens: int = 2
    combine_warps: int = 16
    combined_rows: int = 16
    combined_columns: int = 512
    combine_stages: int = 3
    reduce_stages: int = 1
    item_rows: int = 16
    waited_tokens: int = 16
    reducer_share: float = 0.29


@dataclass(frozen=True, kw_only=True, eq=False)
class NormalExchange:
    """The memory of all ranks, as one rank sees it.

    num_programs: P, of every kernel that sends; equal on all ranks.
    max_polls: of a wait before it gives up, see common/signals.py.
    own_address: of this rank's block.   table: [W], int64: addresses of all.
    regions: offset of each, from the beginning of the memory or, behind buffers_at, of a buffer.
    buffer_bytes: stride in bytes between receive buffers.   num_items: of sums from one rank, at
        most.
    num_groups: of tokens that a program plans, at most.
    metadata_words: 32-bit words of each of the three parts of a token's metadata.
    data_bytes, scale_bytes, header_bytes, return_bytes: stride in bytes between rows, the scales
        of rows, headers and returned sums.
    state: [STATE_WORDS], int32.   scratch, bits, counted: the workspace of plan_tokens().
    bases: [P, W * L], int32, both factors padded to powers of two: workspace of the index kernel.
    excluded: [W], int32: not 0: a rank that is not waited for, to which nothing is sent, and of
        which nothing is read.
    counters: [5], int64: headers sent to others, rows sent to others in dispatches and in cached
        dispatches, sums sent to others, sums with scalars.
    faults: [W, 2], int64: the first fault of each rank since the last check, and slots needed.
    report: [REPORT_MISSING + W], int32, in memory that the host reads while kernels run.
    """

    rank: int
    num_programs: int
    max_polls: int
    own_address: int
    table: Tensor
    dims: ExchangeDims
    tuning: NormalTuning
    regions: Mapping[str, int]
    buffers_at: int
    buffer_bytes: int
    num_items: int
    num_groups: int
    metadata_words: int
    data_bytes: int
    scale_bytes: int
    header_bytes: int
    return_bytes: int
    state: Tensor
    scratch: Tensor
    bits: Tensor
    counted: Tensor
    bases: Tensor
    excluded: Tensor
    counters: Tensor
    faults: Tensor
    report: Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class Sends:
    """Where the tokens of this rank go.

    places: [T, W], int32: token t is row places[t, d] of this rank on rank d, or -1.
    positions: [T, K], int32: earlier entries of this rank with the same expert.
    owners: [T, K], int32: the rank of the expert, or -1.
    """

    places: Tensor
    positions: Tensor
    owners: Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class Arrivals:
    """What came from each rank, on the device.

    rows_from: [W], int32.
    row_base: [W], int32: where the rows of a rank begin in the index.
    has_failed: [1], int32, not 0 if the dispatch was refused.
    """

    rows_from: Tensor
    row_base: Tensor
    has_failed: Tensor
