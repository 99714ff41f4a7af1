// What the kernels in CUDA C++ of a rank share: how they wait for other ranks as common/signals.py does,
// with the same words and the same bits, and how the copy engine brings rows into shared memory.
//
// Arguments of a kernel have `own` (the address of this rank's block), `table` and `excluded` of
// PeerBlocks, `report`, `rank` and `max_polls`.
//
// Defined before: WORLD (at most 32), the places in a report that epcomm/protocol.py has, and
// LOOKS_PER_TICK and POLL_BITS of common/signals.py.

constexpr u32 ALL_LANES = 0xffffffffu;

// What words hold that are written in some epochs alone: never 0, which words hold at first.
__device__ int mark_of(int epoch) { return epoch ? epoch : (int)0x80000000u; }

template <class A>
__device__ bool takes_part(const A& a, int rank) {
    return rank < WORLD && (a.excluded == nullptr || a.excluded[rank] == 0);
}

// Report that the lanes in `missing` wait in vain, or that some rank did before; tell all ranks.
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
    // Watched by wait(), on every rank. Its bits are those of abort_if_missing() in common/signals.py.
    const u32 told = (missing & ((1u << MAX_MISSING) - 1)) << MISSING_SHIFT;
    if (takes_part(a, lane)) release(a.table[lane], told + a.rank + 1);
}

// The polls that are left after this look, of `polls` before it, as polls_spent() of common/signals.py
// counts them. By a whole warp, whose lanes may read the clock at other times.
__device__ int polls_left(int polls, u32 looks, u64& end_ns) {
    if (looks % LOOKS_PER_TICK != 0) return polls;
    const u64 now_ns = __shfl_sync(ALL_LANES, clock_ns(), 0);
    if (!end_ns) end_ns = now_ns + (1ull << POLL_BITS);
    if (now_ns < end_ns) return polls;
    const u64 over = ((now_ns - end_ns) >> POLL_BITS) + 1;
    end_ns += over << POLL_BITS;
    return over < (u64)polls ? polls - (int)over : 0;
}

// Whether a signal is not there yet. EXACT: it is a mark, which the next epoch does not overtake and
// which does not grow with each epoch; else a signal that does, and may be ahead.
template <bool EXACT>
__device__ bool is_behind(u32 word, int epoch) {
    return EXACT ? (int)word != mark_of(epoch) : (int)(word - (u32)epoch) < 0;
}

// Wait until the signals of the lanes that have one are `epoch`; whether they are, for all lanes.
// What their ranks had stored before can be loaded then, by all lanes.
template <bool EXACT = false, class A>
__device__ bool wait(const A& a, u64 word, int epoch, int phase) {
    u32 missing = ALL_LANES, aborted = 0;
    int polls = a.max_polls;
    u64 end_ns = 0;
    for (u32 looks = 1; missing && polls > 0 && !aborted; ++looks) {
        missing = __ballot_sync(ALL_LANES, word && is_behind<EXACT>(watched(word), epoch));
        if (missing) aborted = watched(a.own);
        aborted = __shfl_sync(ALL_LANES, aborted, 0);
        polls = polls_left(polls, looks, end_ns);
    }
    missing = __ballot_sync(ALL_LANES, word && is_behind<EXACT>(acquired(word), epoch));
    __syncwarp();
    if (!missing) return true;
    abort_ranks(a, missing, aborted, phase, epoch);
    return false;
}
