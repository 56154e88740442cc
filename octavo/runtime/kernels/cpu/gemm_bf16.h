// GEMM: many rows of x over W, which is laid out in panels of two strips, turned. Included by matmul_bf16.cpp.
//
// What costs is memory. Rows stay in the second cache of who multiplies them: few enough, in everybody's, and a
// task takes them past some panels; else a task takes some of them past all panels, which are brought there
// before they are met. So are lines of results before they are written: a tile that is in no cache takes longer
// to write than to compute. This goes between products, as gates and activations of those before: tiles have a
// unit of their own.
#pragma once
#include "matmul_bf16.h"

namespace octavo {
namespace {

constexpr int64_t MOST_ROWS = 128, ROWS_BYTES = 768 << 10;  // of a task
constexpr int64_t TASKS_PER_THREAD = 4;                     // if there are rows: one may be slower than the other
constexpr int64_t PANELS_BYTES = 4 << 20;                   // that are laid out at a time
constexpr int64_t PAIR = 2 * TILE_ROWS;

// Panels `first` … first + count - 1 of W, laid out.
struct Panels {
    const Matmul& job;
    int64_t first, count;
    Tile* data;

    static int64_t tiles(const Matmul& job) { return 2 * job.x.stored; }
    static int64_t number(const Matmul& job) { return divide_up(job.n, job.panel_columns()); }
    int64_t column(int64_t p) const { return (first + p) * job.panel_columns(); }
    Tile* at(int64_t p) const { return data + p * tiles(job); }

    void lay_out(int64_t p) const {
        const int64_t parts = job.x.parts;
        alignas(64) Tile piece[PIECE];
        for (int64_t strip = 0; strip < 2; strip++) {
            const Rows rows = job.rows(column(p), strip, 0);
            for (int64_t i = 0; i < parts; i += PIECE) {
                const int64_t count = std::min(PIECE, parts - i);
                job.unpack(rows, job.strip_rows(column(p), strip), i, count, piece);
                Tile* to = at(p) + strip * job.x.stored;
                for (int64_t j = 0; j < count; j++)
                    if (!(job.x.terms == 3 && (i + j) % 3 == 1))
                        turn((float*)piece[j], (float*)to[job.x.place_of_weights(i + j)]);
            }
        }
    }
};

// What goes between the products of a panel and of one or two tiles of x.
struct Between {
    const Matmul& job;
    const int64_t parts = job.x.parts;
    const int64_t results_a_step = divide_up(2 * PAIR, parts), gates_a_step = divide_up(PAIR, parts);
    int64_t lines_a_step = 0;
    const char *next = nullptr, *next_end = nullptr;                // lines of the next panel
    int64_t row = 0, column = 0, result = 0;                        // lines of results
    int64_t gate_row = 0, gate_column = 0, gated = 0, to_gate = 0;  // rows of what was multiplied before
    alignas(64) Sums gates[2], values[2];

    void begin(int64_t t, int64_t at) {
        row = t * TILE_ROWS, column = at, result = job.y ? 0 : 2 * PAIR;
    }

    void step() {
        for (int64_t i = 0; i < lines_a_step && next < next_end; i++, next += 64)
            __builtin_prefetch(next, 0, 2);
        for (int64_t i = 0; i < results_a_step && result < 2 * PAIR; i++, result++)
            __builtin_prefetch(job.y + (row + result / 2) * job.y_stride + column + result % 2 * 16, 1);
        if (gated < to_gate) gate(gates_a_step);
    }

    // Gates and values, or what shall become outputs of two strips, to wait here.
    template <int COUNT>
    void take() {
        finish();
        unrolled<COUNT>([&](auto c) {
            tile_store<2 * c.value>(gates[c.value], TILE_BYTES);
            tile_store<2 * c.value + 1>(values[c.value], TILE_BYTES);
        });
        gate_row = row, gate_column = column, gated = 0;
        to_gate = std::min<int64_t>(COUNT * TILE_ROWS, job.x.m - row);
    }

    void finish() {
        if (gated < to_gate) gate(to_gate - gated);
    }

    void gate(int64_t rows) {
        rows = std::min(rows, to_gate - gated);
        const float *first = gates[0] + gated * 16, *second = values[0] + gated * 16;
        if (job.gate) write_gated(job, gate_row + gated, rows, gate_column, first, second);
        for (int64_t r = 0; r < rows && !job.gate; r++) {
            write_row(job, gate_row + gated + r, gate_column, first + r * 16);
            if (gate_column + 16 < job.n) write_row(job, gate_row + gated + r, gate_column + 16, second + r * 16);
        }
        gated += rows;
    }
};

// A panel with one or two tiles of x. Tiles 0 … 3: sums; 4, 5: weights; 6, 7: x. Loads and products take turns.
template <int COUNT>
void multiply_tiles(const Matmul& job, int64_t t, const Tile* panel, Between& between) {
    const int64_t stored = job.x.stored, size = TILE_ROWS * PART;
    const uint16_t* x = job.x.tile(t, 0);
    unrolled<2 * COUNT>([](auto sum) { tile_zero<sum.value>(); });
    for_parts(job.x.terms, job.x.parts, [&](int64_t, auto loads_x, auto loads_weights) {
        unrolled<COUNT>([&](auto c) {
            if constexpr (loads_x.value) tile_stream<6 + c.value>(x + c.value * stored * size, TILE_BYTES);
            unrolled<2>([&](auto half) {
                constexpr int SUM = 2 * c.value + half.value, WEIGHTS = 4 + half.value;
                if constexpr (loads_weights.value && c.value == 0)
                    tile_load<WEIGHTS>(panel[half.value * stored], TILE_BYTES);
                tile_product<SUM, 6 + c.value, WEIGHTS>();
            });
        });
        if constexpr (loads_x.value) x += size;  // tiles lie in the order in which they are loaded
        if constexpr (loads_weights.value) panel++;
        between.step();
    });
    if (job.gate || job.activate || (job.bias && job.x.terms > 1)) return between.take<COUNT>();
    unrolled<COUNT>([&](auto c) {
        const int64_t row = (t + c.value) * TILE_ROWS;
        write<2 * c.value>(job, row, between.column);
        write<2 * c.value + 1>(job, row, between.column + TILE_ROWS);
    });
}

// All of x with all panels.
inline void gemm(const Matmul& job, const Panels& panels) {
    const int64_t tiles = job.x.num_tiles, lines = Panels::tiles(job) * TILE_ROWS;
    Between between{job};
    between.lines_a_step = divide_up(lines, divide_up(tiles, 2) * job.x.parts);
    for (int64_t p = 0; p < panels.count; p++) {
        between.next = (const char*)panels.at(p + 1);
        between.next_end = (const char*)panels.at(std::min(p + 2, panels.count));
        for (int64_t t = 0; t < tiles; t += 2) {
            between.begin(t, panels.column(p));
            auto multiply_one = t + 1 < tiles ? multiply_tiles<2> : multiply_tiles<1>;
            multiply_one(job, t, panels.at(p), between);
        }
    }
    between.finish();
}

// Call body(first, count) for all of `m` rows of `size` numbers, as tasks.
template <class Body>
void for_row_blocks(int64_t m, int64_t size, int threads, Body&& body) {
    const int64_t fit = std::clamp<int64_t>(ROWS_BYTES / (2 * size), PAIR, MOST_ROWS);
    const int64_t rows = std::min(round_up(divide_up(m, TASKS_PER_THREAD * threads), PAIR), fit / PAIR * PAIR);
    parallel_for(divide_up(m, rows), threads,
                 [&](int64_t i) { body(i * rows, std::min(rows, m - i * rows)); });
}

// Where all rows stay in a second cache: tasks lay out panels of their own, one by one.
inline void multiply_by_columns(const Matmul& job, const float* x, int64_t x_stride, const TileShapes& shapes,
                                int threads) {
    const Rounded all = job.x.of(job.x.m, scratch(job.x.floats_of(job.x.m), OF_CALL));
    all.round_all(x, x_stride, threads);
    const Matmul whole = job.part(all, job.y);
    const int64_t number = Panels::number(whole), tasks = std::min(number, TASKS_PER_THREAD * threads);
    parallel_for(tasks, threads, [&](int64_t i) {
        float* space = scratch(Panels::tiles(whole) * sizeof(Tile) / sizeof(float));
        Tiles set(shapes);
        for (int64_t p = number * i / tasks; p < number * (i + 1) / tasks; p++) {
            const Panels panel{whole, p, 1, reinterpret_cast<Tile*>(space)};
            panel.lay_out(0);
            gemm(whole, panel);
        }
    });
}

inline void gemm(const Matmul& job, const float* x, int64_t x_stride, const TileShapes& shapes,
                          int threads) {
    const int64_t size = job.x.stored * PART;
    if (2 * job.x.m * size <= ROWS_BYTES) return multiply_by_columns(job, x, x_stride, shapes, threads);
    const int64_t number = Panels::number(job), tiles = Panels::tiles(job);
    const int64_t most = std::clamp<int64_t>(PANELS_BYTES / int64_t(tiles * sizeof(Tile)), 1, number);
    Tile* space = reinterpret_cast<Tile*>(scratch(most * tiles * sizeof(Tile) / sizeof(float), OF_CALL));
    for (int64_t first = 0; first < number; first += most) {
        const Panels panels{job, first, std::min(most, number - first), space};
        parallel_for(panels.count, threads, [&](int64_t p) { panels.lay_out(p); });
        for_row_blocks(job.x.m, size, threads, [&](int64_t row, int64_t rows) {
            const Rounded some = job.x.of(rows, scratch(job.x.floats_of(rows)));
            for (int64_t t = 0; t < some.num_tiles; t++) some.round(x + row * x_stride, x_stride, t);
            Tiles set(shapes);
            gemm(job.part(some, job.y + row * job.y_stride), panels);
        });
    }
}

// y = act(gates) * values, times W of `down`: between the two, rows stay where they are.
inline void feed_forward(const Matmul& up, const Matmul& down, const float* x, int64_t x_stride,
                         const TileShapes& shapes, int threads) {
    const int64_t size = up.x.k, inner_size = down.x.k;
    const int64_t ups = Panels::number(up), downs = Panels::number(down), up_tiles = ups * Panels::tiles(up);
    const int64_t floats = (up_tiles + downs * Panels::tiles(down)) * int64_t(sizeof(Tile) / sizeof(float));
    Tile* space = reinterpret_cast<Tile*>(scratch(size_t(floats), OF_CALL));
    const Panels up_panels{up, 0, ups, space}, down_panels{down, 0, downs, space + up_tiles};
    parallel_for(ups + downs, threads,
                 [&](int64_t p) { p < ups ? up_panels.lay_out(p) : down_panels.lay_out(p - ups); });
    for_row_blocks(up.x.m, size + inner_size, threads, [&](int64_t row, int64_t rows) {
        const size_t before = Rounded::floats(rows, size);
        float* data = scratch(before + Rounded::floats(rows, inner_size));
        const Rounded some{rows, size, true, data}, inner{rows, inner_size, true, data + before};
        for (int64_t t = 0; t < some.num_tiles; t++) some.round(x + row * x_stride, x_stride, t);
        Tiles set(shapes);
        gemm(up.part(some, nullptr, &inner), up_panels);
        gemm(down.part(inner, down.y + row * down.y_stride), down_panels);
    });
}

}  // namespace
}  // namespace octavo
