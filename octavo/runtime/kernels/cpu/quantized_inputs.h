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

#if defined(OCTAVO_AVX512)
inline void narrow(const vi (&whole)[VECTORS], int8_t* out) {
    for (int j = 0; j < VECTORS; j++)
        _mm_storeu_si128((__m128i*)(out + j * VL), _mm512_cvtsepi32_epi8((__m512i)whole[j]));
}

inline void narrow(const vi (&whole)[VECTORS], int16_t* out) {
    typedef int16_t i16x32 __attribute__((vector_size(64)));
    const i16x32 even_first = {0, 2,  4,  6,  8,  10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30,
                               1, 3,  5,  7,  9,  11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31};
    const u8x32 low = (u8x32)_mm512_cvtsepi32_epi16((__m512i)whole[0]);
    const u8x32 high = (u8x32)_mm512_cvtsepi32_epi16((__m512i)whole[1]);
    const __m512i both = _mm512_inserti64x4(_mm512_castsi256_si512((__m256i)low), (__m256i)high, 1);
    _mm512_storeu_si512(out, _mm512_permutexvar_epi16((__m512i)even_first, both));
}

inline void add_halves(const vi (&whole)[VECTORS], int32_t (&sums)[2]) {
    for (int j = 0; j < 2; j++) sums[j] = _mm512_reduce_add_epi32((__m512i)whole[j]);
}
#else
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

inline void add_halves(const int32_t (&whole)[PART], int32_t (&sums)[2]) {
    uint32_t first = 0, second = 0;
    for (int j = 0; j < 16; j++) first += uint32_t(whole[j]);
    for (int j = 16; j < PART; j++) second += uint32_t(whole[j]);
    sums[0] = int32_t(first), sums[1] = int32_t(second);
}
#endif

template <class X>
void quantize_part(const float* x, QuantizedPart<X>& out) {
    vf top = {}, poison = {};
    for (int j = 0; j < VECTORS; j++) {
        vf v = load(x + j * VL);
        top = max(top, v < 0.0f ? -v : v);
        poison = poison + v * 0.0f;  // not-a-number if one of x is that or infinite
    }
    float highest = largest(top), inverse = highest > 1e-30f ? float(X::TOP) / highest : 0.0f;
#if defined(OCTAVO_AVX512)
    vi whole[VECTORS];
    for (int j = 0; j < VECTORS; j++) whole[j] = to_int(load(x + j * VL) * inverse);
#else
    int32_t whole[PART];
    for (int j = 0; j < VECTORS; j++) {
        vi rounded = to_int(load(x + j * VL) * inverse);
        std::memcpy(whole + j * VL, &rounded, sizeof rounded);
    }
#endif
    narrow(whole, out.q);
    add_halves(whole, out.half_sums);  // which may wrap around where x is no number
#if defined(OCTAVO_NEON)
    for (int j = 0; j < 2; j++) {
        out.low_sums[j] = 0;
        for (int i = 16 * j; i < 16 * j + 16; i++) out.low_sums[j] += whole[i] & 255;
    }
#endif
    out.scale = highest / float(X::TOP) + sum(poison);
    out.sum = out.scale * float(int32_t(uint32_t(out.half_sums[0]) + uint32_t(out.half_sums[1])));
}

}  // namespace octavo
