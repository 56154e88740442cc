// What the parts of attention share: the job, its pieces, and a query's state on its way through the keys.
//
// Keys are visited in tiles of TILE positions, tiles in parts of PART positions; both begin at multiples of
// their size, whatever the block size. Each part starts from nothing, and parts are joined in order. So a
// query's result depends on its position and the cache alone: not on how its prompt was cut into steps, its
// neighbours in the batch, who reads the same blocks with it, or how many threads share a long context. Only
// visible slots are read, except that tile products may read the rest of 16 slots of a block, and drop it.
#pragma once
#include <algorithm>
#include <limits>

#include "cache.h"

namespace octavo {

constexpr int TILE = 64, PART = 512;
constexpr int ROW_UNIT = 16;  // states have room for a multiple of so many rows
constexpr float LOWEST = -std::numeric_limits<float>::infinity();

struct Attention {
    Cache cache;
    const float* q;
    int64_t q_stride, num_heads;
    const int32_t* tables;
    int64_t table_stride;
    const int32_t *cu_q_lens, *kv_lens;
    float scale, soft_cap;
    int64_t window;
    float* out;
    bool causal = true;
    const float* sinks = nullptr;  // [num_heads]: scores of a key that all queries see, whose value is 0

    int64_t group() const { return num_heads / cache.num_kv_heads; }
    // Floats of a query or of its sums, filled up to whole vectors.
    int64_t width() const { return round_up(cache.head_dim, 16); }
    int64_t oldest_visible(int64_t position) const {
        return window ? std::max<int64_t>(0, position - window + 1) : 0;
    }
    // Behind the last position that a query sees.
    int64_t visible_end(int request, int64_t position) const {
        if (causal) return position + 1;
        int64_t len = kv_lens[request];
        return window ? std::min(len, position + window) : len;
    }
    // Whether a request has no other keys than its queries', and these see all of them: encoders.
    bool is_alone(int request) const {
        return !causal && kv_lens[request] == cu_q_lens[request + 1] - cu_q_lens[request];
    }
    const int32_t* table(int request) const { return tables + request * table_stride; }
};

// Positions begin … end - 1; none if begin >= end.
struct Span {
    int64_t begin = 0, end = 0;
    int64_t size() const { return std::max<int64_t>(0, end - begin); }
};

inline Span both(Span a, Span b) { return {std::max(a.begin, b.begin), std::min(a.end, b.end)}; }

// Some consecutive queries with all heads that share a KV head: each a row, head by head of the first query,
// then of the next. They are one request's, or the only ones of requests that have blocks in common.
struct Piece {
    int request;                // or the first of several
    int64_t head, first, last;  // first … last - 1: places in the batch
    int64_t position, step;     // of `first` in its request; from there to the next query's: 1, or 0
    Span seen;                  // what rows see, each some of it
    Span common = {};           // of several requests: what each row sees all of, in blocks of the first one
    int64_t heads = 1;          // of several requests: so many KV heads, one after the other

    int64_t queries() const { return last - first; }
    int64_t rows(const Attention& job) const { return queries() * job.group(); }
    Piece of_head(int64_t at) const {
        Piece piece = *this;
        piece.head += at;
        piece.heads = 1;
        return piece;
    }
    const float* query(const Attention& job, int64_t row) const {
        int64_t group = job.group();
        return job.q + (first + row / group) * job.q_stride +
               (head * group + row % group) * job.cache.head_dim;
    }
    float* result(const Attention& job, int64_t row) const {
        int64_t group = job.group();
        return job.out +
               ((first + row / group) * job.num_heads + head * group + row % group) * job.cache.head_dim;
    }
    const uint8_t* key(const Attention& job, int64_t at) const {
        return job.cache.vector(block(job, at), 0, at % job.cache.block_size, head);
    }
    const uint8_t* key_scale(const Attention& job, int64_t at) const {
        return job.cache.scale(block(job, at), 0, at % job.cache.block_size, head);
    }
    int64_t block(const Attention& job, int64_t at) const {
        return job.table(request)[at / job.cache.block_size];
    }
};

// Places begin … end - 1 of a tile; none if begin >= end.
struct Range {
    int begin, end;
    bool empty() const { return begin >= end; }
};

// What positions begin … end - 1 are in the tile that begins at `tile`.
inline Range part_of(int64_t tile, int64_t begin, int64_t end) {
    return {int(std::clamp<int64_t>(begin - tile, 0, TILE)), int(std::clamp<int64_t>(end - tile, 0, TILE))};
}

// What a row sees of the tile that begins at `tile`.
inline Range visible(const Attention& job, const Piece& piece, int64_t row, int64_t tile) {
    int64_t position = piece.position + int(row) / int(job.group()) * piece.step;  // 64 bits divide slowly
    return {int(std::max<int64_t>(job.oldest_visible(position) - tile, 0)),
            int(std::clamp<int64_t>(job.visible_end(piece.request, position) - tile, 0, TILE))};
}

// A tile of a cache in int8: what scores with its keys, and weights of its values, are to be multiplied by.
struct Scales {
    float keys[TILE], values[TILE];

    // Of places `seen`; 0 elsewhere.
    Scales(const Attention& job, const Piece& piece, int64_t tile, Range seen) : keys(), values() {
        const int64_t size = job.cache.block_size, to_value = job.cache.key_to_value();
        for (int i = seen.begin; i < seen.end;) {
            int count = int(std::min<int64_t>(seen.end - i, size - (tile + i) % size));
            const uint8_t* from = piece.key_scale(job, tile + i);
            std::memcpy(keys + i, from, size_t(count) * sizeof(float));
            std::memcpy(values + i, from + to_value, size_t(count) * sizeof(float));
            i += count;
        }
    }
};

// Per row: the largest score so far, the sum of e^(score - highest), and that of values so weighted.
struct State {
    float *highest, *total, *out;  // [rows], [rows], [rows, width]; rows a multiple of ROW_UNIT

    static int64_t floats(int64_t rows, int64_t width) { return round_up(rows, ROW_UNIT) * (width + 2); }
    static State of(float* space, int64_t rows) {  // one that was made there
        float* total = space + round_up(rows, ROW_UNIT);
        return {space, total, total + round_up(rows, ROW_UNIT)};
    }
    State from(int64_t row, int64_t width) const { return {highest + row, total + row, out + row * width}; }
    static State make(float* space, int64_t rows, int64_t width) {
        std::fill(space, space + floats(rows, width), 0.0f);
        std::fill(space, space + round_up(rows, ROW_UNIT), LOWEST);
        return of(space, rows);
    }
};

// One kind of arithmetic: how rows see keys.
struct Arithmetic {
    // Floats of work space for a piece.
    int64_t (*space)(const Attention& job, int64_t rows);
    // Put there what all of the piece needs; null: nothing.
    void (*begin)(const Attention& job, const Piece& piece, float* space);
    // Let all rows of a piece see positions begin … end - 1 of one part; `state`: what they saw of it before.
    void (*see)(const Attention& job, const Piece& piece, int64_t begin, int64_t end, const State& state,
                float* space);
    // A row's sums in the order of components, from the one they are in meanwhile; null: the same.
    void (*order)(float* sums, int64_t size);
};

extern const Arithmetic decode_kernels, prefill_kernels;  // float32; the same bits
extern const Arithmetic bfloat16_tiles;                  // bf16 products, float32 sums; `space` is null: not compiled

// Whether `decode_kernels` can take them: it reads whole vectors of the cache.
inline bool takes_decode(const Attention& job, int64_t rows) { return rows <= 32 && job.cache.head_dim % VL == 0; }

}  // namespace octavo
