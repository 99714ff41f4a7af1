"""Low-latency dispatch over NVLink: quantise, store where the experts' rank reads, index.

Memory order: a program stores its rows into the peers' memory and then adds 1, releasing, to a word
of each peer; a receiver acquires the word once all programs of all sources have added. A slot is
written again only after the combine words say that every rank has read its last batch.

Two launches: the sender quantises each token once and stores one row a rank, with a record of its
experts, positions and weights; the receiver reads no rows, only the records, and makes the
expert-major index. Nothing is cleared and the host reads nothing.

Not yet timed.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from epcomm.kernels.launch import EXACT, next_power_of_two
from epcomm.kernels.peer_exchange import PeerExchange, on_device
from epcomm.kernels.peer_signals import await_words, give_up, publish, words_at
from epcomm.kernels.quantize_fp8 import has_e4m3, quantize_blocks
from epcomm.kernels.quantize_int8 import quantize_row

# What a report says that a rank waited for.
PHASE_CREDIT, PHASE_DISPATCH = 1, 2

# Kinds of rows on the wire.
PLAIN, FP8, FP8_POWER_OF_TWO, INT8 = 0, 1, 2, 3

# Pairs of an id and an expert that a program compares at once: eight a thread.
_COMPARISONS = 4096
# Entries of received records that a program reads, at most: few, so that many programs share them.
_PAIRS = 128
# A row of 7168 elements is then 14 of them a thread.
_SEND_WARPS = 16
_RECEIVE_WARPS = 4

_PHASE_CREDIT = tl.constexpr(PHASE_CREDIT)
_PHASE_DISPATCH = tl.constexpr(PHASE_DISPATCH)
_PLAIN = tl.constexpr(PLAIN)
_FP8_POWER_OF_TWO = tl.constexpr(FP8_POWER_OF_TWO)
_INT8 = tl.constexpr(INT8)
# As epcomm.buffers.faults packs a header: the fault below, the flags above.
_FAULT_MASK = tl.constexpr(0xFF)
_FLAGS_SHIFT = tl.constexpr(8)
_GRAD_ENABLED = tl.constexpr(1)
_FAULT_IDS = tl.constexpr(2)
_FAULT_GRAD_MODE = tl.constexpr(5)


@triton.jit
def _has_bad_ids(
    ids_ptr: tl.tensor, num_pairs: tl.tensor, E: tl.constexpr, CHUNK: tl.constexpr
) -> tl.tensor:
    """1 if any of the ids is neither -1 nor an expert: of 0 -1 4 with E = 4, the last."""
    bad = tl.full([], 0, tl.int32)
    for start in tl.range(0, num_pairs, CHUNK, num_stages=1):  # pyright: ignore[reportGeneralTypeIssues]
        at = start + tl.arange(0, CHUNK)
        ids = tl.load(ids_ptr + at, mask=at < num_pairs, other=-1)
        bad = tl.maximum(bad, tl.max(((ids < -1) | (ids >= E)).to(tl.int32)))
    return bad


@triton.jit
def _send_header(
    ids_ptr: tl.tensor,
    base: tl.tensor,
    peer: tl.tensor,
    rank: tl.tensor,
    epoch: tl.tensor,
    num_tokens: tl.tensor,
    announced: tl.tensor,
    K: tl.constexpr,
    L: tl.constexpr,
    L_LANES: tl.constexpr,
    CHUNK: tl.constexpr,
    COUNTS_AT: tl.constexpr,
    HEADER_AT: tl.constexpr,
) -> None:
    """Tell `peer`, whose slot begins at `base`, this rank's slots for each of its L experts, and T.

    ids 0 2 | 3 2 with L = 2: rank 1 is told 2 1, for its experts 2 and 3.
    """
    lane = tl.arange(0, L_LANES)
    experts = peer * L + lane
    counts = tl.zeros([L_LANES], tl.int32)
    for start in tl.range(0, num_tokens * K, CHUNK, num_stages=1):
        at = start + tl.arange(0, CHUNK)
        ids = tl.load(ids_ptr + at, mask=at < num_tokens * K, other=-1).to(tl.int32)
        counts += tl.sum((ids[:, None] == experts[None, :]).to(tl.int32), axis=0)
    tl.store(words_at(base + COUNTS_AT) + rank * L + lane, counts, mask=lane < L)
    word = tl.arange(0, 4)
    header = tl.where(word == 0, epoch, tl.where(word == 1, num_tokens, announced))
    tl.store(words_at(base + HEADER_AT) + rank * 4 + word, header)


@triton.jit
def _positions(
    ids_ptr: tl.tensor,
    ids: tl.tensor,
    token: tl.tensor,
    K: tl.constexpr,
    K_LANES: tl.constexpr,
    CHUNK: tl.constexpr,
) -> tl.tensor:
    """[K_LANES]: entries before (token, k) with the same expert.

    ids 0 2 | 2 0: the positions of the second token are 1 1.
    """
    limit = token * K + tl.arange(0, K_LANES)
    positions = tl.zeros([K_LANES], tl.int32)
    for start in tl.range(0, (token + 1) * K, CHUNK, num_stages=1):
        at = start + tl.arange(0, CHUNK)
        earlier = tl.load(ids_ptr + at, mask=at < (token + 1) * K, other=-1).to(tl.int32)
        is_same = (earlier[:, None] == ids[None, :]) & (at[:, None] < limit[None, :])
        positions += tl.sum(is_same.to(tl.int32), axis=0)
    return positions


@triton.jit(
    do_not_specialize=[
        "slot_address",
        "abort_address",
        "slot",
        "rank",
        "num_tokens",
        "announced",
        "max_polls",
    ]
)
def _send_dispatch_kernel(
    x_ptr: tl.tensor,
    ids_ptr: tl.tensor,
    weights_ptr: tl.tensor,
    table_ptr: tl.tensor,
    state_ptr: tl.tensor,
    is_sent_ptr: tl.tensor,
    counters_ptr: tl.tensor,
    report_ptr: tl.tensor,
    slot_address: tl.tensor,
    abort_address: tl.tensor,
    slot: tl.tensor,
    rank: tl.tensor,
    num_tokens: tl.tensor,
    announced: tl.tensor,
    max_polls: tl.tensor,
    X_STRIDE: tl.constexpr,
    W: tl.constexpr,
    W_LANES: tl.constexpr,
    M: tl.constexpr,
    K: tl.constexpr,
    K_LANES: tl.constexpr,
    L: tl.constexpr,
    L_LANES: tl.constexpr,
    HIDDEN: tl.constexpr,
    COLUMNS: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_LANES: tl.constexpr,
    BLOCKS: tl.constexpr,
    KIND: tl.constexpr,
    PROFILE: tl.constexpr,
    HAS_E4M3: tl.constexpr,
    CHUNK: tl.constexpr,
    COUNT_CHUNK: tl.constexpr,
    NUM_SLOTS: tl.constexpr,
    ARRIVED_DISPATCH_AT: tl.constexpr,
    ARRIVED_COMBINE_AT: tl.constexpr,
    HEADER_AT: tl.constexpr,
    COUNTS_AT: tl.constexpr,
    RECORD_AT: tl.constexpr,
    DATA_AT: tl.constexpr,
    SCALES_AT: tl.constexpr,
    RECORD_BYTES: tl.constexpr,
    DATA_BYTES: tl.constexpr,
    SCALE_BYTES: tl.constexpr,
) -> None:
    """Tokens p, p + P, ... of program p of P; the first W programs also send the headers.

    W = 2, L = 2, ids 0 3 | 3 -1, weights .6 .4 | 1 0, rank 1: row M of rank 0 gets the first token
    with the record 0 -1, 0 0, .6 .4; row M of rank 1 the same token with -1 1, 0 0, .6 .4, and row
    M + 1 of rank 1 the second token with 1 -1, 1 0, 1 0.
    """
    program = tl.program_id(0)
    num_programs = tl.num_programs(0)
    # This kernel reads the first word and writes the second, those of combine the other way round:
    # no program meets the update of its own kernel.
    epoch = tl.load(state_ptr)
    if program == 0:
        tl.store(state_ptr + 1, epoch)

    # Written by the combine of the last batch of this slot, on every rank: they have read it.
    abort_ptr = words_at(abort_address)
    late, aborted = await_words(  # pyright: ignore[reportGeneralTypeIssues]
        words_at(slot_address + ARRIVED_COMBINE_AT),
        abort_ptr,
        (epoch - 1) * num_programs,
        max_polls,
        W,
        W_LANES,
    )
    if (tl.sum(late) > 0) | (aborted != 0):
        aborts_ptr = table_ptr + NUM_SLOTS * W
        give_up(late, aborted, report_ptr, aborts_ptr, _PHASE_CREDIT, epoch, rank, W, W_LANES)
        return

    is_faulty = (announced & _FAULT_MASK) != 0
    if (_has_bad_ids(ids_ptr, num_tokens * K, W * L, CHUNK) > 0) & (is_faulty == 0):
        announced += _FAULT_IDS
    num_tokens = tl.where((announced & _FAULT_MASK) != 0, 0, num_tokens)

    bases_ptr = table_ptr + slot * W
    if program < W:
        _send_header(
            ids_ptr,
            tl.load(bases_ptr + program),
            program,
            rank,
            epoch,
            num_tokens,
            announced,
            K,
            L,
            L_LANES,
            COUNT_CHUNK,
            COUNTS_AT,
            HEADER_AT,
        )

    num_sent = 0
    num_records = 0
    k = tl.arange(0, K_LANES)
    for token in tl.range(program, num_tokens, num_programs, num_stages=1):
        ids = tl.load(ids_ptr + token * K + k, mask=k < K, other=-1).to(tl.int32)
        weights = tl.load(weights_ptr + token * K + k, mask=k < K, other=0.0)
        weight_bits = weights.to(tl.int32, bitcast=True)
        positions = _positions(ids_ptr, ids, token, K, K_LANES, CHUNK)
        owners = tl.where(ids >= 0, ids // L, -1)
        row_ptr = x_ptr + tl.cast(token, tl.int64) * X_STRIDE
        if KIND == _PLAIN:
            at = tl.arange(0, COLUMNS)
            is_element = at < HIDDEN
            # Bits, whatever they mean: an interpreter need not know the dtype.
            row = tl.load(row_ptr + at, mask=is_element)
            scale = 0
        elif KIND == _INT8:
            at = tl.arange(0, COLUMNS)
            is_element = at < HIDDEN
            values = tl.load(row_ptr + at, mask=is_element, other=0.0).to(tl.float32)
            row, scale = quantize_row(values, PROFILE)  # pyright: ignore[reportGeneralTypeIssues]
        else:
            lane = tl.arange(0, BLOCK_LANES)[None, :]
            at = tl.arange(0, BLOCKS)[:, None] * BLOCK + lane
            is_element = (lane < BLOCK) & (at < HIDDEN)
            values = tl.load(row_ptr + at, mask=is_element, other=0.0).to(tl.float32)
            row, scale = quantize_blocks(values, KIND == _FP8_POWER_OF_TWO, HAS_E4M3)  # pyright: ignore[reportGeneralTypeIssues]

        # Where rows of this rank begin, in the memory of any.
        place = tl.cast(rank, tl.int64) * M + token
        for peer in tl.static_range(W):
            is_owner = owners == peer
            is_needed = tl.max(is_owner.to(tl.int32))
            base = tl.load(bases_ptr + peer)
            record_address = base + RECORD_AT + place * RECORD_BYTES
            record_ptr = tl.multiple_of(record_address.to(tl.pointer_type(tl.int32)), 16)
            tl.store(record_ptr + k, tl.where(is_owner, ids - peer * L, -1))
            tl.store(record_ptr + K_LANES + k, positions)
            tl.store(record_ptr + 2 * K_LANES + k, weight_bits)
            # For the receiver of combine on this rank.
            tl.store(is_sent_ptr + token * W + peer, is_needed.to(tl.uint8))
            if is_needed > 0:
                data_address = base + DATA_AT + place * DATA_BYTES
                data_ptr = data_address.to(tl.pointer_type(row.dtype))
                tl.store(tl.multiple_of(data_ptr, 16) + at, row, mask=is_element)
                scale_address = base + SCALES_AT + place * SCALE_BYTES
                if KIND == _INT8:
                    tl.store(scale_address.to(tl.pointer_type(tl.float32)), scale)
                elif KIND != _PLAIN:
                    scales_ptr = scale_address.to(tl.pointer_type(scale.dtype))
                    block = tl.arange(0, BLOCKS)
                    is_block = block * BLOCK < HIDDEN
                    tl.store(tl.multiple_of(scales_ptr, 16) + block, scale, mask=is_block)
            num_sent += tl.where(peer == rank, 0, is_needed)
        num_records += W - 1
    # Of this rank alone, and read by its host.
    tl.atomic_add(counters_ptr, tl.cast(num_sent, tl.int64), sem="relaxed")
    tl.atomic_add(counters_ptr + 1, tl.cast(num_records, tl.int64), sem="relaxed")
    publish(bases_ptr, ARRIVED_DISPATCH_AT + rank * 4, 1, W, W_LANES)


@triton.jit(do_not_specialize=["slot_address", "abort_address", "rank", "num_senders", "max_polls"])
def _receive_dispatch_kernel(
    table_ptr: tl.tensor,
    state_ptr: tl.tensor,
    row_of_slot_ptr: tl.tensor,
    slots_of_row_ptr: tl.tensor,
    slot_weights_ptr: tl.tensor,
    counts_ptr: tl.tensor,
    first_slot_ptr: tl.tensor,
    faults_ptr: tl.tensor,
    counters_ptr: tl.tensor,
    report_ptr: tl.tensor,
    slot_address: tl.tensor,
    abort_address: tl.tensor,
    rank: tl.tensor,
    num_senders: tl.tensor,
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
    ROWS: tl.constexpr,
    NUM_SLOTS: tl.constexpr,
    ARRIVED_DISPATCH_AT: tl.constexpr,
    HEADER_AT: tl.constexpr,
    COUNTS_AT: tl.constexpr,
    RECORD_AT: tl.constexpr,
    RECORD_BYTES: tl.constexpr,
) -> None:
    """ROWS rows of one source a program, and every so many slots of padding.

    W = 2, L = 2, counts 1 0 | 1 2 from ranks 0 and 1: expert 0 has the slots 0 and 1, expert 1 has
    2 and 3; the row of rank 1 at position 1 of expert 1 is slot 3.
    """
    program = tl.program_id(0)
    epoch = tl.load(state_ptr)
    # Added by every sending program of every rank: their rows, records and headers are here.
    abort_ptr = words_at(abort_address)
    late, aborted = await_words(  # pyright: ignore[reportGeneralTypeIssues]
        words_at(slot_address + ARRIVED_DISPATCH_AT),
        abort_ptr,
        epoch * num_senders,
        max_polls,
        W,
        W_LANES,
    )
    is_lost = (tl.sum(late) > 0) | (aborted != 0)
    if is_lost:
        aborts_ptr = table_ptr + NUM_SLOTS * W
        give_up(late, aborted, report_ptr, aborts_ptr, _PHASE_DISPATCH, epoch, rank, W, W_LANES)

    source_lane = tl.arange(0, W_LANES)
    is_source = source_lane < W
    headers_ptr = words_at(slot_address + HEADER_AT) + source_lane * 4
    announced = tl.load(headers_ptr + 2, mask=is_source, other=0)
    codes = announced & _FAULT_MASK
    has_grad = is_source & (((announced >> _FLAGS_SHIFT) & _GRAD_ENABLED) != 0)
    is_mixed = is_source & (has_grad == 0) & (tl.max(has_grad.to(tl.int32)) > 0)
    codes = tl.where(is_mixed & (codes == 0), _FAULT_GRAD_MODE, codes)
    has_failed = is_lost | (tl.max(codes) != 0)

    expert = tl.arange(0, L_LANES)
    is_count = is_source[:, None] & (expert < L)[None, :] & (has_failed == 0)
    count_ptr = words_at(slot_address + COUNTS_AT) + source_lane[:, None] * L + expert[None, :]
    counts_of_source = tl.load(count_ptr, mask=is_count, other=0)
    counts = tl.sum(counts_of_source, axis=0)
    aligned = (counts + ALIGNMENT - 1) // ALIGNMENT * ALIGNMENT
    ends = tl.cumsum(aligned, axis=0)
    starts = ends - aligned

    if program == 0:
        tl.store(counts_ptr + expert, counts, mask=expert < L)
        tl.store(first_slot_ptr + expert, starts, mask=expert < L)
        tl.store(first_slot_ptr + L, tl.sum(aligned))
        tl.store(state_ptr + 2, has_failed.to(tl.int32))
        if is_lost == 0:
            earlier = tl.load(faults_ptr + 2 * source_lane, mask=is_source, other=0)
            noted = tl.where(earlier == 0, codes.to(tl.int64), earlier)
            tl.store(faults_ptr + 2 * source_lane, noted, mask=is_source)
        tl.atomic_add(counters_ptr + 2, tl.full([], 1, tl.int64), sem="relaxed")

    # The rows of this program.
    PER_SOURCE: tl.constexpr = (M + ROWS - 1) // ROWS
    source = program // PER_SOURCE
    first_token = (program % PER_SOURCE) * ROWS
    header_ptr = words_at(slot_address + HEADER_AT)
    num_tokens = tl.where(has_failed, 0, tl.load(header_ptr + source * 4 + 1))
    is_before = source_lane < source
    before = tl.sum(tl.where(is_before[:, None], counts_of_source, 0), axis=0)
    bases = starts + before
    pair = tl.arange(0, ROWS * K_LANES)
    token = first_token + pair // K_LANES
    k = pair % K_LANES
    row = source * M + token
    is_pair = (token < num_tokens) & (k < K)
    record_ptr = (
        words_at(slot_address + RECORD_AT) + tl.cast(row, tl.int64) * (RECORD_BYTES // 4) + k
    )
    experts = tl.load(record_ptr, mask=is_pair, other=-1)
    positions = tl.load(record_ptr + K_LANES, mask=is_pair, other=0)
    weight_bits = tl.load(record_ptr + 2 * K_LANES, mask=is_pair, other=0)
    is_slot = experts >= 0
    is_expert = experts[:, None] == expert[None, :]
    slots = tl.sum(tl.where(is_expert, bases[None, :], 0), axis=1) + positions
    tl.store(row_of_slot_ptr + slots, row, mask=is_slot)
    tl.store(slot_weights_ptr + slots, weight_bits.to(tl.float32, bitcast=True), mask=is_slot)
    is_entry = (token < M) & (k < K)
    tl.store(slots_of_row_ptr + row * K + k, tl.where(is_slot, slots, -1), mask=is_entry)

    # Slots that no row has.
    STRIPE: tl.constexpr = ROWS * K_LANES
    for start in tl.range(program * STRIPE, C, tl.num_programs(0) * STRIPE, num_stages=1):
        slot = start + tl.arange(0, STRIPE)
        is_in = (slot[:, None] >= starts[None, :]) & (slot[:, None] < (starts + counts)[None, :])
        is_used = tl.max(is_in.to(tl.int32), axis=1) > 0
        tl.store(row_of_slot_ptr + slot, tl.zeros_like(slot) - 1, mask=(is_used == 0) & (slot < C))


@triton.jit(do_not_specialize=["slot", "rank", "num_programs"])
def _release_slot_kernel(
    table_ptr: tl.tensor,
    state_ptr: tl.tensor,
    slot: tl.tensor,
    rank: tl.tensor,
    num_programs: tl.tensor,
    W: tl.constexpr,
    W_LANES: tl.constexpr,
    ARRIVED_COMBINE_AT: tl.constexpr,
) -> None:
    """In place of a combine that never came: epoch 5 ends, and all ranks hear of P programs."""
    tl.store(state_ptr, tl.load(state_ptr + 1) + 1)
    publish(table_ptr + slot * W, ARRIVED_COMBINE_AT + rank * 4, num_programs, W, W_LANES)


def send_dispatch(
    exchange: PeerExchange,
    hidden_states: Tensor,
    topk_ids: Tensor,
    topk_weights: Tensor,
    is_sent: Tensor,
    *,
    announced: int,
    kind: int,
    scale_block: int,
    profile: str,
) -> None:
    """Send tokens to the ranks of their experts.

    Args:
        exchange: the slot, whose last batch was combined or released.
        hidden_states: [T, H], bfloat16, float16 or float32; rows may lie apart.
        topk_ids: [T, K], int64, contiguous.
        topk_weights: [T, K], float32, contiguous.
        is_sent: [M, W], uint8, written: whether a rank got the token.
        announced: fault and flags of this rank, as pack_header() packs them.
        kind: PLAIN, FP8, FP8_POWER_OF_TWO or INT8.
        scale_block: elements that share a scale; of PLAIN and INT8 rows any.
        profile: of INT8 rows, a value of Int8Profile.

    Collective: yes.   Allocates nothing.   Host sync: none.   Graph capture: after one call.
    """
    num_tokens, hidden_size = hidden_states.shape
    dims, offsets = exchange.dims, exchange.offsets
    k_lanes, l_lanes = exchange.record_words, next_power_of_two(dims.num_local_experts)
    with on_device(hidden_states):
        _send_dispatch_kernel[(exchange.num_programs,)](
            hidden_states,
            topk_ids,
            topk_weights,
            exchange.table,
            exchange.state,
            is_sent,
            exchange.counters,
            exchange.report,
            exchange.slot_address,
            exchange.abort_address,
            exchange.slot,
            exchange.rank,
            num_tokens,
            announced,
            exchange.max_polls,
            X_STRIDE=hidden_states.stride(0) if num_tokens > 1 else hidden_size,
            W=dims.world_size,
            W_LANES=next_power_of_two(dims.world_size),
            M=dims.max_tokens,
            K=dims.top_k,
            K_LANES=k_lanes,
            L=dims.num_local_experts,
            L_LANES=l_lanes,
            HIDDEN=hidden_size,
            COLUMNS=next_power_of_two(hidden_size),
            BLOCK=scale_block,
            BLOCK_LANES=next_power_of_two(scale_block),
            BLOCKS=next_power_of_two(-(-hidden_size // scale_block)),
            KIND=kind,
            PROFILE=profile,
            HAS_E4M3=kind in (FP8, FP8_POWER_OF_TWO) and has_e4m3(hidden_states.device),
            CHUNK=max(32, _COMPARISONS // k_lanes),
            COUNT_CHUNK=max(32, _COMPARISONS // l_lanes),
            NUM_SLOTS=exchange.num_slots,
            ARRIVED_DISPATCH_AT=offsets["arrived_dispatch"],
            ARRIVED_COMBINE_AT=offsets["arrived_combine"],
            HEADER_AT=offsets["header"],
            COUNTS_AT=offsets["counts"],
            RECORD_AT=offsets["record"],
            DATA_AT=offsets["data"],
            SCALES_AT=offsets["scales"],
            RECORD_BYTES=12 * k_lanes,
            DATA_BYTES=exchange.data_bytes,
            SCALE_BYTES=exchange.scale_bytes,
            num_warps=_SEND_WARPS,  # pyright: ignore[reportCallIssue]
            **EXACT,
        )


def receive_dispatch(
    exchange: PeerExchange,
    row_of_slot: Tensor,
    slots_of_row: Tensor,
    slot_weights: Tensor,
    num_slots_per_expert: Tensor,
    first_slot: Tensor,
    *,
    slot_alignment: int,
) -> None:
    """Wait for the rows of all ranks and write the expert-major index over them.

    Args:
        exchange: the slot.
        row_of_slot: [C], int32.   slots_of_row: [W * M, K], int32.   slot_weights: [C], float32.
        num_slots_per_expert: [L], int32.   first_slot: [L + 1], int32.
        slot_alignment: each expert's slots start at a multiple of this.

    Collective: yes, after send_dispatch().   Allocates nothing.   Host sync: none.
    """
    dims, offsets = exchange.dims, exchange.offsets
    k_lanes, l_lanes = exchange.record_words, next_power_of_two(dims.num_local_experts)
    rows = max(1, min(_PAIRS, _COMPARISONS // l_lanes) // k_lanes)
    with on_device(row_of_slot):
        _receive_dispatch_kernel[(dims.world_size * -(-dims.max_tokens // rows),)](
            exchange.table,
            exchange.state,
            row_of_slot,
            slots_of_row,
            slot_weights,
            num_slots_per_expert,
            first_slot,
            exchange.faults,
            exchange.counters,
            exchange.report,
            exchange.slot_address,
            exchange.abort_address,
            exchange.rank,
            exchange.num_programs,
            exchange.max_polls,
            C=row_of_slot.shape[0],
            W=dims.world_size,
            W_LANES=next_power_of_two(dims.world_size),
            M=dims.max_tokens,
            K=dims.top_k,
            K_LANES=k_lanes,
            L=dims.num_local_experts,
            L_LANES=l_lanes,
            ALIGNMENT=slot_alignment,
            ROWS=rows,
            NUM_SLOTS=exchange.num_slots,
            ARRIVED_DISPATCH_AT=offsets["arrived_dispatch"],
            HEADER_AT=offsets["header"],
            COUNTS_AT=offsets["counts"],
            RECORD_AT=offsets["record"],
            RECORD_BYTES=12 * k_lanes,
            num_warps=_RECEIVE_WARPS,  # pyright: ignore[reportCallIssue]
        )


def release_slot(exchange: PeerExchange) -> None:
    """End the last batch of the slot, which was never combined.

    Collective: yes.   Allocates nothing.   Host sync: none.
    """
    dims = exchange.dims
    with on_device(exchange.table):
        _release_slot_kernel[(1,)](
            exchange.table,
            exchange.state,
            exchange.slot,
            exchange.rank,
            exchange.num_programs,
            W=dims.world_size,
            W_LANES=next_power_of_two(dims.world_size),
            ARRIVED_COMBINE_AT=exchange.offsets["arrived_combine"],
            num_warps=1,  # pyright: ignore[reportCallIssue]
        )
