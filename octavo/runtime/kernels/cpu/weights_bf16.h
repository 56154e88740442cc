// Weights in GGUF's types, unpacked and rounded to bf16 as rows of tiles. Included by the product of tiles.
#pragma once
#include <algorithm>

#include "amx.h"
#include "blocks.h"

namespace octavo {

typedef uint16_t Tile[TILE_ROWS][PART];  // 16 rows of W, 16 rows of x, or 16 pairs of k of one of them

constexpr int64_t MOST_PARTS = 32;  // that are unpacked in one go
constexpr int64_t AHEAD = 2048;     // bytes between what is unpacked and what is asked for

inline f32x8 eight_halves(const uint16_t* p) {
#if defined(__F16C__)
    return _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p));
#else
    return f32x8{half(p[0]), half(p[1]), half(p[2]), half(p[3]), half(p[4]), half(p[5]), half(p[6]), half(p[7])};
#endif
}

inline void store_part(uint16_t* to, const vf (&values)[VECTORS]) {
#if defined(OCTAVO_AVX512) && defined(__AVX512BF16__)
    _mm512_storeu_si512(to, (__m512i)_mm512_cvtne2ps_pbh(values[1], values[0]));
#else
    for (int j = 0; j < VECTORS; j++) store_bf16(to + j * VL, values[j]);
#endif
}

// Scales and offsets of the blocks of a piece, of one part each, converted together.
template <class Type>
struct PieceFactors {
    static constexpr int EACH = Type::MINIMUM ? 2 : 1;
    float numbers[MOST_PARTS * EACH];

    PieceFactors(const uint8_t* blocks, int64_t count) {
        using Halves = std::conditional_t<EACH == 2, uint32_t, uint16_t>;
        Halves halves[MOST_PARTS];
        for (int64_t i = 0; i < count; i++) {
            Halves one = read<Halves>(blocks + i * Type::BYTES);
            asm("" : "+r"(one));  // in a plain register: vectors have enough to do
            halves[i] = one;
        }
        for (int64_t i = 0; i < count * EACH; i += 8) {  // with what is none behind the last
            f32x8 wide = eight_halves(reinterpret_cast<uint16_t*>(halves) + i);
            std::memcpy(numbers + i, &wide, sizeof wide);
        }
        asm("" : "+m"(numbers));  // loads repeat a number for nothing, shuffles of a register do not
    }
};

// One of them, as Factors.
template <class Type>
struct OneFactor {
    vf scales, offsets;
    OneFactor(const PieceFactors<Type>& piece, int64_t i)
        : scales(set1(piece.numbers[i * piece.EACH])),
          offsets(Type::MINIMUM ? set1(piece.numbers[i * piece.EACH + 1]) : scales * -zero<Type>) {}
    vf scale(int) const { return scales; }
    vf offset(int) const { return offsets; }
};

#if defined(OCTAVO_AVX512) && defined(__AVX512BF16__)
#define OCTAVO_TABLES

// What q = first … first + 15 stand for in part s of a block. Few values: all are made, then looked up.
template <class Type, class F>
OCTAVO_INLINE vf values_from(int first, int s, const F& factors) {
    const vf q = vf{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15} + float(first);
    return Type::MINIMUM ? fma(q, factors.scale(2 * s), factors.offset(2 * s))
                         : (q - float(Type::ZERO)) * factors.scale(2 * s);
}

inline void look_up(u8x32 places, __m512i values, uint16_t* out) {
    _mm512_storeu_si512(out, _mm512_permutexvar_epi16(_mm512_cvtepu8_epi16((__m256i)places), values));
}

// Blocks i and i + 1 of a piece, of 16 values each: one table holds both.
template <class Type>
OCTAVO_INLINE void round_two(const uint8_t* blocks, const PieceFactors<Type>& factors, int64_t i, Tile* out) {
    vf first = values_from<Type>(0, 0, OneFactor<Type>(factors, i));
    vf second = values_from<Type>(0, 0, OneFactor<Type>(factors, i + 1));
    __m512i values = (__m512i)_mm512_cvtne2ps_pbh(second, first);
    look_up(Type::quants(blocks, 0), values, out[0][0]);
    look_up(Type::quants(blocks + Type::BYTES, 0) | 16, values, out[1][0]);
}
#endif

// Part s of a block in bf16.
template <class Type, class F>
OCTAVO_INLINE void round_part(const uint8_t* block, int s, const F& factors, uint16_t* out) {
#if defined(OCTAVO_TABLES)
    if constexpr (Type::LARGEST < 32) {
        __m512i values;
        vf first = values_from<Type>(0, s, factors);
        if constexpr (Type::LARGEST < 16)
            values = _mm512_castsi256_si512((__m256i)_mm512_cvtneps_pbh(first));
        else
            values = (__m512i)_mm512_cvtne2ps_pbh(values_from<Type>(16, s, factors), first);
        return look_up(Type::quants(block, s), values, out);
    }
#endif
    vf values[VECTORS];
    if constexpr (Type::SIGNED)  // Q8_0
        for (int j = 0; j < VECTORS; j++)
            values[j] = load_i8((const int8_t*)block + 2 + j * VL) * factors.scale(0);
    else
        unpack_part<Type>(block, s, factors, [&](auto j, vf w) { values[j] = w; });
    store_part(out, values);
}

// Unpack `count` parts of a row of `size` weights, from part `first`, a multiple of eight so that blocks are
// whole; part i of them goes to out[i][0].
template <class Type>
void unpack_piece(const uint8_t* row, int64_t first, int64_t count, int64_t size, Tile* out) {
    if constexpr (Type::DENSE) {
        for (int64_t i = first; i < first + count; i++) {
            prefetch<PART * Type::BYTES>(row + i * PART * Type::BYTES + AHEAD);
            vf values[VECTORS];
            read_part<Type>(row, i, size, [&](int j, vf w) { values[j] = w; });
            store_part(out[i - first][0], values);
        }
    } else {
        const uint8_t* blocks = row + first / Type::PARTS * Type::BYTES;
        if constexpr (Type::PARTS > 1) {
            for (int64_t i = 0; i < count; i += Type::PARTS, blocks += Type::BYTES) {
                prefetch<Type::BYTES>(blocks + AHEAD);
                Factors<Type> factors(blocks);
                unrolled<Type::PARTS>([&](auto s) { round_part<Type>(blocks, s, factors, out[i + s][0]); });
            }
        } else {
            PieceFactors<Type> factors(blocks, count);
            int64_t i = 0;
#if defined(OCTAVO_TABLES)
            if constexpr (Type::LARGEST < 16)
                for (; i + 2 <= count; i += 2, blocks += 2 * Type::BYTES, out += 2) {
                    __builtin_prefetch(blocks + AHEAD);
                    round_two<Type>(blocks, factors, i, out);
                }
#endif
            for (; i < count; i++, blocks += Type::BYTES, out++) {
                __builtin_prefetch(blocks + AHEAD);
                round_part<Type>(blocks, 0, OneFactor<Type>(factors, i), (*out)[0]);
            }
        }
    }
}

using Unpack = void (*)(const uint8_t* row, int64_t first, int64_t count, int64_t size, Tile* out);

}  // namespace octavo
