// GEMV, for up to 64 rows of x over W, or 256 at a time where W lies as rows of tiles: what costs is memory, and
// unpacking. Included by matmul_bf16.cpp.
//
// Two strips of W, a panel, meet two tiles of x at a time: four products for four loads. More tiles of x take turns, in
// pairs, at every piece of K, while its weights are in the first cache; x comes from the second one, once a panel.
#pragma once
#include "greedy.h"

namespace octavo {
namespace {

// Where a part of a panel lies: a tile of the first strip, whose rows are `stride` bytes apart, and one of the second.
struct Place {
    const uint8_t* tile;
    int64_t stride, to_second;
};

// Panels of outputs `begin` … `end` - 1 on their way to the second cache, one ahead, line by line in the order of memory:
// what the processor fetches ahead by itself joins in, and waits for more lines than a core can ask for.
struct Coming {
    const Matmul& job;
    const int64_t end;
    const int64_t lines = divide_up(TILE_ROWS * job.row_bytes, 64), lines_a_step;  // of a strip
    const int64_t to_second = job.rows(0, 1, 0).data - job.rows(0, 0, 0).data;
    const uint8_t* line = nullptr;
    int64_t left = 0;

    // steps: of one panel's products
    Coming(const Matmul& job, int64_t begin, int64_t end, int64_t steps)
        : job(job), end(end), lines_a_step(divide_up(lines, steps)) {
        fetch(begin);
        step(left);
    }
    void fetch(int64_t column) {
        line = job.rows(column, 0, 0).data;
        left = column < end ? lines : 0;
    }
    // The panel at `column` begins to be multiplied.
    void begin(int64_t column) { fetch(column + job.panel_columns()); }
    void step() { step(std::min(left, lines_a_step)); }
    void step(int64_t count) {
        for (left -= count; count > 0; count--, line += 64) {
            __builtin_prefetch(line, 0, 2);
            __builtin_prefetch(line + to_second, 0, 2);
        }
    }
};

// Pieces of the panels of outputs `begin` … `end` - 1, one after the other, unpacked into the first cache: the next one
// while x has `turns` turns at one.
struct Unpacked {
    const Matmul& job;
    int64_t begin, end, turns;
    int64_t even = divide_up(job.x.parts, divide_up(job.x.parts, PIECE));
    int64_t parts = job.in_blocks ? PIECE : job.x.terms == 3 ? PIECE / 3 * 3 : even;  // of a piece; the last may have less
    Tile* next = reinterpret_cast<Tile*>(scratch(4 * PIECE * sizeof(Tile) / sizeof(float)));  // [2 strips][PIECE]
    Tile* now = next + 2 * PIECE;
    int64_t column = begin, first = 0;  // of the next one
    int64_t row = 0, rows_a_step = 0;   // how many rows of it are there, and follow a product
    Coming coming{job, begin, end, turns * job.x.parts};

    void advance() {
        unpack_until(2 * TILE_ROWS);
        std::swap(now, next);
        row = 0, rows_a_step = divide_up(2 * TILE_ROWS, turns * std::min(parts, job.x.parts - first));
        if (first == 0) coming.begin(column);
        first += parts;
        if (first >= job.x.parts) first = 0, column += job.panel_columns();
    }
    Place place(int64_t i) const { return {(const uint8_t*)now[i], TILE_BYTES, PIECE * sizeof(Tile)}; }
    void step() {
        coming.step();
        if (column < end) unpack_until(std::min<int64_t>(row + rows_a_step, 2 * TILE_ROWS));
    }
    void unpack_until(int64_t until) {
        while (row < until) {
            const int64_t s = row / TILE_ROWS, r = row % TILE_ROWS;
            const int64_t to = std::min<int64_t>(until - s * TILE_ROWS, TILE_ROWS);
            const int64_t rows = std::min(to, job.strip_rows(column, s)) - r;
            const int64_t count = std::min(parts, job.x.parts - first);
            Tile* tiles = reinterpret_cast<Tile*>(next[s * PIECE][r]);
            if (rows > 0) job.unpack(job.rows(column, s, r), rows, first, count, tiles);
            row += to - r;
        }
    }
};

// The same of weights that lie as rows of tiles: they are multiplied where they are.
struct InPlace {
    const Matmul& job;
    int64_t begin, end, turns;
    int64_t parts = PIECE;
    int64_t column = begin, first = 0;  // of the next one
    Coming coming{job, begin, end, turns * job.x.parts};
    const uint8_t* now = nullptr;

    void advance() {
        const int64_t columns = job.panel_columns();
        now = job.rows(column, 0, 0).data + first * TILE_BYTES;
        if (first == 0) coming.begin(column);
        first += parts;
        if (first >= job.x.parts) first = 0, column += columns;
    }
    Place place(int64_t i) const { return {now + i * TILE_BYTES, job.row_bytes, coming.to_second}; }
    void step() { coming.step(); }
};

// The lines of `rows` rows of results of a panel, fetched before they are written: one that is in no cache takes longer
// to write than to compute.
struct Results {
    const float* line;
    int64_t stride, rows, a_step;

    void step() {
        for (int64_t end = std::max<int64_t>(rows - a_step, 0); rows > end; rows--, line += stride) {
            __builtin_prefetch(line, 1);
            __builtin_prefetch(line + TILE_ROWS, 1);
        }
    }
};

// Tile T of sums, of tile t of x and outputs from `column` on.
template <int T>
void see(const Matmul& job, int64_t t, int64_t column) {
    const int64_t columns = std::min<int64_t>(16, job.n - column);
    if (columns <= 0) return;
    alignas(64) Sums sums;
    tile_store<T>(sums, 4 * job.x.width);
    job.greedy->see(sums, job.x.width, t, column, columns);
}

// The sums of COUNT tiles of x, from tile t on, to where they belong.
template <int COUNT>
void write_gemv(const Matmul& job, int64_t t, int64_t column) {
    unrolled<COUNT>([&](auto c) {
        const int64_t row = (t + c.value) * job.x.width;
        if (job.greedy) {
            see<2 * c.value>(job, t + c.value, column);
            return see<2 * c.value + 1>(job, t + c.value, column + TILE_ROWS);
        }
        if (job.gate) return write_gated<2 * c.value>(job, row, column);
        write<2 * c.value>(job, row, column);
        write<2 * c.value + 1>(job, row, column + TILE_ROWS);
    });
}

// COUNT tiles of x, from tile t on, with parts first … first + count - 1 of a panel. If others have their turn, too,
// sums wait for the next piece. Tiles 0 … 3: sums, a strip's beside the other's; 4, 5: weights; 6, 7: x.
template <int COUNT, class Weights>
void take_turn(const Matmul& job, int64_t t, int64_t column, int64_t first, int64_t count, Weights& weights,
               Sums* waiting) {
    const bool is_alone = weights.turns == 1, is_last = first + count == job.x.parts;
    if (first == 0)
        unrolled<2 * COUNT>([](auto sum) { tile_zero<sum.value>(); });
    else if (!is_alone)
        unrolled<2 * COUNT>([&](auto sum) { tile_load<sum.value>(waiting[2 * t + sum.value], TILE_BYTES); });
    const int64_t row = t * job.x.width;
    const int64_t rows = is_last && job.y && !job.gate ? std::min(COUNT * job.x.width, job.x.m - row) : 0;
    Results results{job.y + row * job.y_stride + column, job.y_stride, rows, divide_up(rows, count)};
    const uint16_t* x = job.x.tile(t, first);
    const int64_t size = job.x.width * PART, stored = job.x.stored;
    for_parts(job.x.terms, count, [&](int64_t i, auto loads_x, auto loads_weights) {
        if constexpr (loads_weights.value) {
            const Place place = weights.place(i);
            tile_load<4>(place.tile, place.stride);
            tile_load<5>(place.tile + place.to_second, place.stride);
        }
        unrolled<COUNT>([&](auto c) {
            if constexpr (loads_x.value) tile_load<6 + c.value>(x + c.value * stored * size, 4 * job.x.width);
            tile_product<2 * c.value, 4, 6 + c.value>();
            tile_product<2 * c.value + 1, 5, 6 + c.value>();
        });
        if constexpr (loads_x.value) x += size;  // tiles lie in the order in which they are loaded
        weights.step();
        results.step();
    });
    if (is_last)
        write_gemv<COUNT>(job, t, column);
    else if (!is_alone)
        unrolled<2 * COUNT>([&](auto sum) { tile_store<sum.value>(waiting[2 * t + sum.value], TILE_BYTES); });
}

// Outputs `begin` … `end` - 1 of all of x.
template <class Weights>
void gemv(const Matmul& job, int64_t begin, int64_t end) {
    const int64_t parts = job.x.parts, tiles = job.x.num_tiles;
    alignas(64) Sums waiting[2 * MOST_IN_PLACE_ROWS / TILE_ROWS];
    Weights weights{job, begin, end, divide_up(tiles, 2)};
    for (int64_t column = begin; column < end; column += job.panel_columns())
        for (int64_t first = 0; first < parts; first += weights.parts) {
            const int64_t count = std::min(weights.parts, parts - first);
            weights.advance();
            for (int64_t t = 0; t < tiles; t += 2) {
                const auto turn = t + 1 < tiles ? take_turn<2, Weights> : take_turn<1, Weights>;
                turn(job, t, column, first, count, weights, waiting);
            }
        }
}

}  // namespace
}  // namespace octavo
