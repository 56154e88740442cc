// y = x W^T + bias with W in GGUF's quantized types and x rounded to integers, 32 values to a scale.
//
// Integers are summed exactly over the weights that share a scale; then one fused multiply-add per scale (and
// one per offset), from the first part to the last: every output is one float that walks along K, the same for
// every number of rows, of threads, and in every place. Eight outputs make a vector. One row of x: products of
// eight weight rows are added across lanes in registers. More rows: 16 weight rows at a time are transposed into
// work space that stays in the cache, four bytes of every row in turn, and meet four rows of x in a register tile.
#include <algorithm>
#include <memory>

#include "integers.h"
#include "exported.h"
#include "threads.h"

namespace octavo {
namespace {

constexpr int STRIP = 2 * LANES;  // weight rows that are transposed together

template <class X>
struct Matmul {
    const QuantizedPart<X>* x;
    int64_t m, parts;  // rows of x, parts of a row
    const uint8_t* w;
    int64_t n, row_bytes;
    const float* bias;
    float* y;
    int64_t y_stride;

    // Eight outputs of one row, less or none where the weight rows end.
    void finish(int64_t row, int64_t column, f32x8 acc) const {
        float* out = y + row * y_stride + column;
        if (column + LANES <= n) {
            if (bias) acc = acc + read<f32x8>(bias + column);
            write(out, acc);
        } else {
            float each[LANES];
            write(each, acc);
            for (int64_t c = 0; c < n - column; c++) out[c] = bias ? each[c] + bias[column + c] : each[c];
        }
    }
    // Eight weight rows; past the last one, that one again.
    void rows_from(int64_t column, const uint8_t* (&rows)[LANES]) const {
        for (int c = 0; c < LANES; c++) rows[c] = w + std::min(column + c, n - 1) * row_bytes;
    }
};

// acc + scale * scale of x * (sum of products, taken from the zero of the weights).
template <class Type, class X>
inline f32x8 add_scaled(f32x8 acc, i32x8 products, int32_t x_sum, f32x8 scale, float x_scale) {
    constexpr int zero = INT_ZERO<Type, X>;
    if (zero != 0) products = products - (i32x8{} + x_sum) * zero;
    return fma8(to_floats(products), scale * x_scale, acc);
}

template <class Type, class X>
void multiply_vector(const Matmul<X>& job, int64_t row, int64_t column) {
    const QuantizedPart<X>* x = job.x + row * job.parts;
    const uint8_t* blocks[LANES];
    job.rows_from(column, blocks);
    f32x8 acc = {};
    for (int64_t b = 0; b * Type::PARTS < job.parts; b++) {
        EightFactors<Type> factors(blocks);
        prefetch<LANES * Type::BYTES>(blocks[0] + 2 * LANES * job.row_bytes + b * (LANES - 1) * Type::BYTES);
        unrolled<Type::PARTS>([&](auto s) {
            const QuantizedPart<X>& part = x[b * Type::PARTS + s];
            HalfSums sums = multiply_eight<Type, X>(blocks, s, operand(part));
            const int32_t* x_sums = sums_for_zero<Type>(part);
            if constexpr (Type::HALVES) {
                acc = add_scaled<Type, X>(acc, sums.first, x_sums[0], factors.scale(2 * s), part.scale);
                acc = add_scaled<Type, X>(acc, sums.second, x_sums[1], factors.scale(2 * s + 1), part.scale);
            } else {
                acc = add_scaled<Type, X>(acc, sums.first + sums.second, x_sums[0] + x_sums[1],
                                          factors.scale(2 * s), part.scale);
            }
            if (Type::MINIMUM) acc = fma8(factors.offset(2 * s), splat(part.sum), acc);
        });
        for (const uint8_t*& block : blocks) block += Type::BYTES;
    }
    job.finish(row, column, acc);
}

// One part of a strip, as the tile reads it; g = which eight of its rows.
template <class Type, class X>
struct PanelPart {
    static constexpr int SCALES = Type::HALVES ? 2 : 1;
    uint8_t q[8 * WeightForm<X>::VECTORS][2][32];  // step by step, four bytes of each row
    f32x8 scales[SCALES][2];
    f32x8 offsets[2];  // if Type::MINIMUM
};

template <class Type, class X>
void pack_strip(const Matmul<X>& job, int64_t column, PanelPart<Type, X>* out) {
    for (int g = 0; g < 2; g++) {
        const uint8_t* blocks[LANES];
        job.rows_from(column + g * LANES, blocks);
        for (int64_t b = 0; b * Type::PARTS < job.parts; b++) {
            EightFactors<Type> factors(blocks);
            prefetch<LANES * Type::BYTES>(blocks[0] + STRIP * job.row_bytes + b * (LANES - 1) * Type::BYTES);
            unrolled<Type::PARTS>([&](auto s) {
                PanelPart<Type, X>& part = out[b * Type::PARTS + s];
                Operand<WeightForm<X>> q[LANES];
                for (int c = 0; c < LANES; c++) q[c] = int_quants<Type, X>(blocks[c], s);
                for (int v = 0; v < WeightForm<X>::VECTORS; v++) {
                    u8x32 rows[LANES];
                    for (int c = 0; c < LANES; c++) rows[c] = q[c].vectors[v];
                    transpose(rows, part.q[8 * v][g], sizeof part.q[0]);
                }
                for (int h = 0; h < part.SCALES; h++) part.scales[h][g] = factors.scale(2 * s + h);
                if (Type::MINIMUM) part.offsets[g] = factors.offset(2 * s);
            });
            for (const uint8_t*& block : blocks) block += Type::BYTES;
        }
    }
}

template <class Type, class X, int R>
void multiply_tile(const Matmul<X>& job, int64_t row, int64_t column, const PanelPart<Type, X>* strip) {
    constexpr int SCALES = PanelPart<Type, X>::SCALES;
    f32x8 acc[R][2] = {};
    const QuantizedPart<X>* x = job.x + row * job.parts;
    for (int64_t i = 0; i < job.parts; i++, x++, strip++) {
        const PanelPart<Type, X>& part = *strip;
        unrolled<SCALES>([&](auto h) {
            i32x8 products[R][2] = {};
            multiply_steps<Type, X, R, SCALES, h>(part, x, job.parts, products);
            for (int r = 0; r < R; r++) {
                const QuantizedPart<X>& a = x[r * job.parts];
                const int32_t* x_sums = sums_for_zero<Type>(a);
                int32_t x_sum = SCALES == 2 ? x_sums[h] : x_sums[0] + x_sums[1];
                for (int g = 0; g < 2; g++)
                    acc[r][g] = add_scaled<Type, X>(acc[r][g], products[r][g], x_sum, part.scales[h][g],
                                                    a.scale);
            }
        });
        if (Type::MINIMUM)
            for (int r = 0; r < R; r++)
                for (int g = 0; g < 2; g++)
                    acc[r][g] = fma8(part.offsets[g], splat(x[r * job.parts].sum), acc[r][g]);
    }
    for (int r = 0; r < R; r++)
        for (int g = 0; g < 2; g++) job.finish(row + r, column + g * LANES, acc[r][g]);
}

// A panel of strips with all rows of x: few of those stay in the first cache while the panel streams by.
template <class Type, class X>
void multiply_panel(const Matmul<X>& job, int64_t begin, int64_t end, const PanelPart<Type, X>* strips) {
    auto multiply_rows = [&](int64_t row, auto tile) {
        const PanelPart<Type, X>* strip = strips;
        for (int64_t column = begin; column < end; column += STRIP, strip += job.parts)
            tile(job, row, column, strip);
    };
    int64_t row = 0, m = job.m;
    for (; row + 4 <= m; row += 4) multiply_rows(row, multiply_tile<Type, X, 4>);
    for (; row + 2 <= m; row += 2) multiply_rows(row, multiply_tile<Type, X, 2>);
    if (row < m) multiply_rows(row, multiply_tile<Type, X, 1>);
}

template <class Type, class X>
void multiply_range(const Matmul<X>& job, int64_t begin, int64_t end, int64_t panel) {
    if (job.m == 1) {
        for (int64_t column = begin; column < end; column += LANES) multiply_vector<Type>(job, 0, column);
        return;
    }
    using Part = PanelPart<Type, X>;
    Part* strips = reinterpret_cast<Part*>(scratch(size_t(panel / STRIP * job.parts) * sizeof(Part) / 4));
    for (int64_t first = begin; first < end; first += panel) {
        int64_t last = std::min(end, first + panel);
        for (int64_t column = first; column < last; column += STRIP)
            pack_strip(job, column, strips + (column - first) / STRIP * job.parts);
        multiply_panel<Type>(job, first, last, strips);
    }
}

// Weight rows that are transposed together: few rows of x want them in the first cache, many in the second.
template <class X>
int64_t panel_rows(const Matmul<X>& job) {
    int64_t bytes = job.m <= 16 ? 16 << 10 : 128 << 10, row = job.parts * PART * WeightForm<X>::VECTORS;
    return std::max<int64_t>(1, bytes / (row * STRIP)) * STRIP;
}

// As many tasks for every thread, of a panel and of some microseconds at least.
template <class Type, class X>
void multiply(const Matmul<X>& job, int threads) {
    int64_t unit = job.m == 1 ? LANES : STRIP, panel = job.m == 1 ? LANES : panel_rows(job);
    int64_t work = job.n * job.parts * PART * std::min<int64_t>(job.m, 16);
    int64_t each = std::min({work / 131072 / threads, job.n / panel / threads, int64_t(16)});
    int64_t step = round_up(divide_up(job.n, threads * std::max<int64_t>(1, each)), unit);
    panel = round_up(divide_up(step, divide_up(step, panel)), unit);
    parallel_for(divide_up(job.n, step), threads, [&](int64_t i) {
        multiply_range<Type>(job, i * step, std::min(job.n, (i + 1) * step), panel);
    });
}

template <class X>
void quantize_rows(const float* x, int64_t m, int64_t k, int64_t x_stride, QuantizedPart<X>* out, int threads) {
    const int64_t parts = k / PART;
    for_rows(m, k, threads, [&](int64_t row) {
        for (int64_t i = 0; i < parts; i++) quantize_part(x + row * x_stride + i * PART, out[row * parts + i]);
    });
}

template <class X>
void quantize_and_multiply(const float* x, int64_t m, int64_t k, int64_t x_stride, const uint8_t* w, int64_t n,
                        int64_t row_bytes, int type, const float* bias, float* y, int64_t y_stride,
                        int threads) {
    if (m == 0 || n == 0) return;
    std::unique_ptr<QuantizedPart<X>[]> quantized(new QuantizedPart<X>[size_t(m * k / PART)]);
    quantize_rows(x, m, k, x_stride, quantized.get(), threads);
    Matmul<X> job{quantized.get(), m, k / PART, w, n, row_bytes, bias, y, y_stride};
    with_type(type, [&](auto kind) {
        if constexpr (!kind.DENSE && !kind.CODED) multiply<decltype(kind)>(job, threads);  // no others are sent
    });
}

}  // namespace
}  // namespace octavo

using namespace octavo;

// As octavo_matmul, for quantized types, with x rounded to one byte or two.
extern "C" void octavo_matmul_integers(const float* x, int64_t m, int64_t k, int64_t x_stride,
                                       const uint8_t* w, int64_t n, int64_t row_bytes, int type,
                                       const float* bias, float* y, int64_t y_stride, int bytes, int threads) {
    auto multiply = bytes == 1 ? quantize_and_multiply<Int8> : quantize_and_multiply<Int16>;
    multiply(x, m, k, x_stride, w, n, row_bytes, type, bias, y, y_stride, threads);
}
OCTAVO_EXPORTED(octavo_matmul_integers)
