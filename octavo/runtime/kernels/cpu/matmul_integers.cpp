// y = x W^T + bias with W in GGUF's quantized types and x rounded to integers, 32 values to a scale.
//
// Integers are summed exactly over the weights that share a scale; then one fused multiply-add per scale (and
// one per offset), from the first part to the last: every output is one float that walks along K, the same for
// every number of rows, of threads, and in every place. Eight outputs make a vector. One row of x: products of
// eight weight rows are added across lanes in registers. More rows: a strip of weight rows at a time is transposed
// into work space, four bytes of every row in turn, and meets some rows of x in a register tile. With vectors of
// 64 bytes BLOCK parts stay in the first cache until ROWS_AT_ONCE rows have met them, while sums wait.
#include <algorithm>
#include <limits>

#include "integers.h"
#include "exported.h"
#include "threads.h"

namespace octavo {
namespace {

constexpr int STRIP = 2 * WIDTH;  // weight rows that are transposed together
#if defined(OCTAVO_WIDE)
constexpr bool IN_BLOCKS = true;
constexpr int64_t BLOCK = 8, ROWS_AT_ONCE = 64, PANEL_BYTES = 384 << 10;
#else  // all parts of a strip: where sums have no registers anyway, keeping them costs more than it gains
constexpr bool IN_BLOCKS = false;
constexpr int64_t BLOCK = std::numeric_limits<int64_t>::max(), ROWS_AT_ONCE = TILE_ROWS, PANEL_BYTES = 128 << 10;
#endif
constexpr int64_t ROWS_OF_TASK = 256;

struct Span {
    int64_t begin, end;
};

template <class X>
struct Matmul {
    const QuantizedPart<X>* x;
    int64_t m, parts;  // rows of x, parts of a row
    const uint8_t* w;
    int64_t n, row_bytes;
    const float* bias;
    float* y;
    int64_t y_stride;

    // A vector of outputs of one row, less or none where the weight rows end.
    template <class V>
    OCTAVO_INLINE void finish(int64_t row, int64_t column, V acc) const {
        constexpr int64_t COUNT = sizeof(V) / sizeof(float);
        float* out = y + row * y_stride + column;
        if (column + COUNT <= n) {
            if (bias) acc = acc + read<V>(bias + column);
            write(out, acc);
        } else {
            float each[COUNT];
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
template <class Type, class X, class F, class I>
OCTAVO_INLINE F add_scaled(F acc, I products, int32_t x_sum, F scale, float x_scale) {
    constexpr int zero = INT_ZERO<Type, X>;
    if (zero != 0) products = products - (I{} + x_sum) * zero;
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

// One part of a strip, as the tile reads it.
template <class Type, class X>
struct PanelPart {
    static constexpr int SCALES = Type::HALVES ? 2 : 1;
    uint8_t q[8 * WeightForm<X>::VECTORS][2][4 * WIDTH];  // step by step, four bytes of each row
    TileFloats scales[SCALES][2];
    TileFloats offsets[2];  // if Type::MINIMUM
};

// Parts first … first + count - 1 of a strip, whole blocks. By itself, compilers give it registers enough.
template <class Type, class X>
__attribute__((noinline)) void pack_strip(const Matmul<X>& job, int64_t column, int64_t first, int64_t count, PanelPart<Type, X>* out) {
    for (int eight = 0; eight < STRIP / LANES; eight++) {
        const uint8_t* blocks[LANES];
        job.rows_from(column + eight * LANES, blocks);
        const int64_t begin = first / Type::PARTS, end = divide_up(first + count, Type::PARTS);
        for (const uint8_t*& block : blocks) block += begin * Type::BYTES;
        for (int64_t b = begin; b < end; b++) {
            EightFactors<Type> factors(blocks);
            prefetch<LANES * Type::BYTES>(blocks[0] + STRIP * job.row_bytes + b * (LANES - 1) * Type::BYTES);
            unrolled<Type::PARTS>([&](auto s) {
                PanelPart<Type, X>& part = out[(b - begin) * Type::PARTS + s];
                Operand<WeightForm<X>> q[LANES];
                for (int c = 0; c < LANES; c++) q[c] = int_quants<Type, X>(blocks[c], s);
                for (int v = 0; v < WeightForm<X>::VECTORS; v++) {
                    u8x32 rows[LANES];
                    for (int c = 0; c < LANES; c++) rows[c] = q[c].vectors[v];
                    transpose(rows, part.q[8 * v][0] + 4 * LANES * eight, sizeof part.q[0]);
                }
                for (int h = 0; h < part.SCALES; h++)
                    write((float*)part.scales[h] + LANES * eight, factors.scale(2 * s + h));
                if (Type::MINIMUM) write((float*)part.offsets + LANES * eight, factors.offset(2 * s));
            });
            for (const uint8_t*& block : blocks) block += Type::BYTES;
        }
    }
}

// Parts first … first + count - 1 of a strip with R rows of x; `sums`: of each row, those up to there. Lines of
// outputs are fetched a block before they are written: to wait for them takes longer than to compute them.
template <class Type, class X, int R>
void multiply_tile(const Matmul<X>& job, int64_t row, int64_t column, int64_t first, int64_t count,
                   const PanelPart<Type, X>* strip, float* sums) {
    constexpr int SCALES = PanelPart<Type, X>::SCALES;
    TileFloats acc[R][2];
    for (int r = 0; r < R; r++)
        for (int g = 0; g < 2; g++)
            acc[r][g] = IN_BLOCKS && first > 0 ? read<TileFloats>(sums + r * STRIP + g * WIDTH) : TileFloats{};
    const QuantizedPart<X>* x = job.x + row * job.parts + first;
    const int64_t left = job.parts - first - count;
    if (IN_BLOCKS && left > 0 && left <= BLOCK)
        for (int r = 0; r < R; r++) prefetch<STRIP * sizeof(float)>((const uint8_t*)(job.y + (row + r) * job.y_stride + column));
    for (int64_t i = 0; i < count; i++, x++, strip++) {
        const PanelPart<Type, X>& part = *strip;
        unrolled<SCALES>([&](auto h) {
            TileSums products[R][2] = {};
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
                    acc[r][g] = fma8(part.offsets[g], all_lanes<TileFloats>(x[r * job.parts].sum), acc[r][g]);
    }
    const bool last = !IN_BLOCKS || first + count == job.parts;
    for (int r = 0; r < R; r++)
        for (int g = 0; g < 2; g++)
            if (last)
                job.finish(row + r, column + g * WIDTH, acc[r][g]);
            else
                write(sums + r * STRIP + g * WIDTH, acc[r][g]);
}

// Some outputs of some rows. More rows than ROWS_AT_ONCE: a panel of strips is transposed before they come.
template <class Type, class X>
void multiply_range(const Matmul<X>& job, Span columns, Span rows, int64_t panel) {
    if (job.m == 1) {
        for (int64_t column = columns.begin; column < columns.end; column += LANES)
            multiply_vector<Type>(job, 0, column);
        return;
    }
    using Part = PanelPart<Type, X>;
    const bool few = rows.end - rows.begin <= ROWS_AT_ONCE;
    Part* space = reinterpret_cast<Part*>(
        scratch(size_t(few ? std::min(BLOCK, job.parts) : panel / STRIP * job.parts) * sizeof(Part) / sizeof(float)));
    alignas(64) float sums[ROWS_AT_ONCE * STRIP];
    for (int64_t first = columns.begin; first < columns.end; first += panel) {
        const int64_t last = std::min(columns.end, first + panel);
        for (int64_t column = first; column < last && !few; column += STRIP)
            pack_strip(job, column, 0, job.parts, space + (column - first) / STRIP * job.parts);
        for (int64_t top = rows.begin; top < rows.end; top += ROWS_AT_ONCE)
            for (int64_t column = first; column < last; column += STRIP)
                for (int64_t i = 0; i < job.parts; i += BLOCK) {
                    const int64_t count = std::min(BLOCK, job.parts - i), end = std::min(rows.end, top + ROWS_AT_ONCE);
                    Part* block = few ? space : space + (column - first) / STRIP * job.parts + i;
                    if (few) pack_strip(job, column, i, count, block);
                    int64_t row = top;
                    auto multiply_rows = [&](auto r) {
                        for (; row + r <= end; row += r)
                            multiply_tile<Type, X, r>(job, row, column, i, count, block, sums + (row - top) * STRIP);
                    };
                    multiply_rows(std::integral_constant<int, TILE_ROWS>());
                    if constexpr (TILE_ROWS > 4) multiply_rows(std::integral_constant<int, 4>());
                    multiply_rows(std::integral_constant<int, 2>());
                    multiply_rows(std::integral_constant<int, 1>());
                }
    }
}

// Weight rows that are transposed together: few rows of x want them in the first cache, many in the second.
template <class X>
int64_t panel_rows(const Matmul<X>& job) {
    const int64_t bytes = job.m <= std::max<int64_t>(ROWS_AT_ONCE, 16) ? 16 << 10 : PANEL_BYTES;
    return std::max<int64_t>(1, bytes / (job.parts * PART * WeightForm<X>::VECTORS * STRIP)) * STRIP;
}

// As many tasks for every thread, of a panel and of some microseconds at least; where there are too few columns for
// that, a prompt's rows are shared, too.
template <class Type, class X>
void multiply(const Matmul<X>& job, int threads) {
    int64_t unit = job.m == 1 ? LANES : STRIP, panel = job.m == 1 ? LANES : panel_rows(job);
    int64_t work = job.n * job.parts * PART * std::min<int64_t>(job.m, 16);
    int64_t each = std::min({work / 131072 / threads, job.n / panel / threads, int64_t(16)});
    int64_t step = round_up(divide_up(job.n, threads * std::max<int64_t>(1, each)), unit);
    panel = round_up(divide_up(step, divide_up(step, panel)), unit);
    const int64_t ranges = divide_up(job.n, step);
    const int64_t most_shares = std::max<int64_t>(job.m / ROWS_OF_TASK, 1);
    const int64_t shares = std::min(divide_up(2 * threads, ranges), most_shares);
    parallel_for(ranges * shares, threads, [&](int64_t i) {
        const int64_t begin = i / shares * step, share = i % shares;
        multiply_range<Type>(job, {begin, std::min(job.n, begin + step)},
                             {job.m * share / shares, job.m * (share + 1) / shares}, panel);
    });
}

template <class X>
void quantize_rows(const float* x, int64_t m, int64_t k, int64_t x_stride, QuantizedPart<X>* out, int threads) {
    const int64_t parts = k / PART;
    for_rows(m, k, threads, [&](int64_t row) { quantize_row(x + row * x_stride, parts, out + row * parts); });
}

template <class X>
void quantize_and_multiply(const float* x, int64_t m, int64_t k, int64_t x_stride, const uint8_t* w, int64_t n,
                        int64_t row_bytes, int type, const float* bias, float* y, int64_t y_stride,
                        int threads) {
    if (m == 0 || n == 0) return;
    const size_t floats = size_t(m * k / PART) * sizeof(QuantizedPart<X>) / sizeof(float);
    auto* quantized = reinterpret_cast<QuantizedPart<X>*>(scratch(floats, OF_CALL));
    quantize_rows(x, m, k, x_stride, quantized, threads);
    Matmul<X> job{quantized, m, k / PART, w, n, row_bytes, bias, y, y_stride};
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
