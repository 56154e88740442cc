// Walks over a row of floats, and its RMS norm. Included by the kernels of rows.
#pragma once
#include "simd.h"

namespace octavo {

// Call body(offset) for whole vectors of a row and tail(offset) for the values that are left.
template <class Body, class Tail>
inline void walk(int64_t size, Body&& body, Tail&& tail) {
    int64_t i = 0;
    for (; i + VL <= size; i += VL) body(i);
    for (; i < size; i++) tail(i);
}

// y = x / rms(x) * weight; y may be x.
inline void normalize(const float* x, const float* weight, int64_t size, float eps, float* y) {
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

}  // namespace octavo
