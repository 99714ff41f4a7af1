// Every instruction of PTX that the kernels of normal mode use, each in a function that names it.
//
// A host's compiler reads tests/kernels/nvlink/host_cuda.h in place of this file; the other files are
// plain C++ with CUDA's words for threads, blocks, warps and atomics.

typedef unsigned int u32;
typedef unsigned long long u64;
typedef unsigned short u16;
typedef long long i64;

// Signals, in memory that peers write.

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

__device__ void release(u64 address, u32 value) {
    asm volatile("st.release.sys.global.u32 [%0], %1;" ::"l"(address), "r"(value) : "memory");
}

__device__ void add_released(u64 address, u32 value) {
    asm volatile("red.release.sys.global.add.u32 [%0], %1;" ::"l"(address), "r"(value) : "memory");
}

// Store to the memory of a peer: nothing but a later release orders it.
template <class T>
__device__ void store_far(T* to, T value) {
    *to = value;
}

// Signals among the blocks of this rank.

__device__ int acquired_here(const int* word) {
    int value;
    asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(word) : "memory");
    return value;
}

__device__ void release_here(int* word, int value) {
    asm volatile("st.release.gpu.global.s32 [%0], %1;" ::"l"(word), "r"(value) : "memory");
}

// Add 1, and return what was there: release what this thread knows of, and acquire what earlier threads
// released.
__device__ int arrive_here(int* word) {
    int before;
    asm volatile("atom.acq_rel.gpu.global.add.s32 %0, [%1], 1;" : "=r"(before) : "l"(word) : "memory");
    return before;
}

// Signals among the warps of a block, in shared memory.

__device__ void release_in_block(u32* word, u32 value) {
    asm volatile("st.release.cta.shared.u32 [%0], %1;" ::"r"((u32)__cvta_generic_to_shared(word)),
                 "r"(value) : "memory");
}

__device__ u32 acquired_in_block(const u32* word) {
    u32 value;
    asm volatile("ld.acquire.cta.shared.u32 %0, [%1];" : "=r"(value)
                 : "r"((u32)__cvta_generic_to_shared(word)) : "memory");
    return value;
}

// Barrier ID of a block, of THREADS threads; those that arrive do not wait.

template <int ID, int THREADS>
__device__ void meet() {
    asm volatile("bar.sync %0, %1;" ::"n"(ID), "n"(THREADS) : "memory");
}

template <int ID, int THREADS>
__device__ void arrive() {
    asm volatile("bar.arrive %0, %1;" ::"n"(ID), "n"(THREADS) : "memory");
}

// The copy engine. Addresses of 32 bits are those of shared memory.

__device__ u32 dynamic_memory() {
    extern __shared__ __align__(128) char memory[];
    return (u32)__cvta_generic_to_shared(memory);
}

__device__ void begin_barrier(u32 barrier) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(barrier));
}

// After this fence the copy engine sees the barriers that this thread has initialised.
__device__ void publish_barriers() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ void expect(u32 barrier, u32 num_bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier),
                 "r"(num_bytes) : "memory");
}

__device__ bool has_ended(u32 barrier, u32 parity) {
    u32 done;
    asm volatile("{\n"
        ".reg .pred done;\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%1], %2;\n"
        "selp.u32 %0, 1, 0, done;\n"
        "}" : "=r"(done) : "r"(barrier), "r"(parity) : "memory");
    return done != 0;
}

// Reads through the L2 cache, which holds what peers have stored.
__device__ void bring_piece(u32 to, u64 from, u32 num_bytes, u32 barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes "
                 "[%0], [%1], %2, [%3];" ::"r"(to), "l"(from), "r"(num_bytes), "r"(barrier)
                 : "memory");
}

__device__ void store_piece(u64 to, u32 from, u32 num_bytes) {
    asm volatile("cp.async.bulk.global.shared::cta.bulk_group [%0], [%1], %2;"
                 ::"l"(to), "r"(from), "r"(num_bytes) : "memory");
}

// The pieces that this thread has stored since the last call are a group, which may be empty.
__device__ void end_group() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }

// Wait until all groups of this thread but the last NUM are read.
template <int NUM>
__device__ void await_read() {
    asm volatile("cp.async.bulk.wait_group.read %0;" ::"n"(NUM) : "memory");
}

// Wait until all groups of this thread are stored, not only read: a later release covers them.
__device__ void await_stored() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

// The copy engine reads what loads of this thread have acquired.
__device__ void pass_to_copies() { asm volatile("fence.proxy.async.global;" ::: "memory"); }

// Copies of 16 bytes by a thread, which reads through the L2 cache what its loads may read.
__device__ void begin_copy(u32 to, u64 from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(to), "l"(from) : "memory");
}

// The copies that this thread has begun since the last call are a group, which may be empty.
__device__ void end_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Wait until all groups of copies of this thread but the last NUM are in shared memory.
template <int NUM>
__device__ void await_copies() {
    asm volatile("cp.async.wait_group %0;" ::"n"(NUM) : "memory");
}

__device__ uint4 load_piece(u32 address) {
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "r"(address) : "memory");
    return v;
}

__device__ void load_shared(u32& value, u32 address) {
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(value) : "r"(address) : "memory");
}

__device__ void load_shared(u32 (&words)[1], u32 address) { load_shared(words[0], address); }

__device__ void load_shared(u32 (&words)[2], u32 address) {
    asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(words[0]), "=r"(words[1])
                 : "r"(address) : "memory");
}

// The lane of this thread, for code that must not keep what it computes of it in registers.
__device__ u32 current_lane() {
    u32 lane;
    asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
    return lane;
}

// Time, and numbers.

__device__ u64 clock_ns() {
    u64 value;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(value));
    return value;
}

// Two numbers of 16 bits in a word, the first in the lower half.
__device__ u32 as_bfloat16(float low, float high) {
    u32 both;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    return both;
}

__device__ u32 as_float16(float low, float high) {
    u32 both;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    return both;
}

__device__ float of_float16(u16 bits) {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
}

// The rounded quotient, from the rounded inverse of b.
__device__ float quotient_by(float a, float b, float inverse) {
    const float quotient = __fmul_rn(a, inverse);
    return __fmaf_rn(inverse, __fmaf_rn(-b, quotient, a), quotient);
}

// The rounded quotient of numbers whose powers are small: what __fdiv_rn() does, but for its branch for others.
__device__ float quotient_of(float a, float b) {
    float inverse;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(inverse) : "f"(b));
    return quotient_by(a, b, __fmaf_rn(inverse, __fmaf_rn(-b, inverse, 1.0f), inverse));
}

// Two numbers of float16, times 2**14.
__device__ u32 grown(u32 two) {
    u32 product;
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(product) : "r"(two), "r"(0x74007400u));
    return product;
}

// The larger magnitudes of two pairs of bfloat16, with any signs.
__device__ u32 larger_magnitudes(u32 a, u32 b) {
    u32 larger;
    asm("max.NaN.xorsign.abs.bf16x2 %0, %1, %2;" : "=r"(larger) : "r"(a), "r"(b));
    return larger;
}

// The larger magnitude, or what is no number if one of them is none.
__device__ float larger_magnitude(float a, float b) {
    float larger;
    asm("{\n"
        ".reg .f32 a, b;\n"
        "abs.f32 a, %1;\n"
        "abs.f32 b, %2;\n"
        "max.NaN.f32 %0, a, b;\n"
        "}" : "=f"(larger) : "f"(a), "f"(b));
    return larger;
}

__device__ float magnitude_of(float value) {
    float magnitude;
    asm("abs.f32 %0, %1;" : "=f"(magnitude) : "f"(value));
    return magnitude;
}

// Codes of e4m3 in a word, the first in the lowest byte. Numbers above 448 become 448.
__device__ u32 as_e4m3(float a, float b, float c, float d) {
    u32 four;
    asm("{\n"
        ".reg .b16 low, high;\n"
        "cvt.rn.satfinite.e4m3x2.f32 low, %2, %1;\n"
        "cvt.rn.satfinite.e4m3x2.f32 high, %4, %3;\n"
        "mov.b32 %0, {low, high};\n"
        "}" : "=r"(four) : "f"(a), "f"(b), "f"(c), "f"(d));
    return four;
}

// The numbers of float16 of four codes.
__device__ uint2 of_e4m3(u32 codes) {
    uint2 four;
    asm("{\n"
        ".reg .b16 low, high;\n"
        "mov.b32 {low, high}, %2;\n"
        "cvt.rn.f16x2.e4m3x2 %0, low;\n"
        "cvt.rn.f16x2.e4m3x2 %1, high;\n"
        "}" : "=r"(four.x), "=r"(four.y) : "r"(codes));
    return four;
}
