// A product of tiles as its loops see it: x in bf16, where weights lie, where results go. Included by
// gemv_bf16.h and gemm_bf16.h, which belong to matmul_bf16.cpp.
#pragma once
#include "activations.h"
#include "simd_512.h"
#include "threads.h"
#include "weights_bf16.h"

namespace octavo {
namespace {

constexpr int64_t MOST_GEMV_ROWS = 64;       // rows of x that are turned, instead of weights
constexpr int64_t MOST_IN_PLACE_ROWS = 256;  // the same at a time where weights lie as rows of tiles

// x in bf16, tile by tile: 16 rows of x, along K; turned if they are few. A single row is alone in its tiles,
// which are one column wide.
//
// With three terms floats are multiplied: each is a bf16 number and another for the rest. Of every part three products
// are added up: rest of x times weights, x times weights, x times rest of the weights. A tile that the product before
// had, too, stays where it was: it is not stored again, so that two tiles lie in memory for three products.
struct Rounded {
    int64_t m, k;
    bool many;
    float* data;
    int64_t terms = 1;
    int64_t stored = std::min<int64_t>(terms, 2) * divide_up(k, PART), parts = terms * divide_up(k, PART);
    const int32_t* entries = nullptr;  // row i of x is row entries[i] / top_k of what is given
    int64_t top_k = 1;
    int64_t width = m == 1 && !many ? 1 : 16, num_tiles = divide_up(m, width);

    static size_t floats(int64_t m, int64_t k, int64_t terms = 1) {
        return size_t(round_up(m, 16) * std::min<int64_t>(terms, 2) * round_up(k, PART) / 2);
    }
    // The same of other rows, with what `data` has room for.
    Rounded of(int64_t rows, float* place) const { return {rows, k, true, place, terms}; }
    size_t floats_of(int64_t rows) const { return floats(rows, k, terms); }

    uint16_t* tile(int64_t t, int64_t part) const {
        const int64_t place = terms == 3 ? part / 3 * 2 + (part % 3 + 1) / 2 : part;
        return reinterpret_cast<uint16_t*>(data) + (t * stored + place) * width * PART;
    }
    // The same of weights, among the tiles of a strip.
    int64_t place_of_weights(int64_t part) const { return terms == 3 ? part / 3 * 2 + part % 3 / 2 : part; }

    void round_all(const float* x, int64_t x_stride, int threads) const {
        const int64_t piece = width > 1 ? PIECE : parts, pieces = divide_up(parts, piece);
        parallel_for(num_tiles * pieces, threads, [&](int64_t i) {
            const int64_t first = i % pieces * piece;
            round(x, x_stride, i / pieces, first, std::min(piece, parts - first));
        });
    }
    // Tile t of all parts, or of `count` from part `first` on.
    void round(const float* x, int64_t x_stride, int64_t t) const { round(x, x_stride, t, 0, parts); }
    void round(const float* x, int64_t x_stride, int64_t t, int64_t first, int64_t count) const {
        for (int64_t r = 0; r < width; r++)  // a row of x is one stream
            for (int64_t i = first; i < first + count; i++) {
                if (terms == 3 && i % 3 == 2) continue;
                uint16_t* to = tile(t, i) + r * PART;
                if (width * t + r < m)
                    round_part(x + place(width * t + r) * x_stride, i, to);
                else
                    std::fill_n(to, PART, uint16_t(0));
            }
        for (int64_t i = first; i < first + count && width > 1 && !many; i++)
            if (!(terms == 3 && i % 3 == 2)) turn(reinterpret_cast<float*>(tile(t, i)));
    }

    int64_t place(int64_t row) const { return entries ? entries[row] / top_k : row; }

    void round_part(const float* x, int64_t i, uint16_t* to) const {
        const int64_t first = i / terms * PART;
        x += first;
        float padded[PART] = {};
        if (k < first + PART) {
            std::copy_n(x, k - first, padded);
            x = padded;
        }
        vf values[VECTORS];
        for (int j = 0; j < VECTORS; j++) values[j] = load(x + j * VL);
        halves part = rounded(values);
        if (terms == 3 && i % 3 == 0) part = rest(values, part);
        std::memcpy(to, &part, sizeof part);
    }
};

// y = act(gates) * values, of tiles of so many rows and columns.
using Gate = void (*)(const float* gates, const float* values, int64_t rows, int64_t columns, float* y,
                      int64_t y_stride);

// Sixteen outputs, changed.
using Activate = floats (*)(floats);

struct Greedy;

// Adds rows, each times a weight, to rows of y, of which no two share one: see Rounded::entries.
struct Scatter {
    const int32_t* entries;
    int64_t top_k;
    const float* weights;
    float* y;
    int64_t y_stride;

    void add(int64_t row, int64_t column, const float* sums) const {
        const int32_t entry = entries[row];
        float* to = y + entry / top_k * y_stride + column;
        const vf factor = set1(weights[entry]);
        for (int c = 0; c < 16; c += VL) store(to + c, load(to + c) + load(sums + c) * factor);
    }
};

// With a gate, W is n rows of gates and n of values.
struct Matmul {
    const Rounded& x;
    const uint8_t* w;
    int64_t n, row_bytes;
    Unpack unpack;
    const float* bias;
    float* y;
    int64_t y_stride;
    Gate gate;
    bool in_blocks = false;           // of several parts
    bool in_place = false;            // rows of W are rows of tiles
    const Rounded* inner = nullptr;   // where gated outputs go instead of y
    Greedy* greedy = nullptr;   // who sees outputs instead of y
    Activate activate = nullptr;
    const Scatter* scatter = nullptr;  // who gets outputs, sixteen at a time, instead of y

    // The same with other rows.
    Matmul part(const Rounded& rows, float* to, const Rounded* inner = nullptr) const {
        Matmul its = {rows, w, n, row_bytes, unpack, bias, to, y_stride, gate, in_blocks, in_place, inner};
        its.activate = activate;
        return its;
    }

    // Outputs that a panel of two strips makes.
    int64_t panel_columns() const { return gate ? TILE_ROWS : 2 * TILE_ROWS; }
    // Rows from r on of strip s of those that begin with output `column`: of gates and of values in turn.
    Rows rows(int64_t column, int64_t s, int64_t r) const {
        const int64_t first = gate ? column + s / 2 * TILE_ROWS + s % 2 * n : column + s * TILE_ROWS;
        return {w + (first + r) * row_bytes, row_bytes, x.k, w + (gate ? 2 * n : n) * row_bytes};
    }
    // How many the strip has: the last one, less than 16 or none.
    int64_t strip_rows(int64_t column, int64_t s) const {
        return std::clamp<int64_t>(n - column - (gate ? s / 2 : s) * TILE_ROWS, 0, TILE_ROWS);
    }
};

// What a row's sixteen sums become, from `column` on.
inline void write_row(const Matmul& job, int64_t row, int64_t column, const float* sums) {
    const int64_t columns = std::min<int64_t>(16, job.n - column);
    floats out = at<floats>(sums);
    if (job.bias && columns == 16) out += at<floats>(job.bias + column);
    if (job.bias && columns < 16) {
        floats bias = {};
        std::memcpy(&bias, job.bias + column, size_t(columns) * 4);
        out += bias;
    }
    if (job.activate) out = job.activate(out);
    float* to = job.y + row * job.y_stride + column;
    if (columns == 16)
        std::memcpy(to, &out, sizeof out);
    else
        std::memcpy(to, &out, size_t(columns) * 4);
}

// Tile T: outputs from `column` on of rows of x from `row` on; 16 of 16, or of one.
template <int T>
void write(const Matmul& job, int64_t row, int64_t column) {
    const int64_t rows = std::min(job.x.width, job.x.m - row);
    if (column >= job.n) return;
    if (job.x.many && !job.bias && !job.activate && column + 16 <= job.n && rows == 16)
        return tile_store<T>(job.y + row * job.y_stride + column, 4 * job.y_stride);
    alignas(64) float tile[TILE_ROWS][16];
    tile_store<T>(tile, 4 * job.x.width);
    if (job.x.width > 1 && !job.x.many) turn(tile[0]);
    for (int64_t r = 0; r < rows; r++)
        if (job.scatter)
            job.scatter->add(row + r, column, tile[r]);
        else
            write_row(job, row + r, column, tile[r]);
}

template <class Act>
floats apply_to_all(floats x) {
    float values[16];
    std::memcpy(values, &x, sizeof x);
    for (int c = 0; c < 16; c += VL) store(values + c, Act::apply(load(values + c)));
    return at<floats>(values);
}

template <class Act>
void apply_gate(const float* gates, const float* values, int64_t rows, int64_t columns, float* y,
                int64_t y_stride) {
    for (int64_t r = 0; r < rows; r++)
        for (int64_t c = 0; c < columns; c += VL) {
            vf out = Act::apply(load(gates + 16 * r + c)) * load(values + 16 * r + c);
            if (columns - c >= VL)
                store(y + r * y_stride + c, out);
            else
                std::memcpy(y + r * y_stride + c, &out, size_t(columns - c) * 4);
        }
}

typedef float Sums[16 * TILE_ROWS];  // a tile of them

// Call body(part, loads x, loads weights) for the parts of a product: which of the two tiles that one before had not.
template <class Body>
inline void for_parts(int64_t terms, int64_t parts, Body&& body) {
    constexpr std::true_type yes;
    constexpr std::false_type no;
    if (terms == 1)
        for (int64_t i = 0; i < parts; i++) body(i, yes, yes);
    else
        for (int64_t i = 0; i < parts; i += 3) body(i, yes, yes), body(i + 1, yes, no), body(i + 2, no, yes);
}

// From so many rows of tiles of gates and values.
inline void write_gated(const Matmul& job, int64_t row, int64_t rows, int64_t column, const float* gates,
                        const float* values) {
    const int64_t columns = std::min<int64_t>(16, job.n - column);
    if (!job.inner)
        return job.gate(gates, values, rows, columns, job.y + row * job.y_stride + column, job.y_stride);
    alignas(64) float out[2 * TILE_ROWS * 16];
    job.gate(gates, values, rows, columns, out, 16);
    for (int64_t r = row; r < row + rows; r++)
        store_half(job.inner->tile(r / 16, column / PART) + r % 16 * PART + column % PART, out + (r - row) * 16);
}

// The same where the rows of the next product are few, too, and turned: neighbouring outputs become pairs of k.
inline void pair_gated(const Matmul& job, int64_t row, int64_t column, const float* gates, const float* values) {
    alignas(64) Sums out;
    alignas(64) uint16_t rows[TILE_ROWS][16];
    job.gate(gates, values, TILE_ROWS, 16, out, 16);
    for (int r = 0; r < TILE_ROWS; r++) store_half(rows[r], out + 16 * r);
    uint16_t* to = job.inner->tile(row / 16, column / PART) + column % PART * 16;
    for (int r = 0; r < TILE_ROWS; r += 2, to += PART)
        for (int c = 0; c < 16; c++) to[2 * c] = rows[r][c], to[2 * c + 1] = rows[r + 1][c];
}

// From tiles of few rows. Both are turned where they are.
inline void write_gated(const Matmul& job, int64_t row, int64_t column, float* gates, float* values) {
    if (job.inner) return pair_gated(job, row, column, gates, values);
    if (job.x.width > 1) turn(gates), turn(values);
    write_gated(job, row, std::min(job.x.width, job.x.m - row), column, gates, values);
}

// Of tiles T, gates, and T + 1, values.
template <int T>
void write_gated(const Matmul& job, int64_t row, int64_t column) {
    alignas(64) Sums gates, values;
    tile_store<T>(gates, 4 * job.x.width);
    tile_store<T + 1>(values, 4 * job.x.width);
    write_gated(job, row, column, gates, values);
}

}  // namespace
}  // namespace octavo
