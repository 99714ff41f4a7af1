// Store the rows of a block's tokens on all ranks of their experts, by the copy engine.
//
// A copier is a warp with a ring of pieces in shared memory. A piece is brought in once, and stored from
// there in the memory of each rank. A stage is filled again once the stores of its piece have read it. The
// first pieces are loaded while indices are planned.

constexpr int PIECES = (ROW_BYTES + MAX_PIECE - 1) / MAX_PIECE;
constexpr int PIECE = (ROW_BYTES / 16 + PIECES - 1) / PIECES * 16;
// Distance from the stage of a piece to the stage that is filled next: the stores of the last STORED pieces
// may not have read theirs.
constexpr int AHEAD = STAGES - STORED;

struct Ring {
    u32 memory;    // of STAGES pieces, in shared memory
    u32 barriers;  // of 8 bytes each
    int num_items;
    int first;  // token of this warp
};

__device__ u32 bytes_of(int piece) { return min(PIECE, ROW_BYTES - piece * PIECE); }

// Begin to bring in piece `item` of this warp, by one lane.
__device__ void bring(const Arguments& a, const Ring& ring, int item, int stage) {
    const int piece = item % PIECES;
    const i64 token = ring.first + item / PIECES * COPIERS;
    const u32 barrier = ring.barriers + 8 * stage;
    expect(barrier, bytes_of(piece));
    bring_piece(ring.memory + stage * PIECE, (u64)a.rows + token * a.rows_stride + piece * PIECE,
                bytes_of(piece), barrier);
}

__device__ Ring begin_ring(const Arguments& a, u32 memory, int first, int end) {
    const int warp = threadIdx.x / 32;
    Ring ring = {memory + warp * (STAGES * PIECE),
                 memory + COPIERS * STAGES * PIECE + warp * (STAGES * 8), 0, first + warp};
    ring.num_items = max(0, (end - ring.first + COPIERS - 1) / COPIERS) * PIECES;
    if (threadIdx.x % 32 == 0) {
        for (int stage = 0; stage < STAGES; ++stage) begin_barrier(ring.barriers + 8 * stage);
        publish_barriers();
        for (int item = 0; item < min(STAGES, ring.num_items); ++item) bring(a, ring, item, item);
    }
    __syncwarp();
    return ring;
}

// Wait for the pieces of begin_ring(): a block must not end before they are in shared memory.
__device__ void leave_ring(const Ring& ring) {
    for (int item = 0; item < min(STAGES, ring.num_items); ++item) {
        while (!has_ended(ring.barriers + 8 * item, 0)) {
        }
    }
}

// The row index of a token on the rank of each lane, or -1.
__device__ int place_of(const Arguments& a, int token, int end, bool takes) {
    return token < end && takes ? a.places[(i64)token * WORLD + threadIdx.x % 32] : -1;
}

// Store the rows of this warp's tokens on all ranks; they are stored when it returns.
__device__ void push(const Arguments& a, const Ring& ring, int end, u64 buffer_at) {
    const int lane = threadIdx.x % 32;
    // Some indices may be those of excluded ranks: a cached plan may be older than an exclusion.
    const bool takes = takes_part(a, lane);
    const u64 home = takes
        ? a.table[lane] + buffer_at + DATA_AT + (u64)a.rank * MAX_TOKENS * DATA_BYTES : 0;
    u64 num_sent = 0;
    int stage = 0, item = 0;
    u32 parity = 0;
    int next = place_of(a, ring.first, end, takes);
    for (int token = ring.first; token < end; token += COPIERS) {
        const int place = next;
        next = place_of(a, token + COPIERS, end, takes);
        const u32 mask = __ballot_sync(ALL_LANES, place >= 0);
        num_sent += __popc(mask & ~(1u << a.rank));
        const u64 target = home + (u64)place * DATA_BYTES;
        for (int piece = 0; piece < PIECES; ++piece, ++item) {
            while (!has_ended(ring.barriers + 8 * stage, parity)) {
            }
            // Each rank begins with the next one, so that not all store to the same rank.
            u32 above = mask & ~((2u << a.rank) - 1), below = mask & ((2u << a.rank) - 1);
            while (above | below) {
                const int peer = __ffs(above ? above : below) - 1;
                if (above) above &= above - 1;
                else below &= below - 1;
                const u64 to = __shfl_sync(ALL_LANES, target, peer);
                if (lane == 0) {
                    store_piece(to + piece * PIECE, ring.memory + stage * PIECE, bytes_of(piece));
                }
            }
            if (lane == 0) {
                // A piece without stores has a group too, because groups are counted as pieces are.
                end_group();
                await_read<STORED>();
                const int read = item - STORED;
                if (read >= 0 && read + STAGES < ring.num_items) {
                    bring(a, ring, read + STAGES, (stage + AHEAD) % STAGES);
                }
            }
            __syncwarp();
            if (++stage == STAGES) {
                stage = 0;
                parity ^= 1;
            }
        }
    }
    if (lane == 0) {
        // Wait until the pieces are stored, not only read, so that a later release covers them.
        await_stored();
        atomicAdd(a.counters + (IS_PLANNED ? 1 : 2), num_sent);
    }
    __syncwarp();
}
