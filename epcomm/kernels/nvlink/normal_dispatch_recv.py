"""The expert-major index over rows that came over NVLink, in normal mode.

Waits for the rows of all ranks, reads their metadata, and writes the slots of each row: no row is
read or moved. Slots are ordered by expert, source and token without atomics, for each source has
counted the earlier entries of its own, and the headers say how many came before.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from epcomm.kernels.launch import next_power_of_two
from epcomm.kernels.masks import both
from epcomm.kernels.nvlink.common.epochs import DISPATCH_EPOCH, DISPATCH_LOST, INDEX_LEFT, mark_of
from epcomm.kernels.nvlink.common.exchange import VARYING
from epcomm.kernels.nvlink.common.plan_parts import Arrivals
from epcomm.kernels.nvlink.common.signals import await_or_abort, int32_at, taking_part
from epcomm.kernels.nvlink.common.status import (
    FAULT_MASK,
    FAULT_OVERFLOW,
    HEADER_WORDS,
    WAIT_ROWS,
    codes_of_one_mode,
    note_faults,
)
from epcomm.kernels.nvlink.normal_exchange import NormalExchange
from epcomm.kernels.prepared import CHANGES, PreparedLaunch
from epcomm.records import SlotIndex

# Entries of received metadata that a program reads at once.
_PAIRS = 1024
_WARPS = 16

_DISPATCH_EPOCH = tl.constexpr(DISPATCH_EPOCH)
_DISPATCH_LOST = tl.constexpr(DISPATCH_LOST)
_INDEX_LEFT = tl.constexpr(INDEX_LEFT)


@triton.jit
def _codes(headers_ptr: tl.tensor, is_source: tl.tensor, HAS_BUDGET: tl.constexpr) -> tl.tensor:
    """Return the fault code of each source rank, [W_LANES].

    With static sizes a rank under no_grad beside ranks in grad mode gets GRAD_MODE. With exact
    sizes the host has read the headers and compared the modes before.
    """
    status = tl.load(headers_ptr, mask=is_source, other=0)
    return codes_of_one_mode(status, is_source) if HAS_BUDGET else status & FAULT_MASK


@triton.jit
def _aligned(counts: tl.tensor, ALIGNMENT: tl.constexpr) -> tl.tensor:
    return (counts + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT


@triton.jit
def _needed_slots(
    headers_ptr: tl.tensor,
    is_source: tl.tensor,
    ALIGNMENT: tl.constexpr,
    W: tl.constexpr,
    W_LANES: tl.constexpr,
    L: tl.constexpr,
    L_LANES: tl.constexpr,
) -> tl.tensor:
    """Count the slots that each rank needs for this dispatch, [W_LANES]; all ranks count alike."""
    expert, rank = tl.arange(0, L_LANES), tl.arange(0, W_LANES)
    needed = tl.zeros([W_LANES], tl.int32)
    is_count = is_source[:, None] & (expert < L)[None, :]
    for owner in tl.static_range(W):
        slots_ptr = headers_ptr[:, None] + HEADER_WORDS + W + owner * L + expert[None, :]
        counts = tl.sum(tl.load(slots_ptr, mask=is_count, other=0), 0)
        needed += tl.where(rank == owner, tl.sum(_aligned(counts, ALIGNMENT)), 0)
    return needed


@triton.jit
def _needed_rows(
    headers_ptr: tl.tensor, is_source: tl.tensor, W: tl.constexpr, W_LANES: tl.constexpr
) -> tl.tensor:
    """Count the rows that come to each rank, [W_LANES]; all ranks count alike."""
    rank = tl.arange(0, W_LANES)[None, :]
    is_count = is_source[:, None] & (rank < W)
    return tl.sum(tl.load(headers_ptr[:, None] + HEADER_WORDS + rank, mask=is_count, other=0), 0)


@triton.jit
def _fill(ptr: tl.tensor, length: tl.tensor, value: tl.constexpr) -> None:
    """Set the first `length` words at `ptr`."""
    BLOCK: tl.constexpr = 1024  # pyright: ignore[reportAssignmentType]
    for start in tl.range(0, length, BLOCK, num_stages=1):  # pyright: ignore[reportGeneralTypeIssues]
        at = start + tl.arange(0, BLOCK)
        tl.store(ptr + at, tl.zeros([BLOCK], tl.int32) + value, mask=at < length)


@triton.jit(do_not_specialize=(*VARYING, "C", "R"))
def _index_kernel(
    row_of_slot_ptr: tl.tensor,
    slots_of_row_ptr: tl.tensor,
    slot_weights_ptr: tl.tensor,
    counts_ptr: tl.tensor,
    first_slot_ptr: tl.tensor,
    rows_from_ptr: tl.tensor,
    row_base_ptr: tl.tensor,
    has_failed_ptr: tl.tensor,
    bases_ptr: tl.tensor,
    table_ptr: tl.tensor,
    excluded_ptr: tl.tensor,
    state_ptr: tl.tensor,
    faults_ptr: tl.tensor,
    report_ptr: tl.tensor,
    own_address: tl.tensor,
    rank: tl.tensor,
    buffer_index: tl.tensor,
    num_senders: tl.tensor,
    max_polls: tl.tensor,
    C: tl.tensor,
    R: tl.tensor,
    HAS_BUDGET: tl.constexpr,
    HAS_ROW_BUDGET: tl.constexpr,
    HAS_PADDING: tl.constexpr,
    IS_COMPACT: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    ROWS: tl.constexpr,
    W: tl.constexpr,
    W_LANES: tl.constexpr,
    M: tl.constexpr,
    K: tl.constexpr,
    K_LANES: tl.constexpr,
    L: tl.constexpr,
    L_LANES: tl.constexpr,
    BUFFERS_AT: tl.constexpr,
    BUFFER_BYTES: tl.constexpr,
    ROWS_READY_AT: tl.constexpr,
    HEADER_AT: tl.constexpr,
    HEADER_BYTES: tl.constexpr,
    METADATA_AT: tl.constexpr,
    METADATA_BYTES: tl.constexpr,
) -> None:
    """Index ROWS rows of one source at once, and every so many slots of padding.

    W = 2, L = 2, slots 1 0 | 1 2 from ranks 0 and 1: expert 0 has the slots 0 and 1, expert 1 has
    2 and 3; the row of rank 1 at position 1 of expert 1 is slot 3.
    """
    program, num_programs = tl.program_id(0), tl.num_programs(0)
    epoch = tl.load(state_ptr + _DISPATCH_EPOCH)
    peers = (own_address, table_ptr, excluded_ptr, report_ptr, rank)
    # Added by every program of every rank that pushed: rows, metadata and headers are here.
    is_lost = await_or_abort(
        peers,
        own_address + ROWS_READY_AT,
        epoch * num_senders,
        max_polls,
        WAIT_ROWS,
        epoch,
        W,
        W_LANES,
    )

    source_lane, expert = tl.arange(0, W_LANES), tl.arange(0, L_LANES)
    is_rank, is_source = source_lane < W, taking_part(excluded_ptr, W, W_LANES)
    buffer_address = own_address + BUFFERS_AT + tl.cast(buffer_index, tl.int64) * BUFFER_BYTES
    headers_ptr = int32_at(buffer_address + HEADER_AT) + source_lane * (HEADER_BYTES // 4)
    codes = _codes(headers_ptr, is_source, HAS_BUDGET)
    needed = tl.zeros([W_LANES], tl.int32)
    if HAS_ROW_BUDGET:
        needed = _needed_rows(headers_ptr, is_source, W, W_LANES)
        codes = tl.where((needed > M) & (codes == 0), FAULT_OVERFLOW, codes)
    elif HAS_BUDGET:
        needed = _needed_slots(headers_ptr, is_source, ALIGNMENT, W, W_LANES, L, L_LANES)
        codes = tl.where((needed > C) & (codes == 0), FAULT_OVERFLOW, codes)
    has_failed = is_lost | (tl.max(codes) != 0)

    is_count = both(is_source[:, None] & (expert < L)[None, :], has_failed == 0)
    slots_ptr = headers_ptr[:, None] + HEADER_WORDS + W + rank * L + expert[None, :]
    counts_of_source = tl.load(slots_ptr, mask=is_count, other=0)
    rows_ptr = headers_ptr + HEADER_WORDS + rank
    rows_from = tl.load(rows_ptr, mask=both(is_source, has_failed == 0), other=0)
    # Nothing is stored beyond the index, whatever a rank has sent.
    rows_from = tl.minimum(tl.maximum(rows_from, 0), M)
    counts = tl.sum(counts_of_source, 0)
    aligned = _aligned(counts, ALIGNMENT)
    starts = tl.cumsum(aligned, 0) - aligned
    # Of each source and expert; read below, entry by entry.
    bases = starts[None, :] + tl.cumsum(counts_of_source, 0) - counts_of_source
    own_bases_ptr = bases_ptr + program * (W_LANES * L_LANES)
    tl.store(own_bases_ptr + source_lane[:, None] * L_LANES + expert[None, :], bases)
    row_bases = source_lane * M
    if IS_COMPACT:
        row_bases = tl.cumsum(rows_from, 0) - rows_from

    if program == 0:
        tl.store(counts_ptr + expert, counts, mask=expert < L)
        tl.store(first_slot_ptr + expert, starts, mask=expert < L)
        tl.store(first_slot_ptr + L, tl.sum(aligned))
        tl.store(rows_from_ptr + source_lane, rows_from, mask=is_rank)
        tl.store(row_base_ptr + source_lane, row_bases, mask=is_rank)
        tl.store(has_failed_ptr, has_failed.to(tl.int32))
        tl.store(has_failed_ptr + 1, mark_of(epoch))
        if is_lost == 0:
            note_faults(faults_ptr, codes, is_source, W_LANES, needed)
    tl.debug_barrier()

    PER_SOURCE: tl.constexpr = (M + ROWS - 1) // ROWS
    pair = tl.arange(0, ROWS * K_LANES)
    k = pair % K_LANES
    for block in tl.range(program, W * PER_SOURCE, num_programs, num_stages=1):
        source = block // PER_SOURCE
        place = (block % PER_SOURCE) * ROWS + pair // K_LANES
        num_rows = tl.sum(tl.where(source_lane == source, rows_from, 0))
        row = tl.sum(tl.where(source_lane == source, row_bases, 0)) + place
        is_pair = (place < num_rows) & (k < K)
        metadata_row = tl.cast(source, tl.int64) * M + place
        metadata_ptr = (
            int32_at(buffer_address + METADATA_AT) + metadata_row * (METADATA_BYTES // 4) + k
        )
        experts = tl.load(metadata_ptr, mask=is_pair, other=-1)
        positions = tl.load(metadata_ptr + K_LANES, mask=is_pair, other=0)
        weight_bits = tl.load(metadata_ptr + 2 * K_LANES, mask=is_pair, other=0)
        is_slot = (experts >= 0) & (experts < L)
        slots = positions + tl.load(
            own_bases_ptr + source * L_LANES + experts, mask=is_slot, other=0
        )
        is_slot = is_slot & (slots >= 0) & (slots < C)
        tl.store(row_of_slot_ptr + slots, row, mask=is_slot)
        tl.store(slot_weights_ptr + slots, weight_bits.to(tl.float32, bitcast=True), mask=is_slot)
        is_entry = (place < (num_rows if IS_COMPACT else M)) & (k < K)
        tl.store(slots_of_row_ptr + row * K + k, tl.where(is_slot, slots, -1), mask=is_entry)

    if HAS_ROW_BUDGET:
        # Rows that nobody sent.
        TAIL: tl.constexpr = ROWS * K_LANES
        first_entry, num_entries = tl.sum(rows_from) * K, M * K
        for start in tl.range(
            first_entry + program * TAIL, num_entries, num_programs * TAIL, num_stages=1
        ):
            entry = start + tl.arange(0, TAIL)
            tl.store(slots_of_row_ptr + entry, tl.zeros_like(entry) - 1, mask=entry < num_entries)

    if HAS_PADDING:
        # Slots that no row has.
        STRIPE: tl.constexpr = 128
        for start in tl.range(program * STRIPE, C, num_programs * STRIPE, num_stages=1):
            slots = start + tl.arange(0, STRIPE)
            ends = starts + counts
            is_in = (slots[:, None] >= starts[None, :]) & (slots[:, None] < ends[None, :])
            is_used = tl.max(is_in.to(tl.int32), 1) > 0
            tl.store(
                row_of_slot_ptr + slots,
                tl.zeros_like(slots) - 1,
                mask=(is_used == 0) & (slots < C),
            )

    if is_lost:
        tl.atomic_xchg(state_ptr + _DISPATCH_LOST, 1, sem="relaxed", scope="gpu")
    tl.debug_barrier()
    num_left = tl.atomic_add(state_ptr + _INDEX_LEFT, 1, sem="acq_rel", scope="gpu")
    if num_left == num_programs - 1:
        tl.store(state_ptr + _INDEX_LEFT, 0)
        # A program that has timed out has not written its entries: the whole index is taken back.
        if tl.load(state_ptr + _DISPATCH_LOST, volatile=True) != 0:
            _fill(row_of_slot_ptr, C, -1)
            _fill(slots_of_row_ptr, R * K, -1)
            _fill(counts_ptr, L, 0)
            _fill(first_slot_ptr, L + 1, 0)
            _fill(rows_from_ptr, W, 0)
            _fill(row_base_ptr, W, 0)
            _fill(has_failed_ptr, 1, 1)


def index_rows(
    exchange: NormalExchange,
    index: SlotIndex,
    slot_weights: Tensor,
    arrivals: Arrivals,
    *,
    buffer_index: int,
    is_compact: bool,
    has_budget: bool,
    has_row_budget: bool = False,
) -> None:
    """Wait for the rows of all ranks and write the expert-major index over them.

    Args:
        exchange: the memory of all ranks.
        index: of C slots and R rows, written.   slot_weights: [C], float32, written.
        arrivals: of the exchange plan, written.
        buffer_index: where the rows lie.
        is_compact: rows are numbered without gaps; else place q of source s is row s * M + q.
        has_budget: C may be too small, which is a fault on all ranks, and no host has read the
            headers; else C fits, and the host has refused what they forbid.
        has_row_budget: R is M, which may be too few rows: that is the fault then.

    Collective: yes, after push_rows() along a new exchange plan.   Allocates nothing.   Host sync:
        none.
    """
    assert index.row_of_slot is not None, "rows are read by index"
    # One variant for all batches of a buffer, so that prepare() compiles it.
    has_padding = index.expert_alignment > 1 or not index.is_dense
    key = ("index", has_budget, has_row_budget, has_padding, is_compact, index.expert_alignment)
    launch = exchange.launches.get(key)
    if launch is None:
        peers, layout = exchange.peers, exchange.peers.layout
        offsets = layout.offsets
        rows = min(max(1, _PAIRS // layout.metadata_words), next_power_of_two(layout.max_tokens))
        launch = exchange.launches[key] = PreparedLaunch(
            _index_kernel,
            (
                CHANGES,
                CHANGES,
                CHANGES,
                CHANGES,
                CHANGES,
                CHANGES,
                CHANGES,
                CHANGES,
                exchange.plan.bases,
                peers.table,
                peers.excluded,
                exchange.state,
                peers.faults,
                peers.report,
                peers.own_address,
                peers.rank,
                CHANGES,
                peers.num_programs,
                peers.max_polls,
                CHANGES,
                CHANGES,
            ),
            dict(
                HAS_BUDGET=has_budget,
                HAS_ROW_BUDGET=has_row_budget,
                HAS_PADDING=has_padding,
                IS_COMPACT=is_compact,
                ALIGNMENT=index.expert_alignment,
                ROWS=rows,
                **layout.expert_constants,
                BUFFERS_AT=layout.buffers_at,
                BUFFER_BYTES=layout.buffer_bytes,
                ROWS_READY_AT=offsets["rows_ready"],
                HEADER_AT=offsets["header"],
                HEADER_BYTES=layout.header_bytes,
                METADATA_AT=offsets["metadata"],
                METADATA_BYTES=layout.metadata_bytes,
                num_warps=_WARPS,
            ),
        )
    launch(
        exchange.peers.num_programs,
        index.row_of_slot,
        index.slots_of_row,
        slot_weights,
        index.num_tokens_per_expert,
        index.first_slot,
        arrivals.rows_from,
        arrivals.row_base,
        arrivals.has_failed,
        buffer_index,
        index.row_of_slot.shape[0],
        0 if index.slots_of_row is None else index.slots_of_row.shape[0],
    )
