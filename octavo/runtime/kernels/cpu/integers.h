// What the integer kernels need beside blocks.h: products, their sums in eight lanes (one per weight row),
// transposition, and scales of eight rows at once. All sums are exact, so no result depends on their order.
#pragma once
#include "quantized_inputs.h"

namespace octavo {

constexpr int LANES = 8;

// A part in the registers that products take.
template <class X>
struct Operand {
    u8x32 vectors[X::VECTORS];
};

template <class X>
inline Operand<X> operand(const QuantizedPart<X>& x) {
    Operand<X> out;
    for (int v = 0; v < X::VECTORS; v++) out.vectors[v] = read<u8x32>((const char*)x.q + 32 * v);
    return out;
}

#if defined(OCTAVO_AVX512) && defined(__AVX512VNNI__)
#define OCTAVO_WIDE  // tiles of vectors of 64 bytes
typedef uint8_t u8x64 __attribute__((vector_size(64)));
typedef int32_t i32x16 __attribute__((vector_size(64)));
typedef float f32x16 __attribute__((vector_size(64)));
using TileBytes = u8x64;
using TileSums = i32x16;
using TileFloats = f32x16;
constexpr int WIDTH = 16, TILE_ROWS = 6;  // lanes of a tile's vectors, of which it has two for each row of x
#else
using TileBytes = u8x32;
using TileSums = i32x8;
using TileFloats = f32x8;
constexpr int WIDTH = LANES, TILE_ROWS = 4;
#endif

template <class V>
inline V all_lanes(float a) {
    return splat(a);
}

}  // namespace octavo

#if defined(OCTAVO_NEON)
#include "integers_neon.h"
#else

namespace octavo {

template <class X>
using WeightForm = X;  // in which weights meet x

#if defined(OCTAVO_AVX512) && defined(__AVX512VNNI__) || defined(OCTAVO_AVX2) && defined(__AVXVNNI__)
#define OCTAVO_VNNI
#endif

#if defined(OCTAVO_VNNI)
constexpr bool VNNI = true;
#else
constexpr bool VNNI = false;
#endif

// How many sums of two products of bytes fit in 16 bits together.
template <class Type>
constexpr int STEPS_IN_16_BITS = 32767 / (2 * 127 * Type::LARGEST);

// The q of weight 0 in `int_quants`.
template <class Type, class X>
constexpr int INT_ZERO = VNNI && Type::SIGNED && X::VECTORS == 1 ? 128 : Type::ZERO;

// Of a part and of its halves: what INT_ZERO goes with.
template <class Type, class X>
inline const int32_t* sums_for_zero(const QuantizedPart<X>& x) {
    return x.half_sums;
}

// The weights of a part, in the order and width of `QuantizedPart`.
template <class Type, class X>
OCTAVO_INLINE Operand<X> int_quants(const uint8_t* block, int s) {
    u8x32 q = Type::quants(block, s);
    if constexpr (X::VECTORS == 1) {
        return {{VNNI && Type::SIGNED ? q ^ 0x80 : q}};
    } else if constexpr (Type::SIGNED) {
        return {{(u8x32)(((i16x16)q << 8) >> 8), (u8x32)((i16x16)q >> 8)}};
    } else {
        return {{(u8x32)((u16x16)q & 255), (u8x32)((u16x16)q >> 8)}};
    }
}

inline f32x8 fma8(f32x8 a, f32x8 b, f32x8 c) {
#if defined(__FMA__)
    return _mm256_fmadd_ps(a, b, c);
#else
    return a * b + c;
#endif
}

inline f32x8 to_floats(i32x8 a) { return __builtin_convertvector(a, f32x8); }

#if defined(OCTAVO_WIDE)
template <>
inline f32x16 all_lanes(float a) {
    return _mm512_set1_ps(a);
}
inline f32x16 fma8(f32x16 a, f32x16 b, f32x16 c) { return _mm512_fmadd_ps(a, b, c); }
inline f32x16 to_floats(i32x16 a) { return _mm512_cvtepi32_ps((__m512i)a); }
inline i32x16 add_products(Int8, i32x16 sums, u8x64 w, u8x64 x) {
    return (i32x16)_mm512_dpbusd_epi32((__m512i)sums, (__m512i)w, (__m512i)x);
}
inline i32x16 add_products(Int16, i32x16 sums, u8x64 w, u8x64 x) {
    return (i32x16)_mm512_dpwssd_epi32((__m512i)sums, (__m512i)w, (__m512i)x);
}
#endif

// Lane i = w[2 i] x[2 i] + w[2 i + 1] x[2 i + 1].
template <bool SIGNED>
inline i16x16 pairs(u8x32 w, u8x32 x) {
#if defined(__AVX2__)
    __m256i a = (__m256i)w, b = (__m256i)x;
    if (SIGNED) {
        b = _mm256_sign_epi8(b, a);
        a = _mm256_abs_epi8(a);
    }
    return (i16x16)_mm256_maddubs_epi16(a, b);
#else
    i16x16 out;
    for (int i = 0; i < 16; i++)
        out[i] = int16_t(int8_t(w[2 * i]) * int8_t(x[2 * i]) + int8_t(w[2 * i + 1]) * int8_t(x[2 * i + 1]));
    return out;
#endif
}

// Sums of neighbours.
inline i32x8 widened(i16x16 a) {
#if defined(__AVX2__)
    return (i32x8)_mm256_madd_epi16((__m256i)a, _mm256_set1_epi16(1));
#else
    i32x8 out;
    for (int i = 0; i < 8; i++) out[i] = a[2 * i] + a[2 * i + 1];
    return out;
#endif
}

#if defined(OCTAVO_VNNI)
// Lane i of sums + w[4 i] x[4 i] + … + w[4 i + 3] x[4 i + 3].
inline i32x8 add_products(Int8, i32x8 sums, u8x32 w, u8x32 x) {
#if defined(OCTAVO_AVX512)
    return (i32x8)_mm256_dpbusd_epi32((__m256i)sums, (__m256i)w, (__m256i)x);
#else
    return (i32x8)_mm256_dpbusd_avx_epi32((__m256i)sums, (__m256i)w, (__m256i)x);
#endif
}
#endif

// Lane i of sums + w[2 i] x[2 i] + w[2 i + 1] x[2 i + 1] of numbers in two bytes.
inline i32x8 add_products(Int16, i32x8 sums, u8x32 w, u8x32 x) {
#if defined(OCTAVO_VNNI) && defined(OCTAVO_AVX512)
    return (i32x8)_mm256_dpwssd_epi32((__m256i)sums, (__m256i)w, (__m256i)x);
#elif defined(OCTAVO_VNNI)
    return (i32x8)_mm256_dpwssd_avx_epi32((__m256i)sums, (__m256i)w, (__m256i)x);
#elif defined(__AVX2__)
    return in_register(sums + (i32x8)_mm256_madd_epi16((__m256i)w, (__m256i)x));
#else
    i16x16 a = (i16x16)w, b = (i16x16)x;
    for (int i = 0; i < 8; i++) sums[i] += a[2 * i] * b[2 * i] + a[2 * i + 1] * b[2 * i + 1];
    return sums;
#endif
}

// Four bytes in every lane.
inline TileBytes spread_four(const void* p) {
    int32_t four = read<int32_t>(p);
    return (TileBytes)(TileSums{} + four);
}

// Of both vectors, in turn: single lanes or pairs out of the lower or upper halves of each half, then halves.
inline i32x8 low32(i32x8 a, i32x8 b) { return picked<0, 8, 1, 9, 4, 12, 5, 13>(a, b); }
inline i32x8 high32(i32x8 a, i32x8 b) { return picked<2, 10, 3, 11, 6, 14, 7, 15>(a, b); }
inline i32x8 low64(i32x8 a, i32x8 b) { return (i32x8)picked<0, 4, 2, 6>((u64x4)a, (u64x4)b); }
inline i32x8 high64(i32x8 a, i32x8 b) { return (i32x8)picked<1, 5, 3, 7>((u64x4)a, (u64x4)b); }
inline i32x8 both_low(i32x8 a, i32x8 b) { return picked<0, 1, 2, 3, 8, 9, 10, 11>(a, b); }
inline i32x8 both_high(i32x8 a, i32x8 b) { return picked<4, 5, 6, 7, 12, 13, 14, 15>(a, b); }

// Sums of lanes 0 + 2, 1 + 3 of both, in turn; in each half of the vectors.
template <class V>
inline V merged32(V a, V b) {
    return (V)low32((i32x8)a, (i32x8)b) + (V)high32((i32x8)a, (i32x8)b);
}
template <class V>
inline V merged64(V a, V b) {
    return (V)low64((i32x8)a, (i32x8)b) + (V)high64((i32x8)a, (i32x8)b);
}

struct HalfSums {
    i32x8 first, second;  // of the products of 16 weights each; lane = weight row
};

// Sums of lanes, in each half of the vectors: of a, b, c and d.
inline i32x8 merged(const i32x8 (&sums)[4]) {
    return merged64(merged32(sums[0], sums[1]), merged32(sums[2], sums[3]));
}

// The same, in 16 bits as long as they hold what STEPS of such sums make.
template <int STEPS>
inline i32x8 merged(const i16x16 (&sums)[4]) {
    if constexpr (STEPS >= 4) {
        return widened(merged64(merged32(sums[0], sums[1]), merged32(sums[2], sums[3])));
    } else if constexpr (STEPS >= 2) {
        return merged64(widened(merged32(sums[0], sums[1])), widened(merged32(sums[2], sums[3])));
    } else {
        return merged({widened(sums[0]), widened(sums[1]), widened(sums[2]), widened(sums[3])});
    }
}

// x times part s of four rows: in each half of the vector, the sums of row 0, 1, 2, 3.
template <class Type, class X>
OCTAVO_INLINE i32x8 multiply_four(const uint8_t* const* blocks, int s, const Operand<X>& x) {
    if constexpr (VNNI || X::VECTORS > 1) {
        i32x8 sums[4] = {};
        for (int c = 0; c < 4; c++) {
            Operand<X> w = int_quants<Type, X>(blocks[c], s);
            for (int v = 0; v < X::VECTORS; v++)
                sums[c] = add_products(X{}, sums[c], w.vectors[v], x.vectors[v]);
        }
        return merged(sums);
    } else {
        i16x16 sums[4];
        for (int c = 0; c < 4; c++)
            sums[c] = pairs<Type::SIGNED>(int_quants<Type, X>(blocks[c], s).vectors[0], x.vectors[0]);
        return merged<STEPS_IN_16_BITS<Type>>(sums);
    }
}

template <class Type, class X>
OCTAVO_INLINE HalfSums multiply_eight(const uint8_t* const (&blocks)[LANES], int s, const Operand<X>& x) {
    i32x8 a = multiply_four<Type, X>(blocks, s, x), b = multiply_four<Type, X>(blocks + 4, s, x);
    return {both_low(a, b), both_high(a, b)};
}

// Step i of the result, at out + i * stride, has bytes 4 i … 4 i + 3 of every row.
inline void transpose(const u8x32 (&rows)[LANES], uint8_t* out, int64_t stride) {
    i32x8 a[8], b[8];
    for (int i = 0; i < 4; i++) {
        a[i] = low32((i32x8)rows[2 * i], (i32x8)rows[2 * i + 1]);
        a[i + 4] = high32((i32x8)rows[2 * i], (i32x8)rows[2 * i + 1]);
    }
    for (int i = 0; i < 8; i += 4)
        for (int j = 0; j < 2; j++) {
            b[i + j] = low64(a[i + 2 * j], a[i + 2 * j + 1]);
            b[i + j + 2] = high64(a[i + 2 * j], a[i + 2 * j + 1]);
        }
    for (int i = 0; i < 4; i++) {
        i32x8 low = both_low(b[2 * i], b[2 * i + 1]), high = both_high(b[2 * i], b[2 * i + 1]);
        std::memcpy(out + i * stride, &low, sizeof low);
        std::memcpy(out + (i + 4) * stride, &high, sizeof high);
    }
}

// Adds to `products` those of step FIRST to FIRST + N - 1 of a part with R rows of x, `stride` parts apart.
template <class Type, class X, int R, int FIRST, int N, class Part>
inline void multiply_some(const Part& part, const QuantizedPart<X>* x, int64_t stride, TileSums (&products)[R][2]) {
    auto each = [&](int step, auto use) {
        TileBytes w[2];
        for (int g = 0; g < 2; g++) w[g] = in_register(read<TileBytes>(part.q[step][g]));
        for (int r = 0; r < R; r++) {
            TileBytes four = spread_four((const char*)x[r * stride].q + 4 * step);
            for (int g = 0; g < 2; g++) use(r, g, w[g], four);
        }
    };
    if constexpr (VNNI || X::VECTORS > 1) {
        unrolled<N>([&](auto i) {
            each(FIRST + i, [&](int r, int g, TileBytes w, TileBytes four) {
                products[r][g] = add_products(X{}, products[r][g], w, four);
            });
        });
    } else {
        constexpr int IN_16_BITS = std::min(N, STEPS_IN_16_BITS<Type>);
        unrolled<N / IN_16_BITS>([&](auto chunk) {
            i16x16 sums[R][2] = {};
            unrolled<IN_16_BITS>([&](auto i) {
                each(FIRST + chunk * IN_16_BITS + i, [&](int r, int g, TileBytes w, TileBytes four) {
                    sums[r][g] = in_register(sums[r][g] + pairs<Type::SIGNED>(w, four));
                });
            });
            for (int r = 0; r < R; r++)
                for (int g = 0; g < 2; g++) products[r][g] += widened(sums[r][g]);
        });
    }
}

// The same of scale H of a part.
template <class Type, class X, int R, int SCALES, int H, class Part>
OCTAVO_INLINE void multiply_steps(const Part& part, const QuantizedPart<X>* x, int64_t stride,
                                  TileSums (&products)[R][2]) {
    constexpr int STEPS = 8 / SCALES;
    unrolled<X::VECTORS>(
        [&](auto v) { multiply_some<Type, X, R, 8 * v + H * STEPS, STEPS>(part, x, stride, products); });
}

// An f16 out of every one of eight blocks.
inline f32x8 eight_halves(const uint8_t* const (&blocks)[LANES], int at) {
    uint16_t h[LANES];
    for (int c = 0; c < LANES; c++) h[c] = read<uint16_t>(blocks[c] + at);
#if defined(__F16C__)
    return _mm256_cvtph_ps(_mm_setr_epi16(int16_t(h[0]), int16_t(h[1]), int16_t(h[2]), int16_t(h[3]),
                                          int16_t(h[4]), int16_t(h[5]), int16_t(h[6]), int16_t(h[7])));
#else
    f32x8 out;
    for (int c = 0; c < LANES; c++) out[c] = half(h[c]);
    return out;
#endif
}

// Byte i of every row goes to row i of `out`.
inline void transpose_bytes(const uint64_t (&rows)[LANES], uint8_t* out) {
#if defined(__AVX2__)
    __m128i pairs[4];  // of rows, byte by byte in turn
    for (int i = 0; i < 4; i++)
        pairs[i] = _mm_unpacklo_epi8(_mm_cvtsi64_si128(int64_t(rows[2 * i])),
                                     _mm_cvtsi64_si128(int64_t(rows[2 * i + 1])));
    __m128i low = _mm_unpacklo_epi16(pairs[0], pairs[1]), high = _mm_unpackhi_epi16(pairs[0], pairs[1]);
    __m128i low2 = _mm_unpacklo_epi16(pairs[2], pairs[3]), high2 = _mm_unpackhi_epi16(pairs[2], pairs[3]);
    _mm_storeu_si128((__m128i*)out, _mm_unpacklo_epi32(low, low2));
    _mm_storeu_si128((__m128i*)(out + 16), _mm_unpackhi_epi32(low, low2));
    _mm_storeu_si128((__m128i*)(out + 32), _mm_unpacklo_epi32(high, high2));
    _mm_storeu_si128((__m128i*)(out + 48), _mm_unpackhi_epi32(high, high2));
#else
    for (int i = 0; i < 8; i++)
        for (int row = 0; row < LANES; row++) out[i * 8 + row] = uint8_t(rows[row] >> 8 * i);
#endif
}

}  // namespace octavo

#endif

namespace octavo {

// As first_scale, of eight blocks.
template <class Type>
inline f32x8 eight_scales(const uint8_t* const (&blocks)[LANES]) {
    if constexpr (Type::SCALE == Scale::HALF) return eight_halves(blocks, 0);
    f32x8 out;
    for (int c = 0; c < LANES; c++)
        out[c] = Type::SCALE == Scale::FLOAT ? read<float>(blocks[c]) : power_of_two(*blocks[c]);
    return out;
}

struct EightPairs {
    f32x8 first, second;
};

// Two neighbouring f16 out of every one of eight blocks. By AVX2 fetched together: every number that is put into a
// vector by itself costs a shuffle, and shuffles are what a product of one row waits for.
inline EightPairs eight_pairs(const uint8_t* const (&blocks)[LANES], int at) {
#if defined(__AVX2__) && defined(__F16C__)
    auto four = [&](const uint8_t* const* b) {
        __m128i pairs = _mm_setr_epi32(read<int>(b[0] + at), read<int>(b[1] + at), read<int>(b[2] + at),
                                       read<int>(b[3] + at));
        return _mm_shuffle_epi8(pairs, _mm_setr_epi8(0, 1, 4, 5, 8, 9, 12, 13, 2, 3, 6, 7, 10, 11, 14, 15));
    };
    const __m128i low = four(blocks), high = four(blocks + 4);
    return {_mm256_cvtph_ps(_mm_unpacklo_epi64(low, high)), _mm256_cvtph_ps(_mm_unpackhi_epi64(low, high))};
#else
    return {eight_halves(blocks, at), eight_halves(blocks, at + 2)};
#endif
}

// As Factors, of eight rows' blocks at once.
template <class Type, bool SEVERAL = Type::SEVERAL>
struct EightFactors {
    f32x8 scales, offsets;

    explicit EightFactors(const uint8_t* const (&blocks)[LANES]) : offsets() {
        if constexpr (Type::MINIMUM) {
            const EightPairs both = eight_pairs(blocks, 0);
            scales = both.first, offsets = Type::ZERO_POINT ? both.second * -scales : both.second;
        } else {
            scales = eight_scales<Type>(blocks);
        }
    }
    f32x8 scale(int) const { return scales; }
    f32x8 offset(int) const { return offsets; }
};

template <class Type>
struct EightFactors<Type, true> {
    f32x8 d, minimum;
    uint8_t bytes[128];  // 16 small integers of each row

    explicit EightFactors(const uint8_t* const (&blocks)[LANES]) : minimum() {
        if constexpr (Type::MINIMUM) {
            const EightPairs both = eight_pairs(blocks, Type::FACTOR);
            d = both.first, minimum = -both.second;
        } else {
            d = eight_halves(blocks, Type::FACTOR);
        }
        uint64_t first[LANES], second[LANES];
        for (int c = 0; c < LANES; c++) {
            Bytes16 both = Type::scale_bytes(blocks[c]);
            first[c] = both.first;
            second[c] = both.second;
        }
        transpose_bytes(first, bytes);
        transpose_bytes(second, bytes + 64);
    }
    f32x8 scale(int half) const {
        return d * eight_bytes<Type::HALVES>(bytes + (Type::HALVES ? half : half / 2) * 8);
    }
    f32x8 offset(int half) const { return minimum * eight_bytes<false>(bytes + 64 + half / 2 * 8); }
};

}  // namespace octavo
