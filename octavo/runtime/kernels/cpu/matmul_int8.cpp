// y = x W^T + bias with W in GGUF's quantized types and x rounded to 8 bits, 32 values to a scale, as llama.cpp
// does.
//
// Integers are summed exactly over the weights that share a scale; then one fused multiply-add per scale (and one
// per offset), from the first part to the last: every output is one float that walks along K, the same for every
// number of rows, of threads, and in every place. Eight outputs make a vector. One row of x: products of eight
// weight rows are added across lanes in registers. More rows: 16 weight rows at a time are transposed into work
// space that stays in the cache, four bytes of every row in turn, and meet four rows of x in a register tile.
#include <algorithm>
#include <memory>

#include "integers.h"
#include "tape.h"
#include "threads.h"

namespace octavo {
namespace {

constexpr int STRIP = 2 * LANES;  // weight rows that are transposed together

template <class T>
struct Array {
    std::unique_ptr<T[]> data;  // not cleared
    explicit Array(int64_t size) : data(new T[size_t(size)]) {}
    T* at(int64_t i) const { return data.get() + i; }
};

// Rows of x in 8 bits: x = scale * q. Per part: 32 bytes, the scale, the sums of q over both halves, and their sum
// times the scale.
struct Rounded {
    int64_t m, k, parts = k / PART;
    Array<int8_t> q{m * k};
    Array<float> scales{m * parts}, sums{m * parts};
    Array<int32_t> half_sums{2 * m * parts};

    void round_row(const float* x, int64_t row) const {
        for (int64_t i = 0; i < parts; i++) round_part(x + i * PART, row * parts + i);
    }

    void round_part(const float* x, int64_t part) const {
        vf top = {}, poison = {};
        for (int j = 0; j < VECTORS; j++) {
            vf v = load(x + j * VL);
            top = max(top, v < 0.0f ? -v : v);
            poison = poison + v * 0.0f;  // not-a-number if one of x is that or infinite
        }
        float highest = largest(top), inverse = highest > 0 ? 127.0f / highest : 0.0f;
        float scale = highest / 127.0f + sum(poison);
        int32_t whole[PART], half[2] = {};
        for (int j = 0; j < VECTORS; j++) {
            vi rounded = to_int(round(load(x + j * VL) * inverse));
            std::memcpy(whole + j * VL, &rounded, sizeof rounded);
        }
        for (int j = 0; j < PART; j++) q.at(part * PART)[j] = int8_t(whole[j]);
        for (int j = 0; j < PART; j++) half[j / 16] += int8_t(whole[j]);
        std::copy_n(half, 2, half_sums.at(2 * part));
        *scales.at(part) = scale;
        *sums.at(part) = scale * float(half[0] + half[1]);
    }
};

struct Matmul {
    const Rounded& x;
    const uint8_t* w;
    int64_t n, row_bytes;
    const float* bias;
    float* y;
    int64_t y_stride;

    // Eight outputs of one row, less where the weight rows end.
    void finish(int64_t row, int64_t column, f32x8 acc) const {
        float out[LANES];
        std::memcpy(out, &acc, sizeof acc);
        int64_t count = std::min<int64_t>(LANES, n - column);
        for (int64_t c = 0; c < count; c++)
            y[row * y_stride + column + c] = bias ? out[c] + bias[column + c] : out[c];
    }
    // Eight weight rows; past the last one, that one again.
    void rows_from(int64_t column, const uint8_t* (&rows)[LANES]) const {
        for (int c = 0; c < LANES; c++) rows[c] = w + std::min(column + c, n - 1) * row_bytes;
    }
};

// acc + scale * scale of x * (sum of products, taken from the zero of the weights).
template <class Type>
inline f32x8 add_scaled(f32x8 acc, i32x8 products, int32_t x_sum, f32x8 scale, float x_scale) {
    if (INT_ZERO<Type> != 0) products = products - INT_ZERO<Type> * x_sum;
    return fma8(__builtin_convertvector(products, f32x8), scale * x_scale, acc);
}

template <class Type>
void multiply_vector(const Matmul& job, int64_t row, int64_t column) {
    const int64_t parts = job.x.parts;
    const uint8_t* blocks[LANES];
    job.rows_from(column, blocks);
    f32x8 acc = {};
    for (int64_t b = 0; b * Type::PARTS < parts; b++) {
        EightFactors<Type> factors(blocks);
        prefetch<LANES * Type::BYTES>(blocks[0] + 2 * LANES * job.row_bytes + b * (LANES - 1) * Type::BYTES);
        unrolled<Type::PARTS>([&](auto s) {
            int64_t at = row * parts + b * Type::PARTS + s;
            HalfSums sums = multiply_eight<Type>(blocks, s, read<u8x32>(job.x.q.at(at * PART)));
            const int32_t* x_sums = job.x.half_sums.at(2 * at);
            float x_scale = *job.x.scales.at(at);
            if constexpr (Type::HALVES) {
                acc = add_scaled<Type>(acc, sums.first, x_sums[0], factors.scale(2 * s), x_scale);
                acc = add_scaled<Type>(acc, sums.second, x_sums[1], factors.scale(2 * s + 1), x_scale);
            } else {
                acc = add_scaled<Type>(acc, sums.first + sums.second, x_sums[0] + x_sums[1],
                                       factors.scale(2 * s), x_scale);
            }
            if (Type::MINIMUM) acc = fma8(factors.offset(2 * s), splat(*job.x.sums.at(at)), acc);
        });
        for (const uint8_t*& block : blocks) block += Type::BYTES;
    }
    job.finish(row, column, acc);
}

// One part of a strip, as the tile reads it; g = which eight of its rows.
template <class Type>
struct PanelPart {
    static constexpr int SCALES = Type::HALVES ? 2 : 1;
    uint8_t q[8][2][32];  // step by step, four bytes of each row
    f32x8 scales[SCALES][2];
    f32x8 offsets[2];  // if Type::MINIMUM
};

template <class Type>
void pack_strip(const Matmul& job, int64_t column, PanelPart<Type>* out) {
    for (int g = 0; g < 2; g++) {
        const uint8_t* blocks[LANES];
        job.rows_from(column + g * LANES, blocks);
        for (int64_t b = 0; b * Type::PARTS < job.x.parts; b++) {
            EightFactors<Type> factors(blocks);
            prefetch<LANES * Type::BYTES>(blocks[0] + STRIP * job.row_bytes + b * (LANES - 1) * Type::BYTES);
            unrolled<Type::PARTS>([&](auto s) {
                PanelPart<Type>& part = out[b * Type::PARTS + s];
                u8x32 q[LANES];
                for (int c = 0; c < LANES; c++) q[c] = int_quants<Type>(blocks[c], s);
                transpose(q, &part.q[0][g][0], sizeof part.q[0]);
                for (int h = 0; h < part.SCALES; h++) part.scales[h][g] = factors.scale(2 * s + h);
                if (Type::MINIMUM) part.offsets[g] = factors.offset(2 * s);
            });
            for (const uint8_t*& block : blocks) block += Type::BYTES;
        }
    }
}

// Products of N steps of a strip with R rows of x, `stride` apart.
template <class Type, int R, int N>
inline void multiply_steps(const uint8_t (*w)[2][32], const int8_t* x, int64_t stride,
                           i32x8 (&products)[R][2]) {
#if defined(OCTAVO_VNNI)
    for (int i = 0; i < N; i++)
        for (int r = 0; r < R; r++)
            for (int g = 0; g < 2; g++)
                products[r][g] =
                    add_products(products[r][g], read<u8x32>(w[i][g]), spread_four(x + r * stride + 4 * i));
#else
    constexpr int IN_16_BITS = std::min(N, STEPS_IN_16_BITS<Type>);
    unrolled<N / IN_16_BITS>([&](auto chunk) {
        i16x16 sums[R][2] = {};
        unrolled<IN_16_BITS>([&](auto step) {
            constexpr int i = chunk * IN_16_BITS + step;
            for (int r = 0; r < R; r++) {
                u8x32 four = spread_four(x + r * stride + 4 * i);
                for (int g = 0; g < 2; g++) sums[r][g] += pairs<Type::SIGNED>(read<u8x32>(w[i][g]), four);
            }
        });
        for (int r = 0; r < R; r++)
            for (int g = 0; g < 2; g++) products[r][g] += widened(sums[r][g]);
    });
#endif
}

template <class Type, int R>
void multiply_tile(const Matmul& job, int64_t row, int64_t column, const PanelPart<Type>* strip) {
    constexpr int SCALES = PanelPart<Type>::SCALES;
    f32x8 acc[R][2] = {};
    for (int64_t i = 0; i < job.x.parts; i++) {
        const PanelPart<Type>& part = strip[i];
        auto at = [&](int r) { return (row + r) * job.x.parts + i; };
        unrolled<SCALES>([&](auto h) {
            constexpr int steps = 8 / SCALES;
            i32x8 products[R][2] = {};
            multiply_steps<Type, R, steps>(part.q + h * steps, job.x.q.at(at(0) * PART) + 4 * h * steps,
                                           job.x.k, products);
            for (int r = 0; r < R; r++) {
                const int32_t* x_sums = job.x.half_sums.at(2 * at(r));
                int32_t x_sum = SCALES == 2 ? x_sums[h] : x_sums[0] + x_sums[1];
                for (int g = 0; g < 2; g++)
                    acc[r][g] = add_scaled<Type>(acc[r][g], products[r][g], x_sum, part.scales[h][g],
                                                 *job.x.scales.at(at(r)));
            }
        });
        if (Type::MINIMUM)
            for (int r = 0; r < R; r++)
                for (int g = 0; g < 2; g++)
                    acc[r][g] = fma8(part.offsets[g], splat(*job.x.sums.at(at(r))), acc[r][g]);
    }
    for (int r = 0; r < R; r++)
        for (int g = 0; g < 2; g++) job.finish(row + r, column + g * LANES, acc[r][g]);
}

// A panel of strips with all rows of x: few of those stay in the first cache while the panel streams by.
template <class Type>
void multiply_panel(const Matmul& job, int64_t begin, int64_t end, const PanelPart<Type>* strips) {
    auto multiply_rows = [&](int64_t row, auto tile) {
        const PanelPart<Type>* strip = strips;
        for (int64_t column = begin; column < end; column += STRIP, strip += job.x.parts)
            tile(job, row, column, strip);
    };
    int64_t row = 0, m = job.x.m;
    for (; row + 4 <= m; row += 4) multiply_rows(row, multiply_tile<Type, 4>);
    for (; row + 2 <= m; row += 2) multiply_rows(row, multiply_tile<Type, 2>);
    if (row < m) multiply_rows(row, multiply_tile<Type, 1>);
}

template <class Type>
void multiply_range(const Matmul& job, int64_t begin, int64_t end, int64_t panel) {
    if (job.x.m == 1) {
        for (int64_t column = begin; column < end; column += LANES) multiply_vector<Type>(job, 0, column);
        return;
    }
    using Part = PanelPart<Type>;
    const int64_t parts = job.x.parts;
    Part* strips = reinterpret_cast<Part*>(scratch(size_t(panel / STRIP * parts) * sizeof(Part) / 4));
    for (int64_t first = begin; first < end; first += panel) {
        int64_t last = std::min(end, first + panel);
        for (int64_t column = first; column < last; column += STRIP)
            pack_strip(job, column, strips + (column - first) / STRIP * parts);
        multiply_panel<Type>(job, first, last, strips);
    }
}

// Weight rows that are transposed together: few rows of x want them in the first cache, many in the second.
int64_t panel_rows(int64_t m, int64_t k) {
    int64_t bytes = m <= 16 ? 16 << 10 : 128 << 10;
    return std::max<int64_t>(1, bytes / (k * STRIP)) * STRIP;
}

template <class Type>
void multiply(const Matmul& job, int threads) {
    if constexpr (Type::DENSE) {
        std::abort();  // the caller sends quantized types only
    } else {
        int64_t panel = panel_rows(job.x.m, job.x.k), work = job.x.k * std::min<int64_t>(job.x.m, 16);
        int64_t step = std::max(std::min(job.n / (4 * threads), 4 * panel), 131072 / work);
        step = (step / STRIP + 1) * STRIP;
        parallel_for((job.n + step - 1) / step, threads, [&](int64_t i) {
            multiply_range<Type>(job, i * step, std::min(job.n, (i + 1) * step), panel);
        });
    }
}

}  // namespace
}  // namespace octavo

using namespace octavo;

// As octavo_matmul, for quantized types.
extern "C" void octavo_matmul_int8(const float* x, int64_t m, int64_t k, int64_t x_stride, const uint8_t* w,
                                   int64_t n, int64_t row_bytes, int type, const float* bias, float* y,
                                   int64_t y_stride, int threads) {
    if (m == 0 || n == 0) return;
    Rounded rounded{m, k};
    int64_t step = 1 + 32768 / k;
    parallel_for((m + step - 1) / step, threads, [&](int64_t task) {
        for (int64_t row = task * step; row < std::min(m, (task + 1) * step); row++)
            rounded.round_row(x + row * x_stride, row);
    });
    Matmul job{rounded, w, n, row_bytes, bias, y, y_stride};
    with_type(type, [&](auto kind) { multiply<decltype(kind)>(job, threads); });
}
OCTAVO_TAPED(octavo_matmul_int8)
