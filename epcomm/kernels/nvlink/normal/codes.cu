// Sums in 8 bits: a code of e4m3 for each column and a scale for each block of BLOCK columns, by the
// arithmetic of epcomm/quantization/floats.py, which has the reasons for its numbers. In 4 bits: a code of e2m1
// for each column, a scale of e4m3 for each block, and one of float32 for the row.
//
// With powers of two and BLOCK 4, 896 448 1 0 are the codes of 448 224 0.5 0, and the scale 128, which is 2.
//
// Constants of combine.py: BLOCK, HAS_EXPONENTS (scales are powers of two of one byte, else float32),
// HAS_ROW_SCALE (4 bits).

#define NOT_A_NUMBER __int_as_float(0x7fc00000)
constexpr int SCALE_BYTES_OF_BLOCK = HAS_EXPONENTS || HAS_ROW_SCALE ? 1 : 4;
constexpr int CODES_OF_BYTE = HAS_ROW_SCALE ? 2 : 1;
constexpr int INFINITY_BITS = 0x7f800000;
constexpr int ONE_BITS = 0x3f800000;

__device__ float of_lane_xor(float value, int mask) {
    return __int_as_float(__shfl_xor_sync(ALL_LANES, __float_as_int(value), mask));
}

// The scale of a block.
struct BlockScale {
    u32 bits;      // as they are sent
    float factor;  // of the numbers
};

// `largest`: the bits of the largest magnitude, which have the order of the numbers.
__device__ BlockScale scale_of(int largest) {
    if (largest >= INFINITY_BITS) return {HAS_EXPONENTS ? 0xffu : 0x7fc00000u, NOT_A_NUMBER};
    if (HAS_EXPONENTS) {
        // The smallest power of two of which 448 times, 0x43e00000, is not less: a fraction above carries.
        const int exponent = max(((largest - 0x43e00000 + 0x7fffff) >> 23) + 127, 0);
        return {(u32)exponent, __int_as_float((254 - exponent) << 23)};
    }
    // 0x38d1b717: 1e-4.
    const int most = max(largest, 0x38d1b717), power = most & INFINITY_BITS;
    // 448 over the fraction of `most`, from 1 on and below 2, and then over its power: no step is subnormal.
    const float quotient = quotient_of(448.0f, __int_as_float(most - power + ONE_BITS));
    return {__float_as_uint(__fmul_rn(__int_as_float(most), 0.0022321429569274187f)),
            __int_as_float(__float_as_int(quotient) - power + ONE_BITS)};
}

__device__ float scale_of_bits(u32 bits) {
    if (HAS_ROW_SCALE) return of_float16((u16)of_e4m3(bits).x);
    if (!HAS_EXPONENTS) return __uint_as_float(bits);
    // 2**-127 is a subnormal number.
    return __uint_as_float(bits == 0 ? 0x400000u : bits == 0xff ? 0x7fc00000u : bits << 23);
}

// Quantise CHUNKS chunks of N consecutive columns of each lane, with the largest magnitude of each. Chunks c of
// neighbouring lanes follow one another, and LANES lanes have a block. Returns the scale, as it is sent, of the
// block of chunk `lane % CHUNKS`. By all lanes.
template <int CHUNKS, int N>
__device__ u32 quantize(u32 (&codes)[CHUNKS][N / 4], const float (&values)[CHUNKS][N],
                        const float (&largest)[CHUNKS]) {
    constexpr int LANES = BLOCK / N;
    static_assert(CHUNKS == 1 || (CHUNKS == 2 && LANES >= 2), "a lane has one scale");
    const u32 lane = current_lane();
    float of_block = largest[0];
    if constexpr (CHUNKS == 2) {
        // From here on, even lanes have the first chunk of two lanes, and odd ones the second.
        of_block = lane % 2 ? largest[1] : largest[0];
        const float other = lane % 2 ? largest[0] : largest[1];
        of_block = larger_magnitude(of_block, of_lane_xor(other, 1));
    }
#pragma unroll
    for (int distance = CHUNKS; distance < LANES; distance *= 2) {
        of_block = larger_magnitude(of_block, of_lane_xor(of_block, distance));
    }
    const BlockScale scale = scale_of(__float_as_int(of_block));
#pragma unroll
    for (int c = 0; c < CHUNKS; ++c) {
        const float factor =
            CHUNKS == 1 ? scale.factor : __shfl_sync(ALL_LANES, scale.factor, lane / 2 * 2 + c);
#pragma unroll
        for (int i = 0; i < N; i += 4) {
            const float* four = values[c] + i;
            codes[c][i / 4] = as_e4m3(__fmul_rn(four[0], factor), __fmul_rn(four[1], factor),
                                      __fmul_rn(four[2], factor), __fmul_rn(four[3], factor));
        }
    }
    return scale.bits;
}

// The scale of a row in 4 bits, and what quotients take of it, so that none of their steps is subnormal.
struct RowScale {
    float scale;
    float fraction;  // from 1 on and below 2
    float inverse;   // of the fraction
    float power;     // the inverse of scale / fraction
};

// `largest`: the bits of the largest magnitude of finite blocks.
__device__ RowScale scale_of_row(int largest) {
    // 0x9280000: 2688 * 2**-120.
    const int most = max(largest, 0x9280000), power = most & INFINITY_BITS;
    const float quotient = quotient_of(__int_as_float(most - power + ONE_BITS), 2688.0f);
    const int scale = __float_as_int(quotient) + power - ONE_BITS, power_of_scale = scale & INFINITY_BITS;
    const float fraction = __int_as_float(scale - power_of_scale + ONE_BITS);
    return {__int_as_float(scale), fraction, quotient_of(1.0f, fraction),
            __int_as_float(2 * ONE_BITS - power_of_scale)};
}

// The code of e2m1 of a magnitude below 7, and E2M1_BASE, to the nearest, ties to even. The three sums end in
// steps of 0.5, 1 and 2, which are those of the codes from 0, 2 and 4 on; the smallest is right.
constexpr int E2M1_BASE = 0x4ac00000;
__device__ int e2m1_of(float magnitude) {
    const int halves = __float_as_int(__fadd_rn(magnitude, 6291456.0f));
    const int ones = __float_as_int(__fadd_rn(magnitude, 12582912.0f + 2.0f)) - 0x800000;
    const int twos = __float_as_int(__fadd_rn(magnitude, 25165824.0f + 8.0f)) - 0x1000000;
    return min(min(ones, halves), twos);
}

// Quantise a block to 4 bits, with its largest magnitude. Returns the scale, as it is sent.
__device__ u32 quantize(u32 (&codes)[2], const float (&values)[16], float largest, const RowScale& row) {
    const float sixth = quotient_of(__fmul_rn(largest, row.power), 6.0f);
    const float share = quotient_by(sixth, row.fraction, row.inverse);
    // At least 2**-6; 3 of 23 fraction bits are kept.
    const u32 bits = max(__float_as_int(share), 0x3c800000);
    const u32 scale = (bits + 0x7ffff + (bits >> 20 & 1)) >> 20;
    const float factor = __fmul_rn(quotient_of(row.inverse, __uint_as_float(scale << 20)), row.power);
    const bool is_finite = __float_as_int(largest) < INFINITY_BITS;
#pragma unroll
    for (int word = 0; word < 2; ++word) {
        u32 magnitudes = 0, signs = 0;
#pragma unroll
        for (int i = 7; i >= 0; --i) {
            const float scaled = __fmul_rn(values[8 * word + i], factor);
            magnitudes = magnitudes * 16 + (u32)e2m1_of(magnitude_of(scaled));
            signs = signs << 4 | __float_as_uint(scaled) >> 28;
        }
        codes[word] = is_finite ? (magnitudes - E2M1_BASE * 0x11111111u) | (signs & 0x88888888u) : 0;
    }
    // The bias of e4m3 is smaller by 120.
    return is_finite ? scale - (120 << 3) : 0x7f;
}

// Multiply codes of N columns by their scale; with N = 4 those of 4 bits are in the lower half of their word.
template <int N, int WORDS>
__device__ void dequantize(float (&values)[N], const u32 (&codes)[WORDS], float scale) {
    if constexpr (HAS_ROW_SCALE) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            // Two codes as numbers of float16, 2**-14 as large.
            const u32 moved = codes[0] << (12 - 4 * i);
            const u32 two = grown((moved >> 3 & 0x0e000e00u) | (moved & 0x80008000u));
            values[i] = __fmul_rn(of_float16((u16)two), scale);
            if (N == 8) values[i + 4] = __fmul_rn(of_float16((u16)(two >> 16)), scale);
        }
    } else {
#pragma unroll
        for (int i = 0; i < N; i += 4) {
            // Each code is a number of float16.
            const uint2 four = of_e4m3(codes[i / 4]);
            values[i] = __fmul_rn(of_float16((u16)four.x), scale);
            values[i + 1] = __fmul_rn(of_float16((u16)(four.x >> 16)), scale);
            values[i + 2] = __fmul_rn(of_float16((u16)four.y), scale);
            values[i + 3] = __fmul_rn(of_float16((u16)(four.y >> 16)), scale);
        }
    }
}
