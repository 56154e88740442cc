// y = x W^T + bias with W in GGUF's types, for CPUs with AMX: x and the unpacked weights are rounded to bf16,
// their products are summed in float32.
//
// Weights are unpacked into strips of 16 rows, as rows of tiles. A tile product takes one factor as it is and
// one turned (pairs of k by columns), and its result lies as the first. GEMV (few rows of x): x is turned, once, and so
// is every result; they meet a piece of K of two strips at a time, in the first cache, while the next one is
// unpacked: tiles have a unit of their own, so that few rows cost hardly more than unpacking. Weights in bf16 are
// rows of tiles where they lie, and few rows cost what reading them costs; up to 512 are multiplied so. GEMM: weights
// are turned, and results are stored where they belong.
//
// Every output is one float that walks along K, 32 weights a step in the order of TDPBF16PS, whatever the number
// of rows and threads, wherever it lies and whichever factor is turned: a row of y never depends on the others.
// Where W is float32 its numbers and those of x are two bf16 numbers each: three products, and as exact as 16 bits are.
#include "amx.h"
#include "dots_bf16.h"
#include "exported.h"

#if defined(OCTAVO_TILES)

#include <type_traits>
#include <vector>

#include "gemm_bf16.h"
#include "gemv_bf16.h"
#include "threads.h"

namespace octavo {
namespace {

constexpr int64_t MOST_PANELS = 128;   // of a task: what the slower thread may be late by
constexpr int64_t FEWEST_PANELS = 16;  // nothing is computed while the first one comes
constexpr int BF16_TYPE = 30;

// Weights as they come.
struct Packed {
    const uint8_t* w;
    int64_t n, row_bytes;
    int type;
    int64_t terms = type == 0 ? 3 : 1;  // of F32, whose numbers are split

    bool lies_as_tiles(int64_t k) const { return type == BF16_TYPE && k % PART == 0; }
    // Rows of x that are turned, instead of weights.
    int64_t most_turned(int64_t k) const { return lies_as_tiles(k) ? 2 * MOST_IN_PLACE_ROWS : MOST_GEMV_ROWS; }

    Matmul job(const Rounded& x, const float* bias, float* y, int64_t y_stride, Gate gate) const {
        Matmul job{x, w, n, row_bytes, nullptr, bias, y, y_stride, gate};
        job.in_place = lies_as_tiles(x.k);
        with_type(type, [&](auto kind) {
            using Type = decltype(kind);
            job.unpack = unpack_piece<Type>;
            if constexpr (!Type::DENSE) job.in_blocks = Type::PARTS > 1;
        });
        return job;
    }
};

TileShapes shapes_for(const Rounded& x) {
    TileShapes shapes;
    for (int i = 0; i < 8; i++) {
        bool whole = x.many || i == 4 || i == 5;
        shapes.set(i, TILE_ROWS, whole ? TILE_BYTES : int(4 * x.width));
    }
    return shapes;
}

// x is rounded. found: becomes what each task has seen, in the order of outputs, and y is not written.
void gemv(const Matmul& job, int threads, std::vector<Greedy>* found = nullptr) {
    const TileShapes shapes = shapes_for(job.x);
    const int64_t columns = job.panel_columns(), panels = divide_up(job.n, columns);
    // Rows that lie so far apart share a few places of the first cache, which is felt where x has several turns. Small
    // experts gain nothing by a copy.
    const bool is_crowded = job.row_bytes % 4096 == 0 && job.x.num_tiles > 3 && !job.x.entries;
    const int64_t whole = job.in_place && !is_crowded ? job.n / columns * columns : 0;
    const int64_t each = std::clamp<int64_t>(panels / (FEWEST_PANELS * threads), 1, TASKS_PER_THREAD);
    const int64_t fair = std::max(each * threads, panels / MOST_PANELS);
    const int64_t tasks = std::min(panels, round_up(fair, threads));
    if (found) found->resize(size_t(tasks));
    parallel_for(tasks, threads, [&](int64_t i) {
        Tiles tiles(shapes);
        Matmul its = job;
        if (found) its.greedy = &(*found)[size_t(i)];
        const int64_t begin = panels * i / tasks * columns, end = panels * (i + 1) / tasks * columns;
        if (begin < whole) gemv<InPlace>(its, begin, std::min(whole, end));
        if (end > whole) gemv<Unpacked>(its, std::max(whole, begin), std::min(job.n, end));
    });
}

// Call body(first, count) for all of `m` rows of x, no more at a time than are turned.
template <class Body>
void in_turns(int64_t m, Body&& body) {
    const int64_t each = divide_up(m, divide_up(m, MOST_IN_PLACE_ROWS));
    for (int64_t first = 0; first < m; first += each) body(first, std::min(each, m - first));
}

void multiply(const float* x, int64_t m, int64_t k, int64_t x_stride, const Packed& weights,
              const float* bias, float* y, int64_t y_stride, Gate gate, int threads, Activate activate = nullptr) {
    if (m == 0 || weights.n == 0) return;
    auto job_of = [&](const Rounded& rows, float* to) {
        Matmul job = weights.job(rows, bias, to, y_stride, gate);
        job.activate = activate;
        return job;
    };
    if (m > weights.most_turned(k)) {
        const Rounded all{m, k, true, nullptr, weights.terms};
        return gemm(job_of(all, y), x, x_stride, shapes_for(all), threads);
    }
    in_turns(m, [&](int64_t first, int64_t rows) {
        const Rounded some{rows, k, false, scratch(Rounded::floats(rows, k, weights.terms), OF_CALL), weights.terms};
        some.round_all(x + first * x_stride, x_stride, threads);
        gemv(job_of(some, y + first * y_stride), threads);
    });
}

Gate gate_of(int kind) {
    return with_activation(kind, [](auto act) -> Gate { return apply_gate<decltype(act)>; });
}

// y = act(gates) * values, times W of `down`, of `some` rows of x, more than one, by weights as they lie.
void feed_forward_in_place(Rounded some, const float* x, int64_t x_stride, const Packed& up, int kind,
                           const Packed& down, float* y, const Scatter* scatter, int threads) {
    const size_t before = Rounded::floats(some.m, some.k);
    some.data = scratch(before + Rounded::floats(some.m, up.n), OF_CALL);
    const Rounded between{some.m, up.n, false, some.data + before};
    Matmul gated = up.job(some, nullptr, nullptr, 0, gate_of(kind));
    Matmul last = down.job(between, nullptr, y, down.n, nullptr);
    gated.inner = &between, last.scatter = scatter;
    some.round_all(x, x_stride, threads);
    gemv(gated, threads);
    gemv(last, threads);
}

}  // namespace
}  // namespace octavo

using namespace octavo;

// As octavo_matmul.
extern "C" void octavo_matmul_bf16(const float* x, int64_t m, int64_t k, int64_t x_stride, const uint8_t* w,
                                   int64_t n, int64_t row_bytes, int type, const float* bias, float* y,
                                   int64_t y_stride, int threads) {
    multiply(x, m, k, x_stride, {w, n, row_bytes, type}, bias, y, y_stride, nullptr, threads);
}
OCTAVO_EXPORTED(octavo_matmul_bf16)

// octavo_matmul_bf16, and the activation of number `kind` of each output.
extern "C" void octavo_activated_matmul_bf16(const float* x, int64_t m, int64_t k, int64_t x_stride,
                                             const uint8_t* w, int64_t n, int64_t row_bytes, int type,
                                             const float* bias, int kind, float* y, int threads) {
    auto activate = with_activation(kind, [](auto act) -> Activate { return apply_to_all<decltype(act)>; });
    multiply(x, m, k, x_stride, {w, n, row_bytes, type}, bias, y, n, nullptr, threads, activate);
}
OCTAVO_EXPORTED(octavo_activated_matmul_bf16)

// octavo_matmul_bf16 of at most MOST_GEMV_ROWS rows, then octavo_greedy of what it gives.
extern "C" void octavo_greedy_matmul_bf16(const float* x, int64_t m, int64_t k, int64_t x_stride,
                                          const uint8_t* w, int64_t n, int64_t row_bytes, int type,
                                          int64_t* ids, float* max_logits, int threads) {
    const Packed weights{w, n, row_bytes, type};
    const Rounded rounded{m, k, false, scratch(Rounded::floats(m, k, weights.terms), OF_CALL), weights.terms};
    std::vector<Greedy> found;
    const Matmul job = weights.job(rounded, nullptr, nullptr, 0, nullptr);
    rounded.round_all(x, x_stride, threads);
    gemv(job, threads, &found);
    for (int64_t row = 0; row < m; row++) {
        Choice best;
        for (const Greedy& each : found) best.add(each.of_row(row, rounded.width));
        ids[row] = best.id, max_logits[row] = best.max_logit;
    }
}
OCTAVO_EXPORTED(octavo_greedy_matmul_bf16)

// octavo_activation of the product with 2 n rows, gates before values; y: [m, n].
extern "C" void octavo_gated_matmul_bf16(const float* x, int64_t m, int64_t k, int64_t x_stride,
                                         const uint8_t* w, int64_t n, int64_t row_bytes, int type, int kind,
                                         float* y, int threads) {
    multiply(x, m, k, x_stride, {w, n, row_bytes, type}, nullptr, y, n, gate_of(kind), threads);
}
OCTAVO_EXPORTED(octavo_gated_matmul_bf16)

// octavo_gated_matmul_bf16 with `up`, whose outputs are `inner`, then octavo_matmul_bf16 with `down`; y: [m, n].
// For more than MOST_GEMV_ROWS rows, and whole parts of `inner`.
extern "C" void octavo_feed_forward_bf16(const float* x, int64_t m, int64_t k, int64_t x_stride,
                                         const uint8_t* up, int64_t inner, int64_t up_bytes, int up_type,
                                         int kind, const uint8_t* down, int64_t n, int64_t down_bytes,
                                         int down_type, float* y, int threads) {
    const Packed first{up, inner, up_bytes, up_type}, second{down, n, down_bytes, down_type};
    if (m <= std::min(first.most_turned(k), second.most_turned(inner)))
        return in_turns(m, [&](int64_t done, int64_t rows) {
            feed_forward_in_place({rows, k, false, nullptr}, x + done * x_stride, x_stride, first, kind, second,
                                  y + done * n, nullptr, threads);
        });
    const Rounded all{m, k, true, nullptr}, between{m, inner, true, nullptr};
    const Matmul widening = first.job(all, nullptr, nullptr, 0, gate_of(kind));
    feed_forward(widening, second.job(between, nullptr, y, n, nullptr), x, x_stride, shapes_for(all), threads);
}
OCTAVO_EXPORTED(octavo_feed_forward_bf16)

// Of an expert with weights in bf16, whole parts and panels: octavo_gated_matmul_bf16 with `up`, whose outputs are
// `inner`, times `down`. Row i of m > 1 is row entries[i] / top_k of x, and is added to that of y, times
// weights[entries[i]]. Rows are turned instead of weights, which many small experts lay out more often than it pays.
extern "C" void octavo_expert_bf16(const float* x, int64_t x_stride, int64_t m, int64_t k, const uint8_t* up,
                                   int64_t inner, int64_t up_bytes, int kind, const uint8_t* down,
                                   int64_t down_bytes, const int32_t* entries, int64_t top_k, const float* weights,
                                   float* y, int threads) {
    const Packed first{up, inner, up_bytes, BF16_TYPE}, second{down, k, down_bytes, BF16_TYPE};
    in_turns(m, [&](int64_t done, int64_t rows) {
        Rounded some{rows, k, false, nullptr};
        some.entries = entries + done, some.top_k = top_k;
        const Scatter scatter{some.entries, top_k, weights, y, k};
        feed_forward_in_place(some, x, x_stride, first, kind, second, nullptr, &scatter, threads);
    });
}

#elif defined(OCTAVO_DOTS)

using namespace octavo;

extern "C" void octavo_matmul_bf16(const float* x, int64_t m, int64_t k, int64_t x_stride, const uint8_t* w,
                                   int64_t n, int64_t row_bytes, int type, const float* bias, float* y,
                                   int64_t y_stride, int threads) {
    dots::multiply({x, m, k, x_stride, w, n, row_bytes, bias, y, y_stride, nullptr}, type, threads);
}
OCTAVO_EXPORTED(octavo_matmul_bf16)

extern "C" void octavo_gated_matmul_bf16(const float* x, int64_t m, int64_t k, int64_t x_stride,
                                         const uint8_t* w, int64_t n, int64_t row_bytes, int type, int kind,
                                         float* y, int threads) {
    dots::multiply({x, m, k, x_stride, w, n, row_bytes, nullptr, y, n, vector_gate(kind)}, type, threads);
}
OCTAVO_EXPORTED(octavo_gated_matmul_bf16)

#endif

// By what the functions above multiply in bf16; 0: they may not be called.
extern "C" int octavo_bf16_products() {
#if defined(OCTAVO_DOTS) && !defined(OCTAVO_TILES)
    return 1;
#else
    return octavo::tiles_usable() ? 2 : 0;
#endif
}
