// The greedy token of each row of logits: the largest in every block of them, then its place in the best one.
#include <algorithm>

#include "simd.h"
#include "exported.h"
#include "threads.h"

namespace octavo {
namespace {

constexpr int64_t BLOCK = 1024;
constexpr int WAYS = 4;  // maxima side by side, so that none waits for the one before

// The largest; not-a-number if one of them is.
float find_peak(const float* logits, int64_t size) {
    vf top[WAYS], poison = {};
    for (vf& t : top) t = set1(-INFINITY);
    auto see = [&](vf v, vf& t) {
        t = max(v, t);
        poison = poison + (v == v ? vf{} : v);
    };
    int64_t i = 0;
    for (; i + WAYS * VL <= size; i += WAYS * VL)
        for (int way = 0; way < WAYS; way++) see(load(logits + i + way * VL), top[way]);
    for (; i < size; i++) see(set1(logits[i]), top[0]);
    return largest(max(max(top[0], top[1]), max(top[2], top[3]))) + sum(poison);
}

struct Choice {
    int64_t id;
    float max_logit;
};

Choice find_greedy(const float* logits, int64_t size) {
    int64_t best = 0;
    float max_logit = -INFINITY;
    for (int64_t first = 0; first < size; first += BLOCK) {
        float top = find_peak(logits + first, std::min(BLOCK, size - first));
        if (std::isnan(top)) return {0, top};
        if (top > max_logit) max_logit = top, best = first;
    }
    return {std::find(logits + best, logits + size - 1, max_logit) - logits, max_logit};
}

}  // namespace
}  // namespace octavo

using namespace octavo;

// ids: the lowest of the largest logits' places; max_logits: those logits. A row with a not-a-number: 0, and that.
extern "C" void octavo_greedy(const float* logits, int64_t stride, int64_t rows, int64_t size, int64_t* ids,
                                 float* max_logits, int threads) {
    parallel_for(rows, threads, [&](int64_t row) {
        Choice choice = find_greedy(logits + row * stride, size);
        ids[row] = choice.id;
        max_logits[row] = choice.max_logit;
    });
}
OCTAVO_EXPORTED(octavo_greedy)
