// Combine of normal mode over NVLink, bfloat16: what normal_combine.py does, with the same signals,
// places and the same roundings, but a warp for each row, so that a few SMs keep the wire busy.
//
// The warps of a block have three roles. Senders take the rows of an item in turn, sum the slots of
// each and store the sum at the token's rank; the slots of the row after are on their way to the L2
// cache meanwhile. When all of them are done with an item, one warp releases the item's signal: its
// fence waits for the wire, and the senders need not. Reducers take a token each, acquire the
// signals of the items that hold its sums, and add them up. Senders wait for no reducer, and all
// warps reduce when all is sent. No more blocks than SMs: one that is not there yet would be waited
// for by all that are, on every rank.
//
// Defined before: HIDDEN (a multiple of 8), TOP_K and WORLD (at most 32), K_LANES, MAX_TOKENS,
// ITEM_ROWS, ITEMS, RETURN_BYTES, SENDERS, REDUCERS, UNROLL, the offsets COMBINE_BEGIN_AT,
// COMBINE_STATUS_AT, SUMS_READY_AT, RETURNED_AT, RETURNED_SCALARS_AT, the places in the state that
// common/epochs.py has, waits and the places in a report that epcomm/protocol.py has, and
// LOOKS_PER_TICK and POLL_NS of common/signals.py.

typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

constexpr u32 ALL_LANES = 0xffffffffu;
// Vectors of 16 bytes in a row; UNROLL of them are under way at once in a lane.
constexpr int VECTORS = HIDDEN / 8;
#define NOT_A_NUMBER __int_as_float(0x7fc00000)

struct Arguments {
    const char* rows;         // of rows_stride bytes each
    const float* weights;     // of each slot, or none
    const int* slots_of_row;  // or none: rows are sums already
    const float* scalars;     // of each row, or none
    const int* rows_from;
    const int* row_base;
    const int* has_failed;
    const int* places;
    const int* owners;
    char* out;
    float* out_scalars;
    const u64* table;
    const int* excluded;  // or none
    int* state;
    u64* counters;
    i64* faults;
    int* report;
    u64 own;
    i64 rows_stride;
    int rank;
    int status;
    int num_tokens;
    int max_polls;
};

__device__ u32 acquired(u64 address) {
    u32 value;
    asm volatile("ld.acquire.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
    return value;
}

__device__ u32 watched(u64 address) {
    u32 value;
    asm volatile("ld.relaxed.sys.global.u32 %0, [%1];" : "=r"(value) : "l"(address) : "memory");
    return value;
}

__device__ u64 clock_ns() {
    u64 value;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(value));
    return value;
}

__device__ void release(u64 address, u32 value) {
    asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(address), "r"(value) : "memory");
}

__device__ void add_released(u64 address, u32 value) {
    asm volatile("red.release.sys.global.add.u32 [%0], %1;" ::"l"(address), "r"(value) : "memory");
}

// Nobody writes experts' results while this kernel runs.
__device__ uint4 load_once(const char* address) {
    uint4 v;
    asm volatile("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(address));
    return v;
}

// What peers have stored is in the L2 cache, never mind what the L1 cache holds.
__device__ uint4 load_shared(const char* address) {
    uint4 v;
    asm volatile("ld.global.cg.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(address)
                 : "memory");
    return v;
}

__device__ u32 rounded(float low, float high) {
    u32 both;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    return both;
}

// Rounded twice, as plain torch does: a product and a sum.
__device__ void add(float (&sum)[8], uint4 v, float weight) {
    const u32 words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        float low = __uint_as_float(words[i] << 16);
        float high = __uint_as_float(words[i] & 0xffff0000u);
        sum[2 * i] = __fadd_rn(sum[2 * i], __fmul_rn(low, weight));
        sum[2 * i + 1] = __fadd_rn(sum[2 * i + 1], __fmul_rn(high, weight));
    }
}

__device__ uint4 packed(const float (&sum)[8]) {
    return {rounded(sum[0], sum[1]), rounded(sum[2], sum[3]), rounded(sum[4], sum[5]),
            rounded(sum[6], sum[7])};
}

// Add up the rows of the lanes in `mask`, in the order of lanes, into `to`: each of these lanes
// holds where its row begins, and its weight. All lanes of the warp take part.
template <bool IS_SHARED>
__device__ void add_rows(u64 from, float weight, u32 mask, char* to, bool is_void) {
    const int lane = threadIdx.x % 32;
#pragma unroll 1
    for (int base = lane; base < VECTORS + lane; base += 32 * UNROLL) {
        float sum[UNROLL][8];
#pragma unroll
        for (int u = 0; u < UNROLL; ++u) {
#pragma unroll
            for (int i = 0; i < 8; ++i) sum[u][i] = is_void ? NOT_A_NUMBER : 0.0f;
        }
        u32 left = mask;
#pragma unroll 1
        while (left) {
            const int first = __ffs(left) - 1;
            left &= left - 1;
            const bool has_second = left != 0;
            const int second = has_second ? __ffs(left) - 1 : first;
            left &= left - 1;
            const char* rows[2] = {(const char*)__shfl_sync(ALL_LANES, from, first),
                                   (const char*)__shfl_sync(ALL_LANES, from, second)};
            const float weights[2] = {__shfl_sync(ALL_LANES, weight, first),
                                      __shfl_sync(ALL_LANES, weight, second)};
            // Two rows at once: the second is on its way before the first is needed.
            uint4 parts[2][UNROLL];
#pragma unroll
            for (int i = 0; i < 2; ++i) {
#pragma unroll
                for (int u = 0; u < UNROLL; ++u) {
                    const int at = base + 32 * u;
                    if ((i == 0 || has_second) && at < VECTORS) {
                        const char* address = rows[i] + 16 * at;
                        parts[i][u] = IS_SHARED ? load_shared(address) : load_once(address);
                    }
                }
            }
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                if (i == 0 || has_second) {
#pragma unroll
                    for (int u = 0; u < UNROLL; ++u) add(sum[u], parts[i][u], weights[i]);
                }
            }
        }
#pragma unroll
        for (int u = 0; u < UNROLL; ++u) {
            const int at = base + 32 * u;
            if (at < VECTORS) *(uint4*)(to + 16 * at) = packed(sum[u]);
        }
    }
}

__device__ bool takes_part(const Arguments& a, int rank) {
    return rank < WORLD && (a.excluded == nullptr || a.excluded[rank] == 0);
}

// Report that the lanes in `missing` wait in vain, or that some rank did before; tell all ranks.
__device__ void abort_ranks(const Arguments& a, u32 missing, u32 aborted, int phase, int epoch) {
    const int lane = threadIdx.x % 32;
    if (aborted) {
        if (lane == 0) a.report[REPORT_ABORTED] = aborted;
        return;
    }
    if (lane < WORLD) a.report[REPORT_MISSING + lane] = (missing >> lane) & 1;
    if (lane == 0) {
        a.report[REPORT_EPOCH] = epoch;
        a.report[REPORT_WAIT] = phase;
    }
    __syncwarp();
    // Watched by wait(), on every rank. Its bits are those of abort_if_missing() in common/signals.py.
    const u32 told = (missing & ((1u << MAX_MISSING) - 1)) << MISSING_SHIFT;
    if (takes_part(a, lane)) release(a.table[lane], told + a.rank + 1);
}

// Wait until the signals of the lanes that have one are `epoch`; whether they are, for all lanes.
// What their ranks had stored before can be loaded then, by all lanes.
__device__ bool wait(const Arguments& a, u64 word, int epoch, int phase) {
    u32 missing = ALL_LANES, aborted = 0;
    int polls = a.max_polls;
    u64 end_ns = 0;
    for (u32 looks = 1; missing && polls > 0 && !aborted; ++looks) {
        missing = __ballot_sync(ALL_LANES, word && (int)(watched(word) - (u32)epoch) < 0);
        if (missing) aborted = watched(a.own);
        aborted = __shfl_sync(ALL_LANES, aborted, 0);
        // As polls_spent() of common/signals.py. The lanes of a warp may read the clock at other times.
        if (looks % LOOKS_PER_TICK == 0) {
            const u64 now_ns = __shfl_sync(ALL_LANES, clock_ns(), 0);
            if (now_ns >= end_ns) {
                --polls;
                end_ns = now_ns + POLL_NS;
            }
        }
    }
    missing = __ballot_sync(ALL_LANES, word && (int)(acquired(word) - (u32)epoch) < 0);
    __syncwarp();
    if (!missing) return true;
    abort_ranks(a, missing, aborted, phase, epoch);
    return false;
}

// Items that senders may be ahead of the warp that releases them.
constexpr u32 WINDOW = 32;  // one a lane, which clears it

// Of a block: how many senders have stored their rows of an item, all items of one place in the
// window added up; and how many items are released.
struct Progress {
    u32 stored[WINDOW];
    u32 num_released;
};

__device__ void count_stored(u32* counter) {
    asm volatile("red.release.cta.shared.add.u32 [%0], 1;"
                 ::"r"((u32)__cvta_generic_to_shared(counter)) : "memory");
}

__device__ u32 acquired_here(const u32* counter) {
    u32 value;
    asm volatile("ld.acquire.cta.shared.u32 %0, [%1];"
                 : "=r"(value) : "r"((u32)__cvta_generic_to_shared(counter)) : "memory");
    return value;
}

__device__ void release_here(u32* counter, u32 value) {
    asm volatile("st.release.cta.shared.u32 [%0], %1;"
                 ::"r"((u32)__cvta_generic_to_shared(counter)), "r"(value) : "memory");
}

// The rows of one item: at most ITEM_ROWS of one source, from row_base + begin on.
struct Item {
    int source, begin, end;
};

__device__ int num_items_of(const Arguments& a, bool has_failed) {
    const int lane = threadIdx.x % 32;
    const int most = __reduce_max_sync(ALL_LANES, lane < WORLD ? a.rows_from[lane] : 0);
    return has_failed ? 0 : (most + ITEM_ROWS - 1) / ITEM_ROWS * WORLD;
}

// Item `number` of a rank; one without rows is empty.
__device__ Item item_of(const Arguments& a, int number, int num_items) {
    // Each rank begins elsewhere, so that they do not all store to the same one.
    const int source = (number + a.rank) % WORLD, begin = number / WORLD * ITEM_ROWS;
    const bool is_there = number < num_items && takes_part(a, source);
    return {source, begin, is_there ? min(begin + ITEM_ROWS, a.rows_from[source]) : begin};
}

// Of the row that a sender takes in its turn, counted over the items of its block: the slot of each
// lane, or -1.
__device__ int slot_in_turn(const Arguments& a, int turn, int num_items) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    constexpr int TURNS = (ITEM_ROWS + SENDERS - 1) / SENDERS;
    const Item item = item_of(a, blockIdx.x + turn / TURNS * gridDim.x, num_items);
    const int place = item.begin + turn % TURNS * SENDERS + warp;
    if (place >= item.end) return -1;
    const i64 row = a.row_base[item.source] + place;
    if (a.slots_of_row == nullptr) return lane == 0 ? row : -1;
    return lane < TOP_K ? a.slots_of_row[row * TOP_K + lane] : -1;
}

// Have the row of each lane's slot in the L2 cache when it is loaded.
__device__ void fetch(const Arguments& a, int slot) {
    if (slot < 0) return;
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;"
                 ::"l"(a.rows + slot * a.rows_stride), "r"(2 * HIDDEN) : "memory");
}

__device__ float weight_of(const Arguments& a, int slot) {
    return slot >= 0 && a.weights != nullptr ? a.weights[slot] : 1.0f;
}

// Items p, p + P, ... of block p: the sums of ITEM_ROWS rows of one source each.
__device__ void send(const Arguments& a, Progress& progress, bool has_failed) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int num_items = num_items_of(a, has_failed);
    u64 num_sent = 0;
    int turn = 0;
    int slot = slot_in_turn(a, 0, num_items), following = slot_in_turn(a, 1, num_items);
    float weight = weight_of(a, slot);
    u32 done = 0;
    for (int number = blockIdx.x; number < num_items; number += gridDim.x, ++done) {
        while (done >= WINDOW && acquired_here(&progress.num_released) <= done - WINDOW) {
        }
        const Item item = item_of(a, number, num_items);
        const u64 home = a.table[item.source];
        for (int first = item.begin; first < item.begin + ITEM_ROWS; first += SENDERS) {
            fetch(a, following);
            const float next_weight = weight_of(a, following);
            const int after = slot_in_turn(a, ++turn + 1, num_items);
            const int place = first + warp;
            if (place < item.end) {
                const i64 target = (i64)a.rank * MAX_TOKENS + place;
                add_rows<false>((u64)a.rows + slot * a.rows_stride, weight,
                                __ballot_sync(ALL_LANES, slot >= 0),
                                (char*)(home + RETURNED_AT + target * RETURN_BYTES), false);
                if (a.scalars != nullptr && lane < TOP_K) {
                    const i64 row = a.row_base[item.source] + place;
                    ((float*)(home + RETURNED_SCALARS_AT))[target * K_LANES + lane] =
                        a.scalars[row * TOP_K + lane];
                }
                num_sent += item.source != a.rank;
            }
            slot = following;
            weight = next_weight;
            following = after;
        }
        __syncwarp();
        if (lane == 0) count_stored(&progress.stored[done % WINDOW]);
    }
    if (lane == 0) atomicAdd(a.counters + (a.scalars != nullptr ? 4 : 3), num_sent);
}

// Release the signal of each item once all senders of this block have stored their rows of it.
__device__ void release_items(const Arguments& a, Progress& progress, int epoch, bool has_failed) {
    const int num_items = num_items_of(a, has_failed);
    u32 done = 0;
    for (int number = blockIdx.x; number < num_items; number += gridDim.x, ++done) {
        const u32 wanted = SENDERS * (done / WINDOW + 1);
        while (acquired_here(&progress.stored[done % WINDOW]) < wanted) __nanosleep(100);
        const Item item = item_of(a, number, num_items);
        if (item.begin < item.end && threadIdx.x % 32 == 0) {
            // Acquired by the reducers of that rank.
            const u64 place = (u64)a.rank * ITEMS + number / WORLD;
            release(a.table[item.source] + SUMS_READY_AT + 4 * place, epoch);
        }
        __syncwarp();
        if (threadIdx.x % 32 == 0) release_here(&progress.num_released, done + 1);
    }
}

// The next token that no warp of this rank has taken; in order, as their sums come.
__device__ int take_token(const Arguments& a) {
    int token = 0;
    if (threadIdx.x % 32 == 0) token = atomicAdd(a.state + COMBINE_TOKENS, 1);
    return token;
}

// One token a warp: the sums of all ranks, in their order.
__device__ void reduce(const Arguments& a, int epoch, bool has_failed) {
    const int lane = threadIdx.x % 32;
    int token = __shfl_sync(ALL_LANES, take_token(a), 0);
    while (token < a.num_tokens) {
        // Known by the time that this one is done.
        const int next = take_token(a);
        int place = -1;
        if (!has_failed && takes_part(a, lane)) place = a.places[(i64)token * WORLD + lane];
        const u64 item = (u64)lane * ITEMS + place / ITEM_ROWS;
        const bool is_there = wait(a, place >= 0 ? a.own + SUMS_READY_AT + 4 * item : 0, epoch,
            WAIT_SUMS);
        const bool is_void = has_failed || !is_there;
        const u32 mask = __ballot_sync(ALL_LANES, place >= 0 && !is_void);
        const i64 target = (i64)lane * MAX_TOKENS + place;
        add_rows<true>(a.own + RETURNED_AT + target * RETURN_BYTES, 1.0f, mask,
                       a.out + (i64)token * (2 * HIDDEN), is_void);
        if (a.scalars != nullptr) {
            const int owner = lane < TOP_K ? a.owners[(i64)token * TOP_K + lane] : -1;
            const int owned = __shfl_sync(ALL_LANES, place, owner < 0 ? 0 : owner);
            float scalar = is_void ? NOT_A_NUMBER : 0.0f;
            if (!is_void && owner >= 0 && owned >= 0) {
                const i64 at = ((i64)owner * MAX_TOKENS + owned) * K_LANES + lane;
                scalar = __int_as_float(watched(a.own + RETURNED_SCALARS_AT + 4 * at));
            }
            if (lane < TOP_K) a.out_scalars[(i64)token * TOP_K + lane] = scalar;
        }
        token = __shfl_sync(ALL_LANES, next, 0);
    }
}

extern "C" __global__ void __launch_bounds__(32 * (SENDERS + REDUCERS), 1)
    combine_rows(const Arguments a) {
    __shared__ int failed;
    __shared__ Progress progress;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int epoch = a.state[COMBINE_EPOCH] + 1;
    // Ranks may be one combine apart.
    const u64 combine_status_at = COMBINE_STATUS_AT + (epoch % 2) * (4 * WORLD);
    if (warp == 0) {
        if (blockIdx.x == 0 && takes_part(a, lane)) {
            *(int*)(a.table[lane] + combine_status_at + 4 * a.rank) = a.status;
        }
        __syncwarp();
        if (blockIdx.x == 0 && takes_part(a, lane)) {
            // Awaited below, on every rank: this one has done with the sums of its last combine.
            add_released(a.table[lane] + COMBINE_BEGIN_AT + 4 * a.rank, 1);
        }
        const u64 word = takes_part(a, lane) ? a.own + COMBINE_BEGIN_AT + 4 * lane : 0;
        const bool is_there = wait(a, word, epoch, WAIT_COMBINE_BEGIN);
        const int code = is_there && takes_part(a, lane)
            ? watched(a.own + combine_status_at + 4 * lane) : 0;
        if (blockIdx.x == 0 && code && a.faults[2 * lane] == 0) a.faults[2 * lane] = code;
        const bool has_code = __any_sync(ALL_LANES, code != 0);
        if (lane == 0) failed = !is_there || has_code || a.has_failed[0] != 0;
    }
    if (warp == SENDERS) {
        progress.stored[lane] = 0;
        if (lane == 0) progress.num_released = 0;
    }
    __syncthreads();
    if (warp < SENDERS) send(a, progress, failed != 0);
    if (warp == SENDERS) release_items(a, progress, epoch, failed != 0);
    // Whoever has nothing more to send helps.
    reduce(a, epoch, failed != 0);
    __syncthreads();
    if (threadIdx.x == 0) {
        __threadfence();
        if (atomicAdd(a.state + COMBINE_LEFT, 1) == gridDim.x - 1) {
            a.state[COMBINE_LEFT] = 0;
            a.state[COMBINE_TOKENS] = 0;
            a.state[COMBINE_EPOCH] = epoch;
        }
    }
}
