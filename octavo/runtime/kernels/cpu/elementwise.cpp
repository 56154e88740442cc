// Normalisation, rotary embedding and activations: one pass over float32 rows, split over threads when it
// pays.
#include "activations.h"
#include "tape.h"
#include "threads.h"

namespace octavo {
namespace {

// Call body(offset) for whole vectors of a row and tail(offset) for the values that are left.
template <class Body, class Tail>
inline void walk(int64_t size, Body&& body, Tail&& tail) {
    int64_t i = 0;
    for (; i + VL <= size; i += VL) body(i);
    for (; i < size; i++) tail(i);
}

void normalize(const float* x, const float* weight, int64_t size, float eps, float* y) {
    vf squares = {};
    float rest = 0;
    walk(
        size, [&](int64_t i) { squares = fma(load(x + i), load(x + i), squares); },
        [&](int64_t i) { rest += x[i] * x[i]; });
    float factor = 1.0f / std::sqrt((sum(squares) + rest) / float(size) + eps);
    walk(
        size, [&](int64_t i) { store(y + i, load(x + i) * factor * load(weight + i)); },
        [&](int64_t i) { y[i] = x[i] * factor * weight[i]; });
}

void rotate_pairs(float* x, const float* cos, const float* sin, int64_t half) {
    for (int64_t i = 0; i < half; i++) {
        float a = x[2 * i], b = x[2 * i + 1];
        x[2 * i] = a * cos[i] - b * sin[i];
        x[2 * i + 1] = b * cos[i] + a * sin[i];
    }
}

void rotate_halves(float* x, const float* cos, const float* sin, int64_t half) {
    float* y = x + half;
    walk(
        half,
        [&](int64_t i) {
            vf a = load(x + i), b = load(y + i), c = load(cos + i), s = load(sin + i);
            store(x + i, a * c - b * s);
            store(y + i, b * c + a * s);
        },
        [&](int64_t i) {
            float a = x[i], b = y[i];
            x[i] = a * cos[i] - b * sin[i];
            y[i] = b * cos[i] + a * sin[i];
        });
}

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

// x: tokens of `heads` rows each. With `residual`, total = x + residual is stored and normalized.
extern "C" void octavo_rms_norm(const float* x, int64_t x_stride, int64_t tokens, int64_t heads, int64_t size,
                                const float* weight, float eps, const float* residual,
                                int64_t residual_stride, float* total, float* y, int threads) {
    for_rows(tokens * heads, size, threads, [&](int64_t row) {
        const float* from = x + row / heads * x_stride + row % heads * size;
        if (residual) {
            const float* other = residual + row / heads * residual_stride + row % heads * size;
            float* to = total + row * size;
            walk(
                size, [&](int64_t i) { store(to + i, load(from + i) + load(other + i)); },
                [&](int64_t i) { to[i] = from[i] + other[i]; });
            from = to;
        }
        normalize(from, weight, size, eps, y + row * size);
    });
}
OCTAVO_EXPORTED(octavo_rms_norm)

extern "C" void octavo_rope(float* x, int64_t x_stride, int64_t tokens, int64_t heads, int64_t head_dim,
                            const float* cos, const float* sin, int64_t half, int interleaved, int threads) {
    auto rotate = interleaved ? rotate_pairs : rotate_halves;
    for_rows(tokens * heads, head_dim, threads, [&](int64_t row) {
        int64_t token = row / heads;
        rotate(x + token * x_stride + row % heads * head_dim, cos + token * half, sin + token * half, half);
    });
}
OCTAVO_EXPORTED(octavo_rope)

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
