// Rows of x as integers, 32 values to a scale: in one byte, as llama.cpp does, or in two, which loses next to
// nothing. Two bytes cost AVX2 twice the products, but those go straight to sums of 32 bits.
#pragma once
#include "blocks.h"

namespace octavo {

#if defined(OCTAVO_NEON)
using i32x8 = Pair<vi>;
#else
typedef int16_t i16x16 __attribute__((vector_size(32)));
typedef int32_t i32x8 __attribute__((vector_size(32)));
#endif

struct Int8 {
    using Number = int8_t;
    static constexpr int TOP = 127, VECTORS = 1;  // vectors: of a part
};

struct Int16 {
    using Number = int16_t;
    static constexpr int TOP = 32767, VECTORS = 2;
};

// 32 values of x: scale * q. In two bytes, the even ones come before the odd ones; for NEON, all high bytes before all
// low ones.
template <class X>
struct QuantizedPart {
    typename X::Number q[PART];
    float scale, sum;      // sum: of the values
    int32_t half_sums[2];  // of q, by halves of the part
#if defined(OCTAVO_NEON)
    int32_t low_sums[2];  // of its low bytes
#endif
};

inline void narrow(const int32_t (&whole)[PART], int8_t* out) {
#if defined(__AVX2__)
    __m256i a[4];
    for (int i = 0; i < 4; i++) a[i] = read<__m256i>(whole + 8 * i);
    __m256i mixed = _mm256_packs_epi16(_mm256_packs_epi32(a[0], a[1]), _mm256_packs_epi32(a[2], a[3]));
    __m256i in_order = _mm256_permutevar8x32_epi32(mixed, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
    _mm256_storeu_si256((__m256i*)out, in_order);
#else
    for (int i = 0; i < PART; i++) out[i] = int8_t(whole[i]);
#endif
}

inline void narrow(const int32_t (&whole)[PART], int16_t* out) {
#if defined(__AVX2__)
    __m256 a[4];
    for (int i = 0; i < 4; i++) a[i] = read<__m256>(whole + 8 * i);
    auto write = [&](__m256 ab, __m256 cd, int16_t* to) {
        __m256i mixed = _mm256_packs_epi32((__m256i)ab, (__m256i)cd);
        __m256i in_order = _mm256_permutevar8x32_epi32(mixed, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
        _mm256_storeu_si256((__m256i*)to, in_order);
    };
    write(_mm256_shuffle_ps(a[0], a[1], 0x88), _mm256_shuffle_ps(a[2], a[3], 0x88), out);
    write(_mm256_shuffle_ps(a[0], a[1], 0xDD), _mm256_shuffle_ps(a[2], a[3], 0xDD), out + 16);
#elif defined(OCTAVO_NEON)
    for (int i = 0; i < PART; i += 8) {
        const int16x4_t low = vmovn_s32(vld1q_s32(whole + i)), high = vmovn_s32(vld1q_s32(whole + i + 4));
        const int16x8_t eight = vcombine_s16(low, high);
        vst1_s8((int8_t*)out + i, vshrn_n_s16(eight, 8));
        vst1_s8((int8_t*)out + PART + i, vmovn_s16(eight));
    }
#else
    for (int i = 0; i < PART; i++) out[i % 2 * 16 + i / 2] = int16_t(whole[i]);
#endif
}

template <class X>
void quantize_part(const float* x, QuantizedPart<X>& out) {
    vf top = {}, poison = {};
    for (int j = 0; j < VECTORS; j++) {
        vf v = load(x + j * VL);
        top = max(top, v < 0.0f ? -v : v);
        poison = poison + v * 0.0f;  // not-a-number if one of x is that or infinite
    }
    float highest = largest(top), inverse = highest > 1e-30f ? float(X::TOP) / highest : 0.0f;
    int32_t whole[PART];
    for (int j = 0; j < VECTORS; j++) {
        vi rounded = to_int(load(x + j * VL) * inverse);
        std::memcpy(whole + j * VL, &rounded, sizeof rounded);
    }
    narrow(whole, out.q);
    uint32_t first = 0, second = 0;  // these may wrap around where x is no number
    for (int j = 0; j < 16; j++) first += uint32_t(whole[j]);
    for (int j = 16; j < PART; j++) second += uint32_t(whole[j]);
    out.half_sums[0] = int32_t(first), out.half_sums[1] = int32_t(second);
#if defined(OCTAVO_NEON)
    for (int j = 0; j < 2; j++) {
        out.low_sums[j] = 0;
        for (int i = 16 * j; i < 16 * j + 16; i++) out.low_sums[j] += whole[i] & 255;
    }
#endif
    out.scale = highest / float(X::TOP) + sum(poison);
    out.sum = out.scale * float(int32_t(first + second));
}

}  // namespace octavo
