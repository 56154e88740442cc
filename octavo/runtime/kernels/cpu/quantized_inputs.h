// Rows of x as integers, 32 values to a scale: in one byte, as llama.cpp does, or in two, which loses next to
// nothing. Two bytes cost AVX2 twice the products, but those go straight to sums of 32 bits.
#pragma once
#include <algorithm>

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
// Quarter p of the result is a[p]'s four, added up or what else `both` does.
template <class Both>
inline vi quarters(const vi (&a)[4], Both&& both) {
    auto halves = [&](vi b, vi c) {
        return both((vi)_mm512_shuffle_i32x4((__m512i)b, (__m512i)c, 0x88),
                    (vi)_mm512_shuffle_i32x4((__m512i)b, (__m512i)c, 0xDD));
    };
    return halves(halves(a[0], a[1]), halves(a[2], a[3]));
}

template <int ORDER>
inline vi in_quarters(vi a) {
    return (vi)_mm512_shuffle_epi32((__m512i)a, _MM_PERM_ENUM(ORDER));
}

// Numbers of a part, of both vectors four in turn, to their places.
inline void write_packed(__m512i q, int16_t* out) {
    typedef int16_t i16x32 __attribute__((vector_size(64)));
    const i16x32 even_first = {0, 2, 8, 10, 16, 18, 24, 26, 4, 6, 12, 14, 20, 22, 28, 30,
                               1, 3, 9, 11, 17, 19, 25, 27, 5, 7, 13, 15, 21, 23, 29, 31};
    _mm512_storeu_si512(out, _mm512_permutexvar_epi16((__m512i)even_first, q));
}
inline void write_packed(__m512i q, int8_t* out) {
    const __m512i in_order = _mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7);
    _mm256_storeu_si256((__m256i*)out, _mm512_cvtsepi16_epi8(_mm512_permutexvar_epi64(in_order, q)));
}

// Four parts at a time, the last one again where they end: what is one number for each is made for four at once.
template <class X>
void quantize_row(const float* x, int64_t parts, QuantizedPart<X>* out) {
    for (int64_t i = 0; i < parts; i += 4) {
        int64_t at[4];
        vi top[4], sums[4];
        for (int p = 0; p < 4; p++) {
            at[p] = std::min(i + p, parts - 1);
            auto amount = [&](int j) {
                return _mm512_and_si512((__m512i)load(x + at[p] * PART + j * VL), _mm512_set1_epi32(0x7FFFFFFF));
            };
            top[p] = (vi)_mm512_max_epi32(amount(0), amount(1));  // what is no number is above all that are
        }
        auto larger = [](vi a, vi b) { return (vi)_mm512_max_epi32((__m512i)a, (__m512i)b); };
        vi all = quarters(top, larger);
        all = larger(all, in_quarters<0x4E>(all));
        const vf highest = (vf)larger(all, in_quarters<0xB1>(all));
        const vf inverse = highest > 1e-30f ? float(X::TOP) / highest : vf{};
        for (int p = 0; p < 4; p++) {
            const vf factor = (vf)_mm512_permutexvar_ps(_mm512_set1_epi32(4 * p), inverse);
            auto whole = [&](int j) { return (__m512i)to_int(load(x + at[p] * PART + j * VL) * factor); };
            const __m512i q = _mm512_packs_epi32(whole(0), whole(1));
            write_packed(q, out[at[p]].q);
            sums[p] = (vi)_mm512_madd_epi16(q, _mm512_set1_epi16(1));
        }
        vi halves = quarters(sums, [](vi a, vi b) { return a + b; });  // in each two of the first half, two of the second
        halves += in_quarters<0xB1>(halves);
        const vf scale = highest / float(X::TOP) + highest * 0.0f;  // no number if one of x is none or infinite
        const vf sum = scale * _mm512_cvtepi32_ps((__m512i)(halves + in_quarters<0x4E>(halves)));
        __m512 rest = _mm512_mask_mov_ps((vf)in_quarters<0x80>(halves), 0x1111, scale);
        rest = _mm512_mask_mov_ps(rest, 0x2222, sum);
        unrolled<4>([&](auto p) { _mm_storeu_ps(&out[at[p]].scale, _mm512_extractf32x4_ps(rest, p)); });
    }
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

template <class X>
void quantize_row(const float* x, int64_t parts, QuantizedPart<X>* out) {
    for (int64_t i = 0; i < parts; i++) quantize_part(x + i * PART, out[i]);
}
#endif

}  // namespace octavo
