// Send what belongs to the rows: metadata and scales of tokens, and the header of this rank.

// Tokens whose words a helper warp loads before it stores any.
constexpr int TOKENS = 4;
constexpr int METADATA_TURNS = (3 * K_LANES + 31) / 32;

// A word of the metadata of a token. That of an expert is its global id.
__device__ int metadata_word(const Arguments& a, int token, int word) {
    const int k = word % K_LANES;
    const i64 at = (i64)token * TOP_K + k;
    if (k >= TOP_K) return word < K_LANES ? -1 : 0;
    if (word < K_LANES) {
        const i64 id = a.ids[at];
        return id >= 0 && id < EXPERTS ? (int)id : -1;
    }
    return word < 2 * K_LANES ? a.positions[at] : __float_as_int(a.weights[at]);
}

// Send the metadata of each token of the block to the ranks of its experts, by all helpers.
__device__ void send_metadata(const Arguments& a, int first, int end, u64 buffer_at, int helper) {
    const int lane = helper % 32;
    const u64 home = takes_part(a, lane)
        ? a.table[lane] + buffer_at + METADATA_AT + (u64)a.rank * MAX_TOKENS * METADATA_BYTES : 0;
    for (int token = first + helper / 32; token < end; token += TOKENS * HELPERS) {
        int words[TOKENS][METADATA_TURNS], places[TOKENS];
#pragma unroll
        for (int i = 0; i < TOKENS; ++i) {
            const int other = token + i * HELPERS;
            places[i] = other < end && lane < WORLD ? a.places[(i64)other * WORLD + lane] : -1;
#pragma unroll
            for (int turn = 0; turn < METADATA_TURNS; ++turn) {
                const int word = lane + 32 * turn;
                words[i][turn] = other < end && word < 3 * K_LANES ? metadata_word(a, other, word) : 0;
            }
        }
#pragma unroll
        for (int i = 0; i < TOKENS; ++i) {
            const u64 target = home + (u64)places[i] * METADATA_BYTES;
            for (u32 left = __ballot_sync(ALL_LANES, places[i] >= 0); left; left &= left - 1) {
                const int peer = __ffs(left) - 1;
                int* to = (int*)__shfl_sync(ALL_LANES, target, peer);
#pragma unroll
                for (int turn = 0; turn < METADATA_TURNS; ++turn) {
                    const int word = lane + 32 * turn;
                    int value = words[i][turn];
                    if (word < K_LANES) {
                        value = value >= 0 && value / LOCAL == peer ? value - peer * LOCAL : -1;
                    }
                    if (word < 3 * K_LANES) store_far(to + word, value);
                }
            }
        }
    }
}

#if SCALE_ROW_BYTES > 0
typedef UnitOf<SCALE_UNIT>::type Scale;

// Send the scales of each token of the block to the ranks of its experts, by all helpers.
__device__ void send_scales(const Arguments& a, int first, int end, u64 buffer_at, int helper) {
    constexpr int UNITS = SCALE_ROW_BYTES / SCALE_UNIT;
    const int lane = helper % 32;
    const bool takes = takes_part(a, lane);
    const u64 home = takes
        ? a.table[lane] + buffer_at + SCALES_AT + (u64)a.rank * MAX_TOKENS * SCALE_BYTES : 0;
    for (int token = first + helper / 32; token < end; token += TOKENS * HELPERS) {
        int places[TOKENS];
#pragma unroll
        for (int i = 0; i < TOKENS; ++i) {
            const int other = token + i * HELPERS;
            places[i] = other < end && takes ? a.places[(i64)other * WORLD + lane] : -1;
        }
        for (int at = lane; at - lane < UNITS; at += 32) {
            Scale scales[TOKENS];
#pragma unroll
            for (int i = 0; i < TOKENS; ++i) {
                const i64 other = token + i * HELPERS;
                if (other < end && at < UNITS) {
                    scales[i] = ((const Scale*)(a.scales + other * a.scales_stride))[at];
                }
            }
#pragma unroll
            for (int i = 0; i < TOKENS; ++i) {
                const u64 target = home + (u64)places[i] * SCALE_BYTES;
                for (u32 left = __ballot_sync(ALL_LANES, places[i] >= 0); left; left &= left - 1) {
                    Scale* to = (Scale*)__shfl_sync(ALL_LANES, target, __ffs(left) - 1);
                    if (at < UNITS) store_far(to + at, scales[i]);
                }
            }
        }
    }
}
#endif

// Send the counts of this rank for all ranks to each of them, so that all compute the same totals. By all
// helpers of the last block, a warp for each rank.
__device__ void send_headers(const Arguments& a, const Plan& plan, u64 buffer_at, int helper) {
    const int lane = helper % 32;
    int status = a.status;
    if ((status & FAULT_MASK) == 0 && plan.is_bad) status += FAULT_IDS;
    const bool is_sent = (status & FAULT_MASK) == 0;
    for (int peer = helper / 32; peer < WORLD; peer += HELPERS) {
        if (!plan.takes[peer]) continue;
        int* header = (int*)(a.table[peer] + buffer_at + HEADER_AT + (u64)a.rank * HEADER_BYTES);
        if (lane == 0) {
            store_far(header, status);
            store_far(header + 1, a.wanted_tokens);
        }
        for (int i = lane; i < COUNTERS; i += 32) {
            // Counts of rows for each rank come first.
            const int word = i < EXPERTS ? WORLD + i : i - EXPERTS;
            store_far(header + HEADER_WORDS + word, is_sent ? plan.before[i] : 0);
        }
    }
}

// Count the headers sent, for BufferTraffic. By one thread.
__device__ void count_headers(const Arguments& a) {
    u64 num_notified = 0;
    for (int peer = 0; peer < WORLD; ++peer) num_notified += peer != a.rank && takes_part(a, peer);
    atomicAdd(a.counters, num_notified);
}
