// Sums in 8 bits: a code of e4m3 for each column and a scale for each block of BLOCK columns, by the
// arithmetic of epcomm/quantization/floats.py, which has the reasons for its numbers.
//
// With powers of two and BLOCK 4, 896 448 1 0 are the codes of 448 224 0.5 0, and the scale 128, which is 2.
//
// Constants of combine.py: BLOCK, HAS_EXPONENTS (scales are powers of two of one byte, else float32).

#define NOT_A_NUMBER __int_as_float(0x7fc00000)
constexpr int SCALE_BYTES_OF_BLOCK = HAS_EXPONENTS ? 1 : 4;
constexpr int INFINITY_BITS = 0x7f800000;

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
    const float most = __int_as_float(max(largest, 0x38d1b717));
    return {__float_as_uint(__fmul_rn(most, 0.0022321429569274187f)), __fdiv_rn(448.0f, most)};
}

__device__ float scale_of_bits(u32 bits) {
    if (!HAS_EXPONENTS) return __uint_as_float(bits);
    // 2**-127 is a subnormal number.
    return __uint_as_float(bits == 0 ? 0x400000u : bits == 0xff ? 0x7fc00000u : bits << 23);
}

// Return the scale of a lane's block as it is sent; `codes` are those of its N numbers. By all lanes.
template <int N>
__device__ u32 quantize(typename UnitOf<N>::type& codes, const float (&values)[N]) {
    int largest = 0;
#pragma unroll
    for (int i = 0; i < N; ++i) largest = max(largest, __float_as_int(values[i]) & 0x7fffffff);
    // The lanes of a block are neighbours, of a power of two.
#pragma unroll
    for (int distance = BLOCK / N / 2; distance; distance /= 2) {
        largest = max(largest, __shfl_xor_sync(ALL_LANES, largest, distance));
    }
    const BlockScale scale = scale_of(largest);
    codes = 0;
#pragma unroll
    for (int i = 0; i < N; i += 2) {
        const u32 pair =
            as_e4m3(__fmul_rn(values[i], scale.factor), __fmul_rn(values[i + 1], scale.factor));
        codes |= (typename UnitOf<N>::type)pair << 8 * i;
    }
    return scale.bits;
}

template <int N>
__device__ void dequantize(float (&values)[N], typename UnitOf<N>::type codes, float scale) {
#pragma unroll
    for (int i = 0; i < N; i += 2) {
        // Each code is a number of float16.
        const u32 pair = of_e4m3((u16)(codes >> 8 * i));
        values[i] = __fmul_rn(of_float16((u16)pair), scale);
        values[i + 1] = __fmul_rn(of_float16((u16)(pair >> 16)), scale);
    }
}
