// Plan where the tokens of a rank go: the index of a token among the rows for each rank, and the position
// of an entry among the slots of its expert, in the order of tokens.
//
// All warps of a block except the last one plan its run of tokens. They count tokens, release the counts
// to later blocks, add up the counts of earlier blocks, and write indices and positions. All blocks run at
// the same time, so the wait for earlier blocks is short.
//
// Counts are bits in shared memory: each expert has a bit for each token of a group. The bit does not show
// that a token names an expert twice; then the entries of the group are compared with one another.

constexpr int GROUP = 128, GROUP_WORDS = GROUP / 32;
// Counters of experts, followed by those of ranks.
constexpr int COUNTERS = EXPERTS + WORLD;
constexpr int GROUP_ENTRIES = GROUP * TOP_K;
constexpr int PLAN_TURNS = (GROUP_ENTRIES + 32 * PLANNERS - 1) / (32 * PLANNERS);

struct Plan {
    u32 bits[COUNTERS * GROUP_WORDS];  // of the tokens of a group
    short experts[GROUP_ENTRIES];      // of the entries of a group, -1 for none
    int own[COUNTERS];                 // of this block
    int before[COUNTERS];              // of earlier blocks and groups; of this block, too, in the end
    bool takes[WORLD];
    bool is_lost;      // the counts of an earlier block did not arrive
    int has_repeats;  // a token of this block names an expert twice
    int is_bad;       // an id of this block or of an earlier one is out of range
};

__device__ void planners_meet() { meet<1, 32 * PLANNERS>(); }

__device__ int num_bits(const u32* words) {
    int sum = 0;
#pragma unroll
    for (int word = 0; word < GROUP_WORDS; ++word) sum += __popc(words[word]);
    return sum;
}

// Bits of the tokens before `token`.
__device__ int num_bits_below(const u32* words, int token) {
    int sum = 0;
#pragma unroll
    for (int word = 0; word < GROUP_WORDS; ++word) {
        const u32 below = token / 32 > word ? ALL_LANES
            : token / 32 == word ? (1u << token % 32) - 1 : 0;
        sum += __popc(words[word] & below);
    }
    return sum;
}

// The expert of an id, -1 if none, out of range or of an excluded rank.
__device__ int expert_of(const Plan& plan, i64 id) {
    return id >= 0 && id < EXPERTS && plan.takes[id / LOCAL] ? (int)id : -1;
}

// Set the bits of the tokens of the group that begins at `start`.
__device__ void mark(const Arguments& a, Plan& plan, int start, int end) {
    for (int i = threadIdx.x; i < COUNTERS * GROUP_WORDS; i += 32 * PLANNERS) plan.bits[i] = 0;
    planners_meet();
    const int num_entries = min(GROUP, end - start) * TOP_K;
    i64 ids[PLAN_TURNS];
#pragma unroll
    for (int turn = 0; turn < PLAN_TURNS; ++turn) {
        const int i = threadIdx.x + turn * 32 * PLANNERS;
        ids[turn] = i < num_entries ? a.ids[(i64)start * TOP_K + i] : -1;
    }
#pragma unroll
    for (int turn = 0; turn < PLAN_TURNS; ++turn) {
        const int i = threadIdx.x + turn * 32 * PLANNERS, token = i / TOP_K;
        const int expert = expert_of(plan, ids[turn]);
        if (ids[turn] < -1 || ids[turn] >= EXPERTS) atomicOr(&plan.is_bad, 1);
        if (i < num_entries) plan.experts[i] = expert;
        if (expert < 0) continue;
        const u32 bit = 1u << token % 32;
        if (atomicOr(plan.bits + expert * GROUP_WORDS + token / 32, bit) & bit) {
            atomicOr(&plan.has_repeats, 1);
            // The first pass counts a repeated entry here; the second pass counts it in count_repeats().
            atomicAdd(plan.own + expert, 1);
        }
        atomicOr(plan.bits + (EXPERTS + expert / LOCAL) * GROUP_WORDS + token / 32, bit);
    }
    planners_meet();
}

// The entries of a group before entry i that name the same expert, from entry `first` on.
__device__ int num_same_before(const Plan& plan, int first, int i) {
    int sum = 0;
    for (int other = first; other < i; ++other) sum += plan.experts[other] == plan.experts[i];
    return sum;
}

// Count the entries that repeat an expert of their token, which have no bit.
__device__ void count_repeats(Plan& plan, int start, int end) {
    for (int i = threadIdx.x; i < min(GROUP, end - start) * TOP_K; i += 32 * PLANNERS) {
        const int expert = plan.experts[i];
        if (expert >= 0 && num_same_before(plan, i / TOP_K * TOP_K, i)) {
            atomicAdd(plan.before + expert, 1);
        }
    }
}

// Write the indices and positions of the tokens of a group, whose bits are set.
__device__ void place(const Arguments& a, const Plan& plan, int start, int end) {
    const int num_tokens = min(GROUP, end - start);
    for (int i = threadIdx.x; i < num_tokens * TOP_K; i += 32 * PLANNERS) {
        const i64 at = (i64)start * TOP_K + i;
        const int expert = plan.experts[i];
        int position = 0;
        if (expert >= 0) {
            position = plan.before[expert] + (plan.has_repeats ? num_same_before(plan, 0, i)
                : num_bits_below(plan.bits + expert * GROUP_WORDS, i / TOP_K));
        }
        a.positions[at] = position;
    }
    for (int i = threadIdx.x; i < num_tokens * WORLD; i += 32 * PLANNERS) {
        const int token = i / WORLD, rank = EXPERTS + i % WORLD;
        const u32* words = plan.bits + rank * GROUP_WORDS;
        const bool is_sent = words[token / 32] >> token % 32 & 1;
        a.places[(i64)start * WORLD + i] =
            is_sent ? plan.before[rank] + num_bits_below(words, token) : -1;
    }
}

// Wait for the counts of all earlier blocks of this rank; by one warp. Return whether they are there.
__device__ bool await_earlier(const Arguments& a, int epoch) {
    const int lane = threadIdx.x % 32;
    bool is_missing = false;
    int polls = a.max_polls;
    u64 end_ns = 0;
    for (int first = 0; first < (int)blockIdx.x && !is_missing; first += 32) {
        const int other = first + lane;
        is_missing = true;
        for (u32 looks = 1; is_missing && polls > 0; ++looks) {
            // Not each block runs in each dispatch, so only the mark of this one counts.
            const bool is_behind =
                other < (int)blockIdx.x && acquired_here(a.counted + other) != mark_of(epoch);
            is_missing = __any_sync(ALL_LANES, is_behind);
            polls = polls_left(polls, looks, end_ns);
        }
    }
    // The rank that is missing is this one: its blocks do not run at the same time.
    if (is_missing) abort_ranks(a, 1u << a.rank, 0, WAIT_DISPATCH_BEGIN, epoch);
    return !is_missing;
}

// Add up the counts of earlier blocks.
__device__ void sum_earlier(const Arguments& a, Plan& plan) {
    for (int i = threadIdx.x; i <= COUNTERS; i += 32 * PLANNERS) {
        int sum = 0;
#pragma unroll 16
        for (int other = 0; other < (int)blockIdx.x; ++other) {
            sum += __ldcg(a.scratch + (i64)other * SCRATCH_WORDS + i);
        }
        if (i < COUNTERS) plan.before[i] = sum;
        else if (sum) atomicOr(&plan.is_bad, 1);
    }
}

// Plan the tokens from `first` to `end`, by all planners. The last block needs the sums even if it has no
// tokens.
__device__ void plan_tokens(const Arguments& a, Plan& plan, int first, int end, int epoch) {
    for (int i = threadIdx.x; i < WORLD; i += 32 * PLANNERS) plan.takes[i] = takes_part(a, i);
    for (int i = threadIdx.x; i < COUNTERS; i += 32 * PLANNERS) plan.own[i] = 0;
    if (threadIdx.x == 0) {
        plan.is_bad = plan.has_repeats = 0;
        plan.is_lost = false;
    }
    planners_meet();
    for (int start = first; start < end; start += GROUP) {
        mark(a, plan, start, end);
        for (int i = threadIdx.x; i < COUNTERS; i += 32 * PLANNERS) {
            plan.own[i] += num_bits(plan.bits + i * GROUP_WORDS);
        }
        planners_meet();
    }
    int* mine = a.scratch + (i64)blockIdx.x * SCRATCH_WORDS;
    for (int i = threadIdx.x; i < COUNTERS; i += 32 * PLANNERS) mine[i] = plan.own[i];
    if (threadIdx.x == 0) mine[COUNTERS] = plan.is_bad;
    planners_meet();
    if (threadIdx.x == 0) release_here(a.counted + blockIdx.x, mark_of(epoch));
    if (first >= end && blockIdx.x != gridDim.x - 1) return;
    if (threadIdx.x < 32) {
        const bool is_there = await_earlier(a, epoch);
        if (threadIdx.x == 0) plan.is_lost = !is_there;
    }
    planners_meet();
    if (plan.is_lost) return;
    sum_earlier(a, plan);
    planners_meet();
    for (int start = first; start < end; start += GROUP) {
        // A run of one group still has its bits.
        if (end - first > GROUP) mark(a, plan, start, end);
        place(a, plan, start, end);
        planners_meet();
        for (int i = threadIdx.x; i < COUNTERS; i += 32 * PLANNERS) {
            plan.before[i] += num_bits(plan.bits + i * GROUP_WORDS);
        }
        planners_meet();
        if (plan.has_repeats) {
            count_repeats(plan, start, end);
            planners_meet();
        }
    }
}
