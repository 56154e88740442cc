// y = x W^T + bias with W in any of GGUF's types and float32 activations.
//
// Every output is one vector accumulator that walks along K from 0, then a fixed sum of its lanes: so a row
// of y is the same for every number of rows, of threads, and in every place. One row of x: weights are
// unpacked in registers and multiplied at once. More rows: some rows of W are unpacked into work space that
// stays in the cache, and a register-tiled loop multiplies them with all rows of x.
#include <algorithm>
#include <vector>

#include "exported.h"
#include "matmul_dense.h"
#include "threads.h"

namespace octavo {
namespace {

constexpr int ROWS = 4, COLUMNS = REGISTERS == 32 ? 6 : 3;  // of a register tile
constexpr int ROWS_AT_ONCE = 4;  // weight rows that one pass over a single x multiplies

struct Matmul {
    const float* x;
    int64_t m, k, x_stride;  // k is a multiple of PART
    const uint8_t* w;
    int64_t n, row_bytes, w_size;  // w_size <= k: weights in a row
    const float* bias;
    float* y;
    int64_t y_stride;
    float with_bias(float sum, int64_t column) const { return bias ? sum + bias[column] : sum; }
};

template <class Type, int R>
void multiply_vector(const Matmul& job, int64_t column) {
    vf acc[R] = {};
    unpack_rows<Type, R>(job.w + column * job.row_bytes, job.row_bytes, job.w_size,
                         [&](int r, int64_t i, vf w) { acc[r] = fma(load(job.x + i * VL), w, acc[r]); });
    for (int r = 0; r < R; r++) job.y[column + r] = job.with_bias(sum(acc[r]), column + r);
}

// Where the unpacked panel keeps vector i of its column: tiles of COLUMNS weight rows, interleaved vector by
// vector, so that a tile is one stream.
int64_t panel_offset(int64_t column, int64_t k) {
    return column / COLUMNS * COLUMNS * k + column % COLUMNS * VL;
}

template <int R, int C>
void multiply_tile(const Matmul& job, int64_t row, const float* w, int64_t column) {
    vf acc[R][C];
    for (int r = 0; r < R; r++)
        for (int c = 0; c < C; c++) acc[r][c] = vf{};
    const float* x = job.x + row * job.x_stride;
    for (int64_t i = 0; i < job.k; i += VL, w += COLUMNS * VL) {
        vf b[C];
        for (int c = 0; c < C; c++) b[c] = in_register(load(w + c * VL));
        for (int r = 0; r < R; r++) {
            vf a = in_register(load(x + r * job.x_stride + i));
            for (int c = 0; c < C; c++) acc[r][c] = fma(a, b[c], acc[r][c]);
        }
    }
    for (int r = 0; r < R; r++)
        for (int c = 0; c < C; c++)
            job.y[(row + r) * job.y_stride + column + c] = job.with_bias(sum(acc[r][c]), column + c);
}

template <int R>
void multiply_rows(const Matmul& job, int64_t row, const float* w, int64_t begin, int64_t end) {
    int64_t column = begin;
    for (; column + COLUMNS <= end; column += COLUMNS)
        multiply_tile<R, COLUMNS>(job, row, w + panel_offset(column - begin, job.k), column);
    for (; column < end; column++)
        multiply_tile<R, 1>(job, row, w + panel_offset(column - begin, job.k), column);
}

// Columns begin … end - 1 of y, with their weights unpacked in w. A few rows of x stay in the first cache
// while w streams by.
void multiply_panel(const Matmul& job, const float* w, int64_t begin, int64_t end) {
    int64_t row = 0;
    for (; row + ROWS <= job.m; row += ROWS) multiply_rows<ROWS>(job, row, w, begin, end);
    for (; row < job.m; row++) multiply_rows<1>(job, row, w, begin, end);
}

template <class Type>
void unpack_row(const Matmul& job, int64_t column, float* out) {
    unpack_rows<Type, 1>(job.w + column * job.row_bytes, job.row_bytes, job.w_size,
                         [&](int, int64_t i, vf w) { store(out + i * COLUMNS * VL, w); });
}

template <class Type>
void multiply_range(const Matmul& job, int64_t begin, int64_t end, int64_t panel) {
    if (job.m == 1) {
        int64_t column = begin;
        for (; column + ROWS_AT_ONCE <= end; column += ROWS_AT_ONCE)
            multiply_vector<Type, ROWS_AT_ONCE>(job, column);
        for (; column < end; column++) multiply_vector<Type, 1>(job, column);
        return;
    }
    float* w = scratch(size_t(panel * job.k));
    for (int64_t first = begin; first < end; first += panel) {
        int64_t last = std::min(end, first + panel);
        for (int64_t column = first; column < last; column++)
            unpack_row<Type>(job, column, w + panel_offset(column - first, job.k));
        multiply_panel(job, w, first, last);
    }
}

// Rows of W that are unpacked together: few rows of x want them in the first cache, many in the second.
int64_t panel_rows(int64_t m, int64_t k) {
    int64_t bytes = m <= 16 ? 16 << 10 : 384 << 10;
    return std::max<int64_t>(1, bytes / (4 * k) / COLUMNS) * COLUMNS;
}

template <class Type>
void multiply(const Matmul& job, int threads) {
    if (job.m == 0) return;
    int64_t panel = panel_rows(job.m, job.k);
    int64_t enough = divide_up(65536, job.k * std::min<int64_t>(job.m, 16));  // columns that are worth a task
    int64_t step = std::max(std::min(divide_up(job.n, 4 * threads), 4 * panel), enough);
    step = round_up(step, 12);  // a multiple of both tile widths
    parallel_for(divide_up(job.n, step), threads, [&](int64_t i) {
        multiply_range<Type>(job, i * step, std::min(job.n, (i + 1) * step), panel);
    });
}

}  // namespace
}  // namespace octavo

using namespace octavo;

extern "C" void octavo_matmul(const float* x, int64_t m, int64_t k, int64_t x_stride, const uint8_t* w,
                              int64_t n, int64_t row_bytes, int type, const float* bias, float* y,
                              int64_t y_stride, int threads) {
#if defined(OCTAVO_AVX512)
    if (dense::multiply_any({x, m, k, x_stride, w, n, row_bytes, bias, y, y_stride}, type, threads)) return;
#endif
    Matmul job{x, m, k, x_stride, w, n, row_bytes, k, bias, y, y_stride};
    std::vector<float> padded;
    if (k % PART) {  // dense types only
        job.k = job.x_stride = round_up(k, PART);
        padded.resize(size_t(m * job.k));
        for (int64_t i = 0; i < m; i++) std::copy_n(x + i * x_stride, k, padded.data() + i * job.k);
        job.x = padded.data();
    }
    with_type(type, [&](auto type) { multiply<decltype(type)>(job, threads); });
}
OCTAVO_EXPORTED(octavo_matmul)

#if defined(OCTAVO_AVX512)
// The gated outputs of n rows of gates and n of values, whose type is a dense one.
extern "C" void octavo_gated_matmul(const float* x, int64_t m, int64_t k, int64_t x_stride, const uint8_t* w, int64_t n,
                                    int64_t row_bytes, int type, int kind, float* y, int threads) {
    dense::multiply_any({x, m, k, x_stride, w, n, row_bytes, nullptr, y, n, vector_gate(kind)}, type, threads);
}
OCTAVO_EXPORTED(octavo_gated_matmul)
#endif

// 0: without octavo_gated_matmul; 2: vectors of floats are also faster here than those of bf16, of which Intel's CPUs
// multiply one while four of floats are, with half as many numbers each (their tiles are faster than both).
extern "C" int octavo_float_products() {
#if defined(OCTAVO_DOTS_512)
    __builtin_cpu_init();
    return __builtin_cpu_is("intel") ? 2 : 1;
#elif defined(OCTAVO_AVX512)
    return 2;
#else
    return 0;
#endif
}

// Rows of W times `scale`: the first n, or those at `places`; a negative place has zeros.
extern "C" void octavo_dequantize(const uint8_t* w, const int64_t* places, int64_t n, int64_t k,
                                  int64_t row_bytes, int type, float scale, float* out,
                                  int threads) {
    with_type(type, [&](auto type) {
        parallel_for(n, threads, [&](int64_t row) {
            const int64_t place = places ? places[row] : row;
            if (place < 0) return void(std::fill_n(out + row * k, k, 0.0f));
            unpack_rows<decltype(type), 1>(w + place * row_bytes, row_bytes, k, [&](int, int64_t i, vf values) {
                values = values * scale;
                size_t count = size_t(std::min<int64_t>(VL, std::max<int64_t>(0, k - i * VL)));
                std::memcpy(out + row * k + i * VL, &values, count * sizeof(float));
            });
        });
    });
}
OCTAVO_EXPORTED(octavo_dequantize)
