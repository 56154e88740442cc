// GGUF's tensor types, 32 weights at a time. Formats: ggml-quants.h of https://github.com/ggml-org/ggml.
//
// A quantized type gives `part(row, i)`: weights 32 i … 32 i + 31 of a row as bytes with a scale and an
// offset for each half, weight = q * scale + offset; the float and the integer kernels share this one
// decoder. The bytes are never negative (but Q8_0's), as integer dot products want it: d * (q - 8) is written
// q * d - 8 d, which rounds alike in a fused multiply-add. A dense type gives its values at once.
#pragma once
#include <cstdlib>

#include "simd.h"

namespace octavo {

constexpr int PART = 32;
constexpr int VECTORS = PART / VL;

struct Part {
    i8x16 q[2];
    float scale[2];
    float offset[2];
};

// Bits of two bytes to sixteen bytes of 0 or 16: the fifth bit of Q5.
inline u8x16 fifth_bits(uint32_t bits) {
    constexpr uint64_t EACH = 0x0101010101010101;
    u64x2 spread = {(bits & 0xFF) * EACH, (bits >> 8 & 0xFF) * EACH};
    constexpr u8x16 mask = {1, 2, 4, 8, 16, 32, 64, 128, 1, 2, 4, 8, 16, 32, 64, 128};
    return (u8x16)(((u8x16)spread & mask) == mask) & 16;
}

// `width` bits of every byte, from bit `from` upwards. In 16-bit lanes, as shifts of single bytes are slow;
// what comes over from the neighbour lies above the mask.
inline u8x16 field(u8x16 a, int from, int width) {
    return (u8x16)((u16x8)a >> from) & uint8_t((1 << width) - 1);
}

struct Q4_0 {
    static constexpr bool DENSE = false, SIGNED = false, TWO_SCALES = false;
    static Part part(const uint8_t* row, int64_t i) {
        const uint8_t* b = row + i * 18;
        u8x16 q = read<u8x16>(b + 2);
        float d = half(read<uint16_t>(b));
        return {{(i8x16)(q & 15), (i8x16)(q >> 4)}, {d, d}, {-8 * d, -8 * d}};
    }
};

struct Q4_1 {
    static constexpr bool DENSE = false, SIGNED = false, TWO_SCALES = false;
    static Part part(const uint8_t* row, int64_t i) {
        const uint8_t* b = row + i * 20;
        u8x16 q = read<u8x16>(b + 4);
        float d = half(read<uint16_t>(b)), m = half(read<uint16_t>(b + 2));
        return {{(i8x16)(q & 15), (i8x16)(q >> 4)}, {d, d}, {m, m}};
    }
};

struct Q5_0 {
    static constexpr bool DENSE = false, SIGNED = false, TWO_SCALES = false;
    static Part part(const uint8_t* row, int64_t i) {
        const uint8_t* b = row + i * 22;
        u8x16 q = read<u8x16>(b + 6);
        uint32_t high = read<uint32_t>(b + 2);
        float d = half(read<uint16_t>(b));
        i8x16 low = (i8x16)((q & 15) | fifth_bits(high)), upper = (i8x16)((q >> 4) | fifth_bits(high >> 16));
        return {{low, upper}, {d, d}, {-16 * d, -16 * d}};
    }
};

struct Q5_1 {
    static constexpr bool DENSE = false, SIGNED = false, TWO_SCALES = false;
    static Part part(const uint8_t* row, int64_t i) {
        const uint8_t* b = row + i * 24;
        u8x16 q = read<u8x16>(b + 8);
        uint32_t high = read<uint32_t>(b + 4);
        float d = half(read<uint16_t>(b)), m = half(read<uint16_t>(b + 2));
        i8x16 low = (i8x16)((q & 15) | fifth_bits(high)), upper = (i8x16)((q >> 4) | fifth_bits(high >> 16));
        return {{low, upper}, {d, d}, {m, m}};
    }
};

struct Q8_0 {
    static constexpr bool DENSE = false, SIGNED = true, TWO_SCALES = false;
    static Part part(const uint8_t* row, int64_t i) {
        const uint8_t* b = row + i * 34;
        float d = half(read<uint16_t>(b));
        return {{read<i8x16>(b + 2), read<i8x16>(b + 18)}, {d, d}, {}};
    }
};

// The 6-bit scale and minimum of part `s` (0 … 7) of a K block, out of 12 bytes.
inline void scale_and_min(const uint8_t* packed, int s, int& scale, int& min) {
    if (s < 4) {
        scale = packed[s] & 63;
        min = packed[s + 4] & 63;
    } else {
        scale = (packed[s + 4] & 15) | (packed[s - 4] >> 6) << 4;
        min = (packed[s + 4] >> 4) | (packed[s] >> 6) << 4;
    }
}

struct Q4_K {
    static constexpr bool DENSE = false, SIGNED = false, TWO_SCALES = false;
    static Part part(const uint8_t* row, int64_t i) {
        const uint8_t* b = row + i / 8 * 144;
        int s = int(i % 8), scale, min, shift = s % 2 * 4;
        scale_and_min(b + 4, s, scale, min);
        float d = half(read<uint16_t>(b)) * float(scale), m = -(half(read<uint16_t>(b + 2)) * float(min));
        const uint8_t* q = b + 16 + s / 2 * 32;
        u8x16 first = field(read<u8x16>(q), shift, 4), second = field(read<u8x16>(q + 16), shift, 4);
        return {{(i8x16)first, (i8x16)second}, {d, d}, {m, m}};
    }
};

struct Q5_K {
    static constexpr bool DENSE = false, SIGNED = false, TWO_SCALES = false;
    static Part part(const uint8_t* row, int64_t i) {
        const uint8_t* b = row + i / 8 * 176;
        int s = int(i % 8), scale, min, shift = s % 2 * 4;
        scale_and_min(b + 4, s, scale, min);
        float d = half(read<uint16_t>(b)) * float(scale), m = -(half(read<uint16_t>(b + 2)) * float(min));
        const uint8_t* q = b + 48 + s / 2 * 32;
        u8x16 first = field(read<u8x16>(q), shift, 4) | field(read<u8x16>(b + 16), s, 1) << 4;
        u8x16 second = field(read<u8x16>(q + 16), shift, 4) | field(read<u8x16>(b + 32), s, 1) << 4;
        return {{(i8x16)first, (i8x16)second}, {d, d}, {m, m}};
    }
};

struct Q6_K {
    static constexpr bool DENSE = false, SIGNED = false, TWO_SCALES = true;
    static Part part(const uint8_t* row, int64_t i) {
        const uint8_t* b = row + i / 8 * 210;
        int s = int(i % 8), quarter = s % 4, shift = quarter / 2 * 4;
        const uint8_t* low = b + s / 4 * 64 + quarter % 2 * 32;
        const uint8_t* high = b + 128 + s / 4 * 32;
        const int8_t* scales = (const int8_t*)(b + 192) + s * 2;
        float d = half(read<uint16_t>(b + 208));
        u8x16 first = field(read<u8x16>(low), shift, 4) | field(read<u8x16>(high), quarter * 2, 2) << 4;
        u8x16 second = field(read<u8x16>(low + 16), shift, 4) | field(read<u8x16>(high + 16), quarter * 2, 2)
                                                                    << 4;
        float a = d * float(scales[0]), c = d * float(scales[1]);
        return {{(i8x16)first, (i8x16)second}, {a, c}, {-32 * a, -32 * c}};
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

// Call emit(j, weights) for the VECTORS vectors of part `i` of a row. Rows of a dense type end at `size`
// weights; what is missing in the last part counts as 0.
template <class Type, class Emit>
inline void unpack(const uint8_t* row, int64_t i, int64_t size, Emit&& emit) {
    if constexpr (Type::DENSE) {
        const uint8_t* p = row + i * PART * Type::BYTES;
        uint8_t padded[PART * Type::BYTES];
        if (size < (i + 1) * PART) {
            std::memset(padded, 0, sizeof padded);
            std::memcpy(padded, p, size_t(size - i * PART) * Type::BYTES);
            p = padded;
        }
        for (int j = 0; j < VECTORS; j++) emit(j, Type::values(p + j * VL * Type::BYTES));
    } else {
        Part part = Type::part(row, i);
        for (int j = 0; j < VECTORS; j++) {
            int h = j * VL / 16;
            vf q = widen(part.q[h], j * VL % 16 / VL), d = set1(part.scale[h]);
            emit(j, Type::SIGNED ? q * d : fma(q, d, set1(part.offset[h])));
        }
    }
}

// Call use(Type{}) for the tensor type with GGUF's number `id`. The caller
// knows the numbers: an unknown one is a fault of its own.
template <class Use>
void with_type(int id, Use&& use) {
    switch (id) {
        case 0:
            use(F32{});
            return;
        case 1:
            use(F16{});
            return;
        case 2:
            use(Q4_0{});
            return;
        case 3:
            use(Q4_1{});
            return;
        case 6:
            use(Q5_0{});
            return;
        case 7:
            use(Q5_1{});
            return;
        case 8:
            use(Q8_0{});
            return;
        case 12:
            use(Q4_K{});
            return;
        case 13:
            use(Q5_K{});
            return;
        case 14:
            use(Q6_K{});
            return;
        case 30:
            use(BF16{});
            return;
        default:
            std::abort();
    }
}

}  // namespace octavo
