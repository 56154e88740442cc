// Weights in the types of block_types.h and group_types.h, as floats. Included by every product.
#pragma once
#include <cstdlib>

#include "group_types.h"

namespace octavo {

// Ask for `SIZE` bytes ahead of their use: rows are short and read several at a time, which the hardware does not
// foresee. An address past the end does no harm.
template <int SIZE>
inline void prefetch(const uint8_t* p) {
    for (int i = 0; i < SIZE; i += 64) __builtin_prefetch(p + i);
}

template <class Type>
constexpr float zero = float(Type::ZERO) + (Type::SIGNED ? SIGNED_BIAS : BIAS);

// 2^(e - 128); what is too small to be normal counts as 0 in products.
inline float power_of_two(uint8_t e) {
    uint32_t bits = e < 2 ? 0x00200000u << e : uint32_t(e - 1) << 23;
    return read<float>(&bits);
}

// The scale that a block begins with.
template <class Type>
OCTAVO_INLINE vf first_scale(const uint8_t* block) {
    if constexpr (Type::SCALE == Scale::FLOAT) return set1(read<float>(block));
    if constexpr (Type::SCALE == Scale::POWER) return set1(power_of_two(*block));
    return set1_half(block);
}

// Scales and offsets of one block of a quantized type. An offset that a type's ZERO makes also takes off the bias
// under which bytes become floats; it has few bits, so that nothing is rounded.
template <class Type, bool SEVERAL = Type::SEVERAL>
struct Factors {
    vf scales, offsets;

    Factors() = default;
    explicit Factors(const uint8_t* block) : scales(first_scale<Type>(block)) {
        if constexpr (Type::ZERO_POINT)
            offsets = scales * -set1_half(block + 2);
        else if constexpr (Type::SCALE == Scale::FLOAT)
            offsets = scales * -float(Type::ZERO);  // the bias times so many bits would be rounded
        else
            offsets = Type::MINIMUM ? set1_half(block + 2) : scales * -zero<Type>;
    }
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
    if constexpr (Type::CODED) {
        unrolled<VECTORS>([&](auto j) { emit(j, Type::values(block, s, j) * factors.scale(2 * s)); });
    } else {
        u8x32 q = Type::quants(block, s);
        unrolled<VECTORS>([&](auto j) {
            constexpr int at = j * VL / 16;
            vf whole = biased<Type::SIGNED, j>(q);
            if (Type::MINIMUM || Type::SCALE == Scale::FLOAT) whole = whole - (Type::SIGNED ? SIGNED_BIAS : BIAS);
            emit(j, fma(whole, factors.scale(2 * s + at), factors.offset(2 * s + at)));
        });
    }
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

// Call use(Type{}) for the tensor type with GGUF's number `id`, or ours (block_types.py). The caller knows the numbers: an unknown one is
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
        case 39: return use(MXFP4{});
        case 100: return use(U4<1>{});
        case 101: return use(U4<2>{});
        case 102: return use(U2{});
        case 103: return use(U3{});
        case 104: return use(U8<1>{});
        case 105: return use(U8<2>{});
        case 106: return use(S8<1>{});
        case 107: return use(S8<2>{});
        case 108: return use(Levels<1, NF4_LEVELS>{});
        case 109: return use(Levels<2, NF4_LEVELS>{});
        case 110: return use(Levels<1, FP4_LEVELS>{});
        case 111: return use(Levels<2, FP4_LEVELS>{});
        case 112: return use(F8<1>{});
        case 113: return use(F8<2>{});
        case 114: return use(NV4{});
        default: std::abort();
    }
}

}  // namespace octavo
