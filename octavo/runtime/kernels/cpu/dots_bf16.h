// Products in bf16 for CPUs that have them and no tiles: AVX512_BF16, and ARM's BF16. Included by matmul_bf16.cpp.
//
// Every output walks along K from 0, by itself and in one order: so a row of y is the same for every number of rows, of
// threads, and in every place. More rows than one: strips of 16 weight rows are unpacked, and meet ROWS rows of x, COLUMNS
// weight rows at a time; some rows of x stay in the first cache while strips come from the second.
#pragma once
#include "weights_bf16.h"

#if defined(OCTAVO_DOTS)

#include "activations.h"
#include "threads.h"

namespace octavo {
namespace dots {

constexpr int STRIP = TILE_ROWS;
constexpr int64_t ROWS_BYTES = 20 << 10;  // of x, beside which weights pass
constexpr int64_t PANEL_BYTES = 256 << 10;

// With a gate, W is n rows of gates and n of values.
struct Product {
    const float* x;
    int64_t m, k, x_stride;
    const uint8_t* w;
    int64_t n, row_bytes;
    const float* bias;
    float* y;
    int64_t y_stride;
    VectorGate gate;

    const halves* rounded = nullptr;  // x in whole parts, and an even number of rows
    int64_t parts = divide_up(k, PART), kinds = gate ? 2 : 1;

    Rows rows(int64_t column, int64_t kind) const {
        return {w + (column + kind * n) * row_bytes, row_bytes, k, w + kinds * n * row_bytes};
    }
    int64_t strip_rows(int64_t column) const { return std::min<int64_t>(STRIP, n - column); }
};

// Row by row.
template <int N>
struct Outputs {
    vf vectors[N / VL];

    void gate(const Product& job, const Outputs& values) {
        for (int i = 0; i < N / VL; i++) vectors[i] = job.gate(vectors[i], values.vectors[i]);
    }
};

inline halves rounded_x(const Product& job, int64_t row, int64_t part) {
    const float* from = job.x + row * job.x_stride + part * PART;
    float padded[PART];
    if (job.k - part * PART < PART) {
        std::fill(std::copy_n(from, job.k - part * PART, padded), padded + PART, 0.0f);
        from = padded;
    }
    vf values[VECTORS];
    for (int j = 0; j < VECTORS; j++) values[j] = load(from + j * VL);
    return rounded(values);
}

}  // namespace dots
}  // namespace octavo

// ROWS and COLUMNS; round_rows(job, first, last, space): x from an even row on, as it is multiplied; arrange(tiles, count):
// the same of unpacked weights; multiply_rows(rows, x, parts, w): 1 … ROWS rows of x with COLUMNS of a strip;
// multiply_vector<Type>(job, rows, count): one row of x with 16 weight rows, or less.
#if defined(OCTAVO_NEON)
#include "dots_neon.h"
#else
#include "dots_512.h"
#endif

namespace octavo {
namespace dots {

// `count` outputs of one row.
inline void write(const Product& job, int64_t row, int64_t column, int64_t count, const float* sums) {
    float* to = job.y + row * job.y_stride + column;
    for (int64_t c = 0; c < count; c++) to[c] = job.bias ? sums[c] + job.bias[column + c] : sums[c];
}

// Outputs begin … end - 1 of all rows; begin and all strips of `panel`, gates before values, lie at multiples of 16.
inline void multiply_panel(const Product& job, int64_t begin, int64_t end, const halves* panel) {
    const int64_t parts = job.parts, size = parts * STRIP;
    const int64_t fit = std::max<int64_t>(ROWS_BYTES / (2 * PART * parts) / ROWS, 1) * ROWS;
    for (int64_t first = 0; first < job.m; first += fit) {
        const int64_t last = std::min(first + fit, job.m);
        for (int64_t column = begin; column < end; column += COLUMNS) {
            const halves* w = panel + (column - begin) / STRIP * job.kinds * size + column % STRIP;
            const int64_t count = std::min<int64_t>(COLUMNS, end - column);
            for (int64_t row = first; row < last; row += ROWS) {
                const int64_t rows = std::min<int64_t>(ROWS, last - row);
                alignas(64) float sums[ROWS * COLUMNS];
                auto out = multiply_rows(rows, job.rounded + row * parts, parts, w);
                if (job.gate) out.gate(job, multiply_rows(rows, job.rounded + row * parts, parts, w + size));
                std::memcpy(sums, &out, sizeof sums);
                for (int64_t r = 0; r < rows; r++) write(job, row + r, column, count, sums + COLUMNS * r);
            }
        }
    }
}

// Outputs begin … end - 1, of all rows; `panel`: so many are unpacked together.
template <class Type>
void multiply_range(const Product& job, int64_t begin, int64_t end, int64_t panel) {
    if (job.m == 1) {
        for (int64_t column = begin; column < end; column += STRIP) {
            const int64_t count = std::min(end - column, job.strip_rows(column));
            auto out = multiply_vector<Type>(job, job.rows(column, 0), count);
            if (job.gate) out.gate(job, multiply_vector<Type>(job, job.rows(column, 1), count));
            alignas(64) float sums[STRIP];
            std::memcpy(sums, &out, sizeof sums);
            write(job, 0, column, count, sums);
        }
        return;
    }
    const int64_t size = job.parts * STRIP;
    halves* space = reinterpret_cast<halves*>(scratch(size_t(panel * job.kinds * job.parts) * PART / 2));
    for (int64_t first = begin; first < end; first += panel) {
        const int64_t last = std::min(end, first + panel);
        halves* strip = space;
        for (int64_t column = first; column < last; column += STRIP)
            for (int64_t kind = 0; kind < job.kinds; kind++, strip += size)
                for (int64_t i = 0; i < job.parts; i += PIECE) {
                    const int64_t count = std::min(PIECE, job.parts - i);
                    Tile* tiles = reinterpret_cast<Tile*>(strip + i * STRIP);
                    unpack_piece<Type>(job.rows(column, kind), job.strip_rows(column), i, count, tiles);
                    arrange(tiles, count);
                }
        multiply_panel(job, first, last, space);
    }
}

inline void multiply(Product job, int type, int threads) {
    if (job.m == 0 || job.n == 0) return;
    const int64_t rows = round_up(job.m, 2);
    halves* space = reinterpret_cast<halves*>(scratch(size_t(rows * job.parts) * PART / 2, OF_CALL));
    parallel_for(divide_up(job.m, 8), threads,
                 [&](int64_t i) { round_rows(job, 8 * i, std::min(job.m, 8 * i + 8), space); });
    job.rounded = space;
    const int64_t row = 2 * PART * job.parts * job.kinds, panel = std::max<int64_t>(PANEL_BYTES / row / STRIP, 1);
    const int64_t enough = divide_up(262144, PART * job.parts * job.kinds * std::min<int64_t>(job.m, 16));
    const int64_t step = std::max(divide_up(job.n, 4 * threads), enough), unit = job.m <= 16 ? 1 : panel;
    const int64_t each = round_up(step, STRIP);
    with_type(type, [&](auto kind) {
        parallel_for(divide_up(job.n, each), threads, [&](int64_t i) {
            multiply_range<decltype(kind)>(job, i * each, std::min(job.n, (i + 1) * each), unit * STRIP);
        });
    });
}

}  // namespace dots
}  // namespace octavo

#endif
