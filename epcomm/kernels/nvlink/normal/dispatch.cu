// Dispatch of normal mode over NVLink, in one launch: each token is stored once in the receive buffer of
// each rank that has one of its experts, and the rank writes an expert-major index over the rows.
//
// While the last warp of a block waits for all ranks to begin, the other warps plan its tokens. Then
// copiers push rows. Helpers send metadata, signal that it is there, send scales, and write the index over
// the rows that arrive on this rank, while rows are on the wire. Block 0 waits for the rows of all ranks in
// the end. A launch has no more blocks than SMs, because blocks wait for one another.
//
// Memory order: a rank signals that it has begun a dispatch, so it no longer reads the receive buffer.
// A rank that has this signal stores there. Each block releases its rows, once the copy engine has stored
// them, by an addition to the signal of its rank; block 0 of the receiver acquires the sum. Metadata and
// headers have another such signal, which all blocks of the receiver acquire.
//
// A cached dispatch has a plan already: it sends only rows, and writes no index.
//
// Constants of dispatch.py: ROW_BYTES (a multiple of 16), MAX_PIECE, STAGES, STORED, COPIERS, HELPERS,
// SCALE_ROW_BYTES (0: none) and SCALE_UNIT (1, 2, 4 or 16, which divides addresses and strides of scales),
// IS_PLANNED, ALIGNMENT.

// Add this block, which has stored all that it sends, to a signal of all ranks. By a warp.
__device__ void publish(const Arguments& a, u64 signals_at) {
    const int lane = threadIdx.x % 32;
    // A launch may have fewer blocks than receivers count; block 0 adds the others.
    const int amount = blockIdx.x == 0 ? a.num_senders - (int)gridDim.x + 1 : 1;
    if (takes_part(a, lane)) add_released(a.table[lane] + signals_at + 4 * a.rank, amount);
}

// Wait for the rows of all ranks; by a warp of block 0.
__device__ bool await_rows(const Arguments& a, int epoch) {
    const int lane = threadIdx.x % 32;
    const u64 word = takes_part(a, lane) ? a.own + ROWS_READY_AT + 4 * lane : 0;
    return wait(a, word, epoch, WAIT_ROWS, a.num_senders);
}

extern "C" __global__ void __launch_bounds__(32 * WARPS, 1) dispatch_rows(const Arguments a) {
    __shared__ bool is_lost;
    __shared__ bool has_rows;
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const int helper = (int)threadIdx.x - 32 * COPIERS;
    const int epoch = a.state[DISPATCH_EPOCH] + 1;
    const u64 buffer_at = BUFFERS_AT + (u64)a.buffer_index * BUFFER_BYTES;
    const int run = (a.num_tokens + (int)gridDim.x - 1) / (int)gridDim.x;
    const int first = min((int)blockIdx.x * run, a.num_tokens);
    const int end = min(first + run, a.num_tokens);
    Ring ring = {};
    if (warp < COPIERS) ring = begin_ring(a, dynamic_memory(), first, end);
    if (warp == WARPS - 1) {
        // All earlier work of this stream is done, so rows may arrive in this receive buffer.
        const bool is_there = begin(a, DISPATCH_BEGIN_AT, epoch, WAIT_DISPATCH_BEGIN);
        if (lane == 0) is_lost = !is_there;
    }
#if IS_PLANNED
    __shared__ Plan plan;
    __shared__ Index index;
    if (warp < PLANNERS) plan_tokens(a, plan, first, end, epoch);
#endif
    __syncthreads();
#if IS_PLANNED
    const bool is_out = is_lost || plan.is_lost;
#else
    const bool is_out = is_lost;
#endif
    if (is_out && warp < COPIERS) {
        leave_ring(ring);
    } else if (warp < COPIERS) {
        push(a, ring, end, buffer_at);
        // Rows and scales: helpers arrive below.
        meet<3, 32 * WARPS>();
        if (warp == 0) publish(a, ROWS_READY_AT);
        if (warp == 0 && blockIdx.x == 0) {
            const bool is_there = await_rows(a, epoch);
            if (lane == 0) has_rows = is_there;
        }
    } else if (!is_out) {
#if IS_PLANNED
        send_metadata(a, first, end, buffer_at, helper);
        if (blockIdx.x == gridDim.x - 1) send_headers(a, plan, buffer_at, helper);
        helpers_meet();
        if (blockIdx.x == gridDim.x - 1 && helper == 32) count_headers(a);
#endif
        // index_rows() waits for this signal on every rank.
        if (helper < 32) publish(a, COUNTS_READY_AT);
#if SCALE_ROW_BYTES > 0
        send_scales(a, first, end, buffer_at, helper);
#endif
        arrive<3, 32 * WARPS>();
#if IS_PLANNED
        index_rows(a, index, a.own + buffer_at, epoch, helper);
#endif
    }
    __syncthreads();
    __shared__ bool empties;
    if (threadIdx.x == 0) {
        bool is_missing = is_out || (blockIdx.x == 0 && !has_rows);
#if IS_PLANNED
        is_missing = is_missing || index.is_lost;
#endif
        if (is_missing) atomicOr(a.state + DISPATCH_LOST, 1);
        const bool is_last = arrive_here(a.state + DISPATCH_LEFT) == (int)gridDim.x - 1;
        if (is_last) {
            a.state[DISPATCH_LEFT] = 0;
            a.state[DISPATCH_EPOCH] = epoch;
            // Combine compares it: a batch whose receive buffer a later dispatch took has another mark.
            a.state[BUFFER_MARKS + a.buffer_index] = mark_of(epoch);
        }
        empties = is_last && atomicOr(a.state + DISPATCH_LOST, 0) != 0;
    }
#if IS_PLANNED
    __syncthreads();
    // All other blocks have ended, so nothing is written after this.
    if (empties) empty_index(a);
#endif
}
