// Few rows of x, at most 64, over W: what costs is unpacking. Included by matmul_bf16.cpp.
#pragma once
#include "matmul_bf16.h"

namespace octavo {
namespace {

// Unpacks what few rows of x meet next: a piece of `strips` strips, row by row.
struct NextPiece {
    const Matmul& job;
    int64_t begin, strips, parts;  // parts: of a piece; the last one of a row may have less
    Tile* out;                     // [strips][PIECE]
    int64_t strip = 0, first = 0, row = 0;

    int64_t count() const { return std::min(parts, job.x.parts - first); }

    void unpack_until(int64_t end) {
        while (row < end) {
            const int64_t s = row / TILE_ROWS, r = row % TILE_ROWS;
            const int64_t to = std::min<int64_t>(end - s * TILE_ROWS, TILE_ROWS);
            const int64_t rows = std::min(to, job.strip_rows(begin, strip + s)) - r;
            Tile* tiles = reinterpret_cast<Tile*>(out[s * PIECE][r]);
            if (rows > 0) job.unpack(job.rows(begin, strip + s, r), rows, first, count(), tiles);
            row += to - r;
        }
    }

    void advance(Tile* to) {
        out = to, row = 0, first += parts;
        if (first >= job.x.parts) first = 0, strip += strips;
    }
};

// Tiles 0 … to where they belong: of COUNT tiles of x the sums of STRIPS strips from `strip` on. Alone, a strip
// of gates waits in `gates` for its values.
template <int COUNT, int STRIPS>
void write_few(const Matmul& job, int64_t begin, int64_t strip, Sums* gates) {
    unrolled<COUNT>([&](auto c) {
        const int64_t row = c.value * job.x.width;
        const int64_t column = begin + strip / (job.gate ? 2 : 1) * TILE_ROWS;
        if (!job.gate) {
            unrolled<STRIPS>([&](auto s) {
                write<c.value * STRIPS + s.value>(job, row, column + s.value * TILE_ROWS);
            });
        } else if constexpr (STRIPS == 2) {
            write_gated<2 * c.value>(job, row, column);
        } else if (strip % 2 == 0) {
            tile_store<c.value>(gates[c.value], 4 * job.x.width);
        } else {
            alignas(64) Sums values;
            tile_store<c.value>(values, 4 * job.x.width);
            write_gated(job, row, column, gates[c.value], values);
        }
    });
}

// Outputs `begin` … `end` - 1 of COUNT tiles of x. Weights come in pieces that stay in the first cache: one is
// multiplied while the next is unpacked. Tiles 0 … 3: sums, of two strips or of one; 4, 5: weights; others: x.
template <int COUNT>
void multiply_few(const Matmul& job, int64_t begin, int64_t end) {
    constexpr int STRIPS = COUNT > 2 ? 1 : 2;
    const int64_t parts = job.x.parts, size = job.x.width * PART;
    const int64_t strips = divide_up(end - begin, TILE_ROWS) * (job.gate ? 2 : 1);
    const int64_t even = divide_up(parts, divide_up(parts, PIECE));
    Tile* space = reinterpret_cast<Tile*>(scratch(2 * STRIPS * PIECE * sizeof(Tile) / sizeof(float)));
    alignas(64) Sums gates[COUNT];
    NextPiece next{job, begin, STRIPS, job.blocks_are_pieces ? PIECE : even, space};
    next.unpack_until(STRIPS * TILE_ROWS);
    for (int64_t strip = 0; strip < strips; strip += STRIPS) {
        const uint16_t* x = job.x.tile(0, 0);
        unrolled<COUNT * STRIPS>([](auto sum) { tile_zero<sum.value>(); });
        for (int64_t first = 0; first < parts; first += next.parts) {
            const Tile* weights = next.out;
            const int64_t count = next.count();
            next.advance(weights == space ? space + STRIPS * PIECE : space);
            const int64_t rows = next.strip < strips ? STRIPS * TILE_ROWS : 0;
            for (int64_t i = 0; i < count; i++, x += size) {
                unrolled<STRIPS>([&](auto s) {
                    tile_load<4 + s.value>(weights[s.value * PIECE + i], TILE_BYTES);
                });
                unrolled<COUNT>([&](auto c) {
                    constexpr int X = STRIPS == 2 ? 6 + c.value : 5 + c.value % 3;
                    tile_load<X>(x + c.value * parts * size, 4 * job.x.width);
                    unrolled<STRIPS>([&](auto s) {
                        tile_product<c.value * STRIPS + s.value, 4 + s.value, X>();
                    });
                });
                next.unpack_until((i + 1) * rows / count);
            }
        }
        write_few<COUNT, STRIPS>(job, begin, strip, gates);
    }
}

}  // namespace
}  // namespace octavo
