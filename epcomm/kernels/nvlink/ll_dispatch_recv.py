"""Low-latency dispatch over NVLink, its receiver: an expert-major index over rows.

The receiver reads metadata and no rows, indexes rows while they are on the wire, and ends after
they have arrived. The header of each source contains whether its rows are sent in lines, as headers
and metadata always are. Then other programs copy its rows to their usual positions, see
lines/dispatch_unpack.py.

Memory order: as in the senders, whose signals and lines it awaits. There is no host sync.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from epcomm.kernels.launch import next_power_of_two
from epcomm.kernels.masks import both
from epcomm.kernels.nvlink.common import constexprs
from epcomm.kernels.nvlink.common.constexprs import (
    COUNTED_EPOCH,
    HELD_BATCH,
    LINE_BYTES,
    SOURCES_AT,
)
from epcomm.kernels.nvlink.common.dependent_launch import (
    await_previous,
    let_next_start,
    overlapping,
)
from epcomm.kernels.nvlink.common.exchange import (
    NO_SLABS,
    VARYING,
    LowLatencyExchange,
    Memory,
    Peers,
    SlabMemory,
)
from epcomm.kernels.nvlink.common.launches import prepare
from epcomm.kernels.nvlink.common.lines import (
    abort_if_late,
    begin_wait,
    bits_of_ranks,
    end_look,
    flag_of,
    give_credit,
    int64_at,
    is_waiting,
    load_lines,
    next_epoch,
    word_of,
)
from epcomm.kernels.nvlink.common.signals import await_at, await_signals, int32_at, living_ranks
from epcomm.kernels.nvlink.common.status import (
    FAULT_OVERFLOW,
    FLAGS_SHIFT,
    WAIT_DISPATCH,
    codes_of_one_mode,
    note_faults,
)
from epcomm.kernels.nvlink.lines.dispatch_unpack import UNPACKED_TOKENS, num_unpackers, unpack_rows
from epcomm.kernels.nvlink.ll_dispatch_header import dispatch_epoch
from epcomm.kernels.nvlink.ll_dispatch_pack import pack_rows
from epcomm.kernels.prepared import CHANGES

# Pairs of a slot and an expert that a program compares in one step: 32 for each thread.
_COMPARISONS = 4096
# Most entries of metadata that a program reads: few, so that many programs share the work.
_PAIRS = 128
_WARPS = 4
# Most rows that a program copies to slabs: all programs that can run share the rows.
_PACKED_ROWS = 2
_WORD_BYTES = 4
_SCALE_STRIDES = ("EXPERT_STRIDE", "SLOT_STRIDE", "WORD_STRIDE")

_THREADS = tl.constexpr(32 * _WARPS)
# The largest number of slots that is reported as needed: it shares an int32 with the fault code.
_MOST_NEEDED = tl.constexpr(2**23 - 1)


@triton.jit
def _hand_out_nothing(
    peers: Peers,
    counts_ptr: tl.tensor,
    first_slot_ptr: tl.tensor,
    source_ranges_ptr: tl.tensor | None,
    epoch: tl.tensor,
    c: constexprs.Layout,
) -> None:
    """Undo an index of rows that have not arrived, once program 0 has written its counts."""
    counted_ptr = peers.state + COUNTED_EPOCH + tl.arange(0, 1)
    is_counted = tl.arange(0, 1) == 0
    await_at(counted_ptr, is_counted, None, epoch, peers.max_polls, "gpu", True)
    # Program 0 stores that word without a release, which would add a fence to every dispatch. Its
    # counts are visible one poll, a millisecond, later.
    await_at(counted_ptr, is_counted, None, next_epoch(epoch), 1, "gpu", True)
    expert = tl.arange(0, c.L_LANES)
    tl.store(counts_ptr + expert, tl.zeros_like(expert), mask=expert < c.L)
    tl.store(first_slot_ptr + expert, tl.zeros_like(expert), mask=expert < c.L)
    tl.store(first_slot_ptr + c.L, 0)
    if source_ranges_ptr is not None:
        for source in tl.static_range(c.W):
            tl.store(
                source_ranges_ptr + expert * c.W + source,
                expert.to(tl.int64) * 0,
                mask=expert < c.L,
            )
    tl.store(peers.state + 2, 1)


@triton.jit
def _await_headers(
    peers: Peers,
    headers_ptr: tl.tensor,
    count_lines_ptr: tl.tensor,
    metadata_at: tl.tensor,
    k: tl.tensor,
    is_source: tl.tensor,
    is_count: tl.tensor,
    is_entry: tl.tensor,
    is_own: tl.tensor,
    token: tl.tensor,
    epoch: tl.tensor,
    c: constexprs.Layout,
) -> tl.tensor:
    """Wait for the headers and counts of all sources, and for the metadata of this program.

    headers_ptr, is_source: [W_LANES].   count_lines_ptr, is_count: [W_LANES, L_LANES].
    k, is_entry, token: its entries, line k of those at metadata_at.   is_own: their source.
    Returns: whether this rank cannot go on.
    """
    looks = begin_wait(peers.max_polls)
    # Lines of more tokens than a rank sends in lines are loaded once its header counts them: if all
    # programs loaded theirs, each look would take longer, also that for one token.
    told = epoch * 0 + c.LINE_TOKENS
    while is_waiting(looks):
        aborted = tl.load(int32_at(peers.own_address), volatile=True)
        headers = tl.load(headers_ptr, mask=is_source, other=0, volatile=True)
        statuses = tl.load(headers_ptr + 1, mask=is_source, other=0, volatile=True)
        count_lines = tl.load(count_lines_ptr, mask=is_count, other=0, volatile=True)
        is_absent = is_count & (flag_of(count_lines) != epoch)
        is_late = tl.max(is_absent.to(tl.int32), axis=1) > 0
        is_late |= (flag_of(headers) != epoch) | (flag_of(statuses) != epoch)
        is_looked_at = is_entry & (token < told)
        _, _, _, flags = load_lines(metadata_at, k, is_looked_at, IS_WHOLE=False)  # pyright: ignore[reportArgumentType, reportGeneralTypeIssues]
        # Word and flag are one load: the compiler may repeat a load for two uses, in two
        # layouts, and the line may arrive between them.
        own_line = tl.sum(tl.where(is_own, headers, 0))
        is_absent = is_entry & (flags != epoch) & (token < (word_of(own_line) >> 1))
        is_untold = flag_of(own_line) != epoch
        told = tl.where(is_untold, told, tl.maximum(told, word_of(own_line) >> 1))
        is_late |= is_own & (is_untold | (tl.max(is_absent.to(tl.int32)) > 0))
        late = bits_of_ranks(is_source & is_late, c.W_LANES)
        looks = end_look(looks, late, aborted, _THREADS)
    return abort_if_late(peers, looks.late, WAIT_DISPATCH, epoch, c)


@triton.jit
def _slots_of_experts(
    counts_of_source: tl.tensor,
    has_failed: tl.tensor,
    c: constexprs.Layout,
    index: constexprs.Index,
) -> tl.tuple:
    """Return the pairs of each expert, by source and in all, its slots, and if there are too many.

    That is the last one: 1 if the call has failed; pack_status() of the overflow; else 0.
    """
    counts_of_source = tl.where(has_failed, 0, counts_of_source)
    counts = tl.sum(counts_of_source, axis=0)
    expert = tl.arange(0, c.L_LANES)
    # With one capacity for all experts, lanes without an expert have none.
    aligned = tl.where(expert < c.L, index.CAPACITY, 0)
    # 1: every rank knows of the fault. Other codes are known to this rank; combine reports them.
    refusal = has_failed.to(tl.int32)
    if index.CAPACITY == 0:
        aligned = (counts + index.ALIGNMENT - 1) // index.ALIGNMENT * index.ALIGNMENT
        # C holds all slots unless tokens name experts twice.
        needed = tl.sum(aligned)
        is_over = needed > index.C
        over = FAULT_OVERFLOW | (tl.minimum(needed, _MOST_NEEDED) << FLAGS_SHIFT)
        refusal = tl.where(is_over, over, refusal)
        counts_of_source = tl.where(is_over, 0, counts_of_source)
        counts = tl.where(is_over, 0, counts)
        aligned = tl.where(is_over, 0, aligned)
    return counts_of_source, counts, aligned, refusal  # pyright: ignore[reportReturnType]


@triton.jit
def _write_counts(
    peers: Peers,
    counts_ptr: tl.tensor,
    first_slot_ptr: tl.tensor,
    counts: tl.tensor,
    starts: tl.tensor,
    aligned: tl.tensor,
    refusal: tl.tensor,
    told: tl.tensor,
    c: constexprs.Layout,
) -> None:
    """Write the counts and first slots of experts, and what combine needs to know of the batch.

    told: [W_LANES]: the first word of each header.   aligned: [L_LANES]: slots of each expert.
    """
    expert, source_lane = tl.arange(0, c.L_LANES), tl.arange(0, c.W_LANES)
    tl.store(counts_ptr + expert, counts, mask=expert < c.L)
    tl.store(first_slot_ptr + expert, starts, mask=expert < c.L)
    tl.store(first_slot_ptr + c.L, tl.sum(aligned))
    tl.store(peers.state + 2, refusal)
    # Combine reads this copy, because it must not read what peers write.
    tl.store(peers.state + SOURCES_AT + source_lane, told, mask=source_lane < c.W)


@triton.jit
def _write_ranges(
    peers: Peers,
    slabs: SlabMemory,
    counts_of_source: tl.tensor,
    epoch: tl.tensor,
    c: constexprs.Layout,
) -> None:
    """Write the slots of each expert from each rank, if wanted, and that the counts are written."""
    expert, source_lane = tl.arange(0, c.L_LANES), tl.arange(0, c.W_LANES)
    if slabs.source_ranges is not None:
        # The slots of an expert are in the order of their sources.
        ends_of_source = tl.cumsum(counts_of_source, axis=0)
        ranges = (ends_of_source - counts_of_source).to(tl.int64) << 32
        ranges |= counts_of_source.to(tl.int64)
        ranges_ptr = slabs.source_ranges + expert[None, :] * c.W + source_lane[:, None]
        is_range = (source_lane < c.W)[:, None] & (expert < c.L)[None, :]
        tl.store(ranges_ptr, ranges, mask=is_range)
    # All threads have stored. _hand_out_nothing() of the other programs reads it.
    tl.debug_barrier()
    tl.store(peers.state + COUNTED_EPOCH, epoch)


@triton.jit
def _clear_unused(
    row_of_slot_ptr: tl.tensor,
    starts: tl.tensor,
    counts: tl.tensor,
    c: constexprs.Layout,
    index: constexprs.Index,
) -> None:
    """Write -1 for the slots without a row; the programs share the slots in stripes."""
    program = tl.program_id(0)
    STRIPE: tl.constexpr = index.ROWS * c.K_LANES
    for start in tl.range(program * STRIPE, index.C, tl.num_programs(0) * STRIPE, num_stages=1):  # pyright: ignore[reportGeneralTypeIssues]
        slot = start + tl.arange(0, STRIPE)
        is_in = (slot[:, None] >= starts[None, :]) & (slot[:, None] < (starts + counts)[None, :])
        is_used = tl.max(is_in.to(tl.int32), axis=1) > 0
        tl.store(
            row_of_slot_ptr + slot, tl.zeros_like(slot) - 1, mask=(is_used == 0) & (slot < index.C)
        )


@triton.jit(do_not_specialize=VARYING)
def _receive_dispatch_kernel(
    row_of_slot_ptr: tl.tensor | None,
    slots_of_row_ptr: tl.tensor,
    slot_weights_ptr: tl.tensor | None,
    counts_ptr: tl.tensor,
    first_slot_ptr: tl.tensor,
    slabs: SlabMemory,
    memory: Memory,
    own_address: tl.tensor,
    buffer_address: tl.tensor,
    rank: tl.tensor,
    max_polls: tl.tensor,
    batch: tl.tensor,
    is_captured: tl.tensor,
    c: constexprs.Layout,
    index: constexprs.Index,
    OVERLAPS: tl.constexpr,
) -> None:
    """Index ROWS rows of one source in each program, and its stripes of the padding slots.

    The programs from INDEXERS on unpack rows in lines. With slabs, rows are copied to
    their slots.

    W = 2, L = 2, counts 1 0 | 1 2 from ranks 0 and 1: expert 0 has the slots 0 and 1, expert 1 has
    2 and 3; the row of rank 1 at position 1 of expert 1 is slot 3.
    """
    program = tl.program_id(0)
    peers = Peers(*memory, own_address, buffer_address, rank, max_polls)
    if OVERLAPS:
        let_next_start()
        if (batch >= 0) & (tl.load(peers.state + HELD_BATCH, volatile=True) != batch):
            # The sender, which notes the batch, may not have begun.
            await_previous()
    if (batch >= 0) & (tl.load(peers.state + HELD_BATCH, volatile=True) != batch):
        # A replay has ended the batch, and nothing arrives any more.
        return
    epoch = dispatch_epoch(peers, is_captured)
    if program >= index.INDEXERS:
        worker, num_workers = program - index.INDEXERS, tl.num_programs(0) - index.INDEXERS
        if unpack_rows(peers, slabs, worker, num_workers, epoch, c, index, _THREADS):
            _hand_out_nothing(peers, counts_ptr, first_slot_ptr, slabs.source_ranges, epoch, c)
        if OVERLAPS:
            await_previous()
        return

    source_lane = tl.arange(0, c.W_LANES)
    # Data that an excluded rank once sent is still in memory, and is ignored.
    is_source = living_ranks(peers, c)
    headers_ptr = int64_at(buffer_address + c.HEADER_LINES_AT) + source_lane * 2
    expert = tl.arange(0, c.L_LANES)
    is_count = is_source[:, None] & (expert < c.L)[None, :]
    count_lines_ptr = int64_at(buffer_address + c.COUNT_LINES_AT)
    count_lines_ptr += source_lane[:, None] * c.L + expert[None, :]
    # The rows of this program. Whether the source has sent them is known once its header is here.
    PER_SOURCE: tl.constexpr = (c.M + index.ROWS - 1) // index.ROWS
    source = program // PER_SOURCE
    pair = tl.arange(0, index.ROWS * c.K_LANES)
    token = (program % PER_SOURCE) * index.ROWS + pair // c.K_LANES
    k = pair % c.K_LANES
    row = source * c.M + token
    is_entry = (token < c.M) & (k < c.K)
    is_own = source_lane == source
    metadata_at = buffer_address + c.METADATA_LINES_AT
    metadata_at += row.to(tl.int64) * (c.K_LANES * LINE_BYTES)

    is_lost = _await_headers(
        *(peers, headers_ptr, count_lines_ptr, metadata_at, k, is_source, is_count, is_entry),
        *(is_own, token, epoch, c),
    )

    # All words of the lines are loaded together.
    is_heard = both(is_source, is_lost == 0)
    headers = word_of(tl.load(headers_ptr, mask=is_heard, other=0, volatile=True))
    status = word_of(tl.load(headers_ptr + 1, mask=is_heard, other=0, volatile=True))
    counts_of_source = word_of(tl.load(count_lines_ptr, mask=is_count, other=0, volatile=True))
    experts, positions, weight_bits, _ = load_lines(  # pyright: ignore[reportGeneralTypeIssues]
        metadata_at,
        k,
        is_entry,
        IS_WHOLE=False,  # pyright: ignore[reportArgumentType]
    )
    codes = codes_of_one_mode(status, is_source)
    has_failed = is_lost | (tl.max(codes) != 0)
    counts_of_source, counts, aligned, refusal = _slots_of_experts(  # pyright: ignore[reportGeneralTypeIssues]
        counts_of_source, has_failed, c, index
    )
    starts = tl.cumsum(aligned, axis=0) - aligned

    if program == 0:
        told = tl.where(has_failed, headers & 1, headers)
        _write_counts(peers, counts_ptr, first_slot_ptr, counts, starts, aligned, refusal, told, c)
        if is_lost == 0:
            note_faults(peers.faults, codes, is_source, c.W_LANES)
        _write_ranges(peers, slabs, counts_of_source, epoch, c)

    header = tl.sum(tl.where(is_own, headers, 0))
    in_lines = (header & 1) != 0
    num_tokens = tl.where(refusal != 0, 0, tl.minimum(header >> 1, c.M))
    is_before = source_lane < source
    before = tl.sum(tl.where(is_before[:, None], counts_of_source, 0), axis=0)
    bases = starts + before
    is_slot = is_entry & (token < num_tokens) & (experts >= 0) & (experts < c.L)
    is_expert = experts[:, None] == expert[None, :]
    slots = tl.sum(tl.where(is_expert, bases[None, :], 0), axis=1) + positions
    # No store is beyond the end of the index, whatever a rank has sent.
    is_slot = (
        is_slot & (slots >= 0) & (slots < (c.L * index.CAPACITY if index.CAPACITY else index.C))
    )
    if row_of_slot_ptr is not None:
        tl.store(row_of_slot_ptr + slots, row, mask=is_slot)
    if slot_weights_ptr is not None:
        tl.store(slot_weights_ptr + slots, weight_bits.to(tl.float32, bitcast=True), mask=is_slot)
    if slabs.token_of_slot is not None:
        tl.store(slabs.token_of_slot + slots, token, mask=is_slot)
    tl.store(slots_of_row_ptr + row * c.K + k, tl.where(is_slot, slots, -1), mask=is_entry)

    if slabs.data is not None:
        first = (program % PER_SOURCE) * index.ROWS
        if (in_lines == 0) & (first < num_tokens):
            signals_ptr = int32_at(buffer_address + c.ARRIVED_ROWS_AT) + source_lane
            has_timed_out = await_signals(peers, signals_ptr, is_own, WAIT_DISPATCH, epoch, c)
            is_lost |= has_timed_out
            if has_timed_out == 0:
                end = source * c.M + tl.minimum(first + index.ROWS, num_tokens)
                pack_rows(peers, slabs, slots_of_row_ptr, source * c.M + first, end, c, index)
    if row_of_slot_ptr is not None:
        _clear_unused(row_of_slot_ptr, starts, counts, c, index)
    if program == 0:
        is_bulk = is_heard & ((headers & 1) == 0) & (headers > 0)
        if tl.max(is_bulk.to(tl.int32)) > 0:
            signals_ptr = int32_at(buffer_address + c.ARRIVED_ROWS_AT) + source_lane
            is_lost |= await_signals(peers, signals_ptr, is_bulk, WAIT_DISPATCH, epoch, c)
    if is_lost:
        _hand_out_nothing(peers, counts_ptr, first_slot_ptr, slabs.source_ranges, epoch, c)
    if OVERLAPS:
        await_previous()


@triton.jit(do_not_specialize=VARYING)
def _release_buffer_kernel(
    memory: Memory,
    own_address: tl.tensor,
    buffer_address: tl.tensor,
    rank: tl.tensor,
    max_polls: tl.tensor,
    c: constexprs.Layout,
) -> None:
    """End the epoch of a batch without a combine, and signal its end to all ranks.

    Do nothing if a replay has ended the epoch already, which no host knows.
    """
    peers = Peers(*memory, own_address, buffer_address, rank, max_polls)
    epoch = tl.load(peers.state + 1)
    if tl.load(peers.state) == epoch:
        tl.store(peers.state, next_epoch(epoch))
        give_credit(peers, epoch, c)


def receive_dispatch(
    exchange: LowLatencyExchange,
    row_of_slot: Tensor | None,
    slots_of_row: Tensor,
    slot_weights: Tensor | None,
    num_tokens_per_expert: Tensor,
    first_slot: Tensor,
    *,
    expert_alignment: int,
    num_tokens: int,
    is_captured: bool,
    batch: int = -1,
    scale_strides: tuple[int, int, int] = (0, 0, 0),
    slabs: SlabMemory = NO_SLABS,
) -> None:
    """Wait for the rows of all ranks and write the expert-major index over them.

    Args:
        exchange: the receive buffer.
        row_of_slot: [C], int32, or None if the index has none.   slots_of_row: [W * M, K], int32.
        slot_weights: [C], float32, or None if each slot returns.
        num_tokens_per_expert: [L], int32.   first_slot: [L + 1], int32.
        expert_alignment: each expert's slots start at a multiple of this.
        num_tokens: T of this rank; other ranks are expected to have about as many.
        is_captured: as send_dispatch() was given it.
        batch: likewise, where a replay may have come between; nothing is received then. -1: none.
        scale_strides: in words, of the scales of slabs: from one expert to the next, from slot to
            slot, from word to word.
        slabs: memory to which rows are copied; without it they stay in the receive buffer.

    Collective: yes, after send_dispatch().   Allocates nothing.   Host sync: none.
    """
    capacity = 0 if row_of_slot is None else row_of_slot.shape[0]
    key = ("receive rows", capacity, expert_alignment)
    layout = exchange.peers.layout
    rows = max(1, min(_PAIRS, _COMPARISONS // layout.local_lanes) // layout.metadata_words)
    if slabs.data is not None:
        rows = min(rows, _PACKED_ROWS)
    indexers = layout.world_size * -(-layout.max_tokens // rows)
    launch = exchange.launches.get(key)
    if launch is None:
        index = constexprs.constants(
            constexprs.Index,
            C=capacity,
            ALIGNMENT=expert_alignment,
            ROWS=rows,
            INDEXERS=indexers,
            TOKENS=UNPACKED_TOKENS if slabs.data is None else 1,
            CAPACITY=0 if slabs.data is None else layout.num_rows,
            WORD_LANES=next_power_of_two(layout.data_bytes // _WORD_BYTES),
            SCALE_LANES=next_power_of_two(max(1, layout.scale_words)),
            **dict(zip(_SCALE_STRIDES, scale_strides, strict=True)),
        )
        launch = exchange.launches[key] = prepare(
            *(exchange, _receive_dispatch_kernel, [*[CHANGES] * 5, slabs], 2),
            index=index,
            num_warps=_WARPS,
            **overlapping(slots_of_row.device),
        )
    # Rows in lines are unpacked by the programs after the indexers.
    num_programs = indexers + num_unpackers(layout, num_tokens)
    tensors = (row_of_slot, slots_of_row, slot_weights, num_tokens_per_expert, first_slot)
    launch(num_programs, *tensors, batch, int(is_captured))


def release_buffer(exchange: LowLatencyExchange) -> None:
    """End the last batch of the receive buffer if it was never combined.

    Collective: yes.   Allocates nothing.   Host sync: none.
    """
    launch = exchange.launches.get("release")
    if launch is None:
        launch = prepare(exchange, _release_buffer_kernel, [], 0, num_warps=1)
        exchange.launches["release"] = launch
    launch(1)
