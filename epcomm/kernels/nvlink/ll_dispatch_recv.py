"""Low-latency dispatch over NVLink, its receiver: an expert-major index over rows.

It reads metadata and no rows, and indexes them while they are on the wire; it ends once they have
come. Memory order: as in ll_dispatch_send.py, whose signals it awaits. There is no host sync.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from epcomm.kernels.nvlink.common.dependent_launch import (
    await_previous,
    let_next_start,
    overlapping,
)
from epcomm.kernels.nvlink.common.exchange import VARYING, LowLatencyExchange, on_device
from epcomm.kernels.nvlink.common.signals import await_or_abort, int32_at, publish, taking_part
from epcomm.kernels.nvlink.common.status import WAIT_DISPATCH, codes_of_one_mode, note_faults
from epcomm.kernels.prepared import CHANGES, PreparedLaunch

# Pairs of a slot and an expert that a program compares at once: thirty-two a thread.
_COMPARISONS = 4096
# Entries of received metadata that a program reads, at most: few, so that many programs share them.
_PAIRS = 128
_WARPS = 4


@triton.jit(do_not_specialize=VARYING)
def _receive_dispatch_kernel(
    table_ptr: tl.tensor,
    state_ptr: tl.tensor,
    row_of_slot_ptr: tl.tensor | None,
    slots_of_row_ptr: tl.tensor,
    slot_weights_ptr: tl.tensor,
    counts_ptr: tl.tensor,
    first_slot_ptr: tl.tensor,
    faults_ptr: tl.tensor,
    excluded_ptr: tl.tensor,
    report_ptr: tl.tensor,
    own_address: tl.tensor,
    buffer_address: tl.tensor,
    rank: tl.tensor,
    max_polls: tl.tensor,
    C: tl.constexpr,
    W: tl.constexpr,
    W_LANES: tl.constexpr,
    M: tl.constexpr,
    K: tl.constexpr,
    K_LANES: tl.constexpr,
    L: tl.constexpr,
    L_LANES: tl.constexpr,
    ALIGNMENT: tl.constexpr,
    EXPERT_CAPACITY: tl.constexpr,
    ROWS: tl.constexpr,
    ARRIVED_METADATA_AT: tl.constexpr,
    ARRIVED_ROWS_AT: tl.constexpr,
    HEADER_AT: tl.constexpr,
    COUNTS_AT: tl.constexpr,
    METADATA_AT: tl.constexpr,
    METADATA_BYTES: tl.constexpr,
    OVERLAPS: tl.constexpr,
) -> None:
    """Index ROWS rows of one source in each program, and every so many slots of padding.

    W = 2, L = 2, counts 1 0 | 1 2 from ranks 0 and 1: expert 0 has the slots 0 and 1, expert 1 has
    2 and 3; the row of rank 1 at position 1 of expert 1 is slot 3.
    """
    program = tl.program_id(0)
    if OVERLAPS:
        let_next_start()
    # Not from the L1 cache: only the end of the kernel before would empty it for sure.
    epoch = tl.load(state_ptr, volatile=True)
    peers = (own_address, table_ptr, excluded_ptr, report_ptr, rank)
    metadata_at = buffer_address + ARRIVED_METADATA_AT
    is_lost = await_or_abort(peers, metadata_at, epoch, max_polls, WAIT_DISPATCH, epoch, W, W_LANES)

    # The rows of this program. Whether the source has sent them is known once its header is here.
    PER_SOURCE: tl.constexpr = (M + ROWS - 1) // ROWS
    source = program // PER_SOURCE
    first_token = (program % PER_SOURCE) * ROWS
    pair = tl.arange(0, ROWS * K_LANES)
    token = first_token + pair // K_LANES
    k = pair % K_LANES
    row = source * M + token
    is_entry = (token < M) & (k < K)
    metadata_ptr = (
        int32_at(buffer_address + METADATA_AT) + tl.cast(row, tl.int64) * (METADATA_BYTES // 4) + k
    )
    experts = tl.load(metadata_ptr, mask=is_entry, other=-1)
    positions = tl.load(metadata_ptr + K_LANES, mask=is_entry, other=0)
    weight_bits = tl.load(metadata_ptr + 2 * K_LANES, mask=is_entry, other=0)

    source_lane = tl.arange(0, W_LANES)
    # What an excluded rank once sent is still there, and counts no more.
    is_source = taking_part(excluded_ptr, W, W_LANES)
    headers_ptr = int32_at(buffer_address + HEADER_AT) + source_lane * 4
    status = tl.load(headers_ptr + 2, mask=is_source, other=0)
    codes = codes_of_one_mode(status, is_source)
    has_failed = is_lost | (tl.max(codes) != 0)

    expert = tl.arange(0, L_LANES)
    is_count = is_source[:, None] & (expert < L)[None, :]
    count_ptr = int32_at(buffer_address + COUNTS_AT) + source_lane[:, None] * L + expert[None, :]
    counts_of_source = tl.load(count_ptr, mask=is_count, other=0)
    counts_of_source = tl.where(has_failed, 0, counts_of_source)
    counts = tl.sum(counts_of_source, axis=0)
    # With one capacity for all experts, lanes without an expert have none.
    aligned = tl.where(expert < L, EXPERT_CAPACITY, 0)
    if EXPERT_CAPACITY == 0:
        aligned = (counts + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT
    ends = tl.cumsum(aligned, axis=0)
    starts = ends - aligned

    if program == 0:
        tl.store(counts_ptr + expert, counts, mask=expert < L)
        tl.store(first_slot_ptr + expert, starts, mask=expert < L)
        tl.store(first_slot_ptr + L, tl.sum(aligned))
        tl.store(state_ptr + 2, has_failed.to(tl.int32))
        tokens = tl.load(headers_ptr + 1, mask=is_source, other=0)
        tl.store(state_ptr + 3, tl.max(tokens))
        if is_lost == 0:
            note_faults(faults_ptr, codes, is_source, W_LANES)

    header_ptr = int32_at(buffer_address + HEADER_AT)
    has_none = has_failed | (tl.load(excluded_ptr + source) != 0)
    num_tokens = tl.where(has_none, 0, tl.load(header_ptr + source * 4 + 1))
    is_before = source_lane < source
    before = tl.sum(tl.where(is_before[:, None], counts_of_source, 0), axis=0)
    bases = starts + before
    is_pair = token < num_tokens
    experts = tl.where(is_pair, experts, -1)
    is_slot = experts >= 0
    is_expert = experts[:, None] == expert[None, :]
    slots = tl.sum(tl.where(is_expert, bases[None, :], 0), axis=1) + positions
    if row_of_slot_ptr is not None:
        tl.store(row_of_slot_ptr + slots, row, mask=is_slot)
    tl.store(slot_weights_ptr + slots, weight_bits.to(tl.float32, bitcast=True), mask=is_slot)
    tl.store(slots_of_row_ptr + row * K + k, tl.where(is_slot, slots, -1), mask=is_entry)

    if row_of_slot_ptr is not None:
        # Slots that no row has.
        STRIPE: tl.constexpr = ROWS * K_LANES
        for start in tl.range(program * STRIPE, C, tl.num_programs(0) * STRIPE, num_stages=1):
            slot = start + tl.arange(0, STRIPE)
            is_in = (slot[:, None] >= starts[None, :]) & (
                slot[:, None] < (starts + counts)[None, :]
            )
            is_used = tl.max(is_in.to(tl.int32), axis=1) > 0
            tl.store(
                row_of_slot_ptr + slot, tl.zeros_like(slot) - 1, mask=(is_used == 0) & (slot < C)
            )
    if program == 0:
        rows_at = buffer_address + ARRIVED_ROWS_AT
        if await_or_abort(peers, rows_at, epoch, max_polls, WAIT_DISPATCH, epoch, W, W_LANES):
            # Rows that some rank did not send are indexed, and not handed out.
            tl.store(counts_ptr + expert, tl.zeros_like(expert), mask=expert < L)
            tl.store(first_slot_ptr + expert, tl.zeros_like(expert), mask=expert < L)
            tl.store(first_slot_ptr + L, 0)
            tl.store(state_ptr + 2, 1)
    if OVERLAPS:
        await_previous()


@triton.jit(do_not_specialize=VARYING)
def _release_buffer_kernel(
    bases_ptr: tl.tensor,
    state_ptr: tl.tensor,
    excluded_ptr: tl.tensor,
    rank: tl.tensor,
    W: tl.constexpr,
    W_LANES: tl.constexpr,
    ARRIVED_SUMS_AT: tl.constexpr,
) -> None:
    """Stand in for a combine that never came: epoch 5 ends, which is signalled to all."""
    tl.store(state_ptr, tl.load(state_ptr + 1) + 1)
    publish(bases_ptr, ARRIVED_SUMS_AT + rank * 4, 1, W, W_LANES, excluded_ptr)


def receive_dispatch(
    exchange: LowLatencyExchange,
    row_of_slot: Tensor | None,
    slots_of_row: Tensor,
    slot_weights: Tensor,
    num_tokens_per_expert: Tensor,
    first_slot: Tensor,
    *,
    expert_alignment: int,
    expert_capacity: int = 0,
) -> None:
    """Wait for the rows of all ranks and write the expert-major index over them.

    Args:
        exchange: the receive buffer.
        row_of_slot: [C], int32, or None where nobody asks.   slots_of_row: [W * M, K], int32.
        slot_weights: [C], float32.
        num_tokens_per_expert: [L], int32.   first_slot: [L + 1], int32.
        expert_alignment: each expert's slots start at a multiple of this.
        expert_capacity: slots of each expert, used or not; 0: as many as it has, aligned.

    Collective: yes, after send_dispatch().   Allocates nothing.   Host sync: none.
    """
    capacity = 0 if row_of_slot is None else row_of_slot.shape[0]
    key = ("receive rows", capacity, expert_alignment, expert_capacity)
    layout = exchange.peers.layout
    rows = max(1, min(_PAIRS, _COMPARISONS // layout.local_lanes) // layout.metadata_words)
    launch = exchange.launches.get(key)
    if launch is None:
        peers, offsets = exchange.peers, layout.offsets
        launch = exchange.launches[key] = PreparedLaunch(
            _receive_dispatch_kernel,
            (
                peers.table,
                exchange.state,
                CHANGES,
                CHANGES,
                CHANGES,
                CHANGES,
                CHANGES,
                peers.faults,
                peers.excluded,
                peers.report,
                peers.own_address,
                exchange.buffer_address,
                peers.rank,
                peers.max_polls,
            ),
            dict(
                C=capacity,
                **layout.expert_constants,
                ALIGNMENT=expert_alignment,
                EXPERT_CAPACITY=expert_capacity,
                ROWS=rows,
                ARRIVED_METADATA_AT=offsets["arrived_metadata"],
                ARRIVED_ROWS_AT=offsets["arrived_rows"],
                HEADER_AT=offsets["header"],
                COUNTS_AT=offsets["counts"],
                METADATA_AT=offsets["metadata"],
                METADATA_BYTES=layout.metadata_bytes,
                num_warps=_WARPS,
                **overlapping(slots_of_row.device),
            ),
        )
    launch(
        layout.world_size * -(-layout.max_tokens // rows),
        row_of_slot,
        slots_of_row,
        slot_weights,
        num_tokens_per_expert,
        first_slot,
    )


def release_buffer(exchange: LowLatencyExchange) -> None:
    """End the last batch of the receive buffer, which was never combined.

    Collective: yes.   Allocates nothing.   Host sync: none.
    """
    peers, layout = exchange.peers, exchange.peers.layout
    with on_device(peers.table):
        _release_buffer_kernel[(1,)](
            exchange.bases,
            exchange.state,
            peers.excluded,
            peers.rank,
            W=layout.world_size,
            W_LANES=layout.world_lanes,
            ARRIVED_SUMS_AT=layout.offsets["arrived_sums"],
            num_warps=1,  # pyright: ignore[reportCallIssue]
        )
