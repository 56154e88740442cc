// GGUF's tensor types, 32 weights ("a part") at a time. Formats: ggml-quants.h of https://github.com/ggml-org/ggml.
//
// A quantized type says what the float and the integer kernels both need: `quants(block, s)`, the bytes of part s
// of a block, and how its scales are stored; weight = q * scale + offset. The bytes are never negative (but
// for SIGNED types), as integer dot products want it: d * (q - 8) is q * d - 8 d, which rounds alike in a fused
// multiply-add. A dense type gives its values at once; a coded one (`values(block, s, j)`) before its scale.
//
//   BYTES, PARTS  of a block                          LARGEST  |q| is at most this
//   ZERO          the q of weight 0                   MINIMUM  instead, the file has an offset
//   ZERO_POINT    that offset is -scale * zero        SIGNED   q may be negative
//   HALVES        every 16 weights have a scale       SCALE    what a block begins with
//   SEVERAL       parts have scales of their own      PAIRED   `both`: the bytes of an even part and the next
//   FIFTH         where q's fifth bits are, if all of a block's are together; the others are next
//   scale_bytes   of a block with several parts: 16 small integers, by which its one or two factors go
#pragma once
#include "simd.h"

namespace octavo {

constexpr int PART = 32;
constexpr int VECTORS = PART / VL;

struct Bytes16 {
    uint64_t first, second;
};

// Four bits each of 16 bytes: the low ones, then the high ones.
inline u8x32 nibbles(const uint8_t* p) {
    u8x16 q = read<u8x16>(p);
#if defined(OCTAVO_NEON)
    return {q & 15, q >> 4};
#elif defined(__AVX2__)  // a load may repeat its bytes for nothing, joining costs a shuffle
    __m256i both = _mm256_broadcastsi128_si256((__m128i)q);
    return (u8x32)_mm256_srlv_epi64(both, _mm256_setr_epi64x(0, 0, 4, 4)) & 15;
#else
    return join(q, (u8x16)((u16x8)q >> 4)) & 15;
#endif
}

// Bit i of 32 as 0 or 16 in byte i: the fifth bit of Q5.
inline u8x32 fifth_bits(const uint8_t* p) {
    constexpr uint64_t bits = 0x8040201008040201;
    const u8x32 mask = (u8x32)(u64x4{} + bits);
    return (u8x32)((each_eight_times(p) & mask) == mask) & 16;
}

// The bits `mask` (as they come out) of every byte, moved from bit `from` to bit `to`. In 16-bit lanes, as shifts
// of single bytes are slow; what comes over from the neighbour is masked off.
OCTAVO_INLINE u8x32 moved(u8x32 a, int from, int to, uint8_t mask) {
    return (from > to ? (u8x32)((u16x16)a >> (from - to)) : (u8x32)((u16x16)a << (to - from))) & mask;
}

// The 6-bit scales, then the 6-bit minima of the eight parts of a K block, out of 12 bytes.
inline Bytes16 six_bit_scales(const uint8_t* packed) {
    uint32_t a = read<uint32_t>(packed), b = read<uint32_t>(packed + 4), c = read<uint32_t>(packed + 8);
    constexpr uint32_t SIX = 0x3F3F3F3F, FOUR = 0x0F0F0F0F, HIGH = 0x30303030;
    uint32_t scales = (c & FOUR) | (a >> 2 & HIGH), minima = (c >> 4 & FOUR) | (b >> 2 & HIGH);
    return {(a & SIX) | uint64_t(scales) << 32, (b & SIX) | uint64_t(minima) << 32};
}

enum class Scale { HALF, FLOAT, POWER };  // POWER: a byte e means 2^(e - 128)

template <int BYTES_, int PARTS_, int LARGEST_, int ZERO_, bool MINIMUM_>
struct Quantized {
    static constexpr bool DENSE = false, CODED = false, SIGNED = false, HALVES = false, PAIRED = false,
                          ZERO_POINT = false, MINIMUM = MINIMUM_, SEVERAL = PARTS_ == 8;
    static constexpr Scale SCALE = Scale::HALF;
    static constexpr int BYTES = BYTES_, PARTS = PARTS_, LARGEST = LARGEST_, ZERO = ZERO_, FACTOR = 0,
                         FIFTH = 0;
};

struct Q4_0 : Quantized<18, 1, 15, 8, false> {
    OCTAVO_INLINE static u8x32 quants(const uint8_t* b, int) { return nibbles(b + 2); }
};

struct Q4_1 : Quantized<20, 1, 15, 0, true> {
    OCTAVO_INLINE static u8x32 quants(const uint8_t* b, int) { return nibbles(b + 4); }
};

struct Q5_0 : Quantized<22, 1, 31, 16, false> {
    static constexpr int FIFTH = 2;
    OCTAVO_INLINE static u8x32 quants(const uint8_t* b, int) {
        return nibbles(b + FIFTH + 4) | fifth_bits(b + FIFTH);
    }
};

struct Q5_1 : Quantized<24, 1, 31, 0, true> {
    static constexpr int FIFTH = 4;
    OCTAVO_INLINE static u8x32 quants(const uint8_t* b, int) {
        return nibbles(b + FIFTH + 4) | fifth_bits(b + FIFTH);
    }
};

struct Q8_0 : Quantized<34, 1, 128, 0, false> {
    static constexpr bool SIGNED = true;
    OCTAVO_INLINE static u8x32 quants(const uint8_t* b, int) { return read<u8x32>(b + 2); }
};

struct Q4_K : Quantized<144, 8, 15, 0, true> {
    static constexpr bool PAIRED = true;
    static Bytes16 scale_bytes(const uint8_t* b) { return six_bit_scales(b + 4); }
    static const uint8_t* both(const uint8_t* b, int s) { return b + 16 + s / 2 * 32; }  // parts s and s + 1
    OCTAVO_INLINE static u8x32 quants(const uint8_t* b, int s) {
        return moved(read<u8x32>(both(b, s)), s % 2 * 4, 0, 15);
    }
};

struct Q5_K : Quantized<176, 8, 31, 0, true> {
    static Bytes16 scale_bytes(const uint8_t* b) { return six_bit_scales(b + 4); }
    OCTAVO_INLINE static u8x32 quants(const uint8_t* b, int s) {
        u8x32 low = moved(read<u8x32>(b + 48 + s / 2 * 32), s % 2 * 4, 0, 15);
        return low | moved(read<u8x32>(b + 16), s, 4, 16);
    }
};

struct Q6_K : Quantized<210, 8, 63, 32, false> {
    static constexpr bool HALVES = true;
    static constexpr int FACTOR = 208;
    static Bytes16 scale_bytes(const uint8_t* b) { return read<Bytes16>(b + 192); }
    OCTAVO_INLINE static u8x32 quants(const uint8_t* b, int s) {
        int quarter = s % 4;
        u8x32 low = moved(read<u8x32>(b + s / 4 * 64 + quarter % 2 * 32), quarter / 2 * 4, 0, 15);
        return low | moved(read<u8x32>(b + 128 + s / 4 * 32), quarter * 2, 4, 48);
    }
};

struct F32 {
    static constexpr bool DENSE = true, CODED = false;
    static constexpr int BYTES = 4;
    static vf values(const uint8_t* p) { return load((const float*)p); }
};

struct F16 {
    static constexpr bool DENSE = true, CODED = false;
    static constexpr int BYTES = 2;
    static vf values(const uint8_t* p) { return load_f16((const uint16_t*)p); }
};

struct BF16 {
    static constexpr bool DENSE = true, CODED = false;
    static constexpr int BYTES = 2;
    static vf values(const uint8_t* p) { return load_bf16((const uint16_t*)p); }
};

}  // namespace octavo
