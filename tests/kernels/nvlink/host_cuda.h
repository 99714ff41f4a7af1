// The words of CUDA and the functions of ptx.cu for a compiler of the host, which so compiles the
// kernels of normal mode as they are. The first part is for them; the second, behind HOST_CUDA_RUNTIME,
// is the machine they run on, compiled once.
//
// A block is a thread of the system, so `__shared__` is thread_local. A thread of CUDA is a fiber of it:
// fibers change where one waits for others, at a collective of its warp, a named barrier or a poll.
// Scopes of PTX map to the same orders of std::atomic, whose built-in functions are called here.
//
// A weak launch delays what is weakly ordered: a store to a peer, and what the copy engine stores, is
// seen late, in random order, unless a release orders it; the copy engine reads late; and which fiber
// runs next is random. A release of the system covers the stores of its own thread, and those that
// barriers, __syncwarp() or words among blocks have ordered before it: each thread has a vector clock of
// them. What it does not model: loads that are late, the order of plain stores within a rank, and proxies.
//
// HOST_CUDA_WATCHED: ThreadSanitizer watches the kernels, which are compiled for it, as this runtime is
// not. It learns from the functions below that each fiber is a thread, what barriers and __syncwarp() order
// (shuffles and ballots order nothing), and what the copy engine and store_far() access.
#pragma once

typedef unsigned int u32;
typedef unsigned long long u64;
typedef unsigned short u16;
typedef long long i64;

#define __device__ inline
#define __global__
#define __launch_bounds__(...)
#define __shared__ static __thread

struct Index3 { u32 x; };
struct uint2 { u32 x, y; };
struct alignas(16) uint4 { u32 x, y, z, w; };
struct alignas(16) float4 { float x, y, z, w; };
extern __thread Index3 threadIdx, blockIdx, blockDim, gridDim;

namespace host {
// What all lanes of the warp give, by lane; `kind` is equal for all lanes, or a lane went astray.
const u64* exchange(int kind, u64 value);
void meet(int id, int threads, bool waits);
void synchronize_warp();
void yield();
void rest();  // after a look at the clock
char* arena();
u64 now_ns();

// Where a launch is weak, these order what is delayed; else they do next to nothing.
void store_far(void* to, const void* value, int num_bytes);
void before_release();  // of the system
void after_signal();    // to a peer
void before_local_release(const void* word, bool joins);
void after_local_acquire(const void* word);
void store_piece(char* to, const char* from, u32 num_bytes);
void end_group();
void await_groups(int most, bool are_stored);
void bring_piece(char* to, const char* from, u32 num_bytes, u64* barrier);
void begin_copy(char* to, const char* from);
void end_copies();
void await_copies(u32 most);
bool has_ended(const u64* barrier, u32 parity);

void run(void (*kernel)(const void*), const void* arguments, u32 blocks, u32 threads, u32 shared_bytes,
         u32 seed);
}  // namespace host

enum { SHUFFLE, BALLOT, REDUCE };

template <class T>
T __shfl_sync(u32, T value, int lane) {
    u64 bits = 0;
    __builtin_memcpy(&bits, &value, sizeof(T));
    bits = host::exchange(SHUFFLE, bits)[lane & 31];
    __builtin_memcpy(&value, &bits, sizeof(T));
    return value;
}
inline int __shfl_up_sync(u32, int value, int distance) {
    const int lane = threadIdx.x % 32;
    return (int)host::exchange(SHUFFLE, (u32)value)[lane < distance ? lane : lane - distance];
}
inline int __shfl_xor_sync(u32, int value, int mask) {
    return (int)host::exchange(SHUFFLE, (u32)value)[threadIdx.x % 32 ^ mask];
}
inline u32 __ballot_sync(u32, bool value) {
    const u64* values = host::exchange(BALLOT, value);
    u32 mask = 0;
    for (int lane = 0; lane < 32; ++lane) mask |= (u32)values[lane] << lane;
    return mask;
}
inline bool __any_sync(u32 lanes, bool value) { return __ballot_sync(lanes, value) != 0; }
template <class T, class F>
T reduce_warp(T value, F combine) {
    const u64* values = host::exchange(REDUCE, (u32)value);
    T result = (T)values[0];
    for (int lane = 1; lane < 32; ++lane) result = combine(result, (T)values[lane]);
    return result;
}
inline int __reduce_add_sync(u32, int value) {
    return reduce_warp(value, [](int a, int b) { return a + b; });
}
inline int __reduce_max_sync(u32, int value) {
    return reduce_warp(value, [](int a, int b) { return a > b ? a : b; });
}
inline u32 __reduce_min_sync(u32, u32 value) {
    return reduce_warp(value, [](u32 a, u32 b) { return a < b ? a : b; });
}
inline u32 __reduce_or_sync(u32, u32 value) {
    return reduce_warp(value, [](u32 a, u32 b) { return a | b; });
}
inline void __syncwarp() { host::synchronize_warp(); }
inline void __syncthreads() { host::meet(0, blockDim.x, true); }
inline void __nanosleep(u32) { host::yield(); }
inline void __threadfence_system() { __atomic_thread_fence(__ATOMIC_SEQ_CST); }

template <class T, class U>
T atomicAdd(T* to, U value) { return __atomic_fetch_add(to, (T)value, __ATOMIC_RELAXED); }
template <class T, class U>
T atomicOr(T* to, U value) { return __atomic_fetch_or(to, (T)value, __ATOMIC_RELAXED); }
template <class T>
T __ldcg(const T* from) { return *from; }

inline int min(int a, int b) { return a < b ? a : b; }
inline int max(int a, int b) { return a > b ? a : b; }
inline int __popc(u32 bits) { return __builtin_popcount(bits); }
inline int __ffs(u32 bits) { return __builtin_ffs((int)bits); }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fadd_rn(float a, float b) { return a + b; }
inline float __fdiv_rn(float a, float b) { return a / b; }
template <class To, class From>
To as_bits(From value) {
    To bits;
    __builtin_memcpy(&bits, &value, sizeof(To));
    return bits;
}
inline float __int_as_float(int bits) { return as_bits<float>(bits); }
inline int __float_as_int(float value) { return as_bits<int>(value); }
inline float __uint_as_float(u32 bits) { return as_bits<float>(bits); }
inline u32 __float_as_uint(float value) { return as_bits<u32>(value); }

// The functions of ptx.cu.
inline u32 acquired(u64 address) { return __atomic_load_n((u32*)address, __ATOMIC_ACQUIRE); }
inline u32 watched(u64 address) { return __atomic_load_n((u32*)address, __ATOMIC_RELAXED); }
inline void release(u64 address, u32 value) {
    host::before_release();
    __atomic_store_n((u32*)address, value, __ATOMIC_RELEASE);
    host::after_signal();
}
inline void add_released(u64 address, u32 value) {
    host::before_release();
    __atomic_fetch_add((u32*)address, value, __ATOMIC_RELEASE);
    host::after_signal();
}
// Of no kernel: faults that tests plant.
inline void store_relaxed(u64 address, u32 value) {
    __atomic_store_n((u32*)address, value, __ATOMIC_RELAXED);
    host::after_signal();
}
inline void add_relaxed(u64 address, u32 value) {
    __atomic_fetch_add((u32*)address, value, __ATOMIC_RELAXED);
    host::after_signal();
}
template <class T>
void store_far(T* to, T value) { host::store_far(to, &value, sizeof(T)); }
inline int acquired_here(const int* word) {
    const int value = __atomic_load_n(word, __ATOMIC_ACQUIRE);
    host::after_local_acquire(word);
    return value;
}
inline void release_here(int* word, int value) {
    host::before_local_release(word, false);
    __atomic_store_n(word, value, __ATOMIC_RELEASE);
}
inline int arrive_here(int* word) {
    host::before_local_release(word, true);
    const int before = __atomic_fetch_add(word, 1, __ATOMIC_ACQ_REL);
    host::after_local_acquire(word);
    return before;
}
inline u32 acquired_in_block(const u32* word) { return (u32)acquired_here((const int*)word); }
inline void release_in_block(u32* word, u32 value) { release_here((int*)word, (int)value); }
template <int ID, int THREADS>
void meet() { host::meet(ID, THREADS, true); }
template <int ID, int THREADS>
void arrive() { host::meet(ID, THREADS, false); }
inline u32 dynamic_memory() { return 0; }
inline u64* barrier_at(u32 barrier) { return (u64*)(host::arena() + barrier); }
inline void begin_barrier(u32 barrier) { *barrier_at(barrier) = 0; }
inline void publish_barriers() {}
// The bytes to come are in the lower half, and the phase is the bit above.
inline void expect(u32 barrier, u32 num_bytes) { *barrier_at(barrier) += num_bytes; }
inline bool has_ended(u32 barrier, u32 parity) { return host::has_ended(barrier_at(barrier), parity); }
inline void bring_piece(u32 to, u64 from, u32 num_bytes, u32 barrier) {
    host::bring_piece(host::arena() + to, (const char*)from, num_bytes, barrier_at(barrier));
}
inline void store_piece(u64 to, u32 from, u32 num_bytes) {
    host::store_piece((char*)to, host::arena() + from, num_bytes);
}
inline void end_group() { host::end_group(); }
template <int NUM>
void await_read() { host::await_groups(NUM, false); }
inline void await_stored() { host::await_groups(0, true); }
inline void pass_to_copies() {}
inline void begin_copy(u32 to, u64 from) { host::begin_copy(host::arena() + to, (const char*)from); }
inline void end_copies() { host::end_copies(); }
template <int NUM>
void await_copies() { host::await_copies(NUM); }
inline uint4 load_piece(u32 address) { return *(const uint4*)(host::arena() + address); }
template <class T>
void load_shared(T& value, u32 address) {
    __builtin_memcpy(&value, host::arena() + address, sizeof(T));
}
inline u32 current_lane() { return threadIdx.x % 32; }
inline u64 clock_ns() {
    host::rest();
    return host::now_ns();
}
// To the nearest, ties to even; one that is no number stays so.
inline u32 nearest_bfloat16(float value) {
    const u32 bits = __float_as_uint(value);
    return value != value ? 0x7fff : (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
}
inline u32 as_bfloat16(float low, float high) {
    return nearest_bfloat16(low) | nearest_bfloat16(high) << 16;
}
inline u32 as_float16(float low, float high) {
    return as_bits<u16>((_Float16)low) | (u32)as_bits<u16>((_Float16)high) << 16;
}
inline float of_float16(u16 bits) { return (float)as_bits<_Float16>(bits); }
// To the nearest of up to 448, ties to even; 2**14 + value keeps the nine fraction bits of a small one.
inline u32 nearest_e4m3(float value) {
    const u32 bits = __float_as_uint(value), sign = bits >> 24 & 0x80;
    if (value != value) return sign | 0x7f;
    const float magnitude = value < 0 ? -value : value;
    if (magnitude < 0.015625f) return sign | (__float_as_uint(magnitude + 16384.0f) - 0x46800000u);
    const u32 nearest = ((bits & 0x7fffffff) + 0x7ffff + (bits >> 20 & 1) >> 20) - (120 << 3);
    return sign | (nearest < 0x7e ? nearest : 0x7e);
}
inline u32 as_e4m3(float a, float b, float c, float d) {
    return nearest_e4m3(a) | nearest_e4m3(b) << 8 | nearest_e4m3(c) << 16 | nearest_e4m3(d) << 24;
}
inline u32 larger_magnitudes(u32 a, u32 b) {
    const u32 low = max(a & 0x7fff, b & 0x7fff), high = max(a >> 16 & 0x7fff, b >> 16 & 0x7fff);
    return low | high << 16;
}
inline float quotient_of(float a, float b) { return a / b; }
inline float quotient_by(float a, float b, float) { return a / b; }
inline u32 grown(u32 two) {
    return as_float16(of_float16((u16)two) * 16384.0f, of_float16((u16)(two >> 16)) * 16384.0f);
}
inline float magnitude_of(float value) { return __int_as_float(__float_as_int(value) & 0x7fffffff); }
inline float larger_magnitude(float a, float b) {
    const int x = __float_as_int(a) & 0x7fffffff, y = __float_as_int(b) & 0x7fffffff;
    return __int_as_float(max(x, y));
}
// Seven bits are those of a float16 whose exponent has a larger bias.
inline u32 float16_of_e4m3(u32 code) {
    const u32 magnitude = code & 0x7f;
    const _Float16 value = as_bits<_Float16>((u16)(magnitude << 7)) * (_Float16)256;
    return (magnitude == 0x7f ? 0x7fff : as_bits<u16>(value)) | (code & 0x80) << 8;
}
inline uint2 of_e4m3(u32 codes) {
    u32 numbers[4];
    for (int i = 0; i < 4; ++i) numbers[i] = float16_of_e4m3(codes >> 8 * i & 0xff);
    return {numbers[0] | numbers[1] << 16, numbers[2] | numbers[3] << 16};
}

#ifdef HOST_CUDA_RUNTIME
#include <sched.h>
#include <setjmp.h>
#include <sys/mman.h>
#include <ucontext.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <thread>
#include <vector>

__thread Index3 threadIdx, blockIdx, blockDim, gridDim;

#ifdef HOST_CUDA_WATCHED
extern "C" {
void* __tsan_get_current_fiber();
void* __tsan_create_fiber(unsigned flags);
void __tsan_switch_to_fiber(void* fiber, unsigned flags);
void __tsan_acquire(void* object);
void __tsan_release(void* object);
void __tsan_read_range(void* begin, unsigned long num_bytes);
void __tsan_write_range(void* begin, unsigned long num_bytes);
}
#else
inline void* __tsan_get_current_fiber() { return nullptr; }
inline void* __tsan_create_fiber(unsigned) { return nullptr; }
inline void __tsan_switch_to_fiber(void*, unsigned) {}
inline void __tsan_acquire(void*) {}
inline void __tsan_release(void*) {}
inline void __tsan_read_range(void*, unsigned long) {}
inline void __tsan_write_range(void*, unsigned long) {}
#endif

namespace host {
namespace {

// A report of ThreadSanitizer needs more than a kernel does.
constexpr size_t STACK_BYTES = 256 * 1024;
// A switch from fiber to fiber orders nothing.
constexpr unsigned WITHOUT_ORDER = 1;
constexpr int MAX_BARRIERS = 16;

[[noreturn]] void fail(const char* what) {
    std::fprintf(stderr, "host_cuda: %s (block %u, thread %u)\n", what, blockIdx.x, threadIdx.x);
    std::abort();
}

// By writer: how many of its stores are ordered before what comes next.
typedef std::vector<u32> Clock;

void join(Clock& mine, const Clock& other) {
    if (mine.size() < other.size()) mine.resize(other.size());
    for (size_t i = 0; i < other.size(); ++i) {
        if (mine[i] < other[i]) mine[i] = other[i];
    }
}

struct Store {
    char* to;
    std::vector<char> bytes;
    int writer;
    u32 number;  // of the stores of its writer, from 1
};

// The stores of a weak launch that nobody sees yet.
struct Memory {
    std::mutex mutex;
    std::mt19937 random;
    std::vector<Store> delayed;
    std::map<const void*, Clock> released;
    int num_writers = 0;
    u32 rarity;  // of a delivery that nothing asks for

    void deliver(size_t at) {
        std::swap(delayed[at], delayed.back());
        memcpy(delayed.back().to, delayed.back().bytes.data(), delayed.back().bytes.size());
        delayed.pop_back();
    }

    // Stores of one writer to one address stay in order, as coherence has it: numbers tell.
    template <class F>
    void deliver_if(F is_due) {
        std::vector<Store> due;
        for (size_t at = 0; at < delayed.size();) {
            if (!is_due(delayed[at])) {
                ++at;
                continue;
            }
            due.push_back(std::move(delayed[at]));
            std::swap(delayed[at], delayed.back());
            delayed.pop_back();
        }
        std::shuffle(due.begin(), due.end(), random);
        for (const Store& each : due) memcpy(each.to, each.bytes.data(), each.bytes.size());
    }
};

struct Piece {
    char* to;
    const char* from;
    u32 num_bytes;
    std::vector<char> bytes;  // once they are read
};

struct Load {
    char* to;
    const char* from;
    u32 num_bytes;
    u64* barrier;
};

struct Fiber {
    jmp_buf place;
    ucontext_t start;
    void* watched = nullptr;
    bool is_begun = false;
    int writer = -1;
    u32 num_stores = 0;
    Clock clock;
    std::vector<Piece> open_group;
    std::deque<std::vector<Piece>> groups;
    std::vector<Load> open_copies;
    std::deque<std::vector<Load>> copies;
};

struct Warp {
    int num_arrived = 0, kind = 0, turn = 0;
    u64 values[2][32];
    Clock clock;
};

struct Barrier {
    int num_arrived = 0, threads = 0;
    std::vector<u32> waiting, arrived;
};

// Stacks are used again: fresh pages cost more than a launch.
std::mutex stacks_mutex;
std::multimap<size_t, char*> spare_stacks;

char* take_stacks(size_t num_bytes) {
    std::lock_guard<std::mutex> lock(stacks_mutex);
    const auto found = spare_stacks.find(num_bytes);
    if (found != spare_stacks.end()) {
        char* stacks = found->second;
        spare_stacks.erase(found);
        return stacks;
    }
    void* stacks = mmap(nullptr, num_bytes, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (stacks == MAP_FAILED) fail("no memory for stacks");
    return (char*)stacks;
}

struct Block {
    void (*kernel)(const void*);
    const void* arguments;
    Memory* memory;  // null: the launch is not weak
    std::mt19937 random;
    std::vector<Fiber> fibers;
    std::vector<Warp> warps;
    Barrier barriers[MAX_BARRIERS];
    std::deque<u32> ready;
    std::vector<Load> loads;
    std::vector<char> shared;
    u32 num_left, num_rests = 0;
    jmp_buf end;
    void* watched;  // the thread of the system
};

thread_local Block* block;

Fiber& self() { return block->fibers[threadIdx.x]; }

void begin_fiber();

// Run the next fiber that is ready; the one that calls this runs no more unless it has set its place.
[[noreturn]] void go_on() {
    if (block->ready.empty()) fail("all threads wait for others of the block");
    if (block->memory) {
        std::swap(block->ready[block->random() % block->ready.size()], block->ready.front());
    }
    const u32 next = block->ready.front();
    block->ready.pop_front();
    threadIdx.x = next;
    Fiber& fiber = block->fibers[next];
    __tsan_switch_to_fiber(fiber.watched, WITHOUT_ORDER);
    if (fiber.is_begun) _longjmp(fiber.place, 1);
    fiber.is_begun = true;
    setcontext(&fiber.start);
    fail("setcontext");
}

void leave() {
    const u32 mine = threadIdx.x;
    if (_setjmp(block->fibers[mine].place) == 0) go_on();
}

void begin_fiber() {
    __tsan_acquire(block);
    block->kernel(block->arguments);
    __tsan_release(block);
    if (--block->num_left == 0) {
        __tsan_switch_to_fiber(block->watched, WITHOUT_ORDER);
        _longjmp(block->end, 1);
    }
    block->num_rests = 0;
    go_on();
}

void wake(const std::vector<u32>& threads) {
    for (u32 each : threads) block->ready.push_back(each);
}

// Deliver some store of the launch, now and then.
void disturb() {
    Memory* memory = block->memory;
    if (!memory) return;
    std::lock_guard<std::mutex> lock(memory->mutex);
    if (memory->delayed.size() && memory->random() % memory->rarity == 0) {
        memory->deliver(memory->random() % memory->delayed.size());
    }
}

int writer_of(Fiber& fiber) {
    if (fiber.writer < 0) fiber.writer = block->memory->num_writers++;
    return fiber.writer;
}

// With the mutex.
void delay(Fiber& fiber, char* to, std::vector<char> bytes) {
    const int writer = writer_of(fiber);
    if ((int)fiber.clock.size() <= writer) fiber.clock.resize(writer + 1);
    fiber.clock[writer] = ++fiber.num_stores;
    // An earlier store to the same bytes must not come later.
    block->memory->deliver_if(
        [&](const Store& each) { return each.writer == writer && each.to == to; });
    block->memory->delayed.push_back({to, std::move(bytes), writer, fiber.num_stores});
}

void read(Piece& piece) {
    if (piece.bytes.empty()) piece.bytes.assign(piece.from, piece.from + piece.num_bytes);
}

void copy(char* to, const char* from, u32 num_bytes) {
    __tsan_read_range((void*)from, num_bytes);
    __tsan_write_range(to, num_bytes);
    memcpy(to, from, num_bytes);
}

void complete(const Load& load) {
    copy(load.to, load.from, load.num_bytes);
    __tsan_release(load.barrier);
    *load.barrier -= load.num_bytes;
    if ((u32)*load.barrier == 0) *load.barrier ^= 1ull << 32;
}

void run_block(Block& mine, u32 index, u32 blocks, u32 threads, u32 shared_bytes) {
    block = &mine;
    blockIdx.x = index, gridDim.x = blocks, blockDim.x = threads;
    mine.shared.assign(shared_bytes + 16, (char)0xff);
    mine.warps.resize((threads + 31) / 32);
    mine.num_left = threads;
    char* stacks = take_stacks(threads * STACK_BYTES);
    for (u32 i = 0; i < threads; ++i) {
        ucontext_t& start = mine.fibers[i].start;
        getcontext(&start);
        start.uc_stack.ss_sp = stacks + i * STACK_BYTES;
        start.uc_stack.ss_size = STACK_BYTES;
        start.uc_link = nullptr;
        makecontext(&start, begin_fiber, 0);
        mine.ready.push_back(i);
    }
    mine.watched = __tsan_get_current_fiber();
    __tsan_release(block);
    if (_setjmp(mine.end) == 0) go_on();
    __tsan_acquire(block);
    std::lock_guard<std::mutex> lock(stacks_mutex);
    spare_stacks.emplace(threads * STACK_BYTES, stacks);
}

}  // namespace

const u64* exchange(int kind, u64 value) {
    disturb();
    Warp& warp = block->warps[threadIdx.x / 32];
    if (warp.num_arrived == 0) warp.kind = kind;
    if (warp.kind != kind) fail("lanes of a warp are at different collectives");
    u64* values = warp.values[warp.turn & 1];
    values[threadIdx.x % 32] = value;
    if (++warp.num_arrived == 32) {
        warp.num_arrived = 0;
        ++warp.turn;
        const u32 first = threadIdx.x / 32 * 32;
        for (u32 each = first; each < first + 32; ++each) {
            if (each != threadIdx.x) block->ready.push_back(each);
        }
    } else {
        leave();
    }
    return values;
}

void synchronize_warp() {
    Warp& warp = block->warps[threadIdx.x / 32];
    if (block->memory) {
        if (warp.num_arrived == 0) warp.clock.clear();
        join(warp.clock, self().clock);
    }
    __tsan_release(&warp);
    exchange(-1, 0);
    __tsan_acquire(&warp);
    if (block->memory) join(self().clock, warp.clock);
}

void meet(int id, int threads, bool waits) {
    disturb();
    if (id >= MAX_BARRIERS) fail("a barrier whose number is too large");
    Barrier& barrier = block->barriers[id];
    if (barrier.num_arrived == 0) barrier.threads = threads;
    if (barrier.threads != threads) fail("threads expect different numbers at a barrier");
    barrier.arrived.push_back(threadIdx.x);
    __tsan_release(&barrier);
    if (++barrier.num_arrived < threads) {
        if (!waits) return;
        barrier.waiting.push_back(threadIdx.x);
        leave();
        __tsan_acquire(&barrier);
        return;
    }
    if (waits) __tsan_acquire(&barrier);
    if (block->memory) {
        Clock all;
        for (u32 each : barrier.arrived) join(all, block->fibers[each].clock);
        for (u32 each : barrier.waiting) block->fibers[each].clock = all;
        if (waits) self().clock = all;
    }
    barrier.num_arrived = 0;
    block->num_rests = 0;
    wake(barrier.waiting);
    barrier.waiting.clear();
    barrier.arrived.clear();
}

void yield() {
    disturb();
    block->ready.push_back(threadIdx.x);
    leave();
}

void rest() {
    if (threadIdx.x % 32) return;
    if (++block->num_rests < 16) sched_yield();
    else usleep(50);
}

char* arena() { return (char*)(((u64)block->shared.data() + 15) / 16 * 16); }

u64 now_ns() {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(
        std::chrono::steady_clock::now().time_since_epoch()).count();
}

void store_far(void* to, const void* value, int num_bytes) {
    if (!block->memory) {
        __tsan_write_range(to, num_bytes);
        memcpy(to, value, num_bytes);
        return;
    }
    std::lock_guard<std::mutex> lock(block->memory->mutex);
    delay(self(), (char*)to, {(const char*)value, (const char*)value + num_bytes});
}

void before_release() {
    Memory* memory = block->memory;
    if (!memory) return;
    std::lock_guard<std::mutex> lock(memory->mutex);
    const Clock& clock = self().clock;
    memory->deliver_if([&](const Store& each) {
        return each.writer < (int)clock.size() && each.number <= clock[each.writer];
    });
}

void after_signal() {
    // Time for the peer to look before anything else is there.
    if (block->memory && block->random() % 8 == 0) usleep(200);
}

void before_local_release(const void* word, bool joins) {
    Memory* memory = block->memory;
    if (!memory) return;
    std::lock_guard<std::mutex> lock(memory->mutex);
    if (joins) join(memory->released[word], self().clock);
    else memory->released[word] = self().clock;
}

void after_local_acquire(const void* word) {
    Memory* memory = block->memory;
    if (!memory) return;
    std::lock_guard<std::mutex> lock(memory->mutex);
    const auto found = memory->released.find(word);
    if (found != memory->released.end()) join(self().clock, found->second);
}

void store_piece(char* to, const char* from, u32 num_bytes) {
    if (block->memory) self().open_group.push_back({to, from, num_bytes, {}});
    else copy(to, from, num_bytes);
}

void end_group() {
    if (!block->memory) return;
    self().groups.push_back(std::move(self().open_group));
    self().open_group.clear();
}

void await_groups(int most, bool are_stored) {
    if (!block->memory) return;
    Fiber& fiber = self();
    for (size_t i = 0; i + most < fiber.groups.size(); ++i) {
        for (Piece& piece : fiber.groups[i]) read(piece);
    }
    if (!are_stored) return;
    std::lock_guard<std::mutex> lock(block->memory->mutex);
    for (auto& group : fiber.groups) {
        for (Piece& piece : group) delay(fiber, piece.to, std::move(piece.bytes));
    }
    fiber.groups.clear();
}

void bring_piece(char* to, const char* from, u32 num_bytes, u64* barrier) {
    const Load load = {to, from, num_bytes, barrier};
    if (block->memory) block->loads.push_back(load);
    else complete(load);
}

// A copy ends at any time until it is awaited.
void begin_copy(char* to, const char* from) {
    if (block->memory && block->random() % 2) self().open_copies.push_back({to, from, 16, nullptr});
    else copy(to, from, 16);
}

void end_copies() {
    if (!block->memory) return;
    self().copies.push_back(std::move(self().open_copies));
    self().open_copies.clear();
}

void await_copies(u32 most) {
    for (Fiber& fiber = self(); fiber.copies.size() > most; fiber.copies.pop_front()) {
        for (const Load& each : fiber.copies.front()) copy(each.to, each.from, each.num_bytes);
    }
}

bool has_ended(const u64* barrier, u32 parity) {
    std::vector<Load>& loads = block->loads;
    if (loads.size() && block->random() % 2) {
        std::swap(loads[block->random() % loads.size()], loads.back());
        complete(loads.back());
        loads.pop_back();
    }
    const bool ended = (*barrier >> 32 & 1) != parity;
    if (ended) __tsan_acquire((void*)barrier);
    else yield();
    return ended;
}

void run(void (*kernel)(const void*), const void* arguments, u32 blocks, u32 threads, u32 shared_bytes,
         u32 seed) {
    // Kept for the next launch of this rank, which follows this one: they are slow to create.
    thread_local std::vector<void*> watched;
    while (watched.size() < blocks * threads) watched.push_back(__tsan_create_fiber(0));
    Memory memory;
    memory.random.seed(seed);
    memory.rarity = 1u << memory.random() % 20;
    std::vector<Block> each(blocks);
    std::vector<std::thread> running;
    for (u32 index = 0; index < blocks; ++index) {
        each[index].kernel = kernel;
        each[index].arguments = arguments;
        each[index].memory = seed ? &memory : nullptr;
        each[index].random.seed(seed + index);
        each[index].fibers.resize(threads);
        for (u32 i = 0; i < threads; ++i) each[index].fibers[i].watched = watched[index * threads + i];
        running.emplace_back(run_block, std::ref(each[index]), index, blocks, threads, shared_bytes);
    }
    for (std::thread& one : running) one.join();
    // What nothing ordered is late for whoever was told that it is there.
    if (memory.delayed.size()) usleep(3000);
    memory.deliver_if([](const Store&) { return true; });
}

}  // namespace host
#endif
