// Multiply FP8 rows by FP8 matrices, expert by expert, with wgmma: for sm_90a, compiled at run time.
//
// The arithmetic is that of fp8.py. A block computes tiles of 128 slots and twice 128
// columns: gate and up of one block of I, or two blocks of H. Its third warpgroup brings stages of
// 128 columns of K into shared memory: matrices by the copy engine, rows too where they are stored as slots
// do, else through the index, 16 bytes a thread. The other two multiply 64 slots each: while one
// scales its sums and adds them up in float32, the other has the tensor cores. A block keeps taking
// tiles until there are none, and finds them from the counts on the device. Results of down are
// written by the copy engine. Blocks without a last tile of gate and up begin with down.
//
// What a consumer does between two products is what costs. So rounds of all stages are unrolled:
// descriptors are then sums of constants in uniform registers. Scales of matrices come with a stage.
// That took 11% from gate and up on an H100 (2026-11), whose power is the limit: of 2.06 million cycles at
// 1.3 GHz tensor cores are busy for 1.83. Tried and slower: clusters of two blocks that fetch matrices for
// one another (1.5 to 3%), consumers that take turns (2%), rows as operands in registers (5%, and 15% if
// those of the next stage are loaded before), tiles of 64 rows with one product for each consumer (4%),
// down in tiles of 192 columns (1%), rows copied to the order of slots by warps beside (3%), or by the copy
// engine beside (7%); of rows through the index, one row at a time by the copy engine (36%), a warp that
// fences what others have copied (18%), and threads that fence their own copies (5%), which wait for all of
// them; in decode, matrices of down fetched into the second-level cache by free multiprocessors (12%).
// No gain: the second consumer some stages behind, and silu of gate while the last product of up runs.
//
// No headers: NVRTC needs none of CUDA's files on the user's machine.

using uint8 = unsigned char;
using uint16 = unsigned short;
using uint32 = unsigned int;
using uint64 = unsigned long long;
using int64 = long long;

constexpr int BLOCK = 128;
constexpr int TILE_ROWS = 128;
constexpr int NUM_STAGES = 4;
constexpr int TILE_BYTES = TILE_ROWS * BLOCK;
constexpr int STAGE_BYTES = 3 * TILE_BYTES;
constexpr int SCALES_BYTES = TILE_ROWS * 4;
constexpr int MATRIX_SCALES_BYTES = 2 * 4;
constexpr int WARPGROUP = 128;
constexpr int CONSUMERS = 2;
constexpr int ROWS_PER_CONSUMER = 64;
constexpr int ROWS_PER_WARP = 16;
// Number of rows that one thread of the producer copies, 16 bytes each; eight threads copy a row.
constexpr int COPIES = TILE_ROWS / (WARPGROUP / 8);

struct alignas(64) TensorMap {
    uint64 words[16];
};

// What the copy engine reads and writes.
struct Maps {
    const TensorMap* rows;  // rows in the order of slots, or null
    const TensorMap* matrices;
    const TensorMap* out;  // results in the order of slots, or null
};

// The arguments of both products. Strides count elements.
struct Rows {
    const uint8* codes;
    const float* scales;
    const int* row_of_slot;  // null: slot s is row s
    const int* counts;
    const int* first_slot;
    int64 codes_stride;
    int64 scales_stride;
    int num_experts;
    int k_blocks;
    int num_columns;  // rows of one matrix
    int packed_from;  // experts with as many slots have codes in the order of slots, too
    // Counts blocks that have stored all results of the first product but those of their last two tiles;
    // null where the second one does not begin before the first has ended. For up to 32 experts, and more
    // blocks of K than stages.
    int* ahead;
};

__device__ __forceinline__ uint32 shared_address(const void* pointer) {
    return static_cast<uint32>(__cvta_generic_to_shared(pointer));
}

__device__ __forceinline__ void barrier_init(uint32 barrier, int arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals));
}

__device__ __forceinline__ void barrier_arrive(uint32 barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

__device__ __forceinline__ void barrier_expect(uint32 barrier, int num_bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier),
                 "r"(num_bytes)
                 : "memory");
}

__device__ __forceinline__ void barrier_wait(uint32 barrier, int parity) {
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "again:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@done bra over;\n"
        "bra again;\n"
        "over:\n"
        "}\n" ::"r"(barrier),
        "r"(parity)
        : "memory");
}

// Fetches a map that the copy engine reads later.
__device__ __forceinline__ void prefetch_map(const TensorMap* map) {
    if (map) asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// Copies a swizzled box of 128 columns and 128 rows.
__device__ __forceinline__ void copy_box(uint32 target, const TensorMap* map, uint32 barrier,
                                         int column, int row) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes "
        "[%0], [%1, {%3, %4}], [%2];" ::"r"(target),
        "l"(map), "r"(barrier), "r"(column), "r"(row)
        : "memory");
}

// Writes a swizzled box of 128 bytes of each of a warp's rows; column counts bytes.
__device__ __forceinline__ void write_box(const TensorMap* map, uint32 source, int column, int row) {
    asm volatile("cp.async.bulk.tensor.2d.global.shared::cta.bulk_group [%0, {%2, %3}], [%1];" ::"l"(
                     map),
                 "r"(source), "r"(column), "r"(row)
                 : "memory");
}

// Waits until the copy engine has read what this thread has asked it to write.
__device__ __forceinline__ void wait_for_writes() {
    asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory");
}

__device__ __forceinline__ void copy_16_bytes(uint32 target, const void* source) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(target), "l"(source) : "memory");
}

__device__ __forceinline__ void copy_4_bytes(uint32 target, const void* source) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(target), "l"(source) : "memory");
}

// Arrives once this thread's copies have, without waiting for them.
__device__ __forceinline__ void barrier_arrive_after_copies(uint32 barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

// Returns whether the phase is over, without waiting for it.
__device__ __forceinline__ bool barrier_is_over(uint32 barrier, int parity) {
    uint32 is_over;
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "mbarrier.test_wait.parity.shared::cta.b64 done, [%1], %2;\n"
        "selp.u32 %0, 1, 0, done;\n"
        "}\n"
        : "=r"(is_over)
        : "r"(barrier), "r"(parity)
        : "memory");
    return is_over;
}

// For tensor cores to read what threads have copied: they read through another proxy than these write.
__device__ __forceinline__ void fence_copies() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// Lets the next kernel of the stream begin where multiprocessors are free, if it was launched to.
__device__ __forceinline__ void let_next_kernel_begin() {
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

// Waits until `told` counts this number of blocks, and makes visible what they stored before tell().
__device__ __forceinline__ void wait_for_blocks(const int* told, int num_blocks) {
    int found;
    do {
        asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(found) : "l"(told) : "memory");
    } while (found < num_blocks);
    // The copy engine reads through another proxy than these loads.
    asm volatile("fence.proxy.async;" ::: "memory");
}

// Counts this block in `told`. Its results are stored: the thread has waited for their barrier.
__device__ __forceinline__ void tell(int* told) {
    asm volatile("red.release.gpu.global.add.s32 [%0], 1;" ::"l"(told) : "memory");
}

// Waits until the kernel before this one has ended, if this one was launched to begin earlier.
__device__ __forceinline__ void wait_for_kernel_before() {
    asm volatile("griddepcontrol.wait;" ::: "memory");
}

struct Tile {
    int expert;
    int num_rows;  // 1 to TILE_ROWS
    int slot;      // slot of the first row
    int column;    // tile of columns
    bool is_packed;
    bool is_early;  // computed before the first product has ended
};

// The tiles of this block, in order. Row tiles come first: neighbours share a matrix. Each warp finds
// them from the counts of 32 experts, one a lane; a list of all experts would take memory of a stage.
struct Tiles {
    const Rows& rows;
    int num_column_tiles;
    int next;
    int first_expert;  // expert of lane 0
    int count;         // slots of this lane's expert
    int slot;          // its first slot
    int end;           // tiles of all experts up to it
    int early;         // tiles that are computed before the first product has ended
    int early_blocks;  // the number of blocks that compute them: those without a last tile of the first product

    __device__ Tiles(const Rows& rows, int num_column_tiles)
        : rows(rows), num_column_tiles(num_column_tiles), next(blockIdx.x), first_expert(0), early(0),
          early_blocks(gridDim.x) {
        find_ends(0);
    }

    // Whether the second product waits for the tile of the first one that was taken last: each block
    // takes one of as many tiles as there are blocks, two rounds before the last tile. The threads of a
    // warp call this together.
    __device__ __forceinline__ bool is_waited_for() const {
        const int blocks = gridDim.x, total = __shfl_sync(~0u, end, 31);
        return rows.ahead && static_cast<uint32>(next - (total - 2 * blocks)) < static_cast<uint32>(blocks);
    }

    // Finds the tiles of the second product that can be computed while some blocks have a last tile of
    // the first one, which has K of as many blocks as the second has of columns.
    __device__ void begin_early() {
        const int blocks = gridDim.x, row_tiles = end / num_column_tiles;
        const int first_total = __shfl_sync(~0u, row_tiles, 31) * rows.k_blocks;
        const int num_late = first_total % blocks;
        if (num_late == 0 || first_total < 3 * blocks) return;
        // Ends do not decrease.
        const uint32 is_done = __ballot_sync(~0u, row_tiles * rows.k_blocks <= first_total - 2 * blocks);
        const int num_done = is_done ? __shfl_sync(~0u, end, 31 - __clz(is_done)) : 0;
        early_blocks = blocks - num_late;
        // Storing takes as long as two blocks of K.
        early = min(rows.num_columns / BLOCK / (rows.k_blocks + 2), num_done / early_blocks) * early_blocks;
        if (next >= early_blocks) next += early;
    }

    static __device__ __forceinline__ int num_row_tiles(int count) {
        return (count + TILE_ROWS - 1) / TILE_ROWS;
    }

    // before: tiles of experts before first_expert.
    __device__ void find_ends(int before) {
        const int lane = threadIdx.x % 32, expert = first_expert + lane;
        const bool is_expert = expert < rows.num_experts;
        count = is_expert ? rows.counts[expert] : 0;
        slot = is_expert ? rows.first_slot[expert] : 0;
        end = num_row_tiles(count) * num_column_tiles;
#pragma unroll
        for (int step = 1; step < 32; step *= 2) {
            const int other = __shfl_up_sync(~0u, end, step);
            if (lane >= step) end += other;
        }
        end += before;
    }

    // The threads of a warp call this together.
    __device__ bool take(Tile& tile) {
        tile.is_early = early && next < early;
        unsigned is_later;
        while ((is_later = __ballot_sync(~0u, next < end)) == 0) {
            first_expert += 32;
            if (first_expert >= rows.num_experts) return false;
            find_ends(__shfl_sync(~0u, end, 31));
        }
        const int lane = __ffs(is_later) - 1;
        tile.expert = first_expert + lane;
        const int num_rows = __shfl_sync(~0u, count, lane), row_tiles = num_row_tiles(num_rows);
        const int local = next - (__shfl_sync(~0u, end, lane) - row_tiles * num_column_tiles);
        tile.column = local / row_tiles;
        const int first_row = (local - tile.column * row_tiles) * TILE_ROWS;
        tile.num_rows = min(TILE_ROWS, num_rows - first_row);
        tile.slot = __shfl_sync(~0u, slot, lane) + first_row;
        tile.is_packed = num_rows >= rows.packed_from;
        next += tile.is_early ? early_blocks : gridDim.x;
        if (tile.is_early && next >= early) next = early + blockIdx.x;
        return true;
    }
};

// Addresses in shared memory.
struct Shared {
    uint32 stages;
    uint32 results;        // of each warp, 16 rows of a block of H
    uint32 scales;         // of rows
    uint32 matrix_scales;  // one of each of two matrices
    uint32 full;
    uint32 empty;

    __device__ __forceinline__ uint32 rows_of(int stage) const { return stages + stage * STAGE_BYTES; }
    __device__ __forceinline__ uint32 scales_of(int stage) const { return scales + stage * SCALES_BYTES; }
    __device__ __forceinline__ uint32 full_of(int stage) const { return full + stage * 8; }
    __device__ __forceinline__ uint32 empty_of(int stage) const { return empty + stage * 8; }
};

// Copies the rows of a tile through the index, and scales.
struct RowReader {
    const uint8* codes;
    const float* scales;
    int64 codes_stride;
    int row_ids[COPIES];
    int num_rows;

    __device__ __forceinline__ RowReader(const Rows& rows, const Tile& tile, bool is_packed) {
        const int thread = threadIdx.x % WARPGROUP, first = thread / 8;
        codes = rows.codes + thread % 8 * 16;
        codes_stride = rows.codes_stride;
        num_rows = tile.num_rows;
#pragma unroll
        for (int i = 0; i < COPIES; ++i) {
            row_ids[i] = is_packed ? 0 : row_of(rows, tile, first + i * (TILE_ROWS / COPIES));
        }
        scales = rows.scales + row_of(rows, tile, thread) * rows.scales_stride;
    }

    // Rows beyond the count have the scales of the last row, and what codes were there before; their
    // results are not stored.
    static __device__ __forceinline__ int row_of(const Rows& rows, const Tile& tile, int row) {
        const int slot = tile.slot + min(row, tile.num_rows - 1);
        return rows.row_of_slot ? rows.row_of_slot[slot] : slot;
    }

    // target: the address of this thread's first 16 bytes.
    __device__ __forceinline__ void copy(uint32 target) const {
#pragma unroll
        for (int i = 0; i < COPIES; ++i) {
            if (i * (TILE_ROWS / COPIES) + threadIdx.x % WARPGROUP / 8 >= num_rows) continue;
            copy_16_bytes(target + i * (TILE_BYTES / COPIES), codes + row_ids[i] * codes_stride);
        }
    }
};

template <typename Epilogue>
__device__ void produce(const Rows& rows, const Maps& maps, Tiles tiles, const Shared& shared,
                        const Epilogue& epilogue) {
    const int thread = threadIdx.x % WARPGROUP;
    const int chunk = thread % 8, first = thread / 8;
    // Chunks of a row are permuted by its number, as the copy engine does with boxes.
    const uint32 own = first * BLOCK + ((chunk ^ (first % 8)) * 16);
    int stage = 0, parity = 1, number = 0;
    const int num_early = min(NUM_STAGES, rows.k_blocks);
    bool has_waited = false, is_waited_for = false;
    // When a stage of the next tile is free again, consumers have stored the results of this one.
    int tells_at = -1;
    Tile tile;
    while (tiles.take(tile)) {
        if (Epilogue::HAS_INDEX) {
            if (is_waited_for) tells_at = number + NUM_STAGES;
            is_waited_for = tiles.is_waited_for();
        }
        const bool is_packed = !Epilogue::HAS_INDEX || tile.is_packed;
        const int matrix_row = tile.expert * rows.num_columns
                               + tile.column * Epilogue::COLUMNS_PER_TILE;
        // Requests the matrices of a block, and announces all that the copy engine brings to the stage.
        const auto request_matrices = [&](int stage, int k) {
            const uint32 target = shared.rows_of(stage), full = shared.full_of(stage);
            barrier_expect(full, (is_packed ? 3 : 2) * TILE_BYTES);
            copy_box(target + TILE_BYTES, maps.matrices, full, k * BLOCK, matrix_row);
            copy_box(target + 2 * TILE_BYTES, maps.matrices, full, k * BLOCK,
                     matrix_row + epilogue.matrix_step());
        };
        if (number == 0) {
            // The kernel before this one makes rows, but no matrices.
            for (int k = 0; thread == 0 && k < num_early; ++k) request_matrices(k, k);
        }
        if (tile.is_early && number == 0) {
            wait_for_blocks(rows.ahead, gridDim.x);
        } else if (!tile.is_early && !has_waited) {
            wait_for_kernel_before();
            // The first-level cache may have the old values of scales in the lines of those of early tiles.
            if (number) wait_for_blocks(rows.ahead, 0);
            has_waited = true;
        }
        RowReader reader(rows, tile, is_packed);
        const int block = thread ? epilogue.second_block(tile) : epilogue.first_block(tile);
        const float* matrix_scales = epilogue.matrix_scales + static_cast<int64>(block) * rows.k_blocks;
        // If the loop were unrolled, the addresses of several stages would not fit into registers.
#pragma unroll 1
        for (int k = 0; k < rows.k_blocks; ++k) {
            barrier_wait(shared.empty_of(stage), parity);
            const uint32 target = shared.rows_of(stage), full = shared.full_of(stage);
            if (thread == 0) {
                if (number >= num_early) request_matrices(stage, k);
                if (is_packed) copy_box(target, maps.rows, full, k * BLOCK, tile.slot);
            }
            if (!is_packed) reader.copy(target + own);
            copy_4_bytes(shared.scales_of(stage) + thread * 4, reader.scales + k);
            if (thread < 2) {
                copy_4_bytes(shared.matrix_scales + stage * MATRIX_SCALES_BYTES + thread * 4,
                             matrix_scales + k);
            }
            barrier_arrive_after_copies(full);
            if (Epilogue::HAS_INDEX && number == tells_at && thread == 32) tell(rows.ahead);
            ++number;
            reader.codes += BLOCK;
            if (++stage == NUM_STAGES) stage = 0, parity ^= 1;
        }
    }
    // A block without tiles does not end before that kernel either: the next one does not wait for it.
    wait_for_kernel_before();
}

// The lower word of the descriptor of 128-byte rows in groups of eight, swizzled; the upper word is
// the same for all. The address is in units of 16 bytes.
__device__ __forceinline__ uint32 matrix_descriptor(uint32 address) {
    return (address & 0x3FFFF) >> 4 | 1u << 16;
}
constexpr uint32 UPPER_DESCRIPTOR = 64u | 1u << 30;

#define FOUR(d, i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define SIXTEEN(d, i) FOUR(d, i), FOUR(d, i + 4), FOUR(d, i + 8), FOUR(d, i + 12)

// sums[64] (+)= 64 rows times 128 columns over 32 of K.
__device__ __forceinline__ void multiply_step(float (&sums)[64], uint32 a, uint32 b, int adds) {
    asm volatile(
        "{\n"
        ".reg .pred adds;\n"
        ".reg .b64 a, b;\n"
        "mov.b64 a, {%64, %67};\n"
        "mov.b64 b, {%65, %67};\n"
        "setp.ne.b32 adds, %66, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3 "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
        "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, "
        "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63}, "
        "a, b, adds, 1, 1;\n"
        "}\n"
        : SIXTEEN(sums, 0), SIXTEEN(sums, 16), SIXTEEN(sums, 32), SIXTEEN(sums, 48)
        : "r"(a), "r"(b), "r"(adds), "n"(UPPER_DESCRIPTOR));
}

// Keeps the compiler from moving reads and writes of the sums across this point.
__device__ __forceinline__ void pin(float (&sums)[64]) {
#pragma unroll
    for (int i = 0; i < 64; ++i) asm volatile("" : "+f"(sums[i])::"memory");
}

// Starts a product of 128 of K; the sums are there after finish().
__device__ __forceinline__ void start(float (&sums)[64], uint32 a, uint32 b) {
    pin(sums);
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
    for (int step = 0; step < 4; ++step) {
        // The next 32 bytes, in units of 16.
        multiply_step(sums, a + 2 * step, b + 2 * step, step);
    }
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

__device__ __forceinline__ void finish(float (&sums)[64]) {
    asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
    pin(sums);
}

// Element i of a thread: row lane / 4 + (i & 2 ? 8 : 0) of its warp's 16, column
// 8 * (i / 4) + 2 * (lane % 4) + i % 2.
__device__ __forceinline__ void add_scaled(float (&totals)[64], const float (&sums)[64],
                                           float scale, float scale_8) {
#pragma unroll
    for (int i = 0; i < 64; ++i) totals[i] += sums[i] * (i & 2 ? scale_8 : scale);
}

// The compiler computes a word again wherever it is used, between two products too, unless it is
// the result of a shuffle.
__device__ __forceinline__ uint32 keep(uint32 word) {
    return __shfl_sync(~0u, word, threadIdx.x % 32);
}

// Returns a word that is equal in all threads of a warp.
__device__ __forceinline__ uint32 keep_uniform(uint32 word) { return __shfl_sync(~0u, word, 0); }

__device__ __forceinline__ float load_shared(uint32 address) {
    float value;
    asm volatile("ld.shared.f32 %0, [%1];" : "=f"(value) : "r"(address) : "memory");
    return value;
}

__device__ __forceinline__ void load_shared_pair(uint32 address, float& first, float& second) {
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];"
                 : "=f"(first), "=f"(second)
                 : "r"(address)
                 : "memory");
}

// Transposes words among the four threads that share a row: word i of thread t becomes word t of
// thread i.
__device__ __forceinline__ void transpose_in_quad(uint64 (&words)[4]) {
    const bool is_high = threadIdx.x & 2, is_odd = threadIdx.x & 1;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const uint64 came = __shfl_xor_sync(~0u, is_high ? words[i] : words[i + 2], 2);
        if (is_high) words[i] = came;
        else words[i + 2] = came;
    }
#pragma unroll
    for (int i = 0; i < 4; i += 2) {
        const uint64 came = __shfl_xor_sync(~0u, is_odd ? words[i] : words[i + 1], 1);
        if (is_odd) words[i] = came;
        else words[i + 1] = came;
    }
}

// Bit-equal to 1.0f + __expf(-x), which also computes the subnormal numbers that do not change the sum.
__device__ __forceinline__ float one_plus_exp_of_minus(float x) {
    float power;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(x * -1.4426950408889634f));
    return 1.0f + power;
}

// Bit-equal to __fdiv_rn(448, amax) for 1e-4 and more, but no call, around which products would wait.
__device__ __forceinline__ float divide_448_by(float amax) {
    // The reciprocal of a larger number could be subnormal.
    const bool is_large = amax > 0x1p64f;
    const float divisor = is_large ? amax * 0x1p-64f : amax;
    float guess;
    asm("rcp.approx.f32 %0, %1;" : "=f"(guess) : "f"(divisor));
    const float inverse = fmaf(guess, fmaf(-divisor, guess, 1.0f), guess);
    float quotient = 448.0f * inverse;
    quotient = fmaf(fmaf(-divisor, quotient, 448.0f), inverse, quotient);
    quotient = fmaf(fmaf(-divisor, quotient, 448.0f), inverse, quotient);
    if (is_large) quotient *= 0x1p-64f;
    return divisor < 0x1p127f ? quotient : 0.0f;
}

__device__ __forceinline__ uint32 e4m3_pair(float first, float second) {
    uint16 pair;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(second), "f"(first));
    return pair;
}

struct alignas(16) Words {
    uint32 words[4];
};

// The router weights of a thread's two rows, eight apart.
struct RowWeights {
    float row;
    float row_8;
};

// The epilogue of gate and up: silu(gate) * up of the block, as codes and scales.
struct GateUp {
    const float* matrix_scales;  // [L, 2I / 128, k_blocks]
    uint8* codes;                // [C, I]
    float* scales;               // [C, I / 128]
    int inner_blocks;

    static constexpr int COLUMNS_PER_TILE = BLOCK;
    static constexpr bool HAS_INDEX = true;
    static constexpr int RESULT_BYTES = 0;

    __device__ __forceinline__ int matrix_step() const { return inner_blocks * BLOCK; }
    __device__ __forceinline__ int num_column_tiles() const { return inner_blocks; }
    __device__ __forceinline__ int first_block(const Tile& tile) const {
        return tile.expert * 2 * inner_blocks + tile.column;
    }
    __device__ __forceinline__ int second_block(const Tile& tile) const {
        return first_block(tile) + inner_blocks;
    }

    __device__ __forceinline__ RowWeights weights_of(const Tile&, int) const { return {}; }

    __device__ __forceinline__ void store(const Tile& tile, int row, float (&gate)[64],
                                          float (&up)[64], RowWeights, const TensorMap*,
                                          uint32) const {
#pragma unroll
        for (int i = 0; i < 64; ++i) {
            gate[i] = __fdividef(gate[i], one_plus_exp_of_minus(gate[i])) * up[i];
        }
#pragma unroll
        for (int half = 0; half < 2; ++half) store_row(tile, row + 8 * half, half, gate);
        // One thread of the warp says later, by releasing a stage, that all have stored.
        __syncwarp();
    }

    __device__ __forceinline__ void store_row(const Tile& tile, int row, int half,
                                              const float (&hidden)[64]) const {
        float amax = 1e-4f;
#pragma unroll
        for (int i = 0; i < 64; i += 4) {
            amax = fmaxf(amax, fmaxf(fabsf(hidden[i + 2 * half]), fabsf(hidden[i + 2 * half + 1])));
        }
        amax = fmaxf(amax, __shfl_xor_sync(~0u, amax, 1));
        amax = fmaxf(amax, __shfl_xor_sync(~0u, amax, 2));
        const float factor = divide_448_by(amax);
        // Unit u holds 8 columns in each of four groups 4u to 4u + 3, two columns of this thread.
        uint64 units[4];
#pragma unroll
        for (int unit = 0; unit < 4; ++unit) {
            uint32 pairs[4];
#pragma unroll
            for (int g = 0; g < 4; ++g) {
                const int i = 4 * (4 * unit + g) + 2 * half;
                pairs[g] = e4m3_pair(hidden[i] * factor, hidden[i + 1] * factor);
            }
            units[unit] = static_cast<uint64>(pairs[2] | pairs[3] << 16) << 32
                          | (pairs[0] | pairs[1] << 16);
        }
        transpose_in_quad(units);
        if (row >= tile.num_rows) return;
        const int64 slot = tile.slot + row;
        const int quarter = threadIdx.x % 4;
        uint8* out = codes + slot * (inner_blocks * BLOCK) + tile.column * BLOCK + quarter * 32;
        Words first, second;
#pragma unroll
        for (int pair = 0; pair < 2; ++pair) {
            const uint32 low = static_cast<uint32>(units[2 * pair]);
            const uint32 low_next = static_cast<uint32>(units[2 * pair + 1]);
            const uint32 high = static_cast<uint32>(units[2 * pair] >> 32);
            const uint32 high_next = static_cast<uint32>(units[2 * pair + 1] >> 32);
            first.words[pair] = __byte_perm(low, low_next, 0x5410);
            first.words[2 + pair] = __byte_perm(low, low_next, 0x7632);
            second.words[pair] = __byte_perm(high, high_next, 0x5410);
            second.words[2 + pair] = __byte_perm(high, high_next, 0x7632);
        }
        reinterpret_cast<Words*>(out)[0] = first;
        reinterpret_cast<Words*>(out)[1] = second;
        if (quarter == 0) {
            scales[slot * inner_blocks + tile.column] = amax * 0.0022321429569274187f;
        }
    }
};

struct BFloat16 {
    static __device__ __forceinline__ uint32 pair(float first, float second) {
        uint32 word;
        asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(second), "f"(first));
        return word;
    }
};

struct Float16 {
    static __device__ __forceinline__ uint32 pair(float first, float second) {
        uint32 word;
        asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(word) : "f"(second), "f"(first));
        return word;
    }
};

// Stores four matrices of 8 rows and 16 bytes to shared memory: word i of a thread is in row lane / 4
// and word lane % 4 of matrix i, whose row r is at the address of lane 8 i + r.
__device__ __forceinline__ void store_matrices(uint32 address, const uint32 (&words)[4]) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(address),
                 "r"(words[0]), "r"(words[1]), "r"(words[2]), "r"(words[3])
                 : "memory");
}

// The epilogue of down: two blocks of H, times router weights, two bytes an element. A warp gathers 16
// rows of a block in shared memory; the copy engine stores them, if all of them are rows of the tile.
template <typename Element>
struct Down {
    const float* matrix_scales;  // [L, H / 128, k_blocks]
    const float* slot_weights;   // [C], or null
    uint16* out;                 // [C, H]
    int hidden_blocks;

    static constexpr int COLUMNS_PER_TILE = 2 * BLOCK;
    static constexpr bool HAS_INDEX = false;
    static constexpr int BOX_BYTES = ROWS_PER_WARP * 128;
    // Of each warp, one block of H, which is two boxes.
    static constexpr int RESULT_BYTES = 2 * BOX_BYTES;

    __device__ __forceinline__ bool has_second(const Tile& tile) const {
        return 2 * tile.column + 1 < hidden_blocks;
    }
    // Where there is no second block the first one is read twice, and stored once.
    __device__ __forceinline__ int matrix_step() const { return BLOCK; }
    __device__ __forceinline__ int num_column_tiles() const { return (hidden_blocks + 1) / 2; }
    __device__ __forceinline__ int first_block(const Tile& tile) const {
        return tile.expert * hidden_blocks + 2 * tile.column;
    }
    __device__ __forceinline__ int second_block(const Tile& tile) const {
        return first_block(tile) + has_second(tile);
    }

    __device__ __forceinline__ RowWeights weights_of(const Tile& tile, int row) const {
        const int last = tile.num_rows - 1;
        if (!slot_weights) return {1.0f, 1.0f};
        return {slot_weights[tile.slot + min(row, last)], slot_weights[tile.slot + min(row + 8, last)]};
    }

    // results: shared memory of this warp.
    __device__ __forceinline__ void store(const Tile& tile, int row, const float (&first)[64],
                                          const float (&second)[64], RowWeights weights,
                                          const TensorMap* map, uint32 results) const {
        store_block(map, results, tile, row, 0, weights, first);
        store_block(map, results, tile, row, 1, weights, second);
    }

    // block: 0 or 1, of the tile.
    __device__ __forceinline__ void store_block(const TensorMap* map, uint32 results, const Tile& tile,
                                                int row, int block, RowWeights weights,
                                                const float (&totals)[64]) const {
        const int first_row = keep_uniform(row);  // of this warp
        const int num_rows = min(ROWS_PER_WARP, tile.num_rows - first_row);
        if (num_rows <= 0 || (block == 1 && !has_second(tile))) return;
        const int slot = tile.slot + first_row, column = tile.column * COLUMNS_PER_TILE + block * BLOCK;
        const int lane = threadIdx.x % 32;
        // Boxes that are written still must have been read before others replace them.
        if (lane == 0) wait_for_writes();
        __syncwarp();
#pragma unroll
        for (int group = 0; group < 16; group += 2) {
            const int i = 4 * group;
            const uint32 words[4] = {
                Element::pair(totals[i] * weights.row, totals[i + 1] * weights.row),
                Element::pair(totals[i + 2] * weights.row_8, totals[i + 3] * weights.row_8),
                Element::pair(totals[i + 4] * weights.row, totals[i + 5] * weights.row),
                Element::pair(totals[i + 6] * weights.row_8, totals[i + 7] * weights.row_8),
            };
            store_matrices(chunk_of(results, lane % 16, group + lane / 16), words);
        }
        if (num_rows < ROWS_PER_WARP) {
            store_rows(results, slot, num_rows, column);
            return;
        }
        // The copy engine reads through another proxy than these stores write.
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
        __syncwarp();
        if (lane == 0) {
            write_box(map, results, 2 * column, slot);
            write_box(map, results + BOX_BYTES, 2 * column + 128, slot);
            asm volatile("cp.async.bulk.commit_group;" ::: "memory");
        }
    }

    // The address of 16 bytes of a row: the copy engine expects those of a box permuted by the row.
    static __device__ __forceinline__ uint32 chunk_of(uint32 results, int row, int chunk) {
        return results + chunk / 8 * BOX_BYTES + row * 128 + ((chunk ^ row) % 8) * 16;
    }

    // The copy engine would also write the rows that follow.
    __device__ __forceinline__ void store_rows(uint32 results, int64 slot, int num_rows,
                                               int column) const {
        __syncwarp();
        for (int i = threadIdx.x % 32; i < num_rows * 16; i += 32) {
            const int row = i / 16, chunk = i % 16;
            uint16* at = out + (slot + row) * (hidden_blocks * BLOCK) + column + chunk * 8;
            *reinterpret_cast<Words*>(at) =
                *static_cast<const Words*>(__cvta_shared_to_generic(chunk_of(results, row, chunk)));
        }
    }
};

// The next stage that a consumer reads. Tiles follow one another without a gap, so a tile may begin at
// any stage.
struct Position {
    int stage;
    int parity;

    __device__ __forceinline__ void advance(int blocks) {
        parity ^= (stage + blocks) / NUM_STAGES & 1;
        stage = (stage + blocks) % NUM_STAGES;
    }
};

// What a thread of a consumer knows of its place. Addresses are those of shared memory.
struct Consumer {
    int first_row;  // of the consumer, in a tile
    int row;        // of the thread
    uint32 full;    // barriers of full stages, followed by those of empty ones
    uint32 stages;
    uint32 scales;
    uint32 matrix_scales;
    uint32 results;
    bool is_first;  // of its warp

    __device__ __forceinline__ Consumer(const Shared& shared, int result_bytes) {
        const int number = keep_uniform(threadIdx.x / WARPGROUP), lane = threadIdx.x % 32;
        first_row = number * ROWS_PER_CONSUMER;
        row = keep(first_row + threadIdx.x % WARPGROUP / 32 * ROWS_PER_WARP + lane / 4);
        full = keep_uniform(shared.full);
        stages = keep_uniform(matrix_descriptor(shared.stages));
        scales = keep(shared.scales + row * 4);
        matrix_scales = keep_uniform(shared.matrix_scales);
        results = shared.results + threadIdx.x / 32 * result_bytes;
        is_first = keep(lane) == 0;
    }

    __device__ __forceinline__ void start_first(float (&sums)[64], int stage) const {
        const uint32 a_tile = stages + stage * (STAGE_BYTES / 16);
        start(sums, a_tile + first_row * (BLOCK / 16), a_tile + TILE_BYTES / 16);
    }
    __device__ __forceinline__ void start_second(float (&sums)[64], int stage) const {
        const uint32 a_tile = stages + stage * (STAGE_BYTES / 16);
        start(sums, a_tile + first_row * (BLOCK / 16), a_tile + 2 * TILE_BYTES / 16);
    }
    __device__ __forceinline__ void release(int stage) const {
        if (is_first) barrier_arrive(full + (NUM_STAGES + stage) * 8);
    }
    // Releases the stages of a tile of which this consumer has no rows.
    __device__ __forceinline__ void pass_over(Position at, int k_blocks) const {
        for (int k = 0; k < k_blocks; ++k, at.advance(1)) {
            barrier_wait(full + at.stage * 8, at.parity);
            release(at.stage);
        }
    }
};

// The scales of a block of K, for the two rows of a thread, eight apart, and for both products.
struct BlockScales {
    float first;
    float first_8;
    float second;
    float second_8;

    __device__ __forceinline__ BlockScales(const Consumer& own, int stage) {
        const float scale = load_shared(own.scales + stage * SCALES_BYTES);
        const float scale_8 = load_shared(own.scales + stage * SCALES_BYTES + 8 * 4);
        load_shared_pair(own.matrix_scales + stage * MATRIX_SCALES_BYTES, first, second);
        first_8 = scale_8 * first;
        second_8 = scale_8 * second;
        first *= scale;
        second *= scale;
    }
};

template <typename Epilogue>
__device__ void consume(const Rows& rows, const Maps& maps, Tiles tiles, const Shared& shared,
                        const Epilogue& epilogue) {
    const Consumer own(shared, Epilogue::RESULT_BYTES);
    const int k_blocks = rows.k_blocks;
    Position at{0, 0};
    bool is_full = false;
    Tile tile;
    for (; tiles.take(tile); at.advance(k_blocks)) {
        if (own.first_row >= tile.num_rows) {
            own.pass_over(at, k_blocks);
            is_full = false;
            continue;
        }
        float first[64], second[64], sums[64];
#pragma unroll
        for (int i = 0; i < 64; ++i) first[i] = second[i] = 0.0f;
        const bool has_copies = Epilogue::HAS_INDEX && !keep_uniform(tile.is_packed);
        // The tile before had none, perhaps.
        if (has_copies) fence_copies();
        // Loaded before they are needed.
        const RowWeights weights = epilogue.weights_of(tile, own.row);
        // A round reads all stages; the first one begins, and the last one ends, in their midst.
        int parity = at.parity;
#pragma unroll 1
        for (int k = -at.stage; k < k_blocks; k += NUM_STAGES, parity ^= 1) {
            // The addresses of stages are constants.
#pragma unroll
            for (int stage = 0; stage < NUM_STAGES; ++stage) {
                if (static_cast<uint32>(k + stage) >= static_cast<uint32>(k_blocks)) continue;
                if (!is_full) {
                    barrier_wait(own.full + stage * 8, parity);
                    if (has_copies) fence_copies();
                }
                own.start_first(sums, stage);
                // The code until finish() runs while the product does, and costs no time.
                const BlockScales by(own, stage);
                finish(sums);
                add_scaled(first, sums, by.first, by.first_8);
                own.start_second(sums, stage);
                const int next = (stage + 1) % NUM_STAGES;
                is_full = barrier_is_over(own.full + next * 8, next ? parity : parity ^ 1);
                if (has_copies) fence_copies();
                finish(sums);
                own.release(stage);
                add_scaled(second, sums, by.second, by.second_8);
            }
        }
        epilogue.store(tile, own.row, first, second, weights, maps.out, own.results);
    }
    if (Epilogue::RESULT_BYTES && own.is_first) wait_for_writes();
}

// The same for blocks that compute several tiles of gate and up: the first product of a tile runs while
// results of the tile before are stored. Where each block computes one tile, the longer code takes 20%
// more time, and both ways in one kernel spill registers.
__device__ void consume_ahead(const Rows& rows, const Maps& maps, Tiles tiles, const Shared& shared,
                              const GateUp& epilogue) {
    const Consumer own(shared, GateUp::RESULT_BYTES);
    const int k_blocks = rows.k_blocks;
    Position at{0, 0};
    bool is_full = false, has_copies = false;
    float first[64], second[64], sums[64];
    Tile tile;
    // Of the tile whose results are not stored yet, if it has rows.
    Tile done{};
    const auto begin = [&](int stage, int parity) {
        if (!is_full) {
            barrier_wait(own.full + stage * 8, parity);
            if (has_copies) fence_copies();
        }
        own.start_first(sums, stage);
    };
    const auto store_done = [&] {
        if (done.num_rows) epilogue.store(done, own.row, first, second, {}, maps.out, own.results);
    };
    // The compiler lets products run on where branches are taken by whole warps.
    while (keep_uniform(tiles.take(tile))) {
        if (own.first_row >= static_cast<int>(keep_uniform(tile.num_rows))) {
            store_done();
            done.num_rows = 0;
            own.pass_over(at, k_blocks);
            is_full = false;
            at.advance(k_blocks);
            continue;
        }
        has_copies = !keep_uniform(tile.is_packed);
        if (has_copies) fence_copies();
        begin(keep_uniform(at.stage), at.parity);
        store_done();
#pragma unroll
        for (int i = 0; i < 64; ++i) first[i] = second[i] = 0.0f;
        int parity = at.parity;
#pragma unroll 1
        for (int k = -at.stage; k < k_blocks; k += NUM_STAGES, parity ^= 1) {
#pragma unroll
            for (int stage = 0; stage < NUM_STAGES; ++stage) {
                if (static_cast<uint32>(k + stage) >= static_cast<uint32>(k_blocks)) continue;
                const BlockScales by(own, stage);
                finish(sums);
                add_scaled(first, sums, by.first, by.first_8);
                own.start_second(sums, stage);
                const int next = (stage + 1) % NUM_STAGES, next_parity = next ? parity : parity ^ 1;
                is_full = barrier_is_over(own.full + next * 8, next_parity);
                if (has_copies) fence_copies();
                finish(sums);
                own.release(stage);
                add_scaled(second, sums, by.second, by.second_8);
                if (k + stage + 1 < k_blocks) begin(next, next_parity);
            }
        }
        // Nothing is under way, which the compiler does not know.
        finish(sums);
        at.advance(k_blocks);
        done.slot = keep_uniform(tile.slot);
        done.num_rows = keep_uniform(tile.num_rows);
        done.column = keep_uniform(tile.column);
    }
    store_done();
}

// The same for blocks that compute several tiles of down: a tile's first block of H is stored while its
// last product runs, and the second block while the first product of the next tile does.
template <typename Element>
__device__ void consume_ahead(const Rows& rows, const Maps& maps, Tiles tiles, const Shared& shared,
                              const Down<Element>& epilogue) {
    const Consumer own(shared, Down<Element>::RESULT_BYTES);
    const int k_blocks = rows.k_blocks;
    Position at{0, 0};
    bool is_full = false;
    float first[64], second[64], sums[64];
    RowWeights weights{};
    Tile tile;
    // Of the tile whose results are not stored yet, if it has rows.
    Tile done{};
    const auto wait_for_stage = [&](int stage, int parity) {
        if (!is_full) barrier_wait(own.full + stage * 8, parity);
    };
    bool has_tile = keep_uniform(tiles.take(tile));
    for (;; at.advance(k_blocks)) {
        const bool has_rows = has_tile && own.first_row < static_cast<int>(keep_uniform(tile.num_rows));
        if (has_rows) wait_for_stage(at.stage, at.parity);
        // Without rows nobody needs this product, but if only one of two branches began one, the compiler
        // would wait for it where they meet.
        own.start_first(sums, keep_uniform(at.stage));
        if (done.num_rows) epilogue.store_block(maps.out, own.results, done, own.row, 1, weights, second);
        if (!has_tile) break;
        float last_scale = 0.0f, last_scale_8 = 0.0f;
        int last_stage = 0;
        if (has_rows) {
            done.slot = keep_uniform(tile.slot);
            done.num_rows = keep_uniform(tile.num_rows);
            done.column = keep_uniform(tile.column);
            // Loaded before they are needed.
            weights = epilogue.weights_of(done, own.row);
#pragma unroll
            for (int i = 0; i < 64; ++i) first[i] = second[i] = 0.0f;
            int parity = at.parity;
#pragma unroll 1
            for (int k = -at.stage;; k += NUM_STAGES, parity ^= 1) {
#pragma unroll
                for (int stage = 0; stage < NUM_STAGES; ++stage) {
                    if (k + stage < 0) continue;
                    const BlockScales by(own, stage);
                    finish(sums);
                    add_scaled(first, sums, by.first, by.first_8);
                    own.start_second(sums, stage);
                    const int next = (stage + 1) % NUM_STAGES, next_parity = next ? parity : parity ^ 1;
                    is_full = barrier_is_over(own.full + next * 8, next_parity);
                    if (k + stage + 1 == k_blocks) {
                        last_scale = by.second;
                        last_scale_8 = by.second_8;
                        last_stage = stage;
                        goto last;
                    }
                    finish(sums);
                    own.release(stage);
                    add_scaled(second, sums, by.second, by.second_8);
                    wait_for_stage(next, next_parity);
                    own.start_first(sums, next);
                }
            }
        last:
            epilogue.store_block(maps.out, own.results, done, own.row, 0, weights, first);
        } else {
            done.num_rows = 0;
            own.pass_over(at, k_blocks);
            is_full = false;
        }
        has_tile = keep_uniform(tiles.take(tile));
        finish(sums);
        if (has_rows) {
            own.release(last_stage);
            add_scaled(second, sums, last_scale, last_scale_8);
        }
    }
    finish(sums);
    if (own.is_first) wait_for_writes();
}

// IS_AHEAD: blocks compute several tiles.
template <bool IS_AHEAD, typename Epilogue>
__device__ __forceinline__ void run(const Rows& rows, const Maps& maps, const Epilogue& epilogue) {
    // The start of a swizzled box.
    extern __shared__ __align__(1024) uint8 memory[];
    Shared shared;
    shared.stages = shared_address(memory);
    shared.results = shared.stages + NUM_STAGES * STAGE_BYTES;
    shared.scales = shared.results + CONSUMERS * WARPGROUP / 32 * Epilogue::RESULT_BYTES;
    shared.matrix_scales = shared.scales + NUM_STAGES * SCALES_BYTES;
    shared.full = shared.matrix_scales + NUM_STAGES * MATRIX_SCALES_BYTES;
    shared.empty = shared.full + NUM_STAGES * 8;
    if (threadIdx.x == WARPGROUP) {
        prefetch_map(maps.matrices);
        prefetch_map(maps.rows);
        prefetch_map(maps.out);
    }
    if (threadIdx.x == 0) {
        for (int stage = 0; stage < NUM_STAGES; ++stage) {
            // Each producer thread arrives once for its rows, and one of them for the matrices.
            barrier_init(shared.full_of(stage), WARPGROUP + 1);
            barrier_init(shared.empty_of(stage), CONSUMERS * WARPGROUP / 32);
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    let_next_kernel_begin();
    Tiles tiles(rows, epilogue.num_column_tiles());
    if (IS_AHEAD && !Epilogue::HAS_INDEX && rows.ahead) tiles.begin_early();
    if (threadIdx.x / WARPGROUP == CONSUMERS) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 72;");
        produce(rows, maps, tiles, shared, epilogue);
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 216;");
        if constexpr (IS_AHEAD) {
            consume_ahead(rows, maps, tiles, shared, epilogue);
        } else {
            consume(rows, maps, tiles, shared, epilogue);
        }
    }
}

// The memory for codes in the order of slots.
struct Packed {
    uint8* codes;  // [num_slots, 128 k_blocks]
    int64 num_slots;
};

constexpr int PACK_THREADS = 256;
// Number of loads of 16 bytes that a thread has in flight.
constexpr int PACK_LOADS = 4;

// Returns the count of the expert that has the slot, or 0 for padding. The threads of a warp call this
// together, for one slot.
__device__ int count_of_slot(const Rows& rows, int64 slot) {
    for (int first = 0; first < rows.num_experts; first += 32) {
        const int expert = first + threadIdx.x % 32;
        const bool is_expert = expert < rows.num_experts;
        const int count = is_expert ? rows.counts[expert] : 0;
        const int64 begin = is_expert ? rows.first_slot[expert] : 0;
        const uint32 has_slot = __ballot_sync(~0u, begin <= slot && slot < begin + count);
        if (has_slot) return __shfl_sync(~0u, count, __ffs(has_slot) - 1);
    }
    return 0;
}

extern "C" {

// Copies the codes of the slots of experts with packed_from slots or more, a warp a slot.
__global__ void __launch_bounds__(PACK_THREADS)
    pack_rows(const __grid_constant__ Rows rows, const __grid_constant__ Packed packed) {
    const int64 slot = static_cast<int64>(blockIdx.x) * (PACK_THREADS / 32) + threadIdx.x / 32;
    if (slot >= packed.num_slots || count_of_slot(rows, slot) < rows.packed_from) return;
    const int row = rows.row_of_slot[slot];
    const int num_words = rows.k_blocks * (BLOCK / 16);
    const Words* from = reinterpret_cast<const Words*>(rows.codes + row * rows.codes_stride);
    Words* to = reinterpret_cast<Words*>(packed.codes) + slot * num_words;
    for (int first = threadIdx.x % 32; first < num_words; first += 32 * PACK_LOADS) {
        Words words[PACK_LOADS];
#pragma unroll
        for (int i = 0; i < PACK_LOADS; ++i) {
            if (first + 32 * i < num_words) words[i] = from[first + 32 * i];
        }
#pragma unroll
        for (int i = 0; i < PACK_LOADS; ++i) {
            if (first + 32 * i < num_words) to[first + 32 * i] = words[i];
        }
    }
}

// rows_map: of codes in the order of slots; not read where no expert has packed_from slots.
#define GATE_UP(name, is_ahead)                                                                          \
    __global__ void __launch_bounds__(384, 1)                                                            \
        name(const __grid_constant__ TensorMap rows_map, const __grid_constant__ TensorMap map,          \
             const __grid_constant__ Rows rows, const __grid_constant__ GateUp epilogue) {               \
        run<is_ahead>(rows, Maps{&rows_map, &map, nullptr}, epilogue);                                   \
    }
GATE_UP(gate_up_fp8, false)
GATE_UP(gate_up_fp8_ahead, true)

#define DOWN(name, Element, is_ahead)                                                                    \
    __global__ void __launch_bounds__(384, 1)                                                            \
        name(const __grid_constant__ TensorMap rows_map, const __grid_constant__ TensorMap map,          \
             const __grid_constant__ TensorMap out_map, const __grid_constant__ Rows rows,               \
             const __grid_constant__ Down<Element> epilogue) {                                           \
        run<is_ahead>(rows, Maps{&rows_map, &map, &out_map}, epilogue);                                  \
    }
DOWN(down_fp8_bfloat16, BFloat16, false)
DOWN(down_fp8_bfloat16_ahead, BFloat16, true)
DOWN(down_fp8_float16, Float16, false)
DOWN(down_fp8_float16_ahead, Float16, true)

}  // extern "C"
