// Many rows of x over W, by panels that stay in the second cache. Included by matmul_bf16.cpp.
#pragma once
#include "matmul_bf16.h"

namespace octavo {
namespace {

constexpr int64_t GROUP_BYTES = 512 << 10;  // of panels that many rows meet together, in the second cache

// Panels on their way, `strips` of 16 rows of W for outputs from `column` on: after each of `steps` steps as many
// units of the work as make all of it. A unit unpacks a piece of a row, or turns one of an unpacked strip.
struct Unpacking {
    const Matmul& job;
    int64_t column, strips;
    Tile* out;  // [strips][parts]
    int64_t steps, units = strips * (TILE_ROWS + 1) * divide_up(job.x.parts, PIECE), left = units, due = 0;
    int64_t strip = 0, row = 0, at = 0;  // where the next unit begins

    void step() {
        for (due += units; due >= steps && left > 0; due -= steps) one();
    }
    void finish() {
        while (left > 0) one();
    }
    void one() {
        const int64_t count = std::min(PIECE, job.x.parts - at);
        Tile* tiles = out + strip * job.x.parts + at;
        if (row == TILE_ROWS) {
            for (int64_t i = 0; i < count; i++) turn(reinterpret_cast<float*>(tiles[i]));
        } else if (row < job.strip_rows(column, strip)) {
            job.unpack(job.rows(column, strip, row), 1, at, count, reinterpret_cast<Tile*>(tiles[0][row]));
        }
        left--;
        at += PIECE;
        if (at < job.x.parts) return;
        at = 0;
        if (++row > TILE_ROWS) row = 0, strip++;
    }
};

// A panel with one or two tiles of x. Tiles 0 … 3: sums; 4, 5: weights; 6, 7: x. Loads and products take turns.
template <int COUNT>
void multiply_tiles(const Matmul& job, int64_t t, const Tile* panel, int64_t column, Unpacking& next) {
    const int64_t parts = job.x.parts, size = TILE_ROWS * PART;
    const uint16_t* x = job.x.tile(t, 0);
    unrolled<2 * COUNT>([](auto sum) { tile_zero<sum.value>(); });
    for (int64_t i = 0; i < parts; i++, x += size) {
        unrolled<COUNT>([&](auto c) {
            tile_stream<6 + c.value>(x + c.value * parts * size, TILE_BYTES);
            unrolled<2>([&](auto half) {
                constexpr int SUM = 2 * c.value + half.value, WEIGHTS = 4 + half.value;
                if constexpr (c.value == 0) tile_load<WEIGHTS>(panel[half.value * parts + i], TILE_BYTES);
                tile_product<SUM, 6 + c.value, WEIGHTS>();
            });
        });
        next.step();
    }
    unrolled<COUNT>([&](auto c) {
        const int64_t row = (t + c.value) * TILE_ROWS;
        if (job.gate) return write_gated<2 * c.value>(job, row, column);
        write<2 * c.value>(job, row, column);
        write<2 * c.value + 1>(job, row, column + TILE_ROWS);
    });
}

// Outputs `begin` … `end` - 1 of all rows of x.
inline void multiply_many(const Matmul& job, int64_t begin, int64_t end) {
    const int64_t parts = job.x.parts, panel = 2 * parts, tiles = job.x.num_tiles;
    const int64_t columns = job.panel_columns();
    const int64_t fit = std::max<int64_t>(1, GROUP_BYTES / (panel * int64_t(sizeof(Tile))));
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
                auto multiply_one = t + 1 < tiles ? multiply_tiles<2> : multiply_tiles<1>;
                multiply_one(job, t, panels + p * panel, column + p * columns, next);
            }
        next.finish();
    }
}

}  // namespace
}  // namespace octavo
