// Low-rank changes of products, another one for every token: y += (x down^T) up, in two phases. Every sum has an
// order of its own, whatever the other rows are and whoever computes it.
#include "simd.h"
#include "exported.h"
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

// Products of x with COUNT rows of `down`: each row's sum alike, however many there are.
template <int COUNT, class W>
inline void dots(const float* x, const W* down, int64_t inputs, float* y) {
    vf sums[COUNT] = {};
    int64_t i = 0;
    for (; i + VL <= inputs; i += VL) {
        vf value = load(x + i);
        unrolled<COUNT>([&](auto r) { sums[r] = fma(value, load_as(down + r * inputs + i), sums[r]); });
    }
    unrolled<COUNT>([&](auto r) {
        float rest = 0;
        for (int64_t j = i; j < inputs; j++) rest += x[j] * one(down + r * inputs + j);
        y[r] = sum(sums[r]) + rest;
    });
}

template <class W>
void shrink(const float* x, const W* down, int64_t inputs, int64_t begin, int64_t end, float* y) {
    int64_t r = begin;
    for (; r + 4 <= end; r += 4) dots<4>(x, down + r * inputs, inputs, y + r);
    for (; r < end; r++) dots<1>(x, down + r * inputs, inputs, y + r);
}

// y[begin … end) += inner up, where `up` has rows of `outputs` values; then factors and biases.
template <class W>
void expand(const float* inner, const Change& change, int64_t outputs, int64_t begin, int64_t end, const float* bias,
            float* y) {
    const W* up = (const W*)change.up;
    int64_t n = begin;
    for (; n + VL <= end; n += VL) {
        vf total = {};
        for (int64_t r = 0; r < change.rank; r++) total = fma(set1(inner[r]), load_as(up + r * outputs + n), total);
        total = load(y + n) + total;
        if (change.factors) {
            vf base = bias ? load(bias + n) : vf{};
            total = (total - base) * load(change.factors + n) + base;
        }
        store(y + n, change.bias ? total + load(change.bias + n) : total);
    }
    for (; n < end; n++) {
        float total = 0;
        for (int64_t r = 0; r < change.rank; r++) total += inner[r] * one(up + r * outputs + n);
        total = y[n] + total;
        if (change.factors) total = (total - (bias ? bias[n] : 0)) * change.factors[n] + (bias ? bias[n] : 0);
        y[n] = change.bias ? total + change.bias[n] : total;
    }
}

constexpr int64_t RANKS = 16;       // rows of `down` in a task, at least
constexpr int64_t OUTPUTS = 512;    // a multiple of every VL: the same values are alone in a tail in any task
constexpr int64_t WORTH = 1 << 15;  // products of a task

template <class W>
void add(const float* x, int64_t rows, int64_t inputs, int64_t x_stride, float* out, int64_t out_stride,
         const int32_t* slots, const Change* changes, const int32_t* bounds, int64_t parts, const float* bias,
         int threads) {
    int64_t outputs = bounds[parts], width = 0, busy = 0;
    for (int64_t row = 0; row < rows; row++) {
        const Change& change = changes[slots[row]];
        width = std::max(width, change.rank * change.parts);
        busy += change.down != nullptr;
    }
    if (!busy) return;
    float* inner = scratch(size_t(rows) * width, OF_CALL);
    auto run = [&](int64_t pieces, int64_t cost, auto&& body) {
        int64_t tasks = std::min<int64_t>(rows * pieces, std::clamp<int64_t>(cost / WORTH, 1, MOST_TASKS * threads));
        parallel_for(tasks, threads, [&](int64_t task) {
            for (int64_t i = rows * pieces * task / tasks; i < rows * pieces * (task + 1) / tasks; i++) {
                const Change& change = changes[slots[i / pieces]];
                if (change.down) body(change, i / pieces, i % pieces);
            }
        });
    };
    int64_t groups = divide_up(width, RANKS);
    run(groups, busy * width * inputs, [&](const Change& change, int64_t row, int64_t group) {
        int64_t end = std::min((group + 1) * RANKS, change.rank * change.parts);
        shrink(x + row * x_stride, (const W*)change.down, inputs, group * RANKS, end, inner + row * width);
    });
    int64_t blocks = divide_up(outputs, OUTPUTS) + parts - 1;
    run(blocks, busy * width * outputs / parts, [&](const Change& change, int64_t row, int64_t block) {
        for (int64_t part = 0, first = 0; part < parts; part++) {  // blocks are counted part by part
            int64_t begin = bounds[part], size = bounds[part + 1] - begin, count = divide_up(size, OUTPUTS);
            if (block < first + count) {
                begin += (block - first) * OUTPUTS;
                int64_t end = std::min<int64_t>(begin + OUTPUTS, bounds[part + 1]);
                const float* mine = inner + row * width + (change.parts > 1 ? part * change.rank : 0);
                return expand<W>(mine, change, outputs, begin, end, bias, out + row * out_stride);
            }
            first += count;
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
