// Copy the rows of a receive buffer, whose capacity is W * M, to memory where they have no gaps between
// ranks: for a caller that keeps them for a backward. The rows have arrived: dispatch has waited for them.
//
// A warp copies a row at a time, UNROLL units a lane in flight. Rows of an excluded rank are 0.
//
// Worked example: index 2 of source 1 with row_base 5 becomes row 7.
//
// Constants of collect.py: WARPS of a block, OUT_BYTES and OUT_SCALE_BYTES of the copies (0: no scales), and
// UNIT and SCALE_UNIT (1, 2, 4 or 16), which divide these.

struct Arguments {
    const char* data;
    const char* scales;  // or none
    char* out;
    char* out_scales;  // or none
    const int* rows_from;
    const int* row_base;
    const int* excluded;
};

// Called by a warp.
template <int UNIT_BYTES, int NUM_BYTES>
__device__ void copy_row(const char* from, char* to, bool is_there) {
    typedef typename UnitOf<UNIT_BYTES>::type Unit;
    constexpr int UNITS = NUM_BYTES / UNIT_BYTES, UNROLL = 4;
    for (int first = threadIdx.x % 32; first < UNITS; first += 32 * UNROLL) {
        Unit units[UNROLL] = {};
#pragma unroll
        for (int i = 0; i < UNROLL; ++i) {
            const int at = first + 32 * i;
            if (is_there && at < UNITS) units[i] = ((const Unit*)from)[at];
        }
#pragma unroll
        for (int i = 0; i < UNROLL; ++i) {
            const int at = first + 32 * i;
            if (at < UNITS) ((Unit*)to)[at] = units[i];
        }
    }
}

extern "C" __global__ void __launch_bounds__(32 * WARPS) collect_rows(const Arguments a) {
    const int step = (int)gridDim.x * WARPS, begin = (int)blockIdx.x * WARPS + threadIdx.x / 32;
    for (int source = 0; source < WORLD; ++source) {
        // An excluded rank of a cached plan sent nothing; what is there is of an earlier call.
        const bool is_there = a.excluded[source] == 0;
        const int num_rows = a.rows_from[source];
        for (int place = begin; place < num_rows; place += step) {
            const i64 from = (i64)source * MAX_TOKENS + place, to = (i64)a.row_base[source] + place;
            copy_row<UNIT, OUT_BYTES>(a.data + from * DATA_BYTES, a.out + to * OUT_BYTES, is_there);
#if OUT_SCALE_BYTES > 0
            copy_row<SCALE_UNIT, OUT_SCALE_BYTES>(a.scales + from * SCALE_BYTES,
                                                  a.out_scales + to * OUT_SCALE_BYTES, is_there);
#endif
        }
    }
}
