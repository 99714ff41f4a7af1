// Write the expert-major index over the rows that arrive on this rank. Headers and metadata arrive before the
// rows, so it is written while rows are on the wire.

struct Index {
    int counts[EXPERTS];         // slots of each expert, of all ranks
    // For each source and local expert: the number of slots, then the first slot.
    int bases[WORLD * LOCAL];
    int starts[LOCAL + 1];
    int needed[WORLD];           // slots of each rank; rows, where these have a budget
    int rows_from[WORLD];
    int row_bases[WORLD];
    bool is_lost;
    bool has_failed;
};

__device__ void helpers_meet() { meet<2, 32 * HELPERS>(); }

__device__ int aligned(int count) { return (count + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT; }

__device__ int sum_of_warp(int value) { return __reduce_add_sync(ALL_LANES, value); }

// The sum over the lanes before this one.
__device__ int sum_before(int value) {
    const int lane = threadIdx.x % 32;
    int sum = value;
#pragma unroll
    for (int step = 1; step < 32; step *= 2) {
        const int other = __shfl_up_sync(ALL_LANES, sum, step);
        if (lane >= step) sum += other;
    }
    return sum - value;
}

__device__ int header_of(u64 headers, int source, int word) {
    return (int)watched(headers + (u64)source * HEADER_BYTES + 4 * word);
}

// The fault code of the rank of each lane: its own code, or that of a call that differs from the others or
// needs more slots than there are. All ranks compute the same codes.
__device__ int code_of(const Arguments& a, int status, bool takes, int needed) {
    int code = status & FAULT_MASK;
    if (!a.has_budget) return code;
    const int compared = status >> FLAGS_SHIFT & COMPARED_FLAGS;
    if (compared != __reduce_max_sync(ALL_LANES, compared) && takes && code == 0) {
        code = compared == 0 ? FAULT_GRAD_MODE : FAULT_FROZEN;
    }
    const int most = a.has_row_budget ? MAX_TOKENS : a.num_slots;
    return needed > most && code == 0 ? FAULT_OVERFLOW : code;
}

// Read the headers of all ranks, and find where slots begin. By all helpers of a block.
__device__ void read_headers(const Arguments& a, Index& index, u64 headers, int epoch, int helper) {
    const int lane = helper % 32, warp = helper / 32;
    const bool takes = !index.is_lost && takes_part(a, lane);
    const u32 sources = __ballot_sync(ALL_LANES, takes);
    // All words are loaded before any is used, because each load takes a round trip to memory.
    int status = 0, num_tokens = 0, rows = 0;
    if (warp == 0 && takes) {
        status = header_of(headers, lane, 0);
        num_tokens = header_of(headers, lane, 1);
        rows = header_of(headers, lane, HEADER_WORDS + a.rank);
    }
    for (int expert = helper; expert < EXPERTS; expert += 32 * HELPERS) {
        int counts[WORLD], sum = 0;
#pragma unroll
        for (int source = 0; source < WORLD; ++source) {
            const int word = HEADER_WORDS + WORLD + expert;
            counts[source] = sources >> source & 1 ? header_of(headers, source, word) : 0;
        }
        const int local = expert - a.rank * LOCAL;
#pragma unroll
        for (int source = 0; source < WORLD; ++source) {
            sum += counts[source];
            if ((u32)local < (u32)LOCAL) index.bases[source * LOCAL + local] = counts[source];
        }
        index.counts[expert] = sum;
    }
    helpers_meet();
    for (int owner = warp; owner < WORLD; owner += HELPERS) {
        int sum = 0;
        if (a.has_row_budget) {
            if (takes) sum = header_of(headers, lane, HEADER_WORDS + owner);
        } else {
            for (int expert = lane; expert < LOCAL; expert += 32) {
                sum += aligned(index.counts[owner * LOCAL + expert]);
            }
        }
        sum = sum_of_warp(sum);
        if (lane == 0) index.needed[owner] = sum;
    }
    helpers_meet();
    if (warp == 0) {
        const int needed = lane < WORLD ? index.needed[lane] : 0;
        const int code = code_of(a, status, takes, needed);
        const bool has_failed = index.is_lost || __any_sync(ALL_LANES, code != 0);
        if (blockIdx.x == 0 && takes && code != 0 && a.faults[2 * lane] == 0) {
            a.faults[2 * lane] = code;
            a.faults[2 * lane + 1] = needed;
        }
        // Nothing is stored beyond the index, whatever a rank has sent.
        const int rows_from = has_failed ? 0 : min(max(rows, 0), MAX_TOKENS);
        const int row_base = a.is_compact ? sum_before(rows_from) : lane * MAX_TOKENS;
        if (lane < WORLD) {
            index.rows_from[lane] = rows_from;
            index.row_bases[lane] = row_base;
        }
        int start = 0;
        for (int first = 0; first < LOCAL; first += 32) {
            const int expert = first + lane;
            const int count = expert < LOCAL && !has_failed
                ? aligned(index.counts[a.rank * LOCAL + expert]) : 0;
            if (expert < LOCAL) index.starts[expert] = start + sum_before(count);
            else sum_before(count);
            start += sum_of_warp(count);
        }
        if (lane == 0) {
            index.starts[LOCAL] = start;
            index.has_failed = has_failed;
        }
        if (blockIdx.x == 0 && a.totals != nullptr && !index.is_lost && lane < WORLD) {
            a.totals[lane] = status;
            a.totals[WORLD + lane] = num_tokens;
            a.totals[2 * WORLD + lane] = rows;
        }
    }
    helpers_meet();
    for (int expert = helper; expert < LOCAL; expert += 32 * HELPERS) {
        int base = index.starts[expert];
        for (int source = 0; source < WORLD; ++source) {
            const int num_slots = index.bases[source * LOCAL + expert];
            index.bases[source * LOCAL + expert] = base;
            base += num_slots;
        }
        const int count = index.counts[a.rank * LOCAL + expert];
        if (blockIdx.x == 0) {
            a.num_tokens_per_expert[expert] = index.has_failed ? 0 : count;
            a.first_slot[expert] = index.starts[expert];
            if (a.totals != nullptr && !index.is_lost) a.totals[3 * WORLD + expert] = count;
        }
    }
    if (blockIdx.x == 0 && warp == 0) {
        if (lane < WORLD) {
            a.rows_from[lane] = index.rows_from[lane];
            a.row_base[lane] = index.row_bases[lane];
        }
        if (lane == 0) {
            a.first_slot[LOCAL] = index.starts[LOCAL];
            a.has_failed[0] = index.has_failed;
            a.has_failed[1] = mark_of(epoch);
        }
    }
    helpers_meet();
}

// Store `value` to words `first` to `end` of memory that begins at a multiple of 16 bytes. By all helpers
// of all blocks.
__device__ void fill(void* words, u32 first, u32 end, u32 value, int helper) {
    const u32 begin = blockIdx.x * 32 * HELPERS + helper, step = gridDim.x * 32 * HELPERS;
#pragma unroll 1
    for (u32 vector = first / 4 + begin; 4 * vector < end; vector += step) {
        const u32 at = 4 * vector;
        if (at >= first && at + 4 <= end) {
            ((uint4*)words)[vector] = {value, value, value, value};
            continue;
        }
        for (u32 word = at; word < at + 4; ++word) {
            if (word >= first && word < end) ((u32*)words)[word] = value;
        }
    }
}

// Write that rows `first` to `end` have no entries.
__device__ void clear_rows(const Arguments& a, u32 first, u32 end, int helper) {
    fill(a.slots_of_row, first * TOP_K, end * TOP_K, ALL_LANES, helper);
    if (a.row_ids == nullptr) return;
    fill(a.row_ids, 2 * first * TOP_K, 2 * end * TOP_K, ALL_LANES, helper);
    fill(a.row_weights, first * TOP_K, end * TOP_K, 0, helper);
}

// Write the entries of all rows, by all helpers of all blocks.
__device__ void index_entries(const Arguments& a, const Index& index, u64 metadata, int helper) {
    constexpr int BATCH = 4;
    const int num_blocks = gridDim.x, step = num_blocks * 32 * HELPERS;
    for (int source = 0; source < WORLD; ++source) {
        // Each source begins with another block, which shares few rows among blocks.
        const int block = ((int)blockIdx.x + source * num_blocks / WORLD) % num_blocks;
        const int begin = block * 32 * HELPERS + helper;
        const int num_entries = index.rows_from[source] * K_LANES;
        for (int first = begin; first < num_entries; first += BATCH * step) {
            int experts[BATCH], positions[BATCH], weights[BATCH];
#pragma unroll
            for (int i = 0; i < BATCH; ++i) {
                const int entry = first + i * step, place = entry / K_LANES, k = entry % K_LANES;
                const u64 words =
                    metadata + ((u64)source * MAX_TOKENS + place) * METADATA_BYTES + 4 * k;
                const bool is_entry = entry < num_entries && k < TOP_K;
                experts[i] = is_entry ? (int)watched(words) : -1;
                positions[i] = is_entry ? (int)watched(words + 4 * K_LANES) : 0;
                weights[i] = is_entry ? (int)watched(words + 8 * K_LANES) : 0;
            }
#pragma unroll
            for (int i = 0; i < BATCH; ++i) {
                const int entry = first + i * step, place = entry / K_LANES, k = entry % K_LANES;
                if (entry >= num_entries || k >= TOP_K) continue;
                const i64 row = index.row_bases[source] + place;
                int slot = (u32)experts[i] >= (u32)LOCAL
                    ? -1 : index.bases[source * LOCAL + experts[i]] + positions[i];
                if ((u32)slot >= (u32)a.num_slots) slot = -1;
                if (slot >= 0) {
                    a.row_of_slot[slot] = row;
                    a.slot_weights[slot] = __int_as_float(weights[i]);
                }
                a.slots_of_row[row * TOP_K + k] = slot;
                if (a.row_ids != nullptr) {
                    a.row_ids[row * TOP_K + k] = slot < 0 ? -1 : experts[i];
                    a.row_weights[row * TOP_K + k] =
                        slot < 0 ? 0.0f : __int_as_float(weights[i]);
                }
            }
        }
    }
}

// Write the entries of rows that no rank sent.
__device__ void pad_rows(const Arguments& a, const Index& index, int helper) {
    if (a.is_compact) {
        // These rows exist only with a budget of rows.
        const int num_rows = index.row_bases[WORLD - 1] + index.rows_from[WORLD - 1];
        if (a.has_row_budget) clear_rows(a, num_rows, MAX_TOKENS, helper);
        return;
    }
    for (int source = 0; source < WORLD; ++source) {
        const u32 first = index.row_bases[source];
        clear_rows(a, first + index.rows_from[source], first + MAX_TOKENS, helper);
    }
}

// Write the slots without a row: after those of each expert, and after the last one with a budget.
__device__ void pad(const Arguments& a, const Index& index, int helper) {
    const int step = (int)gridDim.x * 32 * HELPERS, begin = (int)blockIdx.x * 32 * HELPERS + helper;
    if (ALIGNMENT > 1) {
        for (int i = begin; i < LOCAL * ALIGNMENT; i += step) {
            const int expert = i / ALIGNMENT;
            const int count = index.has_failed ? 0 : index.counts[a.rank * LOCAL + expert];
            const int slot = index.starts[expert] + count + i % ALIGNMENT;
            if (slot < min(index.starts[expert + 1], a.num_slots)) {
                a.row_of_slot[slot] = -1;
                a.slot_weights[slot] = 0.0f;
            }
        }
    }
    if (!a.has_budget) return;
    fill(a.row_of_slot, index.starts[LOCAL], a.num_slots, ALL_LANES, helper);
    fill(a.slot_weights, index.starts[LOCAL], a.num_slots, 0, helper);
}

// Write an empty index, because a block whose wait ended by a timeout has not written its entries. By all
// threads of the last block to leave.
__device__ void empty_index(const Arguments& a) {
    const int rows = a.has_row_budget ? MAX_TOKENS : WORLD * MAX_TOKENS;
    for (int slot = threadIdx.x; slot < a.num_slots; slot += blockDim.x) {
        a.row_of_slot[slot] = -1;
        a.slot_weights[slot] = 0.0f;
    }
    for (i64 entry = threadIdx.x; entry < (i64)rows * TOP_K; entry += blockDim.x) {
        a.slots_of_row[entry] = -1;
        if (a.row_ids != nullptr) {
            a.row_ids[entry] = -1;
            a.row_weights[entry] = 0.0f;
        }
    }
    for (int expert = threadIdx.x; expert <= LOCAL; expert += blockDim.x) {
        if (expert < LOCAL) a.num_tokens_per_expert[expert] = 0;
        a.first_slot[expert] = 0;
    }
    for (int source = threadIdx.x; source < WORLD; source += blockDim.x) {
        a.rows_from[source] = a.row_base[source] = 0;
    }
    if (threadIdx.x == 0) a.has_failed[0] = 1;
}

// Wait for the headers and the metadata of all ranks, and write the index. By all helpers.
__device__ void index_rows(const Arguments& a, Index& index, u64 buffer, int epoch, int helper) {
    if (helper < 32) {
        const u64 word = takes_part(a, helper) ? a.own + COUNTS_READY_AT + 4 * helper : 0;
        const bool is_there = wait(a, word, epoch, WAIT_HEADERS, a.num_senders);
        if (helper == 0) index.is_lost = !is_there;
    }
    helpers_meet();
    read_headers(a, index, buffer + HEADER_AT, epoch, helper);
    pad_rows(a, index, helper);
    pad(a, index, helper);
    index_entries(a, index, buffer + METADATA_AT, helper);
}
