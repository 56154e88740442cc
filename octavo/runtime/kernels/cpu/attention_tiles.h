// What attention by products of tiles reads and writes: its work space, and queries, keys and values as tiles.
// Included by attention_tiles.cpp, which says what they are for.
#pragma once
#include "amx.h"
#include "attention.h"
#include "simd_512.h"

#if defined(OCTAVO_TILES) || defined(OCTAVO_VECTOR_TILES)

namespace octavo {
namespace {

constexpr int ROWS = 16;           // queries beside each other
constexpr int MOST_BLOCKS = 4;     // of so many rows, that are multiplied together
constexpr int64_t MOST_TILES = 4;  // of keys, whose weights wait together
constexpr int64_t TILE_FLOATS = 256;
constexpr float NOTHING = -5e29f;  // the highest score of a row that saw no key
constexpr float HIDDEN = -1e36f;   // … and of a key it must not see, below that with any sane scale
constexpr float LOG2_E = 1.44269504088896341f;
constexpr float SLACK = 8;  // by how much a score may lie above those that its row's sums are scaled to

// How many tiles of keys `rows` see in one go. A few read them once in any case, as they come.
int64_t tiles_at_once(int64_t rows) { return rows > ROWS ? MOST_TILES : 1; }

// How many keys of a tile are multiplied if `left` may be seen: whole pairs of 16.
int keys_of(int64_t left) { return int(std::min<int64_t>(TILE, round_up(left, 32))); }

int64_t terms_of(const Attention& job) { return job.cache.type == CACHE_F32 ? 2 : 1; }

// Work space, in tiles but for the last four. Second terms lie behind the first ones of the same rows or keys.
struct Space {
    float *queries;  // per 16 rows: head_dim / 32 tiles of 16 pairs of components x 16 rows
    float *values;   // per 32 keys: head_dim / 16 tiles of 16 pairs of keys x 16 components
    float *scores;   // per 16 rows: 64 keys x 16 rows
    float *weights;  // per 16 rows: for each 32 keys 16 rows x 16 pairs of keys
    uint8_t* zeros;          // a key, or a value
    int32_t *begins, *ends;  // of what rows see; behind the last row, of that
    float* widened;          // of what is not bf16: for each tile keys and then values in bf16

    static constexpr int64_t SCORES = TILE / 16 * TILE_FLOATS, WEIGHTS = MOST_TILES * TILE / 32 * TILE_FLOATS;

    static int64_t floats(const Attention& job, int64_t rows) {
        int64_t size = job.cache.head_dim, tiles = tiles_at_once(rows), terms = terms_of(job);
        int64_t widened = job.cache.type == CACHE_BF16 ? 0 : terms * tiles * TILE * size;
        return round_up(rows, ROWS) * (terms * size / 2 + 2) + terms * tiles * TILE * size / 2 +
               MOST_BLOCKS * (SCORES + terms * WEIGHTS) + size + widened;
    }
    Space(float* space, const Attention& job, int64_t rows) : queries(space) {
        const int64_t all = round_up(rows, ROWS), size = job.cache.head_dim, terms = terms_of(job);
        values = queries + terms * all * size / 2;
        scores = values + terms * tiles_at_once(rows) * TILE * size / 2;
        weights = scores + MOST_BLOCKS * SCORES;
        zeros = (uint8_t*)(weights + terms * MOST_BLOCKS * WEIGHTS);
        begins = (int32_t*)zeros + size;
        ends = begins + all;
        widened = (float*)ends + all;
    }
};

// Places of even and odd floats of 32; of those in order that `pack_values` puts in two tiles.
constexpr words EVEN = {0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30}, ODD = EVEN + 1;
constexpr words FRONT = {0, 1, 2, 3, 16, 17, 18, 19, 4, 5, 6, 7, 20, 21, 22, 23}, BACK = FRONT + 8;

// Two floats in each word to the same in bf16; what is left of them goes `gap` floats behind.
template <int TERMS>
inline void put_pairs(floats even, floats odd, float* to, int64_t gap) {
    words both = pairs(even, odd);
    std::memcpy(to, &both, 64);
    if constexpr (TERMS == 1) return;
    both = pairs(even - (floats)(both << 16), odd - (floats)(both & 0xFFFF0000));
    std::memcpy(to + gap, &both, 64);
}

// 32 floats side by side, in order.
template <int TERMS>
inline void put_floats(const float* from, float* to, int64_t gap) {
    floats low = at<floats>(from), high = at<floats>(from + 16);
    put_pairs<TERMS>(__builtin_shuffle(low, high, EVEN), __builtin_shuffle(low, high, ODD), to, gap);
}

template <int TERMS>
void pack_queries(const Attention& job, const Piece& piece, float* to) {
    int64_t rows = piece.rows(job), size = job.cache.head_dim, gap = ROWS * size / 2;
    for (int64_t first = 0; first < rows; first += ROWS, to += (TERMS - 1) * gap)
        for (int64_t d = 0; d < size; d += 32, to += TILE_FLOATS) {
            for (int term = 0; term < TERMS; term++) std::fill_n(to + term * gap, TILE_FLOATS, 0.0f);
            for (int64_t i = 0; i < std::min<int64_t>(ROWS, rows - first); i++)
                put_floats<TERMS>(piece.query(job, first + i) + d, to + 16 * i, gap);
            for (int term = 0; term < TERMS; term++) turn(to + term * gap);
        }
}

// `size` numbers of int8, times `scale`, to bf16.
inline void widen(const uint8_t* from, float scale, int64_t size, uint16_t* to) {
    for (int64_t d = 0; d < size; d += 32) {
        integers both = __builtin_convertvector(at<u16x16>(from + d), integers);
        integers even = (both << 24) >> 24, odd = (both << 16) >> 24;
        words row = pairs(__builtin_convertvector(even, floats) * scale,
                          __builtin_convertvector(odd, floats) * scale);
        std::memcpy(to + d, &row, 64);
    }
}

// One tile of keys: where each 16 of them and each value are, and the scales of 16.
struct Cached {
    const uint8_t *keys[TILE / 16], *values[TILE], *scales[TILE / 16];
    int64_t key_stride[TILE / 16];

    Cached() = default;
    Cached(const Attention& job, const Piece& piece, int64_t tile, Range seen, const uint8_t* zeros) {
        int64_t slot = job.cache.slot_bytes(), to_value = job.cache.key_to_value();
        for (int first = 0; first < TILE; first += 16) {
            bool some = first < seen.end && first + 16 > seen.begin;
            const uint8_t* key = some ? piece.key(job, tile + first) : zeros;
            keys[first / 16] = key;
            key_stride[first / 16] = some ? slot : 0;
            scales[first / 16] = some ? piece.key_scale(job, tile + first) : nullptr;
            for (int i = first; i < first + 16; i++)
                values[i] = i >= seen.begin && i < seen.end ? key + to_value + (i - first) * slot : zeros;
        }
    }
    // What was int8 in bf16, in `to`: keys, then values. Places where nothing is stay where they are: zeros.
    void widen_all(const Cache& cache, const uint8_t* zeros, uint16_t* to) {
        const int64_t size = cache.head_dim, to_value = cache.key_to_value();
        for (int i = 0; i < TILE; i++) {
            const uint8_t* scale = scales[i / 16] + i % 16 * sizeof(float);
            uint16_t *key = to + i * size, *value = key + TILE * size;
            const uint8_t* packed = keys[i / 16] + i % 16 * key_stride[i / 16];
            if (scales[i / 16]) widen(packed, read<float>(scale), size, key);
            if (values[i] == zeros) continue;
            widen(values[i], read<float>(scale + to_value), size, value);
            values[i] = (uint8_t*)value;
        }
        for (int first = 0; first < TILE; first += 16) {
            if (!scales[first / 16]) continue;
            keys[first / 16] = (uint8_t*)(to + first * size);
            key_stride[first / 16] = 2 * size;
        }
    }
    // Floats of the first `count` keys and values as two numbers each.
    void split(int count, const Cache& cache, float* to) {
        const int64_t size = cache.head_dim, row = size / 2;
        const float* begin = to;
        for (int i = 0; i < count; i++, to += row) {
            const uint8_t* key = keys[i / 16] + i % 16 * key_stride[i / 16];
            for (int64_t d = 0; d < size; d += 32) {
                put_floats<2>((const float*)key + d, to + d / 2, 2 * TILE * row);
                put_floats<2>((const float*)values[i] + d, to + TILE * row + d / 2, 2 * TILE * row);
            }
            values[i] = (uint8_t*)(to + TILE * row);
        }
        for (int first = 0; first < count; first += 16) {
            keys[first / 16] = (uint8_t*)(begin + first * row);
            key_stride[first / 16] = 4 * row;
        }
    }
    void prefetch(int64_t bytes) const {
        for (int i = 0; i < TILE; i++)
            for (int64_t b = 0; b < bytes; b += 64) {
                __builtin_prefetch(keys[i / 16] + i % 16 * key_stride[i / 16] + b, 0, 2);
                __builtin_prefetch(values[i] + b, 0, 2);
            }
    }
};

// Bytes from what `split` made of a key or a value to its second term.
constexpr int64_t term_gap(int64_t size) { return 4 * TILE * size; }

// Two neighbours' components side by side; of 32, the first tile gets 0-3, 8-11, …, the second 4-7, 12-15, …
// Of the first `count` keys: all that may be seen.
inline void pack_values(const Cached& cached, int count, int64_t size, int64_t terms, float* to) {
    halves low, high;
    for (int i = 0; i < 32; i++) {
        low[i] = uint16_t(i / 8 * 8 + i % 8 / 2 + i % 2 * 32);
        high[i] = uint16_t(low[i] + 4);
    }
    for (int64_t pair = 0; pair < terms * (count / 2); pair++) {
        const int64_t term = pair / (count / 2), key = pair % (count / 2) * 2;
        float* of_keys = to + (key / 32 * terms + term) * (16 * size) + key % 32 / 2 * 16;
        for (int64_t d = 0; d < size; d += 32) {
            const int64_t from = term * term_gap(size) + 2 * d;
            halves a = at<halves>(cached.values[key] + from), b = at<halves>(cached.values[key + 1] + from);
            float* place = of_keys + d / 16 * TILE_FLOATS;
            halves first = __builtin_shuffle(a, b, low), second = __builtin_shuffle(a, b, high);
            std::memcpy(place, &first, 64);
            std::memcpy(place + TILE_FLOATS, &second, 64);
        }
    }
}

}  // namespace
}  // namespace octavo

#endif
