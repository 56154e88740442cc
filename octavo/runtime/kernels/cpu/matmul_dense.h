// y = x W^T + bias with W in floats of 32 or 16 bits and vectors of 64 bytes. Included by matmul.cpp.
//
// A vector has one output each of 16 weight rows and walks along K from 0: a row of y is the same for every number of
// rows, of threads, and in every place. Weights are turned for that, 16 rows at a time. One row of x: in registers. More
// rows: BLOCK weights of each row of a strip go into work space, and stay in the first cache until all rows of a task,
// copied to lie beside each other, have met them; sums wait in memory meanwhile. With a gate, half of a strip are
// gates, the other half their values.
#pragma once
#include <algorithm>
#include <type_traits>

#include "activations.h"
#include "blocks.h"
#include "threads.h"

#if defined(OCTAVO_AVX512)

namespace octavo {
namespace dense {

constexpr int MOST_ROWS = 14, STRIP = 2 * VL;  // of a register tile: rows of x, weight rows
constexpr int64_t BLOCK = 6 * PART;
constexpr int64_t X_BYTES = 768 << 10, MOST_TILES = 16;  // of a task's rows

// With a gate, W is n rows of gates and n of values.
struct Product {
    const float* x;
    int64_t m, k, x_stride;
    const uint8_t* w;
    int64_t n, row_bytes;
    const float* bias;
    float* y;
    int64_t y_stride;
    VectorGate gate = nullptr;

    int64_t columns() const { return gate ? VL : STRIP; }  // outputs of a strip
    // From a half of a strip to the other.
    int64_t half_bytes() const { return (gate ? n : VL) * row_bytes; }

    // Outputs of 16 weight rows from `column` on, fewer or none where these end.
    OCTAVO_INLINE void finish(int64_t row, int64_t column, vf sums) const {
        float* to = y + row * y_stride + column;
        if (column + VL <= n) return store(to, bias ? sums + load(bias + column) : sums);
        for (int64_t c = 0; c < n - column; c++) to[c] = bias ? sums[c] + bias[column + c] : sums[c];
    }
    OCTAVO_INLINE void finish(int64_t row, int64_t column, vf first, vf second) const {
        if (gate) return finish(row, column, gate(first, second));
        finish(row, column, first);
        finish(row, column + VL, second);
    }
};

struct Span {
    int64_t begin, end;
    int64_t size() const { return end - begin; }
};

// Call put(i, weights) for i = 0 … PART - 1: weights first + i of 16 rows of half of a strip, or of the last row again
// where they end; zeros behind the last weight.
template <class Type, class Put>
OCTAVO_INLINE void turn_part(const Product& job, int64_t column, int half, int64_t first, Put&& put) {
    if (!job.gate) column += half * VL;
    const uint8_t* w = job.w + (job.gate ? half * job.half_bytes() : 0) + first * Type::BYTES;
    const uint8_t* rows[VL];
    uint8_t padded[VL][PART * Type::BYTES];
    for (int r = 0; r < VL; r++) rows[r] = w + std::min(column + r, job.n - 1) * job.row_bytes;
    if (job.k - first < PART) {
        std::memset(padded, 0, sizeof padded);
        for (int r = 0; r < VL; r++) {
            std::memcpy(padded[r], rows[r], size_t(job.k - first) * Type::BYTES);
            rows[r] = padded[r];
        }
    }
    if constexpr (std::is_same_v<Type, BF16>) {  // as pairs, with half the shuffles
        vi pairs[VL];
        for (int r = 0; r < VL; r++) pairs[r] = read<vi>(rows[r]);
        turn<VL / 2>(pairs);
        unrolled<VL>([&](auto i) {
            put(2 * i, (vf)(pairs[i] << 16));
            put(2 * i + 1, (vf)(pairs[i] & int(0xFFFF0000)));
        });
    } else {
        for (int at = 0; at < PART; at += VL) {
            vf weights[VL];
            for (int r = 0; r < VL; r++) weights[r] = Type::values(rows[r] + at * Type::BYTES);
            turn<VL / 2>(weights);
            unrolled<VL>([&](auto i) { put(at + i, weights[i]); });
        }
    }
}

// Sixteen outputs of a single row.
template <class Type>
vf multiply_vector(const Product& job, int64_t column, int half) {
    vf sums = {};
    for (int64_t first = 0; first < job.k; first += PART) {
        float padded[PART] = {};
        const float* x = job.x + first;
        if (job.k - first < PART) {
            std::copy_n(x, job.k - first, padded);
            x = padded;
        }
        const uint8_t* next = job.w + half * job.half_bytes() + (column + VL) * job.row_bytes;
        prefetch<VL * PART * Type::BYTES>(next + first * VL * Type::BYTES);
        turn_part<Type>(job, column, half, first, [&](int i, vf w) { sums = fma(set1(x[i]), w, sums); });
    }
    return sums;
}

// Weights first … first + count - 1 of the rows of a strip: to[i] has weight first + i of each.
template <class Type>
__attribute__((noinline)) void pack_strip(const Product& job, int64_t column, int64_t first, int64_t count, float* to) {
    for (int64_t i = 0; i < count; i += PART, to += PART * STRIP)
        for (int half = 0; half < 2; half++)
            turn_part<Type>(job, column, half, first + i, [&](int at, vf w) { store(to + at * STRIP + half * VL, w); });
}

// What a tile asks for while it multiplies: waiting for it would take a tenth of the time.
struct Ahead {
    const float* results;  // a strip's, row by row
    int64_t stride;
    const uint8_t* weights;  // the next BLOCK of some rows of a strip
    int64_t row_bytes, num_rows, half_bytes;
};

// `sums` of R rows and a strip, plus `count` products each; x: [R, BLOCK].
template <bool BEGINS, int R>
void multiply_tile(const float* x, const float* w, int64_t count, float* sums, const Ahead& ahead) {
    vf acc[R][2];
    for (int r = 0; r < R; r++)
        for (int g = 0; g < 2; g++) acc[r][g] = BEGINS ? vf{} : load(sums + r * STRIP + g * VL);
    const int64_t each = divide_up(count, R);
    for (int64_t i = 0, row = 0; i < count; row++) {
        prefetch<STRIP * sizeof(float)>((const uint8_t*)(ahead.results + row * ahead.stride));
        if (row < ahead.num_rows)
            for (int half = 0; half < 2; half++) prefetch<2 * BLOCK>(ahead.weights + row * ahead.row_bytes + half * ahead.half_bytes);
        for (const int64_t end = std::min(i + each, count); i < end; i++, w += STRIP) {
            const vf b[] = {in_register(load(w)), in_register(load(w + VL))};
            for (int r = 0; r < R; r++) {
                const vf a = in_register(set1(x[r * BLOCK + i]));
                for (int g = 0; g < 2; g++) acc[r][g] = fma(a, b[g], acc[r][g]);
            }
        }
    }
    for (int r = 0; r < R; r++)
        for (int g = 0; g < 2; g++) store(sums + r * STRIP + g * VL, acc[r][g]);
}

using MultiplyTile = void (*)(const float* x, const float* w, int64_t count, float* sums, const Ahead& ahead);

template <bool BEGINS, int... R>
MultiplyTile tile_of(int64_t rows, std::integer_sequence<int, R...>) {
    static constexpr MultiplyTile TILES[] = {multiply_tile<BEGINS, R + 1>...};
    return TILES[rows - 1];
}
constexpr std::make_integer_sequence<int, MOST_ROWS> TILE_ROWS;

// Rows of x side by side: of each BLOCK of K all rows.
inline void copy_rows(const Product& job, Span rows, float* to) {
    for (int64_t first = 0; first < job.k; first += BLOCK)
        for (int64_t row = rows.begin; row < rows.end; row++, to += BLOCK)
            std::copy_n(job.x + row * job.x_stride + first, std::min(BLOCK, job.k - first), to);
}

// Outputs of some rows, which `x` has side by side, and a strip.
template <class Type>
void multiply_strip(const Product& job, Span rows, int64_t column, const float* x, float* w, float* sums) {
    const int64_t tiles = divide_up(rows.size(), MOST_ROWS);
    for (int64_t first = 0; first < job.k; first += BLOCK, x += rows.size() * BLOCK) {
        const int64_t count = std::min(BLOCK, job.k - first);
        const bool is_last = first + BLOCK >= job.k;
        const uint8_t* next = job.w + (is_last ? (column + job.columns()) * job.row_bytes
                                               : column * job.row_bytes + (first + BLOCK) * Type::BYTES);
        pack_strip<Type>(job, column, first, count, w);
        for (int64_t t = 0; t < tiles; t++) {
            const int64_t row = rows.size() * t / tiles, end = rows.size() * (t + 1) / tiles, asked = VL * t / tiles;
            Ahead ahead{sums, 0, next + asked * job.row_bytes, job.row_bytes, VL * (t + 1) / tiles - asked, job.half_bytes()};
            if (is_last) ahead.results = job.y + (rows.begin + end) * job.y_stride + column, ahead.stride = job.y_stride;
            const auto multiply = first == 0 ? tile_of<true>(end - row, TILE_ROWS) : tile_of<false>(end - row, TILE_ROWS);
            multiply(x + row * BLOCK, w, count, sums + row * STRIP, ahead);
            for (int64_t r = row; r < end && is_last; r++)
                job.finish(rows.begin + r, column, load(sums + r * STRIP), load(sums + r * STRIP + VL));
        }
    }
}

template <class Type>
void multiply_range(const Product& job, Span columns, Span rows) {
    if (job.m == 1) {
        for (int64_t column = columns.begin; column < columns.end; column += VL) {
            const vf first = multiply_vector<Type>(job, column, 0);
            job.finish(0, column, job.gate ? job.gate(first, multiply_vector<Type>(job, column, 1)) : first);
        }
        return;
    }
    float* w = scratch(size_t(BLOCK * STRIP + rows.size() * (STRIP + round_up(job.k, BLOCK))));
    float *sums = w + BLOCK * STRIP, *x = sums + rows.size() * STRIP;
    copy_rows(job, rows, x);
    for (int64_t column = columns.begin; column < columns.end; column += job.columns())
        multiply_strip<Type>(job, rows, column, x, w, sums);
}

// A task has rows that fit the second cache. Where such tasks are few, columns are shared, too, as many for every
// thread and worth some microseconds at least.
template <class Type>
void multiply(const Product& job, int threads) {
    if (job.m == 0 || job.n == 0) return;
    const int64_t unit = job.m == 1 ? VL : job.columns();
    const int64_t most = std::clamp<int64_t>(X_BYTES / 4 / job.k / MOST_ROWS, 1, MOST_TILES) * MOST_ROWS;
    const int64_t least = divide_up(job.m, most), shares = least > threads ? round_up(least, threads) : least;
    const int64_t wanted = divide_up(4 * threads, shares), worth = job.n * job.k * std::min<int64_t>(job.m, 16) / 131072;
    const int64_t ranges = std::clamp<int64_t>(std::min(worth, job.n / unit) / threads * threads, 1, wanted);
    const int64_t step = round_up(divide_up(job.n, ranges), unit), count = divide_up(job.n, step);
    parallel_for(count * shares, threads, [&](int64_t i) {
        const int64_t begin = i % count * step, share = i / count;
        multiply_range<Type>(job, {begin, std::min(job.n, begin + step)},
                             {job.m * share / shares, job.m * (share + 1) / shares});
    });
}

// Whether weights are of such a type, and were multiplied.
inline bool multiply_any(const Product& job, int type, int threads) {
    if (type == 0) multiply<F32>(job, threads);
    if (type == 1) multiply<F16>(job, threads);
    if (type == 30) multiply<BF16>(job, threads);
    return type == 0 || type == 1 || type == 30;
}

}  // namespace dense
}  // namespace octavo

#endif
