// Normalisation, activations and rotary tables: one pass over float32 rows, split over threads when it pays.
#include "activations.h"
#include "rows.h"
#include "exported.h"
#include "threads.h"

namespace octavo {
namespace {

// y = act(x), or act(x) * up when up is given. The tail goes through a whole vector, so every place computes
// alike.
template <class Act>
void activate(const float* x, const float* up, int64_t size, float* y) {
    walk(
        size,
        [&](int64_t i) {
            vf a = Act::apply(load(x + i));
            store(y + i, up ? a * load(up + i) : a);
        },
        [&](int64_t i) {
            float a = Act::apply(set1(x[i]))[0];
            y[i] = up ? a * up[i] : a;
        });
}

}  // namespace
}  // namespace octavo

using namespace octavo;

// x: tokens of `heads` rows each. With `residual`, total = x + residual is stored and normalized; with `inner`,
// too, x is first normalized by that weight.
extern "C" void octavo_rms_norm(const float* x, int64_t x_stride, int64_t tokens, int64_t heads, int64_t size,
                                const float* inner, const float* weight, float eps, const float* residual,
                                int64_t residual_stride, float* total, float* y, int threads) {
    for_rows(tokens * heads, size, threads, [&](int64_t row) {
        const float* from = x + row / heads * x_stride + row % heads * size;
        if (residual) {
            const float* other = residual + row / heads * residual_stride + row % heads * size;
            float* to = total + row * size;
            if (inner) {
                normalize(from, inner, size, eps, to);
                from = to;
            }
            walk(
                size, [&](int64_t i) { store(to + i, load(from + i) + load(other + i)); },
                [&](int64_t i) { to[i] = from[i] + other[i]; });
            from = to;
        }
        normalize(from, weight, size, eps, y + row * size);
    });
}
OCTAVO_EXPORTED(octavo_rms_norm)

// LayerNorm of x + residual; residual, weight and bias may be missing. y is none of them.
extern "C" void octavo_layer_norm(const float* x, int64_t x_stride, int64_t tokens, int64_t size,
                                  const float* residual, int64_t residual_stride, const float* weight,
                                  const float* bias, float eps, float* y, int threads) {
    for_rows(tokens, size, threads, [&](int64_t row) {
        const float *from = x + row * x_stride, *other = residual ? residual + row * residual_stride : nullptr;
        float *to = y + row * size, rest = 0, rest_of_squares = 0;
        vf sums = {}, squares = {};
        walk(
            size,
            [&](int64_t i) {
                vf value = other ? load(from + i) + load(other + i) : load(from + i);
                store(to + i, value);
                sums = sums + value;
            },
            [&](int64_t i) { rest += to[i] = other ? from[i] + other[i] : from[i]; });
        const float mean = (sum(sums) + rest) / float(size);
        walk(
            size,
            [&](int64_t i) {
                vf off = load(to + i) - mean;
                squares = fma(off, off, squares);
            },
            [&](int64_t i) { rest_of_squares += (to[i] - mean) * (to[i] - mean); });
        const float factor = 1.0f / std::sqrt((sum(squares) + rest_of_squares) / float(size) + eps);
        walk(
            size,
            [&](int64_t i) {
                vf value = (load(to + i) - mean) * factor;
                if (weight) value = value * load(weight + i);
                store(to + i, bias ? value + load(bias + i) : value);
            },
            [&](int64_t i) {
                const float value = (to[i] - mean) * factor * (weight ? weight[i] : 1.0f);
                to[i] = bias ? value + bias[i] : value;
            });
    });
}
OCTAVO_EXPORTED(octavo_layer_norm)

// gated: rows of x are (gate, up), 2 * size wide.
extern "C" void octavo_activation(const float* x, int64_t rows, int64_t size, int kind, int gated, float* y,
                                  int threads) {
    auto run = with_activation(kind, [](auto act) { return activate<decltype(act)>; });
    for_rows(rows, size, threads, [&](int64_t row) {
        const float* from = x + row * size * (gated ? 2 : 1);
        run(from, gated ? from + size : nullptr, size, y + row * size);
    });
}
OCTAVO_EXPORTED(octavo_activation)

// alpha_p x^2 + beta x above 0, alpha_n (e^min(x, eps) - 1 - x) + beta x below; alphas are given before softplus, and
// that of n is a distance from beta.
extern "C" void octavo_xielu(const float* x, int64_t x_stride, int64_t rows, int64_t size, const float* alpha_p,
                             const float* alpha_n, const float* beta, const float* eps, float* y, int threads) {
    auto softplus = [](float a) { return a > 20.0f ? a : std::log1p(std::exp(a)); };
    const vf above = set1(softplus(*alpha_p)), slope = set1(*beta), least = set1(*eps);
    const vf below = slope + set1(softplus(*alpha_n));
    auto apply = [&](vf v) {
        vf curve = below * (exp(v < least ? v : least) - 1.0f - v);
        return fma(slope, v, v > vf{} ? above * v * v : curve);
    };
    for_rows(rows, size, threads, [&](int64_t row) {
        const float* from = x + row * x_stride;
        float* to = y + row * size;
        walk(
            size, [&](int64_t i) { store(to + i, apply(load(from + i))); },
            [&](int64_t i) { to[i] = apply(set1(from[i]))[0]; });
    });
}
OCTAVO_EXPORTED(octavo_xielu)

// cos and sin of position times frequency, times a factor: [tokens, half] each.
extern "C" void octavo_rotary_tables(const int64_t* positions, int64_t tokens, const float* frequencies,
                                     int64_t half, float factor, float* cos, float* sin, int threads) {
    for_rows(tokens, 16 * half, threads, [&](int64_t token) {
        for (int64_t i = 0; i < half; i++) {
            float angle = float(positions[token]) * frequencies[i];
            cos[token * half + i] = std::cos(angle) * factor;
            sin[token * half + i] = std::sin(angle) * factor;
        }
    });
}
OCTAVO_EXPORTED(octavo_rotary_tables)

// Cuts of requests where chunks of `size` positions, in `blocks` blocks, end: one piece of each of the first `singles`
// requests, `most` of the others. bounds and lens of pieces are what q_bounds and kv_lens are of requests; own: their
// blocks, [pieces, blocks].
extern "C" void octavo_cut_chunks(const int32_t* q_bounds, const int32_t* kv_lens, int64_t requests, int64_t singles,
                                  int64_t most, int64_t size, int64_t blocks, const int32_t* tables,
                                  int64_t table_stride, int64_t max_blocks, int32_t* bounds, int32_t* lens,
                                  int32_t* own, int threads) {
    const int64_t pieces = singles + (requests - singles) * most;
    for_rows(pieces, blocks, threads, [&](int64_t piece) {
        const int64_t behind = std::max<int64_t>(piece - singles, 0);
        const int64_t request = piece < singles ? piece : singles + behind / most;
        const int64_t first = q_bounds[request], length = q_bounds[request + 1] - first, end = kv_lens[request];
        const int64_t begin = std::max<int64_t>(end - length, 0), chunk = begin / size + behind % most;
        bounds[piece] = int32_t(first + std::clamp<int64_t>(chunk * size - begin, 0, length));
        lens[piece] = int32_t(std::max(std::min(end - chunk * size, size), std::min<int64_t>(end, 1)));
        const int32_t* table = tables + request * table_stride;
        for (int64_t i = 0; i < blocks; i++)
            own[piece * blocks + i] = table[std::min(chunk * blocks + i, max_blocks - 1)];
    });
    bounds[pieces] = q_bounds[requests];
}
OCTAVO_EXPORTED(octavo_cut_chunks)

// y[i] = x[places[i]], or 0 where that is negative.
extern "C" void octavo_select_inputs(const float* x, int64_t x_stride, int64_t rows, const int32_t* places,
                                     int64_t size, float* y, int threads) {
    for_rows(rows, size, threads, [&](int64_t row) {
        const float* from = x + row * x_stride;
        for (int64_t i = 0; i < size; i++) y[row * size + i] = places[i] < 0 ? 0.0f : from[places[i]];
    });
}
OCTAVO_EXPORTED(octavo_select_inputs)

// Rows of x into columns of y, which is wider.
extern "C" void octavo_copy_rows(const float* x, int64_t x_stride, int64_t rows, int64_t size, float* y,
                                 int64_t y_stride, int threads) {
    for_rows(rows, size, threads,
             [&](int64_t row) { std::memcpy(y + row * y_stride, x + row * x_stride, size * sizeof(float)); });
}
OCTAVO_EXPORTED(octavo_copy_rows)

// y = x + other, x * other or max(x, other), by `kind`, rows of `size`; without `other`, `factor` is in its place.
// A stride of 0 repeats a row; of max, what is not a number stays.
extern "C" void octavo_combine(const float* x, int64_t x_stride, const float* other, int64_t other_stride, float factor,
                               int kind, int64_t rows, int64_t size, float* y, int threads) {
    for_rows(rows, size, threads, [&](int64_t row) {
        const float *from = x + row * x_stride, *by = other ? other + row * other_stride : nullptr;
        float* to = y + row * size;
        auto combine = [&](auto a, auto b) { return kind == 0 ? a + b : kind == 1 ? a * b : b > a ? b : a; };
        walk(
            size, [&](int64_t i) { store(to + i, combine(load(from + i), by ? load(by + i) : set1(factor))); },
            [&](int64_t i) { to[i] = combine(from[i], by ? by[i] : factor); });
    });
}
OCTAVO_EXPORTED(octavo_combine)
