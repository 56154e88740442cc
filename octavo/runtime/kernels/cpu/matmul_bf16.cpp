// y = x W^T + bias with W in GGUF's types, for CPUs with AMX: x and the unpacked weights are rounded to bf16,
// their products are summed in float32.
//
// Weights are unpacked into panels of 32 rows that stay in the cache, as two rows of tiles. While some panels
// are multiplied, the next ones are unpacked, a piece after every step along K: tiles have a unit of their own, so
// that few rows of x cost hardly more than unpacking. A tile product takes one factor as it is and one turned
// (pairs of k by columns), and its result lies as the first. Few rows of x: x is turned, once, and so is every
// result. Many rows: weights are, and results are stored where they belong.
//
// Every output is one float that walks along K, 32 weights a step in the order of TDPBF16PS, whatever the number
// of rows and threads, wherever it lies and whichever factor is turned: a row of y never depends on the others.
#include "activations.h"
#include "lanes.h"
#include "tape.h"
#include "threads.h"
#include "weights_bf16.h"

extern "C" void octavo_matmul(const float* x, int64_t m, int64_t k, int64_t x_stride, const uint8_t* w,
                              int64_t n, int64_t row_bytes, int type, const float* bias, float* y,
                              int64_t y_stride, int threads);

extern "C" void octavo_activation(const float* x, int64_t rows, int64_t size, int kind, int gated, float* y,
                                  int threads);

#if defined(OCTAVO_TILES)

namespace octavo {
namespace {

constexpr int64_t MANY = 256;               // rows of x from which on weights are turned
constexpr int64_t GROUP_BYTES = 512 << 10;  // of panels that many rows meet together, in the second cache

// x in bf16, tile by tile: 16 rows of x, along K; turned if they are few. A single row is alone in its tiles,
// which are one column wide.
struct Rounded {
    int64_t m, k, parts = divide_up(k, PART), width = m == 1 ? 1 : 16, num_tiles = divide_up(m, width);
    bool many = m >= MANY;
    float* data = scratch(size_t(num_tiles * parts * width) * PART / 2, OF_CALL);

    uint16_t* tile(int64_t t, int64_t part) const {
        return reinterpret_cast<uint16_t*>(data) + (t * parts + part) * width * PART;
    }

    void round(const float* x, int64_t x_stride, int64_t t) const {
        for (int64_t i = 0; i < parts; i++) {
            uint16_t* rows = tile(t, i);
            for (int64_t r = 0; r < width; r++) {
                if (width * t + r < m)
                    round_part(x + (width * t + r) * x_stride + i * PART, i, rows + r * PART);
                else
                    std::fill_n(rows + r * PART, PART, uint16_t(0));
            }
            if (width > 1 && !many) turn(reinterpret_cast<float*>(rows));
        }
    }

    void round_part(const float* x, int64_t i, uint16_t* to) const {
        float padded[PART] = {};
        if (k < (i + 1) * PART) {
            std::copy_n(x, k - i * PART, padded);
            x = padded;
        }
        vf values[VECTORS];
        for (int j = 0; j < VECTORS; j++) values[j] = load(x + j * VL);
        store_part(to, values);
    }
};

// y = act(gates) * values, of tiles of so many rows and columns.
using Gate = void (*)(const float* gates, const float* values, int64_t rows, int64_t columns, float* y,
                      int64_t y_stride);

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

    // Outputs that a panel of two strips makes.
    int64_t panel_columns() const { return gate ? TILE_ROWS : 2 * TILE_ROWS; }
    // Row r of strip s of the panels that begin with output `column`; past the last one, that one again.
    const uint8_t* row(int64_t column, int64_t s, int64_t r) const {
        int64_t first = gate ? column + s / 2 * TILE_ROWS + s % 2 * n : column + s * TILE_ROWS;
        return w + std::min(first + r, (gate ? 2 * n : n) - 1) * row_bytes;
    }
};

// Panels on their way, `strips` of 16 rows of W for outputs from `column` on: after each of `steps` steps as many
// units of the work as make all of it. A unit unpacks a piece of a row, or turns one of an unpacked strip.
struct Unpacking {
    const Matmul& job;
    int64_t column, strips;
    Tile* out;  // [strips][parts]
    int64_t steps, piece = job.x.many ? 8 : MOST_PARTS, rows = job.x.many ? TILE_ROWS + 1 : TILE_ROWS;
    int64_t units = strips * rows * divide_up(job.x.parts, piece), left = units, due = 0;
    int64_t strip = 0, row = 0, at = 0;  // where the next unit begins

    void step() {
        for (due += units; due >= steps && left > 0; due -= steps) one();
    }
    void finish() {
        while (left > 0) one();
    }
    void one() {
        const int64_t count = std::min(piece, job.x.parts - at);
        Tile* tiles = out + strip * job.x.parts + at;
        if (row == TILE_ROWS) {
            for (int64_t i = 0; i < count; i++) turn(reinterpret_cast<float*>(tiles[i]));
        } else {
            const uint8_t* from = job.row(column, strip, row);
            job.unpack(from, at, count, job.x.k, reinterpret_cast<Tile*>(tiles[0][row]));
        }
        left--;
        at += piece;
        if (at < job.x.parts) return;
        at = 0;
        if (++row == rows) row = 0, strip++;
    }
};

// Tile T: outputs from `column` on of rows of x from `row` on; 16 of 16, or of one.
template <int T>
void write(const Matmul& job, int64_t row, int64_t column) {
    const int64_t columns = std::min<int64_t>(16, job.n - column);
    const int64_t rows = std::min(job.x.width, job.x.m - row);
    if (columns <= 0) return;
    float* to = job.y + row * job.y_stride + column;
    if (job.x.many && columns == 16 && rows == 16 && !job.bias) return tile_store<T>(to, 4 * job.y_stride);
    alignas(64) float tile[TILE_ROWS][16];
    tile_store<T>(tile, 4 * job.x.width);
    if (job.x.width > 1 && !job.x.many) turn(tile[0]);
    floats bias = {};
    if (job.bias) std::memcpy(&bias, job.bias + column, size_t(columns) * 4);
    for (int64_t r = 0; r < rows; r++, to += job.y_stride) {
        floats out = job.bias ? at<floats>(tile[r]) + bias : at<floats>(tile[r]);
        if (columns == 16)
            std::memcpy(to, &out, sizeof out);
        else
            std::memcpy(to, &out, size_t(columns) * 4);
    }
}

template <class Act>
void apply_gate(const float* gates, const float* values, int64_t rows, int64_t columns, float* y,
                int64_t y_stride) {
    for (int64_t r = 0; r < rows; r++)
        for (int64_t c = 0; c < columns; c += VL) {
            vf out = Act::apply(load(gates + 16 * r + c)) * load(values + 16 * r + c);
            std::memcpy(y + r * y_stride + c, &out, size_t(std::min<int64_t>(VL, columns - c)) * 4);
        }
}

// Tiles T, gates, and T + 1, values: as above.
template <int T>
void write_gated(const Matmul& job, int64_t row, int64_t column) {
    alignas(64) float tiles[2][16 * TILE_ROWS];
    tile_store<T>(tiles[0], 4 * job.x.width);
    tile_store<T + 1>(tiles[1], 4 * job.x.width);
    if (job.x.width > 1 && !job.x.many) turn(tiles[0]), turn(tiles[1]);
    job.gate(tiles[0], tiles[1], std::min(job.x.width, job.x.m - row), std::min<int64_t>(16, job.n - column),
             job.y + row * job.y_stride + column, job.y_stride);
}

// A panel with one or two tiles of x. Tiles 0 … 3: sums; 4, 5: weights; 6, 7: x. Loads and products take turns.
template <bool IS_MANY, int COUNT>
void multiply_tiles(const Matmul& job, int64_t t, const Tile* panel, int64_t column, Unpacking& next) {
    const int64_t parts = job.x.parts, width = job.x.width, size = width * PART;
    const uint16_t* x = job.x.tile(t, 0);
    unrolled<2 * COUNT>([](auto sum) { tile_zero<sum.value>(); });
    for (int64_t i = 0; i < parts; i++, x += size) {
        unrolled<COUNT>([&](auto c) {
            constexpr auto load_x = IS_MANY ? tile_stream<6 + c.value> : tile_load<6 + c.value>;
            load_x(x + c.value * parts * size, 4 * width);
            unrolled<2>([&](auto half) {
                constexpr int SUM = 2 * c.value + half.value, WEIGHTS = 4 + half.value, X = 6 + c.value;
                if constexpr (c.value == 0) tile_load<WEIGHTS>(panel[half.value * parts + i], TILE_BYTES);
                tile_product<SUM, IS_MANY ? X : WEIGHTS, IS_MANY ? WEIGHTS : X>();
            });
        });
        next.step();
    }
    unrolled<COUNT>([&](auto c) {
        const int64_t row = (t + c.value) * width;
        if (job.gate) return write_gated<2 * c.value>(job, row, column);
        write<2 * c.value>(job, row, column);
        write<2 * c.value + 1>(job, row, column + TILE_ROWS);
    });
}

// Outputs `begin` … `end` - 1 of all rows of x.
template <bool IS_MANY>
void multiply_range(const Matmul& job, int64_t begin, int64_t end) {
    const int64_t parts = job.x.parts, panel = 2 * parts, tiles = job.x.num_tiles;
    const int64_t columns = job.panel_columns();
    const int64_t fit = IS_MANY ? std::max<int64_t>(1, GROUP_BYTES / (panel * int64_t(sizeof(Tile)))) : 1;
    const int64_t group = std::min(fit, divide_up(end - begin, columns));
    Tile* space = reinterpret_cast<Tile*>(scratch(size_t(2 * group * panel) * sizeof(Tile) / sizeof(float)));
    auto panels_at = [&](int64_t column) {
        return std::clamp<int64_t>(divide_up(end - column, columns), 0, group);
    };
    Unpacking{job, begin, 2 * panels_at(begin), space, 1}.finish();
    for (int64_t column = begin, i = 0; column < end; column += group * columns, i ^= 1) {
        const int64_t count = panels_at(column), after = column + group * columns;
        const Tile* panels = space + i * group * panel;
        Unpacking next{job, after, 2 * panels_at(after), space + (i ^ 1) * group * panel,
                       divide_up(tiles, 2) * count * parts};
        for (int64_t t = 0; t < tiles; t += 2)
            for (int64_t p = 0; p < count; p++) {
                auto multiply_one = t + 1 < tiles ? multiply_tiles<IS_MANY, 2> : multiply_tiles<IS_MANY, 1>;
                multiply_one(job, t, panels + p * panel, column + p * columns, next);
            }
        next.finish();
    }
}

void multiply(const Matmul& job, int threads) {
    const bool many = job.x.many;
    TileShapes shapes;
    for (int i = 0; i < 8; i++) {
        bool is_left = many ? i >= 6 : i == 4 || i == 5;
        shapes.set(i, TILE_ROWS, is_left || many ? TILE_BYTES : int(4 * job.x.width));
    }
    const int64_t columns = job.panel_columns(), tasks = (many ? 1 : 3) * threads;
    const int64_t step = divide_up(divide_up(job.n, columns), tasks) * columns;
    parallel_for(divide_up(job.n, step), threads, [&](int64_t i) {
        Tiles tiles(shapes);
        auto multiply_some = many ? multiply_range<true> : multiply_range<false>;
        multiply_some(job, i * step, std::min(job.n, (i + 1) * step));
    });
}

void multiply(const float* x, int64_t m, int64_t k, int64_t x_stride, const uint8_t* w, int64_t n,
              int64_t row_bytes, int type, const float* bias, float* y, int64_t y_stride, Gate gate,
              int threads) {
    if (m == 0 || n == 0) return;
    Rounded rounded{m, k};
    parallel_for(rounded.num_tiles, threads, [&](int64_t t) { rounded.round(x, x_stride, t); });
    Matmul job{rounded, w, n, row_bytes, nullptr, bias, y, y_stride, gate};
    with_type(type, [&](auto kind) { job.unpack = unpack_piece<decltype(kind)>; });
    multiply(job, threads);
}

}  // namespace
}  // namespace octavo

// Whether octavo_matmul_bf16 rounds.
extern "C" int octavo_has_tiles() { return octavo::tiles_usable(); }

// As octavo_matmul.
extern "C" void octavo_matmul_bf16(const float* x, int64_t m, int64_t k, int64_t x_stride, const uint8_t* w,
                                   int64_t n, int64_t row_bytes, int type, const float* bias, float* y,
                                   int64_t y_stride, int threads) {
    if (!octavo::tiles_usable())
        return octavo_matmul(x, m, k, x_stride, w, n, row_bytes, type, bias, y, y_stride, threads);
    octavo::multiply(x, m, k, x_stride, w, n, row_bytes, type, bias, y, y_stride, nullptr, threads);
}

#else

extern "C" int octavo_has_tiles() { return 0; }

extern "C" void octavo_matmul_bf16(const float* x, int64_t m, int64_t k, int64_t x_stride, const uint8_t* w,
                                   int64_t n, int64_t row_bytes, int type, const float* bias, float* y,
                                   int64_t y_stride, int threads) {
    octavo_matmul(x, m, k, x_stride, w, n, row_bytes, type, bias, y, y_stride, threads);
}

#endif

OCTAVO_TAPED(octavo_matmul_bf16)

// octavo_activation of the product with 2 n rows, gates before values; y: [m, n].
extern "C" void octavo_gated_matmul_bf16(const float* x, int64_t m, int64_t k, int64_t x_stride,
                                         const uint8_t* w, int64_t n, int64_t row_bytes, int type, int kind,
                                         float* y, int threads) {
    using namespace octavo;
#if defined(OCTAVO_TILES)
    if (tiles_usable()) {
        Gate gate = with_activation(kind, [](auto act) -> Gate { return apply_gate<decltype(act)>; });
        return multiply(x, m, k, x_stride, w, n, row_bytes, type, nullptr, y, n, gate, threads);
    }
#endif
    float* both = scratch(size_t(2 * m * n), OF_CALL);
    octavo_matmul(x, m, k, x_stride, w, 2 * n, row_bytes, type, nullptr, both, 2 * n, threads);
    octavo_activation(both, m, n, kind, 1, y, threads);
}
OCTAVO_TAPED(octavo_gated_matmul_bf16)
