// How dispatch and combine wait for other ranks, and report a timeout. Words and bits are those of
// common/signals.py in low latency.
//
// Arguments of a kernel have `own` (the address of this rank's block), `table` and `excluded` of
// PeerBlocks, `report`, `rank` and `max_polls`.
//
// All kernels come after ptx.cu and this file. They have the constants of exchange.py (numbers of the layout,
// of which WORLD and TOP_K are at most 32, and positions in the state) and of program.py.

constexpr u32 ALL_LANES = 0xffffffffu;

template <int BYTES>
struct UnitOf;
template <>
struct UnitOf<1> { typedef unsigned char type; };
template <>
struct UnitOf<2> { typedef u16 type; };
template <>
struct UnitOf<4> { typedef u32 type; };
template <>
struct UnitOf<8> { typedef u64 type; };
template <>
struct UnitOf<16> { typedef uint4 type; };

// The value of a word that is written only in some epochs: never 0, the value before the first.
__device__ int mark_of(int epoch) { return epoch ? epoch : (int)0x80000000u; }

template <class A>
__device__ bool takes_part(const A& a, int rank) {
    return rank < WORLD && (a.excluded == nullptr || a.excluded[rank] == 0);
}

// Report to the host that the signals of the lanes in `missing` did not arrive, and end the waits of all
// ranks; or report that another rank has ended them.
template <class A>
__device__ void abort_ranks(const A& a, u32 missing, u32 aborted, int phase, int epoch) {
    const int lane = threadIdx.x % 32;
    if (aborted) {
        if (lane == 0) a.report[REPORT_ABORTED] = aborted;
        return;
    }
    if (lane < WORLD) a.report[REPORT_MISSING + lane] = (missing >> lane) & 1;
    if (lane == 0) a.report[REPORT_EPOCH] = epoch;
    // The host reads the rest of the report once it finds REPORT_WAIT.
    __threadfence_system();
    __syncwarp();
    if (lane == 0) a.report[REPORT_WAIT] = phase;
    __syncwarp();
    // wait() watches this word on every rank. Its bits are those of abort_if_missing() in common/signals.py.
    const u32 reported = (missing & ((1u << MAX_MISSING) - 1)) << MISSING_SHIFT;
    if (takes_part(a, lane)) release(a.table[lane], reported + a.rank + 1);
}

// The polls that are left after this look, of `polls` before it: one for each 2**POLL_BITS nanoseconds.
// Called by a whole warp, which uses the clock of lane 0.
__device__ int polls_left(int polls, u32 looks, u64& end_ns) {
    if (looks % LOOKS_PER_TICK != 0) return polls;
    const u64 now_ns = __shfl_sync(ALL_LANES, clock_ns(), 0);
    if (!end_ns) end_ns = now_ns + (1ull << POLL_BITS);
    if (now_ns < end_ns) return polls;
    const u64 over = ((now_ns - end_ns) >> POLL_BITS) + 1;
    end_ns += over << POLL_BITS;
    return over < (u64)polls ? polls - (int)over : 0;
}

// Whether a signal is not there yet. EXACT: the word is a mark, which is not written in each epoch and
// never ahead of this one. Otherwise it is a number that grows with each epoch, and may be ahead.
template <bool EXACT>
__device__ bool is_behind(u32 word, int epoch) {
    return EXACT ? (int)word != mark_of(epoch) : (int)(word - (u32)epoch) < 0;
}

// Wait until the signal of each lane that has one is that of `epoch`, to which each epoch adds `amount`.
// Returns whether all are, on all lanes: these may then load what the ranks stored before their signals.
template <bool EXACT = false, class A>
__device__ bool wait(const A& a, u64 word, int epoch, int phase, int amount = 1) {
    const int wanted = (int)((u32)epoch * (u32)amount);
    u32 missing = ALL_LANES, aborted = 0;
    int polls = a.max_polls;
    u64 end_ns = 0;
    for (u32 looks = 1; missing && polls > 0 && !aborted; ++looks) {
        missing = __ballot_sync(ALL_LANES, word && is_behind<EXACT>(watched(word), wanted));
        if (missing) aborted = watched(a.own);
        aborted = __shfl_sync(ALL_LANES, aborted, 0);
        polls = polls_left(polls, looks, end_ns);
    }
    missing = __ballot_sync(ALL_LANES, word && is_behind<EXACT>(acquired(word), wanted));
    __syncwarp();
    if (!missing) return true;
    abort_ranks(a, missing, aborted, phase, epoch);
    return false;
}

// Signal that this rank has begun an epoch, in which it no longer reads what peers write, and wait for all
// ranks to begin it. By a warp of each block.
template <class A>
__device__ bool begin(const A& a, u64 begun_at, int epoch, int phase) {
    const int lane = threadIdx.x % 32;
    const bool takes = takes_part(a, lane);
    if (blockIdx.x == 0 && takes) add_released(a.table[lane] + begun_at + 4 * a.rank, 1);
    if (!wait(a, takes ? a.own + begun_at + 4 * lane : 0, epoch, phase)) return false;
    // Ranks that ended their wait may have excluded this one, which must not store to them, although
    // they had begun.
    const u32 aborted = __shfl_sync(ALL_LANES, watched(a.own), 0);
    if (aborted) abort_ranks(a, 0, aborted, phase, epoch);
    return !aborted;
}
