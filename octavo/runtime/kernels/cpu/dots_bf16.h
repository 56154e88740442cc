// Products in bf16 for CPUs with AVX512_BF16 and no AMX. Included by matmul_bf16.cpp.
//
// Every output is one vector of 16 sums of pairs that walks along K from 0, then a fixed sum of its lanes: so a row
// of y is the same for every number of rows, of threads, and in every place. One row of x: weights are unpacked in
// registers and multiplied at once. More rows: strips of 16 weight rows are unpacked, and meet four rows of x, four
// weight rows at a time; some rows of x stay in the first cache while strips come from the second.
#pragma once
#include "weights_bf16.h"

#if defined(OCTAVO_DOTS)

#include "activations.h"
#include "threads.h"

namespace octavo {
namespace dots {

constexpr int ROWS = 4, COLUMNS = 4, STRIP = TILE_ROWS;
constexpr int64_t ROWS_BYTES = 20 << 10;  // of x, beside which weights pass
constexpr int64_t PANEL_BYTES = 256 << 10;

// Sixteen outputs: their gates times their values.
using Gate = vf (*)(vf gates, vf values);

inline Gate gate_of(int kind) {
    return with_activation(kind, [](auto act) -> Gate {
        return [](vf gates, vf values) { return decltype(act)::apply(gates) * values; };
    });
}

// With a gate, W is n rows of gates and n of values.
struct Product {
    const float* x;
    int64_t m, k, x_stride;
    const uint8_t* w;
    int64_t n, row_bytes;
    const float* bias;
    float* y;
    int64_t y_stride;
    Gate gate;

    const halves* rounded = nullptr;  // x in whole parts
    int64_t parts = divide_up(k, PART), kinds = gate ? 2 : 1;

    Rows rows(int64_t column, int64_t kind) const {
        return {w + (column + kind * n) * row_bytes, row_bytes, k, w + kinds * n * row_bytes};
    }
    int64_t strip_rows(int64_t column) const { return std::min<int64_t>(STRIP, n - column); }
};

inline vf dot(vf sums, halves a, halves b) { return _mm512_dpbf16_ps(sums, (__m512bh)a, (__m512bh)b); }

// Lane i of a[0] = sum of the lanes of a[i]; HALF: 8 of 16 vectors.
template <int HALF>
OCTAVO_INLINE void add_lanes(vf (&a)[16]) {
    for (int i = 0; i < HALF; i++) {
        exchange<HALF>(a[i], a[i + HALF]);
        a[i] = a[i] + a[i + HALF];
    }
    if constexpr (HALF > 1) add_lanes<HALF / 2>(a);
}

inline void round_row(const float* x, int64_t k, halves* out) {
    for (int64_t first = 0; first < k; first += PART, out++) {
        float padded[PART] = {};
        const float* from = x + first;
        if (k - first < PART) {
            std::copy_n(from, k - first, padded);
            from = padded;
        }
        *out = rounded({load(from), load(from + VL)});
    }
}

// R rows of x with COLUMNS weight rows of a strip: lane COLUMNS r + c is an output.
template <int R>
vf multiply_tile(const halves* x, int64_t parts, const halves* w) {
    vf acc[R][COLUMNS];
    for (int r = 0; r < R; r++)
        for (int c = 0; c < COLUMNS; c++) acc[r][c] = vf{};
    for (int64_t i = 0; i < parts; i++, x++, w += STRIP) {
        halves b[COLUMNS];
        for (int c = 0; c < COLUMNS; c++) b[c] = in_register(w[c]);
        for (int r = 0; r < R; r++) {
            const halves a = in_register(x[r * parts]);
            for (int c = 0; c < COLUMNS; c++) acc[r][c] = dot(acc[r][c], a, b[c]);
        }
    }
    vf sums[ROWS * COLUMNS];
    unrolled<ROWS * COLUMNS>([&](auto i) { sums[i] = i < R * COLUMNS ? acc[i % (R * COLUMNS) / COLUMNS][i % COLUMNS] : vf{}; });
    add_lanes<8>(sums);
    return sums[0];
}

inline vf multiply_rows(int64_t rows, const halves* x, int64_t parts, const halves* w) {
    if (rows >= 4) return multiply_tile<4>(x, parts, w);
    if (rows == 3) return multiply_tile<3>(x, parts, w);
    return rows == 2 ? multiply_tile<2>(x, parts, w) : multiply_tile<1>(x, parts, w);
}

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
                vf out = multiply_rows(rows, job.rounded + row * parts, parts, w);
                if (job.gate) out = job.gate(out, multiply_rows(rows, job.rounded + row * parts, parts, w + size));
                store(sums, out);
                for (int64_t r = 0; r < rows; r++) write(job, row + r, column, count, sums + COLUMNS * r);
            }
        }
    }
}

// One row of x with 16 weight rows, or less: four at a time, as sums of one wait for each other.
template <class Type>
vf multiply_vector(const Product& job, const Rows& rows, int64_t count) {
    const int64_t parts = job.parts, even = divide_up(parts, divide_up(parts, PIECE));
    int64_t piece = PIECE;
    if constexpr (Type::DENSE)
        piece = parts;
    else if constexpr (Type::PARTS == 1)
        piece = even;
    vf acc[STRIP] = {};
    for (int64_t row = 0; row < count; row += ROWS)
        for (int64_t first = 0; first < parts; first += piece)
            for (int64_t r = row; r < std::min<int64_t>(row + ROWS, count); r++) {
                vf sums = acc[r];
                const halves* x = job.rounded + first;
                unpack_row<Type>(rows, r, first, std::min(piece, parts - first),
                                 [&](int64_t i, halves w) { sums = dot(sums, x[i], w); });
                acc[r] = sums;
            }
    add_lanes<8>(acc);
    return acc[0];
}

// Outputs begin … end - 1, of all rows; `panel`: so many are unpacked together.
template <class Type>
void multiply_range(const Product& job, int64_t begin, int64_t end, int64_t panel) {
    if (job.m == 1) {
        for (int64_t column = begin; column < end; column += STRIP) {
            const int64_t count = std::min(end - column, job.strip_rows(column));
            vf out = multiply_vector<Type>(job, job.rows(column, 0), count);
            if (job.gate) out = job.gate(out, multiply_vector<Type>(job, job.rows(column, 1), count));
            alignas(64) float sums[STRIP];
            store(sums, out);
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
                for (int64_t i = 0; i < job.parts; i += PIECE)
                    unpack_piece<Type>(job.rows(column, kind), job.strip_rows(column), i,
                                       std::min(PIECE, job.parts - i), reinterpret_cast<Tile*>(strip + i * STRIP));
        multiply_panel(job, first, last, space);
    }
}

inline void multiply(Product job, int type, int threads) {
    if (job.m == 0 || job.n == 0) return;
    halves* space = reinterpret_cast<halves*>(scratch(size_t(job.m * job.parts) * PART / 2, OF_CALL));
    parallel_for(divide_up(job.m, 8), threads, [&](int64_t i) {
        for (int64_t row = 8 * i; row < std::min(job.m, 8 * i + 8); row++)
            round_row(job.x + row * job.x_stride, job.k, space + row * job.parts);
    });
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
