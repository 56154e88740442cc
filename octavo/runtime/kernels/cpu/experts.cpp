// Experts: which of them take a token, and their feed-forward blocks by the products of dense layers.
//
// Tokens are sorted by expert, so that a matrix is read once for all its tokens. An expert's rows are computed some at
// a time, which bounds the work space. Every token gets its experts' outputs in ascending order of experts, each a row
// that depends on no other row: so its sum is the same in any company.
#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "amx.h"
#include "exported.h"
#include "rows.h"
#include "threads.h"

extern "C" {
int octavo_bf16_products();
void octavo_matmul(const float*, int64_t, int64_t, int64_t, const uint8_t*, int64_t, int64_t, int, const float*,
                   float*, int64_t, int);
void octavo_matmul_bf16(const float*, int64_t, int64_t, int64_t, const uint8_t*, int64_t, int64_t, int, const float*,
                        float*, int64_t, int);
void octavo_matmul_integers(const float*, int64_t, int64_t, int64_t, const uint8_t*, int64_t, int64_t, int,
                            const float*, float*, int64_t, int, int);
void octavo_expert_bf16(const float*, int64_t, int64_t, int64_t, const uint8_t*, int64_t, int64_t, int, const uint8_t*,
                        int64_t, const int32_t*, int64_t, const float*, float*, int);
void octavo_activation(const float*, int64_t, int64_t, int, int, float*, int);
void octavo_add_low_rank(const float*, int64_t, int64_t, int64_t, float*, int64_t, const int32_t*, const int64_t*,
                         const int32_t*, int64_t, const float*, int, int);
}

namespace octavo {
namespace {

constexpr int64_t MOST_ROWS = 1024;  // of an expert that are computed together
constexpr float LOWEST = -std::numeric_limits<float>::infinity();

enum Scores { SOFTMAX, SIGMOID, LOGITS };

struct Router {
    int64_t experts, top_k;
    const float* bias;
    int scores, normalises;
    float epsilon, factor;
    int64_t groups, top_groups, best_of_group;

    // The weights of a softmax over n logits, in place.
    static void softmax(float* x, int64_t n) {
        float top = *std::max_element(x, x + n), total = 0;
        for (int64_t i = 0; i < n; i++) total += x[i] = std::exp(x[i] - top);
        for (int64_t i = 0; i < n; i++) x[i] /= total;
    }

    // Closes the experts of all but the best groups.
    void close_groups(float* choice) const {
        const int64_t size = experts / groups;
        std::vector<float> values(static_cast<size_t>(groups), 0.0f), sorted(static_cast<size_t>(size));
        for (int64_t g = 0; g < groups; g++) {
            const auto best = sorted.begin() + best_of_group;
            std::partial_sort_copy(choice + g * size, choice + (g + 1) * size, sorted.begin(), best,
                                   std::greater<float>());
            for (auto each = sorted.begin(); each < best; each++) values[size_t(g)] += *each;
        }
        std::vector<char> open(static_cast<size_t>(groups), 0);
        for (int64_t i = 0; i < top_groups; i++) {
            const auto best = std::max_element(values.begin(), values.end());
            open[size_t(best - values.begin())] = 1, *best = LOWEST;
        }
        for (int64_t e = 0; e < experts; e++)
            if (!open[size_t(e / size)]) choice[e] = LOWEST;
    }

    void route(const float* logits, int32_t* ids, float* weights) const {
        std::vector<float> score(logits, logits + experts);
        if (!std::all_of(score.begin(), score.end(), [](float s) { return std::isfinite(s); })) {
            for (int64_t i = 0; i < top_k; i++) ids[i] = int32_t(i), weights[i] = NAN;
            return;
        }
        if (scores == SOFTMAX) softmax(score.data(), experts);
        if (scores == SIGMOID)
            for (float& s : score) s = 1.0f / (1.0f + std::exp(-s));
        std::vector<float> choice = score;
        for (int64_t e = 0; bias && e < experts; e++) choice[size_t(e)] += bias[e];
        if (groups > 1) close_groups(choice.data());
        for (int64_t i = 0; i < top_k; i++) {
            const auto best = std::max_element(choice.begin(), choice.end());
            const auto id = size_t(best - choice.begin());
            ids[i] = int32_t(id), weights[i] = score[id], *best = LOWEST;
        }
        if (scores == LOGITS) softmax(weights, top_k);
        float total = epsilon;
        for (int64_t i = 0; i < top_k; i++) total += weights[i];
        for (int64_t i = 0; i < top_k; i++) weights[i] *= normalises ? factor / total : factor;
    }
};

enum Way { FLOAT, INT8, INT16, BFLOAT16 };

// The same matrix of all experts, `stride` bytes apart.
struct Matrices {
    const uint8_t* w;
    int64_t n, row_bytes, stride;
    int type, way;

    const uint8_t* of(int64_t expert) const { return w + expert * stride; }

    void multiply(const float* x, int64_t m, int64_t k, int64_t x_stride, int64_t expert, int64_t rows,
                  const float* bias, float* y, int64_t y_stride, int threads) const {
        if (way == INT8 || way == INT16)
            return octavo_matmul_integers(x, m, k, x_stride, of(expert), rows, row_bytes, type, bias, y, y_stride, way,
                                          threads);
#if defined(OCTAVO_TILES) || defined(OCTAVO_DOTS)
        if (way == BFLOAT16 && octavo_bf16_products())
            return octavo_matmul_bf16(x, m, k, x_stride, of(expert), rows, row_bytes, type, bias, y, y_stride, threads);
#endif
        octavo_matmul(x, m, k, x_stride, of(expert), rows, row_bytes, type, bias, y, y_stride, threads);
    }
};

// What adapters change: of each token its slot, of both products what octavo_add_low_rank reads.
struct Changes {
    const int32_t* slots;
    int is_bf16;
    const int64_t *up, *down;
    const int32_t *up_bounds, *down_bounds;
};

struct Experts {
    const float* x;
    int64_t tokens, size, x_stride;
    const int32_t* ids;
    const float* weights;
    int64_t top_k, experts;
    Matrices gate, up, down;
    const float *up_bias, *down_bias;
    int activation, weighs_inputs;
    float limit, alpha;
    Changes changes;
    float* y;
    int threads;

    // Gates and values of all experts are the rows of one matrix each.
    bool is_joined() const {
        return gate.w + gate.n * gate.row_bytes == up.w && gate.type == up.type && gate.stride == up.stride;
    }

#if defined(OCTAVO_TILES)
    // Weights in bf16 (type 30) lie as rows of tiles, and between the products is nothing but a gate.
    bool is_in_place() const {
        const bool is_bf16 = gate.way == BFLOAT16 && gate.type == 30 && down.type == 30 && octavo_bf16_products();
        const bool is_bare = !up_bias && !down_bias && limit <= 0 && !changes.slots && !weighs_inputs;
        return is_bf16 && is_bare && is_joined() && size % 32 == 0 && up.n % 32 == 0;
    }
#endif

    // See ExpertForm.limit.
    void clamp_and_activate(const float* both, int64_t m, int64_t inner, float* out) const {
        auto act = [&](auto gate, auto value) { return gate * sigmoid(gate * alpha) * (value + 1.0f); };
        const vf top = set1(limit);
        for_rows(m, 4 * inner, threads, [&](int64_t r) {
            const float *gate = both + r * 2 * inner, *value = gate + inner;
            float* to = out + r * inner;
            walk(
                inner,
                [&](int64_t i) {
                    vf v = max(-top, -max(-top, -load(value + i)));
                    store(to + i, act(-max(-top, -load(gate + i)), v));
                },
                [&](int64_t i) {
                    to[i] = act(set1(std::min(gate[i], limit)), set1(std::clamp(value[i], -limit, limit)))[0];
                });
        });
    }

    // One expert's output for the tokens of these entries of the routing.
    void compute(int64_t expert, const int32_t* entries, int64_t m, float* space) const {
        const int64_t inner = up.n;
#if defined(OCTAVO_TILES)
        if (m > 1 && is_in_place())
            return octavo_expert_bf16(x, x_stride, m, size, gate.of(expert), inner, gate.row_bytes, activation,
                                      down.of(expert), down.row_bytes, entries, top_k, weights, y, threads);
#endif
        float *rows = space, *both = rows + m * size, *between = both + m * 2 * inner, *out = rows;
        const bool is_alone = m == 1 && !weighs_inputs;
        if (!is_alone)
            for_rows(m, size, threads, [&](int64_t r) {
                const float* from = x + entries[r] / top_k * x_stride;
                const float factor = weighs_inputs ? weights[entries[r]] : 1.0f;
                for (int64_t i = 0; i < size; i++) rows[r * size + i] = from[i] * factor;
            });
        const float* from = is_alone ? x + entries[0] / top_k * x_stride : rows;
        const float* bias = up_bias ? up_bias + expert * 2 * inner : nullptr;
        gate.multiply(from, m, size, size, expert, is_joined() ? 2 * inner : inner, bias, both, 2 * inner, threads);
        if (!is_joined())
            up.multiply(from, m, size, size, expert, inner, bias ? bias + inner : nullptr, both + inner, 2 * inner,
                        threads);
        std::vector<int32_t> keys;
        for (int64_t r = 0; changes.slots && r < m; r++)
            keys.push_back(changes.slots[entries[r] / top_k] * int32_t(experts) + int32_t(expert));
        if (changes.slots)
            octavo_add_low_rank(from, size, m, size, both, 2 * inner, keys.data(), changes.up, changes.up_bounds, 2,
                                nullptr, changes.is_bf16, threads);
        if (limit > 0) clamp_and_activate(both, m, inner, between);
        else octavo_activation(both, m, inner, activation, 1, between, threads);
        down.multiply(between, m, inner, inner, expert, size, down_bias ? down_bias + expert * size : nullptr, out,
                      size, threads);
        if (changes.slots)
            octavo_add_low_rank(between, inner, m, inner, out, size, keys.data(), changes.down, changes.down_bounds, 1,
                                nullptr, changes.is_bf16, threads);
        for_rows(m, size, threads, [&](int64_t r) {
            float* to = y + entries[r] / top_k * size;
            const vf factor = set1(weighs_inputs ? 1.0f : weights[entries[r]]);
            walk(
                size, [&](int64_t i) { store(to + i, load(to + i) + load(out + r * size + i) * factor); },
                [&](int64_t i) { to[i] += out[r * size + i] * factor[0]; });
        });
    }

    void compute_all() const {
        const int64_t entries = tokens * top_k;
        std::vector<int32_t> begin(size_t(experts + 1), 0), sorted(static_cast<size_t>(entries));
        for (int64_t i = 0; i < entries; i++)
            if (ids[i] >= 0) begin[size_t(ids[i]) + 1]++;  // else other ranks have it
        int64_t most = 0;
        for (size_t e = 0; e < size_t(experts); e++) {
            most = std::max<int64_t>(most, begin[e + 1]);
            begin[e + 1] += begin[e];
        }
        std::vector<int32_t> next(begin.begin(), begin.end() - 1);
        for (int64_t i = 0; i < entries; i++)
            if (ids[i] >= 0) sorted[size_t(next[size_t(ids[i])]++)] = int32_t(i);
        float* space = scratch(size_t(std::min(most, MOST_ROWS) * (size + 3 * up.n)), OF_EXPERTS);
        for (int64_t e = 0; e < experts; e++)
            for (int64_t first = begin[size_t(e)], end = begin[size_t(e) + 1]; first < end; first += MOST_ROWS)
                compute(e, sorted.data() + first, std::min(MOST_ROWS, end - first), space);
    }
};

}  // namespace
}  // namespace octavo

using namespace octavo;

// See Router. ids, weights: [tokens, top_k]
extern "C" void octavo_route(const float* logits, int64_t stride, int64_t tokens, int64_t experts, const float* bias,
                             int64_t top_k, int scores, int normalises, float epsilon, float factor, int64_t groups,
                             int64_t top_groups, int64_t best_of_group, int32_t* ids, float* weights, int threads) {
    const Router router{experts, top_k, bias, scores, normalises, epsilon, factor, groups, top_groups, best_of_group};
    for_rows(tokens, 8 * experts, threads, [&](int64_t t) {
        router.route(logits + t * stride, ids + t * top_k, weights + t * top_k);
    });
}
OCTAVO_EXPORTED(octavo_route)

// y: the sum of each token's experts, and of `shared` (times the sigmoid of shared_gate). Ways: see Way.
extern "C" void octavo_experts(const float* x, int64_t tokens, int64_t size, int64_t x_stride, const int32_t* ids,
                               const float* weights, int64_t top_k, int64_t experts, const uint8_t* gate,
                               int64_t inner, int64_t gate_bytes, int64_t gate_stride, int gate_type, int gate_way,
                               const uint8_t* up, int64_t, int64_t up_bytes, int64_t up_stride, int up_type,
                               int up_way, const uint8_t* down, int64_t outputs, int64_t down_bytes,
                               int64_t down_stride, int down_type, int down_way, const float* up_bias,
                               const float* down_bias, int activation, int weighs_inputs, float limit, float alpha,
                               const float* shared, int64_t shared_stride, const float* shared_gate, int64_t shared_gate_stride,
                               const int32_t* slots, int is_bf16, const int64_t* up_changes,
                               const int32_t* up_bounds, const int64_t* down_changes, const int32_t* down_bounds,
                               float* y, int threads) {
    for_rows(tokens, size, threads, [&](int64_t t) {
        const float factor = shared_gate ? 1.0f / (1.0f + std::exp(-shared_gate[t * shared_gate_stride])) : 1.0f;
        for (int64_t i = 0; i < size; i++) y[t * size + i] = shared ? shared[t * shared_stride + i] * factor : 0.0f;
    });
    Experts{x, tokens, size, x_stride, ids, weights, top_k, experts,
            {gate, inner, gate_bytes, gate_stride, gate_type, gate_way},
            {up, inner, up_bytes, up_stride, up_type, up_way},
            {down, outputs, down_bytes, down_stride, down_type, down_way},
            up_bias, down_bias, activation, weighs_inputs, limit, alpha,
            {slots, is_bf16, up_changes, down_changes, up_bounds, down_bounds}, y, threads}
        .compute_all();
}
OCTAVO_EXPORTED(octavo_experts)
