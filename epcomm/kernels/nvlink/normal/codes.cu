// Sums in 8 bits: a code of e4m3 for each column and a scale for each block of BLOCK columns, by the
// arithmetic of epcomm/quantization/floats.py, which has the reasons for its numbers.
//
// With powers of two and BLOCK 4, 896 448 1 0 are the codes of 448 224 0.5 0, and the scale 128, which is 2.
//
// Constants of combine.py: BLOCK, HAS_EXPONENTS (scales are powers of two of one byte, else float32).

#define NOT_A_NUMBER __int_as_float(0x7fc00000)
constexpr int SCALE_BYTES_OF_BLOCK = HAS_EXPONENTS ? 1 : 4;
constexpr int INFINITY_BITS = 0x7f800000;

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
    const float quotient = quotient_of(448.0f, __int_as_float(most - power + 0x3f800000));
    return {__float_as_uint(__fmul_rn(__int_as_float(most), 0.0022321429569274187f)),
            __int_as_float(__float_as_int(quotient) - power + 0x3f800000)};
}

__device__ float scale_of_bits(u32 bits) {
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

template <int N>
__device__ void dequantize(float (&values)[N], const u32 (&codes)[N / 4], float scale) {
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
