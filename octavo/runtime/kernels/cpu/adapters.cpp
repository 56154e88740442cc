// Low-rank changes of products, another one for every token: y += (x down^T) up, in two phases; and products of other
// matrices. Every sum has an order of its own, whatever the other rows are and whoever computes it.
#include <algorithm>
#include <vector>

#include "exported.h"
#include "simd.h"
#include "threads.h"

namespace octavo {
namespace {

struct Change {
    const void *down, *up;
    int64_t rank, parts;
    const float *factors, *bias;
};
static_assert(sizeof(Change) == 6 * 8, "as LowRank.entry writes it");

inline vf load_as(const float* p) { return load(p); }
inline vf load_as(const uint16_t* p) { return load_bf16(p); }
inline float one(const float* p) { return *p; }
inline float one(const uint16_t* p) {
    uint32_t bits = uint32_t(*p) << 16;
    return read<float>(&bits);
}

constexpr int MOST_ROWS = VL == 16 ? 4 : 2;  // tokens that the matrices of their adapter are read for at once

inline const void* place_of(const Change& change) { return change.down; }
inline const void* place_of(int64_t whole) { return (const void*)whole; }

template <class T>
struct Tokens {
    const T* change;
    int64_t count;
    int64_t rows[MOST_ROWS];
};

// Tokens that have an adapter, those of one side by side.
template <class T>
std::vector<Tokens<T>> grouped(const int32_t* slots, int64_t rows, const T* changes) {
    std::vector<int64_t> order;
    for (int64_t row = 0; row < rows; row++)
        if (place_of(changes[slots[row]])) order.push_back(row);
    std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return slots[a] < slots[b]; });
    std::vector<Tokens<T>> groups;
    for (int64_t row : order) {
        const T* change = changes + slots[row];
        if (groups.empty() || groups.back().change != change || groups.back().count == MOST_ROWS)
            groups.push_back({change, 0, {}});
        groups.back().rows[groups.back().count++] = row;
    }
    return groups;
}

// Lines on their way to the caches, as many as are computed meanwhile: what follows more of them would wait for all.
template <int COUNT, class W>
inline void fetch(const W* from) {
    for (int i = 0; i < COUNT; i += 64 / int(sizeof(W))) __builtin_prefetch(from + i);
}

// Products of ROWS tokens with COUNT rows of `down`: each sum alike, however many there are. next: the rows behind them
template <int ROWS, int COUNT, class W>
inline void dots(const float* const* x, const W* down, int64_t inputs, float* const* y, int64_t first, const W* next) {
    vf sums[ROWS][COUNT] = {};
    int64_t i = 0;
    for (; i + VL <= inputs; i += VL) {
        fetch<COUNT * VL>(next + i * COUNT);
        vf values[ROWS];
        for (int t = 0; t < ROWS; t++) values[t] = in_register(load(x[t] + i));
        for (int r = 0; r < COUNT; r++) {
            const vf weights = in_register(load_as(down + r * inputs + i));
            for (int t = 0; t < ROWS; t++) sums[t][r] = fma(values[t], weights, sums[t][r]);
        }
    }
    for (int t = 0; t < ROWS; t++)
        for (int r = 0; r < COUNT; r++) y[t][first + r] = sum(sums[t][r]);
    for (int k = 0; i < inputs && k < ROWS * COUNT; k++) {
        const int t = k / COUNT, r = k % COUNT;
        float rest = 0;
        for (int64_t j = i; j < inputs; j++) rest += x[t][j] * one(down + r * inputs + j);
        y[t][first + r] += rest;
    }
}

template <int ROWS, class W>
void shrink(const float* const* x, const W* down, int64_t inputs, int64_t begin, int64_t end, float* const* y,
            const W* next) {
    constexpr int COUNT = ROWS == 1 ? 8 : 4;
    int64_t r = begin;
    for (; r + COUNT <= end; r += COUNT) {
        const W* rows = down + r * inputs;
        dots<ROWS, COUNT>(x, rows, inputs, y, r, r + COUNT < end ? rows + COUNT * inputs : next);
    }
    for (; r < end; r++) dots<ROWS, 1>(x, down + r * inputs, inputs, y, r, next);
}

// y[n … n + COUNT * VL) += inner up of ROWS tokens, where `up` has rows of `outputs` values; then factors and biases.
// next: where the first of the rows will be read
template <int ROWS, int COUNT, class W>
inline void raise(const float* const* inner, const Change& change, int64_t outputs, int64_t n, const float* bias,
                  float* const* y, const W* next) {
    const W* up = (const W*)change.up + n;
    vf totals[ROWS][COUNT] = {};
    for (int64_t r = 0; r < change.rank; r++) {
        fetch<COUNT * VL>(next + r * outputs);
        vf values[ROWS];
        for (int t = 0; t < ROWS; t++) values[t] = in_register(set1(inner[t][r]));
        for (int v = 0; v < COUNT; v++) {
            const vf weights = in_register(load_as(up + r * outputs + v * VL));
            for (int t = 0; t < ROWS; t++) totals[t][v] = fma(values[t], weights, totals[t][v]);
        }
    }
    for (int t = 0; t < ROWS; t++)
        for (int v = 0; v < COUNT; v++) store(y[t] + n + v * VL, load(y[t] + n + v * VL) + totals[t][v]);
    for (int k = 0; (change.factors || change.bias) && k < ROWS * COUNT; k++) {
        const int64_t at = n + k % COUNT * VL;
        vf total = load(y[k / COUNT] + at);
        if (change.factors) {
            vf base = bias ? load(bias + at) : vf{};
            total = (total - base) * load(change.factors + at) + base;
        }
        store(y[k / COUNT] + at, change.bias ? total + load(change.bias + at) : total);
    }
}

// The same of outputs begin … end.
template <int ROWS, class W>
void expand(const float* const* inner, const Change& change, int64_t outputs, int64_t begin, int64_t end,
            const float* bias, float* const* y, const W* next) {
    constexpr int64_t COUNT = 4 * VL, AHEAD = 2 * COUNT;
    const W* up = (const W*)change.up;
    int64_t n = begin;
    for (; n + COUNT <= end; n += COUNT) {
        const int64_t later = n + AHEAD;
        for (int t = 0; t < ROWS; t++) fetch<COUNT>(y[t] + later);
        raise<ROWS, 4, W>(inner, change, outputs, n, bias, y, later < end ? up + later : next + (later - end));
    }
    for (; n + VL <= end; n += VL) raise<ROWS, 1, W>(inner, change, outputs, n, bias, y, next);
    for (; n < end; n++) {
        for (int t = 0; t < ROWS; t++) {
            float total = 0;
            for (int64_t r = 0; r < change.rank; r++) total += inner[t][r] * one(up + r * outputs + n);
            total = y[t][n] + total;
            if (change.factors) total = (total - (bias ? bias[n] : 0)) * change.factors[n] + (bias ? bias[n] : 0);
            y[t][n] = change.bias ? total + change.bias[n] : total;
        }
    }
}

// Call body with the number of tokens, known when compiling.
template <class Body>
inline void counted(int64_t count, Body&& body) {
    unrolled<MOST_ROWS>([&](auto t) {
        if (count == t + 1) body(std::integral_constant<int, t + 1>{});
    });
}

constexpr int64_t RANKS = 8;        // rows of `down` in a task, at least
constexpr int64_t OUTPUTS = 512;    // a multiple of every VL: the same values are alone in a tail in any task
constexpr int64_t WORTH = 1 << 13;  // products of a task
constexpr int64_t TASKS_PER_THREAD = 2;  // to give more of them out takes longer than a thread may be late

struct Block {
    int64_t part, begin, end;
};

template <class W>
void add(const float* x, int64_t rows, int64_t inputs, int64_t x_stride, float* out, int64_t out_stride,
         const int32_t* slots, const Change* changes, const int32_t* bounds, int64_t parts, const float* bias,
         int threads) {
    std::vector<Tokens<Change>> groups = grouped(slots, rows, changes);
    if (groups.empty()) return;
    int64_t outputs = bounds[parts], width = 0, busy = 0, count = int64_t(groups.size());
    for (const auto& tokens : groups) {
        width = std::max(width, tokens.change->rank * tokens.change->parts);
        busy += tokens.count;
    }
    float* inner = scratch(size_t(rows) * width, OF_CALL);
    std::vector<Block> blocks;  // of outputs, none of two parts
    for (int64_t part = 0; part < parts; part++)
        for (int64_t begin = bounds[part]; begin < bounds[part + 1]; begin += OUTPUTS)
            blocks.push_back({part, begin, std::min<int64_t>(begin + OUTPUTS, bounds[part + 1])});
    auto rows_of = [&](const Change& change, int64_t piece) {
        return (const W*)change.down + std::min(piece * RANKS, change.rank * change.parts) * inputs;
    };
    auto columns_of = [&](const Change& change, int64_t block) {
        return (const W*)change.up + blocks[size_t(block)].begin;
    };
    auto shrink_piece = [&](const Tokens<Change>& tokens, int64_t piece, const W* next) {
        const Change& change = *tokens.change;
        int64_t begin = piece * RANKS, end = std::min(begin + RANKS, change.rank * change.parts);
        const float* from[MOST_ROWS];
        float* to[MOST_ROWS];
        for (int64_t t = 0; t < tokens.count; t++) {
            from[t] = x + tokens.rows[t] * x_stride;
            to[t] = inner + tokens.rows[t] * width;
        }
        counted(tokens.count, [&](auto n) { shrink<n>(from, (const W*)change.down, inputs, begin, end, to, next); });
    };
    auto expand_block = [&](const Tokens<Change>& tokens, int64_t number, const W* next) {
        const Change& change = *tokens.change;
        const Block& block = blocks[size_t(number)];
        const float* from[MOST_ROWS];
        float* to[MOST_ROWS];
        for (int64_t t = 0; t < tokens.count; t++) {
            from[t] = inner + tokens.rows[t] * width + (change.parts > 1 ? block.part * change.rank : 0);
            to[t] = out + tokens.rows[t] * out_stride;
        }
        counted(tokens.count,
                [&](auto n) { expand<n, W>(from, change, outputs, block.begin, block.end, bias, to, next); });
    };
    const int64_t pieces = divide_up(width, RANKS), last = int64_t(blocks.size()) - 1;
    if (count % threads == 0 || count >= 4 * threads) {  // a thread does all for a group: none waits in between
        parallel_for(count, threads, [&](int64_t group) {
            const Tokens<Change>& tokens = groups[size_t(group)];
            for (int64_t i = 0; i < pieces; i++)
                shrink_piece(tokens, i,
                             i + 1 < pieces ? rows_of(*tokens.change, i + 1) : columns_of(*tokens.change, 0));
            for (int64_t i = 0; i <= last; i++)
                expand_block(tokens, i, columns_of(*tokens.change, std::min(i + 1, last)));
        });
        return;
    }
    // Pieces of groups, one after the other. begin: returns where the matrix of one begins; body also takes where that
    // of the next one does.
    auto run = [&](int64_t pieces, int64_t cost, auto&& begin, auto&& body) {
        const int64_t all = count * pieces, most = TASKS_PER_THREAD * threads;
        const int64_t tasks = std::min(all, std::clamp<int64_t>(cost / WORTH, 1, most));
        auto at = [&](int64_t i) { return begin(*groups[size_t(i / pieces)].change, i % pieces); };
        parallel_for(tasks, threads, [&](int64_t task) {
            for (int64_t i = all * task / tasks, end = all * (task + 1) / tasks; i < end; i++)
                body(groups[size_t(i / pieces)], i % pieces, at(std::min(i + 1, end - 1)));
        });
    };
    run(pieces, busy * width * inputs, rows_of, shrink_piece);
    run(last + 1, busy * width * outputs / parts, columns_of, expand_block);
}

// y = W x + bias, and that of the slot's change; a piece of a matrix for all groups of tokens, one after the other.
template <class W>
void replace(const float* x, int64_t rows, int64_t inputs, int64_t x_stride, float* out, int64_t out_stride,
             const int32_t* slots, const int64_t* wholes, const Change* changes, int64_t outputs, const float* bias,
             int threads) {
    const std::vector<Tokens<int64_t>> groups = grouped(slots, rows, wholes);
    const int64_t count = int64_t(groups.size());
    parallel_for(divide_up(outputs, OUTPUTS) * count, threads, [&](int64_t task) {
        const Tokens<int64_t>& tokens = groups[size_t(task % count)];
        const int64_t begin = task / count * OUTPUTS, end = std::min(begin + OUTPUTS, outputs);
        const W* whole = (const W*)*tokens.change;
        const float* from[MOST_ROWS];
        float* to[MOST_ROWS];
        for (int64_t t = 0; t < tokens.count; t++) {
            from[t] = x + tokens.rows[t] * x_stride;
            to[t] = out + tokens.rows[t] * out_stride;
        }
        counted(tokens.count, [&](auto n) { shrink<n>(from, whole, inputs, begin, end, to, whole + begin * inputs); });
        for (const float* added : {bias, changes[tokens.change - wholes].bias})
            for (int64_t t = 0; added && t < tokens.count; t++)
                for (int64_t n = begin; n < end; n++) to[t][n] += added[n];
    });
}

template <class W>
void change_lookup(const int64_t* ids, int64_t rows, int64_t width, float* out, int64_t stride, const int32_t* slots,
                   const Change* changes, const int64_t* wholes, float scale, int threads) {
    parallel_for(rows, threads, [&](int64_t row) {
        if (ids[row] < 0) return;
        const Change& change = changes[slots[row]];
        const W* whole = (const W*)wholes[slots[row]];
        const W* up = (const W*)change.up;
        float* y = out + row * stride;
        for (int64_t n = 0; whole && n < width; n++) y[n] = one(whole + ids[row] * width + n) * scale;
        for (int64_t r = 0; r < change.rank; r++, up += width) {
            const float value = one((const W*)change.down + ids[row] * change.rank + r) * scale;
            for (int64_t n = 0; n < width; n++) y[n] += value * one(up + n);
        }
    });
}

}  // namespace
}  // namespace octavo

using namespace octavo;

// changes: by slot, of which every row has one; parts: of the product, whose outputs they share out at `bounds`.
extern "C" void octavo_add_low_rank(const float* x, int64_t x_stride, int64_t rows, int64_t inputs, float* out,
                                    int64_t out_stride, const int32_t* slots, const int64_t* changes,
                                    const int32_t* bounds, int64_t parts, const float* bias, int is_bf16,
                                    int threads) {
    auto kernel = is_bf16 ? add<uint16_t> : add<float>;
    kernel(x, rows, inputs, x_stride, out, out_stride, slots, (const Change*)changes, bounds, parts, bias, threads);
}
OCTAVO_EXPORTED(octavo_add_low_rank)

// wholes: by slot, the address of a matrix [outputs, inputs] in the place of the model's, or 0; changes: by slot, too.
extern "C" void octavo_replace_products(const float* x, int64_t x_stride, int64_t rows, int64_t inputs, float* out,
                                        int64_t out_stride, const int32_t* slots, const int64_t* wholes,
                                        const int64_t* changes, int64_t outputs, const float* bias, int is_bf16,
                                        int threads) {
    auto kernel = is_bf16 ? replace<uint16_t> : replace<float>;
    kernel(x, rows, inputs, x_stride, out, out_stride, slots, wholes, (const Change*)changes, outputs, bias, threads);
}
OCTAVO_EXPORTED(octavo_replace_products)

// `down` of these changes is [tokens, rank].
extern "C" void octavo_change_lookup(const int64_t* ids, int64_t rows, int64_t width, float* out, int64_t out_stride,
                                     const int32_t* slots, const int64_t* changes, const int64_t* wholes, float scale,
                                     int is_bf16, int threads) {
    auto kernel = is_bf16 ? change_lookup<uint16_t> : change_lookup<float>;
    kernel(ids, rows, width, out, out_stride, slots, (const Change*)changes, wholes, scale, threads);
}
OCTAVO_EXPORTED(octavo_change_lookup)
