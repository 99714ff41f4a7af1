// Combine of normal mode over NVLink: the sums of each row's slots are sent to the rank of its token,
// and added up there.
//
// Senders sum the slots of a row in k order, in float32, round once, and store the sum at the index of
// its token on the token's rank. Reducers there add the sums of the ranks up, in rank order, in float32,
// and round once. A signal of each item, ITEM_ROWS rows of one source, lets reducers follow while the
// wire is busy.
//
// With GROUPS > 1 the experts of a rank form groups of GROUP_EXPERTS consecutive experts, and a row is sent for
// each group in which the token has slots, so that sums are the same on any number of ranks. Places, signals of
// items and scalars remain those of ranks; a reducer has a lane for each group, and finds in the ids of the
// token which rows there are.
//
// With IS_QUANTIZED a sum is rounded as rows are, and sent as codes with scales, see codes.cu; a reducer
// multiplies them again. They are in pieces of the same columns as those of rows: the scales of a piece,
// then its codes. With HAS_ROW_SCALE the scale of the row follows its pieces. No code is known before the
// whole sum: a warp keeps it, rounded as rows are, in memory of its own, and then reads it again.
//
// Memory order: a rank signals that it has begun a combine, so it no longer reads the sums of the
// previous one. A rank that has this signal stores there, and releases the number of the combine into
// the signal of the item, which the reducer acquires.
//
// The warps of a block have three roles. Senders take the rows of an item in turn. A releaser sets the
// signals of items that all senders of its block have sent: its fence waits for the wire, and senders
// need not. Reducers take a token each, acquire the signals of the items that hold its sums, and add
// them up. Senders wait for no reducer, and become reducers when all is sent. A launch has no more blocks
// than SMs: otherwise ranks would wait for a block that does not run yet.
//
// Each warp has a ring of shared memory into which the copy engine brings pieces of rows: bytes in flight
// decide how fast a few SMs read, and registers would hold fewer. Pieces of a sender's next row are in
// flight before the current row is summed. With IS_QUANTIZED, which takes more arithmetic, lanes copy the
// pieces: that needs fewer instructions than to begin a copy of the engine.
//
// Constants of combine.py: ROW_KIND (of the numbers in a row: BFLOAT16, FLOAT16 or FLOAT32), HIDDEN (numbers
// in a row of a multiple of 16 bytes), GROUP_EXPERTS (WORLD * GROUPS is at most 32), SENDERS, REDUCERS,
// STAGES, PIECE (bytes, a multiple of 512), IS_QUANTIZED, and those of codes.cu.

constexpr int NUMBER_BYTES = ROW_KIND == FLOAT32 ? 4 : 2;
// Numbers that 16 bytes hold.
constexpr int NUMBERS = 16 / NUMBER_BYTES;
constexpr int ROW_BYTES = NUMBER_BYTES * HIDDEN;
constexpr int PIECES = (ROW_BYTES + PIECE - 1) / PIECE;
// At most the pieces of a row, so that pieces in flight are of one row and of the next.
constexpr int RING = STAGES < PIECES ? STAGES : PIECES;
// A ring has a barrier for each piece. Pieces begin at multiples of 128 bytes, as banks of shared memory do.
constexpr int RING_BYTES = RING * PIECE + (8 * RING + 127) / 128 * 128;
// Vectors of 16 bytes that a lane adds of a piece.
constexpr int UNROLL = PIECE / 512;
// One warp is the releaser.
constexpr int WARPS = SENDERS + 1 + REDUCERS;
// A lane's part of a vector of the warp.
typedef uint4 Numbers;
struct Codes {
    u32 codes[HAS_ROW_SCALE ? 1 : NUMBERS / 4];
    u32 scale;
};
// Sums whose codes are not known yet.
struct Kept {
    Numbers* memory;  // of all senders
    u32 first;        // vector of a lane, whose vectors are 32 apart
    int largest;      // the bits of the largest magnitude of finite blocks
};
template <bool>
struct SumOf { typedef Numbers type; };
template <>
struct SumOf<true> { typedef Codes type; };
typedef SumOf<IS_QUANTIZED>::type Sum;
template <class Part>
constexpr bool IS_CODES = false;
template <>
constexpr bool IS_CODES<Codes> = true;
template <>
constexpr bool IS_CODES<Kept> = true;
constexpr int SUMS_COUNTER = IS_QUANTIZED ? 5 : 3;
// Blocks of a vector of the warp, and the bytes of a piece's scales.
constexpr int BLOCKS = 32 * NUMBERS / BLOCK;
constexpr int PIECE_SCALES = UNROLL * BLOCKS * SCALE_BYTES_OF_BLOCK;
// The bytes of a piece and of a row, by what they hold.
template <class Part>
constexpr int PIECE_BYTES = PIECE;
template <>
constexpr int PIECE_BYTES<Codes> = PIECE_SCALES + PIECE / NUMBER_BYTES / CODES_OF_BYTE;
template <class Part>
constexpr int BYTES_OF_ROW = ROW_BYTES;
template <>
constexpr int BYTES_OF_ROW<Codes> = (PIECES * PIECE_SCALES + HIDDEN / CODES_OF_BYTE + 15) / 16 * 16;
// The stages of a ring, by what they hold: more of codes, whose pieces are short.
template <class Part>
constexpr int STAGES_OF = RING;
template <>
constexpr int STAGES_OF<Codes> = RING * PIECE / PIECE_BYTES<Codes> < PIECES
    ? RING * PIECE / PIECE_BYTES<Codes> : PIECES;

struct Arguments {
    const char* rows;         // of rows_stride bytes each
    const float* weights;     // of each slot, or none
    const int* slots_of_row;  // or none: rows are sums already, and GROUPS is 1
    const float* scalars;     // of each row, or none
    const int* rows_from;
    const int* row_base;
    const int* has_failed;
    const int* places;
    const float* bias;  // of each token, or none
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
    int buffer_index;  // of the receive buffer whose rows were used, or -1
    int num_tokens;
    int max_polls;
    const int* first_slot;  // of each expert; read with GROUPS > 1
    const i64* ids;         // of each token; the same
    Numbers* kept;          // PIECES * PIECE bytes of each sender; used with HAS_ROW_SCALE
};

// The numbers of a vector, as float32.
__device__ void unpack(float (&values)[NUMBERS], uint4 v, float = 1.0f) {
    const u32 words[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        if constexpr (ROW_KIND == FLOAT32) {
            values[i] = __uint_as_float(words[i]);
        } else if constexpr (ROW_KIND == FLOAT16) {
            values[2 * i] = of_float16((u16)words[i]);
            values[2 * i + 1] = of_float16((u16)(words[i] >> 16));
        } else {
            values[2 * i] = __uint_as_float(words[i] << 16);
            values[2 * i + 1] = __uint_as_float(words[i] & 0xffff0000u);
        }
    }
}

__device__ uint4 packed(const float (&sum)[NUMBERS]) {
    u32 words[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        if constexpr (ROW_KIND == FLOAT32) words[i] = __float_as_uint(sum[i]);
        else if constexpr (ROW_KIND == FLOAT16) words[i] = as_float16(sum[2 * i], sum[2 * i + 1]);
        else words[i] = as_bfloat16(sum[2 * i], sum[2 * i + 1]);
    }
    return {words[0], words[1], words[2], words[3]};
}

// `of_row`: the scale of the row, where it has one.
__device__ void unpack(float (&values)[NUMBERS], const Codes& part, float of_row) {
    const float scale = scale_of_bits(part.scale);
    dequantize(values, part.codes, HAS_ROW_SCALE ? __fmul_rn(scale, of_row) : scale);
}

// Sums that become codes are in chunks of 16 columns a lane: their codes are a vector, and few lanes have a
// block. A chunk has CHUNK_VECTORS vectors of numbers, a piece CHUNKS chunks of each lane. A lane takes
// vector number i of a chunk at i ^ turn_of(lane), because the eight lanes that are served at the same time
// shall read from all banks of shared memory.
constexpr int CHUNK_VECTORS = 16 / NUMBERS;
constexpr int CHUNKS = UNROLL / CHUNK_VECTORS;
// Whether all pieces of a row are whole.
constexpr bool IS_WHOLE = ROW_BYTES % PIECE == 0;

__device__ u32 turn_of(u32 lane) { return lane * CHUNK_VECTORS / 8 % CHUNK_VECTORS; }

// The first byte of a lane's vector u in a piece of numbers whose sums become `To`.
template <class To>
__device__ u32 byte_of(u32 lane, int u) {
    if constexpr (!IS_CODES<To>) return 16 * (lane + 32 * u);
    const u32 chunk = u / CHUNK_VECTORS * (512 * CHUNK_VECTORS);
    return ((16 * (CHUNK_VECTORS * lane + turn_of(lane))) ^ (16 * (u % CHUNK_VECTORS))) + chunk;
}

// Load a lane's part of vector u of a piece in shared memory, for sums that become `To`.
template <class To>
__device__ void load_part(Numbers& part, u32 piece, u32 lane, int u) {
    part = load_piece(piece + byte_of<To>(lane, u));
}

template <class To>
__device__ void load_part(Codes& part, u32 piece, u32 lane, int u) {
    const int block = BLOCKS * u + lane * NUMBERS / BLOCK;
    load_shared(part.codes, piece + PIECE_SCALES + NUMBERS * (lane + 32 * u) / CODES_OF_BYTE / 4 * 4);
    // Two lanes share a word.
    if (NUMBERS / CODES_OF_BYTE < 4) part.codes[0] >>= lane % 2 * 16;
    load_shared(part.scale, piece + block * SCALE_BYTES_OF_BLOCK / 4 * 4);
    if (SCALE_BYTES_OF_BLOCK == 1) part.scale = part.scale >> block % 4 * 8 & 0xff;
}

// Rounded twice, as plain torch does: a product, unless all weights are 1, and a sum, unless the vector is
// the first one. The weight of codes is the scale of their row.
template <bool HAS_WEIGHTS, bool IS_FIRST, class Part>
__device__ void add(float (&sum)[UNROLL][NUMBERS], const Part (&parts)[UNROLL], float weight) {
#pragma unroll
    for (int u = 0; u < UNROLL; ++u) {
        float values[NUMBERS];
        unpack(values, parts[u], weight);
#pragma unroll
        for (int i = 0; i < NUMBERS; ++i) {
            const float value = HAS_WEIGHTS ? __fmul_rn(values[i], weight) : values[i];
            sum[u][i] = IS_FIRST ? value : __fadd_rn(sum[u][i], value);
        }
    }
}

__device__ void load_bias(float (&sum)[NUMBERS], const float* from) {
#pragma unroll
    for (int i = 0; i < NUMBERS; i += 4) {
        const float4 four = *(const float4*)(from + i);
        sum[i] = four.x, sum[i + 1] = four.y, sum[i + 2] = four.z, sum[i + 3] = four.w;
    }
}

// Begin the sums of a piece, which is `begin` bytes into a row, by the bias, or by 0.
__device__ void begin_sums(float (&sum)[UNROLL][NUMBERS], const float* bias, int begin) {
#pragma unroll
    for (int u = 0; u < UNROLL; ++u) {
#pragma unroll
        for (int i = 0; i < NUMBERS; ++i) sum[u][i] = 0.0f;
        const int at = begin + 16 * ((int)threadIdx.x % 32 + 32 * u);
        if (bias != nullptr && at < ROW_BYTES) load_bias(sum[u], bias + at / NUMBER_BYTES);
    }
}

// Store the sums of piece `piece` of a row at `to`.
__device__ void store_sums(const float (&sum)[UNROLL][NUMBERS], Numbers* to, int piece) {
    const int lane = threadIdx.x % 32;
#pragma unroll
    for (int u = 0; u < UNROLL; ++u) {
        const int at = piece * PIECE + 16 * (lane + 32 * u);
        if (at < ROW_BYTES) store_far((uint4*)((char*)to + at), packed(sum[u]));
    }
}

// Vector u of the sums of a lane, rounded as rows are. Of the piece, `left` columns are in the row.
__device__ Numbers rounded(const float (&sum)[UNROLL][NUMBERS], int u, u32 lane, int left) {
    Numbers v = packed(sum[u]);
    // Behind the end of a row is what was in shared memory before.
    if (!IS_WHOLE && (int)byte_of<Codes>(lane, u) / NUMBER_BYTES >= left) v = {0, 0, 0, 0};
    return v;
}

// Unpack the vectors of chunks, `vector_at(u)` each, and find the largest magnitude of each chunk.
template <int NUM, class F>
__device__ void unpack_chunks(float (&values)[NUM][16], float (&largest)[NUM], F vector_at) {
    u32 pairs[NUM];
#pragma unroll
    for (int u = 0; u < NUM * CHUNK_VECTORS; ++u) {
        const int c = u / CHUNK_VECTORS, i = u % CHUNK_VECTORS;
        const Numbers v = vector_at(u);
        float numbers[NUMBERS];
        unpack(numbers, v);
#pragma unroll
        for (int n = 0; n < NUMBERS; ++n) values[c][NUMBERS * i + n] = numbers[n];
        const u32 of_vector = larger_magnitudes(larger_magnitudes(v.x, v.y), larger_magnitudes(v.z, v.w));
        pairs[c] = i ? larger_magnitudes(pairs[c], of_vector) : of_vector;
    }
#pragma unroll
    for (int c = 0; c < NUM; ++c) {
        if (ROW_KIND == BFLOAT16) {
            largest[c] = larger_magnitude(__uint_as_float(pairs[c] << 16),
                                          __uint_as_float(pairs[c] & 0xffff0000u));
        } else {
            largest[c] = larger_magnitude(values[c][0], values[c][1]);
#pragma unroll
            for (int n = 2; n < 16; ++n) largest[c] = larger_magnitude(largest[c], values[c][n]);
        }
    }
}

// Return the codes of a chunk in the order of columns: vector number i was i ^ turn.
__device__ uint4 in_order(const u32 (&codes)[4], u32 turn) {
    u32 words[4] = {codes[0], codes[1], codes[2], codes[3]};
#pragma unroll
    for (int bit = 1; bit < CHUNK_VECTORS; bit *= 2) {
        // Words of a vector.
        constexpr int WORDS = NUMBERS / 4;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int other = i ^ bit * WORDS;
            if (other < i) continue;
            const u32 first = turn & bit ? words[other] : words[i];
            words[other] = turn & bit ? words[i] : words[other];
            words[i] = first;
        }
    }
    return {words[0], words[1], words[2], words[3]};
}

// Of 8 bits, whose scales depend on blocks alone.
template <class To>
__device__ void store_sums(const float (&sum)[UNROLL][NUMBERS], To* to, int piece) {
    const u32 lane = current_lane();
    const int left = HIDDEN - piece * (PIECE / NUMBER_BYTES);
    float values[CHUNKS][16], largest[CHUNKS];
    unpack_chunks(values, largest, [&](int u) { return rounded(sum, u, lane, left); });
    u32 codes[CHUNKS][4];
    const u32 scale = quantize(codes, values, largest);
    char* scales = (char*)to + piece * PIECE_BYTES<Codes>;
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) {
        const int at = 512 * c + 16 * (int)lane;
        const uint4 ordered = in_order(codes[c], turn_of(lane));
        if (IS_WHOLE || at < left) store_far((uint4*)(scales + PIECE_SCALES + at), ordered);
    }
    // The first lanes of a block have the scales of its chunks.
    const u32 block = (512 * (lane % CHUNKS) + 16 * lane) / BLOCK;
    if (lane % (BLOCK / 16) >= CHUNKS || (!IS_WHOLE && (int)block * BLOCK >= left)) return;
    if (HAS_EXPONENTS) store_far((unsigned char*)scales + block, (unsigned char)scale);
    else store_far((u32*)scales + block, scale);
}

// Keep the sums of a piece, with the vectors of a chunk in the order of columns.
__device__ void store_sums(const float (&sum)[UNROLL][NUMBERS], Kept* to, int piece) {
    const u32 lane = current_lane();
    const int left = HIDDEN - piece * (PIECE / NUMBER_BYTES);
    float values[CHUNKS][16], largest[CHUNKS];
    unpack_chunks(values, largest, [&](int u) {
        const Numbers v = rounded(sum, u, lane, left);
        to->memory[to->first + 32 * (piece * UNROLL + (u ^ turn_of(lane)))] = v;
        return v;
    });
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) {
        const int bits = __float_as_int(largest[c]);
        if (bits < INFINITY_BITS) to->largest = max(to->largest, bits);
    }
}

// Store the codes and scales of the sums that are kept, when all of their row are. By all lanes.
__device__ void store_codes(const Kept& kept, char* to) {
    const u32 lane = current_lane();
    const RowScale row = scale_of_row(__reduce_max_sync(ALL_LANES, kept.largest));
    if (lane == 0) store_far((float*)(to + BYTES_OF_ROW<Codes>), row.scale);
    const Numbers* vectors = kept.memory + kept.first;
    Numbers next[CHUNK_VECTORS];
#pragma unroll
    for (int i = 0; i < CHUNK_VECTORS; ++i) next[i] = vectors[32 * i];
    char* codes_to = to + PIECE_SCALES + 8 * lane;
    char* scales_to = to + lane;
#pragma unroll 1
    for (int piece = 0; piece < PIECES; ++piece) {
#pragma unroll
        for (int c = 0; c < CHUNKS; ++c) {
            // A chunk of this lane is a block.
            float values[1][16], largest[1];
            unpack_chunks(values, largest, [&](int i) { return next[i]; });
            if (c + 1 < CHUNKS || piece + 1 < PIECES) vectors += 32 * CHUNK_VECTORS;
#pragma unroll
            for (int i = 0; i < CHUNK_VECTORS; ++i) next[i] = vectors[32 * i];
            u32 codes[2];
            const u32 scale = quantize(codes, values[0], largest[0], row);
            const int at = 512 * c + 16 * (int)lane;
            if (!IS_WHOLE && at >= HIDDEN - piece * (PIECE / NUMBER_BYTES)) continue;
            store_far((uint2*)(codes_to + 256 * c), uint2{codes[0], codes[1]});
            store_far((unsigned char*)scales_to + 32 * c, (unsigned char)scale);
        }
        codes_to += PIECE_BYTES<Codes>;
        scales_to += PIECE_BYTES<Codes>;
    }
}

// Rows that are added up: one of each lane in `mask`, with its address and its weight.
struct Rows {
    u64 from;
    float weight;
    u32 mask;
    int group;  // of the lane's row, or of all
};

// The pieces that a warp has in flight; all lanes hold the same.
struct Ring {
    u32 memory;  // of RING pieces and their barriers, in shared memory
    int stage;   // of the next piece to be read
    u32 parity;
    bool is_begun;  // pieces of the next row are in flight
    u32 left;       // lanes whose rows' current piece is not brought in yet
    int piece;      // that is brought in
};

// The address of the barrier of a stage.
__device__ u32 barrier_of(const Ring& ring, int stage) {
    return ring.memory + RING * PIECE + 8 * stage;
}

// Bring in the piece that is `at` bytes into the row at `from`, as a group of copies.
template <class From>
__device__ void bring_by_lanes(u32 to, u64 from, int at) {
    const int begin = 16 * (threadIdx.x % 32);
#pragma unroll
    for (int i = 0; i < PIECE_BYTES<From>; i += 512) {
        const bool is_of_piece = i + 512 <= PIECE_BYTES<From> || begin < PIECE_BYTES<From> - i;
        const bool is_of_row = BYTES_OF_ROW<From> == PIECES * PIECE_BYTES<From>
            || at + i + begin < BYTES_OF_ROW<From>;
        if (is_of_piece && is_of_row) begin_copy(to + begin + i, from + (at + begin) + i);
    }
    end_copies();
}

// Begin to bring in the next piece of `rows`, into a stage that was read.
template <class From>
__device__ void bring(Ring& ring, const Rows& rows, int stage) {
    const int at = ring.piece * PIECE_BYTES<From>;
    if constexpr (IS_QUANTIZED) {
        bring_by_lanes<From>(ring.memory + PIECE_BYTES<From> * stage,
                             __shfl_sync(ALL_LANES, rows.from, __ffs(ring.left) - 1), at);
    } else if ((int)threadIdx.x % 32 == __ffs(ring.left) - 1) {
        // The lane that knows where the row begins loads the piece.
        const u32 num_bytes = min(PIECE_BYTES<From>, BYTES_OF_ROW<From> - at);
        const u32 barrier = barrier_of(ring, stage);
        expect(barrier, num_bytes);
        bring_piece(ring.memory + PIECE * stage, rows.from + at, num_bytes, barrier);
    }
    ring.left &= ring.left - 1;
    if (!ring.left) {
        ring.left = rows.mask;
        ++ring.piece;
    }
}

// Store at `to` the sum of `bias`, where there is one, and of `rows` in the order of lanes. Begin to bring
// in the rows of `next`, if there are any, at the same time. By all lanes of the warp.
template <bool HAS_WEIGHTS, class From, class To>
__device__ void add_rows(Ring& ring, const Rows& rows, const Rows& next, const float* bias, To* to) {
    if (rows.mask && !ring.is_begun) {
        ring.left = rows.mask;
        ring.piece = 0;
        int stage = ring.stage;
#pragma unroll 1
        for (int i = 0; i < STAGES_OF<From>; ++i) {
            bring<From>(ring, rows, stage);
            stage = stage + 1 == STAGES_OF<From> ? 0 : stage + 1;
        }
    }
    bool brings_next = false;
    const u32 lane = IS_QUANTIZED ? current_lane() : threadIdx.x % 32;
#pragma unroll 1
    for (int piece = 0; piece < PIECES; ++piece) {
        float sum[UNROLL][NUMBERS];
        // Without a bias the first row begins the sums.
        if (bias != nullptr || !rows.mask) {
            begin_sums(sum, bias, piece * PIECE);
            // The compiler keeps the branch, in place of a selection for each number.
            if (IS_QUANTIZED) __syncwarp();
        }
        u32 left = rows.mask;
#pragma unroll 1
        while (left) {
            float weight = 1.0f;
            if (HAS_WEIGHTS || (HAS_ROW_SCALE && IS_CODES<From>)) {
                weight = __shfl_sync(ALL_LANES, rows.weight, __ffs(left) - 1);
            }
            const bool is_first = bias == nullptr && left == rows.mask;
            left &= left - 1;
            if constexpr (IS_QUANTIZED) {
                await_copies<STAGES_OF<From> - 1>();
                // The copies of all lanes are there.
                __syncwarp();
            } else {
                while (!has_ended(barrier_of(ring, ring.stage), ring.parity)) {
                }
            }
            From parts[UNROLL];
#pragma unroll
            for (int u = 0; u < UNROLL; ++u) {
                load_part<To>(parts[u], ring.memory + PIECE_BYTES<From> * ring.stage, lane, u);
            }
            if (is_first) add<HAS_WEIGHTS, true>(sum, parts, weight);
            else add<HAS_WEIGHTS, false>(sum, parts, weight);
            // All lanes have read the piece.
            __syncwarp();
            if (!brings_next && ring.piece == PIECES) {
                brings_next = true;
                ring.left = next.mask;
                ring.piece = 0;
            }
            if (!brings_next) bring<From>(ring, rows, ring.stage);
            else if (next.mask) bring<From>(ring, next, ring.stage);
            // One group of copies for each piece that was read.
            else if (IS_QUANTIZED) end_copies();
            if (++ring.stage == STAGES_OF<From>) {
                ring.stage = 0;
                ring.parity ^= 1;
            }
        }
        store_sums(sum, to, piece);
    }
    ring.is_begun = rows.mask ? next.mask != 0 : ring.is_begun;
}

// Write a row of NaN.
__device__ void write_void(char* to) {
    const u32 both = ROW_KIND == FLOAT32 ? 0x7fc00000u : ROW_KIND == FLOAT16 ? 0x7e007e00u : 0x7fc07fc0u;
#pragma unroll 1
    for (int at = 16 * (threadIdx.x % 32); at < ROW_BYTES; at += 512) {
        *(uint4*)(to + at) = {both, both, both, both};
    }
}

// A row of a warp of senders, which sends each SENDERS-th row of items p, p + P, ... of block p.
struct Cursor {
    int number;  // of the item, over all sources
    int place;   // among the rows of the source
    int end;     // of the item
};

// Each rank begins with itself, so that not all store to the same rank.
__device__ int source_of(const Arguments& a, int number) { return (number + a.rank) % WORLD; }

__device__ bool is_sent(const Arguments& a, int number) {
    const int source = source_of(a, number);
    return number / WORLD * ITEM_ROWS < a.rows_from[source] && takes_part(a, source);
}

// Go to the next row, or past the last one.
__device__ void advance(const Arguments& a, Cursor& at, int num_items) {
    at.place += SENDERS;
    while (at.place >= at.end && at.number < num_items) {
        at.number += gridDim.x;
        if (at.number < num_items && is_sent(a, at.number)) {
            const int item = at.number / WORLD;
            at.place = item * ITEM_ROWS + threadIdx.x / 32;
            at.end = min((item + 1) * ITEM_ROWS, a.rows_from[source_of(a, at.number)]);
        }
    }
}

// The slot of each lane, or -1: no slot, or the cursor is past the last row.
__device__ int slot_at(const Arguments& a, const Cursor& at, int num_items) {
    const int lane = threadIdx.x % 32;
    if (at.number >= num_items) return -1;
    const i64 row = a.row_base[source_of(a, at.number)] + at.place;
    if (a.slots_of_row == nullptr) return lane == 0 ? (int)row : -1;
    return lane < TOP_K ? a.slots_of_row[row * TOP_K + lane] : -1;
}

// The group of a slot, among those of this rank.
__device__ int group_of(const Arguments& a, int slot) {
    int group = 0;
#pragma unroll
    for (int step = 16; step; step /= 2) {
        const int next = group + step;
        if (next < GROUPS && slot >= a.first_slot[next * GROUP_EXPERTS]) group = next;
    }
    return group;
}

__device__ Rows rows_of(const Arguments& a, int slot) {
    Rows rows = {(u64)a.rows + (i64)slot * a.rows_stride, 1.0f,
                 __ballot_sync(ALL_LANES, slot >= 0), group_of(a, slot)};
    if (slot >= 0 && a.weights != nullptr) rows.weight = a.weights[slot];
    return rows;
}

// Split off the rows of the lowest group.
__device__ Rows take_group(Rows& rows) {
    Rows part = rows;
    if (GROUPS > 1) {
        const bool is_left = rows.mask >> threadIdx.x % 32 & 1;
        part.group = __reduce_min_sync(ALL_LANES, is_left ? rows.group : GROUPS - 1);
        part.mask = __ballot_sync(ALL_LANES, is_left && rows.group == part.group);
    }
    rows.mask &= ~part.mask;
    return part;
}

// Send a sum to `to`, and begin to bring in the rows of `next`.
template <bool HAS_WEIGHTS>
__device__ void send_sum(const Arguments& a, Ring& ring, const Rows& rows, const Rows& next, char* to) {
    if constexpr (HAS_ROW_SCALE) {
        const u32 sender = blockIdx.x * SENDERS + threadIdx.x / 32;
        Kept kept = {a.kept, sender * (PIECES * UNROLL * 32) + current_lane(), 0};
        add_rows<HAS_WEIGHTS, Numbers>(ring, rows, next, nullptr, &kept);
        store_codes(kept, to);
    } else {
        add_rows<HAS_WEIGHTS, Numbers>(ring, rows, next, nullptr, (Sum*)to);
    }
}

// Send items p, p + P, ... of block p: sums of ITEM_ROWS rows of one source each.
__device__ void send(const Arguments& a, Ring& ring, u32* num_completed, int num_items) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    // Slots are looked up two rows ahead, weights one.
    Cursor ahead = {(int)blockIdx.x - (int)gridDim.x, 0, 0};
    advance(a, ahead, num_items);
    Rows rows = rows_of(a, slot_at(a, ahead, num_items));
    Rows part = take_group(rows);
    advance(a, ahead, num_items);
    int slot = slot_at(a, ahead, num_items);
    for (int number = blockIdx.x; number < num_items; number += gridDim.x) {
        const int source = source_of(a, number), item = number / WORLD;
        const int end = is_sent(a, number) ? min((item + 1) * ITEM_ROWS, a.rows_from[source]) : 0;
        const u64 home = a.table[source];
        for (int place = item * ITEM_ROWS + warp; place < end; place += SENDERS) {
            bool is_last;
            do {
                is_last = !rows.mask;
                if (is_last) {
                    rows = rows_of(a, slot);
                    advance(a, ahead, num_items);
                    slot = slot_at(a, ahead, num_items);
                } else if (lane == 0 && source != a.rank) {
                    // The releaser counts rows, whose first sum has the scalars, if there are any.
                    atomicAdd(a.counters + SUMS_COUNTER, 1);
                }
                const Rows following = take_group(rows);
                const i64 sum = ((i64)a.rank * MAX_TOKENS + place) * GROUPS + part.group;
                char* to = (char*)(home + RETURNED_AT + sum * RETURN_BYTES);
                if (a.weights != nullptr) send_sum<true>(a, ring, part, following, to);
                else send_sum<false>(a, ring, part, following, to);
                part = following;
            } while (!is_last);
            if (a.scalars != nullptr && lane < TOP_K) {
                const i64 target = (i64)a.rank * MAX_TOKENS + place;
                store_far((float*)(home + RETURNED_SCALARS_AT) + target * K_LANES + lane,
                          a.scalars[((i64)a.row_base[source] + place) * TOP_K + lane]);
            }
        }
        __syncwarp();
        // The releaser acquires this count.
        if (lane == 0) release_in_block(num_completed + warp, num_completed[warp] + 1);
    }
}

// Set the signals of items that all senders of this block have completed, in order.
__device__ void release_items(const Arguments& a, const u32* num_completed, int epoch,
                              int num_items) {
    const int lane = threadIdx.x % 32;
    const int num_own = num_items <= (int)blockIdx.x
        ? 0 : (num_items - 1 - (int)blockIdx.x) / (int)gridDim.x + 1;
    int num_released = 0, num_sent = 0;
    while (num_released < num_own) {
        const u32 mine = lane < SENDERS ? acquired_in_block(num_completed + lane) : ALL_LANES;
        const int num_done = (int)__reduce_min_sync(ALL_LANES, mine);
        __syncwarp();
        // One fence covers up to 32 items.
        const int own = num_released + lane;
        const int number = (int)blockIdx.x + own * (int)gridDim.x;
        if (own < num_done && is_sent(a, number)) {
            const int source = source_of(a, number), item = number / WORLD;
            // The reducers of that rank acquire this signal.
            release(a.table[source] + SUMS_READY_AT + 4 * ((u64)a.rank * ITEMS + item),
                    mark_of(epoch));
            if (source != a.rank) num_sent += min(ITEM_ROWS, a.rows_from[source] - item * ITEM_ROWS);
        }
        // A look takes issue slots from the warps that send.
        if (num_done == num_released) __nanosleep(500);
        num_released = min(num_done, num_released + 32);
    }
    num_sent = __reduce_add_sync(ALL_LANES, num_sent);
    if (lane == 0) atomicAdd(a.counters + (a.scalars != nullptr ? 4 : SUMS_COUNTER), num_sent);
}

// Take the next token that no warp of this rank has taken: sums arrive in the order of tokens. Returns it
// on lane 0.
__device__ int take_token(const Arguments& a) {
    int token = 0;
    if (threadIdx.x % 32 == 0) token = atomicAdd(a.state + COMBINE_TOKENS, 1);
    return token;
}

// The lanes of the groups in which a token has entries, those of all ranks.
__device__ u32 groups_of(const Arguments& a, int token) {
    constexpr u64 EXPERTS = WORLD * GROUPS * GROUP_EXPERTS;
    const int lane = threadIdx.x % 32;
    const u64 id = lane < TOP_K ? a.ids[(i64)token * TOP_K + lane] : EXPERTS;
    // An id that is out of range has failed the call.
    return __reduce_or_sync(ALL_LANES, id < EXPERTS ? 1u << id / GROUP_EXPERTS : 0u);
}

// Add up the sums of all ranks for a token a warp, in the order of ranks and of their groups.
__device__ void reduce(const Arguments& a, Ring& ring, int epoch, bool has_failed) {
    const int lane = threadIdx.x % 32;
    int token = __shfl_sync(ALL_LANES, take_token(a), 0);
    while (token < a.num_tokens) {
        // Take the next token before this one is reduced, which hides the latency of the atomic.
        const int next = take_token(a);
        int place = -1;
        if (!has_failed && takes_part(a, lane)) place = a.places[(i64)token * WORLD + lane];
        const u32 groups = GROUPS > 1 ? groups_of(a, token) : ALL_LANES;
        const u64 item = (u64)lane * ITEMS + place / ITEM_ROWS;
        const bool is_there = wait<true>(a, place >= 0 ? a.own + SUMS_READY_AT + 4 * item : 0, epoch,
            WAIT_SUMS);
        const bool is_void = has_failed || !is_there;
        // The place of the token on the rank of this lane's group.
        const int row = GROUPS > 1 ? __shfl_sync(ALL_LANES, place, lane / GROUPS) : place;
        const u32 mask = __ballot_sync(ALL_LANES, row >= 0 && !is_void) & groups;
        const i64 target = ((i64)(lane / GROUPS) * MAX_TOKENS + row) * GROUPS + lane % GROUPS;
        Rows rows = {a.own + RETURNED_AT + target * RETURN_BYTES, 1.0f, mask};
        if (HAS_ROW_SCALE && mask >> lane & 1) {
            rows.weight = __uint_as_float(watched(rows.from + BYTES_OF_ROW<Codes>));
        }
        char* to = a.out + (i64)token * ROW_BYTES;
        const float* bias = a.bias == nullptr ? nullptr : a.bias + (i64)token * HIDDEN;
        // The copy engine reads what was acquired by loads.
        pass_to_copies();
        if (is_void) write_void(to);
        else add_rows<false, Sum>(ring, rows, {0, 0.0f, 0}, bias, (Numbers*)to);
        // A rank that has received no rows has no scalars, but its tokens have.
        if (a.out_scalars != nullptr) {
            float scalar = is_void ? NOT_A_NUMBER : 0.0f;
            for (int source = 0; source < WORLD; source++) {
                const int sent = __shfl_sync(ALL_LANES, place, source);
                if (is_void || sent < 0 || lane >= TOP_K) continue;
                const i64 at = ((i64)source * MAX_TOKENS + sent) * K_LANES + lane;
                scalar += __int_as_float(watched(a.own + RETURNED_SCALARS_AT + 4 * at));
            }
            if (lane < TOP_K) a.out_scalars[(i64)token * TOP_K + lane] = scalar;
        }
        token = __shfl_sync(ALL_LANES, next, 0);
    }
}

extern "C" __global__ void __launch_bounds__(32 * WARPS, 1)
    combine_rows(const Arguments a) {
    // The epoch is in shared memory, because senders have no register for it.
    __shared__ int epoch;
    __shared__ int failed;
    __shared__ int most;
    __shared__ u32 num_completed[SENDERS];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    Ring ring = {dynamic_memory() + warp * RING_BYTES, 0, 0, false, 0, 0};
    if (lane < RING) begin_barrier(barrier_of(ring, lane));
    publish_barriers();
    if (threadIdx.x < SENDERS) num_completed[threadIdx.x] = 0;
    if (warp == 0) {
        if (lane == 0) epoch = a.state[COMBINE_EPOCH] + 1;
        __syncwarp();
        // Ranks may be one combine apart.
        const u64 combine_status_at = COMBINE_STATUS_AT + (epoch & 1) * (4 * WORLD);
        if (blockIdx.x == 0 && takes_part(a, lane)) {
            // Whether another dispatch took the receive buffer. The host cannot know of the replay of a
            // graph.
            const bool is_overwritten = !a.status && a.buffer_index >= 0
                && a.state[BUFFER_MARKS + a.buffer_index] != a.has_failed[1];
            store_far((int*)(a.table[lane] + combine_status_at + 4 * a.rank),
                      is_overwritten ? FAULT_HANDLE : a.status);
        }
        __syncwarp();
        // This rank no longer reads the sums of the last combine.
        const bool is_there = begin(a, COMBINE_BEGIN_AT, epoch, WAIT_COMBINE_BEGIN);
        const int code = is_there && takes_part(a, lane)
            ? watched(a.own + combine_status_at + 4 * lane) : 0;
        if (blockIdx.x == 0 && code && a.faults[2 * lane] == 0) a.faults[2 * lane] = code;
        const bool has_code = __any_sync(ALL_LANES, code != 0);
        if (lane == 0) failed = !is_there || has_code || a.has_failed[0] != 0;
        const int rows_from = lane < WORLD ? a.rows_from[lane] : 0;
        const int largest = __reduce_max_sync(ALL_LANES, rows_from);
        if (lane == 0) most = largest;
    }
    __syncthreads();
    const int num_items = failed ? 0 : (most + ITEM_ROWS - 1) / ITEM_ROWS * WORLD;
    if (warp < SENDERS) send(a, ring, num_completed, num_items);
    else if (warp == SENDERS) release_items(a, num_completed, epoch, num_items);
    // Warps that have sent their rows reduce, too.
    if (IS_QUANTIZED) ring.stage = 0;
    reduce(a, ring, epoch, failed != 0);
    __syncthreads();
    if (threadIdx.x == 0 && arrive_here(a.state + COMBINE_LEFT) == (int)gridDim.x - 1) {
        a.state[COMBINE_LEFT] = 0;
        a.state[COMBINE_TOKENS] = 0;
        a.state[COMBINE_EPOCH] = epoch;
    }
}
