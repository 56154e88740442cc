// Products of the integer kernels by NEON, in place of those of integers.h, which includes this. What is rounded to two
// bytes is two planes here, all high bytes before all low ones: products of bytes with the same weights, the first
// times 256. In the second plane bytes count from 0 and so do those of SIGNED weights: 128 more than they are.
#pragma once
#include "quantized_inputs.h"

#if defined(__ARM_FEATURE_MATMUL_INT8)
#define OCTAVO_MMLA  // 2 x 8 bytes times 8 x 2
#endif

namespace octavo {

template <class>
using WeightForm = Int8;  // in which weights meet x

template <class Type, class X>
constexpr int INT_ZERO = Type::SIGNED && X::VECTORS > 1 ? 128 : Type::ZERO;

template <class Type, class X>
inline const int32_t* sums_for_zero(const QuantizedPart<X>& x) {
    return Type::SIGNED && X::VECTORS > 1 ? x.low_sums : x.half_sums;
}

template <class Type, class X>
OCTAVO_INLINE Operand<Int8> int_quants(const uint8_t* block, int s) {
    return {{Type::quants(block, s)}};
}

inline f32x8 fma8(f32x8 a, f32x8 b, f32x8 c) { return {fma(a.low, b.low, c.low), fma(a.high, b.high, c.high)}; }
inline f32x8 to_floats(i32x8 a) {
    return {(vf)vcvtq_f32_s32((int32x4_t)a.low), (vf)vcvtq_f32_s32((int32x4_t)a.high)};
}

// Lane i of sums + w[4 i] x[4 i] + … + w[4 i + 3] x[4 i + 3].
inline vi dot(vi sums, i8x16 w, i8x16 x) {
    const int8x16_t a = (int8x16_t)w, b = (int8x16_t)x;
#if defined(__ARM_FEATURE_DOTPROD)
    return (vi)vdotq_s32((int32x4_t)sums, a, b);
#else
    const int16x8_t low = vmull_s8(vget_low_s8(a), vget_low_s8(b)), high = vmull_high_s8(a, b);
    return sums + (vi)vpaddq_s32(vpaddlq_s16(low), vpaddlq_s16(high));
#endif
}
inline vi dot(vi sums, u8x16 w, u8x16 x) {
    const uint8x16_t a = (uint8x16_t)w, b = (uint8x16_t)x;
#if defined(__ARM_FEATURE_DOTPROD)
    return (vi)vdotq_u32((uint32x4_t)sums, a, b);
#else
    const uint16x8_t low = vmull_u8(vget_low_u8(a), vget_low_u8(b)), high = vmull_high_u8(a, b);
    return sums + (vi)vpaddq_u32(vpaddlq_u16(low), vpaddlq_u16(high));
#endif
}

template <class Type>
inline u8x16 from_zero(u8x16 w) {
    return Type::SIGNED ? w ^ 0x80 : w;
}

// `sums` with the products of a plane of x.
template <class Type, int PLANE>
inline vi add_products(vi sums, u8x16 w, u8x16 x) {
    if constexpr (PLANE == 1) return dot(sums, from_zero<Type>(w), x);
    return dot(sums, (i8x16)w, (i8x16)x);
}

struct HalfSums {
    i32x8 first, second;  // second: only of types with HALVES
};

// Of each vector the sum of its lanes.
inline i32x8 lane_sums(const vi (&a)[LANES]) {
    auto pairs = [](vi b, vi c) { return (vi)vpaddq_s32((int32x4_t)b, (int32x4_t)c); };
    return {pairs(pairs(a[0], a[1]), pairs(a[2], a[3])), pairs(pairs(a[4], a[5]), pairs(a[6], a[7]))};
}

template <class Type, class X>
OCTAVO_INLINE HalfSums multiply_eight(const uint8_t* const (&blocks)[LANES], int s, const Operand<X>& x) {
    vi first[LANES] = {}, second[LANES] = {};
    unrolled<LANES>([&](auto c) {
        const u8x32 w = Type::quants(blocks[c], s);
        unrolled<X::VECTORS>([&](auto plane) {
            vi &a = first[c], &b = Type::HALVES ? second[c] : first[c];
            if constexpr (plane == 1) {
                a = a << 8;
                if constexpr (Type::HALVES) b = b << 8;
            }
            a = add_products<Type, plane>(a, w.low, x.vectors[plane].low);
            b = add_products<Type, plane>(b, w.high, x.vectors[plane].high);
        });
    });
    if constexpr (Type::HALVES) return {lane_sums(first), lane_sums(second)};
    return {lane_sums(first), i32x8{}};
}

#if defined(OCTAVO_MMLA)

inline vi first_pairs(vi a, vi b) { return (vi)vzip1q_s64((int64x2_t)a, (int64x2_t)b); }
inline vi second_pairs(vi a, vi b) { return (vi)vzip2q_s64((int64x2_t)a, (int64x2_t)b); }

// Steps 2 i and 2 i + 1, at out + 2 i * stride, have bytes 8 i … 8 i + 7 of every row, two rows to a vector.
inline void transpose(const u8x32 (&rows)[LANES], uint8_t* out, int64_t stride) {
    for (int j = 0; j < LANES / 2; j++) {
        uint8_t* to = out + j / 2 * stride + j % 2 * 16;
        auto put = [&](int i, vi both) { std::memcpy(to + 2 * i * stride, &both, sizeof both); };
        const i32x8 a = (i32x8)rows[2 * j], b = (i32x8)rows[2 * j + 1];
        put(0, first_pairs(a.low, b.low)), put(1, second_pairs(a.low, b.low));
        put(2, first_pairs(a.high, b.high)), put(3, second_pairs(a.high, b.high));
    }
}

// Rows of x: 2 p and 2 p + 1, of an odd number the last one twice.
template <class Type, class X, int R, int SCALES, int H, class Part>
OCTAVO_INLINE void multiply_steps(const Part& part, const QuantizedPart<X>* x, int64_t stride,
                                  i32x8 (&products)[R][2]) {
    constexpr int PAIRS = (R + 1) / 2, EIGHTS = 4 / SCALES;
    vi sums[PAIRS][LANES] = {};
    unrolled<X::VECTORS>([&](auto plane) {
        if constexpr (plane == 1)
            for (auto& row : sums)
                for (vi& a : row) a = a << 8;
        unrolled<EIGHTS>([&](auto i) {
            constexpr int eight = H * EIGHTS + i;
            uint8x16_t rows[PAIRS];
            for (int p = 0; p < PAIRS; p++) {
                auto of = [&](int r) {
                    return vcreate_u8(read<uint64_t>((const char*)x[r * stride].q + 32 * plane + 8 * eight));
                };
                rows[p] = vcombine_u8(of(2 * p), of(R == 1 ? 0 : 2 * p + 1));
            }
            unrolled<LANES>([&](auto j) {
                const u8x16 w = in_register(read<u8x16>(part.q[2 * eight + j % 4 / 2][j / 4] + j % 2 * 16));
                for (int p = 0; p < PAIRS; p++) {
                    vi& a = sums[p][j];
                    if constexpr (plane == 1)
                        a = (vi)vmmlaq_u32((uint32x4_t)a, rows[p], (uint8x16_t)from_zero<Type>(w));
                    else
                        a = (vi)vmmlaq_s32((int32x4_t)a, (int8x16_t)rows[p], (int8x16_t)w);
                }
            });
        });
    });
    for (int r = 0; r < R; r++)
        for (int g = 0; g < 2; g++) {
            const vi* a = sums[r / 2] + 4 * g;
            auto row = [&](vi b, vi c) { return r % 2 ? second_pairs(b, c) : first_pairs(b, c); };
            products[r][g] = {row(a[0], a[1]), row(a[2], a[3])};
        }
}

#else

// Step i, at out + i * stride, has bytes 4 i … 4 i + 3 of every row.
inline void transpose(const u8x32 (&rows)[LANES], uint8_t* out, int64_t stride) {
    for (int first = 0; first < LANES; first += 4)
        for (int half = 0; half < 2; half++) {
            vi a[4];
            for (int i = 0; i < 4; i++) a[i] = (vi)(half ? rows[first + i].high : rows[first + i].low);
            turn<2>(a);
            for (int i = 0; i < 4; i++)
                std::memcpy(out + (4 * half + i) * stride + 4 * first, &a[i], sizeof a[i]);
        }
}

template <class Type, class X, int R, int SCALES, int H, class Part>
OCTAVO_INLINE void multiply_steps(const Part& part, const QuantizedPart<X>* x, int64_t stride,
                                  i32x8 (&products)[R][2]) {
    constexpr int STEPS = 8 / SCALES;
    unrolled<X::VECTORS>([&](auto plane) {
        if constexpr (plane == 1)
            for (auto& row : products)
                for (i32x8& a : row) a = a << 8;
        unrolled<STEPS>([&](auto i) {
            constexpr int step = H * STEPS + i;
            u8x32 w[2] = {in_register(read<u8x32>(part.q[step][0])), in_register(read<u8x32>(part.q[step][1]))};
            for (int r = 0; r < R; r++) {
                const int32_t bytes = read<int32_t>((const char*)x[r * stride].q + 32 * plane + 4 * step);
                const u8x16 four = (u8x16)vdupq_n_s32(bytes);
                for (int g = 0; g < 2; g++) {
                    i32x8& a = products[r][g];
                    a.low = add_products<Type, plane>(a.low, w[g].low, four);
                    a.high = add_products<Type, plane>(a.high, w[g].high, four);
                }
            }
        });
    });
}

#endif

inline f32x8 eight_halves(const uint8_t* const (&blocks)[LANES], int at) {
    uint16x4_t low = {}, high = {};
    auto from = [&](int c) { return (const uint16_t*)(blocks[c] + at); };
    low = vld1_lane_u16(from(0), low, 0), high = vld1_lane_u16(from(4), high, 0);
    low = vld1_lane_u16(from(1), low, 1), high = vld1_lane_u16(from(5), high, 1);
    low = vld1_lane_u16(from(2), low, 2), high = vld1_lane_u16(from(6), high, 2);
    low = vld1_lane_u16(from(3), low, 3), high = vld1_lane_u16(from(7), high, 3);
    return {(vf)vcvt_f32_f16(vreinterpret_f16_u16(low)), (vf)vcvt_f32_f16(vreinterpret_f16_u16(high))};
}

// Byte i of every row goes to row i of `out`.
inline void transpose_bytes(const uint64_t (&rows)[LANES], uint8_t* out) {
    uint16x8_t pairs[4];  // of rows, byte by byte in turn
    for (int i = 0; i < 4; i++) {
        auto row = [&](int r) { return vcombine_u8(vcreate_u8(rows[r]), vcreate_u8(0)); };
        pairs[i] = vreinterpretq_u16_u8(vzip1q_u8(row(2 * i), row(2 * i + 1)));
    }
    const uint16x8x2_t a = vzipq_u16(pairs[0], pairs[1]), b = vzipq_u16(pairs[2], pairs[3]);
    for (int i = 0; i < 2; i++) {
        const uint32x4x2_t c = vzipq_u32(vreinterpretq_u32_u16(a.val[i]), vreinterpretq_u32_u16(b.val[i]));
        vst1q_u8(out + 32 * i, vreinterpretq_u8_u32(c.val[0]));
        vst1q_u8(out + 32 * i + 16, vreinterpretq_u8_u32(c.val[1]));
    }
}

}  // namespace octavo
