// GGUF's tensor types, 32 weights ("a part") at a time. Formats: ggml-quants.h of https://github.com/ggml-org/ggml.
//
// A quantized type says what the float and the integer kernels both need: `quants(block, s)`, the bytes of part s
// of a block, and how its scales are stored; weight = q * scale + offset. The bytes are never negative (but
// Q8_0's), as integer dot products want it: d * (q - 8) is q * d - 8 d, which rounds alike in a fused
// multiply-add. A dense type gives its values at once.
//
//   BYTES, PARTS  of a block                          LARGEST  |q| is at most this
//   ZERO          the q of weight 0                   MINIMUM  instead, the file has an offset
//   HALVES        every 16 weights have a scale       SIGNED   q may be negative
//   FIFTH         where q's fifth bits are, if all of a block's are together; the others are next
//   scale_bytes   of a block with several parts: 16 small integers, by which its one or two factors go
#pragma once
#include <cstdlib>

#include "simd.h"

namespace octavo {

constexpr int PART = 32;
constexpr int VECTORS = PART / VL;

struct Bytes16 {
    uint64_t first, second;
};

// Ask for `SIZE` bytes ahead of their use: rows are short and read several at a time, which the hardware does not
// foresee. An address past the end does no harm.
template <int SIZE>
inline void prefetch(const uint8_t* p) {
    for (int i = 0; i < SIZE; i += 64) __builtin_prefetch(p + i);
}

// Four bits each of 16 bytes: the low ones, then the high ones.
inline u8x32 nibbles(const uint8_t* p) {
    u8x16 q = read<u8x16>(p);
#if defined(__AVX2__)  // a load may repeat its bytes for nothing, joining costs a shuffle
    __m256i both = _mm256_broadcastsi128_si256((__m128i)q);
    return (u8x32)_mm256_srlv_epi64(both, _mm256_setr_epi64x(0, 0, 4, 4)) & 15;
#else
    return join(q, (u8x16)((u16x8)q >> 4)) & 15;
#endif
}

// Bit i of 32 as 0 or 16 in byte i: the fifth bit of Q5.
inline u8x32 fifth_bits(const uint8_t* p) {
    constexpr uint64_t bits = 0x8040201008040201;
    u8x32 mask = (u8x32)u64x4{bits, bits, bits, bits};
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

template <int BYTES_, int PARTS_, int LARGEST_, int ZERO_, bool MINIMUM_>
struct Quantized {
    static constexpr bool DENSE = false, SIGNED = false, HALVES = false, MINIMUM = MINIMUM_;
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
    static constexpr bool DENSE = true;
    static constexpr int BYTES = 4;
    static vf values(const uint8_t* p) { return load((const float*)p); }
};

struct F16 {
    static constexpr bool DENSE = true;
    static constexpr int BYTES = 2;
    static vf values(const uint8_t* p) { return load_f16((const uint16_t*)p); }
};

struct BF16 {
    static constexpr bool DENSE = true;
    static constexpr int BYTES = 2;
    static vf values(const uint8_t* p) { return load_bf16((const uint16_t*)p); }
};

template <class Type>
constexpr float zero = float(Type::ZERO) + (Type::SIGNED ? SIGNED_BIAS : BIAS);

// Scales and offsets of one block of a quantized type. An offset that a type's ZERO makes also takes off the bias
// under which bytes become floats; it has few bits, so that nothing is rounded.
template <class Type, bool SEVERAL = (Type::PARTS > 1)>
struct Factors {
    vf scales, offsets;

    Factors() = default;
    explicit Factors(const uint8_t* block)
        : scales(set1_half(block)),
          offsets(Type::MINIMUM ? set1_half(block + 2) : scales * -zero<Type>) {}
    vf scale(int) const { return scales; }
    vf offset(int) const { return offsets; }
};

template <class Type>
struct Factors<Type, true> {  // by half parts if Type::HALVES, else by parts
    float scales[16], offsets[16];

    Factors() = default;
    explicit Factors(const uint8_t* block) {
        Bytes16 bytes = Type::scale_bytes(block);
        float d = half(read<uint16_t>(block + Type::FACTOR));
        scaled<Type::HALVES>(bytes.first, d, scales);
        if (Type::MINIMUM) {
            scaled<false>(bytes.second, -half(read<uint16_t>(block + Type::FACTOR + 2)), offsets);
        } else {
            scaled<true>(bytes.second, d, scales + 8);
            for (int i = 0; i < 16; i++) offsets[i] = scales[i] * -zero<Type>;
        }
    }
    template <bool SIGNED>
    static void scaled(uint64_t bytes, float d, float* out) {
        f32x8 values = eight_bytes<SIGNED>(&bytes) * d;
        std::memcpy(out, &values, sizeof values);
    }
    vf scale(int half) const { return set1(scales[Type::HALVES ? half : half / 2]); }
    vf offset(int half) const { return set1(offsets[Type::HALVES ? half : half / 2]); }
};

// Call emit(j, weights) for the VECTORS vectors of part s of a block with `factors`, as Factors<Type>.
template <class Type, class F, class Emit>
OCTAVO_INLINE void unpack_part(const uint8_t* block, int s, const F& factors, Emit&& emit) {
    u8x32 q = Type::quants(block, s);
    unrolled<VECTORS>([&](auto j) {
        constexpr int at = j * VL / 16;
        vf whole = biased<Type::SIGNED, j>(q);
        if (Type::MINIMUM) whole = whole - BIAS;
        emit(j, fma(whole, factors.scale(2 * s + at), factors.offset(2 * s + at)));
    });
}

// Call emit(j, weights) for the VECTORS vectors of part `i` of a row of a dense type. Rows end at `size` weights;
// what is missing in the last part counts as 0.
template <class Type, class Emit>
inline void read_part(const uint8_t* row, int64_t i, int64_t size, Emit&& emit) {
    const uint8_t* p = row + i * PART * Type::BYTES;
    uint8_t padded[PART * Type::BYTES];
    if (size < (i + 1) * PART) {
        std::memset(padded, 0, sizeof padded);
        std::memcpy(padded, p, size_t(size - i * PART) * Type::BYTES);
        p = padded;
    }
    for (int j = 0; j < VECTORS; j++) emit(j, Type::values(p + j * VL * Type::BYTES));
}

// Call emit(r, i, weights) for every vector i of R rows of `size` weights, `row_bytes` apart: along all rows at
// once, every row from left to right.
template <class Type, int R, class Emit>
inline void unpack_rows(const uint8_t* rows, int64_t row_bytes, int64_t size, Emit&& emit) {
    if constexpr (Type::DENSE) {
        for (int64_t i = 0; i * PART < size; i++)
            for (int r = 0; r < R; r++)
                read_part<Type>(rows + r * row_bytes, i, size,
                                [&](int j, vf w) { emit(r, i * VECTORS + j, w); });
    } else {
        for (int64_t b = 0; b * Type::PARTS * PART < size; b++) {
            const uint8_t* blocks = rows + b * Type::BYTES;
            prefetch<R * Type::BYTES>(blocks + 2 * R * row_bytes + b * (R - 1) * Type::BYTES);
            Factors<Type> factors[R];
            unrolled<Type::PARTS * R>([&](auto n) {
                constexpr int r = n % R, s = n / R;
                if (s == 0) factors[r] = Factors<Type>(blocks + r * row_bytes);
                int64_t first = (b * Type::PARTS + s) * VECTORS;
                unpack_part<Type>(blocks + r * row_bytes, s, factors[r],
                                  [&](auto j, vf w) { emit(r, first + j, w); });
            });
        }
    }
}

// Call use(Type{}) for the tensor type with GGUF's number `id`. The caller knows the numbers: an unknown one is
// a fault of its own.
template <class Use>
void with_type(int id, Use&& use) {
    switch (id) {
        case 0: return use(F32{});
        case 1: return use(F16{});
        case 2: return use(Q4_0{});
        case 3: return use(Q4_1{});
        case 6: return use(Q5_0{});
        case 7: return use(Q5_1{});
        case 8: return use(Q8_0{});
        case 12: return use(Q4_K{});
        case 13: return use(Q5_K{});
        case 14: return use(Q6_K{});
        case 30: return use(BF16{});
        default: std::abort();
    }
}

}  // namespace octavo
