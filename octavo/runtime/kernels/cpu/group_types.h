// Types of octavo's own, for weights of other formats: 32 P weights that share a scale, P = 1 or 2. Weight bits
// lie as in GGUF's types. Offsets are made of the scale and a zero point, both float16; other scales are float32.
#pragma once
#include "block_types.h"

namespace octavo {

template <int P>
struct U4 : Quantized<4 + 16 * P, P, 15, 0, true> {
    static constexpr bool ZERO_POINT = true, PAIRED = P == 2;
    static const uint8_t* both(const uint8_t* b, int) { return b + 4; }
    OCTAVO_INLINE static u8x32 quants(const uint8_t* b, int s) {
        return P == 1 ? nibbles(b + 4) : moved(read<u8x32>(b + 4), s * 4, 0, 15);
    }
};

// Two bits each of 16 bytes: part s has bits 4 s and 4 s + 1, then the next two.
OCTAVO_INLINE u8x32 two_bits(const uint8_t* p, int s) {
    u16x8 q = read<u16x8>(p);
    return join((u8x16)(q >> 4 * s), (u8x16)(q >> (4 * s + 2))) & 3;
}

struct U2 : Quantized<20, 2, 3, 0, true> {
    static constexpr bool ZERO_POINT = true;
    OCTAVO_INLINE static u8x32 quants(const uint8_t* b, int s) { return two_bits(b + 4, s); }
};

struct U3 : Quantized<28, 2, 7, 0, true> {
    static constexpr bool ZERO_POINT = true;
    OCTAVO_INLINE static u8x32 quants(const uint8_t* b, int s) {
        return two_bits(b + 4, s) | moved(fifth_bits(b + 20 + 4 * s), 4, 2, 4);
    }
};

// The zero point counts from -128, as the weights do.
template <int P>
struct U8 : Quantized<4 + 32 * P, P, 128, 0, true> {
    static constexpr bool SIGNED = true, ZERO_POINT = true;
    OCTAVO_INLINE static u8x32 quants(const uint8_t* b, int s) { return read<u8x32>(b + 4 + PART * s); }
};

template <int P>
struct S8 : Quantized<4 + 32 * P, P, 128, 0, false> {
    static constexpr bool SIGNED = true;
    static constexpr Scale SCALE = Scale::FLOAT;
    OCTAVO_INLINE static u8x32 quants(const uint8_t* b, int s) { return read<u8x32>(b + 4 + PART * s); }
};

// E2M1, doubled to be whole. Also a type of GGUF.
struct MXFP4 : Quantized<17, 1, 12, 0, false> {
    static constexpr bool SIGNED = true;
    static constexpr Scale SCALE = Scale::POWER;
    OCTAVO_INLINE static u8x32 quants(const uint8_t* b, int) {
        const i8x16 table = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
        u8x32 q = nibbles(b + 1);
#if defined(__AVX2__)
        return (u8x32)_mm256_shuffle_epi8(_mm256_broadcastsi128_si256((__m128i)table), (__m256i)q);
#elif defined(OCTAVO_NEON)
        auto of = [&](u8x16 places) { return (u8x16)vqtbl1q_u8((uint8x16_t)table, (uint8x16_t)places); };
        return {of(q.low), of(q.high)};
#else
        for (int i = 0; i < PART; i++) q[i] = uint8_t(table[q[i]]);
        return q;
#endif
    }
};

// What bytes VL j … VL j + VL - 1, each below 16, stand for in a table.
OCTAVO_INLINE vf look_up(const float* table, u8x32 q, int j) {
    const uint8_t* places = (const uint8_t*)&q + VL * j;
#if defined(OCTAVO_AVX512)
    return _mm512_permutexvar_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)places)), load(table));
#elif defined(OCTAVO_AVX2)
    __m256i at = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)places));
    vf low = _mm256_permutevar8x32_ps(load(table), at), high = _mm256_permutevar8x32_ps(load(table + 8), at);
    return _mm256_blendv_ps(low, high, (vf)_mm256_slli_epi32(at, 28));
#else
    vf out;
    for (int i = 0; i < VL; i++) out[i] = table[places[i]];
    return out;
#endif
}

// The 16 levels of bitsandbytes' two types, of https://github.com/bitsandbytes-foundation/bitsandbytes.
alignas(64) constexpr float NF4_LEVELS[16] = {
    -1.0f, -0.6961928009986877f, -0.5250730514526367f, -0.39491748809814453f,
    -0.28444138169288635f, -0.18477343022823334f, -0.09105003625154495f, 0.0f,
    0.07958029955625534f, 0.16093020141124725f, 0.24611230194568634f, 0.33791524171829224f,
    0.44070982933044434f, 0.5626170039176941f, 0.7229568362236023f, 1.0f};
alignas(64) constexpr float FP4_LEVELS[16] = {
    0.0f, 0.005208333333f, 0.66666667f, 1.0f, 0.33333333f, 0.5f, 0.16666667f, 0.25f,
    0.0f, -0.005208333333f, -0.66666667f, -1.0f, -0.33333333f, -0.5f, -0.16666667f, -0.25f};

template <int BYTES_, int P>
struct Coded : Quantized<BYTES_, P, 255, 0, false> {
    static constexpr bool CODED = true;
    static constexpr Scale SCALE = Scale::FLOAT;
};

template <int P, const float (&LEVELS)[16]>
struct Levels : Coded<4 + 16 * P, P> {
    OCTAVO_INLINE static vf values(const uint8_t* b, int s, int j) {
        return look_up(LEVELS, U4<P>::quants(b, s), j);
    }
};

// E4M3 without infinities: a float16 of 2^8 times less, so that numbers too small to be normal stay.
template <int P>
struct F8 : Coded<4 + 32 * P, P> {
    OCTAVO_INLINE static vf values(const uint8_t* b, int s, int j) {
        const uint8_t* p = b + 4 + PART * s + VL * j;
        uint16_t halves[VL];
        for (int i = 0; i < VL; i++) halves[i] = uint16_t((p[i] & 0x80) << 8 | (p[i] & 0x7F) << 7);
        return load_f16(halves) * 256.0f;
    }
};

// NVFP4: E2M1 numbers; every 16 have a factor in E4M3 beside the scale.
alignas(64) constexpr float E2M1_LEVELS[16] = {0.0f, 0.5f, 1.0f, 1.5f, 2.0f, 3.0f, 4.0f, 6.0f,
                                               0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f};

struct NV4 : Coded<40, 2> {
    OCTAVO_INLINE static vf values(const uint8_t* b, int s, int j) {
        int bits = b[4 + 2 * s + VL * j / 16], exponent = bits >> 3 & 15, mantissa = bits & 7;
        float factor = exponent ? float(8 + mantissa) * float(1 << exponent) * 0x1p-10f : mantissa * 0x1p-9f;
        if (bits & 128) factor = -factor;
        return look_up(E2M1_LEVELS, moved(read<u8x32>(b + 8), s * 4, 0, 15), j) * factor;
    }
};

}  // namespace octavo
