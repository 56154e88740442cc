// Few rows of x, at most 64, over W: what costs is memory, and unpacking. Included by matmul_bf16.cpp.
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

// One strip or two at a time: more tiles of x leave room for one.
template <int COUNT>
constexpr int STRIPS_BESIDE = COUNT > 2 ? 1 : 2;

// COUNT tiles of x, at a part of K, with so many of weights: rows of each are `stride` bytes apart, the second tile
// begins `to_second` after the first. Tiles 0 … 3: sums; 4, 5: weights; others: x.
template <int COUNT>
OCTAVO_INLINE void multiply_part(const Rounded& rounded, int64_t part, const uint8_t* weights, int64_t stride,
                                 int64_t to_second) {
    constexpr int STRIPS = STRIPS_BESIDE<COUNT>;
    unrolled<STRIPS>([&](auto s) { tile_load<4 + s.value>(weights + s.value * to_second, stride); });
    unrolled<COUNT>([&](auto c) {
        constexpr int X = STRIPS == 2 ? 6 + c.value : 5 + c.value % 3;
        tile_load<X>(rounded.tile(c.value, part), 4 * rounded.width);
        unrolled<STRIPS>([&](auto s) { tile_product<c.value * STRIPS + s.value, 4 + s.value, X>(); });
    });
}

// Outputs `begin` … `end` - 1 of COUNT tiles of x. Weights come in pieces that stay in the first cache: one is
// multiplied while the next is unpacked.
template <int COUNT>
void multiply_few(const Matmul& job, int64_t begin, int64_t end) {
    constexpr int STRIPS = STRIPS_BESIDE<COUNT>;
    const int64_t parts = job.x.parts;
    const int64_t strips = divide_up(end - begin, TILE_ROWS) * (job.gate ? 2 : 1);
    const int64_t even = divide_up(parts, divide_up(parts, PIECE));
    Tile* space = reinterpret_cast<Tile*>(scratch(2 * STRIPS * PIECE * sizeof(Tile) / sizeof(float)));
    alignas(64) Sums gates[COUNT];
    NextPiece next{job, begin, STRIPS, job.blocks_are_pieces ? PIECE : even, space};
    next.unpack_until(STRIPS * TILE_ROWS);
    for (int64_t strip = 0; strip < strips; strip += STRIPS) {
        unrolled<COUNT * STRIPS>([](auto sum) { tile_zero<sum.value>(); });
        for (int64_t first = 0; first < parts; first += next.parts) {
            const Tile* weights = next.out;
            const int64_t count = next.count();
            next.advance(weights == space ? space + STRIPS * PIECE : space);
            const int64_t rows = next.strip < strips ? STRIPS * TILE_ROWS : 0;
            for (int64_t i = 0; i < count; i++) {
                multiply_part<COUNT>(job.x, first + i, (const uint8_t*)weights[i], TILE_BYTES,
                                     PIECE * sizeof(Tile));
                next.unpack_until((i + 1) * rows / count);
            }
        }
        write_few<COUNT, STRIPS>(job, begin, strip, gates);
    }
}

// The same where weights lie as rows of tiles: they are multiplied where they are, while those of the next strips
// are fetched in the order of memory.
template <int COUNT>
void multiply_few_in_place(const Matmul& job, int64_t begin, int64_t end) {
    constexpr int STRIPS = STRIPS_BESIDE<COUNT>;
    const int64_t parts = job.x.parts, bytes = divide_up(TILE_ROWS * job.row_bytes, parts);
    const int64_t strips = (end - begin) / TILE_ROWS * (job.gate ? 2 : 1);
    const auto place = [&](int64_t strip) { return job.rows(begin, strip, 0).data; };
    const int64_t to_second = place(STRIPS - 1) - place(0);
    alignas(64) Sums gates[COUNT];
    for (int64_t strip = 0; strip < strips; strip += STRIPS) {
        const uint8_t *weights = place(strip), *ahead = place(std::min(strip + STRIPS, strips - STRIPS));
        unrolled<COUNT * STRIPS>([](auto sum) { tile_zero<sum.value>(); });
        for (int64_t i = 0; i < parts; i++, ahead += bytes) {
            unrolled<STRIPS>([&](auto s) {
                for (int64_t b = 0; b < bytes; b += 64)
                    __builtin_prefetch(ahead + s.value * to_second + b, 0, 2);
            });
            multiply_part<COUNT>(job.x, i, weights + i * TILE_BYTES, job.row_bytes, to_second);
        }
        write_few<COUNT, STRIPS>(job, begin, strip, gates);
    }
}

}  // namespace
}  // namespace octavo
