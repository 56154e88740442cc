// Weights in GGUF's types, unpacked and rounded to bf16 as rows of tiles. Included by the product of tiles.
#pragma once
#include <algorithm>
#include <type_traits>

#include "amx.h"
#include "blocks.h"
#include "simd_512.h"

namespace octavo {

typedef uint16_t Tile[TILE_ROWS][PART];  // 16 rows of W, 16 rows of x, or 16 pairs of k of one of them

constexpr int64_t PIECE = 8;  // parts that are unpacked in one go: no block is longer

// A part of bf16.
inline halves rounded(const vf (&values)[VECTORS]) {
#if defined(OCTAVO_DOTS_512)
    return (halves)_mm512_cvtne2ps_pbh(values[1], values[0]);
#elif defined(OCTAVO_DOTS)  // a whole vector at a time: what two stores wrote would be late
    halves out;
    for (int j = 0; j < VECTORS; j += 2) {
        const bfloat16x8_t low = vcvtq_low_bf16_f32((float32x4_t)values[j]);
        const bfloat16x8_t both = vcvtq_high_bf16_f32(low, (float32x4_t)values[j + 1]);
        std::memcpy((uint16_t*)&out + j * VL, &both, sizeof both);
    }
    return out;
#else
    halves out;
    for (int j = 0; j < VECTORS; j++) store_bf16((uint16_t*)&out + j * VL, values[j]);
    return out;
#endif
}

// What rounding `values` to a part left of them, in bf16.
inline halves rest(vf (&values)[VECTORS], halves part) {
#if defined(OCTAVO_DOTS_512)
    const __m512i both = (__m512i)part;
    const __m256i sides[] = {_mm512_castsi512_si256(both), _mm512_extracti64x4_epi64(both, 1)};
    for (int j = 0; j < 2; j++) values[j] -= (vf)_mm512_slli_epi32(_mm512_cvtepu16_epi32(sides[j]), 16);
#else
    for (int j = 0; j < VECTORS; j++) values[j] = values[j] - load_bf16((const uint16_t*)&part + j * VL);
#endif
    return rounded(values);
}

// Half a part.
inline void store_half(uint16_t* to, const float* values) {
#if defined(OCTAVO_DOTS_512)
    _mm256_storeu_si256((__m256i*)to, (__m256i)_mm512_cvtneps_pbh(load(values)));
#else
    for (int j = 0; j < 16; j += VL) store_bf16(to + j, load(values + j));
#endif
}

#if defined(OCTAVO_AVX512)
// The first words of PIECE blocks: where blocks are whole words, most are picked out of two vectors.
template <int BYTES>
OCTAVO_INLINE __m256i first_words(const uint8_t* blocks) {
    auto word = [&](int block) { return _mm_loadu_si32(blocks + block * BYTES); };
    if constexpr (BYTES % 4 == 0) {
        constexpr int W = BYTES / 4, NEAR = 31 / W + 1;  // of these many
        const __m512i a = _mm512_loadu_si512(blocks), b = _mm512_loadu_si512(blocks + 64);
        const __m256i places = _mm256_setr_epi32(0, W, 2 * W, 3 * W, 4 * W, 5 * W, 6 * W, 7 * W);
        __m512i near = _mm512_permutex2var_epi32(a, _mm512_castsi256_si512(places), b);
        __m256i words = _mm512_castsi512_si256(near);
        unrolled<PIECE - NEAR>([&](auto i) {
            words = _mm256_mask_broadcastd_epi32(words, __mmask8(1 << (NEAR + i)), word(NEAR + i));
        });
        return words;
    } else {
        __m128i fours[2];
        for (int f = 0; f < 2; f++) {
            fours[f] = word(4 * f);
            unrolled<3>([&](auto i) {
                fours[f] = _mm_mask_broadcastd_epi32(fours[f], 2 << i, word(4 * f + 1 + i));
            });
        }
        return _mm256_set_m128i(fours[1], fours[0]);
    }
}
#endif

// The two halves that each of eight blocks begins with, as floats: what one part's scales are made of.
template <class Type>
struct Heads {
    alignas(64) float numbers[2 * PIECE];

    explicit Heads(const uint8_t* blocks) {
#if defined(OCTAVO_AVX512)
        _mm512_store_ps(numbers, _mm512_cvtph_ps(first_words<Type::BYTES>(blocks)));
#else
        for (int i = 0; i < 2 * PIECE; i++)
            numbers[i] = half(read<uint16_t>(blocks + i / 2 * Type::BYTES + i % 2 * 2));
#endif
        asm("" : "+m"(numbers));  // loads repeat a number for nothing, shuffles of a register do not
    }
};

// One of them, as Factors.
template <class Type>
struct OneFactor {
    vf scales, offsets;
    OneFactor(const Heads<Type>& heads, int64_t i)
        : scales(set1(heads.numbers[2 * i])),
          offsets(Type::MINIMUM ? set1(heads.numbers[2 * i + 1]) : scales * -zero<Type>) {}
    vf scale(int) const { return scales; }
    vf offset(int) const { return offsets; }
};

#if defined(OCTAVO_DOTS_512)

// What q = first … first + 15 stand for in part s of a block. Few values: all are made, then looked up.
template <class Type, class F>
OCTAVO_INLINE vf values_from(int first, int s, const F& factors) {
    const vf q = vf{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15} + float(first);
    return Type::MINIMUM ? fma(q, factors.scale(2 * s), factors.offset(2 * s))
                         : (q - float(Type::ZERO)) * factors.scale(2 * s);
}

inline halves look_up(__m512i places, __m512i values) { return (halves)_mm512_permutexvar_epi16(places, values); }
inline halves look_up(u8x32 places, __m512i values) {
    return look_up(_mm512_cvtepu8_epi16((__m256i)places), values);
}

// Blocks i and i + 1 of a piece, of 16 values each: one table holds both.
template <class Type, class Put>
OCTAVO_INLINE void round_two(const uint8_t* blocks, const Heads<Type>& heads, int64_t i, Put&& put) {
    vf first = values_from<Type>(0, 0, OneFactor<Type>(heads, i));
    vf second = values_from<Type>(0, 0, OneFactor<Type>(heads, i + 1));
    __m512i values = (__m512i)_mm512_cvtne2ps_pbh(second, first);
    put(i, look_up(Type::quants(blocks, 0), values));
    put(i + 1, look_up(Type::quants(blocks + Type::BYTES, 0) | 16, values));
}

// Parts s and s + 1 of a K block of 16 values each, which become parts i and i + 1: their q's are halves of the
// same bytes.
template <class Type, class F, class Put>
OCTAVO_INLINE void round_halves(const uint8_t* block, int s, const F& factors, int64_t i, Put&& put) {
    const __m512i both = _mm512_cvtepu8_epi16(read<__m256i>(Type::both(block, s)));
    const vf low = values_from<Type>(0, s, factors), high = values_from<Type>(0, s + 1, factors);
    const __m512i values = (__m512i)_mm512_cvtne2ps_pbh(low, high);
    put(i, look_up((both & _mm512_set1_epi16(15)) | _mm512_set1_epi16(16), values));
    put(i + 1, look_up(_mm512_srli_epi16(both, 4), values));
}
#endif

// Part s of a block in bf16.
template <class Type, class F>
OCTAVO_INLINE halves rounded_part(const uint8_t* block, int s, const F& factors) {
#if defined(OCTAVO_DOTS_512)
    if constexpr (Type::LARGEST < 32 && !Type::SIGNED) {
        __m512i values;
        vf first = values_from<Type>(0, s, factors);
        if constexpr (Type::LARGEST < 16)
            values = _mm512_castsi256_si512((__m256i)_mm512_cvtneps_pbh(first));
        else
            values = (__m512i)_mm512_cvtne2ps_pbh(values_from<Type>(16, s, factors), first);
        if constexpr (Type::FIFTH > 0) {
            const __m512i low = _mm512_cvtepu8_epi16((__m256i)nibbles(block + Type::FIFTH + 4));
            const __mmask32 fifth = read<uint32_t>(block + Type::FIFTH);
            return look_up(_mm512_mask_add_epi16(low, fifth, low, _mm512_set1_epi16(16)), values);
        }
        return look_up(Type::quants(block, s), values);
    }
#endif
    vf values[VECTORS];
    if constexpr (std::is_same_v<Type, Q8_0>)
        for (int j = 0; j < VECTORS; j++)
            values[j] = load_i8((const int8_t*)block + 2 + j * VL) * factors.scale(0);
    else
        unpack_part<Type>(block, s, factors, [&](auto j, vf w) { values[j] = w; });
    return rounded(values);
}

// Rows of a matrix of `size` columns.
struct Rows {
    const uint8_t* data;
    int64_t row_bytes, size;
    const uint8_t* end;  // of the matrix
};

// All parts of a block, of which the first is part `i`.
template <class Type, class Put>
OCTAVO_INLINE void unpack_block(const uint8_t* block, int64_t i, Put&& put) {
    const Factors<Type> factors(block);
#if defined(OCTAVO_DOTS_512)
    if constexpr (Type::PAIRED)
        return unrolled<Type::PARTS / 2>(
            [&](auto s) { round_halves<Type>(block, 2 * s, factors, i + 2 * s, put); });
#endif
    unrolled<Type::PARTS>([&](auto s) { put(i + s, rounded_part<Type>(block, s, factors)); });
}

// `count` parts of a row, from the beginning of a block; heads of PIECE blocks are read.
template <class Type, class Put>
OCTAVO_INLINE void unpack_blocks(const uint8_t* blocks, int64_t count, Put&& put) {
    if constexpr (Type::PARTS > 1 || Type::SCALE != Scale::HALF || Type::ZERO_POINT) {
        for (int64_t i = 0; i < count; i += Type::PARTS, blocks += Type::BYTES)
            unpack_block<Type>(blocks, i, put);
    } else {
        Heads<Type> heads(blocks);
        int64_t i = 0;
#if defined(OCTAVO_DOTS_512)
        if constexpr (Type::LARGEST < 16)
            for (; i + 2 <= count; i += 2, blocks += 2 * Type::BYTES) round_two<Type>(blocks, heads, i, put);
#endif
        for (; i < count; i++, blocks += Type::BYTES)
            put(i, rounded_part<Type>(blocks, 0, OneFactor<Type>(heads, i)));
    }
}

// Call put(i, part) for parts first … first + count - 1 of a row, at most PIECE, in order; i counts from `first`.
// Where blocks have several parts `first` is a multiple of eight, and blocks are whole.
// Floats have three parts for one, as factors of x in `Rounded`: of these the second is that before, and not put again.
template <class Type, class Put>
OCTAVO_INLINE void unpack_row(const Rows& rows, int64_t r, int64_t first, int64_t count, Put&& put) {
    const uint8_t* row = rows.data + r * rows.row_bytes;
    if constexpr (Type::DENSE) {
        constexpr int64_t TERMS = std::is_same_v<Type, F32> ? 3 : 1;
        for (int64_t i = -(first % TERMS); i < count; i += TERMS) {
            vf values[VECTORS];
            read_part<Type>(row, (first + i) / TERMS, rows.size, [&](int j, vf w) { values[j] = w; });
            const halves part = rounded(values);
            if (i >= 0) put(i, part);
            if (TERMS == 3 && i + 2 < count) put(i + 2, rest(values, part));
        }
    } else {
        constexpr int BYTES = PIECE / Type::PARTS * Type::BYTES;
        const uint8_t* blocks = row + first / Type::PARTS * Type::BYTES;
        uint8_t padded[BYTES];
        if (__builtin_expect(Type::PARTS == 1 && rows.end - blocks < BYTES, 0)) {
            std::memcpy(padded, blocks, size_t(rows.end - blocks));
            blocks = padded;
        }
        unpack_blocks<Type>(blocks, count, put);
    }
}

// Unpack pieces of `num_rows` rows as unpack_row: part i of row r goes to out[i][r].
template <class Type>
void unpack_piece(const Rows& rows, int64_t num_rows, int64_t first, int64_t count, Tile* out) {
    for (int64_t r = 0; r < num_rows; r++, out = reinterpret_cast<Tile*>(out[0][1]))
        unpack_row<Type>(rows, r, first, count,
                         [&](int64_t i, halves part) { std::memcpy(out[i][0], &part, sizeof part); });
}

using Unpack = void (*)(const Rows& rows, int64_t num_rows, int64_t first, int64_t count, Tile* out);

}  // namespace octavo
